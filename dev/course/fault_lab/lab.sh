#!/usr/bin/env bash
# lab.sh: the fault laboratory. Each of the files 01.sh to 20.sh describes one bug of parallel training: a change, as
# dev/test/faults.txt has them, and the check that finds it. `make faults`, `make fault N=3` and `make fault-answer N=3`
# call this script.
#   lab.sh list       the numbers, with the area and the layout of each
#   lab.sh fault N    plants fault N in a copy of the source, trains both programs, and draws their losses
#   lab.sh answer N   runs the check that finds the fault, on both programs, and explains
#   lab.sh check N faulty|healthy   runs that check alone
#   lab.sh changes    the changes of all faults, for dev/test/plant.py
#   lab.sh plant      builds one copy of the source with all faults behind branches, for:
#   lab.sh test N     runs, check and curves of one fault in that copy, for dev/test/fault_lab.sh
# Everything is below build/fault_lab. The healthy programs are built by make.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
source dev/test/planting.sh
failing+='|error:'
lab=build/fault_lab healthy_programs=build/fault_lab/healthy
steps=400 middle=200 # a resumed run continues after step `middle`
seeds="2 3 4 5"
export OMP_NUM_THREADS=1

die() { echo "error: $*" >&2; exit 1; }

# ---------------------------------------------------------------- rows
# load N: reads the row of a fault into variables and sets those that it leaves out
load() {
    [[ ${1:-} =~ ^[0-9]+$ ]] || die "a fault has a number from 1 to 20, as in: make fault N=3 (make faults lists them)"
    number=$((10#$1))
    row=dev/course/fault_lab/$(printf %02d "$number").sh
    [ -f "$row" ] || die "there is no fault $1: expected a number from 1 to 20 (make faults lists them)"
    area='' layout='' model=plain tokens=train.tok resumes='' one_rank="--batch 16"
    title='' change='' unchecked='' check='' expected='' bug='' unseen='' found='' known=''
    source "$row"
    dir=$lab/$number
}

list() {
    local row
    echo "fault  area                          layout"
    for row in dev/course/fault_lab/[0-9][0-9].sh; do
        load "$(basename "$row" .sh)"
        printf '%5d  %-28s  %s%s\n' "$number" "$area" "$layout" "${resumes:+, resumed after step $middle}"
    done
}

# ---------------------------------------------------------------- programs
# hash_of FILE…: of the names and contents
hash_of() { sha256sum "$@" | sha256sum | cut -c1-16; }

hash_of_source() { hash_of ./*.h ./*.cu lib/*/*.h lib/ops/cpu/*.h run/*/*.h programs/*.cu programs/*/*.h dev/test/*.h; }

# changes: all faults, numbered as here, and then those changes that leave out a check, as dev/test/plant.py reads them
changes() (
    local row changes='' unchecked_changes=''
    for row in dev/course/fault_lab/[0-9][0-9].sh; do
        load "$(basename "$row" .sh)"
        changes+="more $number"$'\n'"  fp32 $check: $expected"$'\n'"$change"$'\n'
        [ -z "$unchecked" ] ||
            unchecked_changes+="more $number unchecked"$'\n'"  fp32 run: $expected"$'\n'"$unchecked"$'\n'
    done
    echo "$changes$unchecked_changes"
)

# number_of NAME: the number of a change
number_of() { python3 dev/test/plant.py list $lab/changes.txt | awk -F'\t' -v name="$1" '$6 == name { print $1 }'; }

# build FOLDER SOURCE PROGRAM…: builds programs of a copy of the source and links to them in FOLDER
build() {
    local folder=$1 source=$2 program
    shift 2
    make --no-print-directory -s -j2 -C "$source" PRECISION=fp32 CFLAGS="-O1 -w $flags" "${@/#/build/cpu-fp32/}" ||
        die "the programs in $source do not build"
    for program; do ln -sf "$(realpath "$source")/build/cpu-fp32/$program" "$folder/"; done
}

# build_faulty: the programs of the faulty copy in $dir, unless they are there. train_unchecked lacks the run's own
# check that would end the run before there is a curve.
build_faulty() {
    local stamp flags=
    stamp="$(hash_of_source) $(hash_of "$row" $lab/healthy/flags)"
    if [ "$(cat "$dir/built" 2>/dev/null)" = "$stamp" ]; then return; fi
    rm -rf "$dir"
    copy_source "$dir/source"
    python3 dev/test/plant.py apply $lab/changes.txt "$number" "$dir/source"
    build "$dir" "$dir/source" train_llama3 tokens_llama3 test_llama3
    if [ "$unchecked" ]; then
        cp -r "$dir/source" "$dir/unchecked"
        python3 dev/test/plant.py apply $lab/changes.txt "$(number_of "$number unchecked")" "$dir/unchecked"
        mkdir "$dir/without"
        build "$dir/without" "$dir/unchecked" train_llama3
        ln -s without/train_llama3 "$dir/train_unchecked"
    fi
    echo "$stamp" >"$dir/built"
}

# plant_all: one copy with all changes behind branches, unless it is there
plant_all() {
    local stamp flags="-include dev/test/planted.h" alone planted=$lab/planted
    mkdir -p $lab
    changes >$lab/changes.txt
    stamp="$(hash_of_source) $(hash_of $lab/changes.txt dev/test/plant*)"
    if [ "$(cat $planted/built 2>/dev/null)" = "$stamp" ]; then return; fi
    rm -rf $planted
    copy_source $planted/source
    alone=$(python3 dev/test/plant.py plant $lab/changes.txt fp32 $planted/source)
    [ -z "$alone" ] || die "these changes cannot be branches: $alone"
    build $planted $planted/source train_llama3 tokens_llama3 test_llama3
    echo "$stamp" >$planted/built
}

# use_planted: commands in $dir that start the programs of that copy with this fault; the healthy programs are its, too
use_planted() {
    local program
    [ -f $lab/planted/built ] || die "there is no copy with all faults: dev/course/fault_lab/lab.sh plant builds it"
    healthy_programs=$lab/planted
    rm -rf "$dir"
    mkdir -p "$dir"
    for program in train_llama3 tokens_llama3 test_llama3; do command_for "$number" $program >"$dir/$program"; done
    if [ "$unchecked" ]; then
        command_for "$number,$(number_of "$number unchecked")" train_llama3 >"$dir/train_unchecked"
    fi
    chmod +x "$dir"/t*
}

command_for() {
    printf '#!/bin/sh\nPLANTED=%s PLANTED_REACHED=%s exec %s "$@"\n' "$1" "$PWD/$dir/reached" "$PWD/$lab/planted/$2"
}

# write_data: the models and token files, once
write_data() {
    local name new=$lab/data.new
    exec 9>$lab/lock
    flock 9
    rm -rf $new
    mkdir -p $new
    python3 dev/course/fault_lab/data.py $new
    for name in plain tied scaled; do
        mkdir -p $new/$name
        mv $new/$name.json $new/$name/config.json
    done
    if diff -rq $new $lab/data >/dev/null 2>&1; then rm -rf $new; else rm -rf $lab/data && mv $new $lab/data; fi
    flock -u 9
}

# ---------------------------------------------------------------- runs
# train PROGRAM OUT OPTION…: one run; a run that fails ends the script with its last lines
train() {
    local program=$1 out=$2
    shift 2
    mkdir -p "$(dirname "$out")"
    if ! "$program" --model "$lab/data/$model" --data "$lab/data/$tokens" --seq 64 --steps $steps --lr 2e-3 \
        --warmup 50 --threads 1 --out "$out" "$@" >"$out.log" 2>&1; then
        tail -n 5 "$out.log" >&2
        die "this run of fault $number failed: $program $* (all of its output: $out.log)"
    fi
}

# resumed PROGRAM OUT OPTION…: a run that is resumed in the middle; OUT.jsonl has the steps without the resume
resumed() {
    local program=$1 out=$2
    shift 2
    rm -rf "$out"
    train "$program" "$out" --save-every $middle "$@"
    cp "$out/metrics.jsonl" "$out.jsonl"
    rm -r "$out/step-$(printf %08d $steps)" # a run resumes from the newest checkpoint only
    train "$program" "$out" --save-every $middle --resume "$out/step-$(printf %08d $middle)" "$@"
}

# healthy_run NAME OPTION…: sets `run` to the folder of a run of the healthy program, which is kept
healthy_run() {
    local kind=$1
    shift
    run="$healthy_programs $source_hash $data_hash $kind $model $tokens $steps $*"
    run=$lab/runs/$(echo "$run" | sha256sum | cut -c1-16)
    exec 8>"$run.lock"
    flock 8
    if [ ! -f "$run.done" ]; then
        rm -rf "$run"
        if [ "$kind" = resumed ]; then resumed $healthy_programs/train_llama3 "$run" "$@"
        else train $healthy_programs/train_llama3 "$run" "$@"; fi
        touch "$run.done"
    fi
    flock -u 8
}

prepare() {
    [ -x $healthy_programs/train_llama3 ] || die "there is no healthy program: make fault-programs builds it"
    mkdir -p $lab/runs
    [ "$healthy_programs" = $lab/planted ] || changes >$lab/changes.txt
    write_data
    source_hash=$(hash_of_source)
    data_hash=$(hash_of $lab/data/*.tok $lab/data/*/config.json)
}

# draw_curves: trains what is missing and prints how far apart the curves are
draw_curves() {
    local healthy ends=() seed program=$dir/train_llama3
    (for seed in $seeds; do healthy_run plain $one_rank --seed "$seed"; done) & # next to the runs with several ranks
    if [ "$unchecked" ]; then program=$dir/train_unchecked; fi
    rm -rf "$dir/faulty"
    if [ "$resumes" ]; then resumed "$program" "$dir/faulty" $layout
    else train "$program" "$dir/faulty" $layout; fi
    healthy_run plain $layout
    healthy=$run
    healthy_run plain $one_rank
    ends=("$run/metrics.jsonl")
    healthy_run plain $one_rank --lr 1e-3
    ends+=("$run/metrics.jsonl")
    wait # a run that has failed is started again below, and then ends the script
    for seed in $seeds; do
        healthy_run plain $one_rank --seed "$seed"
        ends+=("$run/metrics.jsonl")
    done
    python3 dev/course/fault_lab/curves.py draw "fault $number: $area, $layout" "$lab/$number.svg" "$dir/curve.json" \
        "$dir/faulty/metrics.jsonl" "$healthy/metrics.jsonl" "${ends[@]}"
}

# ---------------------------------------------------------------- checks
# run_check faulty|healthy: prints the lines of the fault's check
run_check() {
    local programs=$dir out=$dir/check-$1 kind=${check%% *} arguments='' run
    if [ "$kind" != "$check" ]; then arguments=${check#* }; fi
    if [ "$1" = healthy ]; then programs=$healthy_programs; fi
    rm -rf "$out" "$out".*
    mkdir -p "$out"
    case $kind in
        test)
            TMPDIR=$PWD/$out timeout 600 "$programs/test_llama3" $arguments 2>&1 ||
                echo "FAIL test_llama3 $arguments ended with exit code $?" ;;
        run)
            steps=20
            if (train "$programs/train_llama3" "$out/run" $layout $arguments) >/dev/null 2>&1; then
                echo "pass the run's own checks: $steps steps without a failure"
            else grep -E '^(failure|error): |<- different' "$out/run.log"; fi ;;
        one-rank)
            steps=20
            train "$programs/train_llama3" "$out/layout" $layout --deterministic
            train "$programs/train_llama3" "$out/one" $one_rank --deterministic
            python3 dev/course/fault_lab/curves.py compare "$out/one/metrics.jsonl" "$out/layout/metrics.jsonl" \
                "--deterministic, $layout, has the digits of one rank" || true ;;
        resume | audit)
            if [ "$1" = healthy ]; then healthy_run resumed $layout
            else
                run=$out/run
                resumed "$programs/train_llama3" "$run" $layout
            fi
            if [ "$kind" = resume ]; then
                python3 dev/course/fault_lab/curves.py compare "$run.jsonl" "$run/metrics.jsonl" \
                    "a resume after step $middle has the digits of a run without it" || true
            elif "$programs/tokens_llama3" --audit --out "$run" 2>&1; then
                echo "pass --audit: no sample was consumed twice in an epoch"
            fi ;;
        *) die "$row: unknown check '$check'; expected test, run, one-rank, resume or audit" ;;
    esac
    rm -rf "$out" "$out".*
}

# check_both: sets `caught`, the faulty program's failing line, and `healthy_line`: what the healthy one says instead
check_both() {
    run_check faulty >"$dir/faulty.said" 2>&1 || true
    caught=$(grep -aE -m1 "^($failing).*($expected)" "$dir/faulty.said" || true)
    healthy_said
    healthy_line=$(grep -aE -m1 "^($failing)" "$healthy" || grep -aE -m1 "^pass .*($expected)" "$healthy" ||
        grep -a -m1 '^pass' "$healthy" || echo "nothing")
}

# healthy_said: sets `healthy` to what the healthy program's check has printed; groups of test_llama3 are run once
healthy_said() {
    local key=$check
    case $check in test\ *) ;; *) key="$check $layout $model $tokens" ;; esac
    healthy=$lab/runs/check-$(echo "$healthy_programs $source_hash $data_hash $key" | sha256sum | cut -c1-16).said
    exec 7>"$healthy.lock"
    flock 7
    if [ ! -f "$healthy" ]; then
        run_check healthy >"$healthy.part" 2>&1
        mv "$healthy.part" "$healthy"
    fi
    flock -u 7
}

describe_check() {
    case ${check%% *} in
        test) echo "test_llama3 ${check#* }" ;;
        run) echo "the run's own checks: train_llama3 $layout${check#run}" ;;
        one-rank) echo "--deterministic: $layout next to one rank" ;;
        resume) echo "metrics.jsonl of a resumed run next to that of an uninterrupted one" ;;
        audit) echo "tokens_llama3 --audit on what the resumed run left" ;;
    esac
}

# ---------------------------------------------------------------- what a reader sees
ask() {
    cat <<EOF
  Curves: $lab/$number.svg

Which check names the bug?
  - the run's own checks: ledger of expected, dry-run and measured traffic, equal samples, hashes of replicas
  - --deterministic: the same digits as one rank      - a resumed run: the same digits as one that was not resumed
  - --audit: each sample once in an epoch             - test_llama3 faults, mesh-faults: gradients of one rank
  - test_llama3 pytorch: PyTorch's losses, gradients and weights
  - other groups of test_llama3: $dir/test_llama3 list prints them
The faulty programs are $dir/train_llama3 and $dir/test_llama3; the healthy ones are in
$lab/healthy. The options of the run: $layout --model $lab/data/$model
  --data $lab/data/$tokens --seq 64 --steps $steps --lr 2e-3 --warmup 50 --threads 1
make fault-answer N=$number runs the check that finds it and explains.
EOF
}

show_fault() {
    load "$1"
    prepare
    echo "Fault $number: $area, $layout${resumes:+, resumed after step $middle}"
    echo "  builds the faulty copy below $dir, then trains both programs for $steps steps ..."
    build_faulty
    draw_curves
    ask
}

paragraph() { printf '%s\n' "$2" | fmt -w 110 | sed "1s/^/$1: /; 2,\$s/^/  /"; }

show_answer() {
    load "$1"
    prepare
    build_faulty
    check_both
    [ "$caught" ] || die "the check '$check' did not find fault $number; its output is in $dir/faulty.said"
    echo "Fault $number, $area: $title"
    echo "The check: $(describe_check)"
    echo "  faulty:  ${caught:0:400}"
    grep -a -m2 -- '<- different' "$dir/faulty.said" | sed 's/^/       /' || true
    echo "  healthy: ${healthy_line:0:400}"
    paragraph "The bug" "$bug"
    if [ -f "$dir/curve.json" ]; then
        python3 dev/course/fault_lab/curves.py tell "$dir/curve.json"
    fi
    paragraph "Why the curve does not name it" "$unseen"
    paragraph "Why this check does" "$found"
    if [ "$known" ]; then paragraph "Known from" "$known"; fi
    sed -nE "s|^@@ ([^ ]*) .*|The edit: diff \1 $dir/source/\1|p" <<<"$change" | sort -u
}

# test_one: prints two checks, and leaves a row for dev/results/fault-lab.md in $dir/row
test_one() {
    local start=$SECONDS curve
    load "$1"
    use_planted
    prepare
    draw_curves >"$dir/curve.txt"
    check_both
    if [ "$caught" ]; then echo "pass fault $number, $title: ${caught:0:200}"
    else echo "FAIL fault $number, $title: no failing line like '$expected': $(tail -n 1 "$dir/faulty.said")"; fi
    if grep -qx "$number" "$dir/reached"; then echo "pass fault $number: a process has reached its branch"
    else echo "FAIL fault $number: no process has reached its branch"; fi
    if [[ $healthy_line = pass* ]]; then echo "pass fault $number: the healthy program passes: ${healthy_line:0:200}"
    else echo "FAIL fault $number: the healthy program does not pass '$check': $healthy_line"; fi
    if grep -q '</svg>' "$lab/$number.svg" && curve=$(python3 dev/course/fault_lab/curves.py row \
        "$dir/curve.json" "$number" "$title" "$(describe_check)" "${caught:0:160}"); then
        echo "pass fault $number: the curve is drawn: $(sed -n 2p "$dir/curve.txt")"
        echo "$curve" >"$dir/row"
    else echo "FAIL fault $number: no curve: $(cat "$dir/curve.txt")"; fi
    echo "---- fault $number: $((SECONDS - start)) s"
}

case ${1:-} in
    list) list ;;
    fault) show_fault "${2:-}" ;;
    answer) show_answer "${2:-}" ;;
    check)
        load "${2:-}"
        case ${3:-} in faulty | healthy) ;; *) die "check was given '${3:-}'; expected faulty or healthy" ;; esac
        prepare
        build_faulty
        run_check "$3" ;;
    changes) changes ;;
    plant) plant_all ;;
    test) test_one "${2:-}" ;;
    *)
        die "lab.sh was given '${1:-}'; expected list, fault N, answer N, check N faulty|healthy, changes, plant or" \
            "test N"
        ;;
esac
