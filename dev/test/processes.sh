#!/usr/bin/env bash
# processes.sh [PROGRAM] : the program as a whole. Ranks that stop or die end the run in time; however the ranks are
# started, they compute the same; the files under --out are what they should be; text comes back from tokens; training
# helps.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. dev/test/checks.sh
program=$(realpath "${1:-build/cpu-fp32/train_llama3}")
tokens=${program%/*}/tokens_llama3
planner=$(program_for --plan) evaluate=$(program_for --eval x) generate=$(program_for --prompt x)
convert=$(program_for --export x)
top=$PWD
work=$(mktemp -d)
started=() # processes that may be left over
trap 'end_started; rm -rf "$work"' EXIT
cd "$work"
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_mpi_yield_when_idle=1 LC_ALL=C

now() { echo $((${EPOCHREALTIME/./} / 1000)); } # ms
end_started() { for pid in ${started[@]+"${started[@]}"}; do kill -KILL "$pid" 2>/dev/null; done; }

# runs NAME COMMAND… : stdout into .out, stderr into .err; a failing check where the exit code is not 0
runs() {
    local name=$1 code
    shift
    timeout -k 1 60 "$@" </dev/null >.out 2>.err
    code=$?
    [ "$code" = 0 ] || fail "$name" "exit code $code: $(cat .out .err | tail -n 1)"
    return "$code"
}

# same NAME FILE FILE… : all hold the same bytes, and some
same() {
    local name=$1 first=$2 file
    shift 2
    for file; do cmp -s "$first" "$file" || { fail "$name" "$(cmp "$first" "$file" 2>&1)"; return; }; done
    if [ -s "$first" ]; then
        pass "$name" "$(($# + 1)) times the same $(wc -c <"$first") bytes"
    else
        fail "$name" "no output"
    fi
}

prepare() {
    "$top/dev/test/sample_text.sh" sample
    VOCAB_SIZE=600 "$top/dev/data/text.sh" text sample >.out 2>&1 || {
        cat .out
        fail "the data" "dev/data/text.sh refuses the text of dev/test/sample_text.sh"
        exit 1
    }
    mkdir model
    cat >model/config.json <<'END'
{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
 "intermediate_size": 160, "vocab_size": 600, "max_position_embeddings": 256, "rope_theta": 500000}
END
    train=(--model model --data text/train.tok --seq 32 --threads 1)
    mpi=(mpirun --oversubscribe --bind-to none) have_mpi=1
    if ! command -v mpirun >/dev/null || ! "${mpi[@]}" -np 1 "$program" --version >.out 2>&1 ||
        grep -q '^MPI: not in this build' .out; then
        have_mpi=
        echo "no mpirun, or a build without MPI: the checks with processes are left out"
    fi
}

# ---------------------------------------------------------------- ranks that stop or die
# wait_until SECONDS COMMAND… : until COMMAND succeeds
wait_until() {
    local limit=$(($(now) + $1 * 1000))
    shift
    until "$@"; do [ "$(now)" -lt "$limit" ] || return 1; sleep 0.05; done
}
gone() { ! kill -0 "$1" 2>/dev/null; }
has_steps() { [ "$(wc -l 2>/dev/null <"$1/metrics.jsonl" || echo 0)" -ge 3 ]; }
ranks_of() {
    local parent=$1 stat line fields
    for stat in /proc/[0-9]*/stat; do # not every machine has ps
        { read -r line <"$stat"; } 2>/dev/null || continue
        read -r -a fields <<<"${line##*) }" # state, parent, …
        if [ "${fields[1]}" = "$parent" ]; then echo "${line%% *}"; fi
    done
}

# those of this script's runs: ranks, and what watches over them
left_over() {
    local file
    for file in /proc/[0-9]*/cmdline; do
        if tr '\0' '\n' <"$file" | grep -qxF -- "$mark"; then basename "${file%/cmdline}"; fi
    done 2>/dev/null
}
none_left() { [ -z "$(left_over)" ]; }
shared_memory() { ls /dev/shm 2>/dev/null | grep '^llama3-' | sort; }
# that of other runs may come and go
no_shared_memory() { [ -z "$(comm -13 <(echo "$shared_before") <(shared_memory))" ]; }

# twice CASE ARGUMENT…: how soon ranks notice a loss, and which of two hosts reports it first, depends on what else the
# machine does. A case that fails is announced and run once more; only the second failure counts.
attempt=2 missed_once=
twice() {
    attempt=1 missed_once=
    "$@"
    attempt=2
    [ -z "$missed_once" ] || "$@"
}
missed() {
    if [ "$attempt" = 2 ]; then
        fail "$@"
        return
    fi
    missed_once=1
    echo "once more: $1: ${2:0:400}"
}

# ended NAME START SECONDS CODES PATTERN FLIGHTS : how a run that lost a rank ended: in time, with a line that names the
# cause, no process and no shared memory left behind, the last collectives of as many ranks under --out
ended() {
    local name=$1 start=$2 seconds=$3 codes=$4 pattern=$5 flights=$6 code found how
    if ! wait_until "$seconds" gone "$launcher"; then
        missed "$name" "still running $seconds s later: $(tail -n 1 .err)"
        end_started
        wait "$launcher" 2>/dev/null
        return
    fi
    start=$(($(now) - start))
    wait "$launcher"
    code=$?
    wait_until 2 none_left || true
    found=$(ls "$out/flight" 2>/dev/null | wc -l) # a host that is ended from outside leaves its own after the launcher
    if ! none_left; then
        missed "$name" "processes are left over: $(left_over | tr '\n' ' ')"
        kill -KILL $(left_over)
    elif ! wait_until 5 no_shared_memory; then
        missed "$name" "shared memory is left over: $(comm -13 <(echo "$shared_before") <(shared_memory) | tr '\n' ' ')"
    elif ! [[ " $codes " == *" $code "* ]]; then missed "$name" "exit code $code, expected $codes: $(tail -n 1 .err)"
    elif [ "$(grep -cE '^(failure|error): ' .err)" != 1 ] || ! grep -qE "$pattern" .err; then
        missed "$name" "expected one line, like '$pattern': $(grep -E '^(failure|error): ' .err || tail -n 1 .err)"
    elif [ "$found" != "$flights" ]; then missed "$name" "$found files under $out/flight, expected $flights"
    else
        how="exit code $code after $start ms (bound $((seconds * 1000))), $found flight files"
        pass "$name" "$how; $(grep -m1 -E "$pattern" .err)"
    fi
    started=()
}

# lost NAME HOSTS VICTIM SIGNAL SECONDS CODES PATTERN : a rank of three gets SIGNAL while they train, --timeout 2.
# HOSTS: the ranks of each host; to the program, ranks whose launcher's step differs are on different hosts. `layout`:
# further options
lost() {
    local name=$1 hosts=$2 victim=$3 signal=$4 seconds=$5 codes=$6 pattern=$7 out=$((++runs_lost)).lost
    local launcher ranks start host=0 n command=() options
    mark=$out
    options=("${train[@]}" --batch 1 --steps 100000000 --timeout 2 ${layout[@]+"${layout[@]}"} --out "$out")
    for n in $hosts; do
        command+=(${command[@]+:} -np "$n" -x SLURM_STEP_ID=$((host++)) "$program" "${options[@]}")
    done
    "${mpi[@]}" "${command[@]}" </dev/null >.out 2>.err &
    launcher=$!
    started=("$launcher")
    if ! wait_until 20 has_steps "$out"; then
        missed "$name" "no steps within 20 s: $(tail -n 1 .err)"
        end_started
        return
    fi
    ranks=$(ranks_of "$launcher" | sort -n)
    started+=($ranks)
    start=$(now)
    kill "-$signal" "$(sed -n "$((victim + 1))p" <<<"$ranks")"
    ended "$name" "$start" "$seconds" "$codes" "$pattern" 3
}

# not_started NAME SECONDS PATTERN COMMAND… : two processes, the second of them COMMAND, which never connects
not_started() {
    local name=$1 seconds=$2 pattern=$3 out=never start launcher
    shift 3
    mark=$out
    start=$(now)
    "${mpi[@]}" -np 1 "$program" "${train[@]}" --batch 1 --steps 1 --timeout 0.5 --out "$out" : -np 1 "$@" \
        </dev/null >.out 2>.err &
    launcher=$!
    started=("$launcher")
    # 139: Open MPI 4.1's mpirun itself sometimes crashes when a process goes before MPI_Init
    ended "$name" "$start" "$seconds" "2 139" "$pattern" 0
}

# alone NAME PATTERN OPTION… : one rank of three has these options, and all end
alone() {
    local name=$1 pattern=$2 out=alone start launcher
    shift 2
    mark=$out
    start=$(now)
    "${mpi[@]}" -np 2 "$program" "${train[@]}" --batch 1 --steps 1 --out "$out" : -np 1 "$program" "${train[@]}" \
        --batch 1 --steps 1 --out "$out" "$@" </dev/null >.out 2>.err &
    launcher=$!
    started=("$launcher")
    ended "$name" "$start" 6 1 "$pattern" 0
    rm -rf "$out"
}

# a process that stops itself as soon as the program in it has a second thread
stops_in_start_up='"$0" "$@" & pid=$!
until ls /proc/$pid/task | grep -qv "^$pid\$"; do :; done
kill -STOP $pid
wait $pid'

ranks_lost() {
    local runs_lost=0 shared_before layout=()
    local second='rank 1 on host [^ ]+ \(process [0-9]+\)' third='rank 2 on host [^ ]+ \(process [0-9]+\)'
    local waited='^failure: rank [0-9]+( on host [^ ]+)? waited 2\.[0-9] s for'
    waited+=' (all_gather|reduce_scatter) #[0-9]+ of .* on (fsdp|world) \(3 ranks\); '
    local silent='^failure: no sign of life for 2\.[0-9] s in'
    local last='its last collective was (all_gather|reduce_scatter) #[0-9]+ of .* on fsdp'
    local did='It was (computing|running|waiting|reading)'
    local message="(send|receive) #[0-9]+ of '(activations|gradients) [0-3] to stage [0-2]' on pp"
    message+='|all_gather #[0-9]+ of .* on world'
    shared_before=$(shared_memory)
    twice lost "a stopped rank" 3 1 STOP 4 2 "$waited$second is stopped\. $did"
    twice lost "a stopped rank of another host" "1 2" 2 STOP 4 2 "$waited$third is stopped\. $did"
    twice lost "a stopped rank, alone on its host" "2 1" 2 STOP 5 2 "$silent a step: $third is stopped\. $did"
    twice lost "a killed rank" 3 1 KILL 2 "137 2" "^failure: $second died: .*\. $did.*; $last"
    twice lost "a killed rank of another host" "1 2" 1 KILL 2 "137 2" "^failure: $second died: .*; $last"
    layout=(--pp 3 --accum 4)
    twice lost "a stopped stage of a pipeline" 3 1 STOP 4 2 \
        "^failure: rank [02] waited 2\.[0-9] s for ($message).*; $second is stopped\. $did"
    twice lost "a killed stage of a pipeline" 3 1 KILL 4 "137 2" \
        "^failure: $second died: .*\. It was (computing|running|reading|waiting for ($message))"
    local unconnected='^failure: the ranks of host [^ ]+, [01](, [01])?, are not connected to all others after 2 s; '
    twice not_started "a process that never starts this program" 5 \
        "${unconnected}1 of this host's 2 ranks never started this program" sleep 8
    twice not_started "a rank stopped in start-up" 5 \
        "$unconnected$second is stopped\. It was connecting to the other ranks" \
        bash -c "$stops_in_start_up" "$program" "${train[@]}" --batch 1 --steps 1 --timeout 0.5 --out never
    twice alone "an error of one rank alone, before it finds the others" "^error: unknown option --nonsense" --nonsense
    twice alone "an error of one rank alone, when ranks compare" "^error: rank 2 was started with different options" \
        --lr 7
    twice alone "an error of one rank alone, after it found the others" "^error: no token file at nowhere" \
        --data nowhere
}

# ---------------------------------------------------------------- launchers and signals at the start
handles_sigterm() { # SIGTERM is number 15
    local mask
    mask=$(sed -nE 's/^SigCgt:\s*//p' "/proc/$1/status" 2>/dev/null)
    [ -n "$mask" ] && [ $((16#$mask >> 14 & 1)) = 1 ]
}

starts() {
    local code pid shared_before
    SLURM_STEP_NUM_TASKS=2 "$program" "${train[@]}" --batch 1 --steps 1 >.out 2>.err
    code=$?
    if [ "$code" = 1 ] && grep -q '^error: the launcher started 2 processes, but MPI connected only 1' .err; then
        pass "srun without PMIx is refused" "$(cat .err)"
    else fail "srun without PMIx is refused" "exit code $code: $(tail -n 1 .err)"; fi
    shared_before=$(shared_memory)
    "$program" "${train[@]}" --batch 1 --steps 100000 --out early --ranks 2 >.out 2>.err &
    pid=$!
    wait_until 5 handles_sigterm "$pid"
    kill -TERM "$pid"
    wait "$pid"
    code=$?
    if [ "$code" = 75 ] && no_shared_memory; then pass "a signal at the start: exit code 75" "nothing is left behind"
    else fail "a signal at the start: exit code 75" "exit code $code: $(tail -n 1 .err)"; fi
}

# ---------------------------------------------------------------- the same, however it is started
figures() { sed -nE "s/.*\"$2\":([^,}]*).*/\1/p" "$1/metrics.jsonl"; }

# losses_equal NAME DIR DIR : the losses of all steps, within 1e-5; in bf16, where a rounding may fall to the other
# side, 1e-3
losses_equal() {
    local worst steps last bound=1e-5
    "$program" --version | grep -q '^precision: bf16' && bound=1e-3
    worst=$(paste <(figures "$2" loss) <(figures "$3" loss) | awk '
        {
            d = $1 == "" || $2 == "" ? 1e9 : $1 - $2
            if (d < 0) d = -d
            if (d > worst) worst = d
        }
        END { print NR ? worst + 0 : 1e9 }')
    if awk -v w="$worst" -v b="$bound" 'BEGIN { exit !(w <= b) }'; then
        steps=$(figures "$2" loss | wc -l)
        last=$(figures "$2" loss | tail -n 1)
        pass "$1" "largest difference $worst (bound $bound) over $steps steps; last loss $last"
    else fail "$1" "largest difference $worst, bound $bound"; fi
}

launches() {
    local step=(--steps 12 --lr 2e-3 --warmup 4 --seed 7)
    runs "1 rank, 2 micro-batches" "$program" "${train[@]}" "${step[@]}" --batch 2 --accum 2 --out one &&
        runs "2 ranks as threads" "$program" "${train[@]}" "${step[@]}" --batch 2 --ranks 2 --val text/val.tok --out \
            threads && cp .out threads.said &&
        losses_equal "2 threads train as 1 rank with --accum 2" one threads
    [ -n "$have_mpi" ] || return
    runs "2 ranks as processes" "${mpi[@]}" -np 2 "$program" "${train[@]}" "${step[@]}" --batch 2 --out processes &&
        losses_equal "2 processes train as 1 rank with --accum 2" one processes
    runs "6 micro-batches" "$program" "${train[@]}" "${step[@]}" --batch 1 --accum 6 --out six &&
        runs "3 processes, 2 micro-batches each" "${mpi[@]}" -np 3 "$program" "${train[@]}" "${step[@]}" --batch 1 \
            --accum 2 --out three &&
        losses_equal "3 processes with --accum 2 train as 1 rank with --accum 6" six three
}

# ---------------------------------------------------------------- hybrids: their groups and their traffic
# received DIR AXIS : bytes that a rank received over AXIS in a step, as the transport measured them
received() {
    grep -oE "\"axis\":\"$2\"[^}]*\}[^}]*\}" "$1/ledger.json" |
        sed -E 's/.*"measured":([0-9]+)\}$/\1/' |
        awk '{ sum += $1 } END { print sum + 0 }'
}

hybrid() {
    local name="2 replicas of 4 shards on 8 ranks" groups layout start sharding told
    local shards='[[0,1,2,3],[4,5,6,7]]' replicas='[[0,4],[1,5],[2,6],[3,7]]'
    groups="\"dp_shard\":$shards,\"dp_replicate\":$replicas,\"fsdp\":$shards"
    [ -n "$have_mpi" ] && start=("${mpi[@]}" -np 8 "$program") || start=("$program" --ranks 8)
    for layout in hybrid8 fsdp8 ddp8; do
        case $layout in
            hybrid8) sharding=(--dp-replicate 2) ;;
            fsdp8) sharding=(--dp-shard 8) ;;
            ddp8) sharding=(--dp-shard 8 --sharding no_shard) ;;
        esac
        runs "$name: $layout" "${start[@]}" "${train[@]}" --batch 1 --steps 2 --out "$layout" "${sharding[@]}" ||
            return
        cp .out "$layout.txt"
    done
    if grep -qF "$groups" hybrid8/layout.json; then
        pass "$name: the groups, read back" "$groups"
    else
        fail "$name: the groups, read back" "$(cat hybrid8/layout.json)"
    fi
    if grep -qx 'fsdp: 2 groups of 4: 0-3, 4-7' hybrid8.txt &&
        grep -qx 'dp_replicate: 4 groups of 2: 0+4, 1+5, 2+6, 3+7' hybrid8.txt; then
        pass "$name: the banner tells every group" "$(grep -c 'groups of' hybrid8.txt) lines"
    else fail "$name: the banner tells every group" "$(head -n 5 hybrid8.txt)"; fi
    local whole ddp
    shards=$(received hybrid8 fsdp)
    replicas=$(received hybrid8 dp_replicate)
    whole=$(received fsdp8 fsdp)
    ddp=$(received ddp8 fsdp)
    # of a unit's P bytes, fp32: hybrid 3 P 3/4 less the ends' one gather, and 2 P/4 1/2; FSDP-8 the same 7/8; DDP-8 2 P
    # 7/8
    if awk -v s="$shards" -v r="$replicas" -v w="$whole" -v d="$ddp" '
        function near(a, b) { return a > 0.99 * b && a < 1.01 * b }
        BEGIN { exit !(r > 0 && near(s / w, 6 / 7) && near(r / d, 1 / 7)) }'; then
        pass "$name: the traffic of neither FSDP-8 nor DDP-8" \
            "$shards bytes over shards and $replicas over replicas; FSDP-8 $whole, DDP-8 $ddp"
    else
        told="$shards bytes over shards (6/7 of FSDP-8's $whole expected)"
        fail "$name: the traffic of neither FSDP-8 nor DDP-8" "$told and $replicas over replicas (1/7 of DDP-8's $ddp)"
    fi
    losses_equal "$name: the losses of FSDP-8" hybrid8 fsdp8
    losses_equal "$name: the losses of DDP-8" hybrid8 ddp8
}

# ---------------------------------------------------------------- a model whose state does not fit in memory
# memory_per_rank : what the last run's first line says of it
memory_per_rank() { sed -nE 's/^memory per rank: ([0-9.]+ MB and [0-9.]+ MB in files).*/\1/p' .out; }

offload() {
    local name="--offload all" big=(--model big --data text/train.tok --seq 32 --threads 1 --batch 1 --steps 4) \
        limit=110000 most=0 now pid
    mkdir big new
    sed 's/"vocab_size": 600/"vocab_size": 60000/' model/config.json >big/config.json # 124 MB of state
    runs "$name: without it, no limit" "$program" "${big[@]}" --out in-memory || return
    if (ulimit -d "$limit"; exec "$program" "${big[@]}" --out too-large) >.out 2>.err; then
        fail "$name: without it the model does not fit $limit kB" "it trains"
    elif grep -q '^error: ' .err; then pass "$name: without it the model does not fit $limit kB" "$(tail -n 1 .err)"
    else fail "$name: without it the model does not fit $limit kB" "$(tail -n 1 .err)"; fi
    (ulimit -d "$limit"; exec "$program" "${big[@]}" --offload all --out in-files) >.out 2>.err &
    pid=$!
    started=("$pid")
    while now=$(sed -nE 's/^RssAnon:[^0-9]*([0-9]+).*/\1/p' "/proc/$pid/status" 2>/dev/null); [ -n "$now" ]; do
        [ "$now" -gt "$most" ] && most=$now
        sleep 0.02
    done
    started=()
    if ! wait "$pid"; then fail "$name: trains within $limit kB" "$(cat .out .err | tail -n 1)"
    elif [ "$most" -gt 0 ] && [ "$most" -lt "$limit" ]; then
        pass "$name: trains within $limit kB" "anonymous memory at most $most kB; $(memory_per_rank)"
    else fail "$name: trains within $limit kB" "anonymous memory up to $most kB"; fi
    if diff <(figures in-memory loss) <(figures in-files loss) >/dev/null &&
        diff <(figures in-memory grad_norm) <(figures in-files grad_norm) >/dev/null; then
        pass "$name: the same bits" "$(figures in-files loss | tail -n 1)"
    else
        fail "$name: the same bits" \
            "$(figures in-memory loss | tail -n 1) in memory, $(figures in-files loss | tail -n 1) in files"
    fi
    local memory
    if memory=$(mktemp -d -p /dev/shm 2>/dev/null) && [ "$(stat -f -c %T "$memory")" = tmpfs ]; then
        runs "$name: into files that lie in memory" "$program" "${big[@]}" --steps 1 --offload all --out \
            "$memory/out" &&
            if grep -q 'MB in files, which is memory, too' .out; then
                pass "$name: files that lie in memory are told" "$(grep -m1 -o 'and [0-9.]* MB in files.*' .out)"
            else
                fail "$name: files that lie in memory are told" "$(head -n 1 .out)"
            fi
    fi
    rm -rf "${memory:-}"
    [ -z "$have_mpi" ] || runs "$name: 2 processes, into a directory that nobody has made" "${mpi[@]}" -np 2 \
        "$program" "${big[@]}" --offload all --out new/in-files &&
        pass "$name: 2 processes, into a directory that nobody has made" \
            "$(memory_per_rank)"
    if [ -z "$(find in-files new -name 'offload*')" ]; then
        pass "$name: nothing is left behind" "$(ls in-files | tr '\n' ' ')"
    else
        fail "$name: nothing is left behind" "$(ls in-files)"
    fi
}

# ---------------------------------------------------------------- the files under --out
python=$(command -v python3 || true)
[ -n "$python" ] && ! "$python" -c 'import json' 2>/dev/null && python=

parse_lines='import json, sys
for line in open(sys.argv[1]): json.loads(line, parse_constant=lambda word: 1 / 0)'

# json FILE KEY… : every line is JSON (whole, where there is python3) and has all keys
json() {
    local file=$1 missing='' key lines
    shift
    [ -s "$file" ] || { fail "$file" "is missing or empty"; return; }
    lines=$(wc -l <"$file")
    for key; do [ "$(grep -c "\"$key\":" "$file")" = "$lines" ] || missing+=" $key"; done
    [ -z "$python" ] || "$python" -c "$parse_lines" "$file" 2>/dev/null || missing+=" (a line is not JSON)"
    [ -n "$python" ] || ! grep -qvE '^\{.*\}$' "$file" || missing+=" (a line is not an object)"
    if [ -n "$missing" ]; then
        fail "$file" "missing:$missing"
    else
        pass "$file" "$lines line$([ "$lines" = 1 ] || echo s) of JSON with $# keys"
    fi
}

files() {
    local rows unequal option
    grep '"loss"' threads/metrics.jsonl >steps.jsonl
    grep '"val_loss"' threads/metrics.jsonl >validations.jsonl
    json steps.jsonl step loss grad_norm lr tokens samples seconds tokens_per_s matmul_share mfu wait_s data_wait_s \
        rank_min_max memory params grads optimizer activations comm workspace bytes fsdp dp_replicate tp cp pp \
        wait_axis_s world
    json validations.jsonl step val_loss
    if grep -qE "step +1/.* \| MB per rank: params [0-9.]+, grads [0-9.]+, optimizer [0-9.]+, activations [0-9.]+" \
        threads.said; then
        pass "the first progress line tells memory by category" "$(grep -oE 'MB per rank.*' threads.said)"
    else fail "the first progress line tells memory by category" "$(grep -m1 'step ' threads.said)"; fi
    json threads/layout.json world mesh tp cp pp dp_shard dp_replicate groups fsdp
    json threads/ledger.json traffic axis op calls bytes expected dry_run measured memory category flops
    json threads/plan.json world mesh tokens_per_step rank_classes ranks memory peak flops traffic groups estimate
    if grep -q '"fsdp":\[\[0,1\]\]' threads/layout.json; then
        pass "layout.json: both ranks shard together" '"fsdp":[[0,1]]'
    else
        fail "layout.json: both ranks shard together" "$(cat threads/layout.json)"
    fi
    rows=$(grep -oE '"expected":[0-9]+,"dry_run":[0-9]+,"measured":[0-9]+' threads/ledger.json | wc -l)
    unequal=$(grep -oE '"expected":[0-9]+,"dry_run":[0-9]+,"measured":[0-9]+' threads/ledger.json | tr -c '0-9\n' ' ' |
        awk '$1 != $2 || $2 != $3 || $1 == 0' | wc -l)
    if [ "$rows" -ge 6 ] && [ "$unequal" = 0 ]; then
        pass "ledger.json: expected = dry run = measured" "$rows figures"
    else
        fail "ledger.json: expected = dry run = measured" "$unequal of $rows figures differ, at least 6 expected"
    fi
    rows=$(grep -oE '"category":"[a-z]+","dry_run":[0-9]+,"measured":[0-9]+' threads/ledger.json | wc -l)
    unequal=$(grep -oE '"category":"[a-z]+","dry_run":[0-9]+,"measured":[0-9]+' threads/ledger.json |
        tr -c '0-9\n' ' ' | awk '$1 != $2' | wc -l)
    if [ "$rows" = 7 ] && [ "$unequal" = 0 ]; then
        pass "ledger.json: memory of the dry run = measured" "$rows categories"
    else
        fail "ledger.json: memory of the dry run = measured" "$unequal of $rows categories differ, 7 expected"
    fi
    for option in "--seq 32" "--steps 12" "--seed 7" "--batch 2" "--lr 0.002" "--model model" "--accum 1" "--clip 1" \
        "--ranks 2"; do
        grep -qxF -- "$option" threads/config.txt || {
            fail "config.txt holds every option" "no line '$option'"
            return
        }
    done
    pass "config.txt holds every option" "$(wc -l <threads/config.txt) lines"
}

# two ranks start, train a step and end; the fastest of three runs, because others may use the processors, too
start_time() {
    local start best=100000 i
    for i in 1 2 3; do
        start=$(now)
        "$program" "${train[@]}" --ranks 2 --steps 1 >.out 2>.err ||
            { fail "two ranks start" "$(tail -n 1 .err)"; return; }
        start=$(($(now) - start))
        [ $start -gt $best ] || best=$start
    done
    if [ $best -lt 1000 ]; then pass "two ranks start, train a step and end in less than a second" "$best ms"
    else fail "two ranks start, train a step and end in less than a second" "$best ms"; fi
}

# the plan of 64 ranks of a model of 1.1 TB is told at once, in little memory
plan() {
    local used code memory TIMEFORMAT='%3U %3S' # seconds of processors: what else the machine does is not counted
    used=$({ time sh -c 'ulimit -v 2000000; "$0" --world 64 --model llama3-70b --out plan >.out 2>.err' \
        "$planner"; } 2>&1)
    code=$?
    used=$(awk '{ printf "%d", 1000 * ($1 + $2) }' <<<"$used")
    if [ "$code" = 0 ] && [ "$used" -lt 1000 ] && grep -q '64 ranks' .out; then
        pass "the plan of llama3-70b on 64 ranks takes no memory" "$used ms (bound 1000), address space below 2 GB"
    else
        fail "the plan of llama3-70b on 64 ranks takes no memory" \
            "exit code $code, $used ms (bound 1000): $(cat .out .err | tail -n 1)"
    fi
    "$planner" --world 16384 --model llama3.1-405b --tp 8 --cp 16 --pp 16 --dp-shard 8 --seq 131072 --batch 1 \
        --accum 16 >.out 2>.err
    local name="405B on 16,384 ranks: 16,777,216 tokens a step, 8,192 of a sequence on a rank"
    # fp32 activations of 16,384 channels
    if grep -q '16777216 tokens per step' .out &&
        grep -qE "of all tp ranks +[0-9]+ x +$((8192 * 16384 * 4))\$" .out; then
        pass "$name" "$(grep -m1 'all tp' .out)"
    else fail "$name" "$(grep -E 'tokens' .out | tail -n 3) $(tail -n 1 .err)"; fi
    if [ -x /usr/bin/time ] && /usr/bin/time -f %M "$planner" --world 64 --model llama3-70b >.out 2>.err; then
        memory=$(tail -n 1 .err) # kB
        if [ "$memory" -lt 100000 ]; then
            pass "the same plan's resident memory" "$memory kB (bound 100,000)"
        else
            fail "the same plan's resident memory" "$memory kB, bound 100,000"
        fi
    fi
    json plan/plan.json world mesh tokens_per_step rank_classes ranks memory peak flops traffic groups estimate
}

# timeline FILE RANKS [LANES] : Chrome's trace format, whole (where there is python3), with every rank's process and
# three lanes
timeline() {
    local file=$1 ranks=$2 of=${3:-compute|fsdp|world} pids lanes
    pids=$(grep -oE '^\{"ph":"X","pid":[0-9]+' "$file" | sort -u | wc -l)
    lanes=$(grep -E '"name":"thread_name","args":\{"name":"('"$of"')"' "$file" | wc -l)
    if [ -n "$python" ] && ! "$python" -c 'import json, sys; json.load(open(sys.argv[1]))["traceEvents"]' "$file" \
        2>.err; then
        fail "$file" "not JSON: $(tail -n 1 .err)"
    elif [ "$pids" = "$ranks" ] && [ "$lanes" = $((3 * ranks)) ]; then
        pass "$file" "$pids processes, their lanes $of, $(grep -c '"ph":"X"' "$file") events"
    else fail "$file" "$pids processes of $ranks, $lanes lanes of $((3 * ranks))"; fi
}

# messages KIND : how many of them the pipeline's timeline has
messages() {
    grep -cE "\"cat\":\"communication\",\"name\":\"$1: (activations|gradients) [0-3] to stage [0-2]\"" pipeline.json
}

timelines() {
    local step=(--steps 3 --batch 2) sends receives
    runs "--trace on 2 threads" "$program" "${train[@]}" "${step[@]}" --ranks 2 --trace threads.json &&
        timeline threads.json 2
    runs "--trace of a pipeline" "$program" "${train[@]}" "${step[@]}" --ranks 3 --pp 3 --accum 4 --trace \
        pipeline.json && timeline pipeline.json 3 'compute|pp|world'
    sends=$(messages send)
    receives=$(messages receive)
    if [ "$sends" = 48 ] && [ "$receives" = 48 ]; then
        pass "messages in the timeline of a pipeline" \
            "3 steps x 4 micro-batches x 2 ways x 2 boundaries = 48 sends and 48 receives"
    else fail "messages in the timeline of a pipeline" "$sends sends and $receives receives of 48 each"; fi
    runs "the estimated timeline" "$planner" --world 4 --cluster "$top/dev/clusters/h100-8.json" --out estimate \
        --trace planned.json && timeline planned.json 1
    json estimate/plan.json step_s tokens_per_s mfu compute_s communication_s exposed_s ops linear_forward
    if grep -q '</html>' estimate/plan.html && grep -q '<script>var plan_data = .*"memory":8' estimate/plan.html &&
        grep -q '"stages":\[\[\[0,' estimate/plan.html; then
        pass "plan.html beside it" "memory and the step"
    else fail "plan.html beside it" "$(ls -l estimate 2>&1)"; fi
    [ -n "$have_mpi" ] || return
    runs "--trace on 2 processes" "${mpi[@]}" -np 2 "$program" "${train[@]}" "${step[@]}" --trace processes.json &&
        timeline processes.json 2
}

# ---------------------------------------------------------------- training, and what is done with its model
training() {
    local first last loss loading saved=run/latest
    local continue=(--model $saved --prompt "The river" --max-tokens 40 --temperature 0 --threads 1)
    local measure=(--model $saved --eval text/val.tok --seq 32 --batch 8 --threads 1)
    runs "training" "$program" "${train[@]}" --ranks 2 --batch 8 --steps 80 --lr 5e-3 --warmup 8 --val text/val.tok \
        --val-every 20 --out run || return
    loading='^data loading: [0-9]+ workers?; the first batch took [0-9.]+ ms; later steps waited [0-9.]+ ms each; '
    loading+='reading took [0-9.]+ ms per step$'
    if grep -qE "$loading" .out; then
        pass "the log ends with what the loader cost" "$(grep '^data loading: ' .out)"
    else fail "the log ends with what the loader cost" "the last line: $(tail -n 1 .out)"; fi
    first=$(figures run val_loss | head -n 1)
    last=$(figures run val_loss | tail -n 1)
    if awk -v a="$first" -v b="$last" 'BEGIN { exit !(b < a - 0.2 && b < 5.5) }'; then
        pass "training lowers the validation loss" "ln 600 = 6.40, after 20 steps $first, after 80 $last"
    else
        fail "training lowers the validation loss" \
            "after 20 steps $first, after 80 $last, expected a fall of 0.2 to below 5.5"
    fi
    runs "eval_llama3" "$evaluate" "${measure[@]}" || return
    cp .out eval-1
    loss=$(sed -nE 's/.*"loss":([^,}]*).*/\1/p' eval-1)
    if awk -v a="$last" -v b="$loss" 'BEGIN { d = a - b; exit !(b > 0 && d < 1e-6 && d > -1e-6) }'; then
        pass "the saved model has the trained one's loss" "$last and $loss"
    else fail "the saved model has the trained one's loss" "$last and $loss"; fi
    json eval-1 file tokens loss perplexity
    runs "eval_llama3 on 2 threads" "$evaluate" "${measure[@]}" --ranks 2 && cp .out eval-2 &&
        same "the loss on 1 and 2 ranks" eval-1 eval-2
    runs "generate_llama3" "$generate" "${continue[@]}" && cp .out text-1
    runs "generate_llama3 again" "$generate" "${continue[@]}" && cp .out text-2
    runs "generate_llama3 on 2 threads" "$generate" "${continue[@]}" --ranks 2 && cp .out text-3
    same "generated text without temperature, twice and on 2 ranks" text-1 text-2 text-3
    runs "convert_llama3" "$convert" --model $saved --export exported --threads 1 &&
        same "an exported model is the saved one" $saved/model.safetensors exported/model.safetensors
    [ -n "$have_mpi" ] || return
    runs "eval_llama3 on 2 processes" "${mpi[@]}" -np 2 "$evaluate" "${measure[@]}" && cp .out eval-3 &&
        same "the loss on 1 rank and 2 processes" eval-1 eval-3
    runs "generate_llama3 on 2 processes" "${mpi[@]}" -np 2 "$generate" "${continue[@]}" && cp .out text-4 &&
        same "generated text without temperature, on 2 processes" text-1 text-4
    runs "convert_llama3 on 2 processes" "${mpi[@]}" -np 2 "$convert" --model exported --export copy --threads 1 &&
        same "a model exported by 2 processes is the one they loaded" exported/model.safetensors copy/model.safetensors
}

# back_again NAME FILE : FILE's bytes come back from its tokens
back_again() {
    runs "$1: --encode" "$tokens" --encode "$2" --tokenizer text/tokenizer.model || return
    cp .out ids
    runs "$1: --decode" "$tokens" --decode ids --tokenizer text/tokenizer.model || return
    if cmp -s "$2" .out; then
        pass "$1 come back from tokens" "$(wc -c <"$2") bytes, $(wc -l <ids) tokens"
    else
        fail "$1 come back from tokens" "$(cmp "$2" .out 2>&1)"
    fi
}

# any bytes: all 256, not UTF-8, cut characters, Windows' line ends, zeros, a long run, no line end at the end
round_trip() {
    local byte i
    {
        for ((i = 0; i < 256; i++)); do printf -v byte '\\x%02x' "$i"; printf '%b' "$byte"; done
        printf 'na\xc3\xafve \xe2\x82\xac \xf0\x9f\xa6\x99\r\n\r\n\t  '
        printf 'x \xe2\x82 \xff\xfe\x00\x00 <|end_of_text|> 12345678'
        printf 'ab%.0s' {1..3000}
    } >odd
    back_again "odd bytes" odd
    cat sample/*.txt >plain
    back_again "bytes of plain text" plain
    : >nothing
    back_again "no bytes at all" nothing
}

prepare
[ -z "$have_mpi" ] || ranks_lost
starts
launches
hybrid
offload
files
start_time
plan
timelines
training
round_trip
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
