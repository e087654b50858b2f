#!/usr/bin/env bash
# run_page.sh [PROGRAM]: run-data.js of real runs has the values of metrics.jsonl, the history of a resumed run and its
# marks, and is complete at every moment; a page that cannot be written does not end a run. With node, run.html draws
# these values, and no text of a user acts in it.
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

# read.py: what the following two have in common
cat >read.py <<'END'
import html.parser, json, pathlib, re, sys
def data_of(out):
    script = (pathlib.Path(out) / "run-data.js").read_bytes().decode("ascii")
    assert "<" not in script and not re.search("[\0-\x09\x0b-\x1f\x7f]", script), "a character of run-data.js may act"
    return json.loads(re.fullmatch(r"var run_data = (\{.*\});\n", script, re.S).group(1))
class Balanced(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.open, self.text = [], ""
        self.feed(text)
        assert not self.open, f"not closed: {self.open}"
    def handle_starttag(self, tag, attributes):
        assert tag not in ("script", "img"), f"the page draws an element {tag}"
        if tag not in ("path", "tr", "td", "th"): self.open.append(tag)
        for name, value in attributes:
            assert name not in ("src", "href") and not name.startswith("on"), f"{tag} has {name}"
    def handle_endtag(self, tag):
        if tag not in ("path", "tr", "td", "th"): assert self.open.pop() == tag, tag
    def handle_data(self, text): self.text += text
END

# compare.py OUT: the values in run-data.js are those in metrics.jsonl; prints what the page has
cat >compare.py <<'END'
from read import *
out = pathlib.Path(sys.argv[1])
page = (out / "run.html").read_text("utf-8")
assert page.startswith("<!doctype html>") and page.endswith("</html>\n"), "the page is not complete"
assert re.findall(r"<script src=[^>]*></script>", page) == ['<script src="run-data.js"></script>'], "other scripts"
assert not re.search(r"https?:|@import|url\(", page), "the page needs another file"
data = data_of(out)
curves = {key: curve["values"] for key, curve in data["curves"].items()}
lines = [json.loads(line) for line in open(out / "metrics.jsonl")]
steps = [line for line in lines if "loss" in line]
assert data["stride"] == 1 and data["counts"]["steps"] == [1] * len(steps), "other steps"
assert [data["first_step"] + i for i in range(len(steps))] == [line["step"] for line in steps], "other steps"
validations = {line["step"]: line["val_loss"] for line in lines if "val_loss" in line}
for key in ("loss", "lr", "grad_norm", "tokens_per_s", "seconds", "tokens"):
    assert curves[key] == [line[key] for line in steps], f"{key} differs"
assert curves["val_loss"] == [validations.get(line["step"]) for line in steps], "val_loss differs"
for i, line in enumerate(steps):
    waits = line["wait_axis_s"]
    assert abs(sum(waits.values()) - line["wait_s"]) < 1e-5, f"waits of step {line['step']} are not their sum"
    assert all(curves[axis][i] == waits[axis] for axis in waits), f"waits of step {line['step']} differ"
    parts = sum(curves[key][i] for key in ("compute", "data", "other", *waits))
    assert abs(parts - line["seconds"]) < 1e-3 * line["seconds"] + 1e-5, f"parts of step {line['step']}: {parts}"
best = data["curves"]["val_loss"]
if validations:
    step = min(validations, key=lambda step: (validations[step], step))
    assert [best["best_step"], best["best"]] == [step, validations[step]], "another best validation"
counts = {key: sum(values) for key, values in data["counts"].items()}
print(counts["steps"], "steps,", len(validations), "validations,", counts["saves"], "saved,", counts["resumes"],
      "resumed,", counts["skips"], "skipped, step", data["last_step"], "of", data["steps"],
      "ended" if data["has_ended"] else "running")
END

# drawn.py BODY OUT: what the page draws has the values of run-data.js
cat >drawn.py <<'END'
from read import *
body, data = pathlib.Path(sys.argv[1]).read_text("utf-8"), data_of(sys.argv[2])
text = Balanced(body).text
missing = re.search(r".{0,40}(NaN|undefined|Infinity|null)", body)
assert not missing, f"a value is missing: {missing.group(0)}"
def has(part): assert part in text, f"'{part}' is not drawn"
has(f"Step {data['last_step']:,} of {data['steps']:,}, finished.")
loss, validation = data["curves"]["loss"], data["curves"]["val_loss"]
if validation["best_step"]: has(f"best validation {validation['best']:.4f} at step {validation['best_step']}")
assert ("Best validation loss" in text) == bool(validation["best_step"]), "validation"
if loss["last"] is not None: has(f"{loss['last']:.4f}")
for key, name in (("saves", "saved"), ("resumes", "resumed"), ("skips", "update skipped")):
    count = sum(data["counts"][key])
    assert (f"{name} ({count})" in text) == (count > 0), name
points = sum(value is not None for value in loss["values"])
drawn = len(re.findall("[ML]", re.search(r'<path class="k-loss" d="([^"]*)"', body).group(1)))
assert drawn == points, f"{drawn} points of the loss, not {points}"
for name in ("Gradient norm", "Learning rate", "Memory by category", "Where a step's time goes", "Command and options"):
    has(name)
assert ("Ranks side by side" in text) == (data["world"] > 1), "ranks"
print(points, "points,", body.count('class="plot"'), "plots,", len(body), "characters")
END
node=$(command -v node) || echo "node is not here: what run.html draws is not checked"

# whole NAME OUT PATTERN: run-data.js of OUT agrees with metrics.jsonl, and has PATTERN; the page draws it
whole() {
    if ! python3 compare.py "$2" >said 2>&1; then fail "$1" "$(tail -n 1 said)"
    elif ! grep -qE "$3" said; then fail "$1" "$(cat said); expected $3"
    else pass "$1" "$(cat said)"; fi
    [ -n "$node" ] || return
    if ! node "$top/dev/test/draw_page.js" "$2/run.html" >body 2>said; then fail "$1: drawn" "$(grep -m1 Error said)"
    elif ! python3 drawn.py body "$2" >said 2>&1; then fail "$1: drawn" "$(tail -n 1 said)"
    else pass "$1: drawn" "$(cat said)"; fi
}

four=(--ranks 4 --tp 2 --dp-shard 2 --val text/val.tok --val-batches 2 --val-every 10 --save-every 25)
"${train[@]}" "${four[@]}" --steps 60 --out run >said 2>&1 || fail "a run" "$(tail -n 1 said)"
whole "run-data.js has the values of metrics.jsonl" run \
    "60 steps, 6 validations, 3 saved, 0 resumed, 0 skipped, step 60 of 60 ended"
echo "an older page" >run/run.html
printf '{"step":61,"lo' >>run/metrics.jsonl
"${train[@]}" "${four[@]}" --steps 90 --resume auto --allow-changes --out run >said 2>&1 ||
    fail "a resumed run" "$(tail -n 1 said)"
whole "a resumed run shows its whole history, and where it was resumed" run \
    "90 steps, 9 validations, 5 saved, 1 resumed, 0 skipped, step 90 of 90 ended"
"${train[@]}" --steps 1 --out one >said 2>&1 || fail "a run of one step" "$(tail -n 1 said)"
whole "a run of one step without validation has a page" one "1 steps, 0 validations, 1 saved, 0 resumed"
if cmp -s run/run.html one/run.html; then
    pass "run.html is the same for every run, and is written where it differs" "$(wc -c <run/run.html) bytes"
else fail "run.html is the same for every run, and is written where it differs" "$(head -c 40 run/run.html)"; fi

# texts of a user: in the data, on the page, and on the page as one file
evil='</script><script>alert("1")</script><img src=x onerror=alert(2)>'
"${train[@]}" --steps 2 --out evil \
    --after-save "printf '%s\\n' '$evil'; printf '\\377\\033[31m\\000\\342\\200\\250\\342\\200\\256\\n'" >said 2>&1 ||
    fail "a run with a hostile text" "$(tail -n 1 said)"
whole "texts that would end a script are escaped" evil "2 steps"
for part in 'u003c/script>.u003cscript>alert' 'ufffd.u001b.31m.u0000.u2028.u202e'; do
    grep -q "$part" evil/run-data.js || fail "hostile texts" "run-data.js does not have $part"
done
if [ -n "$node" ]; then
    mkdir alone
    node "$top/dev/test/draw_page.js" evil/run.html saved >alone/run.html
    node "$top/dev/test/draw_page.js" alone/run.html >alone/body 2>said
    if cmp -s body alone/body && grep -q '&#60;/script&#62;&#60;script&#62;alert' body && grep -q '�␛.31m␀.*�' body &&
        [ "$(grep -o '<script' alone/run.html | wc -l)" = "$(grep -o '<script' evil/run.html | wc -l)" ]; then
        pass "the page as one file draws the same without run-data.js" "$(wc -c <alone/run.html) bytes"
    else fail "the page as one file draws the same without run-data.js" "$(grep -m1 Error said)"; fi
fi

# killed at random moments, and resumed each time
kills=0 torn=0
for i in 1 2 3 4 5 6; do
    "${train[@]}" --steps 100000000 --save-every 20 --keep 2 --resume auto --out killed >said 2>&1 &
    process=$!
    sleep "0.$((RANDOM % 8 + 1))"
    kill -KILL $process
    wait $process 2>/dev/null
    [ -e killed/run-data.js ] || continue
    if tail -c 8 killed/run.html | grep -q '</html>' && tail -c 4 killed/run-data.js | grep -q ']};'; then
        kills=$((kills + 1))
    else torn=$((torn + 1)); fi
done
if [ "$kills" -ge 3 ] && [ "$torn" = 0 ]; then pass "a run that is killed leaves a complete page" "$kills pages"
else fail "a run that is killed leaves a complete page" "$kills complete, $torn torn: $(tail -n 1 said)"; fi
saved=$(readlink killed/latest)
"${train[@]}" --steps $((10#${saved#step-} + 20)) --resume auto --allow-changes --out killed >said 2>&1 ||
    fail "the last resumed run" "$(tail -n 1 said)"
[ ! -e killed/.run-data.js.part ] || fail "the next run" "leaves the page that a killed run was writing"

# a full disk, and a name that cannot be written
mkdir full
ln -s /dev/full full/.run-data.js.part
"${train[@]}" --steps 5 --out full >said 2>err
code=$?
if [ "$code $(grep -c '^note: cannot write run.html and run-data.js in full: No space left' err)" = "0 1" ] &&
    [ -e full/latest/trainer.json ]; then pass "training continues when run-data.js finds the disk full" "$(cat err)"
else fail "training continues when run-data.js finds the disk full" "exit code $code: $(cat err)"; fi
mkdir -p barred/.run-data.js.part
"${train[@]}" --steps 5 --warmup 0 --out barred >said 2>err
code=$?
if [ "$code $(wc -l <err) $(grep -c '^note: cannot write run.html and run-data.js in barred' err)" = "0 1 1" ]; then
    pass "a page that cannot be written is reported once" "$(cat err)"
else fail "a page that cannot be written is reported once" "exit code $code: $(cat err)"; fi

# losses that are not finite
"${train[@]}" --steps 10 --lr 1000 --warmup 0 --clip 0 --out wild >said 2>&1
if grep -q '"skipped":true' wild/metrics.jsonl 2>/dev/null; then
    skips=$(grep -c '"skipped":true' wild/metrics.jsonl)
    whole "updates that were skipped leave gaps in the page" wild "10 steps, 0 validations, .* $skips skipped"
else fail "updates that were skipped leave gaps in the page" "no update was skipped: $(tail -n 1 said)"; fi
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
