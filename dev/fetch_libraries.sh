#!/usr/bin/env bash
# fetch_libraries.sh DIR [ARCHITECTURE]: unpacks the libraries that the program needs below DIR, for `make DEPS=DIR`. It
# needs no root. They come from the packages of Debian or Ubuntu, whose lists it fetches into DIR, too. With an
# ARCHITECTURE (arm64) they are those for a cross compiler. MPI is not among them: without it ranks are threads.
set -euo pipefail
die() { echo "error: $*" >&2; exit 1; }

[ $# -eq 1 ] || [ $# -eq 2 ] || die "fetch_libraries.sh was given $# arguments; expected DIR [ARCHITECTURE]"
command -v apt-get >/dev/null && command -v dpkg >/dev/null ||
    die "this script unpacks Debian's packages, and there is no apt-get here; put oneDNN, cJSON, PCRE2 and zlib below" \
        "a directory with include/ and lib/ in another way, and name it: make DEPS=DIR"
architecture=${2:-$(dpkg --print-architecture)}
mkdir -p -- "$1" || die "$1 cannot be created; choose another directory"
dir=$(cd -- "$1" && pwd)
downloads=$dir/.packages
mkdir -p "$downloads/lists/partial" "$downloads/cache/archives/partial"
apt=(-qq -o "Dir::State::lists=$downloads/lists" -o "Dir::Cache=$downloads/cache" -o "APT::Architecture=$architecture"
    -o "APT::Architectures::=$architecture" -o APT::Sandbox::User=root)

apt-get "${apt[@]}" update || die "apt-get could not fetch its lists of packages; see above"
packages=(libcjson-dev libcjson1 libpcre2-dev libpcre2-8-0 zlib1g-dev zlib1g)
if [ "$architecture" = "$(dpkg --print-architecture)" ]; then
    packages+=(libdnnl-dev ocl-icd-libopencl1)
    # and the library itself, whose name has its version
    for name in $(apt-cache "${apt[@]}" depends libdnnl-dev | sed -n 's/.*Depends: \(libdnnl[0-9].*\)/\1/p'); do
        packages+=("$name")
    done
fi
cd "$downloads"
apt-get "${apt[@]}" download "${packages[@]}" || die "apt-get could not fetch ${packages[*]}; see above"
for package in ./*.deb; do dpkg -x "$package" "$dir"; done
# Packages link to absolute paths, as if they were installed.
find "$dir/usr/lib" -type l -lname '/*' | while read -r link; do
    if [ -e "$dir$(readlink "$link")" ]; then ln -sfn "$dir$(readlink "$link")" "$link"; fi
done
rm -rf "$downloads"
echo "the libraries are below $dir: make DEPS=$dir"
