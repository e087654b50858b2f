#!/usr/bin/env bash
# pages_alone.sh [all]: each page of dev/kernels compiles by the line at its top in a folder with only the files that it
# names there, its versions agree with its definition, and a wrong version does not pass. With what it includes it has
# at most 1,500 lines, attention and linear layers 2,600, so that it can be read without the program. With `all`, nvcc
# compiles the pages for GPUs.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
passed=0 failed=0
check() { # OK NAME WHAT
    echo "$([ "$1" = 0 ] && echo pass || echo FAIL) $2: $3"
    if [ "$1" = 0 ]; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
}

# line PAGE: the compiler's line. files PAGE: the files it needs, from the root.
line() { sed -n 's/^ \*   \(\(cc\|nvcc\) .*\)/\1/p' "$1" | head -n 1; }
files() {
    awk '/^ \*   (cc|nvcc) / { on = 1; next } on { print } on && /\*\// { exit }' "$1" |
        sed 's/^ \* //; s/ \*\/$//; s/^with //' | tr ' \n' '\n\n' |
        awk -v folder="$(dirname "$1")/" '!/^$/ { print ($0 ~ /^lib\// ? "" : folder) $0 }'
}

# alone PAGE COMMAND: copies the page and what it names, and runs the command there
alone() {
    local page=$1 folder=$work/$1.alone file
    mkdir -p "$folder"
    for file in "$page" $(files "$page"); do
        mkdir -p "$folder/$(dirname "$file")"
        cp "$file" "$folder/$file" || return 1
    done
    (cd "$folder/$(dirname "$page")" && bash -c "$2")
}

short() { # PAGE: has it, with what it includes, at most its lines?
    local lines bound=1500
    [[ $(basename "$1") != @(attention|linear)* ]] || bound=2600
    lines=$(cat "$1" $(files "$1") | wc -l)
    [ "$lines" -le "$bound" ]
    check $? "$1 is short" "$lines lines with what it includes, at most $bound"
}

for page in dev/kernels/*.c; do
    name=$(basename "$page" .c) command=$(line "$page")
    alone "$page" "${command/#cc /${CC:-cc} -Werror }" >"$work/said" 2>&1
    check $? "$page compiles alone" "$command$(grep -m1 'error' "$work/said")"
    (cd "$work/$page.alone/dev/kernels" && "./$name" --check --threads 2) >"$work/said" 2>&1
    check $? "$page alone agrees with its definition" "$(tail -n 1 "$work/said")"
    short "$page"
done
# caught WHAT SED: a version of SwiGLU that is wrong in this way does not pass.
caught() {
    (cd "$work/dev/kernels/swiglu.c.alone/dev/kernels" && sed "$2" swiglu.c >wrong.c && ! cmp -s swiglu.c wrong.c &&
        ${CC:-cc} -O1 -w -march=native -fopenmp wrong.c -o wrong -lm && ! ./wrong --check) >"$work/said" 2>&1
    grep -q "FAIL swiglu_forward, fp32, 2 libm, float" "$work/said"
    check $? "a page notices $1" "$(grep -m1 -E 'FAIL|error' "$work/said")"
}
caught "an element stored past a tensor's end" 's|h.n \* F + f. = from_float(g /.*|& h[N * F] = from_float(up);|'
caught "an exponential wrong beyond 50" 's|expf(-g)) \* up)|expf(fabsf(g) > 50 ? 0 : -g)) * up)|'
nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
for page in $(grep -l '^ \*   nvcc ' dev/kernels/*.cu); do
    short "$page"
    command=$(line "$page")
    [ "${1:-}" = all ] && [ -n "$nvcc" ] || continue
    with=${command/#nvcc/$nvcc -c}
    alone "$page" "${with/-arch=native/-arch=sm_90a}" >"$work/said" 2>&1
    check $? "$page compiles alone" "$command$(grep -m1 'error' "$work/said")"
done
[ -n "$nvcc" ] || echo "no nvcc: whether the pages for GPUs compile alone is left out"
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
