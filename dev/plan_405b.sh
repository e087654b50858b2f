#!/usr/bin/env bash
# plan_405b.sh [OUT] : the layouts of Llama 3 405B in the paper's Table 4 (arXiv 2407.21783), every rank dry-run and simulated, next to
# what the paper reports; a table into OUT (default dev/results/plan-405b.md). `make PRECISION=bf16` builds what it needs. Takes about 5 minutes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-dev/results/plan-405b.md} program=build/cpu-bf16/plan_llama3 cluster=dev/clusters/h100-8.json
said=$(mktemp)
trap 'rm -f "$said"' EXIT

# plan OPTIONS… : the plan's text into $said
plan() { "$program" --model llama3.1-405b --tp 8 --pp 16 --batch 1 --sharding shard_grad_op --accumulate local --pp-light-ends --cluster "$cluster" "$@" >"$said"; }

# value REGEX : what its group matches in the plan's text
value() { sed -nE "s/.*$1.*/\1/p" "$said" | head -n 1; }

# row NAME PAPER OPTIONS…
row() {
    local name=$1 paper=$2 mask full
    shift 2
    plan "$@"
    mask=$(value 'TFLOP\/s per rank: ([0-9.]+) \(attention over unmasked') full=$(value '; ([0-9.]+) \(attention over all keys')
    awk -v name="$name" -v paper="$paper" -v mask="$mask" -v full="$full" -v step="$(value 'estimated step time ([0-9.]+) s')" -v mfu="$(value 'MFU ([0-9.]+) %')" -v memory="$(value 'memory: ([0-9.]+) of')" -v took="$(value 'simulated in ([0-9.]+) s')" -v resident="$(value 'simulated in [0-9.]+ s and ([0-9]+) MB')" \
        'BEGIN { printf "| %s | %s s | %s %% | %.0f (%+.1f %%) | %.0f (%+.1f %%) | %s | %s GB | %.0f s, %.0f MB |\n", name, step, mfu, mask, 100 * (mask / paper - 1), full, 100 * (full / paper - 1), paper, memory, took, resident }'
    eval "$of=$mask"
}

{
    printf '# The layouts of Llama 3 405B, simulated\n\n`dev/plan_405b.sh`; commit %s; bf16; cluster file `%s`: datasheets times efficiencies that are assumed there, none of them fitted.\n\n' "$(git rev-parse --short HEAD 2>/dev/null || echo none)" "$cluster"
    printf 'TP 8, PP 16, micro-batches of one sequence, interleaved with light ends, ZeRO-2 with gradients summed locally, no recomputation. The paper does not say how many chunks a rank has. '
    printf 'In brackets: against what the paper reports (its Table 4, TFLOP/s a GPU). Every rank is dry-run and simulated; the last column is what that took.\n\n'
    printf '| layout | step | MFU | TFLOP/s a GPU, attention by its mask | over all keys | reported | memory | simulated in |\n|---|---|---|---|---|---|---|---|\n'
    for chunks in 1 2 4 8; do
        interleaved=(--pp-schedule interleaved --pp-chunks "$chunks")
        [ "$chunks" -gt 1 ] || interleaved=(--pp-schedule 1f1b)
        of=few$chunks row "8,192 GPUs: DP 64, 8,192 tokens, 32 sequences; $chunks chunk$([ "$chunks" = 1 ] || echo s)" 430 --dp-shard 64 --seq 8192 --accum 32 --world 8192 "${interleaved[@]}"
        of=many$chunks row "16,384 GPUs: DP 128, 8,192 tokens, 16 sequences; $chunks chunk$([ "$chunks" = 1 ] || echo s)" 400 --dp-shard 128 --seq 8192 --accum 16 --world 16384 "${interleaved[@]}"
        of=long$chunks row "16,384 GPUs: CP 16, DP 8, 131,072 tokens, 16 sequences; $chunks chunk$([ "$chunks" = 1 ] || echo s)" 380 --cp 16 --dp-shard 8 --seq 131072 --accum 16 --world 16384 "${interleaved[@]}"
    done
    printf '\n| chunks | 16,384 against 8,192 GPUs (reported: %.3f) | error |\n|---|---|---|\n' "$(awk 'BEGIN { print 400 / 430 }')"
    for chunks in 1 2 4 8; do
        few=few$chunks many=many$chunks
        awk -v few="${!few}" -v many="${!many}" -v chunks="$chunks" 'BEGIN { printf "| %d | %.3f | %+.1f %% |\n", chunks, many / few, 100 * (many / few / (400 / 430) - 1) }'
    done
    printf '\n## The layout for 131,072 tokens, in full\n\n```\n'
    plan --cp 16 --dp-shard 8 --seq 131072 --accum 16 --world 16384 --pp-schedule interleaved --pp-chunks 8
    sed -n '/dry-run and simulated/,$p' "$said"
    printf '```\n'
} >"$out.part"
mv "$out.part" "$out"
cat "$out"
