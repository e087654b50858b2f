#!/usr/bin/env bash
# gpu_check.sh: checks and measures what only an NVIDIA GPU can show. It runs in stages, each with its own time limit,
# and writes the results to disk after each stage.
#
#   make gpu-programs              builds everything that it runs; if on another machine, copy build/ here
#   dev/gpu_check.sh               all stages: build machine kernels tests ranks roofline attention sanitizer training
#                                  training-8b pages
#   STAGES="kernels ranks" dev/gpu_check.sh
#   OUT=folder       results (dev/results): gpu-check.md, .json, .log, roofline-gpu.md, training-gpu.md, kernels-gpu.md;
#                    earlier results of other stages are kept
#   LIMIT=seconds    for the whole call (540): a stage gets at most what is left
#   PYTHON=python3   with PyTorch, for comparison in attention and training; without it only this program is measured
#   TESTS=groups     groups of the test program, instead of those that the stages kernels and tests run
#   DRY=1            on CUDA on a CPU (make cuda-on-cpu), with small shapes: every line runs, but figures mean nothing
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
stages=${STAGES:-build machine kernels tests ranks roofline attention sanitizer training training-8b pages}
out=$(realpath -m "${OUT:-dev/results}") whole=${LIMIT:-540} python=${PYTHON:-python3} dry=${DRY:+1} failed=0
on=${dry:+-on-cpu} # build/cuda-bf16 or build/cuda-on-cpu-bf16
bench=build/cuda$on-bf16/bench_gpu
json=$out/gpu-check.json all=$out/gpu-check.log work=$(mktemp -d)
log=$work/log
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"
for dir in /usr/local/nvidia/bin /usr/local/cuda/bin; do [ -d $dir ] && PATH=$PATH:$dir; done

# the programs' libraries: those copied along, then CUDA's from the toolkit or from Python packages; PyTorch has its own
libraries=$PWD/build/lib
for dir in /usr/local/cuda/lib64 \
    $($python -c 'import glob, sysconfig; print(*glob.glob(sysconfig.get_paths()["purelib"] + "/nvidia/*/lib"))' \
    2>/dev/null); do
    [ -d "$dir" ] && libraries+=:$dir
done
ours=(env "LD_LIBRARY_PATH=$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}")
commit=$(git describe --always --dirty --exclude '*' 2>/dev/null || cat build/commit 2>/dev/null || echo unknown)

# quoted TEXT…: for JSON, and for a table's cell
quoted() {
    local s=${*//[$'\001'-$'\037']/}
    s=${s//\\/\\\\}
    s=${s//\"/\\\"}
    printf '"%s"' "${s//|//}"
}
wanted() { [[ " $stages " == *" $1 "* ]]; }

# sampled once a second during a stage: minimum, maximum and median MHz of the multiprocessors, median W, maximum °C
middle() { sort -n | awk '{x[NR] = $1} END {print x[int((NR + 1) / 2)]}'; }
clocks() {
    local mhz watt hot
    [ -s "$work/clocks" ] || return
    tr -d ' ' <"$work/clocks" >"$work/samples"
    mhz=$(cut -d, -f1 "$work/samples" | sort -n)
    watt=$(cut -d, -f2 "$work/samples" | middle)
    hot=$(cut -d, -f3 "$work/samples" | sort -n | tail -n 1)
    echo "$(head -n 1 <<<"$mhz") to $(tail -n 1 <<<"$mhz") MHz, median $(middle <<<"$mhz"), $watt W, $hot °C"
}

# json_row NAME RESULT CODE SECONDS CLOCKS: a stage's entry of the JSON, from its log in $log
json_row() {
    local bounds figures where="${gpu:-}, $(date -u +%F), commit $commit"
    # the last of a name
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
    if [ "$limit" -lt 5 ]; then echo "left out: $left s are left"; return 0; fi
    : >"$work/clocks"
    if command -v nvidia-smi >/dev/null; then
        nvidia-smi --query-gpu=clocks.sm,power.draw,temperature.gpu --format=csv,noheader,nounits -l 1 \
            >"$work/clocks" 2>/dev/null &
        sampler=$!
    fi
    timeout -k 5 "$limit" "$@" >"$log" 2>&1
    code=$?
    [ -n "$sampler" ] && { kill $sampler; wait $sampler; } 2>/dev/null
    { echo "== $name, $(date -u +%FT%TZ), commit $commit, exit code $code"; cat "$log"; } >>"$all"
    said=$(grep -E '^[0-9]+ passed, [0-9]+ failed$' "$log" | tail -n 1)
    [ -z "$said" ] && grep -q '^bound: ' "$log" && \
        said="bounds: $(grep -c '^bound: .*| met$' "$log") met, $(grep -c '^bound: .*| MISSED$' "$log") missed"
    [ -z "$said" ] && said=$(grep -vE '^$|^[|{]' "$log" | tail -n 1 | cut -c1-200)
    [ $code = 124 ] && said="ran past its $limit s; $said"
    if [ $code != 0 ] && [[ $name != memcheck* && $name != racecheck* || $code != 124 ]]; then
        failed=1 said="FAILED, exit code $code; $said"
        grep -E '^(FAIL|failure:|error:|  replay:)|ERROR SUMMARY|Error:' "$log" | head -n 20
    fi
    row "$name" "$said" $code $((SECONDS - start)) "$(clocks)"
    echo "$said"
    sed -n 's/^bound: /  /p' "$log"
    return $code
}

machine() {
    local linked versions
    nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.max.sm,clocks.mem,power.limit \
        --format=csv,noheader
    nvcc --version | tail -n 1
    linked=$("${ours[@]}" ldd $bench | grep -E 'cublas|cudart|cjson|pcre2' | tr -s ' \t' ' ' | tr '\n' ';')
    echo "libraries of the program: $linked"
    versions='"PyTorch", torch.__version__, "CUDA", torch.version.cuda, "cuDNN", torch.backends.cudnn.version()'
    $python -c "import torch; print($versions)" || echo "no PyTorch: nothing to compare with"
    "${ours[@]}" "$bench" probe
}

# 1, 2 and 4 ranks on one GPU, and 1 again: losses and norms must have equal bits; then the collectives without
# --deterministic
ranks() {
    local program=build/cuda$on-bf16/train_llama3_cuda equal=0 runs=0 run model=tiny seq=256 times result=MISSED
    if [ -n "$dry" ]; then
        seq=24 model=$work/model
        mkdir -p "$model"
        cat >"$model/config.json" <<'END'
{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
 "head_dim": 64, "intermediate_size": 96, "vocab_size": 4096, "max_position_embeddings": 256, "rope_theta": 500000}
END
    fi
    local -a common=(--model "$model" --data "$work/random.tok" --seq $seq --batch 1 --steps 4 --warmup 2 --threads 1)
    "${ours[@]}" "$bench" tokens "$work/random.tok" || return 1
    for run in "--accum 4" "--accum 4" "--accum 2 --ranks 2" "--accum 1 --ranks 4" \
        "--accum 1 --ranks 4 --dp-replicate 2 --recompute selective" "--accum 2 --ranks 2 --sharding no_shard" \
        "--accum 2 --ranks 2 --offload all"; do
        rm -rf "$work/run"
        if ! "${ours[@]}" "$program" "${common[@]}" --deterministic $run --out "$work/run"; then
            echo "FAIL $run"
            return 1
        fi
        sed -n 's/.*"step":\([0-9]*\),"loss":\([^,]*\),"grad_norm":\([^,]*\),.*/\1 \2 \3/p' "$work/run/metrics.jsonl" \
            >"$work/bits"
        [ $runs = 0 ] && cp "$work/bits" "$work/first"
        runs=$((runs + 1))
        if [ "$(wc -l <"$work/bits")" = 4 ] && cmp -s "$work/bits" "$work/first"; then
            equal=$((equal + 1))
        else
            echo "FAIL other bits: $run: $(tr '\n' ';' <"$work/bits") not $(tr '\n' ';' <"$work/first")"
        fi
    done
    for run in "--ranks 2" "--ranks 4 --sharding shard_grad_op"; do
        rm -rf "$work/run"
        if ! "${ours[@]}" "$program" "${common[@]}" $run --out "$work/run"; then
            echo "FAIL $run"
            return 1
        fi
        times='.*"step":4,.*"wait_s":\([^,]*\),.*"communication_s":\([^,]*\),.*'
        sed -n "s/$times/\\1 \\2/p" "$work/run/metrics.jsonl" | awk -v run="$run" '{
            printf "%s: collectives take %.3f ms of a step, ", run, 1e3 * $2
            printf "of which %.3f ms keep the compute stream waiting\n", 1e3 * $1
        }'
    done
    [ $equal != $runs ] || result=met
    echo "bound: deterministic runs of 1, 1 again, 2 and 4 ranks have the same bits | = $runs | $equal | $result"
    [ $equal = $runs ]
}

sanitizer() { # compute-sanitizer does not support the GPUs of some machines
    command -v compute-sanitizer >/dev/null || { echo "not available: no compute-sanitizer"; return; }
    if "${ours[@]}" compute-sanitizer --error-exitcode 1 "$bench" probe; then
        echo "works"
    else
        echo "not available: $(compute-sanitizer --version | tail -n 1) fails on a program of one kernel"
    fi
}

build() { # builds what is missing, without looking at the age of what is there
    local p program
    for p in bf16 fp32; do
        for program in train_llama3_cuda test_llama3_cuda $([ $p = bf16 ] && echo bench_gpu); do
            [ -x build/cuda-$p/$program ] || make --no-print-directory CUDA=1 PRECISION=$p build/cuda-$p/$program ||
                return
        done
    done
    echo "programs are there"
}

pages() { # as many as fit into the time
    local p names="" programs=""
    for p in dev/kernels/*.cuh; do p=$(basename "$p" .cuh); [ "$p" = page ] || names+=" $p"; done
    [ -n "$dry" ] && names=cast
    for p in bf16 fp32; do
        [ -n "$dry" ] && [ ! -x build/kernels-cuda$on-$p/pages ] && continue
        [ -x build/kernels-cuda$on-$p/pages ] || make --no-print-directory -C dev/kernels CUDA=1 \
            ../../build/kernels-cuda-$p/pages >&2 || return
        programs+=" $PWD/build/kernels-cuda$on-$p/pages"
    done
    NAMES=$names PAGES=$programs "${ours[@]}" dev/kernels/pages.sh table-cuda | tee "$out/kernels-gpu.md"
}

if [ $# -gt 0 ]; then "$1"; exit; fi # `stage` calls this script again to run a function under its time limit

: >>"$all"
if ! gpu=$("${ours[@]}" "$bench" probe 2>"$log") && ! wanted build; then
    said=$(tail -n 1 "$log" | sed 's/^error: //')
    echo "error: $bench probe: $said. Without a GPU, DRY=1 runs all of this on CUDA on a CPU" >&2
    exit 1
fi
if wanted build && [ -z "$dry" ]; then
    stage build 500 bash dev/gpu_check.sh build && gpu=$("${ours[@]}" "$bench" probe 2>&1 | tail -n 1)
fi
gpu=${gpu%%,*}$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 |
    sed 's/^/, driver /')
test=("${ours[@]}" build/cuda$on-bf16/test_llama3_cuda) test32=("${ours[@]}" build/cuda$on-fp32/test_llama3_cuda)
if wanted machine; then stage machine 60 bash dev/gpu_check.sh machine; cat "$log"; fi
if wanted kernels; then
    stage kernels-bf16 80 "${test[@]}" ${TESTS:-kernels}
    stage kernels-fp32 80 "${test32[@]}" ${TESTS:-kernels}
fi
if wanted tests; then
    stage tests-bf16 100 "${test[@]}" ${TESTS:-pytorch bits replicas use faults}
    stage tests-fp32 80 "${test32[@]}" ${TESTS:-pytorch replicas use faults}
fi
if wanted ranks; then stage ranks 60 bash dev/gpu_check.sh ranks; fi
if wanted roofline; then
    stage roofline 100 "${ours[@]}" $bench roofline ${dry:+tiny}
    {
        printf '# The ops of the CUDA build beside what the GPU can do\n\n'
        printf '%s, %s, commit %s: `bench_gpu roofline`, medians.\n' "$gpu" "$(date -u +%F)" "$commit"
        grep -vE '^(\{|bound:)' "$log"
    } >"$out/roofline-gpu.md"
fi
beside=("$python" dev/pytorch/bench_gpu.py --program $bench --library-path "$libraries" --out "$out/training-gpu.md" \
    ${dry:+--device cpu --tiny --rounds 2 --steps 1})
if wanted attention; then stage attention 60 "${beside[@]}" attention; fi
if wanted sanitizer; then
    stage sanitizer 40 bash dev/gpu_check.sh sanitizer
    if grep -q '^works' "$log"; then
        stage memcheck-bf16 60 "${ours[@]}" compute-sanitizer --error-exitcode 1 "${test[@]:2}" kernels
        stage racecheck-bf16 60 "${ours[@]}" compute-sanitizer --tool racecheck --error-exitcode 1 "${test[@]:2}" \
            kernels
    fi
fi
if wanted training; then
    stage training 310 "${beside[@]}" --limit $((whole - SECONDS < 310 ? whole - SECONDS - 15 : 295)) 1B
fi
if wanted training-8b; then
    stage training-8b 520 "${beside[@]}" --rounds 2 --limit $((whole - SECONDS < 520 ? whole - SECONDS - 15 : 505)) 8B
fi
if wanted pages; then stage pages 500 bash dev/gpu_check.sh pages; fi
exit $failed
