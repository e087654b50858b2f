#!/usr/bin/env bash
# gpu_check.sh: runs dev/gpu_check.sh with small shapes on CUDA on a CPU, so that no line of it runs for the first time
# on a GPU: all stages, rows that are kept and replaced, failures that are reported. If python3 has PyTorch, it is
# compared with, too.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. dev/test/checks.sh
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

export DRY=1 TESTS=replicas LIMIT=900
# check STAGES… : its exit code in $code, what it said in $work/said, its results in $work/out
check() { STAGES="$*" OUT="$work/out" timeout 800 dev/gpu_check.sh >"$work/said" 2>&1; code=$?; }
rows() { grep -c "^| $1 | .*$2" "$work/out/gpu-check.md"; }
row() { grep "^| $1 | " "$work/out/gpu-check.md" | head -n 1; }

# a fake nvidia-smi, which prints samples until it is killed
mkdir "$work/bin"
cat >"$work/bin/nvidia-smi" <<'END'
#!/bin/sh
case "$*" in
*clocks.sm,power*)
    while :; do
        printf '1755, 300.5, 51, 0x0000000000000001\n1980, 612.3, 55, 0x0000000000000004\n'
        printf '1980, 600.1, 54, 0x0000000000000000\n'
        sleep 0.2
    done ;;
*) echo 580.1 ;;
esac
END
chmod +x "$work/bin/nvidia-smi"
# a fake profiler, and a fake compute-sanitizer; the profiler may not change the clocks
cat >"$work/bin/ncu" <<'END'
#!/bin/bash
[[ " $* " = *" --clock-control none "* ]] || { echo "==ERROR== the clocks would be locked"; exit 1; }
while [[ ${1:-} == --* ]]; do shift $([[ $1 = --csv ]] && echo 1 || echo 2); done
"$@" >&2
echo '"0","attention_forward","1"'
END
chmod +x "$work/bin/ncu"
# compute-sanitizer runs the program, and can find an error
cat >"$work/bin/compute-sanitizer" <<'END'
#!/bin/bash
while [[ ${1:-} == --* ]]; do shift $([[ $1 = --tool || $1 = --error-exitcode ]] && echo 2 || echo 1); done
echo "========= checked: $*"
[[ -z ${PLANTED_ERROR:-} || "$*" != *$PLANTED_ERROR* ]] || { echo "========= Invalid read of size 4"; exit 9; }
exec "$@"
END
chmod +x "$work/bin/compute-sanitizer"
export PATH=$work/bin:$PATH
export CURVE=$work/curve CURVE_VOCABULARY=600
mkdir "$work/model"
cat >"$work/model/config.json" <<'END'
{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
 "head_dim": 64, "intermediate_size": 96, "vocab_size": 600, "max_position_embeddings": 256, "rope_theta": 500000}
END
export CURVE_OPTIONS="--model $work/model --seq 32 --batch 2 --steps 6 --warmup 2"
dev/gpu_check.sh --function loss_curve_on_cpu >"$work/said" 2>&1 ||
    fail "the losses of the CPU build" "$(tail -n 1 "$work/said")"

measured="attention training training-8b"
command -v python3 >/dev/null || measured=
make --no-print-directory PRECISION=fp32 build/cuda-on-mpi-fp32/train_llama3_cuda >"$work/said" 2>&1 ||
    fail "the program for several processes" "does not build: $(tail -n 1 "$work/said")"
uses="generation scores lora-int8 resume directory"
check machine tests nccl nccl-ranks $uses ranks curve roofline sanitizer profiler variants fp8 pages $measured
if [ $code = 0 ] && ! grep -q FAILED "$work/out/gpu-check.md"; then
    pass "every stage runs" "$(grep -c '^== ' "$work/said") stages"
else
    fail "every stage runs" \
        "exit code $code: $(grep FAILED "$work/out/gpu-check.md" | head -n 2) $(tail -n 1 "$work/out/gpu-check.log")"
fi
missing=
for stage in machine nccl nccl-ranks $uses tests-bf16 tests-fp32 ranks curve-fp32 curve-bf16 roofline profiler \
    sanitizer memcheck-bf16 racecheck-bf16 synccheck-bf16 variants fp8 $measured; do
    [ "$(rows $stage 'CUDA on a CPU')" = 1 ] || missing+=" $stage"
done
if [ -z "$missing" ]; then
    pass "the table has a row of each stage" "$(row ranks)"
else
    fail "the table has a row of each stage" "missing:$missing"
fi
clocks='\| 1755 to 1980 MHz, median 1980, 600.1 W, 55 °C, throttled in [0-9]+ of [0-9]+ samples \(power limit\) \| CUDA'
if row ranks | grep -qE "$clocks on a CPU \(sm_90\), driver 580.1, " &&
    grep -q throttled "$work/out/roofline-gpu.md" &&
    ! grep -qsaF "$work/bin/nvidia-smi" /proc/[0-9]*/cmdline; then
    pass "clocks are those of the stage, and nothing goes on sampling" "$(row ranks | cut -d'|' -f5)"
else fail "clocks are those of the stage, and nothing goes on sampling" "$(row ranks)"; fi
if [ "$(rows ranks '= 7 | 7 | met')" = 1 ]; then
    pass "ranks on one GPU have one rank's bits" "7 of 7"
else
    fail "ranks on one GPU have one rank's bits" "$(row ranks)"
fi
if [ "$(rows nccl-ranks '= 8 | 8 | met')" = 1 ] && [ "$(rows nccl-ranks '= 2 | 2 | met')" = 1 ] &&
    grep -q 'this tests the script, not NCCL' "$work/out/gpu-check.log"; then
    pass "processes over NCCL have the bits of threads, and lost ones are named; without a GPU it says so" \
        "$(row nccl-ranks)"
else
    fail "processes over NCCL have the bits of threads, and lost ones are named; without a GPU it says so" \
        "$(row nccl-ranks)"
fi
wrong=
for stage in $uses; do [ "$(rows $stage '| met')" = 1 ] || wrong+=" $stage"; done
if [ -z "$wrong" ] && [ "$(grep -c '^[a-z0-9A-Z -]*: [0-9.]* s, ' "$work/out/gpu-check.log")" -ge 9 ]; then
    pass "generation, scores, LoRA, resuming and fine-tuning have times, memory and bounds" "$uses"
else
    fail "generation, scores, LoRA, resuming and fine-tuning have times, memory and bounds" \
        "without a bound that is met:$wrong"
fi
if grep -q '^"0","attention_forward"' "$work/out/gpu-check.log"; then pass "the profiler's figures are in the log" ncu
else fail "the profiler's figures are in the log" "$(row profiler)"; fi
if [ "$(rows 'curve-.*' 'loss curve in .* | met')" = 2 ]; then
    pass "losses are those of the CPU build" "$(rows 'curve-.*' '| met') precisions"
else fail "losses are those of the CPU build" "$(rows 'curve-.*' '')"; fi
count=$(grep -cE '^\| .* \| [0-9.e+-]+ \| [0-9.e+-]+ \| [0-9.]+ \|$' "$work/out/roofline-gpu.md")
if [ "$count" = 68 ] && [ "$(rows roofline '>= 0')" = 4 ]; then
    pass "the roofline has every figure and four bounds" "$count figures"
else
    fail "the roofline has every figure and four bounds" "$count figures, expected 68; $(row roofline)"
fi
name="the fp8 probe has 24 matmuls in 3 ways, 48 casts and two bounds for each model"
count=$(grep -cE '^\{"section":"fp8"' "$work/out/gpu-check.log")
bounds=$(rows fp8 '| [<>]= [01]\.[16][02] |')
if [ "$count" = 120 ] && [ "$bounds" = 4 ]; then pass "$name" "$count figures"
else fail "$name" "$count figures, $bounds bounds: $(row fp8)"; fi
if [ -n "$measured" ]; then
    if python3 -m json.tool "$work/out/gpu-check.json" >/dev/null; then
        pass "results are JSON" "$(wc -c <"$work/out/gpu-check.json") bytes"
    else
        fail "results are JSON" "$(head -n 3 "$work/out/gpu-check.json")"
    fi
    count=$(grep -c '^| this program | [0-9.,]* | ' "$work/out/training-gpu.md")
    if [ "$count" -ge 3 ] && [ "$(rows 'training.*' 'beyond the plan, MiB | <= 64 | .* met')" = 3 ] &&
        [ "$(grep -c '^| block matmuls | [0-9]' "$work/out/training-gpu.md")" = 3 ]; then
        pass "training has times, parts and memory of both models" "$count rows"
    else fail "training has times, parts and memory of both models" "$(cat "$work/out/training-gpu.md")"; fi
fi

cp "$work/out/gpu-check.md" "$work/before"
check tests
if [ $code = 0 ] && [ "$(rows tests-bf16 '')" = 1 ] &&
    diff <(cut -d'|' -f2 "$work/before") <(cut -d'|' -f2 "$work/out/gpu-check.md") >/dev/null; then
    pass "a later call replaces its rows and keeps the others" "$(row tests-bf16)"
else fail "a later call replaces its rows and keeps the others" "$(diff "$work/before" "$work/out/gpu-check.md")"; fi

CUDA_ON_CPU_FAIL=LAUNCH:700:200 check tests
if [ $code = 1 ] && [ "$(rows tests-bf16 'FAILED, exit code 1')" = 1 ] &&
    grep -q '^failure: CUDA: the launch of' "$work/said" && grep -q '^-- replicas again: compute-sanitizer' \
    "$work/out/gpu-check.log"; then
    pass "a kernel that fails is a row that says so, and runs again under the sanitizer" "$(row tests-bf16)"
else
    fail "a kernel that fails is a row that says so, and runs again under the sanitizer" \
        "exit code $code: $(row tests-bf16)"
fi
TESTS="kernels:exp kernels:rope" PLANTED_ERROR=kernels:rope check sanitizer
if [ $code = 1 ] && [ "$(rows memcheck-bf16 'FAILED, exit code 1; 1 passed, 1 failed')" = 1 ] &&
    grep -q '^FAIL kernels:rope under memcheck' "$work/said"; then
    pass "what the sanitizer finds is a row that names the test" "$(row memcheck-bf16)"
else fail "what the sanitizer finds is a row that names the test" "exit code $code: $(row memcheck-bf16)"; fi
sed -i 's/"loss":\([0-9]*\)\./"loss":9\1./' "$CURVE/metrics.jsonl"
check curve
if [ $code = 1 ] && [ "$(rows 'curve-.*' '| MISSED')" = 2 ]; then
    pass "other losses miss their bound" "$(row curve-fp32)"
else fail "other losses miss their bound" "exit code $code: $(row curve-fp32)"; fi
dev/gpu_check.sh training-9b >"$work/said" 2>&1
code=$?
if [ $code = 1 ] && grep -q '^error: training-9b: expected correctness, speed' "$work/said"; then
    pass "an unknown call is an error" "$(tail -n 1 "$work/said")"
else fail "an unknown call is an error" "exit code $code: $(tail -n 1 "$work/said")"; fi
CUDA_ON_CPU_FAIL=LAUNCH:700:9 check roofline
if [ $code = 1 ] && [ "$(rows roofline 'FAILED')" = 1 ] && [ "$(rows ranks '| met')" = 1 ]; then
    pass "a measurement that fails is a row that says so" "$(row roofline)"
else
    fail "a measurement that fails is a row that says so" "exit code $code: $(row roofline)"
fi
LIMIT=3 check ranks
if [ $code = 0 ] && grep -q '^left out: ' "$work/said" && [ "$(rows ranks '| met')" = 1 ]; then
    pass "a stage without time is left out, and its row stays" "$(tail -n 1 "$work/said")"
else
    fail "a stage without time is left out, and its row stays" "$(tail -n 2 "$work/said")"
fi
CUDA_ON_CPU_DEVICES=0 check ranks
if [ $code = 1 ] && grep -q '^error: .*no NVIDIA GPU is visible.*DRY=1' "$work/said"; then
    pass "without a GPU it says so" "$(tail -n 1 "$work/said")"
else
    fail "without a GPU it says so" "exit code $code: $(tail -n 2 "$work/said")"
fi

echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
