#!/usr/bin/env bash
# run.sh [all|measure]: runs the tests of both precisions and ends with `N passed, N failed`. make builds and calls it.
#   run.sh          make test: 8 minutes on two cores, with its builds; dev/test/README.md says what is in it
#   run.sh all      make test-all: every test of the program as it is built here
#   run.sh measure  make measure: a million executions of each fuzz target, and the unit tests in builds for other
#                   processors (Arm in an emulator), without libraries, and with sanitizers
# `all` and `measure` write the result of each suite into its row of dev/results/test-all.md as soon as it ends, and
# say at the end which suites are left. ONLY=REGEX runs the suites whose names match. RESUME=1 leaves out those that
# have passed at this commit.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
mode=${1:-test} only=${ONLY:-}
unset ONLY # faults.sh, a suite, has an ONLY of its own
unset MAKEFLAGS MFLAGS MAKEOVERRIDES # of the make that called this; ONLY among them would break those of the suites
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_mpi_yield_when_idle=1
# Tests compare with Llama 3's own tokenizer if its Python package is installed, and with SmolLM2's if
# dev/data/smollm2.py has written it.
find_tokenizer='import importlib.util as u
print(u.find_spec("llama_models").submodule_search_locations[0] + "/llama3/tokenizer.model")'
export LLAMA3_TOKENIZER=${LLAMA3_TOKENIZER:-$(python3 -c "$find_tokenizer" 2>/dev/null)}
if [ -f data/smollm2/tokenizer.model ]; then
    export SMOLLM2_TOKENIZER=${SMOLLM2_TOKENIZER:-$PWD/data/smollm2/tokenizer.model}
fi
passed=0 failed=0
limit=900 # seconds that a suite may take
table='' commit=$(git rev-parse --short HEAD 2>/dev/null || echo none)
logs=$(mktemp -d)
trap 'say_left; rm -rf "$logs"' EXIT

# ---------------------------------------------------------------- suites and their results
# row NAME RESULT: writes a suite's row of the table, and the sum below it
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
        /^\| / && match($3, /[0-9]+ passed/) { passed += substr($3, RSTART) }
        /^\| / && match($3, /[0-9]+ failed/) { failed += substr($3, RSTART) }
        END { if ($0 != "") print ""; printf "%d passed, %d failed\n", passed, failed }' "$logs/table" >"$table"
}

logged=0 # suites that have a log
seconds_of=() # "SECONDS NAME" of each suite that has ended
listing= left=() # while run_all and run_measure only list what they would run: set, and the names
ended() {
    local i
    for i in "${!left[@]}"; do [ "${left[i]}" != "$1" ] || unset "left[i]"; done
}

say_left() {
    [ ${#left[@]} = 0 ] || { printf 'left: '; printf '%s; ' "${left[@]}"; echo "RESUME=1 runs only these"; }
}

# count NAME LOG SECONDS: adds a suite's last line `N passed, N failed`; a suite that prints none has failed
count() {
    local counts
    counts=$(grep -E '^[0-9]+ passed, [0-9]+ failed$' "$2" | tail -n 1)
    if [ -z "$counts" ]; then
        echo "FAIL $1: ended before its last line"
        failed=$((failed + 1))
        counts="no result, 1 failed"
    elif [ "$counts" = "0 passed, 0 failed" ]; then
        echo "FAIL $1: checked nothing"
        failed=$((failed + 1))
        counts="0 passed, 1 failed"
    else
        passed=$((passed + $(cut -d' ' -f1 <<<"$counts")))
        failed=$((failed + $(cut -d' ' -f3 <<<"$counts")))
    fi
    echo "---- $1: $counts, $3 s"
    row "$1" "$counts, $3 s"
    seconds_of+=("$3 $1")
    ended "$1"
}

# wanted NAME: whether this suite is to run
wanted() {
    [[ $1 =~ $only ]] || return 1
    if [ -n "${RESUME:-}" ] && grep -F "| $1 | " "$table" | grep -q " 0 failed.*| $commit |"; then return 1; fi
    [ -n "$listing" ] || return 0
    left+=("$1")
    return 1
}

# suite NAME COMMAND…: runs a suite and shows its output as it comes
suite() {
    local name=$1 start=$SECONDS
    wanted "$name" || return 0
    shift
    local log=$logs/$((++logged))
    printf '\n==== %s\n' "$name"
    timeout "$limit" "$@" 2>&1 | tee "$log"
    count "$name" "$log" $((SECONDS - start))
}

# beside NAME COMMAND: starts a suite that keeps one core busy in the background. At most as many as there are cores run
# at a time; `settle` waits for them and prints their output
waiting=()
beside() {
    wanted "$1" || return 0
    while [ "$(jobs -rp | wc -l)" -ge "$(nproc)" ]; do wait -n || true; done
    local log=$logs/$((++logged))
    waiting+=("$log $1")
    {
        start=$SECONDS
        OMP_WAIT_POLICY=passive timeout "$limit" bash -c "$2" >"$log" 2>&1
        echo $((SECONDS - start)) >"$log.seconds"
    } &
}

settle() {
    local entry log name
    wait
    for entry in "${waiting[@]}"; do
        read -r log name <<<"$entry"
        printf '\n==== %s\n' "$name"
        cat "$log"
        count "$name" "$log" "$(<"$log.seconds")"
    done
    waiting=()
}

# built NAME COMMAND…: builds what a suite needs, or counts it as failed
built() {
    local name=$1
    shift
    "$@" && return
    echo "FAIL $name: does not build"
    failed=$((failed + 1))
    row "$name" "does not build, 1 failed"
    ended "$name"
    return 1
}

has_mpi() { command -v mpirun >/dev/null && ! grep -qv DHAVE_MPI build/cpu-fp32/flags; }

# processes_over_mpi PRECISION RANKS
processes_over_mpi() {
    suite "processes over MPI, $1, $2 ranks" \
        mpirun --oversubscribe --bind-to none -np "$2" "build/cpu-$1/test_llama3" mpi
}

# Each row of the table in dev/test/README.md has a check, named by a pattern, that has passed in this run.
requirements() {
    local row what pattern found=0 lacking=0
    while IFS='|' read -r _ row what pattern; do
        pattern=$(sed 's/^[^`]*`//; s/`[^`]*$//' <<<"$pattern")
        if grep -aqE -e "^pass .*$pattern" "$logs"/*[0-9]; then
            found=$((found + 1))
        else
            echo "FAIL requirement$row:$what: no check that matches '$pattern' has passed"
            lacking=$((lacking + 1))
        fi
    done < <(grep -E '^\| [A-D][0-9]+ \|' dev/test/README.md)
    echo "$found passed, $lacking failed"
}

in_folder() { echo "make --no-print-directory -s -C $*"; }

# ---------------------------------------------------------------- make test
# What make builds without asking: the trainer and its tests in both precisions, the other programs and theirs in fp32,
# the emulator in bf16. faults.sh builds one more. Other builds, browsers, long emulated runs and hosts are left to make
# test-all.
run_test() {
    local program=build/cpu-fp32/train_llama3
    beside "planted faults" "JOBS=1 dev/test/faults.sh"
    beside "unit tests, fp32" "build/cpu-fp32/test_llama3 short"
    beside "CUDA on a CPU, unit tests, bf16" "build/cuda-on-cpu-bf16/test_llama3_cuda short"
    beside "unit tests, bf16" "build/cpu-bf16/test_llama3 short"
    beside "unit tests of the other programs, fp32" "dev/test/programs.sh cpu-fp32 short"
    beside "CUDA on a CPU, the program" dev/test/cuda.sh
    beside "style" dev/test/style.sh
    beside "checkpoints" "dev/test/checkpoints.sh $program"
    beside "bad input" "dev/test/bad_input.sh $program"
    beside "token files" "dev/test/tokenize.sh $program"
    beside "recipes" "dev/test/recipes.sh $program"
    beside "instruction data" "dev/test/chat.sh $program"
    beside "generation" "dev/test/generation.sh $program"
    beside "files of other programs" "dev/test/field.sh $program"
    beside "minimal.c" "dev/test/minimal.sh $program"
    beside "exports" "dev/test/exports.sh $program"
    beside "run.html" "dev/test/run_page.sh $program"
    beside "the book's links and numbers" "python3 dev/book/check.py"
    beside "links that lead nowhere" dev/test/links.sh
    beside "fault laboratory, its rows" dev/test/fault_lab.sh
    settle
    if has_mpi; then processes_over_mpi fp32 2
    else echo "this build has no MPI: its tests are left out"; fi
    suite "processes" dev/test/processes.sh $program
    suite "hard places" dev/test/hard_places.sh $program
    requirements >"$logs/requirements"
    suite "requirements, a check each" cat "$logs/requirements"
}

# ---------------------------------------------------------------- make test-all
run_all() {
    local precision ranks absent test=build/cpu-fp32/test_llama3
    for precision in fp32 bf16; do beside "unit tests, $precision" "build/cpu-$precision/test_llama3"; done
    for precision in fp32 bf16; do
        beside "unit tests of the other programs, $precision" "dev/test/programs.sh cpu-$precision"
        beside "CUDA on a CPU, unit tests of the other programs, $precision" \
            "dev/test/programs.sh cuda-on-cpu-$precision"
    done
    settle
    if has_mpi; then
        for ranks in 1 2 3 4 8; do processes_over_mpi fp32 "$ranks"; done
        processes_over_mpi bf16 2
    else echo "this build has no MPI: its tests are left out"; fi
    for precision in bf16 fp32; do
        beside "CUDA on a CPU, unit tests, $precision" "build/cuda-on-cpu-$precision/test_llama3_cuda"
        beside "CUDA on a CPU, with the errors of a GPU's arithmetic, $precision" \
            "CUDA_ON_CPU_ROUGH=2 build/cuda-on-cpu-$precision/test_llama3_cuda kernels pytorch documents"
        beside "CUDA on a CPU, generation with the errors of a GPU's arithmetic, $precision" \
            "CUDA_ON_CPU_ROUGH=2 build/cuda-on-cpu-$precision/test_generate_llama3_cuda cached"
    done
    beside "CUDA on a CPU, the program; CUDA compiled" "dev/test/cuda.sh all"
    if has_mpi; then beside "CUDA on a CPU, processes over NCCL" dev/test/gpu_processes.sh; fi
    beside "CUDA on a CPU, the runtime itself" "$(in_folder dev/cuda_on_cpu)"
    beside "ops, step by step" "$(in_folder dev/kernels check)"
    beside "kernel pages alone" "dev/test/pages_alone.sh all"
    beside "fuzzing, a short run" "$(in_folder dev/fuzz check)"
    beside "gpu_check.sh, on CUDA on a CPU" dev/test/gpu_check.sh
    beside "ops, step by step, CUDA on a CPU" "$(in_folder dev/kernels check-cuda)"
    beside "style" "dev/test/style.sh all"
    beside "checkpoints" "dev/test/checkpoints.sh build/cpu-fp32/train_llama3 all"
    beside "bad input" "dev/test/bad_input.sh build/cpu-fp32/train_llama3"
    beside "failed allocations" "dev/test/allocations.sh build/cpu-fp32/train_llama3 200"
    beside "instruction data" "dev/test/chat.sh build/cpu-fp32/train_llama3"
    if dev/test/field/references.py --possible; then
        beside "files of other programs, against these programs" dev/test/field/references.py
    else echo "left out: dev/test/field/references.py needs torch, transformers, safetensors, peft, lm_eval, gguf"; fi
    if dev/test/follow_run_test.py --possible; then
        beside "a run followed in TensorBoard" "dev/test/follow_run_test.py build/cpu-fp32/train_llama3"
    else echo "left out: dev/test/follow_run_test.py needs tensorboard, and torch or tensorboardX"; fi
    beside "figures of the book" "make -s figures-programs && dev/test/figures.sh all"
    beside "minimal.c" "dev/test/minimal.sh build/cpu-fp32/train_llama3 all"
    beside "exports" "dev/test/exports.sh build/cpu-fp32/train_llama3"
    beside "run.html" "dev/test/run_page.sh build/cpu-fp32/train_llama3"
    if dev/test/pages.sh --possible; then beside "pages in a browser" dev/test/pages.sh
    else echo "chromium is not here: run.html and plan.html are not opened in a browser"; fi
    beside "generation" "dev/test/generation.sh build/cpu-fp32/train_llama3"
    beside "files of other programs" "dev/test/field.sh build/cpu-fp32/train_llama3"
    beside "recipes" "dev/test/recipes.sh build/cpu-fp32/train_llama3"
    beside "token files" "dev/test/tokenize.sh build/cpu-fp32/train_llama3 all"
    beside "the book's links and numbers" "python3 dev/book/check.py"
    beside "links that lead nowhere" dev/test/links.sh
    beside "exercises" "dev/test/exercises.sh all"
    beside "the ops as a shared library" "dev/test/ops_library.sh all"
    beside "a kernel of one's own" "make --no-print-directory -s mine"
    beside "the book's commands" dev/test/book.sh
    settle
    if absent=$(dev/test/planner_page.sh --possible); then suite "the planner in a browser" dev/test/planner_page.sh
    else echo "not installed: $absent; the planner is not built for a browser"; fi
    suite "processes" dev/test/processes.sh build/cpu-fp32/train_llama3
    suite "hard places" dev/test/hard_places.sh build/cpu-fp32/train_llama3
    if dev/test/hosts.sh --possible; then suite "several hosts" dev/test/hosts.sh; fi
    suite "planted faults" dev/test/faults.sh all
    suite "fault laboratory" dev/test/fault_lab.sh all
    suite "checkpoints of more layouts, fp32" $test checkpoints-all
    suite "what surrounds the steps, on more meshes, fp32" $test mesh-use-all
    variant "only POSIX calls, fp32" posix-fp32 CFLAGS="-O3 -DONLY_POSIX" PRECISION=fp32 TESTS=short
    if command -v clang >/dev/null; then
        for precision in fp32 bf16; do
            variant "clang, $precision" clang-$precision CC=clang CI=1 PRECISION=$precision TESTS=short
        done
    else echo "clang is not here: its builds are left out"; fi
    if dev/test/without_root.sh --possible; then suite "builds without root" dev/test/without_root.sh; fi
}

# ---------------------------------------------------------------- other builds
emulator=() # the command that runs programs of another processor
# variant NAME FOLDER MAKE-ARGUMENT… [TESTS=GROUP…]: unit tests built in another way; of test_llama3, or of `tester`
variant() {
    local name="unit tests, $1" build=build/test-$2 tests='' program=${tester:-test_llama3}
    local started_by=("${emulator[@]}")
    wanted "$name" || return 0
    case ${!#} in TESTS=*) tests=${!#} ;; esac
    shift 2
    # The thread sanitizer's shadow memory can collide with random addresses: they are switched off.
    if [[ $build = *tsan* ]] && command -v setarch >/dev/null; then started_by=(setarch -R); fi
    built "$name" make -s BUILD="$build" "$@" "$build/$program" || return 0
    suite "$name" "${started_by[@]}" "$build/$program" ${tests#TESTS=}
}

# cuda_variant NAME FOLDER PRECISION CFLAGS: unit tests of the kernels in the emulator, built in another way
cuda_variant() {
    local name="CUDA on a CPU, $1, $3" program=build/test-$2/test_llama3_cuda
    wanted "$name" || return 0
    built "$name" make -s CPU_CUDA_BUILD="build/test-$2" PRECISION="$3" CFLAGS="$4" "$program" || return 0
    suite "$name" "$program" kernels pytorch faults replicas
}

# On Arm, in an emulator, which takes about fifty times as long: the groups that depend on the processor.
run_on_arm() {
    local libraries=$PWD/build/libraries-arm64
    local arm=(CC=aarch64-linux-gnu-gcc HAVE_ONEDNN= HAVE_MPI= DEPS="$libraries")
    local groups="kernels family safetensors pytorch documents bits mesh-bits"
    if ! command -v qemu-aarch64 >/dev/null || ! command -v aarch64-linux-gnu-gcc >/dev/null; then
        echo "neither qemu-aarch64 nor aarch64-linux-gnu-gcc are here: the tests on Arm are left out"
        return
    fi
    [ -n "$listing" ] || built "unit tests, Arm" dev/fetch_libraries.sh "$libraries" arm64 || return 0
    # a variable, and no option of the emulator: programs that the program starts need it, too
    export QEMU_LD_PREFIX=/usr/aarch64-linux-gnu
    emulator=(qemu-aarch64)
    variant "Arm (NEON), fp32" arm-fp32 "${arm[@]}" ARCH=armv8-a PRECISION=fp32 TESTS="$groups"
    variant "Arm (NEON, BFMMLA), bf16" arm-bf16 "${arm[@]}" ARCH=armv8.6-a PRECISION=bf16 TESTS="$groups"
    tester=test_tokens_llama3 variant "Arm, tokenizers" arm-fp32 "${arm[@]}" ARCH=armv8-a PRECISION=fp32
    suite "the demo on Arm" dev/test/demo_in_emulator.sh "$libraries" "${emulator[@]}"
    emulator=()
    unset QEMU_LD_PREFIX
}

run_measure() {
    local precision runs=${RUNS:-1000000} addresses=address,undefined
    local sanitizers="-O1 -g -fsanitize=$addresses -fno-sanitize-recover=all" threads="-O1 -g -fsanitize=thread"
    export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1
    for precision in fp32 bf16; do
        variant "AVX2, $precision" "avx2-$precision" ARCH=haswell PRECISION=$precision
        variant "neither oneDNN nor MPI, $precision" "plain-$precision" HAVE_ONEDNN= HAVE_MPI= PRECISION=$precision
        variant "address and undefined-behaviour sanitizers, $precision" "asan-$precision" HAVE_MPI= \
            PRECISION=$precision CFLAGS="$sanitizers"
        cuda_variant "address and undefined-behaviour sanitizers" "cuda-asan-$precision" $precision "$sanitizers"
        cuda_variant "races in shared memory" "cuda-races-$precision" $precision "$threads"
    done
    variant "no vector extensions, fp32" sse-fp32 ARCH=x86-64 PRECISION=fp32
    run_on_arm
    if dev/test/other_systems.sh --possible; then suite "musl, macOS and the BSDs" dev/test/other_systems.sh; fi
    # The sanitizer cannot see into OpenMP's barriers, so ranks and workers are the only threads.
    export TSAN_OPTIONS=halt_on_error=1 OMP_THREAD_LIMIT=1
    variant "thread sanitizer, 2 to 4 ranks over threads, 1 to 64 loader workers, fp32" tsan-fp32 HAVE_ONEDNN= \
        HAVE_MPI= PRECISION=fp32 CFLAGS="$threads" TESTS="faults data"
    unset TSAN_OPTIONS OMP_THREAD_LIMIT
    suite "fuzzing, $runs executions of each target" make --no-print-directory -s -C dev/fuzz RUNS="$runs"
}

# ----------------------------------------------------------------
export CUDA_ON_CPU_REGISTERS=$PWD/dev/results/cuda-kernels.txt
if [ "$mode" != test ]; then
    limit=14400
    table=dev/results/test-all.md
    cpu=$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)
    if [ ! -f $table ]; then
        printf '# make test-all, make measure\n\n%s, %s cores; each row at its commit.\n\n%s\n|---|---|---|\n\n' \
            "$cpu" "$(nproc)" '| suite | result | commit |' >$table
    fi
fi
case $mode in
    test) run_test ;;
    all | measure)
        listing=1
        "run_$mode" >/dev/null
        listing=
        "run_$mode"
        ;;
    *)
        echo "error: run.sh was given '$mode'; expected nothing, all or measure" >&2
        exit 1
        ;;
esac
echo
echo "the slowest suites, in seconds:"
printf '%s\n' "${seconds_of[@]}" | sort -rn | head -n 10
echo
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
