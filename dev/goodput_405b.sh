#!/usr/bin/env bash
# goodput_405b.sh [OUT]: simulates the failures of Llama 3 405B's training (arXiv 2407.21783, section 3.3.4: 466
# interruptions in 54 days on 16,384 GPUs, effective training time over 90 %) for several times of detection and of
# saves. It writes the tables to OUT (default dev/results/goodput-405b.md).
# `make PRECISION=bf16 plan_llama3` builds what it needs. Takes about 2 minutes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-dev/results/goodput-405b.md} program=build/cpu-bf16/plan_llama3
said=$(mktemp)
trap 'rm -f "$said"' EXIT

# 466 interruptions in 54 days: one in 2.78 h, and 2,048 hosts with 8 GPUs each
mtbf=$(awk 'BEGIN { printf "%.0f", 54 * 24 * 16384 / 8 / 466 }')
layout=(--model llama3.1-405b --world 16384 --tp 8 --pp 16 --dp-shard 128 --seq 8192 --batch 1 --accum 16
    --sharding shard_grad_op --accumulate local --pp-schedule interleaved --pp-chunks 8 --pp-light-ends
    --cluster dev/clusters/h100-8.json)

# plan OPTIONS…: simulates failures into $said; prints the command line and what it says about goodput
plan() {
    local command=("$program" "${layout[@]}" --mtbf "$mtbf" "$@")
    "${command[@]}" >"$said"
    printf '```\n%s\n' "${command[*]}"
    sed -n '/^  goodput, /,$p' "$said"
    printf '```\n\n'
}

# row NAME: a row of the summary, from the best intervals in $said
row() {
    awk -v name="$1" '
        /failures expected/ { failures = $0; sub(/.*h; /, "", failures); sub(/ failures.*/, "", failures) }
        $2 == "best" { steps[$1] = $3; goodput[$1] = $5 }
        END {
            printf "| %s | %s | every %d steps: %s %% | every %d steps: %s %% | over 90 %% |\n", name, failures,
                steps["sync"], goodput["sync"], steps["async"], goodput["async"]
        }' "$said"
}

{
    # Steps of 54 days, and what a save of 12 bytes per parameter takes at the 2 TB/s of the paper's storage.
    plan --steps 1000 >/dev/null
    steps=$(sed -nE 's/.*steps of ([0-9.]+) s \(.*/\1/p' "$said" | awk '{ printf "%.0f", 54 * 86400 / $1 }')
    save=$(sed -nE 's/.*a save of ([0-9.]+) GB.*/\1/p' "$said" | awk '{ printf "%.3g", $1 * 1e9 / 2e12 }')
    stored=(--steps "$steps" --spares 16 --save-seconds "$save" --pause-seconds 1)
    details=$(mktemp) summary=$(mktemp)
    {
        printf '## Saves as fast as the storage, failures noticed after the default --timeout\n\n'
        plan "${stored[@]}"
        row "a save takes $save s (storage), detection 600 s" >>"$summary"
        printf '## The same, failures noticed within a minute\n\n'
        plan "${stored[@]}" --detect 60
        row "a save takes $save s (storage), detection 60 s" >>"$summary"
        printf "## Saves as this program would write them, failures noticed within a minute\n\n"
        plan --steps "$steps" --spares 16 --detect 60
        row "a save as this program writes it, detection 60 s" >>"$summary"
    } >"$details"
    printf '# Effective training time of Llama 3 405B, simulated\n\n`dev/goodput_405b.sh`; commit %s; bf16.\n\n' \
        "$(git rev-parse --short HEAD 2>/dev/null || echo none)"
    printf 'The paper (arXiv 2407.21783, section 3.3.4) reports 466 interruptions in 54 days on 16,384 GPUs, 419 of '
    printf 'them unexpected, and an effective training time of over 90 %%. With 8 GPUs per host this is an MTBF of '
    printf '54 · 24 h · 2,048 / 466 = %s h per host. The step time is the estimate of ' "$mtbf"
    printf '[plan-405b.md](plan-405b.md). The paper does not say how long its saves, its detection and its relaunch '
    printf 'took, so this table assumes them: 16 spare hosts, 4 h until a failed host is back, 120 s for a relaunch. '
    printf 'In its first two rows a save takes as long as the storage of the paper needs for 12 bytes per parameter '
    printf 'at 2 TB/s, and an async save stops training for 1 s. The last row estimates both for this program, in '
    printf 'which every rank receives all that is written.\n\n'
    printf '| | failures expected | sync saves, best interval | async saves, best interval | paper |\n'
    printf '|---|---|---|---|---|\n'
    cat "$summary"
    printf '\n'
    cat "$details"
    rm "$details" "$summary"
} >"$out.part"
mv "$out.part" "$out"
cat "$out"
