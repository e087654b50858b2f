#!/usr/bin/env bash
# recipe_405b.sh [OUT]: plans the stages of dev/recipes/llama3-405b.json on 8,192 and 16,384 GPUs, on layouts of Table 4
# of the Llama 3 paper, every rank of them, and writes a table of each to OUT (default dev/results/recipe-405b.md).
# `make PRECISION=bf16 plan_llama3` builds what it needs. Takes about 15 minutes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-dev/results/recipe-405b.md} program=build/cpu-bf16/plan_llama3 cluster=dev/clusters/h100-8.json

# stages TITLE OPTIONS…: the table of all stages on a layout
stages() {
    printf '\n## %s\n\n`%s`\n\n```\n' "$1" "${*:2}"
    "$program" --model llama3.1-405b --recipe dev/recipes/llama3-405b.json --batch 1 --sharding shard_grad_op \
        --accumulate local --pp-schedule interleaved --pp-chunks 8 --pp-light-ends --cluster "$cluster" "${@:2}" |
        sed -n '/^stage  name/,$p'
    printf '```\n'
}

{
    printf '# The stages of Llama 3 405B, planned\n\n`dev/recipe_405b.sh`; commit %s; bf16; ' \
        "$(git rev-parse --short HEAD 2>/dev/null || echo none)"
    printf 'cluster file `%s`: datasheets times efficiencies assumed there, none of them fitted.\n\n' "$cluster"
    printf 'TP 8, PP 16 with 8 virtual stages per rank, micro-batches of one sequence, ZeRO-2 with local '
    printf 'accumulation, no recomputation. TFLOP/s per GPU count attention over unmasked pairs. The paper reports 430 '
    printf '(8,192 GPUs, sequences of 8,192, 32 per data-parallel rank), 400 (16,384 GPUs, 16 per rank) and 380 '
    printf '(16,384 GPUs, CP 16, sequences of 131,072). `fits`: whether 80 GB suffice without recomputation; the paper '
    printf 'does not say how it saved activation memory in each stage. A stage may want another layout than the '
    printf 'others: it is trained from the checkpoint of the stage before.\n'
    stages "8,192 GPUs, DP 64" --world 8192 --tp 8 --pp 16
    stages "16,384 GPUs, DP 128" --world 16384 --tp 8 --pp 16
    stages "16,384 GPUs, CP 2, DP 64" --world 16384 --tp 8 --cp 2 --pp 16
    stages "16,384 GPUs, CP 16, DP 8" --world 16384 --tp 8 --cp 16 --pp 16
} >"$out"
