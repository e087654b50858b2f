#!/usr/bin/env bash
# text.sh OUTDIR FILE|DIR...: turns text into OUTDIR/train.tok, OUTDIR/val.tok, OUTDIR/tokenizer.model
# and the other files of the tokenizer.
# It trains a tokenizer of 4,096 tokens on the text, unless one is given: TOKENIZER=path/to/tokenizer.model text.sh ...
# A given tokenizer.json becomes OUTDIR/tokenizer.json.
# The files may be text, or with TOKENIZER JSON lines (.jsonl), each plain or compressed (.gz, .zst).
# VOCAB_SIZE, VAL_FRACTION (0.05) and FIELD, the field of JSON lines that holds the text (text), may be set. It does
# nothing if the outputs are newer than everything they depend on.
set -euo pipefail
die() { echo "error: $*" >&2; exit 1; }

[ $# -ge 2 ] || die "text.sh was given $# arguments, expected an output folder and at least one text file or folder:" \
    "text.sh OUTDIR FILE|DIR..."
out=$1
shift
for path in "$@"; do [ -e "$path" ] || die "$path does not exist; expected a text file or a folder of them"; done
[ -n "$(find -H "$@" -type f -size +0c -print -quit)" ] ||
    die "there is no text in $*; expected text files, or folders of them"
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
tokens=$here/../../tokens_llama3
mkdir -p -- "$out" || die "folder $out cannot be created; choose another"

log=$(mktemp)
made=$(mktemp)
trap 'rm -f "$log" "$made"' EXIT
make -s -C "$here/../.." tokens_llama3 >"$log" 2>&1 ||
    die "tokens_llama3 does not build: $(grep -m1 -i 'error' "$log" || tail -n 1 "$log"); try: make deps"

# What the outputs were made from. If this record is the same and nothing is newer than it, they are up to date.
record=$out/.made-from
{
    printf 'tokenizer %s\nvocabulary %s\n' "${TOKENIZER:-trained}" "${VOCAB_SIZE:-4096}"
    printf 'validation %s\n' "${VAL_FRACTION:-0.05}"
    [ -z "${FIELD:-}" ] || printf 'field %s\n' "$FIELD"
    printf '%s\n' "$@"
} >"$made"
tokenizer=$out/tokenizer.model
case ${TOKENIZER:-} in *.json) tokenizer=$out/tokenizer.json ;; esac
if [ -f "$out/train.tok" ] && [ -f "$out/val.tok" ] && [ -f "$tokenizer" ] && cmp -s "$made" "$record"; then
    sources=("$@" "$tokens" ${TOKENIZER:+"$TOKENIZER"})
    newer=$(find -H "${sources[@]}" -newer "$record" -print -quit)
    [ -n "$newer" ] || exit 0
fi
rm -f -- "$record"

# remove_tokenizer: the files of the last tokenizer
remove_tokenizer() {
    local name
    for name in tokenizer.model tokenizer.json tokenizer_config.json special_tokens_map.json generation_config.json \
        chat_template.jinja; do
        rm -f -- "$out/$name"
    done
}

if [ -n "${TOKENIZER:-}" ]; then
    [ -f "$TOKENIZER" ] || die "TOKENIZER=$TOKENIZER is not a file; expected a tokenizer.model or a tokenizer.json"
    if ! [ "$TOKENIZER" -ef "$tokenizer" ]; then
        remove_tokenizer
        cp -- "$TOKENIZER" "$tokenizer"
        for name in tokenizer_config.json special_tokens_map.json chat_template.jinja; do
            [ ! -f "$(dirname "$TOKENIZER")/$name" ] || cp -- "$(dirname "$TOKENIZER")/$name" "$out/$name"
        done
    fi
else
    remove_tokenizer
    "$tokens" --train-tokenizer --vocab-size "${VOCAB_SIZE:-4096}" --out "$tokenizer" "$@"
fi
"$tokens" --tokenizer "$tokenizer" --out-train "$out/train.tok" --out-val "$out/val.tok" \
    --val-fraction "${VAL_FRACTION:-0.05}" --field "${FIELD:-text}" "$@"
cat "$made" >"$record"
