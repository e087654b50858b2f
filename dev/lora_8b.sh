#!/usr/bin/env bash
# lora_8b.sh [OUT] : three steps of rank-16 adapters beside Llama 3 8B (weights at random) in 8 bits, two ranks on this host: memory as planned, by the
# program's own count, and resident; a table into OUT (default dev/results/lora-8b.md), behind it the plan of 70B on two ranks.
# `make PRECISION=bf16` builds what it needs; wants 24 GB of memory. Takes 10 minutes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-dev/results/lora-8b.md} program=build/cpu-bf16/train_llama3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
[ -f data/kjv/train.tok ] || dev/data/kjv.sh data/kjv >/dev/null
run=(--model llama3-8b --base int8 --lora-rank 16 --data data/kjv/train.tok --seq 128 --batch 1 --steps 3 --recompute full --warmup 0 --out "$work/out")
"$program" --ranks 2 "${run[@]}" >"$work/said" 2>&1 &
process=$!
most=0
while kill -0 "$process" 2>/dev/null; do
    now=$(awk '/^VmHWM/ { print $2 }' "/proc/$process/status" 2>/dev/null || true)
    [ -z "$now" ] || most=$now
    sleep 1
done
wait "$process" || { cat "$work/said" >&2; exit 1; }
{
    printf '# Adapters beside a base of 8 bits\n\n%s, %s cores, %.1f GB of memory; `dev/lora_8b.sh`; commit %s; bf16.\n\n' "$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)" "$(nproc)" \
        "$(awk '/^MemTotal/ { print $2 * 1024 / 1e9 }' /proc/meminfo)" "$(git describe --always --dirty 2>/dev/null || echo none)"
    printf 'Llama 3 8B, weights at random, int8 base, rank 16, 2 ranks as threads of one process, 1 x 128 tokens a rank, `--recompute full`.\n\n| a rank | planned, bytes | measured |\n|---|---|---|\n'
    sed -nE 's/.*"memory":(\[.*\]),"flops".*/\1/p' "$work/out/ledger.json" | grep -oE '"category":"[a-z]+","dry_run":[0-9]+,"measured":[0-9]+' | sed -E 's/"category":"([a-z]+)","dry_run":([0-9]+),"measured":([0-9]+)/| \1 | \2 | \3 |/'
    awk -v most="$most" -v planned="$(grep -oE '"category":"[a-z]+","dry_run":[0-9]+' "$work/out/ledger.json" | grep -oE '[0-9]+' | awk '{ s += $1 } END { print s }')" \
        'BEGIN { printf "| both, in all | %.2f GB at most | %.2f GB resident at most |\n\n", 2 * planned / 1e9, most * 1024 / 1e9 }'
    sed -nE 's/.*"step":([0-9]+),"loss":([0-9.]+).*"seconds":([0-9.]+).*/step \1: loss \2, \3 s\n/p' "$work/out/metrics.jsonl"
    printf '## 70B on two ranks of 80 GB\n\n`plan_llama3 --model llama3-70b --base int8 --lora-rank 16 --world 2 --batch 1 --seq 2048`, its memory and what would change it:\n\n```\n'
    "${program%/*}/plan_llama3" --model llama3-70b --base int8 --lora-rank 16 --world 2 --batch 1 --seq 2048 | sed -n '/^  memory per rank by category/,/^    total /p; /^  with one change/,$p'
    printf '```\n'
} >"$work/table"
mv "$work/table" "$out"
cat "$out"
