#!/usr/bin/env bash
# run_page.sh [PROGRAM]: run.html of real runs has the values of metrics.jsonl, the history of a resumed run and its
# marks, and a complete page at every moment; a page that cannot be written does not end a run.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. dev/test/checks.sh
program=$(realpath "${1:-build/cpu-fp32/train_llama3}")
top=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit
export LC_ALL=C OMP_NUM_THREADS=1

"$top/dev/test/sample_text.sh" sample
VOCAB_SIZE=600 "$top/dev/data/text.sh" text sample >said 2>&1 || {
    cat said
    exit 1
}
mkdir model
cat >model/config.json <<'END'
{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
 "intermediate_size": 160, "vocab_size": 600, "max_position_embeddings": 256, "rope_theta": 500000}
END
train=("$program" --model model --data text/train.tok --seq 32 --batch 1 --threads 1)

# compare.py OUT: the values in run.html are those in metrics.jsonl; prints what the page has
cat >compare.py <<'END'
import html.parser, json, re, sys
out = sys.argv[1]
page = open(out + "/run.html", encoding="utf-8").read()
class Balanced(html.parser.HTMLParser):
    open, empty = [], {"meta", "path", "tr", "td", "th"}
    def handle_starttag(self, tag, attributes):
        if tag not in self.empty: self.open.append(tag)
        for name, value in attributes:
            assert name not in ("src", "href") and not name.startswith("on"), f"{tag} has {name}"
    def handle_endtag(self, tag):
        if tag not in self.empty: assert self.open.pop() == tag, tag
parser = Balanced()
parser.feed(page)
assert not parser.open and page.endswith("</html>\n"), "the page is not complete"
assert not re.search(r"https?:|@import|url\(", page), "the page needs another file"
data = json.loads(re.search(r'id="data">(.*?)</script>', page).group(1))
lines = [json.loads(line) for line in open(out + "/metrics.jsonl")]
steps = [line for line in lines if "loss" in line]
assert data["step"] == [line["step"] for line in steps], "other steps"
validations = {line["step"]: line["val_loss"] for line in lines if "val_loss" in line}
for key in ("loss", "lr", "grad_norm", "tokens_per_s"):
    assert data["curves"][key] == [line[key] for line in steps], f"{key} differs"
assert data["curves"]["val_loss"] == [validations.get(step) for step in data["step"]], "val_loss differs"
for i, line in enumerate(steps):
    waits = line["wait_axis_s"]
    assert abs(sum(waits.values()) - line["wait_s"]) < 1e-5, f"waits of step {line['step']} are not their sum"
    assert all(abs(data["curves"][axis][i] - waits[axis]) < 1e-3 * waits[axis] + 1e-6 for axis in waits)
    parts = sum(data["curves"][k][i] for k in ("compute", "data", "other", *waits))
    assert abs(parts - line["seconds"]) < 1e-3 * line["seconds"] + 1e-5, f"parts of step {line['step']}: {parts}"
if validations:
    best = min(validations, key=lambda step: (validations[step], step))
    assert f"best validation {validations[best]:.4f} at step {best}" in page, "another best validation"
shown = dict(re.findall(r"(saved|resumed|update skipped) \((\d+)\)", page))
print(len(steps), "steps,", len(validations), "validations,", shown.get("saved", 0), "saved,", shown.get("resumed", 0),
      "resumed,", re.search(r"Step [^<]*", page).group(0))
END

# whole NAME OUT PATTERN: the page of OUT agrees with metrics.jsonl, and has PATTERN
whole() {
    if ! python3 compare.py "$2" >said 2>&1; then fail "$1" "$(tail -n 1 said)"
    elif ! grep -qE "$3" said; then fail "$1" "$(cat said); expected $3"
    else pass "$1" "$(cat said)"; fi
}

four=(--ranks 4 --tp 2 --dp-shard 2 --val text/val.tok --val-batches 2 --val-every 10 --save-every 25)
"${train[@]}" "${four[@]}" --steps 60 --out run >said 2>&1 || fail "a run" "$(tail -n 1 said)"
whole "run.html has the values of metrics.jsonl" run \
    "60 steps, 6 validations, 3 saved, 0 resumed, Step 60 of 60, finished"
printf '{"step":61,"lo' >>run/metrics.jsonl
"${train[@]}" "${four[@]}" --steps 90 --resume auto --allow-changes --out run >said 2>&1 ||
    fail "a resumed run" "$(tail -n 1 said)"
whole "a resumed run shows its whole history, and where it was resumed" run \
    "90 steps, 9 validations, 5 saved, 1 resumed, Step 90 of 90, finished"
"${train[@]}" --steps 1 --out one >said 2>&1 || fail "a run of one step" "$(tail -n 1 said)"
whole "a run of one step without validation has a page" one "1 steps, 0 validations"
grep -q "resumed (" one/run.html && fail "a new run" "is shown as resumed"

# killed at random moments, and resumed each time
kills=0 torn=0
for i in 1 2 3 4 5 6; do
    "${train[@]}" --steps 100000000 --save-every 20 --keep 2 --resume auto --out killed >said 2>&1 &
    process=$!
    sleep "0.$((RANDOM % 8 + 1))"
    kill -KILL $process
    wait $process 2>/dev/null
    [ -e killed/run.html ] || continue
    if tail -c 8 killed/run.html | grep -q '</html>'; then kills=$((kills + 1)); else torn=$((torn + 1)); fi
done
if [ "$kills" -ge 3 ] && [ "$torn" = 0 ]; then pass "a run that is killed leaves a complete page" "$kills pages"
else fail "a run that is killed leaves a complete page" "$kills complete, $torn torn: $(tail -n 1 said)"; fi
saved=$(readlink killed/latest)
"${train[@]}" --steps $((10#${saved#step-} + 20)) --resume auto --allow-changes --out killed >said 2>&1 ||
    fail "the last resumed run" "$(tail -n 1 said)"
[ ! -e killed/.run.html.part ] || fail "the next run" "leaves the page that a killed run was writing"

# a full disk, and a name that cannot be written
mkdir full
ln -s /dev/full full/.run.html.part
"${train[@]}" --steps 5 --out full >said 2>err
code=$?
if [ "$code $(grep -c '^note: cannot write full/run.html: No space left on device' err)" = "0 1" ] &&
    [ -e full/latest/trainer.json ]; then pass "training continues when run.html finds the disk full" "$(cat err)"
else fail "training continues when run.html finds the disk full" "exit code $code: $(cat err)"; fi
mkdir -p barred/.run.html.part
"${train[@]}" --steps 5 --warmup 0 --out barred >said 2>err
code=$?
if [ "$code $(wc -l <err) $(grep -c '^note: cannot write barred/run.html' err)" = "0 1 1" ]; then
    pass "a page that cannot be written is reported once" "$(cat err)"
else fail "a page that cannot be written is reported once" "exit code $code: $(cat err)"; fi

# losses that are not finite
"${train[@]}" --steps 12 --lr 1000 --warmup 0 --clip 0 --max-skips 100 --out wild >said 2>&1
if grep -q '"skipped":true' wild/metrics.jsonl 2>/dev/null; then
    whole "updates that were skipped leave gaps in the page" wild "12 steps, 0 validations"
    skips=$(grep -c '"skipped":true' wild/metrics.jsonl)
    grep -q "update skipped ($skips)" wild/run.html || fail "skipped updates" "$skips are not in the page"
else fail "updates that were skipped leave gaps in the page" "no update was skipped: $(tail -n 1 said)"; fi
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
