#!/usr/bin/env bash
# overlap.sh [PLAN_LLAMA3]: how much communication of some layouts is exposed on H100s, by plan_llama3's simulation, as
# rows of a table. The program is that of the bf16 build unless another one is given, such as one of an earlier commit.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
program=${1:-build/cpu-bf16/plan_llama3}
pipeline="--model llama3.1-405b --world 512 --tp 8 --pp 16 --seq 8192 --batch 1 --accum 16"
layouts=(
    "--model llama3-8b --world 64 --tp 8 --seq 8192 --batch 4"
    "--model llama3-70b --world 64 --tp 8 --seq 8192 --batch 2 --recompute selective"
    "--model llama3-70b --world 64 --tp 8 --seq 8192 --batch 4 --recompute full"
    "--model llama3-8b --world 8 --tp 8 --seq 8192 --batch 1"
    "--model llama3-8b --world 8 --seq 8192 --batch 1 --recompute selective"
    "--model llama3-8b --world 64 --seq 8192 --batch 2 --recompute full"
    "$pipeline --pp-schedule interleaved --pp-chunks 8 --pp-light-ends"
)
echo "| layout | step | arithmetic | exposed | tp | fsdp | pp |"
echo "|---|---|---|---|---|---|---|"
for layout in "${layouts[@]}"; do
    # shellcheck disable=SC2086
    "$program" $layout --transport nccl --cluster dev/clusters/h100-8.json | awk -v layout="$layout" '
        /estimated step time/ { step = $4; arithmetic = $9; exposed = $13 }
        /communication over/ { of[$3] = $4; waited[$3] = $9 }
        function cell(axis) {
            if (!(axis in of)) return "–"
            return sprintf("%.4g of %.4g s, %.0f %%", waited[axis], of[axis], 100 * waited[axis] / of[axis])
        }
        END {
            printf "| `%s` | %.4g s | %.4g s | %.4g s |", layout, step, arithmetic, exposed
            printf " %s | %s | %s |\n", cell("tp"), cell("fsdp"), cell("pp")
        }'
done
