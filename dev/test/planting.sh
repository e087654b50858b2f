# planting.sh: sourced by faults.sh and dev/course/fault_lab/lab.sh, which plant faults into a copy of the source.

# How a failing line of a check begins; an extended regular expression.
failing='FAIL|failure:|CUDA on a CPU:'

# copy_source DIR: copies what the program and its tests are built from and read
copy_source() {
    mkdir -p "$1/dev/course"
    cp ./*.h ./*.cu Makefile "$1/"
    cp -r lib run programs "$1/"
    cp dev/course/course.mk "$1/dev/course/"
    cp -r dev/*.mk dev/pages dev/test dev/data dev/results dev/clusters dev/cuda_on_cpu dev/kernels "$1/dev/"
}

# run_until_caught EXPECTED COMMAND…: runs a check until it prints a failing line that matches; sets `caught` to that
# line and `last` to the last line
run_until_caught() {
    local expected=$1 line process
    shift
    exec 3< <(exec timeout 400 "$@" 2>&1)
    process=$!
    while [ -z "$caught" ] && IFS= read -r line <&3; do
        if [[ $line =~ ^($failing).*($expected) ]]; then caught=$line; fi
        [ -z "$line" ] || last=$line
    done
    kill "$process" 2>/dev/null || true # the fault is caught: the rest of the test is not needed
    wait "$process" || true
}
