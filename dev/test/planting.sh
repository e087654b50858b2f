# planting.sh: sourced by faults.sh, fault_lab.sh and dev/fault_lab/lab.sh. A planted fault is an edit, commands of sed,
# of one file in a copy of the source, and a check of the copy that must then print a failing line.

# How a failing line of a check begins; an extended regular expression.
failing='FAIL|failure:|CUDA on a CPU:'

# not_matching FILE EDIT: prints why a command of EDIT does not change FILE; nothing if each of them does
not_matching() {
    local command
    while IFS= read -r command; do
        if [ ! -f "$1" ]; then echo "there is no file $1"
        elif ! sed "$command" "$1" >/dev/null; then echo "sed refuses $command"
        elif cmp -s "$1" <(sed "$command" "$1"); then echo "no line of $1 matches $command"
        else continue; fi
        return
    done <<<"${2//; s|/$'\n's|}"
}

# copy_source DIR: copies what the program and its tests are compiled from and read
copy_source() {
    mkdir -p "$1/dev"
    cp ./*.h ./*.cu "$1/"
    cp -r lib run plan "$1/"
    cp -r dev/test dev/data dev/results dev/clusters dev/cuda_on_cpu dev/kernels "$1/dev/"
}

# choose_flags FILE: sets `compile` and `libs` to those of a build, from its file of flags
choose_flags() {
    local flags
    flags=$(cat "$1")
    compile=${flags%% -L*}
    libs=-L${flags#* -L}
    [ "$compile" != "$flags" ] || libs=${flags#* -pthread}
    compile="$compile -x c"
}

# compile_planted SOURCE PROGRAM: compiles SOURCE of the copy in the current folder with `compile` and `libs`
compile_planted() {
    local warnings="-Wno-unused-function -Wno-unused-variable -Wno-unused-parameter"
    $compile $warnings "$1" -o "$2" -x none $libs -lcjson -lpcre2-8 -lz -lm -pthread 2>&1
}

# run_until_caught EXPECTED COMMAND…: runs a check until it prints a failing line that matches; sets `caught` to that
# line and `last` to the last line
run_until_caught() {
    local expected=$1 line process
    shift
    exec 3< <(TMPDIR=$PWD exec timeout 200 "$@" 2>&1)
    process=$!
    while [ -z "$caught" ] && IFS= read -r line <&3; do
        if [[ $line =~ ^($failing).*($expected) ]]; then caught=$line; fi
        [ -z "$line" ] || last=$line
    done
    kill "$process" 2>/dev/null || true # the rest of the check would tell nothing more
    wait "$process" || true
}
