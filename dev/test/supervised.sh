# supervised.sh: scenarios of dev/launch/supervise, sourced by hosts.sh. Each runs on a cluster of its own.

# supervise "HOST:RANKS …" [OPTION…] -- [OPTION…]: starts dev/launch/supervise on n1 in the background, with these hosts
# and with options of its own and of the program; its output goes to $work/said
supervise() {
    local host options=() ssh="ssh -F /mnt/build/hosts/ssh_config -o BatchMode=yes -o ConnectTimeout=2"
    for host in $1; do echo "${host%:*} slots=${host#*:}"; done >"$work/hostfile"
    shift
    while [ "$1" != -- ]; do
        options+=("$1")
        shift
    done
    shift
    on n1 env GRACE=2 dev/launch/supervise --hostfile "$work/hostfile" --ssh "${SSH_COMMAND:-$ssh}" \
        --launch-options "--allow-run-as-root --oversubscribe --mca mpi_yield_when_idle 1 -x OMP_WAIT_POLICY=passive" \
        ${options[@]+"${options[@]}"} -- "$program" "${train[@]}" --out "$out" "$@" </dev/null >>"$work/said" 2>&1 &
    launched=$!
}

step_of() { tail -n 1 "$1/metrics.jsonl" 2>/dev/null | grep -oE '^\{"step":[0-9]+' | grep -oE '[0-9]+' || echo 0; }
step_beyond() { [ "$(step_of "$1")" -gt "$2" ]; }
incidents_are() { [ "$(wc -l 2>/dev/null <"$1/incidents.jsonl" || echo 0)" = "$2" ]; }

# incident NUMBER FIELD: the value of a field, as JSON; checks that the whole line is valid
incident() { sed -n "$1p" "$out/incidents.jsonl" | python3 -c "import json, sys; print(json.load(sys.stdin)['$2'])"; }

# supervised_ends NAME CODE SECONDS CONDITION…: supervise ends with this exit code, the shell commands succeed, and
# nothing is left on any host
supervised_ends() {
    local name="supervise: $1" expected=$2 limit=$3 condition wrong=""
    shift 3
    ends "$limit"
    [ "$code" = "$expected" ] || wrong+="exit code $code, expected $expected; "
    for condition; do eval "$condition" || wrong+="not so: $condition; "; done 2>/dev/null
    wait_for 3 nothing_left_over "$hosts" || wrong+="left over: $(left_over "$hosts"); "
    if [ -z "$wrong" ]; then pass "$name" "exit code $code after $seconds s; $(tail -n 1 "$out/incidents.jsonl")"
    else fail "$name" "$wrong$(tail -n 2 "$work/said") $(tail -n 2 "$out/incidents.jsonl")"; fi 2>/dev/null
    clean_up
}

# begin NAME: a fresh directory for --out, and no output yet
begin() {
    out=$work/$1
    rm -rf "$out"
    : >"$work/said"
}

# A run without interruption of four ranks with --accum 1, whose checkpoint all others must equal.
supervised_reference() {
    train+=(--deterministic --seq 128 --batch 4 --steps 400 --save-every 10 --keep 2 --timeout 3 --start-timeout 10)
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
    supervised_ends "a smaller layout with larger --accum until the host returns" 0 90 same_checkpoint \
        'incidents_are "$out" 2' '[ "$(incident 1 kind)" = "host does not answer" ]' \
        '[ "$(incident 1 world_before) $(incident 1 world_after)" = "4 2" ]' \
        '[ "$(incident 2 kind)" = "hosts returned" ]' '[ "$(incident 2 world_after)" = 4 ]' \
        'grep -q "^supervise: launching 2 ranks on n1:2, .*--accum 2" "$work/said"'
}

supervised() {
    supervised_reference
    supervised_spare
    supervised_smaller
}
