#!/usr/bin/env bash
# cluster.sh: up to nine hosts on this machine, for tests on several hosts. Sourced by hosts.sh, after `top` was set to
# the project's folder. Needs root.
#
# A host is a set of namespaces: it has its own network, host name, mounts, processes and IPC, its own /tmp, /dev/shm
# and /run, an ssh server, munged and slurmd. Host n1 also runs slurmctld. A bridge in a network namespace of its own
# joins the hosts n1, n2, …, whose addresses are 10.77.0.1, 10.77.0.2, …. All hosts see the project's folder as /mnt. It
# contains a small disk, build/hosts/disk.
#
#   cluster_missing               prints the programs that a cluster needs and this machine lacks
#   cluster_start N               starts the hosts n1 … nN
#   on HOST COMMAND…              runs a command on a host, in /mnt
#   link HOST down|up|full|RATE   cuts, mends or limits (100mbit) a host's connection to the others
#   signal_host HOST SIGNAL ranks|all   sends a signal to the ranks on a host, or also to the monitor that watches them
#   cluster_stop                  ends all hosts with everything that runs there

cluster_dir=$top/build/hosts # keys, settings and logs
declare -A cluster_pid       # of the first process of each host and of the bridge's namespace
cluster_started=()           # processes to be ended

cluster_missing() {
    local program missing=()
    for program in ip tc unshare nsenter pgrep ssh sshd ssh-keygen munged slurmctld slurmd srun mpirun; do
        command -v "$program" >/dev/null || missing+=("$program")
    done
    echo "${missing[*]}"
}

cluster_write_files() {
    local i count=$1 dir=/mnt/build/hosts
    rm -rf "$cluster_dir"
    mkdir -p "$cluster_dir/disk"
    mount -t tmpfs -o size=24m tmpfs "$cluster_dir/disk"
    ssh-keygen -q -t ed25519 -N '' -f "$cluster_dir/key"
    ssh-keygen -q -t ed25519 -N '' -f "$cluster_dir/host_key"
    head -c 1024 /dev/urandom >"$cluster_dir/munge.key"
    chmod 400 "$cluster_dir/munge.key"
    echo "127.0.0.1 localhost" >"$cluster_dir/hosts"
    for ((i = 1; i <= count; i++)); do echo "10.77.0.$i n$i" >>"$cluster_dir/hosts"; done
    cat >"$cluster_dir/sshd_config" <<END
HostKey $dir/host_key
AuthorizedKeysFile $dir/key.pub
PermitRootLogin yes
StrictModes no
UsePAM no
PidFile none
END
    cat >"$cluster_dir/ssh_config" <<END
Host *
    IdentityFile $dir/key
    StrictHostKeyChecking no
    UserKnownHostsFile /dev/null
    LogLevel ERROR
END
    # A job that is queued again starts when the credentials of its first start have expired, by default after 120 s;
    # the smallest value is 5 s.
    cat >"$cluster_dir/slurm.conf" <<END
ClusterName=llama3
SlurmctldHost=n1
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
JobRequeue=1
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
StateSaveLocation=/run/slurm
SlurmdSpoolDir=/run/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd-%h.log
SlurmdParameters=config_overrides
KillWait=1
ReturnToService=2
NodeName=n[1-$count] CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
END
}

# cluster_host NAME: the first process of a host
cluster_host() {
    local name=$1 dir=/mnt/build/hosts
    mount --rbind "$top" /mnt && cd /mnt || exit 1
    mount -t tmpfs -o size=2g,mode=1777 tmpfs /tmp
    mount -t tmpfs -o size=512m,mode=1777 tmpfs /dev/shm
    mount -t tmpfs -o mode=755 tmpfs /run
    mount --bind $dir/hosts /etc/hosts
    hostname "$name"
    mkdir -p /run/sshd /run/munge /run/slurm /run/slurmd
    ip link set lo up
    until ip link show eth0 >/dev/null 2>&1; do sleep 0.02; done # cluster_start moves it into this namespace
    ip address add "10.77.0.${name#n}/24" dev eth0
    ip link set eth0 up
    /usr/sbin/sshd -f $dir/sshd_config
    munged --force --key-file=$dir/munge.key --socket=/run/munge/munge.socket.2 --pid-file=/run/munge/munged.pid \
        --seed-file=/run/munge/seed --log-file=/run/munge/munged.log
    export SLURM_CONF=$dir/slurm.conf
    [ "$name" != n1 ] || slurmctld
    slurmd
    touch /run/started
    sleep infinity &
    wait # meanwhile bash reaps the processes whose parents have ended
}

in_switch() { nsenter -t "${cluster_pid[switch]}" -n "$@"; }

on() {
    local host=$1
    shift
    nsenter -t "${cluster_pid[$host]}" -n -m -u -i -p --wdns=/mnt \
        env PWD=/mnt SLURM_CONF=/mnt/build/hosts/slurm.conf "$@"
}

# wait_for SECONDS COMMAND…: until COMMAND succeeds
wait_for() {
    local tries=$(($1 * 20))
    shift
    until "$@" >/dev/null 2>&1; do
        [ $((tries--)) -gt 0 ] || return 1
        sleep 0.05
    done
}

child_of() { pgrep -P "$1"; }
has_own_network() { [ "$(readlink "/proc/$1/ns/net")" != "$(readlink /proc/self/ns/net)" ]; }

cluster_start() {
    local count=$1 i name outer
    cluster_write_files "$count"
    unshare --net sleep infinity &
    cluster_pid[switch]=$!
    cluster_started+=("$!")
    wait_for 5 has_own_network "$!" || return
    in_switch ip link add bridge type bridge
    in_switch ip link set bridge up
    for ((i = 1; i <= count; i++)); do
        name=n$i
        unshare --net --uts --mount --pid --ipc --fork --kill-child --mount-proc \
            bash -c 'top=$1; . "$top/dev/test/cluster.sh"; cluster_host "$2"' _ "$top" "$name" \
            >"$cluster_dir/$name.log" 2>&1 &
        outer=$!
        cluster_started+=("$outer")
        wait_for 5 child_of "$outer" || return
        cluster_pid[$name]=$(child_of "$outer")
        in_switch ip link add "$name" type veth peer name eth0 netns "${cluster_pid[$name]}"
        in_switch ip link set "$name" master bridge up
    done
    for ((i = 1; i <= count; i++)); do wait_for 20 on "n$i" test -e /run/started || return; done
    wait_for 20 on n1 srun -N "$count" true
}

link() {
    local host=$1 what=$2
    case $what in
        up | down) in_switch ip link set "$host" "$what" ;;
        *)
            in_switch tc qdisc del dev "$host" root 2>/dev/null
            on "$host" tc qdisc del dev eth0 root 2>/dev/null
            [ "$what" != full ] || return 0
            in_switch tc qdisc add dev "$host" root tbf rate "$what" burst 64kb latency 50ms
            on "$host" tc qdisc add dev eth0 root tbf rate "$what" burst 64kb latency 50ms ;;
    esac
}

# A monitor of ranks leads a session of its own.
signal_host() {
    on "$1" sh -c 'for process in $(pgrep -x train_llama3); do
        session=$(ps -o sid= -p "$process" | tr -d " ")
        if [ "$2" = all ] || [ "$session" != "$process" ]; then kill -"$1" "$process"; fi
    done' _ "$2" "$3" 2>/dev/null
}

cluster_stop() {
    local pid
    for pid in ${cluster_started[@]+"${cluster_started[@]}"}; do kill -KILL "$pid" 2>/dev/null; done
    cluster_started=()
    umount -l "$cluster_dir/disk" 2>/dev/null
}
