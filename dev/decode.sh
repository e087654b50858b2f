#!/usr/bin/env bash
# decode.sh MODEL [ROUNDS [TOKENS]]: tokens per second of generation in both precisions, next to the limit that the
# memory's bandwidth sets, measured in the same run. MODEL is a directory with weights and a tokenizer, such as
# dev/data/smollm2.py writes. Prints the table of dev/results/decode.md.
set -euo pipefail
[ $# -ge 1 ] || { echo "usage: dev/decode.sh MODEL [ROUNDS [TOKENS]]" >&2; exit 1; }
model=$(realpath "$1")
shift
cd "$(dirname "${BASH_SOURCE[0]}")/.."
for precision in fp32 bf16; do
    make --no-print-directory PRECISION=$precision build/cpu-$precision/decode >&2
done
processor=$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)
echo "$processor, $(nproc) cores, load $(cut -d' ' -f1 /proc/loadavg)"
echo "before the run, commit $(git describe --always --dirty); ${1:-7} rounds of ${2:-64} tokens, medians"
echo
echo "| precision | threads | MB per token | GB/s read | limit, tokens/s | tokens/s | ms per token | of the limit |"
echo "|---|---|---|---|---|---|---|---|"
for precision in fp32 bf16; do build/cpu-$precision/decode "$model" "$@"; done
