#!/usr/bin/env bash
# kjv.sh OUTDIR: writes the King James Bible (4.3 MB, public domain), from Debian's packages bible-kjv and
# bible-kjv-text, as one text per book into OUTDIR/text, and then as tokens with text.sh, whose settings apply.
set -euo pipefail
die() { echo "error: $*" >&2; exit 1; }

[ $# -eq 1 ] || die "kjv.sh was given $# arguments, expected one: kjv.sh OUTDIR"
out=$1
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
bible=$(command -v bible || true)
for path in /usr/games/bible; do [ -n "$bible" ] || { [ -x "$path" ] && bible=$path; } || true; done

if ! [ -f "$out/text/66-Revelation.txt" ]; then
    [ -n "$bible" ] || die "the program 'bible' is not installed; run: apt-get install bible-kjv bible-kjv-text," \
        "or use any text: dev/data/text.sh OUTDIR FILE|DIR..., or this repository's own: dev/data/self.sh OUTDIR"
    mkdir -p -- "$out" || die "folder $out cannot be created; choose another"
    rm -rf -- "$out/text.partial" "$out/text"
    mkdir -- "$out/text.partial"
    # With very long lines (-l) there is one verse per line, indented and numbered, under a line `Book Chapter`.
    # The folder is passed in the environment, because awk would interpret backslashes in an assignment.
    "$bible" -l100000 'Gen1:1-Rev22:21' </dev/null | TEXT="$out/text.partial" awk '
        /^[[:space:]]*$/ { next }
        /^  [0-9]+ / { if (!file) exit 1; sub(/^ +/, ""); sub(/ +$/, ""); print >file; verses++; next }
        /^[1-3A-Z][A-Za-z ]* [0-9]+$/ {
            chapter = $NF
            book = $0; sub(/ [0-9]+$/, "", book)
            if (book != last) {
                if (file) close(file)
                last = book; name = book; gsub(/ /, "-", name)
                file = sprintf("%s/%02d-%s.txt", ENVIRON["TEXT"], ++books, name)
                print book >file
            }
            printf "\nChapter %s\n", chapter >file # the only empty lines, so that text is cut before chapters
            next
        }
        { strange++ }
        END {
            if (books == 66 && verses == 31102 && !strange) exit
            print books, verses, strange + 0 >"/dev/stderr"
            exit 1
        }
    ' 2>"$out/text.partial/.counts" ||
        die "the program 'bible' printed (books, verses, other lines) $(tail -n 1 "$out/text.partial/.counts")," \
            "expected 66 31102 0; reinstall it: apt-get install --reinstall bible-kjv bible-kjv-text"
    rm -f -- "$out/text.partial/.counts"
    mv -- "$out/text.partial" "$out/text"
fi
exec "$here/text.sh" "$out" "$out/text"
