#!/usr/bin/env bash
# minimal.sh PROGRAM [all]: docs/book/minimal.c trains as PROGRAM does, a trainer of fp32, with which it shares no line.
#   all: also under the sanitizers, and without a warning of clang
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
. dev/test/checks.sh
program=$(realpath "$1") source=$PWD/docs/book/minimal.c mode=${2:-}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive LC_ALL=C

# builds NAME COMPILER…: compiles minimal.c to ./NAME
builds() {
    local name=$1
    shift
    if "$@" -Wall -Wextra -Werror -fopenmp "$source" -lm -o "$name" 2>.err; then
        pass "$name: compiles without a warning" "$*"
    else fail "$name: compiles without a warning" "$(head -n 3 .err)"; fi
}

# trains NAME MODEL DATA RANKS STEPS T: one side and the other, to expected/metrics.jsonl and .out
trains() {
    rm -rf expected
    "$program" --model "$2" --data "$3" --ranks "$4" --steps "$5" --seq "$6" --batch 1 --out expected >.log 2>&1 ||
        fail "the trainer of $2" "$(tail -n 1 .log)"
    "./$1" "$2" "$3" "$4" "$5" "$6" >.out 2>.err || fail "$1 of $2" "$(tail -n 1 .err)"
}

# The largest relative difference of a loss or norm, the steps, and the bytes of both sides.
compare() {
    python3 - <<'X'
import json
expected = [line for line in map(json.loads, open("expected/metrics.jsonl")) if "loss" in line]
lines = [line.split() for line in open(".out")]
steps = [line for line in lines if line[0] == "step"]
worst = 0 if len(steps) == len(expected) > 0 else 1
for got, want in zip(steps, expected):
    for value, key in ((got[3], "loss"), (got[5], "grad_norm")):
        worst = max(worst, abs(float(value) / want[key] - 1))
bytes_of_ledger = sum(row["bytes"]["measured"] for row in json.load(open("expected/ledger.json"))["traffic"]
                      if row["axis"] == "fsdp")
print(f"{worst:.2g}", len(steps), lines[-1][1] if lines[-1][0] == "received" else -1, bytes_of_ledger)
X
}

# equal NAME MODEL DATA RANKS STEPS T
equal() {
    local worst steps received ledger
    trains minimal "${@:2}"
    read -r worst steps received ledger < <(compare)
    if awk "BEGIN { exit !(${worst:-1} <= 1e-5) }" && [ "$steps" = "$5" ]; then
        pass "$1, $4 ranks: the losses and norms of $5 steps are the trainer's" "$worst <= 1e-5"
    else fail "$1, $4 ranks: the losses and norms of $5 steps are the trainer's" "${worst:-} in ${steps:-0} steps"; fi
    if [ "${received:-}" = "${ledger:-0}" ]; then
        pass "$1, $4 ranks: it receives the bytes of the trainer's ledger" "$received"
    else fail "$1, $4 ranks: it receives the bytes of the trainer's ledger" "${received:-} and ${ledger:-}"; fi
}

# refused NAME PATTERN ARGUMENT…: one line on standard error, exit code 1
refused() {
    local name=$1 pattern=$2 code
    shift 2
    timeout 60 ./minimal "$@" >.out 2>.err
    code=$?
    if [ "$code" = 1 ] && [ "$(wc -l <.err)" = 1 ] && grep -qE "^error: .*$pattern" .err; then
        pass "$name is refused" "$(<.err)"
    else fail "$name is refused" "exit code $code: $(cat .err)"; fi
}

# differs NAME EXPRESSION: the comparison finds a copy of minimal.c that `sed -E EXPRESSION` has changed
differs() {
    sed -E "$2" "$source" >changed.c
    cmp -s "$source" changed.c && fail "planted in minimal.c: $1" "the expression changes nothing"
    cc -O1 -fopenmp changed.c -lm -o changed && trains changed odd/step-00000001 masked.tok 3 3 7
    local worst
    read -r worst _ < <(compare)
    if awk "BEGIN { exit !(${worst:-1} > 1e-5) }"; then pass "planted in minimal.c: $1" "off by $worst"
    else fail "planted in minimal.c: $1" "the losses and norms are still the trainer's, $worst"; fi
}

# ---------------------------------------------------------------- models and data
# plain.tok: 4,096 token ids, version 1; masked.tok: 300 ids, version 2, with a byte per token
python3 - <<'X'
import random, struct
draw = random.Random(2)
ids = [min(draw.randrange(4096), draw.randrange(4096)) for _ in range(3000)]
open("plain.tok", "wb").write(struct.pack(f"<8sIIIIQ32x{len(ids)}H", b"LLM3TOK1", 1, 2, 4096, 0, len(ids), *ids))
ids = [draw.randrange(300) for _ in range(100)]
targets = bytes(draw.randrange(4) for _ in ids)
header = struct.pack("<8sIIIIQ32xiiQII96xQ", b"LLM3TOK1", 2, 4, 300, 1, len(ids), -1, -1, 0, 0, 0, 0)
open("beyond.tok", "wb").write(header + struct.pack(f"<{len(ids)}I", *[301] * len(ids)) + targets)
open("masked.tok", "wb").write(header + struct.pack(f"<{len(ids)}I", *ids) + targets)
X
mkdir odd-config
cat >odd-config/config.json <<'X'
{"model_type": "llama", "vocab_size": 301, "hidden_size": 20, "num_hidden_layers": 3, "num_attention_heads": 6,
 "num_key_value_heads": 2, "head_dim": 6, "intermediate_size": 23, "rms_norm_eps": 1e-5, "rope_theta": 100,
 "max_position_embeddings": 64, "tie_word_embeddings": false}
X
"$program" --model tiny --data plain.tok --seq 16 --batch 1 --steps 1 --out tiny >.log 2>&1
"$program" --model odd-config --data masked.tok --seq 7 --batch 1 --steps 1 --out odd >>.log 2>&1

# ---------------------------------------------------------------- checks
builds minimal cc -O3
for ranks in 1 2 4; do equal tiny tiny/step-00000001 plain.tok $ranks 20 16; done
equal "a model of odd sizes, a masked file, six epochs" odd/step-00000001 masked.tok 3 25 7

refused "a token file of another vocabulary" "vocabulary of 4096 tokens, the model one of 301" odd/step-00000001 \
    plain.tok 1 1 7
cp -r odd/step-00000001 reshaped
sed -i 's/"intermediate_size": 23/"intermediate_size": 24/' reshaped/config.json
refused "a checkpoint of another shape" "gate_proj.weight has the shape .23, 20., by config.json it must be .24, 20" \
    reshaped masked.tok 1 1 7
sed 's/"vocab_size": 301/"vocab_size": 2/; s/"hidden_size": 20/"hidden_size": 2/' odd-config/config.json >.config
mkdir small && mv .config small/config.json
python3 -c 'import struct
open("two.tok", "wb").write(struct.pack("<8sIIIIQ32x40H", b"LLM3TOK1", 1, 2, 2, 0, 40, *[0, 1] * 20))'
refused "more ranks than a unit has elements" "5 ranks are more than the 4 elements of a unit" small two.tok 5 1 1
refused "a window for fewer than all ranks" "has 14 windows of 7 tokens, fewer than the 15 ranks" odd/step-00000001 \
    masked.tok 15 1 7
refused "a token beyond the vocabulary" "token [0-9]+ is 301, the model has 301" odd/step-00000001 beyond.tok 1 1 7
refused "a number that is none" "STEPS is '2x', expected a number" odd/step-00000001 masked.tok 1 2x 7

differs "a shard is the last rank's gradient, not the sum" 's/mine\[e\] \+= part/mine[e] = part/'
differs "the gradient of a rotation is a rotation forward" 's/rope\(r->d_qkv, c, T, -1\)/rope(r->d_qkv, c, T, 1)/'
differs "all ranks train on the same sample" 's/\* ranks \+ rank;/* ranks;/'
differs "each head has its own keys" 's/c->NH \+ h \/ \(c->NH \/ c->NKV\)/c->NH + h % c->NKV/'
differs "clipping by the norm of one shard" 's/sqrt\(sums\[2\]\)/sqrt(squares)/'

if [ "$mode" = all ]; then
    if command -v clang >/dev/null; then builds minimal-clang clang -O3; fi
    builds minimal-addresses gcc -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all
    builds minimal-threads gcc -O1 -g -fsanitize=thread
    for build in addresses threads; do
        started_by=()
        # the thread sanitizer finds no room for its shadow memory beside random addresses
        if [ $build = threads ] && command -v setarch >/dev/null; then started_by=(setarch -R); fi
        if "${started_by[@]}" ./minimal-$build odd/step-00000001 masked.tok 3 4 7 >.out 2>.err && [ ! -s .err ]; then
            pass "under the sanitizer of $build, 3 ranks" "$(tail -n 1 .out)"
        else fail "under the sanitizer of $build, 3 ranks" "$(head -n 5 .err)"; fi
    done
fi
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
