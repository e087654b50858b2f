#!/usr/bin/env bash
# fault_lab.sh [all]: tests the fault laboratory, dev/course/fault_lab. Without `all`: every row is complete, and every
# edit still matches; nothing is compiled. With `all`: every fault is planted, its check finds it, the healthy
# program passes the same check, and the curve is drawn; then dev/results/fault-lab.md is written. ONLY=REGEX: the
# faults with these numbers, and no table. JOBS=N: so many faults at a time; by default as many as there are cores.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
source dev/test/checks.sh
lab=build/fault_lab
table=dev/results/fault-lab.md

# check_row FILE: everything that a reader is told is there
check_row() {
    local field missing=''
    local area='' layout='' title='' change='' unchecked='' check='' expected='' bug='' unseen='' found='' known=''
    local model='' tokens='' resumes='' one_rank=''
    source "$1"
    for field in area layout title change check expected bug unseen found known; do
        [ -n "${!field}" ] || missing+=" $field"
    done
    [ -z "$missing" ] && pass "$1 is complete" "$title" || fail "$1 is complete" "missing:$missing"
}

check_rows() {
    local row rows=(dev/course/fault_lab/[0-9][0-9].sh) listed top
    for row in "${rows[@]}"; do check_row "$row"; done
    dev/course/fault_lab/lab.sh changes >"$said/changes"
    if python3 dev/test/plant.py check "$said/changes" >"$said/check"; then
        pass "the changes of all rows match the source" "$(cat "$said/check")"
    else fail "the changes of all rows match the source" "$(cat "$said/check")"; fi
    dev/course/fault_lab/lab.sh list >"$said/list"
    listed=$(awk 'NR > 1 { printf "%s ", $1 }' "$said/list")
    if [ "$listed" = "$(seq -s ' ' 1 20) " ]; then pass "make faults lists the faults 1 to 20" "$listed"
    else fail "make faults lists the faults 1 to 20" "listed: $listed"; fi
    if grep -qFf <(sed -n 's/^title="\(.*\)"$/\1/p' "${rows[@]}") "$said/list"; then
        fail "make faults does not give the bugs away" "a title is in the list"
    else pass "make faults does not give the bugs away" "none of ${#rows[@]} titles is in the list"; fi
    top=$PWD
    cd "$said" || exit
    bad "an unknown number" "expected a number from 1 to 20" "$top/dev/course/fault_lab/lab.sh" fault 21
    bad "no number" "make fault N=3" "$top/dev/course/fault_lab/lab.sh" fault
    cd "$top" || exit
}

plant() { dev/course/fault_lab/lab.sh test "$1" || echo "FAIL fault $1: ended early"; }

# plant_all: JOBS faults at a time
plant_all() {
    local n
    dev/course/fault_lab/lab.sh plant || exit 1
    for n in $(seq 1 20); do
        [[ $n =~ ^(${ONLY:-.*})$ ]] || continue
        while [ "$(jobs -rp | wc -l)" -ge "${JOBS:-$(nproc)}" ]; do wait -n || true; done
        plant "$n" >"$said/$n" 2>&1 &
    done
    wait
    for n in $(seq 1 20); do
        [ -f "$said/$n" ] || continue
        cat "$said/$n"
        passed=$((passed + $(grep -c '^pass ' "$said/$n")))
        failed=$((failed + $(grep -c '^FAIL ' "$said/$n")))
    done
}

write_table() {
    local n
    cat >"$table" <<EOF
# The fault laboratory

\`dev/test/fault_lab.sh all\` at commit $(git describe --always --dirty): each fault is planted into a copy of the
source; the faulty and the healthy program train the same model for 400 steps with the same seed. The text is this
repository's own, so the losses change a little with it. This table gives the faults away: docs/book/fault-lab.md asks
the questions.

- faulty, healthy: mean loss of the last 50 steps. Distance: the mean over these steps of the difference in a step.
- layouts: the same distance between the healthy program on these ranks and on one rank.
- seeds: the range of the mean loss of the last 50 steps over five seeds of the healthy program on one rank.
- half rate: the same mean with seed 1 and half the learning rate.
- visible: *alone*, the faulty run ends lower than that range by more than half its width, or higher by that much and
  also higher than with half the learning rate; *next to five seeds*, it ends higher than the range by that much only;
  *next to a healthy run*, the lines of the drawing, means of 20 steps, are more than 0.02 apart at the end; *only in
  single steps*, the distance is more than three times that of the layouts; otherwise *no*.

| no. | what was planted | faulty | healthy | distance | layouts | seeds | half rate | visible | check | failing line |
|---|---|---|---|---|---|---|---|---|---|---|
EOF
    for n in $(seq 1 20); do cat "$lab/$n/row"; done >>"$table"
}

said=$(mktemp -d)
trap 'rm -rf "$said"' EXIT
check_rows
if [ "${1:-}" = all ]; then
    plant_all
    if [ -z "${ONLY:-}" ] && [ "$failed" = 0 ]; then write_table; fi
fi
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
