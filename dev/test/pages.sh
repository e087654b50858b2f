#!/usr/bin/env bash
# pages.sh [FOLDER]: opens run.html and plan.html of small runs in headless Chromium, at three widths, in light and
# dark, and checks what only a browser knows: text that overlaps or is too faint, parts wider than the screen, empty
# plots, errors of the script; with node, that run.html follows its numbers. FOLDER receives the screenshots.
# pages.sh --possible: exits with 0 if there is a Chromium.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. dev/test/checks.sh
browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome || true)
if [ "${1:-}" = --possible ]; then [ -n "$browser" ]; exit; fi
[ -n "$browser" ] || {
    echo "error: pages.sh found no chromium: install it (apt-get install chromium), or leave this test out" >&2
    exit 1
}
program=$PWD/build/cpu-fp32/train_llama3 top=$PWD
planner=$(program_for --plan) generate=$(program_for --prompt x)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pictures=${1:+$(realpath -m "$1")}
[ -z "$pictures" ] || mkdir -p "$pictures"
cd "$work" || exit
export LC_ALL=C.UTF-8 OMP_NUM_THREADS=1

# The check runs in the page and sends what it finds to the page that has it in a frame.
cat >check.js <<'END'
const check = () => {
    check_texts(WIDTH);
    for (const plot of document.querySelectorAll('.plot')) {
        const card = plot.closest('.card'), output = card.querySelector('output');
        const name = card.querySelector('h2').textContent;
        const curves = [...plot.querySelectorAll('path:not(.grid):not(.dash):not(.tick):not(.save)')];
        if (!curves.some(path => path.getAttribute('d'))) say('nothing is drawn: ' + name);
        const before = output.innerHTML, box = plot.getBoundingClientRect();
        plot.dispatchEvent(new PointerEvent('pointermove', {clientX: box.left + box.width / 2, clientY: box.top}));
        if (!output.textContent.startsWith('step ')) say('no values are shown: ' + name);
        plot.dispatchEvent(new PointerEvent('pointerleave'));
        if (output.innerHTML != before) say('the title line does not return: ' + name);
    }
    const plots = document.querySelectorAll('.plot').length, all = texts();
    parent.postMessage(`checked WIDTH: ${all.length} texts, ${plots} plots: ${wrong.join('; ') || 'fine'}`, '*');
};
addEventListener('load', check);
END

# checked PAGE WIDTH: the page with the check and its numbers in it
checked() {
    sed -n '1,/<\/head>/p' "$1" | sed 's|</head>||'
    echo "<script>"
    sed "s/WIDTH/$2/g" "$top/dev/test/page_check.js" check.js
    echo "</script></head>"
    { echo "<script>"; cat "${1%/*}/run-data.js"; echo "</script>"; } >numbers 2>/dev/null
    sed -e '1,/<\/head>/d' -e '/^<script src="run-data.js"><.script>$/{' -e 'r numbers' -e 'd' -e '}' "$1"
}

browse() {
    timeout 120 "$browser" --headless --no-sandbox --disable-gpu --hide-scrollbars "--user-data-dir=$work/profile" "$@"
}

# look PAGE NAME: checks a page in frames of three widths, since a window cannot be as narrow as a phone
look() {
    local width scheme options said
    for scheme in light dark; do
        options=()
        [ $scheme = light ] || options+=(--blink-settings=preferredColorScheme=0)
        {
            echo '<!doctype html><meta name="color-scheme" content="light dark"><script>'
            echo 'onmessage = event => { document.body.append(event.data + "\n"); }</script><body>'
            for width in 320 800 1280; do
                checked "$1" $width >"checked-$width.html"
                echo "<iframe src=\"checked-$width.html\" style=\"width:${width}px;height:4000px;border:0\"></iframe>"
            done
        } >frames.html
        browse "${options[@]}" --window-size=1400,4000 --dump-dom "file://$work/frames.html" >said 2>err
        for width in 320 800 1280; do
            said=$(grep -o "^checked $width: .*" said)
            if [[ $said = *": fine" ]]; then pass "$2, $width pixels, $scheme" "$said"
            else fail "$2, $width pixels, $scheme" "${said:-the browser shows nothing: $(tail -n 1 err)}"; fi
            [ -z "$pictures" ] || browse "${options[@]}" --window-size=$width,3600 \
                "--screenshot=$pictures/$2-$width-$scheme.png" "file://$(realpath "$1")" >/dev/null 2>&1
        done
    done
}

prepare() {
    "$top/dev/test/sample_text.sh" sample
    VOCAB_SIZE=600 "$top/dev/data/text.sh" text sample >said 2>&1 || { cat said; exit 1; }
    mkdir model
    cat >model/config.json <<'END'
{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
 "intermediate_size": 160, "vocab_size": 600, "max_position_embeddings": 256, "rope_theta": 500000}
END
    train=("$program" --model model --data text/train.tok --seq 32 --batch 1 --threads 1)
}

prepare
"${train[@]}" --val text/val.tok --val-batches 2 --val-every 40 --ranks 4 --tp 2 --dp-shard 2 --steps 200 \
    --save-every 80 --out run >said 2>&1 && "${train[@]}" --val text/val.tok --val-batches 2 --val-every 40 --ranks 4 \
    --tp 2 --pp 2 --accum 2 --sharding full_shard --accumulate sharded --steps 260 --resume auto --allow-changes \
    --out run >said 2>&1 || fail "a run" "$(tail -n 1 said)"
look run/run.html run
if [ -n "$(command -v node)" ]; then
    name="run.html follows its numbers in another folder, and is saved as one file"
    if said=$(node "$top/dev/test/follow_page.js" "$browser" run "$work"); then pass "$name" "$said"
    else fail "$name" "$said"; fi
fi
"${train[@]}" --steps 1 --out one >said 2>&1 || fail "a run of one step" "$(tail -n 1 said)"
look one/run.html one-step
sample="$generate"' --model "$1" --prompt the --max-tokens 60 --threads 1'
"${train[@]}" --steps 900 --lr 0.03 --out long --after-save "$sample" >said 2>&1 ||
    fail "a longer run" "$(tail -n 1 said)"
look long/run.html long
"$planner" --model llama3-8b --world 64 --pp 4 --tp 4 --accum 8 --cluster "$top/dev/clusters/h100-8.json" --mtbf 5000 \
    --steps 100000 --out plan >said 2>&1 || fail "a plan" "$(tail -n 1 said)"
look plan/plan.html plan
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
