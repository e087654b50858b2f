#!/usr/bin/env bash
# run.sh ENGINE OUT RUNS SEED TARGET…      fuzzes one target after the other, from the seeds in seeds/TARGET
# run.sh check OUT "ENGINE…" SEED TARGET…  a short run with each engine; the plain one has to make the same inputs twice
#
# Ends with `N passed, N failed`. A target passes when nothing was found, and something was taken, not only refused;
# `planted` passes when its fault is found. Inputs that are findings lie in OUT/found. Called by Makefile.
set -uo pipefail
mode=$1 out=$(mkdir -p "$2" && realpath "$2") third=$3 seed=$4
shift 4
cd "$(dirname "${BASH_SOURCE[0]}")"
export FUZZ_DIR # in memory, where there is such a place
FUZZ_DIR=$(mktemp -d -p /dev/shm 2>/dev/null || mktemp -d) || exit 1
trap 'rm -rf "$FUZZ_DIR"' EXIT
passed=0 failed=0
mkdir -p "$out/found" "$out/log"

pass() { echo "$*"; passed=$((passed + 1)); }
fail() { echo "FAIL $*"; failed=$((failed + 1)); }

# execute ENGINE TARGET RUNS : leaves $code, $log, $seconds
execute() {
    local engine=$1 target=$2 runs=$3 program=$out/$1/$2 corpus=$out/corpus/$2 start=$SECONDS options fuzzer
    fuzzer=$(basename "$(grep -l "{\"$target\", fuzz_" fuzz_*.cu)" .cu)
    log=$out/log/$target-$engine
    mkdir -p "$out/$engine" "$corpus"
    ln -sf "../$engine-$fuzzer" "$program" # the name is the target's
    rm -rf "$corpus" && cp -r "seeds/$target" "$corpus"
    options=(-runs="$runs" -seed="$seed" -artifact_prefix="$out/found/$target-")
    if [ "$engine" = libfuzzer ]; then
        "$program" --dictionary >"$out/log/$target.dict"
        options+=(-dict="$out/log/$target.dict" -timeout=10 -rss_limit_mb=4096 -len_control=0)
    fi
    { nice "$program" "${options[@]}" "$corpus"; } >"$log" 2>&1
    code=$? seconds=$((SECONDS - start))
}

# logged PATTERN : the last number that stands in the log in the brackets of PATTERN
logged() { sed -nE "s/.*$1.*/\1/p" "$log" | tail -n 1; }

fuzz() {
    local engine=$1 target=$2 runs=$3 done edges taken share name
    execute "$engine" "$target" "$runs"
    done=$(logged '^Done ([0-9]+) runs') edges=$(logged ' cov: ([0-9]+) ') taken=$(logged '^taken: ([0-9]+) of')
    name="fuzz $target${4:-}"
    if [ "$target" = planted ]; then
        if grep -q heap-buffer-overflow "$log"; then
            pass "$name: its fault is found"
        else
            fail "$name: its fault is not found in $runs executions"
        fi
        rm -f "$out/found/planted-"*
    elif [ "$code" = 0 ] && [ "${done:-0}" -gt 0 ] && [ "${taken:-0}" -gt 0 ]; then
        share=$((100 * taken / done))
        pass "$name: $done executions, 0 findings, $seconds s, ${edges:-uncounted} edges, $share % taken"
    else
        grep -aE '^finding:|runtime error|ERROR: |Test unit written' "$log" | head -n 5
        fail "$name: exit code $code after $seconds s; all of it: $log"
    fi
}

if [ "$mode" = check ]; then
    for engine in $third; do
        for target; do
            runs=${SHORT_RUNS:-5000}
            [ "$engine" != libfuzzer ] || runs=$((4 * runs))
            fuzz "$engine" "$target" "$runs" ", $engine"
        done
    done
    if [[ $third = *plain* ]]; then
        execute plain options 2000 && first=$(logged '^inputs: ([0-9a-f]+)')
        execute plain options 2000
        if [ -n "$first" ] && [ "$first" = "$(logged '^inputs: ([0-9a-f]+)')" ]; then
            pass "fuzz plain: the same inputs again"
        else
            fail "fuzz plain: other inputs than before"
        fi
    fi
elif [ -n "$mode" ]; then
    [ "$mode" = libfuzzer ] || echo "without libFuzzer (clang has it): seeds changed at random, no coverage guides them"
    for target; do fuzz "$mode" "$target" "$third"; done
fi
[ "$mode" != "" ] && [ "$mode$third" != check ] || echo \
    "fuzz: neither clang with libFuzzer nor a compiler with sanitizers is here: left out"
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
