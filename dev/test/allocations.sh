#!/usr/bin/env bash
# allocations.sh [PROGRAM [COUNT]] : COUNT (200) allocations, spread over the start and end of short runs that train,
# evaluate and convert a model, fail one at a time. Each run has to end with one line `error: …` or `failure: …` and
# exit code 1 or 2, or to do its work all the same. It must never crash, hang or blame the input files.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. dev/test/checks.sh
program=$(realpath "${1:-build/cpu-fp32/train_llama3}")
count=${2:-200}
fixture=$PWD/dev/test/fixtures/base
shim_source=$PWD/dev/test/io_shim.c
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit
export OMP_NUM_THREADS=1 LC_ALL=C

cc -O1 -shared -fPIC "$shim_source" -o shim.so -ldl || exit
# 400 tokens of the fixture's vocabulary, 256; sample text has other tokens
{
    printf 'LLM3TOK1\1\0\0\0\2\0\0\0\0\1\0\0\0\0\0\0\220\1\0\0\0\0\0\0'
    head -c 32 /dev/zero
    for ((i = 0; i < 400; i++)); do printf '%b' "\\x$(printf %02x $((i * 37 % 256)))\\0"; done
} >bytes.tok

# failing N NAME COMMAND… : the N-th allocation of a run fails
failing() {
    local n=$1 name=$2 code lines
    shift 2
    rm -rf out
    timeout -k 1 20 env LD_PRELOAD=./shim.so FAIL_MALLOC_AT="$n" "$@" >log 2>&1 </dev/null
    code=$?
    lines=$(grep -acE '^(error|failure): ' log)
    if [ "$code" = 0 ] && [ "$lines" = 0 ]; then
        survived=$((survived + 1))
    elif [ "$code" != 1 ] && [ "$code" != 2 ]; then
        fail "$name: allocation $n fails" "exit code $code: $(tail -n 1 log)"
        return
    elif [ "$lines" != 1 ]; then
        fail "$name: allocation $n fails" "exit code $code with $lines lines error: or failure: $(tail -n 1 log)"
        return
    elif grep -aE '^(error|failure): ' log | grep -aqiE 'JSON|damaged|truncated|copy it again'; then
        fail "$name: allocation $n fails" "the input is blamed: $(grep -aE '^(error|failure): ' log)"
        return
    fi
    good=$((good + 1))
}

# spread NAME FAILURES COMMAND… : allocations 1, 2, 3, … fail, then ever fewer of the later ones
spread() {
    local name=$1 failures=$2 total n
    shift 2
    rm -rf out
    timeout 20 env LD_PRELOAD=./shim.so IO_COUNTS=counts "$@" >log 2>&1 </dev/null ||
        fail "$name" "does not work without a failure: $(tail -n 1 log)"
    total=$(<counts)
    good=0 survived=0
    for ((n = 0; n < failures; n++)); do
        # the n-th of the failures: quadratic, because most readers allocate at the start of a run
        failing $((1 + n * n * (total - 1) / (failures * failures))) "$name" "$@"
    done
    [ "$good" != "$failures" ] || pass "$name: each of $failures allocations out of $total fails" \
        "$((failures - survived)) runs ended with a sentence, $survived did their work"
}

evaluator=$(program_for --eval) converter=$(program_for --export)
train=("$program" --model "$fixture" --data bytes.tok --seq 8 --batch 1 --steps 2 --threads 1)
spread "--eval" $((count / 4)) "$evaluator" --model "$fixture" --eval bytes.tok --seq 8 --batch 1 --threads 1
spread "--export" $((count / 5)) "$converter" --model "$fixture" --export out --threads 1
spread "training" $((count / 5)) "${train[@]}" --val bytes.tok
spread "training with --out" $((count - 2 * (count / 5) - count / 4)) "${train[@]}" --out out

echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
