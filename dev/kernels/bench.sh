#!/usr/bin/env bash
# bench.sh [ROUNDS] : the step next to its matmuls in both precisions, and start-up next to an empty MPI program.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
rounds=${1:-7}
processor=$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)
commit=$(git rev-parse --short HEAD 2>/dev/null || echo none)
echo "$processor, $(nproc) cores, commit $commit"
for model in bench-125m bench-8m; do
    for precision in fp32 bf16; do
        echo
        "build/cpu-$precision/bench" "$model" "$rounds"
    done
done
command -v mpicc >/dev/null || exit 0

echo
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
printf '#include <mpi.h>\nint main(int n, char **v) { MPI_Init(&n, &v); MPI_Finalize(); return 0; }\n' >"$work/empty.c"
mpicc -O2 "$work/empty.c" -o "$work/empty"
# version 1, width 2, vocabulary 4096, no flags, 4096 tokens
printf 'LLM3TOK1\1\0\0\0\2\0\0\0\0\20\0\0\0\0\0\0\0\20\0\0\0\0\0\0' >"$work/zero.tok"
head -c $((32 + 2 * 4096)) /dev/zero >>"$work/zero.tok"
# milliseconds COMMAND…: how long the command takes
milliseconds() {
    local start=$EPOCHREALTIME end
    "$@" >/dev/null 2>&1
    end=$EPOCHREALTIME
    echo $(((${end/./} - ${start/./}) / 1000))
}
middle() { printf '%s\n' "$@" | sort -n | sed -n "$(($# / 2 + 1))p"; }
two_ranks=(mpirun --bind-to none -np 2)
step=(build/cpu-fp32/train_llama3 --model tiny --data "$work/zero.tok" --seq 64 --batch 1 --steps 1)
empty=() ours=()
for ((i = 0; i < rounds; i++)); do
    empty+=("$(milliseconds "${two_ranks[@]}" "$work/empty")")
    ours+=("$(milliseconds "${two_ranks[@]}" "${step[@]}")")
done
what="from mpirun to the end of the first step of tiny (T 64, B 1, 2 ranks, with exit)"
echo "$what: $(middle "${ours[@]}") ms, an empty MPI program $(middle "${empty[@]}") ms (medians of $rounds)"
