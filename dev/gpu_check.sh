#!/usr/bin/env bash
# gpu_check.sh: checks and measures what only an NVIDIA GPU can show. Its stages are grouped in calls of at most ten
# minutes; it writes the results to disk after each stage.
#
#   make gpu-programs              builds everything that it runs; docs/guide/gpus.md says what to copy elsewhere
#   dev/gpu_check.sh CALL…         correctness  300 s  machine tests nccl nccl-ranks generation scores lora-int8 resume
#                                                      directory ranks curve
#                                  speed        280 s  roofline attention training (Llama-3.2-1B beside PyTorch's)
#                                  training-8b  160 s  the shape of Llama-3-8B; fp8: whether matmuls in fp8 would pay
#                                  nccl-ranks   120 s  2 and 4 processes that share the GPU, over NCCL
#                                  profiles     540 s  profiler pages
#                                  sanitizers   540 s  variants of the step; compute-sanitizer on the kernels
#                                  without a CALL: all of them, and before them the stage build
#   STAGES="tests ranks" dev/gpu_check.sh    these stages alone
#   OUT=folder       results (dev/results): gpu-check.md, .json, .log, roofline-gpu.md, training-gpu.md, kernels-gpu.md;
#                    earlier results of other stages are kept
#   LIMIT=seconds    for all that is called, instead of the sum above: a stage gets at most what is left
#   PYTHON=python3   with PyTorch, for comparison in attention and training; without it only this program is measured
#   TESTS=groups     groups of the test program, instead of all that run on one GPU
#   DRY=1            on CUDA on a CPU (make cuda-on-cpu), with small shapes: every line runs, but figures mean nothing
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
die() { echo "error: $*" >&2; exit 1; }
all_stages="build machine tests nccl nccl-ranks generation scores lora-int8 resume directory ranks curve roofline
    attention training training-8b fp8 profiler variants sanitizer pages"
stages= seconds=0
own_function= # `stage` calls this script again to run a function under its time limit
if [ "${1:-}" = --function ]; then
    own_function=$2
    shift 2
else
    for call; do
        case $call in
            correctness)
                stages+=" machine tests nccl nccl-ranks generation scores lora-int8 resume directory ranks curve"
                seconds=$((seconds + 300)) ;;
            speed) stages+=" roofline attention training" seconds=$((seconds + 280)) ;;
            training-8b) stages+=" training-8b fp8" seconds=$((seconds + 160)) ;;
            nccl-ranks) stages+=" $call" seconds=$((seconds + 120)) ;;
            profiles) stages+=" profiler pages" seconds=$((seconds + 540)) ;;
            sanitizers) stages+=" variants sanitizer" seconds=$((seconds + 540)) ;;
            *) die "$call: expected correctness, speed, training-8b, nccl-ranks, profiles or sanitizers" ;;
        esac
    done
fi
[ -n "$stages${STAGES:-}" ] || seconds=2320 # of all calls, and 500 for the build
stages=${STAGES:-${stages:-$all_stages}}
for name in $stages; do
    [[ " ${all_stages//$'\n'/ } " == *" $name "* ]] || die "there is no stage $name; these are there:" $all_stages
done
whole=${LIMIT:-$((seconds ? seconds : 540))} # seconds; with STAGES alone as much as a single stage may take
out=$(realpath -m "${OUT:-dev/results}") left_out= python=${PYTHON:-python3} dry=${DRY:+1} failed=0
on=${dry:+-on-cpu} # build/cuda-bf16 or build/cuda-on-cpu-bf16
bench=build/cuda$on-bf16/bench_gpu
json=$out/gpu-check.json all=$out/gpu-check.log work=$(mktemp -d)
log=$work/log
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"
for dir in /usr/local/nvidia/bin /usr/local/cuda/bin; do [ -d $dir ] && PATH=$PATH:$dir; done

# LD_LIBRARY_PATH of our programs: libraries copied with build/, then CUDA's, from the toolkit or from Python packages.
# PyTorch uses its own.
libraries=$PWD/build/lib
for dir in /usr/local/nvidia/lib64 /usr/local/cuda/lib64 \
    $($python -c 'import glob, sysconfig; print(*glob.glob(sysconfig.get_paths()["purelib"] + "/nvidia/*/lib"))' \
    2>/dev/null); do
    [ -d "$dir" ] && libraries+=:$dir
done
libraries+=${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
ours=(env "LD_LIBRARY_PATH=$libraries")
commit=$(git describe --always --dirty --exclude '*' 2>/dev/null || cat build/commit 2>/dev/null || echo unknown)

# quoted TEXT…: for JSON, and for a table's cell
quoted() {
    local s=${*//[$'\001'-$'\037']/}
    s=${s//\\/\\\\}
    s=${s//\"/\\\"}
    printf '"%s"' "${s//|//}"
}
wanted() { [[ " $stages " == *" $1 "* ]]; }

middle() { sort -n | awk '{x[NR] = $1} END {print x[int((NR + 1) / 2)]}'; }

# Sampled once a second during a stage: minimum, maximum and median MHz of the multiprocessors, median W, maximum °C,
# and in how many of the samples the driver held the clock down, for which reasons.
clocks() {
    local mhz watt hot slow
    [ -s "$work/clocks" ] || return
    tr -d ' ' <"$work/clocks" >"$work/samples"
    mhz=$(cut -d, -f1 "$work/samples" | sort -n)
    watt=$(cut -d, -f2 "$work/samples" | middle)
    hot=$(cut -d, -f3 "$work/samples" | sort -n | tail -n 1)
    slow=$(cut -d, -f4 "$work/samples" | throttled)
    echo "$(head -n 1 <<<"$mhz") to $(tail -n 1 <<<"$mhz") MHz, median $(middle <<<"$mhz"), $watt W, $hot °C, $slow"
}

# Bit masks of reasons, one per line, as NVML's nvmlClocksEventReasons has them, in words.
throttled() {
    local mask bit samples=0 slow=0 names=() reasons=
    declare -A seen=()
    names[4]="power limit" names[8]="hardware slowdown" names[32]="temperature, by software"
    names[64]="temperature, by hardware" names[128]="power brake"
    while read -r mask; do
        [[ $mask =~ ^0x[0-9a-fA-F]+$ ]] || continue
        samples=$((samples + 1))
        ((mask & 236)) && slow=$((slow + 1))
        for bit in "${!names[@]}"; do ((mask & bit)) && seen[$bit]=1; done
    done
    for bit in "${!names[@]}"; do [ -z "${seen[$bit]:-}" ] || reasons+="${reasons:+; }${names[bit]}"; done
    if [ $samples = 0 ]; then echo "throttling unknown"
    elif [ $slow = 0 ]; then echo "not throttled"
    else echo "throttled in $slow of $samples samples ($reasons)"; fi
}

# json_row NAME RESULT CODE SECONDS CLOCKS: a stage's entry of the JSON, from its log in $log
json_row() {
    local bounds figures where="${gpu:-}, $(date -u +%F), commit $commit"
    # if a bound was printed twice, the last one
    bounds=$(sed -n 's/^bound: //p' "$log" | tac | awk -F' [|] ' '!seen[$1]++' | tac |
        tr -d '"[]\\' | sed 's/.*/"&"/' | paste -sd,)
    figures=$(grep '^{"section"' "$log" | paste -sd,)
    printf '%s: {"result":%s,"code":%s,"seconds":%s,' "$(quoted "$1")" "$(quoted "$2")" "$3" "$4"
    printf '"clocks":%s,"where":%s,' "$(quoted "$5")" "$(quoted "$where")"
    printf '"bounds":[%s],"figures":[%s]}\n' "$bounds" "$figures"
}

# tables ROWS: the JSON's rows in Markdown
tables() {
    local fields='"result":"((\\.|[^"\\])*)","code":[0-9]+,"seconds":([0-9]+),"clocks":"([^"]*)","where":"([^"]*)"'
    printf '# gpu_check.sh\n\n'
    printf '%sFigures behind each row: gpu-check.json; in tables: roofline-gpu.md, training-gpu.md, kernels-gpu.md.\n' \
        "${dry:+No GPU: CUDA on a CPU, with small shapes. }"
    printf '\n| stage | result | s | multiprocessors | GPU, date, commit |\n|---|---|---:|---|---|\n'
    sed -nE "s/^\"([^\"]*)\": \{$fields.*/| \1 | \2 | \4 | \5 | \6 |/p" "$1"
    printf '\n| stage | bound | limit | measured | |\n|---|---|---|---|---|\n'
    awk '{
        name = $1
        gsub(/[":]/, "", name)
        if (!match($0, /"bounds":\["[^]]*\]/)) next
        n = split(substr($0, RSTART + 11, RLENGTH - 13), bound, "\",\"")
        for (i = 1; i <= n; i++) print "| " name " | " bound[i] " |"
    }' "$1"
}

# row NAME RESULT CODE SECONDS CLOCKS: writes a stage's row into the JSON, replacing an earlier one, and all rows into
# the tables
row() {
    { [ -f "$json" ] && grep '^"' "$json" | sed 's/,$//'; } >"$work/rows"
    json_row "$@" >"$work/line"
    awk -v line="$work/line" -v name="\"$1\":" '
        BEGIN { getline new < line }
        index($0, name) == 1 {
            print new
            done = 1
            next
        }
        { print }
        END { if (!done) print new }' "$work/rows" >"$work/new"
    { echo "{"; sed '$!s/$/,/' "$work/new"; echo "}"; } >"$json"
    tables "$work/new" >"$out/gpu-check.md"
}

# stage NAME SECONDS COMMAND…: writes the command's output into the log, and a row with its last `N passed, N failed`,
# its bounds, or its last line
stage() {
    local name=$1 limit=$2 start=$SECONDS said code sampler= left=$((whole - SECONDS))
    shift 2
    [ -n "$dry" ] && limit=$((4 * limit))
    [ $left -lt "$limit" ] && limit=$left
    echo "== $name"
    : >"$work/clocks"
    : >"$log"
    if [ "$limit" -lt 5 ]; then
        echo "left out: $left s are left"
        left_out+=" $name"
        return 0
    fi
    if command -v nvidia-smi >/dev/null; then
        stdbuf -oL nvidia-smi --query-gpu=clocks.sm,power.draw,temperature.gpu,$reasons \
            --format=csv,noheader,nounits -l 1 >"$work/clocks" 2>/dev/null &
        sampler=$!
    fi
    STAGE_LIMIT=$limit timeout -k 5 "$limit" "$@" >"$log" 2>&1
    code=$?
    [ -n "$sampler" ] && { kill $sampler; wait $sampler; } 2>/dev/null
    { echo "== $name, $(date -u +%FT%TZ), commit $commit, exit code $code"; cat "$log"; } >>"$all"
    said=$(grep -E '^[0-9]+ passed, [0-9]+ failed$' "$log" | tail -n 1)
    [ -z "$said" ] && grep -q '^bound: ' "$log" && \
        said="bounds: $(grep -c '^bound: .*| met$' "$log") met, $(grep -c '^bound: .*| MISSED$' "$log") missed"
    [ -z "$said" ] && said=$(grep -vE '^$|^[|{]' "$log" | tail -n 1 | cut -c1-200)
    [ $code = 124 ] && said="ran past its $limit s; $said"
    if [ $code != 0 ]; then
        failed=1 said="FAILED, exit code $code; $said"
        grep -E '^(FAIL|failure:|error:|  replay:)|ERROR SUMMARY|Error:' "$log" | head -n 20
    fi
    row "$name" "$said" $code $((SECONDS - start)) "$(clocks)"
    echo "$said"
    sed -n 's/^bound: /  /p' "$log"
    return $code
}

. dev/gpu_stages.sh
if [ -n "$own_function" ]; then "$own_function" "$@"; exit; fi
: >>"$all"
if ! gpu=$("${ours[@]}" "$bench" probe 2>"$log") && ! wanted build; then
    said=$(tail -n 1 "$log" | sed 's/^error: //')
    echo "error: $bench probe: $said. Without a GPU, DRY=1 runs all of this on CUDA on a CPU" >&2
    exit 1
fi
if wanted build && [ -z "$dry" ]; then
    stage build 500 bash dev/gpu_check.sh --function build && gpu=$("${ours[@]}" "$bench" probe 2>&1 | tail -n 1)
fi
gpu=${gpu%%,*}$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 |
    sed 's/^/, driver /')
reasons=clocks_event_reasons.active # drivers before 535 have the older name
nvidia-smi --query-gpu=$reasons --format=csv,noheader >/dev/null 2>&1 || reasons=clocks_throttle_reasons.active

# function NAME SECONDS FUNCTION ARGUMENT…: a stage that is a function of gpu_stages.sh
function_stage() {
    local name=$1 limit=$2
    shift 2
    stage "$name" "$limit" bash dev/gpu_check.sh --function "$@"
}
if wanted machine; then function_stage machine 60 machine; cat "$log"; fi
if wanted tests; then
    for precision in bf16 fp32; do
        function_stage tests-$precision 150 tests build/cuda$on-$precision/test_llama3_cuda
    done
fi
if wanted nccl; then function_stage nccl 60 nccl; fi
if wanted nccl-ranks; then function_stage nccl-ranks 120 nccl_ranks; fi
for use in generation scores lora-int8 resume directory; do
    if wanted $use; then function_stage $use 60 use_${use/-/_}; fi
done
if wanted ranks; then function_stage ranks 60 ranks; fi
if wanted curve; then
    # Two fp32 builds for CPUs differ by 0.00004 on average; curve_bound measures what bf16 changes.
    function_stage curve-fp32 60 loss_curve fp32 0.0004
    function_stage curve-bf16 60 loss_curve bf16 "$bf16_bound"
fi
if wanted roofline; then
    stage roofline 150 "${ours[@]}" $bench roofline ${dry:+tiny}
    [ ! -s "$log" ] || {
        printf '# The ops of the CUDA build beside what the GPU can do\n\n'
        printf '%s, %s, commit %s: `bench_gpu roofline`, medians.\n' "$gpu" "$(date -u +%F)" "$commit"
        printf 'Clocks while it ran: %s.\n' "$(clocks)"
        grep -vE '^(\{|bound:)' "$log"
    } >"$out/roofline-gpu.md"
fi
beside=("$python" dev/pytorch/bench_gpu.py --program $bench --library-path "$libraries" --out "$out/training-gpu.md" \
    ${dry:+--device cpu --tiny --rounds 2 --steps 1})
# beside_pytorch NAME SECONDS OPTION…: measures in turns with PyTorch, in training-gpu.md, whose last part is the newest
beside_pytorch() {
    local name=$1 limit=$2 left=$((whole - SECONDS))
    shift 2
    stage "$name" "$limit" "${beside[@]}" --limit $(((left < limit ? left : limit) - 40)) "$@"
    [ ! -s "$work/clocks" ] || printf '\nClocks while it ran: %s.\n' "$(clocks)" >>"$out/training-gpu.md"
}
if wanted attention; then beside_pytorch attention 100 attention; fi
if wanted training; then beside_pytorch training 520 1B 1B-batch-4; fi
if wanted training-8b; then beside_pytorch training-8b 520 --rounds 2 8B; fi
if wanted fp8; then stage fp8 100 "${ours[@]}" $bench fp8 ${dry:+tiny}; fi
if wanted profiler; then function_stage profiler 100 profiler; fi
if wanted variants; then function_stage variants 120 variants; fi
if wanted sanitizer; then
    function_stage sanitizer 40 sanitizer
    if grep -q '^works' "$log"; then
        for tool in memcheck racecheck synccheck; do function_stage $tool-bf16 130 checked $tool; done
    fi
fi
if wanted pages; then function_stage pages 500 pages; fi
[ -z "$left_out" ] || echo "left out, because the call's time is over:$left_out"
exit $failed
