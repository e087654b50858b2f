#!/usr/bin/env bash
# run.sh [all] : the tests, both precisions; ends with `N passed, N failed`. `make test` builds first and calls it.
# With `all` (make test-all) every test there is, and each suite's sum goes into its row of dev/results/test-all.md as
# soon as it ends. ONLY=REGEX runs the suites whose names match and leaves the rows of the others as they are.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_mpi_yield_when_idle=1
# Llama 3's own tokenizer, where its Python package is installed
export LLAMA3_TOKENIZER=${LLAMA3_TOKENIZER:-$(python3 -c 'import importlib.util as u; print(u.find_spec("llama_models").submodule_search_locations[0] + "/llama3/tokenizer.model")' 2>/dev/null)}
# and SmolLM2's, where dev/data/smollm2.py has written it
if [ -f data/smollm2/tokenizer.model ]; then export SMOLLM2_TOKENIZER=${SMOLLM2_TOKENIZER:-$PWD/data/smollm2/tokenizer.model}; fi
passed=0 failed=0
limit=900 # seconds a suite may take
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

# count NAME LOG SECONDS : adds up a suite's last `N passed, N failed`; a suite that does not get there has failed
count() {
    local counts
    counts=$(grep -E '^[0-9]+ passed, [0-9]+ failed$' "$2" | tail -n 1)
    if [ -z "$counts" ]; then
        echo "FAIL $1: ended before its last line"
        failed=$((failed + 1))
        counts="no result, 1 failed"
    else
        passed=$((passed + $(cut -d' ' -f1 <<<"$counts")))
        failed=$((failed + $(cut -d' ' -f3 <<<"$counts")))
    fi
    echo "---- $1: $counts, $3 s"
    row "$1" "$counts, $3 s"
}

# row NAME RESULT : the suite's row of the table, in the place of its last one
table=
row() {
    [ -n "$table" ] || return 0
    ROW="| $1 | $2 | $commit |" NAME="| $1 |" awk '
        index($0, ENVIRON["NAME"]) == 1 { if (!done) print ENVIRON["ROW"]; done = 1; next }
        /^$/ && rows && !done { print ENVIRON["ROW"]; done = 1 }
        /^\| / { rows = 1 }
        /^[0-9]+ passed, / { next }
        { print }
        END { if (!done) print ENVIRON["ROW"] }' "$table" >"$logs/table"
    awk -F'|' '
        { print }
        /^\| / { if (match($3, /[0-9]+ passed/)) passed += substr($3, RSTART); if (match($3, /[0-9]+ failed/)) failed += substr($3, RSTART) }
        END { if ($0 != "") print ""; printf "%d passed, %d failed\n", passed, failed }' "$logs/table" >"$table"
}

# wanted NAME : is this suite among those asked for?
wanted() { [[ $1 =~ ${ONLY:-} ]]; }

# suite NAME COMMAND… : shows the output as it comes
suite() {
    local name=$1 start=$SECONDS
    wanted "$name" || return 0
    shift
    printf '\n==== %s\n' "$name"
    timeout "$limit" "$@" 2>&1 | tee "$logs/suite"
    count "$name" "$logs/suite" $((SECONDS - start))
}

# beside NAME COMMAND : a suite that keeps one core busy; as many at a time as there are cores, until `settle` shows them one after the other
waiting=()
beside() {
    wanted "$1" || return 0
    while [ "$(jobs -rp | wc -l)" -ge "$(nproc)" ]; do wait -n || true; done
    waiting+=("$1")
    local log=$logs/${#waiting[@]}
    {
        start=$SECONDS
        OMP_WAIT_POLICY=passive timeout "$limit" bash -c "$2" >"$log" 2>&1
        echo $((SECONDS - start)) >"$log.seconds"
    } &
}

settle() {
    local i
    wait
    for i in "${!waiting[@]}"; do
        printf '\n==== %s\n' "${waiting[i]}"
        cat "$logs/$((i + 1))"
        count "${waiting[i]}" "$logs/$((i + 1))" "$(<"$logs/$((i + 1)).seconds")"
    done
    waiting=()
}

# what most of the time goes into twice, `make test` does once: ops step by step and nvcc in one precision, one engine that fuzzes
short=short runtime='TESTS="test-plain test_nccl-plain"' pages=PRECISION=fp32 pages_cuda=PRECISION=bf16 engines=ENGINE=plain
if [ "${1:-}" = all ]; then
    short='' runtime='' pages='' pages_cuda='' engines='' limit=7200
    table=dev/results/test-all.md commit=$(git rev-parse --short HEAD 2>/dev/null || echo none)
    [ -n "${ONLY:-}" ] || printf '# make test-all\n\n%s, %s cores; each row at its commit.\n\n| suite | result | commit |\n|---|---|---|\n\n' "$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)" "$(nproc)" >$table
fi
for precision in fp32 bf16; do
    suite "unit tests, $precision" "build/cpu-$precision/test_llama3" $short
done
if command -v mpirun >/dev/null && ! grep -qv DHAVE_MPI build/cpu-fp32/flags; then
    for ranks in 1 2 3 4 ${1:+8}; do
        suite "processes over MPI, fp32, $ranks ranks" mpirun --oversubscribe --bind-to none -np "$ranks" build/cpu-fp32/test_llama3 mpi
    done
    suite "processes over MPI, bf16, 2 ranks" mpirun --oversubscribe --bind-to none -np 2 build/cpu-bf16/test_llama3 mpi
else
    echo "no MPI in this build: its tests are left out"
fi
export CUDA_ON_CPU_REGISTERS=$PWD/dev/results/cuda-kernels.txt
for precision in bf16 fp32; do
    beside "CUDA on a CPU, unit tests, $precision" "build/cuda-on-cpu-$precision/test_llama3_cuda $short"
done
beside "CUDA on a CPU, the program; CUDA compiled" "dev/test/cuda.sh ${1:+all}"
beside "CUDA on a CPU, the runtime itself" "make --no-print-directory -s -C dev/cuda_on_cpu $runtime"
beside "ops, step by step" "make --no-print-directory -s -C dev/kernels check $pages"
beside "fuzzing, a short run" "make --no-print-directory -s -C dev/fuzz check $engines"
[ "${1:-}" != all ] || beside "gpu_check.sh, on CUDA on a CPU" dev/test/gpu_check.sh
beside "ops, step by step, CUDA on a CPU" "make --no-print-directory -s -C dev/kernels check-cuda $pages_cuda"
beside "style" dev/test/style.sh
beside "checkpoints" "dev/test/checkpoints.sh build/cpu-fp32/train_llama3 ${1:+all}"
beside "bad input" "dev/test/bad_input.sh build/cpu-fp32/train_llama3"
beside "instruction data" "dev/test/chat.sh build/cpu-fp32/train_llama3"
beside "token files" "dev/test/tokenize.sh ${1:+all}"
settle
# other builds of the same tests: variant NAME FOLDER, then what make is told; TESTS=group runs those groups alone
variant() {
    local name=$1 build=build/test-$2 last=${!#} tests=
    wanted "unit tests, $1" || return 0
    shift 2
    case $last in TESTS=*) tests=${last#TESTS=} ;; esac
    # setarch -R: no random addresses, which the thread sanitizer cannot place its shadow beside
    if make -s BUILD="$build" "$@" "$build/test_llama3"; then suite "unit tests, $name" $(command -v setarch >/dev/null && echo setarch -R) "$build/test_llama3" $tests
    else echo "FAIL $name does not build"; failed=$((failed + 1)); row "unit tests, $name" "does not build, 1 failed"; fi
}
if [ "${1:-}" = all ]; then
    variant "AVX2, fp32" avx2-fp32 ARCH=haswell PRECISION=fp32
    variant "AVX2, bf16" avx2-bf16 ARCH=haswell PRECISION=bf16
    variant "no vector extensions, fp32" sse-fp32 ARCH=x86-64 PRECISION=fp32
    variant "neither oneDNN nor MPI, fp32" plain-fp32 HAVE_ONEDNN= HAVE_MPI= PRECISION=fp32
    variant "neither oneDNN nor MPI, bf16" plain-bf16 HAVE_ONEDNN= HAVE_MPI= PRECISION=bf16
    export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1
    variant "address and undefined-behaviour sanitizers, fp32" asan-fp32 HAVE_MPI= PRECISION=fp32 CFLAGS="-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all"
    variant "address and undefined-behaviour sanitizers, bf16" asan-bf16 HAVE_MPI= PRECISION=bf16 CFLAGS="-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all"
    export TSAN_OPTIONS=halt_on_error=1 OMP_THREAD_LIMIT=1 # it cannot see into OpenMP's barriers: ranks and workers are the only threads
    variant "thread sanitizer, 2 to 4 ranks over threads, 1 to 64 loader workers, fp32" tsan-fp32 HAVE_ONEDNN= HAVE_MPI= PRECISION=fp32 CFLAGS="-O1 -g -fsanitize=thread" TESTS="faults data"
    unset TSAN_OPTIONS OMP_THREAD_LIMIT
fi
# cuda_variant NAME FOLDER PRECISION CFLAGS : the unit tests of the kernels on this processor, built otherwise
cuda_variant() {
    wanted "CUDA on a CPU, $1, $3" || return 0
    if make -s CPU_CUDA_BUILD="build/test-$2" PRECISION="$3" CFLAGS="$4" "build/test-$2/test_llama3_cuda"; then suite "CUDA on a CPU, $1, $3" "build/test-$2/test_llama3_cuda" kernels pytorch faults replicas
    else echo "FAIL CUDA on a CPU, $1, does not build"; failed=$((failed + 1)); row "CUDA on a CPU, $1, $3" "does not build, 1 failed"; fi
}
if [ "${1:-}" = all ]; then
    for precision in fp32 bf16; do
        cuda_variant "address and undefined-behaviour sanitizers" "cuda-asan-$precision" $precision "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all"
        cuda_variant "races in shared memory" "cuda-races-$precision" $precision "-O1 -g -fsanitize=thread"
    done
fi
suite "processes" dev/test/processes.sh build/cpu-fp32/train_llama3
suite "planted faults" dev/test/faults.sh ${1:+all}

if [ "${1:-}" = all ]; then
    suite "checkpoints of more layouts, fp32" build/cpu-fp32/test_llama3 checkpoints-all
    suite "every mesh, fp32" build/cpu-fp32/test_llama3 mesh-all
    suite "pipelines' bits, and what surrounds the steps, on more meshes, fp32" build/cpu-fp32/test_llama3 mesh-bits-all mesh-use-all
    suite "every layout of every strategy and option, fp32" build/cpu-fp32/test_llama3 layouts-all
fi
echo
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
