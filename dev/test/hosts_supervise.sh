#!/usr/bin/env bash
# hosts_supervise.sh: tests of dev/launch/supervise on the cluster of cluster.sh. Sourced by hosts.sh and chaos.sh, after
# `work` and `program` were set.

# supervised_data: a model with steps of some hundredths of a second, in $work/chaos
supervised_data() {
    mkdir -p "$work/chaos"
    [ -e "$work/text/train.tok" ] || {
        dev/test/sample_text.sh "$work/sample"
        VOCAB_SIZE=600 dev/data/text.sh "$work/text" "$work/sample" >/dev/null
    }
    cat >"$work/chaos/config.json" <<'END_OF_MODEL'
{"model_type": "llama", "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
 "intermediate_size": 320, "vocab_size": 600, "max_position_embeddings": 256, "rope_theta": 500000}
END_OF_MODEL
    supervised_train=(--model "$work/chaos" --data "$work/text/train.tok" --seq 128 --batch 4 --threads 1
        --deterministic --timeout 2)
}

# supervise HOSTS SPARES OUT OPTION…: starts dev/launch/supervise on n1 in the background, one rank per host; its output
# goes to OUT.said and its process is $supervisor
supervise() {
    local count=$1 spares=$2 out=$3 i args=() list
    shift 3
    list=$work/hostfile
    : >"$list"
    for ((i = 1; i <= count + spares; i++)); do echo "n$i slots=1" >>"$list"; done
    for i in --allow-run-as-root --oversubscribe --bind-to none --mca plm_rsh_args "-F /mnt/build/hosts/ssh_config" \
        --mca mpi_yield_when_idle 1 -x OMP_WAIT_POLICY=passive; do args+=(--launcher "$i"); done
    on n1 env GRACE=2 dev/launch/supervise --hostfile "$list" --hosts "$count" --return-after "${RETURN_AFTER:-8}" \
        --give-up "${GIVE_UP:-5}" --ssh "ssh -F /mnt/build/hosts/ssh_config -o ConnectTimeout=2" "${args[@]}" \
        -- "$program" "${supervised_train[@]}" --out "$out" "$@" </dev/null >"$out.said" 2>&1 &
    supervisor=$!
}

# The hash of the newest checkpoint of a directory
hash_of_run() { (cd "$1/latest" && sha256sum -- * | sha256sum | cut -c1-16); }
incidents() { wc -l 2>/dev/null <"$1/incidents.jsonl" || echo 0; }
has_incidents() { [ "$(incidents "$1")" -ge "$2" ]; }
steps_of() { tail -n 1 "$1/metrics.jsonl" 2>/dev/null | grep -o '"step":[0-9]*' | grep -o '[0-9]*' || echo 0; }
has_reached() { [ "$(steps_of "$1")" -ge "$2" ]; }
supervisor_gone() { ! kill -0 "$supervisor" 2>/dev/null; }

# supervisor_ends NAME CODE PATTERN SECONDS: it ends with CODE, and PATTERN is in its output or in incidents.jsonl
supervisor_ends() {
    local name=$1 expected=$2 pattern=$3 out=$4 code said
    wait_for "$5" supervisor_gone || kill -KILL "$supervisor"
    wait "$supervisor" 2>/dev/null
    code=$?
    if [ "$code" != "$expected" ]; then fail "$name" "exit code $code, expected $expected: $(tail -n 2 "$out.said")"
    else
        said=$(grep -ahoE -m1 "$pattern" "$out.said" "$out/incidents.jsonl" 2>/dev/null)
        if [ -n "$said" ]; then pass "$name" "exit code $code; $said"
        else fail "$name" "expected '$pattern': $(tail -n 2 "$out.said")"; fi
    fi
}

# on three hosts: what supervise does after failures, and when it does not go on
supervised() {
    local reference hash out=$work/supervised
    supervised_data
    "$program" "${supervised_train[@]}" --ranks 2 --steps 300 --out "$work/reference" >"$work/said" 2>&1
    reference=$(hash_of_run "$work/reference")

    supervise 2 1 "$out-spare" --steps 300 --save-every 20
    wait_for 30 has_reached "$out-spare" 60
    signal_host n2 KILL ranks
    supervisor_ends "supervise: a spare host takes the place of a lost one" 0 \
        '"hosts":\["n2"\],"world":2.*"left_out":\["n2"\],"next_world":2' "$out-spare" 60
    hash=$(hash_of_run "$out-spare")
    if [ "$hash" = "$reference" ]; then pass "supervise: the checkpoint is that of a run without failures" "$hash"
    else fail "supervise: the checkpoint is that of a run without failures" "$hash, expected $reference"; fi

    supervise 2 0 "$out-small" --steps 300 --save-every 20
    wait_for 30 has_reached "$out-small" 60
    signal_host n2 STOP all
    supervisor_ends "supervise: without a spare it goes on with fewer ranks and more micro-batches" 0 \
        'supervise: 1 ranks on hosts n1,.* --accum 2' "$out-small" 60
    hash=$(hash_of_run "$out-small")
    if [ "$hash" = "$reference" ]; then pass "supervise: the smaller layout gives the same checkpoint" "$hash"
    else fail "supervise: the smaller layout gives the same checkpoint" "$hash, expected $reference"; fi

    supervise 2 0 "$out-wrong" --steps 300 --tail nowhere
    supervisor_ends "supervise: an error before the first step is not repeated" 1 "^error: --tail nowhere" \
        "$out-wrong" 20
    GIVE_UP=1 supervise 1 0 "$out-lost" --steps 300 --data /nowhere --max-skips 0
    supervisor_ends "supervise: nor is one of the data" 1 "^error: .*/nowhere" "$out-lost" 20
    RETURN_AFTER=0 GIVE_UP=2 supervise 2 0 "$out-again" --steps 100000
    for _ in {1..20}; do # no checkpoint is ever saved
        if supervisor_gone; then break; fi
        signal_host n2 KILL ranks
        sleep 2
    done
    supervisor_ends "supervise: gives up after failures without a new checkpoint" 2 \
        "^failure: supervise: given up after 3 failures" "$out-again" 30
    supervise 2 0 "$out-signal" --steps 100000
    wait_for 30 has_reached "$out-signal" 20
    on n1 pkill -TERM -f "bash dev/launch/supervise .*$out-signal"
    supervisor_ends "supervise: SIGTERM saves and ends the run" 75 "saved .*step-" "$out-signal" 30
}
