#!/usr/bin/env bash
# busy_cpu.sh [PYTHON]: measures a training step of bench-8m in fp32 with two threads while the machine is quiet, while
# another program keeps one core busy, and, as root, under a quota of one core. Writes dev/results/busy-cpu.md. If
# PYTHON is an interpreter with PyTorch, PyTorch's slowdown beside the busy core is measured, too. The settings take
# turns; figures are medians. Run it alone on a machine with two cores.
set -euo pipefail
die() { echo "error: $*" >&2; exit 1; }

python=
if [ $# -gt 0 ]; then
    python=$(command -v "$1") && python=$(realpath -s "$python") || die "$1: expected a Python interpreter"
    "$python" -c 'import torch' || die "$1 has no PyTorch: pip install torch, or leave the argument out"
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
make --no-print-directory -s PRECISION=fp32 build/cpu-fp32/train_llama3
program=$PWD/build/cpu-fp32/train_llama3 top=$PWD rounds=${ROUNDS:-5}
work=$(mktemp -d) busy='' group=''
leave() {
    [ -z "$busy" ] || kill "$busy" 2>/dev/null || true
    [ -z "$group" ] || { echo $$ >"$(dirname "$group")/cgroup.procs" && rmdir "$group"; }
    rm -rf "$work"
}
trap leave EXIT
"$top/dev/test/sample_text.sh" "$work/sample"
VOCAB_SIZE=1000 "$top/dev/data/text.sh" "$work/text" "$work/sample" >/dev/null 2>&1
cd "$work"

# step NAME VARIABLE=VALUE… [-- OPTION…]: adds the median step of a short run, in milliseconds, to the file NAME
step() {
    local name=$1 variables=()
    shift
    while [ $# -gt 0 ] && [ "$1" != -- ]; do variables+=("$1"); shift; done
    [ $# = 0 ] || shift
    rm -rf out
    env -u OMP_WAIT_POLICY -u OMP_NUM_THREADS -u GOMP_SPINCOUNT "${variables[@]}" "$program" --model bench-8m \
        --data text/train.tok --seq 256 --batch 4 --steps 13 --save-every 0 --out out "$@" >said 2>&1 ||
        die "$(tail -n 1 said)"
    grep -oE '"seconds":[0-9.]+' out/metrics.jsonl | tail -n +4 | awk -F: '{ printf "%.1f\n", 1000 * $2 }' |
        median >>"$name"
}

median() { sort -n "$@" | awk '{ t[NR] = $1 } END { print t[int((NR + 1) / 2)] }'; }
ratio() { paste "$1" "$2" | awk '{ printf "%.3f\n", $1 / $2 }' | median; } # the median of the ratios of their lines

library=GOMP_SPINCOUNT=300000 # the default of GNU's library
turns() { # WHEN
    for ((i = 0; i < rounds; i++)); do
        step "$1-library" $library -- --threads 2
        step "$1-ours" -- --threads 2
        step "$1-passive" OMP_WAIT_POLICY=passive -- --threads 2
    done
}

# PyTorch's tokens per second on two threads
pytorch() {
    "$python" "$top/dev/pytorch/bench.py" --models bench-8m --precision fp32 --only eager --threads 2 2>torch-said |
        awk -F'|' '/PyTorch eager, 1 rank/ { gsub(/[ ,]/, "", $5); print $5 }' ||
        die "dev/pytorch/bench.py: $(tail -n 1 torch-said)"
}

echo "quiet" >&2
turns quiet
torch_quiet='' torch_busy=''
[ -z "$python" ] || torch_quiet=$(pytorch)
echo "busy" >&2
taskset -c 0 sh -c 'while :; do :; done' &
busy=$!
sleep 0.2
kill -0 $busy 2>/dev/null || die "no program can be started on core 0 (taskset, from util-linux, is needed)"
turns busy
[ -z "$python" ] || torch_busy=$(pytorch)
kill $busy
busy=''

quota='not measured: needs root, and control groups of version 1'
if [ -w /sys/fs/cgroup/cpu/cgroup.procs ]; then
    echo "quota" >&2
    group=/sys/fs/cgroup/cpu/llama3-$$
    mkdir "$group"
    echo 100000 >"$group/cpu.cfs_period_us"
    echo 100000 >"$group/cpu.cfs_quota_us"
    echo $$ >"$group/cgroup.procs"
    for ((i = 0; i < rounds; i++)); do
        step quota-default --
        step quota-one -- --threads 1
    done
    quota="$(median quota-default) ms; with \`--threads 1\` $(median quota-one) ms"
    quota+="; ratio $(ratio quota-default quota-one)"
fi

{
    echo "# A step beside another program"
    echo
    echo "\`dev/busy_cpu.sh\`: bench-8m, fp32, 2 threads, \`--seq 256 --batch 4\`; medians of $rounds runs; the"
    echo "settings take turns. $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1), $(nproc) cores;" \
        "commit $(git -C "$top" describe --always --dirty)."
    echo
    echo "| waiting threads | quiet | relative to the library's | beside a busy core | slowdown |"
    echo "|---|---|---|---|---|"
    for how in library ours passive; do
        case $how in
            library) name="spin as GNU's library does by default" ;;
            ours) name="spin 2,000 times (this program)" ;;
            passive) name="sleep at once (\`OMP_WAIT_POLICY=passive\`)" ;;
        esac
        echo "| $name | $(median quiet-$how) ms | $(ratio quiet-$how quiet-library) | $(median busy-$how) ms |" \
            "$(awk "BEGIN { printf \"%.2f\", $(median busy-$how) / $(median quiet-$how) }") |"
    done
    echo
    if [ -n "$python" ]; then
        printf 'PyTorch, eager, 2 threads: quiet %s tokens/s, beside a busy core %s: slowdown %s.\n\n' \
            "$torch_quiet" "$torch_busy" "$(awk "BEGIN { printf \"%.2f\", $torch_quiet / $torch_busy }")"
    fi
    echo "Under a quota of one core: $quota."
} >"$top/dev/results/busy-cpu.md"
cat "$top/dev/results/busy-cpu.md"
