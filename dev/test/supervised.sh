# supervised.sh: scenarios of dev/launch/supervise, sourced by hosts.sh. Each runs on a cluster of its own.

# supervise "HOST:RANKS …" [OPTION…] -- [OPTION…]: starts dev/launch/supervise on n1 in the background, with these hosts
# and with options of its own and of the program, or of the script $starts that starts it; its output goes to $work/said
supervise() {
    local host options=() ssh="ssh -F /mnt/build/hosts/ssh_config -o BatchMode=yes -o ConnectTimeout=2"
    for host in $1; do echo "${host%:*} slots=${host#*:}"; done | head -c -1 >"$work/hostfile" # no last line feed
    shift
    while [ "$1" != -- ]; do
        options+=("$1")
        shift
    done
    shift
    on n1 dev/launch/supervise --grace 2 --silence 30 --hostfile "$work/hostfile" --ssh "${SSH_COMMAND:-$ssh}" \
        --launch-options "--allow-run-as-root --oversubscribe --mca mpi_yield_when_idle 1 -x OMP_WAIT_POLICY=passive" \
        ${options[@]+"${options[@]}"} -- "${starts:-$work/paced}" "${train[@]}" --out "$out" "$@" \
        </dev/null >>"$work/said" 2>&1 &
    launched=$!
}

step_of() { tail -n 1 "$1/metrics.jsonl" 2>/dev/null | grep -oE '^\{"step":[0-9]+' | grep -oE '[0-9]+' || echo 0; }
step_beyond() { [ "$(step_of "$1")" -gt "$2" ]; }
incidents_are() { [ "$(wc -l 2>/dev/null <"$1/incidents.jsonl" || echo 0)" = "$2" ]; }

# incident NUMBER FIELD: the value of a field, as JSON; checks that the whole line is valid
incident() { sed -n "$1p" "$out/incidents.jsonl" | python3 -c "import json, sys; print(json.load(sys.stdin)['$2'])"; }

# supervised_ends NAME CODE SECONDS CONDITION…: supervise ends with this exit code, the shell commands succeed, and
# nothing is left on any host. From here on the run has its full speed.
supervised_ends() {
    local name="supervise: $1" expected=$2 limit=$3 condition wrong=""
    shift 3
    full_speed
    ends "$limit"
    [ "$code" = "$expected" ] || wrong+="exit code $code, expected $expected; "
    for condition; do eval "$condition" || wrong+="not so: $condition; "; done 2>/dev/null
    wait_for 3 nothing_left_over "$hosts" || wrong+="left over: $(left_over "$hosts"); "
    if [ -z "$wrong" ]; then pass "$name" "exit code $code after $seconds s; $(tail -n 1 "$out/incidents.jsonl")"
    else fail "$name" "$wrong$(tail -n 2 "$work/said") $(tail -n 2 "$out/incidents.jsonl")"; fi 2>/dev/null
    clean_up
}

# begin NAME: a fresh directory for --out, and no output yet; the run is slow from step 50 on
begin() {
    out=$work/$1
    rm -rf "$out"
    : >"$work/said"
    slow_from 50
}

# A run without interruption of four ranks with --accum 1, whose checkpoint all others must equal.
supervised_reference() {
    train+=(--deterministic --seq 128 --batch 4 --steps 250 --save-every 10 --keep 2 --timeout 3)
    "$program" "${train[@]}" --ranks 4 --out "$work/reference" >"$work/said" 2>&1
    reference=$(checkpoint_hash "$work/reference")
}
same_checkpoint() { [ "$(checkpoint_hash "$out")" = "$reference" ]; }

supervised_spare() {
    begin spare
    supervise "n1:2 n2:2 n3:2" --hosts 2 --
    wait_for 30 step_beyond "$out" 50
    signal_host n2 KILL ranks
    supervised_ends "a spare replaces a host whose rank was killed" 0 60 same_checkpoint 'incidents_are "$out" 1' \
        '[ "$(incident 1 kind)" = "rank died" ]' "[ \"\$(incident 1 hosts_named)\" = \"['n2']\" ]" \
        '[ "$(incident 1 world_before) $(incident 1 world_after)" = "4 4" ]' \
        'grep -q "^hosts: n1 .*, n3 " "$work/said"'
}

supervised_smaller() {
    begin smaller
    supervise "n1:2 n2:2" --return-after 4 --
    wait_for 30 step_beyond "$out" 50
    signal_host n2 STOP all
    wait_for 60 said_times "^supervise: incident 2: hosts returned" 1
    supervised_ends "a smaller layout with larger --accum until the host returns" 0 90 same_checkpoint \
        'incidents_are "$out" 2' '[ "$(incident 1 kind)" = "host does not answer" ]' \
        '[ "$(incident 1 world_before) $(incident 1 world_after)" = "4 2" ]' \
        '[ "$(incident 2 kind)" = "hosts returned" ]' '[ "$(incident 2 world_after)" = 4 ]' \
        'grep -q "^supervise: launching 2 ranks on n1:2, .*--accum 2" "$work/said"'
}

# Two smaller layouts one after the other. plan_llama3, which checks them, has no use for the options at the end of the
# command.
supervised_two_smaller() {
    begin two
    supervise "n1:2 n2:1 n3:1" -- --allow-changes --after-save true --trace "$work/two.json"
    wait_for 30 step_beyond "$out" 30
    signal_host n1 KILL ranks
    wait_for 30 said_times "^supervise: launching 2 ranks on n2:1 n3:1, .*--accum 2" 1
    wait_for 30 incidents_are "$out" 1
    slow_from 100
    wait_for 30 step_beyond "$out" 100
    signal_host n3 KILL ranks
    supervised_ends "a smaller layout, and then one that is smaller still" 0 60 same_checkpoint \
        'incidents_are "$out" 2' '[ "$(incident 2 world_before) $(incident 2 world_after)" = "2 1" ]' \
        'grep -q "^supervise: launching 1 ranks on n2:1, .*--accum 4" "$work/said"' '[ -s "$work/two.json" ]'
}

# plan_llama3 refuses the layout of two ranks, and that of one rank needs too much memory, which only its launch finds
# out. The run waits for the lost host.
supervised_refused_layouts() {
    begin refused
    cat >"$work/refusing" <<END
#!/bin/sh
case "\$* " in
    *"--world 2 "*) echo "error: no layout of two ranks is possible" >&2; exit 1 ;;
esac
exec $work/plan_llama3 "\$@"
END
    cat >"$work/needing" <<END
#!/bin/sh
[ "\$OMPI_COMM_WORLD_SIZE" != 1 ] || { echo "error: the run needs 2.00 GB, but 1.00 GB are free" >&2; exit 1; }
exec $work/paced "\$@"
END
    chmod +x "$work/refusing" "$work/needing"
    starts=$work/needing supervise "n1:2 n2:2" --return-after 6 --planner "$work/refusing" --
    wait_for 30 step_beyond "$out" 50
    signal_host n2 STOP all
    supervised_ends "without a smaller layout the run waits for the lost host" 0 60 same_checkpoint \
        'incidents_are "$out" 2' '[ "$(incident 1 kind)" = "host does not answer" ]' \
        '[ "$(incident 2 kind) $(incident 2 world_before) $(incident 2 world_after)" = "error 1 4" ]' \
        'grep -q "^supervise: plan_llama3 with 2 ranks: error: no layout of two ranks is possible" "$work/said"'
}

# the smaller layout of a pipeline keeps its stages
supervised_pipeline() {
    begin pipeline
    supervise "n1:2 n2:2" -- --pp 2 --accum 2
    wait_for 30 step_beyond "$out" 50
    signal_host n2 KILL ranks
    supervised_ends "a smaller layout keeps --pp" 0 60 same_checkpoint 'incidents_are "$out" 1' \
        'grep -q "^supervise: launching 2 ranks on n1:2, .*--accum 4" "$work/said"'
}

# n1, where supervise and mpirun run, is left out and returns while the run goes on without it
supervised_first_host() {
    begin first
    supervise "n1:2 n2:2" --return-after 2 --
    wait_for 30 step_beyond "$out" 50
    signal_host n1 KILL ranks
    wait_for 60 said_times "^supervise: incident 2: hosts returned" 1
    supervised_ends "the host of mpirun returns while other hosts train" 0 60 same_checkpoint 'incidents_are "$out" 2' \
        "[ \"\$(incident 1 hosts_left_out)\" = \"['n1']\" ]" '[ "$(incident 2 kind)" = "hosts returned" ]'
}

# The list has addresses, and the program the names by which hosts call themselves. The spare cannot train, which is an
# error of this host alone, so that the run continues without it.
supervised_addresses() {
    begin addresses
    cat >"$work/broken" <<END
#!/bin/sh
[ "\$(hostname)" != n3 ] || { echo "error: on host n3: the disk does not work" >&2; exit 1; }
exec $work/paced "\$@"
END
    chmod +x "$work/broken"
    starts=$work/broken supervise "10.77.0.1:2 10.77.0.2:2 10.77.0.3:2" --hosts 2 -- --dp-shard 0
    wait_for 30 step_beyond "$out" 50
    signal_host n2 KILL ranks
    supervised_ends "hosts are listed by address, and the spare has an error" 0 60 same_checkpoint \
        'incidents_are "$out" 2' "[ \"\$(incident 1 hosts_named)\" = \"['n2']\" ]" \
        "[ \"\$(incident 2 hosts_left_out)\" = \"['10.77.0.2', '10.77.0.3']\" ]" \
        'grep -q "^supervise: launching 2 ranks on 10.77.0.1:2, .*--dp-shard 2" "$work/said"'
}

supervised_launcher() {
    begin launcher
    supervise "n1:2 n2:2" --
    wait_for 30 step_beyond "$out" 50
    on n1 pkill -KILL -x mpirun
    supervised_ends "mpirun was killed" 0 60 same_checkpoint 'incidents_are "$out" 1' \
        '[ "$(incident 1 kind)" = "launcher died" ]' '[ "$(incident 1 world_after)" = 4 ]' 'nothing_of_open_mpi'
}
nothing_of_open_mpi() {
    local i
    for ((i = 1; i <= hosts; i++)); do
        if on "n$i" pgrep -x 'orted|mpirun' || on "n$i" pgrep -f dev/launch/; then return 1; fi
        if on "n$i" sh -c 'ls /dev/shm | grep vader'; then return 1; fi
    done
}

# ssh hangs while mpirun starts its daemons: nothing that mpirun or the program does would end this
supervised_hung_launcher() {
    begin hung
    cat >"$work/ssh" <<END
#!/bin/sh
case "\$*" in
    *orted*) [ -e $work/hangs ] && rm $work/hangs && sleep 1000 ;;
esac
exec ssh -F /mnt/build/hosts/ssh_config -o ConnectTimeout=2 "\$@"
END
    chmod +x "$work/ssh"
    touch "$work/hangs"
    SSH_COMMAND=/mnt/$work/ssh supervise "n1:2 n2:2" -- --steps 20 --min-lr 0.0003
    supervised_ends "mpirun hangs in ssh" 0 90 'incidents_are "$out" 1' '[ "$(incident 1 kind)" = "launcher hung" ]'
}

supervised_gives_up() {
    begin fails
    printf '#!/bin/sh\necho "failure: it always \\"fails\\"" >&2\nexit 2\n' >"$work/failing"
    chmod +x "$work/failing"
    starts=$work/failing supervise "n1:2 n2:2" --give-up 3 --
    supervised_ends "after three incidents without a new checkpoint it gives up" 2 30 'incidents_are "$out" 3' \
        "[ \"\$(incident 3 message)\" = 'failure: it always \"fails\"' ]" \
        '[ "$(grep -c launching "$work/said")" = 3 ]' \
        'awk "BEGIN { exit !($(incident 2 back_off_s) >= 2) }"'
}

supervised_error() {
    begin error
    supervise "n1:2 n2:2" -- --lr x
    supervised_ends "an error that the user must correct is not tried again" 1 20 '[ ! -e "$out/incidents.jsonl" ]' \
        '[ "$(grep -c launching "$work/said")" = 1 ]' 'grep -q "^error: --lr x" "$work/said"'
}

# A library prints "error: " before a start that takes longer than the launcher may take to end after a failure.
supervised_library_error() {
    begin library
    printf '#!/bin/sh\necho "error: a library says this" >&2\nsleep 6\nexec %s "$@"\n' "$program" >"$work/slow"
    chmod +x "$work/slow"
    starts=$work/slow supervise "n1:2 n2:2" -- --steps 20 --min-lr 0.0003
    supervised_ends "a run that starts slowly after a line 'error: ' of a library goes on" 0 40 \
        '[ ! -e "$out/incidents.jsonl" ]' 'grep -q "^error: a library says this" "$work/said"'
}

# SIGTERM is sent to the program until it ends the run, and not later: the second one would end its wait.
supervised_after_save() {
    begin after-save
    rm -f "$work/uploaded"
    supervise "n1:2 n2:2" -- --steps 100000000 --save-every 1000000 --after-save "sleep 8; touch $work/uploaded"
    wait_for 30 step_beyond "$out" 20
    signal_supervise TERM
    supervised_ends "after a signal the run waits for the command of --after-save" 75 30 '[ -e "$work/uploaded" ]' \
        '! grep -q "a signal ended the wait" "$work/said"'
}

signal_supervise() { on n1 sh -c "kill -$1 \$(pgrep -of 'bash dev/launch/supervise')"; }

# A signal saves; a second start continues; a third one at the same time is refused.
supervised_signal() {
    begin signal
    supervise "n1:2 n2:2" --
    wait_for 30 step_beyond "$out" 50
    signal_supervise TERM
    supervised_ends "SIGTERM saves and ends the run" 75 20 '[ ! -e "$out/incidents.jsonl" ]' \
        '[ "$(readlink "$out/latest")" = "step-000$(printf %05d "$(step_of "$out")")" ]'
    slow_from 100
    supervise "n1:2 n2:2" --
    wait_for 30 step_beyond "$out" 100
    local first=$launched
    supervise "n1:2 n2:2" --
    ends 10
    if [ "$code" != 1 ] || ! grep -q "^error: supervise: .*another supervise holds" "$work/said"; then
        fail "supervise: a second one for the same --out is refused" "exit code $code"
    fi
    launched=$first
    supervised_ends "the next start continues the run" 0 60 same_checkpoint
}

# refused PATTERN OPTION… -- OPTION…: supervise ends with exit code 1 and this error before it launches anything
refused() {
    local pattern=$1 name
    shift
    name="supervise: $* is refused"
    : >"$work/said"
    supervise "n1:2 n2:2" "$@"
    ends 5
    if [ "$code" = 1 ] && grep -qE "^error: supervise: $pattern" "$work/said" && ! grep -q launching "$work/said"; then
        pass "$name" "$(tail -n 1 "$work/said")"
    else fail "$name" "exit code $code, expected '$pattern': $(tail -n 1 "$work/said")"; fi
}

supervised_options() {
    begin options
    refused "--hosts 3: the list of hosts has only 2" --hosts 3 --
    refused "x: expected a whole number" --give-up x --
    refused "nowhere, which checks smaller layouts, is not a program" --planner nowhere --
    refused "--accum x: expected" -- --accum x
    refused "--tp auto: give a number" -- --tp auto
    refused "the hosts have 4 ranks in all, which is not a multiple of .* = 3" -- --pp 3
    refused "--resume out/b: remove it" -- --resume out/b
}

# another run, which is not supervised, holds the lock of --out
supervised_lock() {
    begin lock
    mkdir -p "$out"
    on n2 flock "$out/lock" sh -c "touch $work/locked; sleep 10" &
    wait_for 10 test -e "$work/locked"
    supervise "n1:2 n2:2" --
    supervised_ends "nothing is launched while another run holds --out" 1 20 '! grep -q launching "$work/said"' \
        'grep -q "^error: supervise: .* another run holds" "$work/said"'
}

two_ranks_on_n2() { [ "$(ranks_on n2 | wc -l)" = 2 ]; }

# A rank that is frozen while ranks connect is named by its own host.
supervised_frozen_start() {
    begin frozen
    supervise "n1:2 n2:2 n3:2" --hosts 2 -- --steps 20 --min-lr 0.0003
    wait_for 20 two_ranks_on_n2
    on n2 kill -STOP "$(ranks_on n2 | tail -n 1)"
    supervised_ends "a rank is frozen while ranks connect" 0 60 'incidents_are "$out" 1' \
        '[ "$(incident 1 kind)" = "rank stopped" ]' "[ \"\$(incident 1 hosts_named)\" = \"['n2']\" ]"
}

# Frozen ranks hold the lock of --out when supervise itself is killed. The next one ends what is left of the run, and
# continues it.
supervised_killed() {
    begin killed
    supervise "n1:2 n2:2" --
    wait_for 30 step_beyond "$out" 50
    signal_host n1 STOP all
    signal_host n2 STOP all
    signal_supervise KILL
    supervise "n1:2 n2:2" --
    supervised_ends "after SIGKILL the next one takes over the run" 0 60 same_checkpoint nothing_of_open_mpi
}

supervised_disk() {
    begin disk
    out=build/hosts/disk/out
    rm -rf "$out"
    supervise "n1:2 n2:2" --
    wait_for 30 step_beyond "$out" 50
    head -c 30M /dev/zero 2>/dev/null >build/hosts/disk/full
    wait_for 30 said_times "No space left on device" 1
    rm build/hosts/disk/full
    supervised_ends "the disk of --out is full for some seconds" 0 60 same_checkpoint \
        '[[ "$(incident 1 message)" = *"No space left on device"* ]]' audit_passes
}
# The lines of the steps in between would be lost, although all checkpoints can be written.
supervised_disk_between_saves() {
    begin disk
    out=build/hosts/disk/out
    rm -rf "$out"
    supervise "n1:2 n2:2" -- --save-every 120
    wait_for 30 step_beyond "$out" 20
    head -c 30M /dev/zero 2>/dev/null >build/hosts/disk/full
    wait_for 30 said_times "^error: cannot write metrics.jsonl" 1
    rm build/hosts/disk/full
    supervised_ends "the disk of --out is full between two saves" 0 60 same_checkpoint audit_passes \
        '[[ "$(incident 1 message)" = "error: cannot write metrics.jsonl and samples.jsonl"* ]]'
}
audit_passes() { "${program%/*}/tokens_llama3" --audit --out "$out" >"$work/audit" 2>&1; }

# In a Slurm job: a spare replaces a host, srun is killed, and the job is queued again when its time is over.
supervised_slurm() {
    local job
    begin slurm
    job=$(on n1 env OMP_WAIT_POLICY=passive sbatch --parsable --nodes "$hosts" --ntasks-per-node 2 --no-kill --requeue \
        --open-mode=append --output "$work/said" --wrap "exec dev/launch/supervise --hosts 2 --requeue \
        --silence 30 --launch-options --overcommit -- $work/paced ${train[*]} --steps 400 --out $out")
    wait_for 30 step_beyond "$out" 30
    signal_host n2 KILL ranks
    wait_for 30 said_times "^supervise: launching 4 ranks on n1:2 n3:2" 1
    wait_for 30 incidents_are "$out" 1
    on n1 pkill -KILL -x srun
    wait_for 30 incidents_are "$out" 2
    on n1 scancel --batch --signal USR2 "$job"
    wait_for 60 said_times "^supervise: launching" 4
    full_speed
    wait_for 90 job_state_is "COMPLETED FAILED CANCELLED TIMEOUT"
    sleep 1
    sleep 0 &
    launched=$!
    supervised_ends "Slurm: $(job_field JobState) after $(job_field Restarts) restart" 0 1 'incidents_are "$out" 3' \
        '[ "$(job_field JobState) $(job_field Restarts)" = "COMPLETED 1" ]' \
        '[ "$(incident 1 kind)" = "rank died" ]' '[ "$(incident 2 kind)" = "launcher died" ]' \
        '[ "$(incident 3 kind)" = "requeued" ]' \
        "$program ${train[*]} --steps 400 --ranks 4 --out $work/slurm-reference >$work/audit 2>&1" \
        '[ "$(checkpoint_hash "$out")" = "$(checkpoint_hash "$work/slurm-reference")" ]'
}

# srun gives each host as many ranks as the list of hosts says.
supervised_slurm_slots() {
    local job
    begin slurm-slots
    printf 'n1 slots=1\nn2 slots=2\nn3 slots=1\n' >"$work/hostfile"
    job=$(on n1 env OMP_WAIT_POLICY=passive sbatch --parsable --nodes 3 --ntasks-per-node 2 --output "$work/said" \
        --wrap "exec dev/launch/supervise --launcher srun --hostfile $work/hostfile --launch-options --overcommit \
        -- $program ${train[*]} --out $out")
    wait_for 60 job_state_is "COMPLETED FAILED CANCELLED TIMEOUT"
    sleep 0 &
    launched=$!
    supervised_ends "Slurm: hosts with different numbers of ranks" 0 1 same_checkpoint \
        '[ "$(job_field JobState)" = COMPLETED ]' '! grep -q "srun: Warn" "$work/said"' \
        'grep -q "^hosts: n1 (rank 0), n2 (ranks 1-2), n3 (rank 3)" "$work/said"'
}

# HOSTS=3 hosts.sh supervised
supervised() {
    local scenario
    supervised_reference
    local all="spare smaller two_smaller refused_layouts pipeline first_host addresses launcher hung_launcher"
    all+=" gives_up error options lock signal killed library_error after_save frozen_start"
    all+=" disk disk_between_saves slurm slurm_slots"
    for scenario in ${SUPERVISED:-$all}; do
        "supervised_$scenario"
    done
}
