#!/usr/bin/env bash
# style.sh [all]: checks the rules of style that a program can check, and prints FILE:LINE: RULE: what for each
# violation. The rule `alone`, which compiles for minutes, is checked with `all`.
# style.sh count: tokens of C without comments, and words of comments, of the program and of everything.
#
#   columns         at most 120 columns in code
#   comma           no comma operator outside the header of a for loop
#   assignment      none inside a condition, an argument or an expression
#   ternary         none inside another one
#   two-statements  one statement a line
#   function-lines  functions have at most 60 lines
#   parameters      and 8 parameters; ops, which have a contract each, may have more
#   phrase          no phrase of dev/test/phrases.txt in comments, messages and documentation
#   layers          includes point downwards: the rooms of lib, llama3.h, sharding and parallelism, run, the trainer,
#                   the other programs and tests
#   cycles          no file includes itself through others
#   alone           every header compiles alone, as C11 and as C++20; CUDA's headers in the emulator's C++. So do the
#                   programs that only measurements and comparisons build
#   length          the files a reader starts with, the rooms, and all that the trainer includes have at most the lines,
#                   tokens, files and options of `ceilings`, `rooms` and `closure`, which only ever get smaller
#   named           the files that this script itself names are there, and it makes no exception that is not needed
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
passed=0 failed=0

rules="columns comma assignment ternary two-statements function-lines parameters phrase layers cycles alone length
named"
ceilings="README.md:130 train_llama3.cu:1500 llama3.h:560 fsdp.h:549 optimizer.h:325 muon.h:174 shared_gradients.h:137
tensor_parallel.h:178 context_parallel.h:136 pipeline_parallel.h:136 pipeline_schedule.h:205 lora.h:150 dataloader.h:352
tokenizer.h:520 docs/book/minimal.c:1000"
# FOLDER:LINES:LINES of its sources for CPUs, and of its sources for GPUs
rooms="lib/device:1752:492 lib/ops:2940:4200 lib/comm:2639:684 lib/io:1033:0 run/setup:2849:0 run/checkpoint:2511:0
run/checks:1223:0 run/watch:1146:0 programs:11999:0"
closure="19800 lines, 175000 tokens, 78 files, 65 options" # of train_llama3.cu, without sources for GPUs
# At most ten: RULE:FILE:FUNCTION, each with its reason.
exceptions=(
    "comma:dev/cuda_on_cpu/streams.h:a"         # a fold expression of C++ over a launch's arguments
    "parameters:dev/test/crash_shim.c:counted"  # a system call with its five arguments
)

# files PATTERN…: the project's own files that match
files() {
    local file
    git ls-files --cached --others --exclude-standard -- "$@" 2>/dev/null |
        grep -vE '^data/|/fixtures/' |
        while IFS= read -r file; do [ ! -f "$file" ] || echo "$file"; done
}

mapfile -t code < <(files '*.h' '*.c' '*.cu' '*.cuh')
mapfile -t scripts < <(files '*.sh' '*.py' '*.mk' Makefile '*/Makefile' .ci/run)
mapfile -t texts < <(files '*.md')
"${CC:-cc}" -std=c11 -O1 -o "$work/style" dev/test/style.c || exit 1

[ "${1:-}" = all ] || rules=${rules/alone/}
if [ "${1:-}" = count ]; then
    "$work/style" --count "${code[@]}" | awk '
        { tokens += $2; words += $3 }
        $1 !~ /^(plan|dev)\// && $1 !~ /^test_/ { program_tokens += $2; program_words += $3 }
        END {
            counts = "%d tokens, %d words of comments\n"
            printf "the program without plan, tests and dev: " counts, program_tokens, program_words
            printf "everything: " counts, tokens, words
        }'
    exit
fi

# Files of each layer, from the lowest up; what matches no pattern is above them. A file belongs to the first match, and
# includes files of its own layer and of those below.
layers=(
    "lib/device/system.h lib/device/kernel.h lib/device/exact_sum.h lib/device/base.h"
    "lib/device/*"
    "lib/ops/*"
    "lib/comm/* lib/io/*"
    "llama3.h tokenizer.h"
    "fsdp.h muon.h optimizer.h dataloader.h lora.h pipeline_schedule.h *_parallel.h shared_gradients.h"
    "run/*"
    "train_llama3.cu"
    "programs/*"
)

layer() {
    local i pattern patterns
    for i in "${!layers[@]}"; do
        read -ra patterns <<<"${layers[i]}"
        for pattern in "${patterns[@]}"; do
            # shellcheck disable=SC2053 # a pattern
            if [[ $1 == $pattern ]]; then echo "$i"; return; fi
        done
    done
    echo "${#layers[@]}"
}

# includes: FILE:LINE INCLUDED of all project files that the program's files include
includes() {
    local file line text name found
    for file in "${code[@]}"; do
        while IFS=: read -r line text; do
            name=${text#*\"} name=${name%%\"*}
            found=
            for name in "$(dirname "$file")/$name" "$name"; do
                name=$(realpath -m --relative-to=. "$name")
                if [ -f "$name" ]; then found=$name; break; fi
            done
            [ -z "$found" ] || echo "$file:$line $found"
        done < <(grep -nE '^ *# *include *"' "$file")
    done
}

check_includes() {
    local from to
    includes >"$work/includes"
    while read -r from to; do
        [ "$(layer "$to")" -le "$(layer "${from%:*}")" ] || echo "$from: layers: includes $to, of a higher layer"
    done <"$work/includes"
    sed 's/:[0-9]* / /' "$work/includes" |
        tsort 2>&1 >"$work/order" |
        sed -nE 's/^tsort: ([^ ]+\.[a-z]+)$/\1:1: cycles: includes itself through others/p'
}

# alone FILE PROGRAM: compiles a header by itself, included in PROGRAM, in both languages; of CUDA's alone as C++
alone() {
    local file=$1 mpi installed="" flags="-I. -Idev/cuda_on_cpu -march=native -fopenmp -fsyntax-only"
    flags+=" -Wall -Wextra -Werror -Wno-unused-function -Wno-unused-variable -Wno-pragma-once-outside-header"
    if mpi=$(mpicc --showme:compile 2>/dev/null); then installed+=" -DHAVE_MPI $mpi"; fi
    if "${CC:-cc}" -include dnnl.h -E -x c /dev/null >/dev/null 2>&1; then installed+=" -DHAVE_ONEDNN"; fi
    echo "#include \"$file\"" >"$2"
    cat >>"$2" <<'END'
#if defined(KERNEL_H) && !defined(BASE_H) // whoever compiles an op alone says how errors are reported
static inline void user_error(const char *format, ...) { (void)format, abort(); }
static inline void run_failure(const char *format, ...) { (void)format, abort(); }
#ifdef CUDA_VECTORS_CUH
static inline void cuda_check(cudaError_t error, const char *what) { (void)error, (void)what; }
#endif
#endif
END
    case $file in
        *.cuh | dev/cuda_on_cpu/* | *_cuda.h | lib/comm/transport_nccl.h)
            installed="-DUSE_CUDA -DHAVE_NCCL -Wno-unknown-pragmas -Wno-uninitialized -Wno-maybe-uninitialized" ;;
        *)
            if ! "${CC:-cc}" -x c -std=c11 $flags $installed "$2" 2>"$2.said"; then
                echo "$file:1: alone: not as C11: $(grep -a -m1 error "$2.said")"
                return
            fi
            if grep -q LINUX "$file" && ! "${CXX:-c++}" -x c++ -std=c++20 $flags -DONLY_POSIX "$2" 2>"$2.said"; then
                echo "$file:1: alone: not as C++20 without Linux's calls: $(grep -a -m1 error "$2.said")"
            fi ;;
    esac
    if ! "${CXX:-c++}" -x c++ -std=c++20 $flags $installed "$2" 2>"$2.said"; then
        echo "$file:1: alone: not as C++20: $(grep -a -m1 error "$2.said")"
    fi
}

check_alone() {
    local file n=0
    for file in "${code[@]}"; do
        case $file in
            dev/kernels/bench.cu | dev/kernels/decode.cu | dev/pytorch/logits.cu | dev/pytorch/ops_library.cu) ;;
            # parts of one program each
            dev/test/* | dev/fuzz/* | dev/cuda_on_cpu/* | dev/kernels/* | dev/data/*) continue ;;
            *.h | *.cuh) ;;
            *) continue ;;
        esac
        while [ "$(jobs -rp | wc -l)" -ge "$(nproc)" ]; do wait -n || true; done
        n=$((n + 1))
        alone "$file" "$work/alone-$n.c" >"$work/alone-$n.found" &
    done
    wait
    cat "$work"/alone-*.found
}

# for_gpus FILE: whether it is left out of what CPUs compute with
for_gpus() { [[ $1 == *cuda* || $1 == *nccl* ]]; }

check_rooms() {
    local entry room most file lines gpu
    for entry in $rooms; do
        IFS=: read -r room most gpu <<<"$entry"
        local count=0 gpu_count=0
        while IFS= read -r file; do
            lines=$(wc -l <"$file")
            if for_gpus "$file"; then gpu_count=$((gpu_count + lines)); else count=$((count + lines)); fi
        done < <(files "$room/*.h" "$room/*.cu" "$room/*.cuh")
        [ "$count" -le "$most" ] || echo "$room:1: length: $count lines, at most $most"
        [ "$gpu_count" -le "$gpu" ] || echo "$room:1: length: $gpu_count lines for GPUs, at most $gpu"
    done
}

# What the trainer includes, itself or through others.
check_closure() {
    local file lines tokens options most i what=(lines tokens files options)
    local -a all=(train_llama3.cu)
    for ((i = 0; i < ${#all[@]}; i++)); do
        while IFS= read -r file; do
            for_gpus "$file" || [[ " ${all[*]} " == *" $file "* ]] || all+=("$file")
        done < <(awk -v from="${all[i]}:" 'index($1, from) == 1 { print $2 }' "$work/includes")
    done
    lines=$(cat "${all[@]}" | wc -l)
    tokens=$("$work/style" --count "${all[@]}" | awk '{ sum += $2 } END { print sum }')
    options=$(grep -E '^ +(INT|REAL|TEXT|CHOICE|CHOICE_OR_NUMBER|FLAG)\(' run/setup/options.h | grep -vc 'NULL),$')
    local found=("$lines" "$tokens" "${#all[@]}" "$options")
    read -ra most < <(tr -cd '0-9 ' <<<"$closure")
    for i in "${!what[@]}"; do
        [ "${found[i]}" -le "${most[i]}" ] ||
            echo "train_llama3.cu:1: length: it includes ${found[i]} ${what[i]}, at most ${most[i]}"
    done
}

check_length() {
    local entry file lines
    for entry in $ceilings; do
        file=${entry%:*}
        lines=$(wc -l <"$file")
        [ "$lines" -le "${entry#*:}" ] || echo "$file:1: length: $lines lines, at most ${entry#*:}"
    done
    check_rooms
    check_closure
}

# The files that this script names are there, and each exception is needed.
check_named() {
    local named at="dev/test/style.sh:1: named:"
    for named in ${layers[*]} $(tr ' ' '\n' <<<"$ceilings" | cut -d: -f1); do
        [ -e "$named" ] || echo "$at there is no $named"
    done
    for named in ${exceptions[@]+"${exceptions[@]}"}; do
        IFS=: read -r rule file name <<<"$named"
        grep -qE "^$file:[0-9]+: $rule: $name " "$1" || echo "$at the exception $named is not needed"
    done
}

# an op may have as many parameters as its contract needs
not_ops() {
    local ops='lib/ops/[^:]*|dev/kernels/[^:]*|dev/cuda_on_cpu/[^:]*'
    ops+='|dev/test/test_attention.h|dev/pytorch/ops_library.cu'
    grep -vE "^($ops):[0-9]+: parameters:"
}
# phrases.txt names what it bans; so does the checker
not_exceptions() {
    local entry pattern='^dev/test/(style|phrases)[^:]*:[0-9]+: phrase'
    for entry in ${exceptions[@]+"${exceptions[@]}"}; do
        IFS=: read -r rule file name <<<"$entry"
        pattern+="|^$file:[0-9]+: $rule: $name "
    done
    grep -vE "$pattern"
}

raw=$work/raw found=$work/found
{
    PHRASES=dev/test/phrases.txt "$work/style" "${code[@]}" "${scripts[@]}" "${texts[@]}"
    check_includes
    check_length
    [ "${1:-}" != all ] || check_alone
} >"$raw"
{
    not_ops <"$raw" | not_exceptions
    check_named "$raw"
} >"$found"
checked=$((${#code[@]} + ${#scripts[@]} + ${#texts[@]}))
for rule in $rules; do
    of_rule="^[^:]+:[0-9]+: $rule: "
    count=$(grep -cE "$of_rule" "$found")
    if [ "$count" = 0 ]; then
        echo "pass style: $rule: no violation in $checked files"
        passed=$((passed + 1))
    else
        grep -E "$of_rule" "$found" | sed 's/^/FAIL /'
        failed=$((failed + count))
    fi
done
if [ "${#exceptions[@]}" -gt 10 ]; then
    echo "FAIL style: ${#exceptions[@]} exceptions, at most 10"
    failed=$((failed + 1))
fi
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
