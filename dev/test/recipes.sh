#!/usr/bin/env bash
# recipes.sh [PROGRAM]: --recipe: batches and sequences that grow, mixtures that change, learning rates of several
# stages, frozen tensors; resumed at any place and on any layout with the bits of the uninterrupted run; phases that are
# extended or branched; recipes that are refused.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. dev/test/checks.sh
program=$(realpath "${1:-build/cpu-fp32/train_llama3}")
tokens=${program%/*}/tokens_llama3
planner=$(program_for --plan)
top=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit
export LC_ALL=C OMP_NUM_THREADS=1

"$top/dev/test/sample_text.sh" sample
VOCAB_SIZE=600 "$top/dev/data/text.sh" text sample >said 2>&1 || { fail "the data" "$(tail -n 1 said)"; exit 1; }
mkdir model
cat >model/config.json <<'END_CONFIG'
{"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
 "intermediate_size": 80, "vocab_size": 600, "max_position_embeddings": 256, "rope_theta": 500000}
END_CONFIG
# cut FILE FIRST COUNT: the COUNT tokens from FIRST on, as a token file
cut_tokens() {
    python3 - "$@" <<'END_PYTHON'
import struct, sys
out, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with open("text/train.tok", "rb") as f: data = f.read()
width = struct.unpack_from("<I", data, 12)[0]
header = data[:24] + struct.pack("<Q", count) + data[32:192]
open(out, "wb").write(header + data[192 + first * width:192 + (first + count) * width])
END_PYTHON
}
mkdir data && cp text/tokenizer.model data/
cut_tokens data/web.tok 0 20000
cut_tokens data/code.tok 20000 9000
cut_tokens data/math.tok 30000 3000
common=(--model model --threads 1 --deterministic --save-every 4 --batch 2) # equally many micro-batches on all layouts

# run OUT ARGUMENT… : a run that must succeed
run() {
    local out=$1 code
    shift
    timeout -k 1 120 "$program" "${common[@]}" --out "$out" "$@" >"$out.said" 2>&1 </dev/null
    code=$?
    [ "$code" = 0 ] || fail "a run into $out" "exit code $code: $(tail -n 2 "$out.said")"
}
# state NAME OUT OUT STEP : the checkpoints of a step have the same bytes, apart from trainer.json
state() {
    local name=$1 step file
    step=step-$(printf %08d "$4")
    for file in model.safetensors optimizer.safetensors config.json; do
        if ! cmp "$2/$step/$file" "$3/$step/$file" >.out 2>&1; then
            fail "$name" "$(cat .out)"
            return
        fi
    done
    pass "$name" "$step of $2 and $3 are equal"
}
# values KEY OUT : the values of a key in metrics.jsonl, step by step
values() { python3 -c "import json, sys
for line in open(sys.argv[2] + '/metrics.jsonl'):
    line = json.loads(line)
    if 'loss' in line: print(line['step'], line[sys.argv[1]])" "$1" "$2"; }
# audited NAME OUT : --audit finds nothing lost and nothing repeated
audited() {
    if "$tokens" --audit --out "$2" >said 2>&1; then pass "$1" "$(cat said)"; else fail "$1" "$(tail -n 1 said)"; fi
}
# edited FILE SED : a recipe that is changed by a command of sed, in edited.json
edited() { sed "$2" "$1" >edited.json; }
# refused NAME REGEX RECIPE ARGUMENT… : the recipe is refused with one line
refused() {
    local name=$1 regex=$2
    printf '%s' "$3" >bad.json
    shift 3
    bad "bad recipe: $name" "$regex" "$program" --model model --threads 1 --recipe bad.json "$@"
}

# ---------------------------------------------------------------- one stage is what options say
cat >one.json <<'END_RECIPE'
{"stages": [{"tokens": 3072, "batch": 8, "seq": 32, "lr": 3e-3, "min_lr": 3e-4, "warmup": 3, "max_epochs": 1}]}
END_RECIPE
run one --recipe one.json --data data/web.tok
run options --data data/web.tok --accum 4 --seq 32 --lr 3e-3 --min-lr 3e-4 --warmup 3 --steps 12
state "a recipe of one stage is the run that options describe" one options 12
same "and has its losses" <(values loss one) <(values loss options)

# ---------------------------------------------------------------- batch and sequence grow, on one order of the data
cat >ramp.json <<'END_RECIPE'
{"stages": [ // the batch doubles, then the sequence, then both
    {"name": "short", "tokens": 2560, "batch": 8, "seq": 32, "lr": 3e-3, "min_lr": 3e-4, "warmup": 4},
    {"tokens": 2048, "batch": 16},
    {"name": "long // seq", "tokens": 3072, "batch": 8, "seq": 64},
    {"tokens": 8192, "batch": 16, "seq": 128}]}
END_RECIPE
steps=24 # 10 + 4 + 6 + 4
run ramp --recipe ramp.json --data data/web.tok
audited "batch and sequence grow: every window is consumed once" ramp
grep -q '^stage 4 of 4: steps 21 to 24, 8,192 tokens; 16 sequences of 128 tokens a step' ramp.said &&
    pass "stages are announced" "$(grep -c '^stage' ramp.said) stages" ||
    fail "stages are announced" "$(grep stage ramp.said)"
same "one learning-rate curve spans the stages" <(values lr ramp) <(python3 -c "
import math
for t in range(1, 25):
    cosine = 0.5 * (1 + math.cos(math.pi * (t - 4) / 20))
    print(t, float('%.9g' % (3e-3 * t / 4 if t <= 4 else 3e-4 + cosine * 27e-4)))")
same "tokens are counted across stages" <(values tokens ramp | tail -n 1) <(echo "$steps 15872")
layouts=("--ranks 2" "--ranks 4 --dp-replicate 2" "--ranks 2 --sharding no_shard" "--ranks 2 --pp 2" "--ranks 4 --pp 2")
for i in 0 1 2 3 4; do
    read -ra layout <<<"${layouts[i]}"
    run "ramp$i" --recipe ramp.json --data data/web.tok "${layout[@]}"
    state "the ramp has the same bits with ${layouts[i]}" ramp "ramp$i" $steps
done
# continued from every checkpoint, each time on another layout, in one directory
run resumed --recipe ramp.json --data data/web.tok --ranks 2
for ((step = 4, i = 0; step < steps; step += 4, i++)); do
    for later in resumed/step-*; do [ "${later#*-}" -le "$(printf %08d $step)" ] || rm -r "$later"; done
    read -ra layout <<<"${layouts[i % 5]}"
    run resumed --resume auto --recipe ramp.json --data data/web.tok "${layout[@]}"
done
state "the ramp has the same bits when it is continued from every checkpoint, on five layouts" ramp resumed $steps
same "and the same losses" <(values loss ramp) <(values loss resumed)
audited "and no window is lost or repeated" resumed

run everything --recipe ramp.json --data data/web.tok --ranks 2 --save-mode async --offload all --val data/code.tok \
    --trace everything.trace --after-save 'echo $1'
state "and with asynchronous saves, offloading, validation and a timeline" ramp everything $steps
[ "$(grep -c 'validation loss' everything.said)" = 4 ] && [ "$(wc -l <everything/after-save.log)" -ge 4 ] &&
    [ -s everything.trace ] &&
    pass "each stage is validated at its end" "4 of 4" ||
    fail "each stage is validated at its end" \
    "$(grep -c 'validation loss' everything.said) of 4; $(tail -n 1 everything.said)"
same "config.txt has the options that were given" <(grep -v out everything/config.txt | head -n 3) \
    <(printf -- '--model model\n--data data/web.tok\n--val data/code.tok\n')

run muon --recipe ramp.json --data data/web.tok --optimizer muon
run muon2 --recipe ramp.json --data data/web.tok --optimizer muon --resume muon/step-00000012 --ranks 2
state "with Muon the ramp has the same bits when it is continued on two ranks" muon muon2 $steps

# ---------------------------------------------------------------- a signal in a stage's last step
# After the save of step 9, --after-save sends SIGTERM while step 10 computes, the last of the first stage: 64 samples,
# which take long enough. If the signal comes too late, the run is repeated, up to five times.
echo '{"stages": [{"tokens": 81920, "batch": 64, "seq": 128, "lr": 3e-3, "min_lr": 3e-4, "max_epochs": 9},
    {"tokens": 16384, "batch": 32}]}' >two.json
signal_after_step_9='case $1 in *9) kill -TERM $PPID ;; esac'
run whole --recipe two.json --data data/web.tok
for attempt in 1 2 3 4 5; do
    rm -rf told
    timeout -k 1 120 "$program" "${common[@]}" --save-every 9 --out told --recipe two.json --data data/web.tok \
        --after-save "$signal_after_step_9" >told.said 2>&1 </dev/null
    code=$?
    grep -q '^step *10 | a signal asked to save and to end' told.said && break
done
name="a signal in a stage's last step saves and ends the run before the next stage"
if [ "$code" = 75 ] && [ -e told/step-00000010 ] && ! grep -q '^stage 2 of 2' told.said; then
    pass "$name" "exit code 75, attempt $attempt"
else
    fail "$name" "exit code $code: $(tail -n 2 told.said)"
fi
run told --resume auto --recipe two.json --data data/web.tok --ranks 2
state "and the next stage follows when the run is resumed, with the bits of a run without signals" whole told 14
audited "and no window is lost or repeated" told

# ---------------------------------------------------------------- a stable phase is extended, or branched into a decay
stable='"batch": 8, "seq": 32, "lr": 2e-3, "warmup": 3, "lr_schedule": "constant", "max_epochs": 3'
echo "{\"stages\": [{\"tokens\": 5120, $stable}]}" >stable20.json
echo "{\"stages\": [{\"tokens\": 10240, $stable}]}" >stable40.json
decay='"tokens": 2048, "lr": 2e-3, "min_lr": 0, "lr_schedule": "linear"'
echo "{\"stages\": [{\"tokens\": 5120, $stable}, {$decay}]}" >branch.json
run stable20 --recipe stable20.json --data data/web.tok
run stable40 --recipe stable40.json --data data/web.tok
long='"batch": 8, "seq": 32, "lr": 1e-3, "warmup": 30, "lr_schedule": "constant", "max_epochs": 11'
for steps_long in 400 800; do
    echo "{\"stages\": [{\"tokens\": $((steps_long * 256)), $long}]}" >long$steps_long.json
done
run long400 --save-every 400 --recipe long400.json --data data/web.tok
run long800 --save-every 400 --recipe long800.json --data data/web.tok
run extended --save-every 400 --recipe long800.json --data data/web.tok --resume long400 --ranks 4 --dp-replicate 2
state "400 steps extended to 800 on another layout are 800 steps in one go" long800 extended 800
audited "and no window is lost or repeated when the phase is extended" extended
run branch --recipe branch.json --data data/web.tok
run branched --recipe branch.json --data data/web.tok --resume stable40/step-00000020 --ranks 2
state "a branch from the middle of a longer phase is the branch run alone" branch branched 28
run wsd --data data/web.tok --accum 4 --seq 32 --lr 2e-3 --warmup 3 --lr-schedule wsd:8 --min-lr 0 --steps 28
state "warmup-stable-decay is a stable phase with a branch" wsd branch 28
run longer --data data/web.tok --accum 4 --seq 32 --lr 2e-3 --warmup 3 --lr-schedule wsd:8 --min-lr 0 --steps 40 \
    --resume wsd/step-00000020
grep -q 'changed since then' longer.said && fail "the stable phase of \
    --lr-schedule wsd is extended" "$(grep changed longer.said)" ||
    pass "the stable phase of --lr-schedule wsd is extended" "without --allow-changes"
edited stable40.json 's/2e-3/1e-3/'
bad "what has happened may not change: the rate" "changed.*--lr 0.001, was 0.002" \
    "$program" "${common[@]}" --resume stable20 \
    --data data/web.tok --recipe edited.json --out other
edited stable40.json 's/"batch": 8/"batch": 16/'
bad "what has happened may not change: the batch" "changed.*samples a step 16, was 8" "$program" "${common[@]}" \
    --resume stable20 --data data/web.tok --recipe edited.json --out other
edited one.json 's/3072/15360/'
bad "what has happened may not change: a cosine's length" "changed.*--steps 60, was 12" "$program" "${common[@]}" \
    --resume one --data data/web.tok --recipe edited.json --out other
edited ramp.json 's/"tokens": 2048, "batch": 16/"tokens": 2048, "batch": 8/'
bad "what has happened may not change: a stage of a ramp" "changed.*stage 2: samples a step 8, was 16" \
    "$program" "${common[@]}" \
    --resume ramp/step-00000012 --data data/web.tok --recipe edited.json \
    --out other

# ---------------------------------------------------------------- mixtures change, and sources continue their epochs
cat >mixture.json <<'END_RECIPE'
{"stages": [
    {"tokens": 8192, "batch": 8, "seq": 32, "lr": 2e-3, "data": {"data/web.tok": 0.75, "data/code.tok": 0.25}},
    {"tokens": 8192, "data": {"data/math.tok": 1, "data/web.tok": 2, "data/code.tok": 1}, "max_epochs": 2},
    {"name": "annealing", "tokens": 4096, "seq": 64, "lr": 2e-4, "min_lr": 0, "lr_schedule": "linear",
     "data": {"data/math.tok": 1}, "max_epochs": 4}]}
END_RECIPE
run mixture --recipe mixture.json
audited "mixtures that change: every source gives its share, and no window comes twice in an epoch" mixture
# windows OUT : the windows of each step, in their own order: samples.jsonl lists them rank by rank
windows() { python3 -c "import json, sys
for line in open(sys.argv[1] + '/samples.jsonl'):
    line = json.loads(line)
    print(line.get('step'), sorted(line.get('samples', [])))" "$1"; }
for ranks in 2 4 8; do
    timeout -k 1 120 "$program" --model model --threads 1 --batch 1 --recipe mixture.json --ranks $ranks \
        --out mixture$ranks >said 2>&1
    same "the same windows on $ranks ranks" <(windows mixture) <(windows mixture$ranks)
done
python3 - mixture/samples.jsonl <<'END_PYTHON' >said 2>&1
import collections, json
counts, sources = collections.Counter(), None
for line in open("mixture/samples.jsonl"):
    line = json.loads(line)
    if "windows" in line:
        sources, seq = line["sources"], line["seq"]
        continue
    for sample in line["samples"]:
        k = 0
        while sample >= sources[k]["windows"]:
            sample -= sources[k]["windows"]
            k += 1
        for token in range(sample * seq, (sample + 1) * seq, 32): counts[sources[k]["data"], token] += 1
for name in ("data/web.tok", "data/code.tok", "data/math.tok"):
    of = [n for (source, _), n in counts.items() if source == name]
    size = {"data/web.tok": 20000, "data/code.tok": 9000, "data/math.tok": 3000}[name] // 64 * 2
    least = min(of) if len(of) >= size else 0
    assert max(of) - least <= 1, f"{name}: pieces were used {least} to {max(of)} times"
    print(name, "pieces used", least, "to", max(of), "times;", end=" ")
END_PYTHON
code=$?
[ $code = 0 ] && pass "over all stages no window is used twice more than another of its source" "$(cat said)" ||
    fail "over all stages no window is used twice more than another of its source" "$(tail -n 1 said)"
run resumed_mixture --recipe mixture.json --resume mixture/step-00000036 --ranks 2
state "resumed within the second mixture" mixture resumed_mixture 72
edited mixture.json 's/"tokens": 4096, "seq": 64/"tokens": 2048, "seq": 64/'
run changed --recipe edited.json --resume mixture/step-00000036
grep -q '^step *68/68' changed.said && pass "stages that have not begun may change" "$(tail -n 1 changed.said)" ||
    fail "stages that have not begun may change" "$(tail -n 1 changed.said)"
same "a checkpoint has the tokenizer beside the recipe's own data" data/tokenizer.model mixture/latest/tokenizer.model

# ---------------------------------------------------------------- boundaries of stages
cat >uneven.json <<'END_RECIPE'
{"stages": [{"tokens": 32, "batch": 1, "seq": 32}, {"tokens": 128, "batch": 4},
            {"tokens": 512, "batch": 4, "seq": 128}]}
END_RECIPE
timeout 60 "$program" --model model --threads 1 --recipe uneven.json --data data/web.tok --out uneven >said 2>&1
audited "stages that begin at different places of a window" uneven
cat >tail.json <<'END_RECIPE'
{"stages": [{"tokens": 2560, "batch": 40, "seq": 32, "max_epochs": 3}, {"tokens": 512, "batch": 4}]}
END_RECIPE
run tail --recipe tail.json --data data/math.tok
run resumed_tail --recipe tail.json --data data/math.tok --resume tail/step-00000002
state "an epoch whose rest is smaller than a step: resumed at the stage's end" tail resumed_tail 6
cp data/web.tok replaced.tok
run replaced --recipe ramp.json --data replaced.tok --ranks 2
cut_tokens replaced.tok 0 19000
cp text/tokenizer.model .
bad "resumed at a stage's beginning with another file" "changed .stage 3: data " \
    "$program" "${common[@]}" --recipe ramp.json --data replaced.tok --resume replaced/step-00000020 --out other
bad "a recipe's checkpoint without the recipe" "changed .longest --seq not given, was 128" "$program" "${common[@]}" \
    --data data/web.tok --seq 32 --accum 4 --lr 3e-3 --min-lr 3e-4 --warmup 4 --steps 24 --resume ramp/step-00000004 \
    --out other
run same_out --recipe branch.json --data data/web.tok
rm -r same_out/step-00000028 same_out/step-00000024
run same_out --recipe stable40.json --data data/web.tok --resume auto
audited "a phase that is extended in its own directory" same_out

# ---------------------------------------------------------------- what is frozen, RoPE, and longer positions
cat >freeze.json <<'END_RECIPE'
{"stages": [
    {"tokens": 1024, "batch": 8, "seq": 32, "lr": 2e-3},
    {"tokens": 2048, "seq": 64, "frozen": ["model.embed_tokens.weight", "model.layers.0.*"], "rope_theta": 2000000,
     "max_position_embeddings": 512}]}
END_RECIPE
run freeze --recipe freeze.json --data data/web.tok
python3 - freeze <<'END_PYTHON' >said 2>&1
import json, struct
def tensors(step):
    data = open(f"freeze/step-{step:08d}/model.safetensors", "rb").read()
    size = struct.unpack("<Q", data[:8])[0]
    return {name: data[8 + size + t["data_offsets"][0]:8 + size + t["data_offsets"][1]]
            for name, t in json.loads(data[8:8 + size]).items() if name != "__metadata__"}
before, after = tensors(4), tensors(8)
kept = {name for name in before if before[name] == after[name]}
frozen = {name for name in before if name == "model.embed_tokens.weight" or name.startswith("model.layers.0.")}
assert kept == frozen, f"unchanged: {sorted(kept)}"
config = [json.load(open(f"freeze/step-{step:08d}/config.json")) for step in (4, 8)]
print(len(frozen), "tensors frozen; theta", [c.get("rope_theta") or c["rope_parameters"]["rope_theta"] for c in config],
      "positions", [c["max_position_embeddings"] for c in config])
END_PYTHON
code=$?
[ $code = 0 ] && pass "frozen tensors stay, all others change" "$(cat said)" ||
    fail "frozen tensors stay, all others change" "$(tail -n 1 said)"
grep -q 'theta \[500000.*, 2000000.*\] positions \[256, 512\]' said && \
    pass "config.json is that of its stage" "$(cat said)" ||
    fail "config.json is that of its stage" "$(cat said)"
# AdamW's first update is the learning rate in each element, whenever it comes: its bias correction counts updates
cat >late.json <<'END_RECIPE'
{"stages": [
    {"tokens": 2048, "batch": 8, "seq": 32, "lr": 1e-3, "lr_schedule": "constant", "frozen": ["model.norm.weight"]},
    {"tokens": 256, "frozen": []}]}
END_RECIPE
run late --recipe late.json --data data/web.tok --warmup 0 --beta2 0.999
python3 - late <<'END_PYTHON' >said 2>&1
import array, json
data = open("late/latest/model.safetensors", "rb").read()
size = int.from_bytes(data[:8], "little")
begin, end = json.loads(data[8 : 8 + size])["model.norm.weight"]["data_offsets"]
moved = [abs(x - 1) for x in array.array("f", data[8 + size + begin : 8 + size + end])]
print(f"{min(moved):.6f} to {max(moved):.6f}, expected 0.001")
assert min(moved) > 0.00098 and max(moved) < 0.00102
END_PYTHON
[ $? = 0 ] && pass "a tensor that a later stage trains begins with its first update" "$(cat said)" ||
    fail "a tensor that a later stage trains begins with its first update" "$(head -n 1 said)"
run freeze2 --recipe freeze.json --data data/web.tok --ranks 2 --tp 2
for ranks in 1 2; do
    run freeze_muon$ranks --recipe freeze.json --data data/web.tok --optimizer muon --ranks $ranks
done
state "frozen tensors with Muon, on 2 ranks" freeze_muon1 freeze_muon2 8
run freeze_muon_tp --recipe freeze.json --data data/web.tok --optimizer muon --ranks 4 --tp 2
grep -q '^step *8/8 ' freeze_muon_tp.said &&
    pass "frozen tensors with Muon and tensor parallelism: traffic as expected" "8 steps" ||
    fail "frozen tensors with Muon and tensor parallelism: traffic as expected" "$(tail -n 1 freeze_muon_tp.said)"
run freeze3 --recipe freeze.json --data data/web.tok --ranks 2 --resume freeze/step-00000004
state "frozen tensors: resumed at the stage's beginning, on 2 ranks" freeze freeze3 8

# ---------------------------------------------------------------- plans
"$planner" --model model --recipe ramp.json --world 4 --out plan >said 2>&1
python3 -c "
import json
plan = json.load(open('plan/plan.json'))
stages = plan['stages']
assert [s['steps'] for s in stages] == [10, 4, 6, 4], stages
assert [s['seq'] for s in stages] == [32, 32, 64, 128] and [s['batch'] for s in stages] == [8, 16, 8, 16]
assert stages[3]['peak'] > stages[0]['peak'] and sum(s['tokens'] for s in stages) == 15872
print([s['peak'] for s in stages])" >out 2>&1 &&
    pass "plan_llama3: each stage's steps, tokens and memory" "$(cat out)" ||
    fail "plan_llama3: each stage's steps, tokens and memory" "$(tail -n 1 out) $(tail -n 1 said)"
"$planner" --model model --recipe ramp.json --world 8 --cluster "$top/dev/clusters/h100-8.json" >said 2>&1
grep -qE '^in all 1.587e\+04 tokens, [0-9.]+ days on' said && [ "$(grep -cE '^[1-4] .* yes ' said)" = 4 ] &&
    pass "plan_llama3: days, and whether each stage fits" "$(tail -n 1 said)" ||
    fail "plan_llama3: days, and whether each stage fits" "$(tail -n 3 said)"

# ---------------------------------------------------------------- what is refused
web=(--data data/web.tok)
refused "no stages" "bad.json: \"stages\" must be an array of 1 to" '{"stages": []}' "${web[@]}"
refused "not JSON" "bad.json is not a JSON object" '{"stages": [' "${web[@]}"
refused "another field" "a recipe has no field \"stage\"" '{"stage": []}' "${web[@]}"
refused "a stage's unknown field" "stage 1: a stage has no field \"token\": expected some of" \
    '{"stages": [{"token": 5}]}' "${web[@]}"
refused "no tokens" "stage 1: \"tokens\" is missing" '{"stages": [{"batch": 5}]}' "${web[@]}"
refused "tokens that are no whole number" "stage 1: \"tokens\" is 512.5, expected a whole number" \
    '{"stages": [{"tokens": 512.5}]}' "${web[@]}"
refused "a batch that is no whole number" "stage 1: \"batch\" is 2.5, expected a whole number" \
    '{"stages": [{"tokens": 512, "batch": 2.5}]}' "${web[@]}"
refused "a theta of 0" "stage 1: \"rope_theta\" is 0, expected 1 to" \
    '{"stages": [{"tokens": 512, "rope_theta": 0}]}' "${web[@]}"
refused "no positions" "stage 1: \"max_position_embeddings\" is 0, expected 1 to" \
    '{"stages": [{"tokens": 512, "max_position_embeddings": 0}]}' "${web[@]}"
refused "a theta within the scaling" "stage 1: \"rope_theta\" within \"rope_scaling\"" \
    '{"stages": [{"tokens": 512, "rope_scaling": {"rope_type": "default", "rope_theta": 5000}}]}' "${web[@]}"
refused "a negative minimum" "stage 1: \"min_lr\" -0.5: expected 0 or more" \
    '{"stages": [{"tokens": 512, "min_lr": -0.5}]}' "${web[@]}"
refused "a minimum of a constant rate" "stage 1: \"min_lr\" 0.1 has no effect with \"lr_schedule\" constant" \
    '{"stages": [{"tokens": 512, "lr_schedule": "constant", "min_lr": 0.1}]}' "${web[@]}"
refused "a stage that is not an object" "stage 2 must be a JSON object" '{"stages": [{"tokens": 5}, 5]}' "${web[@]}"
refused "a batch that does not divide" "stage 1: \"batch\" is 10 sequences, which 4 data ranks.*use 12" \
    '{"stages": [{"tokens": 512, "batch": 10, "seq": 32}]}' "${web[@]}" --ranks 4
refused "a batch that --batch does not divide" "\"batch\" is 8 sequences, which 2 data ranks x --batch 3.*use 12" \
    '{"stages": [{"tokens": 512, "batch": 8, "seq": 32}]}' "${web[@]}" --ranks 2 --batch 3
refused "a shrinking sequence" "stage 2 .late.: \"seq\" is 32, and the stage before has 64: sequences may only grow" \
    '{"stages": [{"tokens": 512, "batch": 8, "seq": 64}, {"name": "late", "tokens": 512, "seq": 32}]}' "${web[@]}"
refused "a sequence that is no divisor of the longest" \
    "stage 1: \"seq\" 48 does not divide 64, the longest sequence of the recipe" \
    '{"stages": [{"tokens": 512, "batch": 8, "seq": 48}, {"tokens": 512, "seq": 64}]}' "${web[@]}"
refused "a sequence beyond the positions" \
    "stage 2: \"seq\" is 512, and model has 256 positions.*\"max_position_embeddings\": 512" \
    '{"stages": [{"tokens": 512, "batch": 8, "seq": 64}, {"tokens": 512, "seq": 512}]}' "${web[@]}"
refused "weights that sum to nothing" "the weights of \"data\" sum to 0" \
    '{"stages": [{"tokens": 512, "batch": 8, "seq": 32, "data": {"data/web.tok": 0}}]}'
refused "a negative weight" "the weight of 'data/web.tok' must be a number from 0" \
    '{"stages": [{"tokens": 512, "batch": 8, "seq": 32, "data": {"data/web.tok": -1}}]}'
refused "data that is missing" "no token file at data/none.tok" \
    '{"stages": [{"tokens": 512, "batch": 8, "seq": 32, "data": {"data/none.tok": 1}}]}'
refused "data of a later stage that is missing" "no token file at data/none.tok" \
    '{"stages": [{"tokens": 512, "batch": 8, "seq": 32, "data": {"data/web.tok": 1}}, {"tokens": 512,
     "data": {"data/none.tok": 1}}]}'
refused "data shorter than its share" \
    "stage 2: \"data\": 'data/math.tok' has 2976 tokens, and the stages.* use 4096 of them: 1.38 epochs" \
    '{"stages": [{"tokens": 512, "batch": 8, "seq": 32, "data": {"data/web.tok": 1}}, {"tokens": 4096,
     "data": {"data/math.tok": 1}}]}'
refused "--data and \"data\"" "--data is also given by bad.json, stage 1, in \"data\"" \
    '{"stages": [{"tokens": 512, "batch": 8, "seq": 32, "data": {"data/web.tok": 1}}]}' "${web[@]}"
refused "--lr and \"lr\"" "--lr is also given by bad.json, stage 1" \
    '{"stages": [{"tokens": 512, "lr": 1e-3}]}' "${web[@]}" --lr 1e-3
refused "--steps" "--steps 5 has no effect with --recipe" '{"stages": [{"tokens": 512}]}' "${web[@]}" --steps 5
refused "--accum and \"batch\"" "--accum is also given by bad.json, stage 1, in \"batch\"" \
    '{"stages": [{"tokens": 512, "batch": 8}]}' "${web[@]}" --accum 2
refused "a rate without lr" "stage 2: \"min_lr\" without \"lr\"" \
    '{"stages": [{"tokens": 512, "lr": 1e-3}, {"tokens": 512, "min_lr": 0}]}' "${web[@]}"
refused "a rate out of range" "stage 1: \"lr\": 5000: expected a number from 0 to 1000" \
    '{"stages": [{"tokens": 512, "lr": 5000}]}' "${web[@]}"
refused "an unknown schedule" "stage 1: \"lr_schedule\": step: expected one of cosine" \
    '{"stages": [{"tokens": 512, "lr_schedule": "step"}]}' "${web[@]}"
refused "a decay that does not fit" "a warm-up of 10 steps and a decay of 90 steps do not fit" \
    '{"stages": [{"tokens": 5120, "batch": 8, "seq": 32, "lr_schedule": "wsd", "lr_decay": 90}]}' "${web[@]}"
refused "a decay without wsd" "stage 1: \"lr_decay\" 9 has no effect with \"lr_schedule\" cosine" \
    '{"stages": [{"tokens": 512, "lr_decay": 9}]}' "${web[@]}"
refused "an unknown tensor" "\"frozen\": no tensor is called 'model.embed'" \
    '{"stages": [{"tokens": 512, "frozen": ["model.embed"]}]}' "${web[@]}"
refused "frozen tensors with LoRA" "\"frozen\" with --lora-rank 4" \
    '{"stages": [{"tokens": 512, "frozen": ["model.norm.weight"]}]}' "${web[@]}" --lora-rank 4
refused "data in a later stage alone" "stage 1: \"data\" is missing, and stage 2 has it" \
    '{"stages": [{"tokens": 512}, {"tokens": 512, "data": {"data/web.tok": 1}}]}'
refused "everything frozen" "names every tensor" '{"stages": [{"tokens": 512, "frozen": ["*"]}]}' "${web[@]}"
refused "a layout that a later stage does not fit" "stage 2: --pp-schedule interleaved needs --accum to be a multiple" \
    '{"stages": [{"tokens": 480, "batch": 4, "seq": 32}, {"tokens": 480, "batch": 3}]}' "${web[@]}" --ranks 2 --pp 2 \
    --pp-schedule interleaved --pp-light-ends --batch 1
bad "a recipe that is missing" "cannot read --recipe none.json" "$program" --model model --recipe none.json "${web[@]}"
bad "--recipe without training" "unknown option --recipe" "$(program_for --eval x)" --model model --recipe one.json \
    --eval data/web.tok
edited one.json 's/3072/1536/'
bad "a recipe that ends before the checkpoint" "has finished step 12, but the stages of .* end after step 6" \
    "$program" "${common[@]}" \
    --resume one --data data/web.tok --recipe edited.json --out other --allow-changes

echo
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
