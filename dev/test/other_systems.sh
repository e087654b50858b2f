#!/usr/bin/env bash
# other_systems.sh [--possible]: builds the program with the C library musl and runs its unit tests with it, and
# compiles the program for macOS, FreeBSD, NetBSD and OpenBSD against the headers of these systems, which come with
# Zig's C compiler. The libraries are built for musl from Debian's or Ubuntu's sources. It downloads 100 MB of sources
# and 100 MB of Zig into build/, and needs musl-gcc. With --possible it only says whether it can run here.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. dev/test/checks.sh
for program in musl-gcc apt-get python3; do
    command -v $program >/dev/null && continue
    echo "left out: musl, macOS and the BSDs, because there is no $program"
    exit 1
done
[ "${1:-}" != --possible ] || exit 0
stop() {
    fail "$@"
    echo "$passed passed, $failed failed"
    exit 1
}
version=$(gcc -dumpversion) work=$PWD/build/other-systems
version=${version%%.*}
libraries=$work/musl sources=$work/sources

# The sources of the libraries, from the servers that this machine's packages come from.
fetch_sources() {
    local apt="-qq -o Dir::State::lists=$work/lists -o Dir::Cache=$work/cache -o APT::Sandbox::User=root"
    mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/servers" "$sources"
    sed 's/^Types: deb$/Types: deb deb-src/' /etc/apt/sources.list.d/*.sources >"$work/servers/all.sources" 2>/dev/null
    sed 's/^deb \(.*\)/deb \1\ndeb-src \1/' /etc/apt/sources.list >"$work/servers/all.list" 2>/dev/null
    apt+=" -o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts=$work/servers"
    cd "$sources" && apt-get $apt update && apt-get $apt source --download-only --tar-only cjson pcre2 zlib &&
        apt-get $apt download "gcc-$version-source" && for archive in *.orig.tar.*; do tar xf "$archive"; done &&
        dpkg-deb --fsys-tarfile gcc-*.deb | tar xO --wildcards "./usr/src/gcc-$version/gcc-*.tar.xz" | tar xJ
}

# cJSON, zlib, PCRE2 and GCC's OpenMP library, to be linked statically
build_libraries() {
    export CC=musl-gcc
    mkdir -p "$libraries/lib" "$libraries/include/cjson"
    (cd "$sources"/cJSON-* && $CC -O2 -c cJSON.c && ar rcs "$libraries/lib/libcjson.a" cJSON.o &&
        cp cJSON.h "$libraries/include/cjson") &&
        (cd "$sources"/zlib-* && ./configure --static --prefix="$libraries" && make libz.a &&
            cp libz.a "$libraries/lib" && cp zlib.h zconf.h "$libraries/include") &&
        (cd "$sources"/pcre2-* && ./configure --disable-shared --prefix="$libraries" && make libpcre2-8.la &&
            cp .libs/libpcre2-8.a "$libraries/lib" && cp src/pcre2.h "$libraries/include") &&
        mkdir -p "$work/gomp" && cd "$work/gomp" &&
        "$sources"/gcc-"$version"*/libgomp/configure --disable-multilib --disable-shared --prefix="$libraries" &&
        make && cp .libs/libgomp.a "$libraries/lib" && cp omp.h "$libraries/include"
}

# musl PRECISION
musl() {
    local build=build/test-musl-$1 counts name="the program with musl, $1"
    if ! make -s CI=1 CC=musl-gcc HAVE_MPI= HAVE_ONEDNN= DEPS="$libraries" PRECISION="$1" BUILD="$build" \
        "$build/train_llama3" "$build/test_llama3" 2>&1; then
        fail "$name" "does not build"
        return
    fi
    if readelf -d "$build/train_llama3" | grep -q 'libc.so.6'; then fail "$name" "is linked with glibc"
    else pass "$name" "$("$build/train_llama3" --version | head -n 1)"; fi
    "$build/test_llama3" short >"$work/said" 2>&1
    grep ^FAIL "$work/said"
    counts=$(grep -E '^[0-9]+ passed, [0-9]+ failed$' "$work/said" | tail -n 1)
    passed=$((passed + $(cut -d' ' -f1 <<<"${counts:-0}"))) failed=$((failed + $(cut -d' ' -f3 <<<"${counts:-0 0 1}")))
    echo "unit tests with musl, $1: ${counts:-ended before their last line}"
}

# compiles SYSTEM PROCESSOR
compiles() {
    local source said name="compiled for $1"
    for source in train_llama3.cu programs/plan_llama3.cu test_llama3.cu; do
        if said=$(PYTHONPATH=$work/zig python3 -m ziglang cc -target "$1" -mcpu="$2" -x c -std=c11 -O1 \
            -ffp-contract=fast -fno-math-errno -fopenmp -Wall -Wextra -Werror -Wno-unused-function \
            -isystem "$libraries/include" -c $source -o "$work/compiled.o" 2>&1) && [ -s "$work/compiled.o" ]; then
            pass "$name" "$source"
        else fail "$name" "$source: $(grep -m 1 error <<<"$said")"; fi
        rm -f "$work/compiled.o"
    done
}

if ! [ -e "$libraries/include/omp.h" ]; then # this one is the last to be built
    rm -rf "$work"
    mkdir -p "$work"
    (fetch_sources) >"$work/said" 2>&1 || stop "the libraries' sources" "cannot be fetched: $(tail -n 1 "$work/said")"
    (build_libraries) >"$work/said" 2>&1 || stop "the libraries" "cannot be built for musl: $(tail -n 1 "$work/said")"
fi
for precision in fp32 bf16; do musl $precision; done
[ -d "$work/zig/ziglang" ] || python3 -m pip install -q --target "$work/zig" ziglang >"$work/said" 2>&1 ||
    stop "Zig's C compiler" "cannot be installed: $(tail -n 1 "$work/said")"
compiles aarch64-macos apple_m2
for system in freebsd netbsd openbsd; do compiles x86_64-$system x86_64_v3; done
echo
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
