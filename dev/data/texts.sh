#!/usr/bin/env bash
# texts.sh OUTDIR: writes three texts of different kinds, from Debian's packages, each as text and as tokens (text.sh):
#   OUTDIR/novels   six novels by Jane Austen, from r-cran-janeaustenr
#   OUTDIR/bible    the King James Bible, by kjv.sh, from bible-kjv and bible-kjv-text, which must be installed
#   OUTDIR/code     C headers of the Linux kernel, from linux-libc-dev
# The other packages are only downloaded and unpacked, which needs no root. What exists is kept. The settings of text.sh
# apply. OUTDIR/packages lists the packages' versions.
set -euo pipefail
export LC_ALL=C
die() { echo "error: $*" >&2; exit 1; }

[ $# -eq 1 ] || die "texts.sh was given $# arguments, expected one: texts.sh OUTDIR"
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
mkdir -p -- "$1" || die "folder $1 cannot be created; choose another"
out=$(cd "$1" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# unpack PACKAGE: downloads a package and unpacks it into $scratch/PACKAGE
unpack() {
    local file
    for program in apt-get dpkg-deb; do
        command -v $program >/dev/null ||
            die "this script downloads Debian's package $1, and there is no $program here;" \
                "use another text: dev/data/text.sh OUTDIR FILE|DIR..."
    done
    mkdir -p "$scratch/$1"
    (cd "$scratch" && apt-get -qq -o APT::Sandbox::User=root download "$1") ||
        die "apt-get could not download $1, see above; try again after apt-get update"
    file=$(find "$scratch" -maxdepth 1 -name "$1_*.deb")
    dpkg-deb -x "$file" "$scratch/$1"
    dpkg-deb -W --showformat='${Package} ${Version}\n' "$file" >>"$out/packages"
}

# finish NAME: makes the text in $scratch/text, once it is whole, that of OUTDIR/NAME
finish() {
    mkdir -p "$out/$1"
    mv -- "$scratch/text" "$out/$1/text.partial"
    mv -- "$out/$1/text.partial" "$out/$1/text"
}

novels() {
    unpack r-cran-janeaustenr
    python3 "$here/r_strings.py" "$scratch/r-cran-janeaustenr/usr/lib/R/site-library/janeaustenr/data/Rdata.rdx" \
        "$scratch/text"
    finish novels
}

code() {
    unpack linux-libc-dev
    mkdir "$scratch/text"
    (cd "$scratch/linux-libc-dev/usr/include" && find . -name '*.h' -type f -size +0c | sort) |
        while IFS= read -r header; do
            name=${header#./}
            cp -- "$scratch/linux-libc-dev/usr/include/$name" "$scratch/text/${name//\//-}"
        done
    finish code
}

[ -d "$out/novels/text" ] || novels
[ -d "$out/code/text" ] || code
"$here/text.sh" "$out/novels" "$out/novels/text"
"$here/text.sh" "$out/code" "$out/code/text"
"$here/kjv.sh" "$out/bible"
grep -q bible "$out/packages" ||
    dpkg-query -W --showformat='${Package} ${Version}\n' bible-kjv bible-kjv-text >>"$out/packages"
