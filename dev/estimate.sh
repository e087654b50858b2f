#!/usr/bin/env bash
# estimate.sh [OUT [ROUNDS]]: the estimated time of a step of bench-125m on this host, next to the measured time. It
# writes a table to OUT (default dev/results/estimate-cpu.md). The cluster file is measured first, then all runs, one
# after the other in every round; the table has medians of their steps. Takes 15 minutes.
# CLUSTER=FILE uses a cluster file that was measured before.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_mpi_yield_when_idle=1
out=${1:-dev/results/estimate-cpu.md} rounds=${2:-3} cores=$(nproc)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
[ -f data/kjv/train.tok ] || dev/data/kjv.sh data/kjv >/dev/null
precisions=$(ls -d build/cpu-*/plan_llama3 | sed -nE 's/.*cpu-([a-z0-9]+)\/.*/\1/p')
cluster=${CLUSTER:-build/cluster.json}
if [ -z "${CLUSTER:-}" ]; then
    make -s -C dev/kernels collectives CLUSTER="$cluster" >"$work/said" || { tail -n 20 "$work/said" >&2; exit 1; }
fi

train="--model bench-125m --seq 512 --batch 2 --steps 4"
rows=("1 threads --accum 1" "1 threads --accum 1 --recompute full" "2 threads --accum 1" "2 threads --accum 1 --tp 2"
    "2 mpi --accum 1")

# run PRECISION RANKS TRANSPORT OPTIONS…: the seconds of its steps except the first, one per line
run() {
    local program=build/cpu-$1/train_llama3 ranks=$2 transport=$3 launch
    shift 3
    launch="$program --ranks $ranks"
    [ "$transport" = threads ] || launch="mpirun --oversubscribe --bind-to none -np $ranks $program"
    rm -rf "$work/out"
    # shellcheck disable=SC2086
    if ! $launch $train "$@" --threads $((cores / ranks)) --data data/kjv/train.tok --out "$work/out" \
        >"$work/said" 2>&1; then
        cat "$work/said" >&2
        exit 1
    fi
    sed -nE 's/.*"step":([0-9]+).*"seconds":([0-9.]+),"tokens_per_s".*/\1 \2/p' "$work/out/metrics.jsonl" |
        awk '$1 > 1 { print $2 }'
}

# planned KEY: a number of the estimate in plan.json
planned() { sed -nE "s/.*\"$1\":([0-9.e+-]+).*/\1/p" "$work/plan/plan.json"; }

for ((round = 0; round < rounds; round++)); do
    for precision in $precisions; do
        i=0
        for row in "${rows[@]}"; do
            i=$((i + 1))
            # shellcheck disable=SC2086
            run "$precision" $row >>"$work/$precision.$i.seconds"
        done
    done
done

{
    printf '# Step time, estimated and measured\n\n%s, %s cores; commit %s; `dev/estimate.sh`; ' \
        "$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)" "$cores" \
        "$(git describe --always --dirty 2>/dev/null || echo none)"
    printf 'cluster file of the same host (`make -C dev/kernels collectives`). bench-125m, micro-batches of 2 x 512 '
    printf 'tokens; %s rounds, medians of the steps.\n\n' "$rounds"
    printf '| ranks | options | | estimated | arithmetic | waiting | measured | estimated / measured |\n'
    printf '|---|---|---|---|---|---|---|---|\n'
    for precision in $precisions; do
        i=0
        for row in "${rows[@]}"; do
            i=$((i + 1))
            read -r ranks transport options <<<"$row"
            rm -rf "$work/plan"
            # shellcheck disable=SC2086
            "build/cpu-$precision/plan_llama3" --world "$ranks" $train $options --threads $((cores / ranks)) \
                --transport "$transport" --cluster "$cluster" --out "$work/plan" >/dev/null
            sort -n "$work/$precision.$i.seconds" |
                awk -v ranks="$ranks" -v options="$transport, \`$options\`" -v precision="$precision" \
                    -v estimated="$(planned step_s)" -v compute="$(planned compute_s)" -v wait="$(planned exposed_s)" '
                    { v[NR] = $1 }
                    END {
                        median = (v[int((NR + 1) / 2)] + v[int(NR / 2) + 1]) / 2
                        printf "| %d | %s | %s | %.3f s | %.3f s ", ranks, options, precision, estimated, compute
                        printf "| %.3f s | %.3f s | %.2f |\n", wait, median, estimated / median
                    }'
        done
    done
} >"$work/table"
mv "$work/table" "$out"
cat "$out"
