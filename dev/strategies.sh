#!/usr/bin/env bash
# strategies.sh [MODEL [ROUNDS]]: measures what each strategy and option costs: time per step, the share of it in which
# rank 0 waited for other ranks, the share of its communication that computing hid, how much longer than the mean the
# slowest rank computed, memory per rank, and bytes that a rank receives. All rows take turns, so that a noisy machine
# is noisy for all. All of these are medians over the steps; times are also shown as ratios to the first row of their
# table. ONLY=3 measures the third table only.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
model=${1:-bench-8m} rounds=${2:-5}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
program=${PROGRAM:-./train_llama3} tables=0
[ -f data/kjv/train.tok ] || dev/data/kjv.sh data/kjv >/dev/null

# steps METRICS: seconds, share of waiting, share of communication overlapped, and by how much the slowest rank's
# computing exceeds the mean, a line per step from the third on
steps() {
    awk '
        # number(key): the number after "key": in this line
        function number(key) { return match($0, "\"" key "\":[0-9.]+") ? substr($0, RSTART + length(key) + 3) + 0 : 0 }
        number("step") > 2 && match($0, /"compute_s":\[[^]]*/) {
            count = split(substr($0, RSTART + 13, RLENGTH - 13), compute, ",")
            sum = most = 0
            for (i = 1; i <= count; i++) {
                sum += compute[i]
                if (compute[i] > most) most = compute[i]
            }
            print number("seconds"), number("wait_s") / number("seconds"), number("overlap"), most * count / sum - 1
        }' "$1"
}

# measure RANKS OPTIONS ROW FILE: one run; appends a line per step to FILE.steps, writes FILE.memory and FILE.bytes
measure() {
    local ranks=$1 options=$2 row=$3 file=$4 metrics=$work/out/metrics.jsonl
    rm -rf "$work/out"
    # shellcheck disable=SC2086
    "$program" --model "$model" --data data/kjv/train.tok --ranks "$ranks" --steps 6 $options $row --out "$work/out" \
        >"$work/said"
    steps "$metrics" >>"$file.steps"
    sed -nE 's/^memory per rank: (.*)/\1/p' "$work/said" >"$file.memory"
    tail -n 1 "$metrics" | sed -E 's/.*"bytes":\{([^}]*)\}.*/\1/; s/"[a-z_]+"://g' |
        awk -F, '{
            printf "%.1f + %.1f", $1 / 1e6, $2 / 1e6
            if ($3 + $4 + $5) printf " + %.1f", ($3 + $4 + $5) / 1e6
        }' >"$file.bytes"
}

# median FIELD FACTOR FORMAT FILE: the median of a field of the lines in FILE, times FACTOR
median() {
    cut -d' ' -f"$1" "$4" | sort -g | awk -v factor="$2" -v format="$3" '
        { v[NR] = $1 }
        END { printf format, factor * (v[int((NR + 1) / 2)] + v[int(NR / 2) + 1]) / 2 }'
}

# table RANKS OPTIONS ROW…: each row is added to the options
table() {
    local ranks=$1 options=$2 row i round base='' ms share file
    shift 2
    tables=$((tables + 1))
    [ "${ONLY:-$tables}" = "$tables" ] || return 0
    for ((round = 0; round < rounds; round++)); do
        i=0
        for row; do
            i=$((i + 1))
            measure "$ranks" "$options" "$row" "$work/$tables.$i"
        done
    done
    printf '\n%s ranks as threads, `%s`\n\n' "$ranks" "$options"
    printf '| | ms per step | time | waiting | communication overlapped | slowest rank computes | memory per rank '
    printf '| MB received per step: fsdp + dp_replicate (+ tp, cp, pp) |\n|---|---|---|---|---|---|---|---|\n'
    i=0
    for row; do
        i=$((i + 1))
        file=$work/$tables.$i
        ms=$(median 1 1000 %.1f "$file.steps")
        base=${base:-$ms}
        share=$(awk -v a="$ms" -v b="$base" 'BEGIN { printf "%.3f", a / b }')
        printf '| `%s` | %s | %s | %s | %s | %s | %s | %s |\n' "$row" "$ms" "$share" \
            "$(median 2 100 '%.0f %%' "$file.steps")" "$(median 3 100 '%.0f %%' "$file.steps")" \
            "$(median 4 100 '+%.0f %%' "$file.steps")" "$(cat "$file.memory")" "$(cat "$file.bytes")"
    done
}

processor=$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)
described=$("$(dirname "$program")/plan_llama3" --model "$model" | head -n 1 | cut -d: -f1,2 | cut -d, -f1,2)
commit=$(git rev-parse --short HEAD 2>/dev/null || echo none)
printf '# Strategies and options side by side\n\n'
printf '%s, %s cores; %s; commit %s; `dev/strategies.sh %s %s`.\n' \
    "$processor" "$(nproc)" "$described" "$commit" "$model" "$rounds"
table 2 "--batch 2 --accum 2" "--sharding full_shard" "--sharding shard_grad_op" "--sharding no_shard" \
    "--accumulate local" "--sharding shard_grad_op --accumulate local" "--sharding no_shard --accumulate local" \
    "--dp-replicate 2" "--reduce-dtype bf16" "--wrap size:3000000" "--slots 4" \
    "--recompute selective" "--recompute full" "--recompute every:2" \
    "--offload optimizer" "--offload all" "--deterministic"
table 4 "--batch 1 --accum 2" "--sharding full_shard" "--dp-replicate 2" "--dp-replicate 2 --sharding shard_grad_op" \
    "--dp-replicate 4" "--sharding no_shard --accumulate local"
# meshes of 4 ranks, each with the same number of samples per step
table 4 "--warmup 0" "--batch 4 --accum 2" "--tp 2 --batch 8 --accum 2" "--cp 2 --batch 8 --accum 2" \
    "--pp 2 --batch 2 --accum 8" "--pp 2 --pp-schedule interleaved --batch 2 --accum 8" \
    "--tp 2 --pp 2 --batch 2 --accum 16"
