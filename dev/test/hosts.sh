#!/usr/bin/env bash
# hosts.sh [SCENARIO…]: runs on two to four hosts (or on HOSTS=N) under mpirun and srun: they give the results of one
# host, and hosts, networks, data or directories that are not as they should be end the run with a sentence that says
# so. The hosts are namespaces of this machine (cluster.sh). Needs root.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
top=$PWD
. dev/test/checks.sh
. dev/test/cluster.sh
. dev/test/supervised.sh
. dev/test/chaos.sh
export LC_ALL=C
export CUDA_ON_CPU_REGISTERS=dev/results/cuda-kernels.txt # relative, because hosts have this folder at another place

if [ "$(id -u)" != 0 ] || [ -n "$(cluster_missing)" ]; then
    echo "left out: several hosts, which need root and these missing programs (make test-hosts): $(cluster_missing)"
    exit 1
fi
[ "${1:-}" != --possible ] || exit 0
# the small disk that hosts share is mounted in a namespace of this script, and ends with it
[ -n "${HOSTS_NAMESPACE:-}" ] || HOSTS_NAMESPACE=1 exec unshare --mount "$top/dev/test/hosts.sh" "$@"
trap cluster_stop EXIT
program=build/cpu-fp32/train_llama3
work=build/hosts/work # on the shared file system

# ---------------------------------------------------------------- launching
# launch HOSTS RANKS LAUNCHER OPTION…: starts the program with RANKS ranks spread evenly over the hosts n1 … nHOSTS, in
# the background; its output goes to $work/said
launch() {
    local count=$1 ranks=$2 launcher=$3 i list=""
    shift 3
    for ((i = 1; i <= count; i++)); do list+="${list:+,}n$i:$((ranks / count))"; done
    case $launcher in
        mpirun)
            launcher=(env GRACE=1 dev/launch/mpirun.sh --allow-run-as-root --bind-to none --oversubscribe
                --host "$list" -np "$ranks"
                --mca plm_rsh_args "-F /mnt/build/hosts/ssh_config" --mca mpi_yield_when_idle 1
                -x OMP_WAIT_POLICY=passive ${CUDA_ON_CPU_DEVICES:+-x CUDA_ON_CPU_DEVICES}) ;;
        *) launcher=($launcher -N "$count" -n "$ranks" --overcommit --export=ALL,OMP_WAIT_POLICY=passive) ;;
    esac
    : >"$work/said"
    on n1 "${launcher[@]}" "$program" "${train[@]}" "$@" </dev/null >"$work/said" 2>&1 &
    launched=$!
}

# ends SECONDS: waits for the launcher; sets `code` and `seconds`
ends() {
    local start=$EPOCHREALTIME
    code="still running after $1 s"
    if wait_for "$1" gone "$launched"; then
        wait "$launched"
        code=$?
    else
        kill -KILL "$launched"
        wait "$launched" 2>/dev/null
    fi
    seconds=$(awk -v a="$start" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.1f", b - a }')
}
gone() { ! kill -0 "$1" 2>/dev/null; }
has_steps() { [ "$(wc -l 2>/dev/null <"$1/metrics.jsonl" || echo 0)" -ge 3 ]; }

# left_over HOSTS: processes and shared memory of the program on the hosts
left_over() {
    local i
    for ((i = 1; i <= $1; i++)); do
        on "n$i" pgrep -x train_llama3 | sed "s/^/process on n$i: /"
        on "n$i" sh -c 'ls /dev/shm | grep ^llama3-' | sed "s/^/on n$i: /"
    done
}
nothing_left_over() { [ -z "$(left_over "$1")" ]; }
clean_up() {
    local i
    for ((i = 1; i <= hosts; i++)); do
        signal_host "n$i" KILL all
        on "n$i" sh -c 'rm -rf /dev/shm/llama3-* /dev/shm/vader* /tmp/ompi.*'
    done
}

# expect NAME CODES PATTERN SECONDS: the run that `launch` started ends within SECONDS with one of the exit codes, says
# PATTERN, and leaves nothing behind on any host
expect() {
    local name=$1 codes=$2 pattern=$3 limit=$4 said i
    ends "$limit"
    said=$(grep -aE '^(failure|error|problem): ' "$work/said" || tail -n 3 "$work/said" | tr '\n' ' ')
    for ((i = 1; i <= hosts; i++)); do signal_host "n$i" CONT all; done # a frozen process cannot end
    wait_for 5 nothing_left_over "$hosts" || true
    if ! [[ " $codes " == *" $code "* ]]; then fail "$name" "exit code $code, expected $codes: $said"
    elif ! grep -qaE "$pattern" "$work/said"; then fail "$name" "expected '$pattern': $said"
    elif ! nothing_left_over "$hosts"; then fail "$name" "left over: $(left_over "$hosts" | tr '\n' ' ')"
    else pass "$name" "exit code $code after $seconds s; $(grep -aE "$pattern" "$work/said" | head -n 1)"; fi
    clean_up
}

# ---------------------------------------------------------------- scenarios
prepare() {
    rm -rf "$work"
    mkdir -p "$work/model"
    dev/test/sample_text.sh "$work/sample"
    VOCAB_SIZE=600 dev/data/text.sh "$work/text" "$work/sample" >"$work/said" 2>&1 || {
        cat "$work/said"
        fail "the data" "dev/data/text.sh refuses the text of dev/test/sample_text.sh"
        exit 1
    }
    cat >"$work/model/config.json" <<'END'
{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
 "intermediate_size": 160, "vocab_size": 600, "max_position_embeddings": 256, "rope_theta": 500000}
END
    train=(--model "$work/model" --data "$work/text/train.tok" --seq 32 --batch 1 --threads 1)
    "${CC:-cc}" -shared -fPIC -O1 -o "$work/shim.so" dev/test/file_system_shim.c ||
        fail "dev/test/file_system_shim.c" "does not build"
    printf '#!/bin/sh\nPACE=/mnt/%s/pace LD_PRELOAD=/mnt/%s/shim.so exec %s "$@"\n' "$work" "$work" "$program" \
        >"$work/paced"
    chmod +x "$work/paced"
    ln -s ../../cpu-fp32/plan_llama3 "$work/plan_llama3" # where dev/launch/supervise looks for it
}
# From STEP on, runs of the program $work/paced take two seconds longer for each checkpoint, until `full_speed`: what a
# scenario does to a run in between happens before its last step on a machine of any speed.
slow_from() { echo "$1" >"$work/pace"; }
full_speed() { rm -f "$work/pace"; }

checkpoint_hash() { (cd "$1/latest" && sha256sum -- * | sha256sum | cut -c1-16); }

# the same training on one host, and on several under both launchers
same_results() {
    local launcher out reference
    "$program" "${train[@]}" --ranks 4 --steps 6 --deterministic --out "$work/one" >"$work/said" 2>&1
    reference=$(checkpoint_hash "$work/one")
    for launcher in mpirun "srun --mpi=pmix"; do
        out=$work/several-${launcher%% *}
        launch "$hosts" 4 "$launcher" --steps 6 --deterministic --out "$out"
        ends 60
        if [ "$code" = 0 ] && [ "$(checkpoint_hash "$out")" = "$reference" ]; then
            pass "$launcher, $hosts hosts: the checkpoint of 4 ranks on one host" "$reference after $seconds s"
        else
            fail "$launcher, $hosts hosts: the checkpoint of 4 ranks on one host" \
                "exit code $code: $(tail -n 2 "$work/said")"
        fi
        if grep -qE "^hosts: n1 \(ranks? 0(-[0-9])?\), n2 \(rank" "$work/said" &&
            grep -q '"hosts":\["n1",' "$out/layout.json"; then
            pass "$launcher, $hosts hosts: banner and layout.json name the hosts" "$(grep '^hosts: ' "$work/said")"
        else
            fail "$launcher, $hosts hosts: banner and layout.json name the hosts" "$(head -n 5 "$work/said")"
        fi
        clean_up
    done
}

# Ranks with a GPU each, of the emulator, over NCCL, which dev/cuda_on_cpu/nccl_processes.h emulates over MPI. Every
# host has two GPUs, so a rank's GPU is its number on its host; a host with more ranks than GPUs is refused.
gpus() {
    local launcher out reference program=build/cuda-on-mpi-fp32/train_llama3_cuda
    CUDA_ON_CPU_DEVICES=4 build/cuda-on-cpu-fp32/train_llama3_cuda "${train[@]}" --steps 4 --deterministic --ranks 4 \
        --transport nccl --out "$work/gpus" >"$work/said" 2>&1
    reference=$(checkpoint_hash "$work/gpus")
    for launcher in mpirun "srun --mpi=pmix"; do
        export CUDA_ON_CPU_DEVICES=2
        out=$work/gpus-${launcher%% *}
        launch 2 4 "$launcher" --steps 4 --deterministic --out "$out"
        ends 120
        if [ "$code" = 0 ] && [ "$(checkpoint_hash "$out")" = "$reference" ] && grep -q "over nccl" "$work/said"; then
            pass "$launcher, 2 hosts of 2 GPUs: the checkpoint of 4 GPUs on one host" "$reference after $seconds s"
        else
            fail "$launcher, 2 hosts of 2 GPUs: the checkpoint of 4 GPUs on one host" \
                "exit code $code: $(tail -n 2 "$work/said")"
        fi
        clean_up
        export CUDA_ON_CPU_DEVICES=1
        launch 2 4 "$launcher" --steps 4 --out "$work/few"
        expect "${launcher%% *}: two ranks on each host with one GPU" 1 "^error: ranks 0 and 1 share one GPU" 30
    done
    unset CUDA_ON_CPU_DEVICES
}

# srun without PMIx: each process would be a run of its own
no_pmix() {
    launch 2 2 "srun --mpi=none" --steps 2 --out "$work/alone"
    expect "srun without --mpi=pmix" 1 "^error: the launcher started 2 processes, but MPI connected only 1" 20
}

# other_contents HOST: every host gets the data as /tmp/text, and HOST one of the same length with other contents
other_contents() {
    local i
    for ((i = 1; i <= hosts; i++)); do on "n$i" sh -c "rm -rf /tmp/text; cp -r $work/text /tmp/text"; done
    on "$1" sh -c 'cd /tmp/text
        { head -c 192 train.tok; tail -c +193 train.tok | tr "\1\2\3\4" "\4\3\2\1"; } >other.tok
        mv other.tok train.tok'
}

other_data() {
    other_contents n2
    launch 2 2 mpirun --data /tmp/text/train.tok --steps 2 --out "$work/data"
    expect "other data of the same length on one host" 1 \
        "^error: the token files of rank 1 on host n2 have the size of those of rank 0 on host n1, but other " 20
}

unshared_out() {
    launch 2 2 mpirun --steps 2 --out /tmp/unshared
    expect "--out that hosts do not share" 1 \
        "^error: --out /tmp/unshared on host n2 is not the directory that host n1 has there" 20
}

other_build() {
    on n2 sh -c "cp $program /tmp/other && printf x >>/tmp/other && mount --bind /tmp/other $program"
    launch 2 2 mpirun --steps 2 --out "$work/build"
    expect "another build on one host" 0 "^note: host n2 runs another build of the program than host n1" 30
    on n2 umount "$program"
}

# interface NAME KIND SUBNET: another network interface on every host, over which they do not reach each other; with
# `same` all hosts have the same address there, like docker0
interface() {
    local i
    for ((i = 1; i <= hosts; i++)); do
        on "n$i" ip link add "$1" type $2
        on "n$i" ip address add "$3.$([ "${4:-}" = same ] && echo 1 || echo "$i")/24" dev "$1"
        on "n$i" ip link set "$1" up
        on "n$i" ip link set nowhere up 2>/dev/null
    done
}
no_interface() {
    local i
    for ((i = 1; i <= hosts; i++)); do on "n$i" ip link del "$1"; done
}

# firewall add|del: every host drops what it would answer from the ports on which Open MPI listens for messages
firewall() {
    local i
    for ((i = 1; i <= hosts; i++)); do on "n$i" ip rule "$1" ipproto tcp sport 1024-6000 blackhole; done
}

# networks over which the hosts do not reach each other
dead_networks() {
    local launcher
    for launcher in mpirun "srun --mpi=pmix"; do
        interface dead0 "veth peer name nowhere" 10.99.0
        rm -rf "$work/dead" "$work/docker"
        launch "$hosts" "$hosts" "$launcher" --steps 2 --timeout 2 --out "$work/dead"
        expect "${launcher%% *}: a network interface that leads nowhere" "0 2" \
            "nobody answered its connections from 10\.99\.0\.[0-9] to 10\.99\.0\.[0-9]|^training" 30
        no_interface dead0
        interface docker0 bridge 172.17.0 same
        launch "$hosts" "$hosts" "$launcher" --steps 2 --timeout 2 --out "$work/docker"
        expect "${launcher%% *}: docker0 with the same address on each host" "0 2" \
            "host n2 has the network interfaces .*docker0 172\.17\.0\.1/24|^training" 30
        no_interface docker0
        firewall add
        launch "$hosts" "$hosts" "$launcher" --steps 2 --timeout 2 --out "$work/walled"
        expect "${launcher%% *}: a firewall on high ports" 2 \
            "nobody answered its connections from 10\.77\.0\.[0-9] to 10\.77\.0\.[0-9] port 1" 30
        firewall del
    done
}

# preflight NAME LAUNCHER CODES PATTERN OPTION…: check_hosts says PATTERN within ten seconds, and soon ends
preflight() {
    local name=$1 launcher=$2 codes=$3 pattern=$4 start=$EPOCHREALTIME found
    shift 4
    program=build/cpu-fp32/check_hosts launch "$hosts" "$hosts" "$launcher" --threads 0 "$@"
    wait_for 10 grep -qaE "$pattern" "$work/said"
    found=$(awk -v a="$start" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.1f", b - a }')
    awk -v s="$found" 'BEGIN { exit !(s < 10) }' || pattern="^found within ten seconds"
    expect "check_hosts, ${launcher%% *}: $name, found after $found s" "$codes" "$pattern" 10
}

# check_hosts on hosts that are as they should be, and with each fault that it must find
check_hosts() {
    local launcher last=n$hosts pid
    for launcher in mpirun "srun --mpi=pmix"; do
        mkdir -p "$work/checked"
        preflight "nothing is wrong" "$launcher" 0 "^no problem found" --out "$work/checked"
        link "$last" 200mbit
        preflight "the link of a host is limited" "$launcher" 1 \
            "^problem: host $last communicates [0-9.]+ times slower than the median host"
        link "$last" full
        for pid in $(on "$last" pgrep -x 'sshd|slurmd'); do on "$last" taskset -p -c 0 "$pid" >/dev/null; done
        preflight "a host has half the cores" "$launcher" 1 \
            "^problem: host $last computes with .* and 1 cores per rank, the median host with .* and 2:"
        for pid in $(on "$last" pgrep -x 'sshd|slurmd'); do on "$last" taskset -p -c 0-1 "$pid" >/dev/null; done
        other_contents "$last"
        preflight "other data on a host" "$launcher" 1 \
            "^problem: the token files of rank [0-9] on host $last have the size .*other contents" \
            --data /tmp/text/train.tok
        on "$last" sh -c "cp $program /tmp/other && printf x >>/tmp/other && mount --bind /tmp/other $program"
        preflight "another build on a host" "$launcher" 1 "^problem: host $last has another build"
        on "$last" umount "$program"
        preflight "--out that hosts do not share" "$launcher" 1 "^problem: --out /tmp/unshared on host $last is not" \
            --out /tmp/unshared
        interface dead0 "veth peer name nowhere" 10.99.0
        preflight "a network interface that leads nowhere" "$launcher" "1 2" \
            "^problem: the network 10.99.0.0/24 \(dead0\) does not connect|nobody answered its connections from 10.99"
        no_interface dead0
        interface docker0 bridge 172.17.0 same
        preflight "docker0 with the same address on each host" "$launcher" "1 2" \
            "^problem: the network 172.17.0.0/24 \(docker0\) does not connect|interfaces .*docker0 172.17.0.1"
        no_interface docker0
    done
}

# starts_training NAME LAUNCHER: starts the run of `lost`. Now and then Open MPI's ranks do not connect ("Connection
# reset by peer", https://github.com/open-mpi/ompi/issues/9218); then it is ended, and the caller tries once more.
starts_training() {
    rm -rf "$work/lost"
    launch "$hosts" 4 "$2" --steps 100000000 --timeout 2 --out "$work/lost"
    wait_for 30 has_steps "$work/lost" && return
    echo "no steps within 30 s, ended: $1: $(tail -n 2 "$work/said" | tr '\n' ' ')"
    kill -KILL "$launched"
    clean_up
    return 1
}

# lost NAME LAUNCHER ACTION CODES PATTERN SECONDS: a run of 4 ranks, --timeout 2, that has trained for some steps when
# ACTION happens. SECONDS: until the launcher must have ended
lost() {
    local name=$1 launcher=$2 action=$3 codes=$4 pattern=$5 limit=$6
    if ! starts_training "$name" "$launcher" && ! starts_training "$name" "$launcher"; then
        fail "$name" "no steps within 30 s, twice: $(tail -n 2 "$work/said")"
        return
    fi
    eval "$action"
    expect "$name" "$codes" "$pattern" "$limit"
}

lost_hosts() {
    local launcher last=n$hosts
    for launcher in mpirun "srun --mpi=pmix"; do
        lost "${launcher%% *}, $hosts hosts: killed ranks of $last" "$launcher" "signal_host $last KILL ranks" \
            "1 2 137 143 9" "^failure: rank [0-9] on host $last .*died" 7
        lost "${launcher%% *}, $hosts hosts: a cut link to $last" "$launcher" "link $last down" "1 2 137 143 9 255" \
            "^failure: .*host $last .*does not answer" 7
        link "$last" up
        lost "${launcher%% *}, $hosts hosts: frozen processes on $last" "$launcher" "signal_host $last STOP all" \
            "1 2 137 143 9" "^failure: .*host $last .*does not answer" 7
        lost "${launcher%% *}, $hosts hosts: frozen processes on n1" "$launcher" "signal_host n1 STOP all" \
            "1 2 137 143 9" "^failure: .*host n1 .*does not answer" 7
    done
}

# Where process 1 does not reap orphans, a run leaves no zombie.
no_zombies() {
    local outer inner zombies
    unshare --pid --fork --kill-child --mount-proc sleep 60 &
    outer=$!
    wait_for 5 child_of "$outer"
    inner=$(child_of "$outer")
    nsenter -t "$inner" -p -m --wdns="$top" mpirun --allow-run-as-root --oversubscribe --bind-to none -np 2 "$program" \
        "${train[@]}" --steps 2 >"$work/said" 2>&1
    zombies=$(nsenter -t "$inner" -p -m ps -e -o stat=,comm= | grep '^Z' | tr '\n' ';')
    if [ -z "$zombies" ] && grep -q "^ranks, over 2 steps" "$work/said"; then
        pass "no zombie stays where process 1 does not reap" "$(grep -c '^step' "$work/said") steps"
    else fail "no zombie stays where process 1 does not reap" "$zombies $(tail -n 1 "$work/said")"; fi
    kill -KILL "$outer"
}

# slow_network: on two hosts with a slow link, what a run reports of its waiting is what MPI's profiling interface sees
slow_network() {
    local line program=build/cpu-fp32/test_llama3 train=(mpi network)
    link n2 200mbit
    TMPDIR=/mnt/$work launch 2 2 mpirun
    ends 120
    link n2 full
    while read -r line; do pass "${line%%: *}" "${line#*: }"; done < <(sed -n 's/^pass //p' "$work/said")
    while read -r line; do fail "${line%%: *}" "${line#*: }"; done < <(sed -n 's/^FAIL //p' "$work/said")
    [ "$code" = 0 ] || fail "the waiting on a slow network" "exit code $code: $(tail -n 1 "$work/said")"
    clean_up
}

# script NAME CODE PATTERN COMMAND: dev/launch/mpirun.sh with the shell command COMMAND as the program; its exit code is
# CODE, it prints PATTERN, and it leaves nothing of Open MPI on host n1
script() {
    local name="mpirun.sh: $1" left
    : >"$work/said"
    on n1 env GRACE=3 ERROR_GRACE="${ERROR_GRACE:-4}" dev/launch/mpirun.sh --allow-run-as-root --bind-to none \
        --oversubscribe -np 2 --mca mpi_yield_when_idle 1 "${script_options[@]}" \
        sh -c "$4" sh "${train[@]}" --out "$work/script" </dev/null >"$work/said" 2>&1 &
    launched=$!
    ends 40
    left=$(on n1 sh -c 'ls -d /tmp/ompi.*/* /dev/shm/vader*' 2>/dev/null | tr '\n' ' ')
    if [ "$code" != "$2" ]; then fail "$name" "exit code $code, expected $2: $(tail -n 2 "$work/said")"
    elif ! grep -qaE "$3" "$work/said"; then fail "$name" "expected '$3': $(tail -n 2 "$work/said")"
    elif [ -n "$left" ]; then fail "$name" "left on n1: $left"
    else pass "$name" "exit code $code after $seconds s; $(grep -aE -m1 "$3" "$work/said")"; fi
    rm -rf "$work/script"
    clean_up
}

# what dev/launch/mpirun.sh makes of lines on stderr. A frozen mpirun stands for one that waits for a lost host
mpirun_script() {
    local freeze='sleep 1; kill -STOP $PPID; sleep 60' script_options=()
    script "the last lines of the program are printed" 7 "^line 3000$" \
        'i=0; while [ $i -lt 3000 ]; do i=$((i + 1)); echo line $i >&2; done; exit 7'
    script "a hang after an error exits with 1" 1 "^mpirun.sh: mpirun has not ended 4 s" "echo error: x >&2; $freeze"
    script "a hang after a failure exits with 2" 2 "^mpirun.sh: mpirun has not ended 3 s" "echo failure: x >&2; $freeze"
    script "a line 'error: ' of a library does not end a run that trains" 0 "^step +[0-9]+.* saved" \
        'echo error: a library says this >&2
        trap : USR2
        [ "$OMPI_COMM_WORLD_RANK" != 0 ] || (sleep 6; kill -USR2 $PPID) &
        '"$program"' "$@" --steps 100000000; [ $? = 75 ]'
    ERROR_GRACE=60 script "a line 'error: ' of a library does not end a run that starts slowly" 7 \
        "^error: a library" "echo error: a library says this >&2; sleep 6; exit 7"
    script_options=(--tag-output)
    script "with --tag-output a hang after a failure exits with 2" 2 "^mpirun.sh: mpirun has not ended 3 s" \
        "echo failure: x >&2; $freeze"
    script "with --tag-output a killed rank exits with 2" 2 "<stderr>:failure: rank [01] .*died" \
        '[ "$OMPI_COMM_WORLD_RANK" != 1 ] || (sleep 3; kill -KILL $$) &
        exec '"$program"' "$@" --steps 100000000'
}

# Under srun training handles SIGTERM: it saves. After a failure the monitor's SIGTERM must still end the other ranks of
# the host at once, instead of by SIGKILL 2 s later.
rank_beside_killed() {
    local start name="srun: a rank on the host of a killed rank exits with 2 at once"
    rm -rf "$work/beside"
    launch 2 4 "srun --mpi=pmix --kill-on-bad-exit=0" --steps 100000000 --timeout 2 --out "$work/beside"
    wait_for 30 has_steps "$work/beside"
    on n2 sh -c 'kill -KILL "$(pgrep -xo train_llama3)"'
    start=$EPOCHREALTIME
    wait_for 10 grep -q "n2: task [23]: Exited with exit code 2" "$work/said"
    seconds=$(awk -v a="$start" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.1f", b - a }')
    if [ "${seconds%.*}" -lt 2 ]; then pass "$name" "$seconds s after the kill"
    else fail "$name" "not within 2 s: $(grep 'task [23]:' "$work/said" | tr '\n' ' ')"; fi
    expect "srun: a killed rank" "137 143 2" "^failure: rank [23] on host n2 .*died" 20
}

# ---------------------------------------------------------------- dev/launch/slurm.sbatch
# submit OPTION… -- OPTION…: options of sbatch and of the program; sets `job`. Output goes to $work/said
submit() {
    local options=()
    while [ "$1" != -- ]; do
        options+=("$1")
        shift
    done
    shift
    rm -rf "$work/job" "$work/said"
    job=$(on n1 env PROGRAM="$program" OMP_WAIT_POLICY=passive sbatch --parsable --nodes 2 --ntasks-per-node 2 \
        --overcommit --output "$work/said" "${options[@]}" dev/launch/slurm.sbatch "${train[@]}" "$@")
}
job_field() { on n1 scontrol show -o job "$job" | grep -oE "\b$1=[^ ]*" | cut -d= -f2; }
job_state_is() { [[ " $1 " == *" $(job_field JobState) "* ]]; }
said_times() { [ "$(grep -cE "$1" "$work/said" 2>/dev/null)" -ge "$2" ]; } # PATTERN COUNT
steps_beyond() { [ "$(wc -l 2>/dev/null <"$work/job/metrics.jsonl" || echo 0)" -gt "$1" ]; }

# job_ends NAME STATE EXIT RESTARTS PATTERN: the job ends in this state, with this exit code after as many restarts
job_ends() {
    local ended
    wait_for 60 job_state_is "COMPLETED FAILED CANCELLED TIMEOUT"
    sleep 1 # a job that is queued again leaves that state
    ended="$(job_field JobState) $(job_field ExitCode) after $(job_field Restarts) restarts"
    wait_for 5 nothing_left_over "$hosts"
    if [ "$ended" = "$2 $3 after $4 restarts" ] && grep -qE "$5" "$work/said" && nothing_left_over "$hosts"; then
        pass "$1" "$ended; $(grep -E -m1 "$5" "$work/said")"
    else
        fail "$1" "$ended, expected $2 $3 after $4 and '$5': $(tail -n 3 "$work/said" | tr '\n' ' ')" \
            "$(left_over "$hosts")"
        on n1 scancel "$job"
    fi
    clean_up
}

# requeued NAME COUNT CODE ACTION: some steps after its last start the job gets ACTION and is queued again, for the
# COUNT-th time, because the program has exited with CODE
requeued() {
    local name=$1 count=$2 pattern="^slurm.sbatch: exit code $3; the job is queued again"
    wait_for 30 steps_beyond $((count * 300))
    eval "$4"
    if wait_for 30 said_times "^slurm.sbatch: .*is queued again" "$count" &&
        grep -E "^slurm.sbatch: " "$work/said" | sed -n "${count}p" | grep -qE "$pattern"; then
        pass "$name" "$(grep -E "^slurm.sbatch: " "$work/said" | sed -n "${count}p")"
    else fail "$name" "expected '$pattern': $(tail -n 3 "$work/said" | tr '\n' ' ')"; fi
    wait_for 30 said_times "^resumed from " "$count"
}

# One job that is signalled and killed again and again. The signal that Slurm sends before the time limit is emulated by
# scancel here; slurm_time_limit waits for the real one.
slurm_jobs() {
    local reference resumed
    "$program" "${train[@]}" --ranks 4 --steps 1500 --deterministic --out "$work/whole" >"$work/said" 2>&1
    reference=$(checkpoint_hash "$work/whole")
    slow_from 300
    program=$work/paced submit -- --steps 1500 --deterministic --save-every 100 --out "$work/job"
    requeued "sbatch: SIGUSR2 to the ranks saves and queues the job again" 1 75 \
        'on n1 timeout 5 scancel --signal=USR2 "$job"'
    requeued "sbatch: SIGUSR2 to the batch script does so too" 2 75 \
        'on n1 timeout 5 scancel --batch --signal=USR2 "$job"'
    requeued "sbatch: after a killed rank the job is queued again" 3 "(2|9|137|143)" \
        'on n2 sh -c "kill -KILL \$(pgrep -xo train_llama3)"'
    full_speed
    job_ends "sbatch: after three restarts the job ends" COMPLETED 0:0 3 "^resumed from .*/step-0"
    resumed=$(grep -E "^resumed from " "$work/said" | grep -oE "step-[0-9]+" | tr '\n' ' ')
    if [ "$(checkpoint_hash "$work/job")" = "$reference" ]; then
        pass "sbatch: the checkpoint of a run without interruption" "$reference, after resuming from $resumed"
    else fail "sbatch: the checkpoint of a run without interruption" "another one, after resuming from $resumed"; fi

}

slurm_errors() {
    submit -- --steps 5 --lr x --out "$work/job"
    job_ends "sbatch: a wrong option is not tried again" FAILED 1:0 0 "^error: --lr x: expected a number"
    other_contents n2
    submit -- --data /tmp/text/train.tok --steps 5 --out "$work/job"
    job_ends "sbatch: an error of one host is not tried again" FAILED 1:0 0 "^error: the token files"
    on n1 sh -c 'printf "#!/bin/sh\necho failure: it always fails >&2\nexit 2\n" >/mnt/build/hosts/fails
        chmod +x /mnt/build/hosts/fails'
    RETRIES=1 program=build/hosts/fails submit -- --out "$work/job"
    job_ends "sbatch: RETRIES limits how often a job is queued again" FAILED 2:0 1 \
        "not queued again, because .* 1 times"
    on n1 sh -c 'printf "#!/bin/sh\nprintf \"srun: error: the launch failed\" >&2\nexit 1\n" >/mnt/build/hosts/fails'
    RETRIES=1 program=build/hosts/fails submit -- --out "$work/job"
    job_ends "sbatch: exit code 1 without an error of the program is tried again" FAILED 1:0 1 \
        "srun: error: the launch failed"
}

# The real time limit, of one minute, which is the shortest; Slurm sends the signal 20 to 80 s before it.
slurm_time_limit() {
    submit --time 1 --signal USR2@20 -- --steps 100000000 --out "$work/job"
    if wait_for 90 said_times "^slurm.sbatch: exit code 75; the job is queued again" 1 &&
        wait_for 60 said_times "^resumed from " 1; then
        pass "sbatch: before its time limit the job saves, and is queued again" "$(grep '^resumed' "$work/said")"
    else fail "sbatch: before its time limit the job saves, and is queued again" "$(tail -n 2 "$work/said")"; fi
    wait_for 20 job_state_is RUNNING
    on n1 scancel "$job"
    job_ends "sbatch: a cancelled job is not queued again" CANCELLED 75:0 1 "^slurm.sbatch: .*was cancelled"
}

# on_cluster HOSTS SCENARIO…: starts a cluster, and runs the scenarios on it
on_cluster() {
    local scenario
    hosts=$1
    shift
    if cluster_start "$hosts"; then
        prepare
        for scenario; do "$scenario"; done
    else fail "hosts" "a cluster of $hosts does not start: $(tail -n 3 "$cluster_dir"/*.log)"; fi
    cluster_stop 2>/dev/null
}

if [ $# -gt 0 ]; then
    on_cluster "${HOSTS:-2}" "$@"
else
    on_cluster 2 mpirun_script rank_beside_killed slurm_jobs slurm_errors slurm_time_limit
    on_cluster 2 gpus no_pmix no_zombies other_data unshared_out other_build same_results lost_hosts slow_network
    on_cluster 3 dead_networks same_results lost_hosts
    on_cluster 3 supervised
    on_cluster 4 same_results lost_hosts check_hosts short_chaos
fi
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
