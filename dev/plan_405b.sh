#!/usr/bin/env bash
# plan_405b.sh [OUT]: simulates the layouts of Llama 3 405B in Table 4 of the paper (arXiv 2407.21783), every rank of
# them, and compares them with what the paper reports. It writes a table to OUT (default dev/results/plan-405b.md).
# `make PRECISION=bf16` builds what it needs. Takes about 5 minutes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-dev/results/plan-405b.md} program=build/cpu-bf16/plan_llama3 cluster=dev/clusters/h100-8.json
said=$(mktemp)
trap 'rm -f "$said"' EXIT

# plan OPTIONS…: plans into $said
plan() {
    "$program" --model llama3.1-405b --tp 8 --pp 16 --batch 1 --sharding shard_grad_op --accumulate local \
        --pp-light-ends --cluster "$cluster" "$@" >"$said"
}

# value REGEX: what its group matches in $said
value() { sed -nE "s/.*$1.*/\1/p" "$said" | head -n 1; }

# row NAME REPORTED OPTIONS…: a row of the table; keeps its TFLOP/s under the name in `of`
row() {
    local name=$1 reported=$2 mask full step mfu memory seconds resident
    shift 2
    plan "$@"
    mask=$(value 'TFLOP\/s per rank: ([0-9.]+) \(attention over unmasked')
    full=$(value '; ([0-9.]+) \(attention over all keys')
    step=$(value 'estimated step time ([0-9.]+) s')
    mfu=$(value 'MFU ([0-9.]+) %')
    memory=$(value 'memory: ([0-9.]+) of')
    seconds=$(value 'simulated in ([0-9.]+) s')
    resident=$(value 'simulated in [0-9.]+ s and ([0-9]+) MB')
    awk -v name="$name" -v reported="$reported" -v mask="$mask" -v full="$full" -v step="$step" -v mfu="$mfu" \
        -v memory="$memory" -v seconds="$seconds" -v resident="$resident" '
        function compared(x) { return sprintf("%.0f (%+.1f %%)", x, 100 * (x / reported - 1)) }
        BEGIN {
            printf "| %s | %s s | %s %% | %s | %s | %s ", name, step, mfu, compared(mask), compared(full), reported
            printf "| %s GB | %.0f s, %.0f MB |\n", memory, seconds, resident
        }'
    eval "$of=$mask"
}

{
    printf '# The layouts of Llama 3 405B, simulated\n\n`dev/plan_405b.sh`; commit %s; bf16; ' \
        "$(git rev-parse --short HEAD 2>/dev/null || echo none)"
    printf 'cluster file `%s`: datasheets times efficiencies assumed there, none of them fitted.\n\n' "$cluster"
    printf 'TP 8, PP 16, micro-batches of one sequence, interleaved with light ends, ZeRO-2 with local accumulation, '
    printf 'no recomputation. The paper does not say how many virtual stages a rank has. In brackets: compared with '
    printf 'what the paper reports (Table 4, TFLOP/s per GPU). Every rank is dry-run and simulated; the last column '
    printf 'says what that took.\n\n'
    printf '| layout | step | MFU | TFLOP/s per GPU, attention over unmasked pairs | over all keys | reported | memory '
    printf '| simulated in |\n|---|---|---|---|---|---|---|---|\n'
    for stages in 1 2 4 8; do
        schedule=(--pp-schedule interleaved --pp-chunks "$stages") virtual="$stages virtual stages"
        [ "$stages" -gt 1 ] || schedule=(--pp-schedule 1f1b) virtual="1 stage"
        of=few$stages row "8,192 GPUs: DP 64, 8,192 tokens, 32 sequences; $virtual" 430 \
            --dp-shard 64 --seq 8192 --accum 32 --world 8192 "${schedule[@]}"
        of=many$stages row "16,384 GPUs: DP 128, 8,192 tokens, 16 sequences; $virtual" 400 \
            --dp-shard 128 --seq 8192 --accum 16 --world 16384 "${schedule[@]}"
        of=long$stages row "16,384 GPUs: CP 16, DP 8, 131,072 tokens, 16 sequences; $virtual" 380 \
            --cp 16 --dp-shard 8 --seq 131072 --accum 16 --world 16384 "${schedule[@]}"
    done
    printf '\n| virtual stages per rank | 16,384 against 8,192 GPUs (reported: %.3f) | error |\n|---|---|---|\n' \
        "$(awk 'BEGIN { print 400 / 430 }')"
    for stages in 1 2 4 8; do
        few=few$stages many=many$stages
        awk -v few="${!few}" -v many="${!many}" -v stages="$stages" '
            BEGIN { printf "| %d | %.3f | %+.1f %% |\n", stages, many / few, 100 * (many / few / (400 / 430) - 1) }'
    done
    printf '\n## The layout for 131,072 tokens, in full\n\n```\n'
    plan --cp 16 --dp-shard 8 --seq 131072 --accum 16 --world 16384 --pp-schedule interleaved --pp-chunks 8
    sed -n '/dry-run and simulated/,$p' "$said"
    printf '```\n'
} >"$out.part"
mv "$out.part" "$out"
cat "$out"
