#!/usr/bin/env bash
# busy_cpu.sh [PYTHON]: a step of bench-8m in fp32 with two threads while the machine is quiet, while another program
# keeps one core busy, and under a quota of one core (as root). Writes dev/results/busy-cpu.md. PYTHON has PyTorch, for
# its factor. The settings take turns; figures are medians. Run it alone on a machine with two cores.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
make --no-print-directory -s PRECISION=fp32 build/cpu-fp32/train_llama3
program=$PWD/build/cpu-fp32/train_llama3 top=$PWD rounds=${ROUNDS:-5}
work=$(mktemp -d) busy='' group=''
leave() {
    [ -z "$busy" ] || kill "$busy"
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
    env -u OMP_WAIT_POLICY -u OMP_NUM_THREADS "${variables[@]}" "$program" --model bench-8m --data text/train.tok \
        --seq 256 --batch 4 --steps 13 --save-every 0 --out out "$@" >said 2>&1 || { tail -n 1 said >&2; exit 1; }
    grep -oE '"seconds":[0-9.]+' out/metrics.jsonl | tail -n +4 | awk -F: '{ printf "%.1f\n", 1000 * $2 }' |
        median >>"$name"
}

median() { sort -n "$@" | awk '{ t[NR] = $1 } END { print t[int((NR + 1) / 2)] }'; }
ratio() { paste "$1" "$2" | awk '{ printf "%.3f\n", $1 / $2 }' | median; } # the median of the ratios of their lines

# A variable that this program respects and GNU's library ignores leaves that library its own default.
library=KMP_BLOCKTIME=200
turns() { # WHEN
    for ((i = 0; i < rounds; i++)); do
        step "$1-library" $library -- --threads 2
        step "$1-ours" -- --threads 2
        step "$1-passive" OMP_WAIT_POLICY=passive -- --threads 2
    done
}

# PyTorch's tokens per second on two threads
pytorch() {
    "$python" "$top/dev/pytorch/bench.py" --models bench-8m --precision fp32 --only eager --threads 2 2>/dev/null |
        awk -F'|' '/PyTorch eager, 1 rank/ { gsub(/[ ,]/, "", $5); print $5 }'
}

echo "quiet" >&2
turns quiet
python=${1:-} torch_quiet='' torch_busy=''
[ -z "$python" ] || torch_quiet=$(pytorch)
echo "busy" >&2
taskset -c 0 sh -c 'while :; do :; done' &
busy=$!
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
    echo "| threads that wait | quiet | relative to the library's | beside a busy core | times the quiet step |"
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
        printf 'PyTorch, eager, 2 threads: quiet %s tokens/s, beside a busy core %s: %s times the step.\n\n' \
            "$torch_quiet" "$torch_busy" "$(awk "BEGIN { printf \"%.2f\", $torch_quiet / $torch_busy }")"
    fi
    echo "Under a quota of one core: $quota."
} >"$top/dev/results/busy-cpu.md"
cat "$top/dev/results/busy-cpu.md"
