#!/usr/bin/env bash
# gpu_check.sh : what only an NVIDIA GPU can tell. Stages, each under its own time limit; what is known is on disk after each.
#
#   dev/gpu_check.sh                        all: build machine tests sanitizer kernels
#   STAGES="tests kernels" dev/gpu_check.sh some
#   OUT=folder                              where results go (default dev/results): gpu-check.md, its log, kernels-gpu.md
#
# Binaries that were built elsewhere (make CUDA=1 ARCH=x86-64-v3 cuda-programs) are used as they are, with libraries that this
# machine lacks (cJSON, PCRE2) in build/lib; `build` makes what is missing.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
stages=${STAGES:-build machine tests sanitizer kernels}
out=$(realpath -m "${OUT:-dev/results}")
mkdir -p "$out"
report=$out/gpu-check.md all=$out/gpu-check.log log=$(mktemp) failed=0
trap 'rm -f "$log"' EXIT
: >"$all"
[ -d build/lib ] && export LD_LIBRARY_PATH="$PWD/build/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"

# CUDA's libraries: the toolkit's, else those of Python packages
for dir in /usr/local/cuda/lib64 $(python3 -c 'import glob, sysconfig; print(*glob.glob(sysconfig.get_paths()["purelib"] + "/nvidia/*/lib"))' 2>/dev/null); do
    [ -d "$dir" ] && export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$dir"
done

# stage NAME SECONDS COMMAND… : its output into the log, its last `N passed, N failed` (or its exit code) into the report
stage() {
    local name=$1 limit=$2 start=$SECONDS said code
    shift 2
    echo "== $name"
    timeout -k 5 "$limit" "$@" >"$log" 2>&1
    code=$?
    { echo "== $name"; cat "$log"; } >>"$all"
    said=$(grep -E '^[0-9]+ passed, [0-9]+ failed$' "$log" | tail -n 1)
    [ $code = 124 ] && said="ran past its $limit s; ${said:-$(tail -n 1 "$log")}"
    [ $code = 0 ] || failed=1
    printf '| %s | %s | %s s |\n' "$name" "${said:-exit code $code}" $((SECONDS - start)) | tee -a "$report"
    [ $code = 0 ] || grep -E '^(FAIL|failure:|error:)' "$log" | head -n 20
    return $code
}
wanted() { [[ " $stages " == *" $1 "* ]]; }

machine() {
    nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.max.sm,clocks.mem,power.limit --format=csv,noheader
    nvcc --version | tail -n 2
    echo "libraries: $(ldd build/cuda-bf16/test_llama3_cuda | grep -E 'cublas|cudart' | tr -s ' \t' ' ' | tr '\n' ';')"
}
export -f machine

printf '# gpu_check.sh\n\n%s, %s; commit %s.\n\n| stage | result | |\n|---|---|---|\n' "$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null || echo 'no GPU')" \
    "$(date -u +%F)" "$(git rev-parse --short HEAD 2>/dev/null || echo unknown)" >"$report"
if wanted build; then
    for p in bf16 fp32; do stage "build-$p" 400 make --no-print-directory CUDA=1 PRECISION=$p cuda-programs; done
fi
if wanted machine; then stage machine 60 bash -c machine; cat "$log"; fi
for p in bf16 fp32; do
    if wanted tests; then stage "tests-$p" 240 "build/cuda-$p/test_llama3_cuda"; fi
    if wanted sanitizer && command -v compute-sanitizer >/dev/null; then
        stage "sanitizer-$p" 240 compute-sanitizer --error-exitcode 1 "build/cuda-$p/test_llama3_cuda" kernels
        stage "races-$p" 240 compute-sanitizer --tool racecheck --error-exitcode 1 "build/cuda-$p/test_llama3_cuda" kernels
    fi
done
if wanted kernels; then
    rm -f build/kernels-gpu.md
    table=build/kernels-gpu.md # as far as it comes
    stage kernels 500 make --no-print-directory -C dev/kernels table-cuda && table=dev/results/kernels-gpu.md
    [ ! -f $table ] || [ $table -ef "$out/kernels-gpu.md" ] || cp $table "$out/kernels-gpu.md"
fi
exit $failed
