#!/usr/bin/env bash
# planner_page.sh [FOLDER]: build/planner.html against the native plan_llama3: 50 random layouts, byte for byte, in node
# and in headless Chromium; its speed there; links; what it looks like at three widths, in light and dark. FOLDER
# receives screenshots.
# planner_page.sh --possible: exits with 0 if there are emscripten, node and a Chromium; otherwise it names what is not.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
. dev/test/checks.sh
browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome || true)
absent=()
command -v emcc >/dev/null || absent+=(emscripten)
command -v dpkg-source >/dev/null || absent+=(dpkg-dev)
command -v node >/dev/null || absent+=(nodejs)
[ -n "$browser" ] || absent+=(chromium)
if [ ${#absent[@]} -gt 0 ]; then
    [ "${1:-}" = --possible ] && { echo "${absent[*]}"; exit 1; }
    echo "error: planner_page.sh needs ${absent[*]}: install them (apt-get install ${absent[*]}), or leave this test" \
        "out" >&2
    exit 1
fi
[ "${1:-}" != --possible ] || exit 0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export OMP_NUM_THREADS=1

make --no-print-directory -s planner >"$work/log" 2>&1 ||
    { tail -n 5 "$work/log"; fail "make planner" "does not build"; }
for precision in fp32 bf16; do
    make --no-print-directory -s PRECISION=$precision build/cpu-$precision/plan_llama3 >"$work/log" 2>&1 ||
        { tail -n 5 "$work/log"; fail "plan_llama3 in $precision" "does not build"; }
done

# counted TASK ARGUMENT…: runs a task of planner_page.js, and adds its checks to the sum
counted() {
    node dev/test/planner_page.js "$@" 2>&1 | tee "$work/said"
    passed=$((passed + $(grep -c '^pass ' "$work/said")))
    failed=$((failed + $(grep -c '^FAIL ' "$work/said")))
    grep -qE '^(pass|FAIL) ' "$work/said" || fail "$1" "has checked nothing"
}
counted compare build/planner "$work"
counted links
counted browse "$browser" build/planner.html "$work"
parts=$(grep -oE '(src|href)="?(https?:)?//[^ ">]*' build/planner.html | head -n 3)
if [ -z "$parts" ]; then pass "the page has no external parts" "$(wc -c <build/planner.html) bytes in one file"
else fail "the page has no external parts" "$parts"; fi
[ -z "${1:-}" ] || node dev/test/planner_page.js pictures "$browser" build/planner.html "$1"
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
