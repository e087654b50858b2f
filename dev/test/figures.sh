#!/usr/bin/env bash
# figures.sh [all]: the figures of the book. Each is well-formed, has a title, a description and a background, and no
# text of it overlaps another one or leaves it; and a fresh run gives the structure that its metadata say was drawn.
# Without `all` the runs are smaller ones of the same structure, and the pages of dev/kernels do not run.
# Needs build/cpu-fp32/train_llama3 and plan_llama3 in both precisions: make figures-programs.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
source dev/test/checks.sh
figures=docs/book/figures draw=dev/course/figures/figures.py
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
small=(--small)
[ "${1:-}" != all ] || small=()

# finds NAME PATTERN COMMAND…: the command fails and says a line that matches
finds() {
    local name=$1 pattern=$2 said
    shift 2
    if said=$("$@" 2>&1); then fail "$name" "not found: $said"
    elif grep -qE "$pattern" <<<"$said"; then pass "$name" "$(grep -m1 -E "$pattern" <<<"$said")"
    else fail "$name" "expected '$pattern': $said"; fi
}

# planted NAME FIGURE SED PATTERN: a fault in a figure's file is found and named
planted() {
    sed -E "$3" "$figures/$2.svg" >"$work/$2.svg"
    if cmp -s "$figures/$2.svg" "$work/$2.svg"; then
        fail "$1" "'$3' changes nothing in $2.svg"
        return
    fi
    finds "$1" "$4" python3 $draw --check --small --folder "$work" "$2"
}

for program in build/cpu-fp32/train_llama3 build/cpu-fp32/plan_llama3 build/cpu-bf16/plan_llama3; do
    if [ ! -x $program ]; then fail "$program" "is not built: make figures-programs"; fi
done

python3 $draw --check "${small[@]}" >"$work/said" 2>&1
grep -vE '^[0-9]+ passed, [0-9]+ failed$' "$work/said"
counts=$(grep -E '^[0-9]+ passed, [0-9]+ failed$' "$work/said" | tail -n 1)
if [ -n "$counts" ]; then
    passed=$((passed + ${counts%% *}))
    counts=${counts#*, }
    failed=$((failed + ${counts%% *}))
else fail "figures" "the check ended before its last line"; fi

listed=$(grep -oE '\[[a-z0-9-]+\.svg\]' $figures/README.md | tr -d '[]' | sort | tr '\n' ' ')
there=$(cd $figures && printf '%s\n' *.svg | sort | tr '\n' ' ')
known=$(python3 $draw --list | sed 's/$/.svg/' | sort | tr '\n' ' ')
if [ "$listed" = "$there" ] && [ "$known" = "$there" ]; then
    pass "the list of figures names each figure, and each can be drawn" "$(wc -w <<<"$there") figures"
else fail "the list of figures names each figure" "listed: $listed; files: $there; known: $known"; fi

planted "a figure that shows another order of events" pipeline-1f1b 's/"F3",/"F2",/' \
    "structure, rank 0, number 3: 'F2' committed, 'F3' now"
planted "a figure of another count of pairs" cp-mask 's/"2": 132/"2": 131/' "pairs, 2: 131 committed, 132 now"
planted "a figure that lacks a rank" cp-mask 's/^   "3": 132$/   "4": 132/' "pairs: '4' is only in the committed one"
planted "a figure without alternative text" cp-mask 's/<desc>[^<]*<\/desc>//' "has no <desc>"
planted "a figure that is not well-formed" cp-mask 's/<\/svg>//' "not well-formed"
planted "a figure without a background" cp-mask '0,/^<rect width="1000" height="500" fill="#ffffff"\/>$/s///' \
    "neither a background"
planted "texts that overlap" cp-mask 's/x="762.0" y="355.0"/x="680.0" y="325.0"/' \
    "the texts '36 pairs' and '100 pairs' overlap"
planted "a text that leaves the picture" cp-mask 's/>228 pairs</>228 pairs of a query and a key</' "leaves the picture"
planted "a text too small to read" cp-mask 's/font-size="12"/font-size="9"/' "at least 11 are legible"
finds "a name that is no figure" "error: nothing is not a figure; expected one of: " python3 $draw nothing

echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
