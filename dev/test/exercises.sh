#!/usr/bin/env bash
# exercises.sh [all]: checks the exercises of the book. Right answers are derived here a second time, by formulas that
# share nothing with dev/course/exercises, and must be accepted; plausible wrong ones must be rejected, with the hint
# that names the mistake. `all` also builds the exercises in which a function is to be written: with the original body,
# and with two wrong ones each.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
source dev/test/checks.sh
mode=${1:-fast}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export OMP_NUM_THREADS=1 EXERCISES_DIR=build/test-exercises # not where a reader works
exercise=(python3 dev/course/exercises/exercise.py)

# verdict N right|wrong PATTERN NAME: what the program says about the function of an exercise
verdict() {
    local n=$1 expected=$2 pattern=$3 name=$4 text code said=wrong
    text=$("${exercise[@]}" answer "$n" '' 2>"$work/err")
    code=$?
    grep -qE '^right: [0-9]+ passed, 0 failed$' <<<"$text" && said=right
    if [ "$code" = 0 ] && [ "$said" = "$expected" ] && grep -qE "$pattern" <<<"$text"; then
        pass "exercise $n, $name" "$said: $(head -n 2 <<<"$text" | tr '\n' ' ')"
    else
        fail "exercise $n, $name" "exit code $code, $said, expected $expected and '$pattern': $text $(<"$work/err")"
    fi
}

# refused PATTERN ARGUMENT…: one sentence on standard error, exit code 1
refused() {
    local pattern=$1 code
    shift
    "${exercise[@]}" "$@" >"$work/out" 2>"$work/err"
    code=$?
    if [ "$code" = 1 ] && [ "$(wc -l <"$work/err")" = 1 ] && grep -qE "^error: .*$pattern" "$work/err"; then
        pass "refused: $*" "$(cat "$work/err")"
    else fail "refused: $*" "exit code $code, expected 1 and 'error: …$pattern': $(cat "$work/err")"; fi
}

# numbers: answers to the exercises without a build, in one process, so that each plan is made once. Prints a line
# `pass …` or `FAIL …` for each.
numbers() {
    python3 - <<'PYTHON'
import contextlib, io, itertools, math, re, sys
sys.path.insert(0, "dev/course/exercises")
import exercise

def printed(*arguments):
    text = io.StringIO()
    with contextlib.redirect_stdout(text): code = exercise.main(list(arguments))
    return code, text.getvalue()

def say(n, expected, answer, pattern, name):
    """An answer, whether it is right, what else must be said about it, and how it was derived."""
    code, text = printed("answer", str(n), answer)
    said = "right" if re.search("^right$", text, re.M) else "wrong"
    good = code == 0 and said == expected and re.search(pattern, text)
    print(f"{'pass' if good else 'FAIL'} exercise {n}, {name}: '{answer}' is {said}, expected {expected} and "
          f"'{pattern}': " + " ".join(text.split())[:140])

# Each hint can be reached: no two mistakes of a number have the same value.
for n in (1, 2, 3, 4, 7, 9, 12, 14):
    for mistakes in exercise.find(str(n)).module().solve().mistakes:
        values = [float(m.value) for m in mistakes]
        same = [f"{a:g} and {b:g}" for a, b in itertools.combinations(values, 2) if abs(a / b - 1) <= 0.005]
        print(f"{'FAIL' if same else 'pass'} exercise {n}, {len(values)} mistakes differ: {same or 'all'}")

# Questions have their figures filled in.
for n in (1, 2, 3, 4, 6, 7, 9, 11, 12, 13, 14):
    code, text = printed("question", str(n))
    good = code == 0 and not re.search(r"\{[a-z_]+\}", text) and f"make answer N={n} " in text
    print(f"{'pass' if good else 'FAIL'} question {n}: {text.splitlines()[0] if good else text}")
step_s = float(re.search(r"step takes ([0-9.]+) s", printed("question", "1")[1])[1])

# Llama 3 8B
C, F, V, L, KV, T = 4096, 14336, 128256, 32, 1024, 8192
block = 2 * C * C + 2 * C * KV + 3 * C * F + 2 * C
embedding, head = V * C, V * C + C
parameters = L * block + embedding + head

# 1: FLOPs over time and peak, which is printed in the question
matmuls = 6 * T * (L * (block - 2 * C) + V * C)
attention = L * 4 * C * T * T  # forward
def mfu(flops): return 100 * flops / step_s / 989.4e12
say(1, "right", f"{mfu(matmuls + 3 * attention):.1f} %", "", "2 FLOPs forward and 4 backward per parameter and token")
say(1, "right", f"{mfu(matmuls + 3 * attention) / 100:.3f}", "", "the same as a fraction")
say(1, "wrong", f"{mfu(matmuls):.1f} %", "Attention multiplies too", "attention left out")
say(1, "wrong", f"{mfu(matmuls + 1.5 * attention):.1f} %", "half of the pairs", "attention over the causal pairs")
say(1, "wrong", f"{mfu(matmuls + 1.75 * attention):.1f} %", "the scores a second", "what the program computes")
say(1, "wrong", f"{mfu(matmuls + 3 * attention + 6 * T * V * C):.1f} %", "no matmul", "the embedding as a matmul")

# 2: 18 bytes per parameter
state = 18 * parameters // 8
say(2, "right", f"{state}", "", "18 bytes per parameter over 8 ranks")
say(2, "right", f"{state:,}", "", "the same with separators")
say(2, "right", f"{state / 1e9:.3g} GB", "", "the same rounded to three digits")
say(2, "right", f"{state / 1e9:.4f}e9", "", "the same with an exponent")
say(2, "right", f"{state / 2**30:.2f} GiB", "", "the same in GiB")
say(2, "wrong", f"{state / 1e9:.0f} GB", "too few digits", "two digits")
say(2, "wrong", f"{state + 1}", "not far off", "one byte too many")
say(2, "wrong", f"{16 * parameters // 8}", "second copy", "without the bf16 copy")
say(2, "wrong", f"{18 * parameters}", "an eighth", "not sharded")

# 3: bytes per token of Llama 3.2 1B, and what does not grow
per_token = 2 * 16 * (4 * 2048 + 3072 + 2048 + 3 * 8192)
constant = 18 * 1235814400
say(3, "right", f"{(80e9 - constant) / per_token / 1.035 // 1024 * 1024:.0f}", "",
    "activations by hand, and 3.5 % for smaller buffers")
say(3, "wrong", f"{80e9 / per_token / 1.04:.0f}", "not alone in memory", "state forgotten")
say(3, "wrong", f"{(80e9 - constant) / per_token / 2.08:.0f}", "fp32", "activations in fp32")

# 4: FSDP, 16 ranks, 4 micro-batches
def received(blocks, ends, gradients, own=15 / 16): return own * (2 * (blocks * L * block + ends * (embedding + head))
                                                                  + 4 * gradients * parameters)
full, once = received(8, 4, 4), received(1, 1, 4)
say(4, "right", f"{full:.0f}; {once:.0f}", "", "blocks twice per micro-batch; all once per step")
say(4, "right", f"{full / 1e9:.4g} GB; {once / 1e9:.4g} GB", "", "the same in GB")
say(4, "wrong", f"{received(8, 8, 4):.0f}; {once:.0f}", "which units are not resharded", "embedding and head twice")
say(4, "wrong", f"{received(4, 4, 4):.0f}; {once:.0f}", "What does its backward do", "blocks once per micro-batch")
say(4, "wrong", f"{full:.0f}; {received(1, 1, 1):.0f}", "after every micro-batch", "gradients once per step")
say(4, "wrong", f"{received(8, 4, 4, 1):.0f}; {once:.0f}", "own shard", "its own piece counted")

# 6: the head has more parameters than any block of the last stage
head_3b, block_3b = 128256 * 3072, 2 * 3072 * 3072 + 2 * 3072 * 1024 + 3 * 3072 * 8192
say(6, "right", f"3 {'head' if head_3b > block_3b else 'model.layers.27'}", "", "the last stage has the largest matmul")
say(6, "wrong", "0 embedding", "rank 0: wrong", "the first stage")
say(6, "wrong", "3 messages", "Waits are recorded", "the axis that is waited for")

# 7: TP 2, CP 4, 2 micro-batches
piece, kv = T // 4 // 2 * C * 2, T // 4 * 2 * KV // 2 * 2
tp, cp = 2 * (10 * L + 4) * piece, 2 * 3 * L * 3 * kv
say(7, "right", f"{tp / 1e9:.4g} GB; {cp:,}", "", "ten collectives per block; keys and values three times")
say(7, "wrong", f"{2 * (8 * L + 4) * piece}; {cp}", "gradients of the weights need", "inputs not gathered again")
say(7, "wrong", f"{2 * 10 * L * piece}; {cp}", "split over the vocabulary", "embedding and head forgotten")
say(7, "wrong", f"{tp}; {4 * cp}", "grouped-query", "all query heads")
say(7, "wrong", f"{tp}; {cp * 2 // 3}", "gathers keys and values again", "keys and values not gathered again")

# 9: (p - 1) / (m V)
say(9, "right", f"{700 / 32:.2f} %; {700 / 128:.2f} %", "", "(p - 1) / (m V)")
say(9, "wrong", f"{700 / 39:.2f} %; {700 / 135:.2f} %", "share of the whole step", "idle time over all time")
say(9, "wrong", f"{700 / 32:.2f} %; {2800 / 32:.2f} %", "shorter", "multiplied by V")

# 11: tp as large as a host; and two that are worse
say(11, "right", "--tp 8 --pp 4 --dp-shard 2 --batch 1 --accum 128", "It fits", "tp within a host, a short pipeline")
say(11, "wrong", "--tp 4 --pp 4 --dp-shard 4 --batch 1 --accum 64", "activations", "activations do not fit")
say(11, "wrong", "--tp 8 --dp-shard 8 --batch 1 --accum 32", "slower", "weights gathered 64 times per step")
say(11, "wrong", "--tp 8 --pp 4 --dp-shard 2 --batch 1 --accum 64", "not 256", "half the sequences")

# 12: units of 70B, cut into 8 shards
C, F = 8192, 28672
unit = 2 * C + (2 * C * C + 2 * C * 1024 + 3 * C * F) // 8
begin = 2 * C + (2 * C * C + 2 * C * 1024) // 8
shards = (begin + C * F // 8 - 1) // (unit // 8) - begin // (unit // 8) + 1
accum = 4 * 2**20 // (T * 8 * 2)
say(12, "right", f"{accum}; {8 * shards * 2}; 2", "", "shards that overlap the tensor, times tp and replicas")
say(12, "wrong", f"{accum}; {8 * 8 * 2}; 2", "one flat buffer", "all ranks of the stage")
say(12, "wrong", f"{accum * 2}; {8 * shards * 2}; 2", "Replicas have different samples", "replicas not counted")
say(12, "wrong", f"{accum}; {8 * shards * 2}; 16", "different rows", "tp ranks counted as copies")

# 13: the leaves of the tree are micro-batches of one sequence, and no sum is split
say(13, "right", "A C E", "", "layouts that only move numbers")
say(13, "wrong", "A B C E", "fixed order", "without --deterministic")
say(13, "wrong", "A C D E", "a leaf", "micro-batches of two sequences")
say(13, "wrong", "A C E F", "split a sum", "tensor parallelism")

# 14: Young and Daly
interval = math.sqrt(2 * 40 * 5696 * 3600 / 128)
say(14, "right", f"{interval / 4:.0f}; {100 * 2 * 40 / interval:.2f} %", "", "sqrt(2 cost MTBF) seconds")
say(14, "wrong", f"{interval / 4 * math.sqrt(128):.0f}; {8000 / interval:.2f} %", "any host", "the MTBF of one host")
say(14, "wrong", f"{interval / 4 / math.sqrt(2):.0f}; {8000 / interval:.2f} %", "Half of an interval", "no factor 2")
say(14, "wrong", f"{interval / 4:.0f}; {4000 / interval:.2f} %", "one of the two", "only the saving")

# A solution prints what is right.
for n, pattern in ((2, f"{state:,} bytes"), (4, f"{full:,.0f} bytes"), (12, f": {accum} micro-batches"), (13, "A C E")):
    code, text = printed("solution", str(n))
    print(f"{'pass' if code == 0 and pattern in text else 'FAIL'} solution {n}: '{pattern}' in {text.split()[:4]} …")
PYTHON
}

bad_input() {
    refused 'no exercise N=0; expected a number from 1 to 15' answer 0 1
    refused 'no exercise N=16' question 16
    refused 'no exercise N=x' solution x
    refused 'no exercise N=;' answer '' 1
    refused 'there is no answer' answer 2 ''
    refused "'abc' is not a number; expected a number of bytes, such as" answer 2 abc
    refused "has the unit 's'; expected a number of bytes" answer 2 '12 s'
    refused "has the unit 'GB'; expected a percentage" answer 1 '12 GB'
    refused "is not a number" answer 2 '1.2.3 GB'
    refused "has the unit 'e999'" answer 2 '1e999'
    refused 'has 1 part; expected 2 numbers, separated by semicolons' answer 4 '12 GB'
    refused 'has 2 parts; expected 1 number' answer 2 '1 GB; 2 GB'
    refused 'expected a rank from 0 to 3' answer 6 head
    refused "'network' is no cause" answer 6 '3 network'
    refused 'is not yours to choose' answer 11 '--recompute full'
    refused 'refuses this layout' answer 11 '--tp 3'
    refused 'is not a layout' answer 11 '8 GPUs'
    refused "'Z' is no run" answer 13 'A Z'
    refused 'expected list, question N' frobnicate
}

# The page of the book names every exercise, its chapter and its purpose, and the list names them too.
page() {
    local folder title chapter learn missing='' count=0
    "${exercise[@]}" list >"$work/list"
    for folder in dev/course/exercises/[0-9][0-9]-*; do
        title=$(sed -n 's/^title: //p' "$folder/question.md")
        chapter=$(sed -n 's/^chapter: //p' "$folder/question.md")
        learn=$(sed -n 's/^learn: //p' "$folder/question.md")
        count=$((count + 1))
        grep -qF "$title" "$work/list" || missing+=" $title (list)"
        grep -F "| $count | $title |" docs/book/exercises.md | grep -F "$chapter" | grep -qF "| $learn |" ||
            missing+=" $title (page)"
    done
    if [ "$count" = 15 ] && [ -z "$missing" ]; then pass "the list and docs/book/exercises.md" "$count exercises"
    else fail "the list and docs/book/exercises.md" "$count exercises, missing:$missing"; fi
}

# edited FUNCTION [OLD NEW]: the source that defines a function, with NEW in place of the code OLD, which the function
# has once; spaces and comments do not count. The source's path goes to standard error.
edited() {
    python3 - "$@" <<'PYTHON'
import re, sys
sys.path.insert(0, "dev/book")
import definitions
function, *edit = sys.argv[1:]
[path] = definitions.where(function)
text = (definitions.TOP / path).read_text()
if edit:
    _, begin, end = definitions.functions_of(text)[function]
    pattern = r"\s*".join(map(re.escape, re.findall(r"\w+|\S", edit[0])))
    found = list(re.finditer(pattern, definitions.NOT_CODE.sub(definitions.blank, text[begin:end])))
    if len(found) != 1:
        sys.exit(f"error: {function} has the code {edit[0]} {len(found)} times; expected once")
    text = text[: begin + found[0].start()] + edit[1] + text[begin + found[0].end() :]
print(path, file=sys.stderr)
print(text, end="")
PYTHON
}

# function_exercise N FUNCTION [FUNCTION OLD NEW NAME]…: the original bodies are right, and each edit of one is wrong
function_exercise() {
    local n=$1 folder copy text
    folder=$EXERCISES_DIR/$(printf %02d "$n")
    edited "$2" >"$work/original" 2>"$work/path"
    copy=$folder/$(<"$work/path")
    shift 2
    rm -rf "$folder"
    refused 'is not there; expected make exercise' answer "$n" ''
    text=$("${exercise[@]}" question "$n")
    refused 'still has the line' answer "$n" ''
    if grep -qF "Edit $copy" <<<"$text" && [ -f "$copy" ]; then pass "exercise $n" "wrote $copy"
    else fail "exercise $n" "$text"; fi
    cp "$work/original" "$copy"
    verdict "$n" right 'passed, 0 failed' "the original body"
    while [ $# -gt 0 ]; do
        if edited "$1" "$2" "$3" >"$copy" 2>"$work/err"; then verdict "$n" wrong '^wrong' "$4"
        else fail "exercise $n, $4" "$(<"$work/err")"; fi
        shift 4
    done
    rm -rf "$folder"
}

functions() {
    function_exercise 5 reduction_finish \
        reduction_finish 'r->micro_batch, r->receive' '0, r->receive' "later micro-batches replace earlier ones" \
        reduction_finish 'u->replica_count, 0' 'u->replica_count, 1' "replicas' sums are added to what is there"
    function_exercise 8 keys_seen \
        keys_seen '+ (int64_t)1' '+ (int64_t)0' "a query does not see its own key" \
        query_position 't >= s->q_split' 't > s->q_split' "the second half begins one query late"
    function_exercise 10 warm_up_forwards \
        warm_up_forwards 's->pp - s->pp_rank - 1;' 's->pp - s->pp_rank;' \
        "one forward too many before the first backward" \
        order_steps 'backward <= warm_up' 'backward < warm_up' "one forward too few in the warm-up"
    function_exercise 15 cpu_rope \
        cpu_rope 'half - i), direction)' 'half - i), 1)' "backward rotates forward" \
        cpu_rope 'x0_sin = pair_rounded(pair_mul(x0, s))' 'x0_sin = pair_rounded(pair_mul(x0, minus_s))' "a wrong sign"
}

bad_input
page
numbers >"$work/numbers" || fail "the answers" "python3 ended with an error"
cat "$work/numbers"
passed=$((passed + $(grep -c '^pass' "$work/numbers")))
failed=$((failed + $(grep -c '^FAIL' "$work/numbers")))
[ "$mode" != all ] || functions
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
