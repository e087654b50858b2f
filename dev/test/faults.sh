#!/usr/bin/env bash
# faults.sh [all]: plants the faults of faults.txt, one at a time, and expects the named test to fail. A test that no
# fault can fail proves nothing. One copy of the source for each build has all its faults behind branches (plant.py); an
# edit that no branch can hold, of a table for example, has a copy of its own. With `all`, a copy must also pass the
# same tests with no fault planted. Without `all`, only the faults declared with `fault`, not with `more`, are planted;
# they share one build. ONLY=REGEX selects faults by name; JOBS=N runs N tests at once.
# faults.sh anchors: builds nothing, and lists the faults whose tokens do not occur exactly once in their function
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source dev/test/planting.sh
mode=${1:-} faults=dev/test/faults.txt jobs=${JOBS:-$(nproc)} top=$PWD start=$SECONDS
[ "$mode" != anchors ] || exec python3 dev/test/plant.py check $faults
export OMP_WAIT_POLICY=passive # threads that wait leave the cores to the other tests
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

declare -a build=() group=() expected=() name=() # by number of the fault
declare -A alone=() tests=() programs=()         # own copies by number; BUILD,GROUP; the programs of each build
declare -A links=() # other programs of a build, of which its copy takes those that make has built, without faults
while IFS=$'\t' read -r i when b g e n; do
    if [[ $mode != all && $when = more ]] || [[ ! $n =~ ${ONLY:-} ]]; then continue; fi
    build[i]=$b group[i]=$g expected[i]=$e name[i]=$n
    tests[$b,$g]=1
done < <(python3 dev/test/plant.py list $faults)

# at_once COMMAND…: runs it in the background, as many at a time as JOBS says
at_once() {
    while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait -n || true; done
    "$@" &
}

# program_of BUILD GROUP: the program that a test needs, below its copy of the source
program_of() {
    local program
    case $2 in
        mpi*) program=test_llama3 ;;
        *" "*) program=train_llama3 ;;
        *) program=$(basename "$(grep -lE "\{\"${2%%:*}\", test_" test_llama3.cu dev/test/test_*.cu)" .cu) ;;
    esac
    case $1 in
        cuda-mpi) echo "build/cuda-on-mpi-fp32/${program}_cuda" ;;
        cuda-*) echo "build/cuda-on-cpu-${1#cuda-}/${program}_cuda" ;;
        *) echo "build/cpu-$1/$program" ;;
    esac
}

# others_of SUITE: the other programs that a suite calls
others_of() {
    case $1 in
        chat) echo tokens ;;
        hard_places) echo tokens convert ;;
        checkpoints | processes) echo tokens eval convert ;;
        recipes) echo tokens eval plan ;;
        *) echo tokens eval generate convert plan ;;
    esac
}

# build_copy COPY BUILD PROGRAM…: -O1 compiles and tests fastest; gpu_processes.sh compares bits with a program of -O3
build_copy() {
    local copy=$work/$1 precision=${2#cuda-} level=-O1
    [ "$2" != cuda-mpi ] || precision=fp32 level=-O3
    shift 2
    make --no-print-directory -s -C "$copy" PRECISION="$precision" CFLAGS="$level -w -include dev/test/planted.h" "$@" \
        >"$copy.said" 2>&1 || echo "FAIL planted: ${copy##*/} does not build: $(grep -m1 error "$copy.said")"
}

# link_programs COPY PROGRAM…: gives a copy the programs of the source as it is, which most faults do not concern
link_programs() {
    local copy=$1 program
    shift
    mkdir -p "$copy/${1%/*}"
    for program in "$@"; do
        [ -x "$program" ] || make --no-print-directory -s PRECISION="${copy##*/}" "$program"
        [[ " ${programs[${copy##*/}]} " == *" $program "* ]] || ln -sf "$top/$program" "$copy/$program"
    done
}

# run_test COPY BUILD GROUP COMMAND…: COMMAND with a test of a copy as its arguments, in the copy's folder
run_test() {
    local copy=$work/$1 program group=$3
    program=$copy/$(program_of "$2" "$3")
    shift 3
    cd "$copy"
    mkdir "$TMPDIR"
    case $group in
        mpi*) "$@" mpirun --oversubscribe --bind-to none -np 2 "$program" $group ;;
        *" "*) "$@" "$top/dev/test/${group%% *}.sh" "$program" "${group#* }" ;;
        *) "$@" "$program" "$group" ;;
    esac
}

# check_healthy BUILD GROUP: without a fault, the copy passes
check_healthy() {
    local code=0 start=$SECONDS said=$work/${*//[ :]/-}.said
    export TMPDIR=$work/0$BASHPID
    (run_test "$1" "$1" "$2" timeout 800) >"$said" 2>&1 || code=$?
    if [ $code = 0 ] && grep -q '^pass' "$said" && ! grep -aq '^FAIL' "$said"; then
        echo "no fault planted: $1, $2: $(grep -c '^pass' "$said") checks pass, $((SECONDS - start)) s"
    else echo "FAIL no fault planted: $1, $2: exit code $code: $(grep -am1 '^FAIL' "$said" || tail -n 1 "$said")"; fi
    rm -rf "$TMPDIR"
}

# check_fault NUMBER: its test fails as expected, and a process has reached the branch
check_fault() {
    local i=$1 start=$SECONDS caught='' last=''
    export PLANTED=$i PLANTED_REACHED=$work/$i.reached TMPDIR=$work/$i
    run_test "${alone[$i]:-${build[i]}}" "${build[i]}" "${group[i]}" run_until_caught "${expected[i]}"
    if [ -z "$caught" ]; then
        echo "FAIL planted: ${name[i]}: no failing check like '${expected[i]}'; the test ended with: $last"
    elif [ -z "${alone[$i]:-}" ] && ! grep -qx "$i" "$PLANTED_REACHED" 2>/dev/null; then
        echo "FAIL planted: ${name[i]}: no process has reached its branch, but there is: ${caught:0:150}"
    else echo "pass planted: ${name[i]}: after $((SECONDS - start)) s, caught by ${caught:0:150}"; fi
    rm -rf "$TMPDIR"
}

# ---------------------------------------------------------------- builds
build_all() {
    local i b
    for b in "${!programs[@]}"; do at_once build_copy "$b" "$b" $(printf '%s\n' ${programs[$b]} | sort -u); done
    for b in "${!links[@]}"; do link_programs "$work/$b" ${links[$b]}; done
    for i in "${!alone[@]}"; do
        at_once build_copy "${alone[$i]}" "${build[i]}" "$(program_of "${build[i]}" "${group[i]}")"
    done
    if [ "${programs[cuda-mpi]:-}" ]; then # what gpu_processes.sh compares with
        at_once make --no-print-directory -s PRECISION=fp32 build/cuda-on-cpu-fp32/train_llama3_cuda \
            build/cuda-on-mpi-fp32/flags
    fi
    wait
    echo "$((${#programs[@]} + ${#alone[@]})) builds in $((SECONDS - start)) s"
}

for i in "${!name[@]}"; do
    program=$(program_of "${build[i]}" "${group[i]}") suite=${group[i]%% *}
    programs[${build[i]}]+=" $program"
    case $program in
        build/cpu-*/train_llama3) # of a suite: with the programs that it calls
            for other in $(others_of "$suite"); do
                if [[ $mode = all || $suite = chat ]]; then programs[${build[i]}]+=" ${program%/*}/${other}_llama3"
                else links[${build[i]}]+=" ${program%/*}/${other}_llama3"; fi
            done ;;
    esac
done
for b in "${!programs[@]}"; do
    copy_source "$work/$b"
    while IFS=$'\t' read -r i reason; do
        [ "${name[i]:-}" ] || continue
        alone[$i]=$b-$i
        echo "a build of its own for: ${name[i]}: $reason"
        copy_source "$work/${alone[$i]}"
        python3 dev/test/plant.py apply $faults "$i" "$work/${alone[$i]}"
    done < <(python3 dev/test/plant.py plant $faults "$b" "$work/$b")
done

# ---------------------------------------------------------------- tests
{
    python3 dev/test/plant_test.py >"$work/said" || grep '^FAIL' "$work/said" || echo "FAIL plant_test.py: ended early"
    build_all
    [ "$mode" != all ] || for b in "${!tests[@]}"; do at_once check_healthy "${b%%,*}" "${b#*,}"; done
    for i in "${!name[@]}"; do at_once check_fault "$i"; done
    wait
} | tee "$work/results"
passed=$(grep -c '^pass ' "$work/results" || true) failed=$(grep -c '^FAIL ' "$work/results" || true)
[ $((passed + failed)) -ge ${#name[@]} ] || failed=$((${#name[@]} - passed))
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
