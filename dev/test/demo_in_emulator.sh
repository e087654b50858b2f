#!/usr/bin/env bash
# demo_in_emulator.sh LIBRARIES EMULATOR…: runs the steps of `make demo` on 1 and 2 ranks with programs for 64-bit Arm,
# which the command EMULATOR executes. LIBRARIES is a directory that dev/fetch_libraries.sh made for arm64.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. dev/test/checks.sh
stop() {
    fail "$@"
    echo "$passed passed, $failed failed"
    exit 1
}
[ $# -gt 1 ] || stop "demo_in_emulator.sh" "was given $# arguments; expected LIBRARIES EMULATOR…"
libraries=$1 top=$PWD build=build/test-arm-fp32
shift
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
make -s BUILD=$build CC=aarch64-linux-gnu-gcc HAVE_ONEDNN= HAVE_MPI= DEPS="$libraries" ARCH=armv8-a PRECISION=fp32 \
    $build/{train,eval,generate}_llama3 || stop "the programs for Arm" "do not build"
train=("$@" "$top/$build/train_llama3")
evaluate=("$@" "$top/$build/eval_llama3")
generate=("$@" "$top/$build/generate_llama3")
cd "$work" || exit
{ "$top/dev/test/sample_text.sh" sample && VOCAB_SIZE=600 "$top/dev/data/text.sh" text sample; } >said 2>&1 ||
    stop "the data" "$(tail -n 1 said)"

mkdir model # tiny, because the emulator is slow
cat >model/config.json <<'END'
{"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
 "intermediate_size": 80, "vocab_size": 600, "max_position_embeddings": 256, "rope_theta": 500000}
END

# works NAME COMMAND…: it ends with exit code 0; its output is in `said`
works() {
    local name=$1
    shift
    if "$@" >said 2>&1; then pass "$name" "$(tail -n 1 said)"; else fail "$name" "$(tail -n 1 said)"; fi
}

losses() { grep -o '"loss":[^,]*' "$1/metrics.jsonl" | head -n "$2"; }

works "--version names the processor's features" "${train[@]}" --version
grep -q "this processor has: NEON" said || fail "--version" "$(grep processor said)"
for ranks in 1 2; do
    works "training on $ranks ranks" "${train[@]}" --ranks $ranks --model model --data text/train.tok --seq 32 \
        --batch 2 --accum $((2 / ranks)) --lr 1e-2 --min-lr 1e-3 --warmup 5 --steps 40 --threads 1 --deterministic \
        --out run-$ranks
done
if [ "$(losses run-1 40)" = "$(losses run-2 40)" ] && [ "$(losses run-1 40 | wc -l)" = 40 ] &&
    cmp run-1/latest/model.safetensors run-2/latest/model.safetensors; then
    pass "2 ranks have one rank's losses and weights" "$(losses run-2 40 | tail -n 1)"
else fail "2 ranks have one rank's losses and weights" "$(losses run-1 40 | tail -n 1) $(losses run-2 40 | tail -n 1)"
fi
first=$(losses run-1 1) last=$(losses run-1 40 | tail -n 1)
number='^"loss":[0-9.]+$'
if [[ $first =~ $number && $last =~ $number ]] && awk "BEGIN { exit !(${last#*:} < ${first#*:} - 1) }"; then
    pass "the loss falls" "$first $last"
else fail "the loss falls" "$first $last"; fi
works "eval_llama3" "${evaluate[@]}" --model run-2/latest --eval text/val.tok --seq 32 --batch 4 --threads 1
works "generate_llama3" "${generate[@]}" --model run-2/latest --prompt "the" --max-tokens 20 --threads 1
echo
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
