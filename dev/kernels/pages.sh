#!/usr/bin/env bash
# pages.sh check | table | check-cuda | table-cuda [ARG…] : what make of that name runs, over the programs in $PAGES. In
# CUDA they have all pages in one, named in $NAMES. check ends with `N passed, N failed`; table prints Markdown, and
# fails where a check does.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
what=${1:?check, table, check-cuda or table-cuda}
shift

# The checks go to stderr.
table_only() {
    awk '/^(pass|FAIL) / || /^[0-9]+ passed, [0-9]+ failed$/ { print >"/dev/stderr"; next } { print }'
}

if [ "$what" = check ] || [ "$what" = check-cuda ]; then
    passed=0 failed=0
    [ "$what" = check-cuda ] && all=all
    for page in $PAGES; do
        out=$("$page" ${all:-} --check 2>&1)
        printf '%s\n' "$out" | grep -vE '^[0-9]+ passed, [0-9]+ failed$'
        counts=$(grep -E '^[0-9]+ passed, [0-9]+ failed$' <<<"$out" | tail -n 1)
        if [ -z "$counts" ]; then
            echo "FAIL ${page#../../}: ended before its last line"
            failed=$((failed + 1))
        else
            passed=$((passed + $(cut -d' ' -f1 <<<"$counts")))
            failed=$((failed + $(cut -d' ' -f3 <<<"$counts")))
        fi
    done
    echo "$passed passed, $failed failed"
    [ "$failed" = 0 ]
    exit
fi

commit=${COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || echo none)}
if [ "$what" = table-cuda ]; then
    gpu=$(nvidia-smi --query-gpu=name,driver_version,clocks.max.sm --format=csv,noheader | head -n 1)
    cat <<TEXT
# The ops, step by step, on a GPU

\`make -C dev/kernels table-cuda\`; $gpu, $(date +%Y-%m-%d), commit $commit.

Each table is one op in one precision, over sizes (8,192 tokens of a layer of Llama 3 1B or 8B, where the label does
not say otherwise); the versions are those of the page \`dev/kernels/OP.cu\`, in its order, and of attention those of
its four pages. Versions take turns; before each call the L2 cache is flushed by reading, and the time is the GPU's own,
between two events. The measured rates below each size are those of this GPU in the same run: what its bytes take at the
rate of a large copy, or its matmuls at the rate of the fastest of cuBLASLt's matmuls with such shapes, whichever is
longer; shares are of that. The error is ‖version − definition‖ / ‖definition‖, the largest over the outputs; the
definition is in double precision and agrees with PyTorch's figures.
TEXT
else
    processor=$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)
    cat <<TEXT
# The ops, step by step

\`make -C dev/kernels table\`; $processor, $(nproc) cores, commit $commit.

Each table is one op in one precision, over sizes; the versions are those of the page \`dev/kernels/OP.c\`, in its
order. Versions take turns, and so do two loops that give the roofline: fused multiply-adds from registers, and a loop
that reads and writes the same bytes of the same buffers and computes nothing. The roofline is the slower of the two
for the case, so a case that fits a cache is held against that cache. The error is ‖version − definition‖ /
‖definition‖, the largest over the outputs; the definition is in double precision and agrees with PyTorch's figures.
TEXT
fi

if [ "$what" = table-cuda ]; then # page after page: time on a GPU may end before the last
    for name in $NAMES; do
        printf '\n## %s\n' "$name"
        for page in $PAGES; do
            "$page" "$name" "$@" | table_only || exit 1
        done
    done
    exit
fi
pages=$(mktemp)
trap 'rm -f "$pages"' EXIT
for page in $PAGES; do
    name=${page##*/}
    [ "${last:-}" = "$name" ] || printf '\n## %s\n' "$name"
    last=$name
    "$page" "$@" | table_only || exit 1
done >"$pages"

printf '\n## The op in use, at the sizes of bench-125m\n\n'
echo "| op, size | fp32: ms | GFLOP/s | GB/s | of the roofline | bf16: ms | GFLOP/s | GB/s | of the roofline |"
echo "|---|---:|---:|---:|---:|---:|---:|---:|---:|"
awk -F' *[|] *' '
    $3 == "version" { split($2, of, ", "); next }
    $3 ~ /^1 /      { size = $2 }
    $3 ~ /^in use/  { row = of[1] " " size; four = $4 " | " $5 " | " $6 " | " $7 }
    $3 == "roofline" && size ~ /^bench-125m/ {
        if (!(row in seen)) rows[++n] = row
        seen[row] = 1
        in_use[row, of[2]] = four " (" $7 ")"
    }
    END { for (i = 1; i <= n; i++) print "| " rows[i] " | " value(rows[i], "fp32") " | " value(rows[i], "bf16") " |" }
    function value(row, precision) { return (row, precision) in in_use ? in_use[row, precision] : " | | | " }' "$pages"
cat "$pages"
