#!/usr/bin/env bash
# self.sh OUTDIR: writes this repository's own text as tokens with text.sh, if no other text is available.
set -euo pipefail
die() { echo "error: $*" >&2; exit 1; }

[ $# -eq 1 ] || die "self.sh was given $# arguments, expected one: self.sh OUTDIR"
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
top=$(cd "$here/../.." && pwd)
mkdir -p -- "$1" || die "folder $1 cannot be created; choose another"
out=$(cd "$1" && pwd)
cd "$top"
files=()
while IFS= read -r -d '' file; do files+=("$file"); done < <(
    find . \( -name '.?*' -o -name build -o -name data -path ./data \) -prune -o -type f -size -512k \
        \( -name '*.h' -o -name '*.c' -o -name '*.cu' -o -name '*.cuh' -o -name '*.md' -o -name '*.py' -o -name '*.sh' \
        -o -name Makefile \) -print0 | LC_ALL=C sort -z)
[ ${#files[@]} -gt 0 ] || die "no source files below $top; expected this script in dev/data of the repository"
exec "$here/text.sh" "$out" "${files[@]}"
