#!/usr/bin/env bash
# programs.sh BUILD [short]: runs the tests of every program but train_llama3, as build/BUILD has them. A build for GPUs
# has none of tokens_llama3 and check_hosts. With MPI, what compares plans with runs also runs on 2 processes.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
build=build/$1 form=${2:-} said=$(mktemp) passed=0 failed=0
trap 'rm -f "$said"' EXIT

# run NAME COMMAND…: runs a test program, and adds its result to the sum
run() {
    local name=$1 counts
    shift
    "$@" 2>&1 | tee "$said"
    counts=$(grep -E '^[0-9]+ passed, [0-9]+ failed$' "$said" | tail -n 1)
    if [ -z "$counts" ] || [ "$counts" = "0 passed, 0 failed" ]; then
        echo "FAIL $name: it has checked nothing, or ended early"
        failed=$((failed + 1))
    else
        passed=$((passed + $(cut -d' ' -f1 <<<"$counts"))) failed=$((failed + $(cut -d' ' -f3 <<<"$counts")))
    fi
}

for test in dev/test/test_*.cu; do
    name=$(basename "$test" .cu)
    case $build/$name in
        build/cuda*/test_tokens_llama3 | build/cuda*/test_check_hosts) continue ;;
        build/cuda*) name+=_cuda ;;
    esac
    run "$name" "$build/$name" $form
done
if grep -q DHAVE_MPI "$build/flags" && command -v mpirun >/dev/null; then
    run "test_plan_llama3 mpi" mpirun --oversubscribe --bind-to none -np 2 "$build/test_plan_llama3" mpi
fi
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
