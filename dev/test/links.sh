#!/usr/bin/env bash
# links.sh: dev/book/check.py reports links and paths that lead nowhere, and `check.py links` corrects those to what has
# moved, and no others; style.sh reports a file that it names and that is not there. Both check a small tree that is
# written here, so that no source of the project is pinned.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
source dev/test/checks.sh
top=$PWD work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/{dev/book,dev/clusters,docs/book,lib}
cp dev/book/{check,definitions,links}.py "$work/dev/book"
cd "$work" || exit
git init -q .
printf "%s\n" /dev/book/ /right /said /differs >.gitignore
echo '{}' >dev/clusters/h100-8.json

cat >model.h <<'C'
/* model.h: what lib/ops.h computes, in the order of the paper. */
#define LIMIT 3
typedef struct {
    float *x; // (B, T, C)
} Buffers;
typedef enum { FORWARD, BACKWARD } Direction;
static const int sizes[] = {1, 2};
static int forward(
    const Buffers *b) {
    return b->x[0] > sizes[0]; // not backward()
}
C
cat >lib/ops.h <<'C'
int backward(int n);
static int norm(int n) { return n; }
static int scale(int n) { return norm(n); }
C
echo 'HEADERS := $(wildcard lib/*.h) # lib/ops.h' >Makefile
cat >docs/book/01-page.md <<'MD'
# One page

A macro [`LIMIT`](../../model.h), types [`Buffers`](../../model.h) and [`Direction`](../../model.h), a constant
[`BACKWARD`](../../model.h), a table [`sizes`](../../model.h), functions [`forward`](../../model.h),
[`norm`](../../lib/ops.h) and `scale` in `lib/ops.h`. See `model.h`, `lib/`, [above](#one-page) and [all](../../lib).

In `lib/`:

- `ops.h`: ops
MD

check() { python3 dev/book/check.py >said 2>&1; }
correct() { python3 dev/book/check.py links >said 2>&1 && check; }

# finds NAME LINE…: these defects, and no others
finds() {
    local name=$1
    shift
    if diff <(printf '%s\n' "$@" | sort) <(sed -n 's/^FAIL links and paths: //p' said | sort) >differs; then
        pass "$name" "$# reported, such as: $1"
    else fail "$name" "$(cat differs) $(tail -n 3 said)"; fi
}

# nothing_wrong NAME: no defect
nothing_wrong() {
    if grep -q '^pass links and paths: 1[89] in [4-6] files' said && tail -n 1 said | grep -q ' 0 failed$'; then
        pass "$1" "$(head -n 1 said)"
    else fail "$1" "$(cat said)"; fi
}

check
nothing_wrong "each kind of definition, link and path"

page=docs/book/01-page.md by="\`python3 dev/book/check.py links\` corrects it"
cp $page right
sed -i 's/#one-page/#two-pages/; s/`model.h`/`modell.h`/; s/`lib\/`,/`libs\/`,/; s/- `ops.h`/- `opt.h`/' $page
sed -i 's/Direction`](..\/..\/model.h/Direction`](..\/model.h/' $page
sed -i 's/ lib\/ops.h/ lib\/op.h/' model.h Makefile
sed -i 's/lib\/\*.h/libs\/*.h/' Makefile
check
finds "misspelt paths, names of files and headings" \
    "model.h: line 1: there is no lib/op.h" "Makefile: line 1: there is no lib/op.h" \
    "Makefile: line 1: there is no libs/*.h" "$page: line 5: there is no modell.h" \
    "$page: line 5: there is no libs/" "$page: line 9: there is no lib/opt.h" \
    "$page: line 5: (#two-pages): the page has no heading #two-pages" \
    "$page: line 3: docs/model.h does not define \`Direction\`; model.h does: $by"
cp right $page
sed -i 's/lib\/op.h/lib\/ops.h/; s/libs/lib/' model.h Makefile

# corrected NAME: what could be corrected is, and the page is as in right
corrected() {
    correct
    if cmp -s right $page; then nothing_wrong "$1, corrected"
    else fail "$1, corrected" "$(diff right $page)"; fi
}

sed -i '3s/model.h)/model.h#L2)/' $page
check
finds "a link that names a line" "$page: line 3: (../../model.h#L2) names a line: ${by% corrects*} leaves it out"
corrected "a link that names a line"

sed -i 's/int norm/int other/; 1i // norm(1) { }' lib/ops.h
check
finds "a function that is only called and declared" "$page: line 5: lib/ops.h does not define \`norm\`"
mkdir run plan
echo 'int norm(int n) { return n; }' | tee run/a.h >plan/a.h
correct
finds "a function that two other files define" \
    "$page: line 5: lib/ops.h does not define \`norm\`; name one of plan/a.h run/a.h"
rm -r run plan
sed -i 's/int other/int norm/; 1d' lib/ops.h

sed -n '$p' lib/ops.h >lib/more.h
sed -i '$d' lib/ops.h
check
finds "a function in another file" "$page: line 5: lib/ops.h does not define \`scale\`; lib/more.h does: $by"
sed -i 's/`scale` in `lib\/ops.h`/`scale` in `lib\/more.h`/' right
corrected "a function in another file"

echo 'Read `model.h`.' >README.md
mkdir parallel
mv model.h lib/more.h parallel/
check
finds "files in another folder" "README.md: line 1: there is no model.h; parallel/model.h is there: $by" \
    "$page: line 3: model.h does not define \`LIMIT\`; parallel/model.h does: $by" \
    "$page: line 3: model.h does not define \`Buffers\`; parallel/model.h does: $by" \
    "$page: line 3: model.h does not define \`Direction\`; parallel/model.h does: $by" \
    "$page: line 4: model.h does not define \`BACKWARD\`; parallel/model.h does: $by" \
    "$page: line 4: model.h does not define \`sizes\`; parallel/model.h does: $by" \
    "$page: line 4: model.h does not define \`forward\`; parallel/model.h does: $by" \
    "$page: line 5: lib/more.h does not define \`scale\`; parallel/more.h does: $by"
sed -i 's/\.\.\/model.h/..\/parallel\/model.h/g; s/lib\/more.h/parallel\/more.h/' right
corrected "files in another folder"
if [ "$(<README.md)" = 'Read `parallel/model.h`.' ]; then pass "a README.md's list of files" "$(<README.md)"
else fail "a README.md's list of files" "$(<README.md)"; fi

mkdir dev/test
cp "$top"/dev/test/{style.sh,style.c,phrases.txt} dev/test
dev/test/style.sh >said 2>&1
for missing in "there is no llama3.h" "there is no lib/device/\*" "the exception comma:.* is not needed"; do
    if grep -qE "^FAIL dev/test/style.sh:1: named: $missing" said; then pass "style.sh, what it names" "$missing"
    else fail "style.sh, what it names" "expected '$missing': $(cat said)"; fi
done

echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
