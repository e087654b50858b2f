#!/usr/bin/env bash
# mine.sh: what `make mine` runs. Builds dev/kernels/mine/$KERNEL.cu and compares it with the definition: in C, with
# times next to the op in use, in each of $PRECISIONS; its CUDA kernel on this processor (dev/cuda_on_cpu), without
# times; and on a GPU with times, if $GPU is set (nvcc is installed) and there is one. The last line is `N passed, N
# failed`.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-2000} # as the program (run/setup/launch.h): other programs may use the cores
passed=0 failed=0
build=build/mine
out=$(mktemp)
trap 'rm -f "$out"' EXIT

# try NAME PRECISION ARGUMENT… : builds build/mine/$KERNEL-NAME and runs it
try() {
    local program=$build/$KERNEL-$1 counts
    printf '\n==== %s, %s\n' "$KERNEL" "$1"
    if ! make --no-print-directory -s PRECISION="$2" "$program"; then
        echo "FAIL $KERNEL, $1: does not compile"
        failed=$((failed + 1))
        return
    fi
    "$program" "${@:3}" 2>&1 | tee "$out" | grep -vE '^[0-9]+ passed, [0-9]+ failed$'
    counts=$(grep -E '^[0-9]+ passed, [0-9]+ failed$' "$out" | tail -n 1)
    if [ -z "$counts" ]; then
        echo "FAIL $KERNEL, $1: ended before its last line"
        failed=$((failed + 1))
        return
    fi
    passed=$((passed + ${counts%% passed*}))
    counts=${counts#*, }
    failed=$((failed + ${counts%% failed*}))
}

for precision in $PRECISIONS; do try "$precision" "$precision" --size bench; done
for precision in fp32 bf16; do try "cuda-on-cpu-$precision" "$precision" --check; done
if [ -n "$GPU" ] && nvidia-smi -L >/dev/null 2>&1; then
    for precision in fp32 bf16; do try "cuda-$precision" "$precision"; done
else printf '\n---- no GPU with nvcc here: the CUDA kernel was checked, and not timed\n'; fi
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
