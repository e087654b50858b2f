#!/usr/bin/env bash
# without_root.sh [--possible]: builds and runs the program as an ordinary user, on a machine without the libraries.
# Root must start it: it hides this machine's libraries in a mount namespace. It downloads packages. With --possible it
# only says whether it can run here.
set -uo pipefail
script=$(realpath "${BASH_SOURCE[0]}")
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. dev/test/checks.sh
if [ "$(id -u)" != 0 ] || ! command -v dpkg >/dev/null || ! unshare --mount mount -t tmpfs none /mnt 2>/dev/null; then
    echo "left out: hiding this machine's libraries needs root, the right to mount, and Debian's or Ubuntu's packages"
    exit 1
fi
if [ "${1:-}" = --possible ]; then exit; fi
if [ "${1:-}" != --in-namespace ]; then exec unshare --mount "$script" --in-namespace; fi
work=$(mktemp -d)
trap 'umount -R -l "$work" 2>/dev/null; rm -rf "$work"' EXIT
mount -t tmpfs none "$work" && chmod 755 "$work"

# Hides the headers, and the shared libraries that only this program uses.
hide() {
    mkdir "$work/upper" "$work/work"
    mount -t overlay none -o "lowerdir=/usr,upperdir=$work/upper,workdir=$work/work" /usr || return
    dpkg -L libcjson-dev libcjson1 libpcre2-dev zlib1g-dev libdnnl-dev ocl-icd-libopencl1 2>/dev/null |
        grep -E '/include/|\.so$|libcjson|libOpenCL' | while read -r path; do [ -d "$path" ] || rm -f "$path"; done
    rm -f /usr/lib/*/libdnnl.so*
    ! [ -e /usr/include/zlib.h ]
}

# as_user COMMAND…: as an ordinary user without a terminal, in an unpacked archive of HEAD
as_user() {
    (cd "$work/tree" && env -i PATH="$PATH" HOME="$work" LC_ALL=C OMPI_MCA_rmaps_base_oversubscribe=1 CUDA= \
        setsid setpriv --reuid 65534 --regid 65534 --clear-groups "$@")
}

# refuses NAME TEXT COMMAND…: the command fails, and says TEXT
refuses() {
    local name=$1 text=$2 said
    shift 2
    if said=$(as_user "$@" 2>&1); then fail "$name" "it succeeded"
    elif grep -qE -- "$text" <<<"$said"; then pass "$name" "$(grep -E -- "$text" <<<"$said" | tail -n 1)"
    else fail "$name" "said: $(tail -n 1 <<<"$said")"; fi
}

# works NAME COMMAND…
works() {
    local name=$1 said
    shift
    if said=$(as_user "$@" 2>&1); then pass "$name" "$(tail -n 1 <<<"$said")"
    else fail "$name" "$(tail -n 3 <<<"$said" | tr '\n' ' ')"; fi
}

if ! hide; then
    fail "hiding the libraries" "no overlay over /usr"
    echo "$passed passed, $failed failed"
    exit 1
fi
mkdir "$work/tree" && git archive HEAD | tar -x -C "$work/tree" && chown -R 65534:65534 "$work" 2>/dev/null
refuses "make without root and libraries says how to get them" "fetch_libraries.sh DIR && make DEPS=DIR" make
refuses "make deps without root says it too" "without root|Without root" make deps
refuses "DEPS that names no libraries is an error" "DEPS=.*expected a directory" make DEPS=/nowhere
works "fetch_libraries.sh" dev/fetch_libraries.sh "$work/libraries"
works "make DEPS=DIR" make DEPS="$work/libraries" train_llama3 plan_llama3 tokens_llama3
found=$(as_user ldd ./train_llama3 ./tokens_llama3)
for library in libcjson libpcre2 libz libdnnl libOpenCL; do
    name="the programs find $library there"
    if grep -qE "$library.* => $work/libraries/" <<<"$found"; then pass "$name" "$(grep -m1 $library <<<"$found")"
    else fail "$name" "$(grep $library <<<"$found" || echo "it is not among the programs' libraries")"; fi
done
works "make demo" env STEPS=20 VAL_EVERY=20 make DEPS="$work/libraries" demo
echo
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
