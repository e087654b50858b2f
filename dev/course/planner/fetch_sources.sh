#!/usr/bin/env bash
# fetch_sources.sh DIR: fetches the sources of cJSON and zlib, which are compiled to WebAssembly for
# build/planner.html, and unpacks them into DIR: cjson/, zlib/, and their headers in include/. They are source packages
# of Debian or Ubuntu. It needs no root, but apt-get and dpkg-source.
set -euo pipefail
export LC_ALL=C
die() { echo "error: $*" >&2; exit 1; }

[ $# -eq 1 ] || die "fetch_sources.sh was given $# arguments; expected DIR"
for program in apt-get dpkg-source; do
    command -v $program >/dev/null ||
        die "the planner's page is built with source packages of Debian or Ubuntu, and there is no $program here;" \
            "install it (apt-get install dpkg-dev), or build the page on such a system: it works everywhere"
done
mkdir -p -- "$1" || die "$1 cannot be created; choose another directory"
dir=$(cd -- "$1" && pwd)
downloads=$dir/.packages
rm -rf "$downloads"
trap 'rm -rf "$downloads"' EXIT
mkdir -p "$downloads/lists/partial" "$downloads/cache/archives/partial"
# The sources come from where the system's packages come from, without updates: the page needs no newer ones.
# shellcheck source=/dev/null
. /etc/os-release
apt-get indextargets --format 'deb-src $(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' |
    grep -F " $VERSION_CODENAME " | sort -u >"$downloads/sources.list"
[ -s "$downloads/sources.list" ] || die "apt-get has no package sources; add one to /etc/apt/sources.list"
# Lists of packages, and what is downloaded, stay in DIR: those of the system belong to root.
apt=(-qq -o "Dir::Etc::SourceList=$downloads/sources.list" -o Dir::Etc::SourceParts=/dev/null
    -o "Dir::State::lists=$downloads/lists" -o "Dir::Cache=$downloads/cache" -o APT::Sandbox::User=root)
cd "$downloads"
apt-get "${apt[@]}" update || die "apt-get could not fetch the list of source packages; see above"
apt-get "${apt[@]}" source cjson zlib >log 2>&1 ||
    die "apt-get could not fetch the sources of cjson and zlib: $(tail -n 1 log)"
rm -rf "$dir/cjson" "$dir/zlib" "$dir/include"
for package in cjson zlib; do mv "$package"-*/ "$dir/$package"; done
mkdir -p "$dir/include/cjson"
cp "$dir/cjson/cJSON.h" "$dir/include/cjson/"
cp "$dir/zlib/zlib.h" "$dir/zlib/zconf.h" "$dir/include/"
