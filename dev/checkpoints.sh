#!/usr/bin/env bash
# checkpoints.sh [DIR]: measures saving and reading on the disk of DIR (out/checkpoints), in turns with dd at the same
# block size and sync. First a model of 1.04 B parameters on one rank (needs 18 GB of memory and 26 GB of disk), then
# SmolLM2, saved while it trains (if dev/data/smollm2.py has written data/smollm2). Prints a table. Page caches are
# dropped before reading if that is permitted. ROUNDS=3 and EVERY=12 may be set.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
dir=$(realpath -m "${1:-out/checkpoints}")
program=$PWD/build/cpu-fp32/train_llama3
rounds=${ROUNDS:-3}
make -s PRECISION=fp32 build/cpu-fp32/train_llama3
mkdir -p "$dir"
trap 'rm -rf "$dir/run" "$dir/zeros" "$dir/async"' EXIT
VOCAB_SIZE=600 dev/data/text.sh "$dir/text" ./*.h >/dev/null
train=("$program" --model llama3.2-1b --vocab-size 32000 --data "$dir/text/train.tok" --seq 16 --batch 1 --steps 1
    --out "$dir/run")
drop() { sync; echo 3 2>/dev/null >/proc/sys/vm/drop_caches || true; }
seconds() { grep -oE '[0-9.]+ s(ec[a-z]*)?, [0-9.]+ [kMG]B/s' | grep -oE '^[0-9.]+'; }

echo "| of 12,464 MB | seconds | MB/s | dd: seconds | MB/s | ratio |"
echo "|---|---|---|---|---|---|"
row() { # LABEL SECONDS DD_SECONDS
    awk -v what="$1" -v a="$2" -v b="$3" \
        'BEGIN { printf "| %s | %.2f | %.0f | %.2f | %.0f | %.2f |\n", what, a, 12464 / a, b, 12464 / b, b / a }'
}
for ((i = 1; i <= rounds; i++)); do
    rm -rf "$dir/run"
    mine=$("${train[@]}" | sed -n 's/.* MB in \([0-9.]*\) s.*/\1/p')
    theirs=$(dd if=/dev/zero of="$dir/zeros" bs=4M count=2972 conv=fsync 2>&1 | seconds)
    rm -f "$dir/zeros"
    row "save, round $i" "$mine" "$theirs"
done
for ((i = 1; i <= rounds; i++)); do
    drop
    mine=$("${train[@]}" --resume auto | sed -n 's/.*read in \([0-9.]*\) s.*/\1/p')
    drop
    theirs=$(for file in "$dir"/run/step-00000001/*.safetensors; do
        dd if="$file" of=/dev/null bs=4M 2>&1 | seconds
    done | awk '{ s += $1 } END { print s }')
    row "read, round $i" "$mine" "$theirs"
done
rm -rf "$dir/run"

[ -f data/smollm2/config.json ] || { echo "no data/smollm2: saving while training is not measured"; exit 0; }
TOKENIZER=data/smollm2/tokenizer.model dev/data/text.sh "$dir/text2" ./*.h ./*.cu >/dev/null
every=${EVERY:-12}
"$program" --model data/smollm2 --data "$dir/text2/train.tok" --seq 256 --batch 8 --lr 1e-5 --steps $((3 * every)) \
    --out "$dir/async" --save-every "$every" --save-mode async >"$dir/async.log"
echo
grep saved "$dir/async.log"
# seconds per step while the writer works (the two steps after a save), and before the first save
grep -oE '"step":[0-9]+,|"seconds":[0-9.]+' "$dir/async/metrics.jsonl" | grep -oE '[0-9.]+' | paste - - |
    awk -v every="$every" '
    $1 > 1 && $1 <= every { before += $2; nb++ } $1 > every && ($1 - 1) % every < 2 { during += $2; nd++ }
    END {
        before /= nb; during /= nd
        printf "a step of SmolLM2 (2,048 tokens): %.2f s, while the writer works %.2f s: %.1f %% more\n",
            before, during, 100 * (during / before - 1)
    }'
