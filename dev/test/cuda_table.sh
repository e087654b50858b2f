#!/usr/bin/env bash
# cuda_table.sh [--update] : what nvcc makes of each CUDA kernel, against the committed table
# dev/results/cuda-kernels.txt. No kernel may spill or use local memory, none may take more registers than the table
# says, and the table has them all.
# Needs nvcc, no GPU; builds both precisions. --update writes the table. CUDA on a CPU reads name and registers of it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
table=dev/results/cuda-kernels.txt
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# demangled: names of kernels, without return type and arguments
demangled() {
    c++filt -t | sed -E 's/^void //; s/\(int\)|\(bool\)//g; s/^([^ (<]*(<[^(]*>)?)\([^)]*\) /\1 /'
}

# One line for each kernel of a build: NAME REGISTERS SHARED ARCHITECTURE STACK SPILLS, from ptxas -v
kernels() {
    awk '/Compiling entry function/ {split($0, part, "\047"); name = part[2]; arch = part[4]}
         /bytes stack frame/ {stack = $1; spills = $5 + $9}
         /Used [0-9]+ registers/ {
             shared = 0
             for (i = 2; i <= NF; i++) {
                 if ($i == "registers,") registers = $(i - 1)
                 else if ($i ~ /^smem/) shared = $(i - 2)
             }
             print name, registers, shared, arch, stack, spills
         }' "$1" |
        demangled |
        # a name has no spaces
        awk '{for (name = $1; NF > 6; NF--) {name = name $2; for (i = 2; i < NF; i++) $i = $(i + 1)} $1 = name; print}'
}

# NAME THREADS: launch bounds stand in the PTX only
bounds() {
    awk '/\.entry / {
             match($0, /_Z[A-Za-z0-9_]+/)
             name = substr($0, RSTART, RLENGTH)
         }
         /^\.maxntid/ {
             gsub(",", "")
             print name, $2
         }' "$1" |
        demangled |
        awk '{name = $1; for (i = 2; i < NF; i++) name = name $i; print name, $NF}'
}

for precision in fp32 bf16; do
    make --no-print-directory PRECISION=$precision build/cuda-$precision/test_llama3_cuda >"$work/make" 2>&1 ||
        { grep -i error "$work/make"; exit 1; }
    if grep -q "wgmma.*serialized" build/cuda-$precision/test_llama3_cuda.ptxas; then
        echo "error: nvcc runs one wgmma after the other:"
        grep "wgmma.*serialized" build/cuda-$precision/test_llama3_cuda.ptxas
        exit 1
    fi
    kernels build/cuda-$precision/test_llama3_cuda.ptxas | sed "s/^/$precision /" >>"$work/kernels"
    front=$(sed -E "s/-gencode [^ ]+//g; s/ -t [0-9]+//; s/-Xptxas [^ ]+//; s/ -l[^ ]+//g" build/cuda-$precision/flags)
    $front -arch=compute_90a -ptx train_llama3.cu -o "$work/ptx" 2>"$work/make" || { cat "$work/make"; exit 1; }
    bounds "$work/ptx" >>"$work/bounds"
done

# Blocks an SM holds: of 65,536 registers, given to warps in units of 256 and split among four schedulers; 2,048
# threads; shared memory of 164 KB (sm_80) or 228 KB (sm_90), of which a block takes 1 KB more than it asks for.
awk 'FILENAME ~ /bounds$/ {
         threads[$1] = $2
         next
     }
     {
         name = $2
         at = $1 " " $5
         known[name] = 1
         registers[name, at] = $3
         if ($4 > shared[name]) shared[name] = $4
         if ($3 > most[name]) most[name] = $3
         if ($6 > 0 || $7 > 0) complain(sprintf("%s %s: %s bytes of stack, %s of spills", name, at, $6, $7))
     }
     function complain(what) {
         print what > "/dev/stderr"
         bad = 1
     }
     function least(a, b) {return a < b ? a : b}
     function blocks(name, at,    warps, unit, n, memory) {
         warps = int((threads[name] + 31) / 32)
         unit = int((registers[name, at] * 32 + 255) / 256) * 256
         n = int(4 * int(16384 / unit) / warps)
         memory = at ~ /sm_80/ ? 167936 : 233472
         return least(least(n, int(64 / warps)), int(memory / (shared[name] + 1024)))
     }
     function cell(name, at) {
         return (name SUBSEP at) in registers ? registers[name, at] " x" blocks(name, at) : "-"
     }
     END {
         split("fp32 sm_80,fp32 sm_90a,bf16 sm_80,bf16 sm_90a", ats, ",")
         for (name in known) {
             if (!threads[name]) {
                 complain(name ": no launch bounds")
                 continue
             }
             line = sprintf("%-36s %4d # %6d %8d", name, most[name], shared[name], threads[name])
             for (i = 1; i <= 4; i++) line = line sprintf(" %10s", cell(name, ats[i]))
             print line | "LC_ALL=C sort"
         }
         exit bad
     }' "$work/bounds" "$work/kernels" >"$work/rows" || {
    echo "error: a kernel spills, uses local memory or has no launch bounds (above)"
    exit 1
}
{
    sed 's/^/# /' <<'TEXT'
What nvcc makes of each CUDA kernel (dev/test/cuda_table.sh --update): the most registers a thread has in any build;
then static shared bytes, threads a block may have, and for each build registers x blocks that an SM holds of
that many threads (dynamic shared memory, which the launcher chooses, left out).
kernel                         registers # shared  threads  fp32 sm_80 fp32 sm_90a bf16 sm_80 bf16 sm_90a
TEXT
    cat "$work/rows"
} >"$work/table"

if [ "${1:-}" = --update ]; then
    cp "$work/table" $table
    echo "$(grep -vc '^#' $table) kernels in $table"
    exit
fi
grew=$(awk '/^#/ {next} FILENAME != last {last = FILENAME; file++}
            file == 1 {was[$1] = $2; next}
            {now[$1] = 1}
            !($1 in was) {print $1 " is not in the table"}
            ($1 in was) && $2 > was[$1] {print $1 " takes " $2 " registers, " was[$1] " in the table"}
            END {for (name in was) if (!(name in now)) print name " is no longer there"}' $table "$work/table")
if [ -n "$grew" ]; then
    echo "$grew"
    echo "error: the kernels are not those of $table; where it is right, run $0 --update"
    exit 1
fi
echo "$(wc -l <"$work/rows") kernels, no spills, no local memory, no register more than in $table"
