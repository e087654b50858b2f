#!/usr/bin/env bash
# lora_8b.sh [OUT]: trains LoRA adapters of rank 16 for Llama 3 8B (random weights, int8 base) for three steps on two
# ranks of this host, and compares the planned memory with what the program allocates and with resident memory. It
# writes a table to OUT (default dev/results/lora-8b.md), followed by the plan of 70B on two ranks.
# `make PRECISION=bf16` builds what it needs; it needs 24 GB of memory. Takes 10 minutes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-dev/results/lora-8b.md} program=build/cpu-bf16/train_llama3 planner=build/cpu-bf16/plan_llama3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
[ -f data/kjv/train.tok ] || dev/data/kjv.sh data/kjv >/dev/null
run=(--model llama3-8b --base int8 --lora-rank 16 --data data/kjv/train.tok --seq 128 --batch 1 --steps 3
    --recompute full --warmup 0 --out "$work/out")
"$program" --ranks 2 "${run[@]}" >"$work/said" 2>&1 &
process=$!
resident=0
while kill -0 "$process" 2>/dev/null; do
    now=$(awk '/^VmHWM/ { print $2 }' "/proc/$process/status" 2>/dev/null || true)
    [ -z "$now" ] || resident=$now
    sleep 1
done
wait "$process" || { cat "$work/said" >&2; exit 1; }
figures='"category":"([a-z]+)","dry_run":([0-9]+),"measured":([0-9]+)'
grep -oE "$figures" "$work/out/ledger.json" | sed -E "s/$figures/\1 \2 \3/" >"$work/memory"
plan=(--model llama3-70b --base int8 --lora-rank 16 --world 2 --batch 1 --seq 2048)
{
    printf '# LoRA with an int8 base\n\n%s, %s cores, %.1f GB of memory; `dev/lora_8b.sh`; commit %s; bf16.\n\n' \
        "$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)" "$(nproc)" \
        "$(awk '/^MemTotal/ { print $2 * 1024 / 1e9 }' /proc/meminfo)" \
        "$(git describe --always --dirty 2>/dev/null || echo none)"
    printf 'Llama 3 8B, random weights, int8 base, rank 16, 2 ranks as threads of one process, '
    printf '1 x 128 tokens per rank, `--recompute full`.\n\n| per rank | planned, bytes | measured |\n|---|---|---|\n'
    awk '{ printf "| %s | %s | %s |\n", $1, $2, $3 }' "$work/memory"
    awk -v resident="$resident" '
        { planned += $2 }
        END {
            printf "| both ranks together | %.2f GB peak | %.2f GB resident peak |\n\n", 2 * planned / 1e9,
                resident * 1024 / 1e9
        }' "$work/memory"
    sed -nE 's/.*"step":([0-9]+),"loss":([0-9.]+).*"seconds":([0-9.]+).*/step \1: loss \2, \3 s\n/p' \
        "$work/out/metrics.jsonl"
    printf '## 70B on two ranks of 80 GB\n\n`plan_llama3 %s`: its memory, and what would change it:\n\n```\n' \
        "${plan[*]}"
    "$planner" "${plan[@]}" | sed -n '/^  memory per rank by category/,/^    total /p; /^  with one change/,$p'
    printf '```\n'
} >"$work/table"
mv "$work/table" "$out"
cat "$out"
