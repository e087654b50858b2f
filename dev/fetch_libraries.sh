#!/usr/bin/env bash
# fetch_libraries.sh DIR [ARCHITECTURE]: downloads the libraries that the program needs and unpacks them into DIR, for
# `make DEPS=DIR`. It needs no root, but apt-get: the packages are Debian's or Ubuntu's. With an ARCHITECTURE (arm64)
# they are those for a cross compiler. MPI is not among them: without it ranks are threads.
set -euo pipefail
export LC_ALL=C
die() { echo "error: $*" >&2; exit 1; }

[ $# -eq 1 ] || [ $# -eq 2 ] || die "fetch_libraries.sh was given $# arguments; expected DIR [ARCHITECTURE]"
for program in apt-get apt-cache dpkg; do
    command -v $program >/dev/null ||
        die "this script unpacks Debian's packages, and there is no $program here; put oneDNN, cJSON, PCRE2 and zlib" \
            "below a directory with include/ and lib/ in another way, and name it: make DEPS=DIR"
done
architecture=${2:-$(dpkg --print-architecture)}
mkdir -p -- "$1" || die "$1 cannot be created; choose another directory"
dir=$(cd -- "$1" && pwd)
downloads=$dir/.packages
rm -rf "$downloads"
trap 'rm -rf "$downloads"' EXIT
mkdir -p "$downloads/lists/partial" "$downloads/cache/archives/partial"
# Lists of packages, and what is downloaded, stay in DIR: those of the system belong to root.
apt=(-qq -o "Dir::State::lists=$downloads/lists" -o "Dir::Cache=$downloads/cache" -o "APT::Architecture=$architecture"
    -o "APT::Architectures::=$architecture" -o APT::Sandbox::User=root)

apt-get "${apt[@]}" update ||
    die "apt-get could not fetch its lists of packages for $architecture; see above" \
        "(Ubuntu keeps packages for other processors on servers of their own)"
packages=(libcjson-dev libcjson1 libpcre2-dev libpcre2-8-0 zlib1g-dev zlib1g libzstd-dev libzstd1)
if [ "$architecture" = "$(dpkg --print-architecture)" ]; then
    # The package of oneDNN's shared library has the version in its name.
    onednn=$(apt-cache "${apt[@]}" depends libdnnl-dev | sed -n 's/.*Depends: \(libdnnl[0-9].*\)/\1/p')
    [ -n "$onednn" ] || die "apt-cache names no package for oneDNN's shared library"
    packages+=(libdnnl-dev "$onednn" ocl-icd-libopencl1)
fi
cd "$downloads"
apt-get "${apt[@]}" download "${packages[@]}" || die "apt-get could not fetch ${packages[*]}; see above"
for package in ./*.deb; do dpkg -x "$package" "$dir"; done
# Packages link to absolute paths, as if they were installed.
find "$dir/usr/lib" -type l -lname '/*' | while read -r link; do
    if [ -e "$dir$(readlink "$link")" ]; then ln -sfn "$dir$(readlink "$link")" "$link"; fi
done
echo "the libraries are below $dir: make DEPS=$dir"
