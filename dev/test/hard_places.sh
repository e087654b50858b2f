#!/usr/bin/env bash
# hard_places.sh [PROGRAM [SCENARIO]]: runs on shared machines, odd file systems and in hostile folders keep what they
# promise, or say in one line what does not hold. Each check names the failure that it prevents.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. dev/test/checks.sh
program=$(realpath "${1:-build/cpu-fp32/train_llama3}")
convert=("$(program_for --export x)" --threads 1) evaluate=("$(program_for --eval x)" --threads 1)
top=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit
export LC_ALL=C OMP_NUM_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

prepare() {
    "$top/dev/test/sample_text.sh" sample
    VOCAB_SIZE=600 "$top/dev/data/text.sh" text sample >said 2>&1 || {
        cat said
        fail "the data" "dev/data/text.sh refuses the text of dev/test/sample_text.sh"
        exit 1
    }
    mkdir model
    cat >model/config.json <<'END'
{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
 "intermediate_size": 160, "vocab_size": 600, "max_position_embeddings": 256, "rope_theta": 500000}
END
    if ! "${CC:-cc}" -shared -fPIC -O1 -o shim.so "$top/dev/test/file_system_shim.c" 2>said; then
        fail "dev/test/file_system_shim.c" "does not build: $(head -n 1 said)"
        exit 1
    fi
    train=("$program" --model model --data text/train.tok --seq 32 --batch 1 --threads 1 --min-lr 0.0003)
    "${train[@]}" --steps 30 --deterministic --save-every 10 --out plain >said 2>&1 || fail "a run" "$(tail -n 1 said)"
    "${convert[@]}" --model plain/latest --export plain-model >said 2>&1 || fail "an export" "$(tail -n 1 said)"
}

# finish PROCESS: its exit code; 99 if it has not ended after ten seconds
finish() {
    local tries=200
    while kill -0 "$1" 2>/dev/null && [ $((tries--)) -gt 0 ]; do sleep 0.05; done
    if kill -0 "$1" 2>/dev/null; then
        kill -KILL "$1"
        wait "$1"
        code=99
    else
        wait "$1"
        code=$?
    fi
} 2>/dev/null # bash prints a line about a process that a signal has ended
has_steps() { [ "$(wc -l 2>/dev/null <"$1/metrics.jsonl" || echo 0)" -ge "${2:-3}" ]; }
wait_for() { # SECONDS COMMAND…
    local tries=$(($1 * 20))
    shift
    until "$@"; do
        [ $((tries--)) -gt 0 ] || return 1
        sleep 0.05
    done
}
# holding PART COMMAND…: starts the command in the background, which stops before a file whose path contains PART gets
# its name, and returns when it has stopped; the command continues when the file `held` is removed
holding() {
    local part=$1
    shift
    HOLD=$part LD_PRELOAD="$work/shim.so" "$@" >held-said 2>&1 &
    wait_for 20 test -e held || fail "a command that stops before $part is renamed" "$(tail -n 1 held-said)"
}
same() { cmp -s "$1" "$2"; }
# judge NAME WHAT CONDITION…: all shell commands must succeed
judge() {
    local name=$1 what=$2 condition wrong=""
    shift 2
    for condition; do eval "$condition" >/dev/null 2>&1 || wrong+="not so: $condition; "; done
    if [ -z "$wrong" ]; then pass "$name" "$what"; else fail "$name" "$wrong$what"; fi
}

# ---------------------------------------------------------------- results that two commands publish under one name
two_exports() {
    local first second running
    holding both.part- "${convert[@]}" --model plain/step-00000010 --export both
    second=$!
    "${convert[@]}" --model plain/step-00000020 --export both >said 2>&1
    first=$?
    cp -r both kept
    rm -f held
    finish "$second"
    judge "of two exports to one directory the first stays whole, and the other says where its model is" \
        "exit codes $first and $code: $(grep ^error held-said)" '[ "$first $code" = "0 1" ]' 'diff -r both kept' \
        'grep -qE "^error: cannot rename (.*/)?both.part-[0-9a-f]{16}, which holds the complete model" held-said' \
        '"${evaluate[@]}" --model "$(echo both.part-*)" --eval text/val.tok --seq 32'
    rm -rf both both.part-* kept
    holding both.part- "${convert[@]}" --model plain/step-00000010 --export both
    running=$!
    rm both.part-*/config.json # an export that has not yet written this file
    "${convert[@]}" --model plain/step-00000020 --export both >said 2>&1
    code=$?
    judge "an export leaves alone what one that still runs has written" "$(ls -d both* | tr '\n' ' ')" \
        '[ $code = 0 ]' '[ -s both.part-*/model.safetensors ]'
    rm -f held
    finish "$running"
    rm -rf both both.part-*
}

unfinished_exports() {
    local left
    holding killed.part- "${convert[@]}" --model plain-model --export killed
    kill -KILL $!
    finish $!
    rm -f held killed.part-*/config.json # an export that was killed before it wrote this file
    left=$(echo killed.part-*)
    mkdir killed.part-0123456789abcdee killed.part-mine
    touch killed.part-0123456789abcdee/config.json
    "${convert[@]}" --model plain-model --export killed >said 2>&1
    judge "an export removes what an interrupted one has left, and no complete model" "$(ls -d killed* | tr '\n' ' ')" \
        '[[ $left =~ ^killed.part-[0-9a-f]{16}$ ]]' '! [ -e "$left" ]' '[ -e killed/config.json ]' \
        '[ -d killed.part-mine ]' '[ -e killed.part-0123456789abcdee/config.json ]'
    mkdir filled && touch filled/note.txt
    "${convert[@]}" --model plain-model --export filled >said 2>&1
    code=$?
    judge "an export to a directory that is not empty is refused, and leaves nothing" "$(cat said)" '[ $code = 1 ]' \
        'grep -q "^error: --export filled exists already and is another model" said' '[ "$(ls filled)" = note.txt ]' \
        '! ls -d filled.part-*'
    mkdir empty
    "${convert[@]}" --model plain-model --export empty/ >said 2>&1
    code=$?
    judge "an empty directory receives an export" "$(ls empty | tr '\n' ' ')" '[ $code = 0 ]' \
        '[ -e empty/config.json ]' '! ls -d empty.part-*'
}

two_timelines() {
    holding t.json.part- "${train[@]}" --steps 5 --trace t.json
    local running=$!
    echo mine >t.json
    rm -f held
    finish "$running"
    judge "a timeline does not replace a file that appeared while it was recorded" "$(grep ^error held-said)" \
        '[ "$code" = 1 ]' '[ "$(cat t.json)" = mine ]' \
        'python3 -c "import json, sys; json.load(open(sys.argv[1]))" t.json.part-*'
    rm -f t.json t.json.part-*
}

# ---------------------------------------------------------------- inputs that vanish or change while a run trains
tokenizer_vanishes() {
    local what
    for what in removed replaced; do
        rm -rf run
        cp text/tokenizer.model moving.model
        holding .saving-step-00000010 "${train[@]}" --steps 20 --save-every 10 --tokenizer moving.model --out run
        local running=$!
        if [ $what = removed ]; then rm moving.model; else head -n 300 text/tokenizer.model >moving.model; fi
        rm -f held
        finish "$running"
        judge "a tokenizer that is $what while a run trains is saved as it was at the start" \
            "$(tail -n 1 held-said)" '[ -e run/step-00000010 ]' \
            '[ "$code" = 0 ]' 'same run/latest/tokenizer.model text/tokenizer.model' '[ -e run/step-00000020 ]'
    done
}

# ---------------------------------------------------------------- file systems that lack something
# lacking WORDS NOTES PATTERN: the run has the checkpoints of any other, and an export of them is that of any other.
# They say on as many lines as NOTES what no longer holds
lacking() {
    local words=$1 notes=$2 pattern=$3
    rm -rf run run-model
    WITHOUT="$words" LD_PRELOAD="$work/shim.so" "${train[@]}" --steps 30 --deterministic --save-every 10 --out run \
        >said 2>all && WITHOUT="$words" LD_PRELOAD="$work/shim.so" "${convert[@]}" --model run/step-00000030 \
        --export run-model >said 2>>all
    code=$?
    grep -v "^note: matmuls are plain C" all >err # on some processors, whatever the file system
    judge "a file system without $words" "$(tr '\n' ' ' <err)" '[ "$code" = 0 ]' \
        'same run/step-00000030/model.safetensors plain/step-00000030/model.safetensors' \
        'same run/step-00000030/trainer.json plain/step-00000030/trainer.json' \
        'same run-model/model.safetensors plain-model/model.safetensors' '[ "$(grep -cE "$pattern" err)" = "$notes" ]' \
        '[ "$(wc -l <err)" = "$notes" ]'
}

weak_file_systems() {
    lacking flock 1 "^note: the file system of --out run has no locks"
    lacking symlink 1 "^note: the file system of run has no symbolic links .*, so there is no run/latest"
    lacking dirsync 2 "^note: the file system of .* cannot sync directories"
    lacking "fallocate direct hardlink whole" 0 "."
    rm -rf offloaded
    WITHOUT=fallocate LD_PRELOAD="$work/shim.so" "${train[@]}" --steps 30 --deterministic --offload optimizer \
        --out offloaded >said 2>&1
    code=$?
    judge "--offload on a file system that cannot reserve space" "exit code $code: $(tail -n 1 said)" '[ $code = 0 ]' \
        'same offloaded/step-00000030/model.safetensors plain/step-00000030/model.safetensors'
    WITHOUT=symlink LD_PRELOAD="$work/shim.so" "${train[@]}" --steps 35 --deterministic --out run --resume auto \
        >said 2>&1
    judge "--resume auto finds the newest checkpoint without the link" "$(grep ^resumed said)" \
        'grep -q "^resumed from run/step-00000030" said'
    WITHOUT=hardlink LD_PRELOAD="$work/shim.so" "${train[@]}" --steps 3 --trace link.json >said 2>&1
    code=$?
    judge "a timeline on a file system without hard links" "exit code $code" '[ $code = 0 ]' \
        'python3 -c "import json; json.load(open(\"link.json\"))"'
}

# ---------------------------------------------------------------- what else may lie under --out
unreadable_checkpoint() {
    rm -rf run
    cp -r plain run
    rm run/step-00000030/trainer.json
    "${train[@]}" --steps 40 --deterministic --out run --resume auto >said 2>&1
    code=$?
    judge "a newest checkpoint without trainer.json is reported, and not passed over" "exit code $code: $(cat said)" \
        '[ "$code" = 1 ]' 'grep -q "^error: .*run/step-00000030.*trainer.json" said' \
        'has_steps run 30'
}

odd_names() {
    rm -rf run
    cp -r plain run
    mkdir run/step-99999999 run/.saving-notes run/.deleting-old run/step-000000001
    touch run/.saving-notes/mine
    mkdir run/.saving-step-00000040-0123456789abcdef
    "${train[@]}" --steps 40 --deterministic --save-every 10 --keep 1 --out run --resume auto >said 2>&1
    code=$?
    judge "directories with odd names under --out are neither checkpoints nor leftovers" "$(tail -n 1 said)" \
        '[ "$code" = 0 ]' 'grep -q "^resumed from run/step-00000030" said' '[ -e run/.saving-notes/mine ]' \
        '[ -d run/.deleting-old ]' '[ -d run/step-99999999 ]' '[ -d run/step-000000001 ]' \
        '[ ! -e run/.saving-step-00000040-0123456789abcdef ]' '[ -d run/step-00000040 ]' '[ ! -d run/step-00000030 ]'
}

failed_start() {
    rm -rf run
    (ulimit -f 0 && exec "${train[@]}" --steps 3 --out run) 2>&1 | cat >said # as on a full disk
    "${train[@]}" --steps 3 --out run >said2 2>&1
    code=$?
    judge "a start that failed before its first step does not refuse the next one" \
        "$(grep ^error said); then exit code $code" 'grep -q "^error: cannot write" said' '[ "$code" = 0 ]' \
        '[ -e run/latest/trainer.json ]'
}

# ---------------------------------------------------------------- signals
trains() { grep -qs "^step" said; }
# Runs a command that SIGINT ends: a shell without job control starts background commands with SIGINT ignored.
with_sigint='import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execvp(sys.argv[1], sys.argv[1:])'
# signalled NAME SIGNAL CODE PATTERN COMMAND…: the command gets the signal while it runs; it must end with the exit code
# and say PATTERN
signalled() {
    local name=$1 signal=$2 expected=$3 pattern=$4
    shift 4
    rm -rf run said
    python3 -c "$with_sigint" "$@" >said 2>err &
    local running=$!
    wait_for 10 trains
    kill "-${signal% twice}" "$running"
    if [ "$signal" != "${signal% twice}" ]; then
        wait_for 10 test -e held # while it saves
        kill "-${signal% twice}" "$running"
    fi
    finish "$running"
    rm -f held
    judge "$name" "exit code $code: $(tail -n 1 err)" '[ "$code" = "$expected" ]' 'grep -qE "$pattern" said err'
}

signals() {
    local signal
    for signal in INT HUP TERM; do
        signalled "SIG$signal saves a checkpoint and ends training" $signal 75 "a signal asked to save and to end" \
            "${train[@]}" --steps 100000000 --out run
        [ -e run/latest/trainer.json ] || fail "SIG$signal saves" "no checkpoint"
    done
    signalled "SIGINT without --out ends training, and says that nothing is saved" INT 130 "SIGINT .*; nothing was" \
        "${train[@]}" --steps 100000000
    signalled "SIGTERM without --out ends training by the signal" TERM 143 "ended by a signal; nothing was saved" \
        "${train[@]}" --steps 100000000
    HOLD=.saving-step LD_PRELOAD="$work/shim.so" signalled "a second Ctrl-C ends training at once" "INT twice" 130 \
        "press Ctrl-C again" "${train[@]}" --steps 100000000 --out run
    rm -rf run
    nohup "${train[@]}" --steps 100000000 --out run >said 2>err &
    local running=$!
    wait_for 10 has_steps run
    kill -HUP "$running"
    sleep 0.5
    if kill -0 "$running" 2>/dev/null; then pass "nohup: SIGHUP stays ignored" "the run goes on"
    else fail "nohup: SIGHUP stays ignored" "$(tail -n 1 err)"; fi
    kill -TERM "$running"
    finish "$running"
    rm -rf run
    "${train[@]}" --steps 200 --out run 2>err | head -n 1 >said
    judge "training does not end when nobody reads its output" "$(wc -l <run/metrics.jsonl) steps; $(head -n 1 err)" \
        'has_steps run 200' '[ -e run/step-00000200/trainer.json ]'
    signals_to_exports
}

# An export that a signal ends has no directory under its name, and the next one finds nothing in its way.
signals_to_exports() {
    local signal expected
    for signal in "INT 130" "HUP 129" "TERM 143"; do
        read -r signal expected <<<"$signal"
        holding told.part- python3 -c "$with_sigint" "${convert[@]}" --model plain-model --export told
        kill "-$signal" $!
        finish $!
        rm -f held
        judge "SIG$signal ends an export, and says that nothing is saved" "exit code $code: $(tail -n 1 held-said)" \
            '[ "$code" = "$expected" ]' 'grep -q "^note: ended by .*; nothing was saved" held-said' '! [ -e told ]'
    done
    "${convert[@]}" --model plain-model --export told >said 2>&1
    code=$?
    judge "an export succeeds after signals have ended others" "exit code $code" '[ "$code" = 0 ]' \
        'diff -r told plain-model'
    (ulimit -f 4 && exec "${convert[@]}" --model plain-model --export limited >said 2>&1)
    code=$?
    judge "a limit on the size of files is an error of an export" "exit code $code: $(tail -n 1 said)" \
        '[ "$code" = 1 ]' 'grep -q "^error: .*File too large" said' '! [ -e limited ]' \
        '[ -z "$(find limited.part-* -type f -size +0)" ]'
}

# ---------------------------------------------------------------- containers
# own_group CONTROLLER: the directory of this process's control group of version 1; fails if there is none
own_group() {
    local path
    path=$(sed -nE "s/^[0-9]+:([a-z,]*,)?$1(,[a-z,]*)?:(.*)/\\3/p" /proc/self/cgroup)
    [ -n "$path" ] && [ -w "/sys/fs/cgroup/$1${path%/}" ] && echo "/sys/fs/cgroup/$1${path%/}"
}

# within GROUP COMMAND…: runs a command in a control group
within() {
    local group=$1
    shift
    (echo "$BASHPID" >"$group/cgroup.procs" && exec "$@")
}

containers() {
    local cpu memory
    if [ "$(id -u)" != 0 ] || ! cpu=$(own_group cpu) || ! memory=$(own_group memory); then
        echo "left out: containers, which need root and control groups of version 1 (unit tests cover version 2)"
        return
    fi
    cpu+=/llama3-$$ memory+=/llama3-$$
    mkdir "$cpu" "$memory" || return
    echo 100000 >"$cpu/cpu.cfs_period_us" && echo 100000 >"$cpu/cpu.cfs_quota_us"
    echo 60M >"$memory/memory.limit_in_bytes"
    rm -rf run
    within "$cpu" "$program" --model model --data text/train.tok --seq 32 --batch 1 --steps 2 >said 2>&1
    judge "a quota of one CPU gives one thread" "$(grep -oE "[0-9]+ threads?[^,;]*" said | head -n 1)" \
        'grep -qE "(^|[^0-9])1 thread( |,|$)" said'
    within "$memory" "$program" --model tiny --vocab-size 600 --data text/train.tok --batch 8 --threads 1 --steps 2 \
        >said 2>&1
    code=$?
    judge "a run that exceeds the memory limit of its container is refused before it is killed" \
        "exit code $code: $(tail -n 1 said)" '[ "$code" = 1 ]' 'grep -q "^error: the run needs .* GB of memory" said'
    rmdir "$cpu" "$memory"
}

limited_threads() {
    if [ "$(id -u)" != 0 ] || ! command -v setpriv >/dev/null; then
        echo "left out: a limit on threads, which needs root to become another user"
        return
    fi
    chmod 755 "$work"
    cp "$program" limited-program
    setpriv --reuid 65531 --regid 65531 --clear-groups bash -c 'ulimit -u 4 && exec "$@"' _ ./limited-program \
        --model model --data text/train.tok --seq 32 --batch 1 --threads 8 --workers 1 --steps 1 >said 2>&1
    code=$?
    judge "fewer threads than --threads asks for are an error that names the option" \
        "exit code $code: $(tail -n 1 said)" '[ "$code" = 1 ]' \
        'grep -qE "^error: only [0-9]+ of the 8 threads .* use a smaller --threads" said'
}

without_proc() {
    if [ "$(id -u)" != 0 ] || ! command -v mpirun >/dev/null || ! command -v unshare >/dev/null; then
        echo "left out: mpirun without /proc, which needs root"
        return
    fi
    rm -rf run
    unshare --mount sh -c 'mount -t tmpfs none /proc && exec "$@"' _ mpirun --allow-run-as-root --oversubscribe \
        --bind-to none -np 2 "${train[@]}" --steps 300 --out run >said 2>&1
    code=$?
    judge "mpirun without /proc: no rank is reported as dead" "exit code $code: $(grep -E "^(failure|error)" said)" \
        '[ "$code" = 0 ]' '! grep -q "^failure" said' 'has_steps run 300'
}

# started_with VARIABLE=VALUE…: the environment and the name of a run that was started with these variables
started_with() {
    rm -f said
    env -u OMP_WAIT_POLICY -u GOMP_SPINCOUNT -u KMP_BLOCKTIME "$@" "${train[@]}" --steps 100000000 >said 2>&1 &
    local run=$!
    wait_for 10 trains
    settings=$(tr '\0' '\n' <"/proc/$run/environ" | grep -E '^(OMP_WAIT_POLICY|GOMP_SPINCOUNT|KMP_BLOCKTIME)=')
    process_name=$(<"/proc/$run/comm")
    kill $run
    wait $run 2>/dev/null
}

spinning() {
    local settings process_name loader
    started_with
    judge "threads that wait sleep soon, without a setting of the user's" "$process_name, $settings" \
        'grep -q GOMP_SPINCOUNT= <<<"$settings"' '[ "$process_name" = train_llama3 ]'
    started_with GOMP_SPINCOUNT=7
    judge "the user's setting of GOMP_SPINCOUNT is left alone" "$settings" '[ "$settings" = GOMP_SPINCOUNT=7 ]'
    started_with OMP_WAIT_POLICY=active
    judge "the user's OMP_WAIT_POLICY is left alone" "$settings" '[ "$settings" = OMP_WAIT_POLICY=active ]'
    rm -rf run
    env -u OMP_WAIT_POLICY -u GOMP_SPINCOUNT "${train[@]}" --steps 3 --out run --after-save env >said 2>&1
    judge "commands of --after-save do not inherit the limit" "$(tail -n 1 said)" '[ -s run/after-save.log ]' \
        '! grep -qE "SPINCOUNT|STARTED_AGAIN" run/after-save.log'
    loader=$(ldd "$program" | sed -nE 's/^[[:space:]]*(\/[^ ]*\/ld-[^ ]*).*/\1/p')
    env -u OMP_WAIT_POLICY -u GOMP_SPINCOUNT "$loader" "$program" --version >said 2>&1
    judge "the dynamic loader can start the program" "$loader: $(head -n 1 said)" \
        'grep -q "^train_llama3 .*commit" said'
}

# oneDNN's matmuls let the stack pointer point into the heap for a while, where no handler of a signal may write.
signals_in_matmuls() {
    local run code i
    mkdir -p wide
    cat >wide/config.json <<'END'
{"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
 "intermediate_size": 512, "vocab_size": 600, "max_position_embeddings": 64, "rope_theta": 500000}
END
    rm -rf run
    "${train[@]}" --model wide --batch 4 --steps 100000000 --keep 1 --out run >said 2>&1 &
    run=$!
    wait_for 10 trains
    for ((i = 0; i < 300; i++)); do
        kill -USR1 $run 2>/dev/null || break
        sleep 0.004
    done
    kill -TERM $run 2>/dev/null
    wait $run
    code=$?
    judge "signals while matmuls compute do no harm" "$i signals, exit code $code: $(tail -n 1 said)" \
        '[ "$i $code" = "300 75" ]'
}

prepare
all="two_exports unfinished_exports two_timelines tokenizer_vanishes weak_file_systems unreadable_checkpoint odd_names
    failed_start signals containers limited_threads without_proc spinning signals_in_matmuls"
for scenario in ${2:-$all}; do
    "$scenario"
done
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
