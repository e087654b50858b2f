#!/usr/bin/env bash
# tokenize.sh [PROGRAM [all]] : texts to token files, by the tokens_llama3 next to PROGRAM. Token files hold the same
# bytes whatever the threads and the slices; text larger than the memory allowed is read; what is no text is named, with
# its place. `all`: with 3 GB of text.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. dev/test/checks.sh
top=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export LC_ALL=C

program=$(realpath "${1:-build/cpu-fp32/train_llama3}")
cd "$work" || exit
mkdir bin
ln -s "${program%/*}/tokens_llama3" bin/
tokens=bin/tokens_llama3 train="bin/tokens_llama3 --train-tokenizer"

# tokens NAME ARGUMENT… : tokenizes into NAME.train and NAME.val
tokens() {
    local name=$1
    shift
    $tokens --tokenizer tokenizer.model --out-train "$name.train" --out-val "$name.val" "$@" >.out 2>.err
}

# Words, numbers, endings, lines and paragraphs from a small generator (Park and Miller 1988), the same everywhere.
awk 'function draw(n) { x = x * 16807 % 2147483647; return x % n }
     BEGIN { x = 1
             words = "the and of that a it house river was said window I you\047ll don\047t WE\047RE 7 1984 350000"
             words = words " \303\251t\303\251 na\303\257ve \320\264\320\276\320\274"
             words = words " \346\260\264\347\201\253 \340\244\225\340\244\277 \360\237\230\200 -- ... (see over) x_y"
             n = split(words, word, " ")
             split("ba co du fe gi ha jo ku le mi no pu ra so tu", part, " ")
             for (line = 0; line < 20000; line++) {
                 for (k = draw(14); k >= 0; k--) {
                     if (draw(2)) printf "%s", word[1 + draw(n)]
                     else for (i = draw(4); i >= 0; i--) printf "%s", part[1 + draw(15)]
                     printf "%s", draw(9) ? " " : draw(3) ? ", " : "\t  "
                 }
                 printf "%s", draw(8) ? "\n" : draw(4) ? "\n\n" : " \r\n \n" } }' >text
$train --vocab-size 1000 --out tokenizer.model text >.out ||
    { fail "the tokenizer" "$(cat .out)"; exit 1; }

# ---------------------------------------------------------------- the same bytes
# same NAME TEXT… : one thread with slices of whole stretches, against other threads and slices
same() {
    local name=$1 run=0 threads slice
    shift
    tokens whole --threads 1 --slice 1000000000 "$@" || { fail "$name" "$(cat .err)"; return; }
    for threads in 1 2 3 8; do
        for slice in 1 5000 262144; do
            tokens cut --threads "$threads" --slice "$slice" "$@" && cmp whole.train cut.train &&
                cmp whole.val cut.val || { fail "$name" "$threads threads, slices of $slice bytes: $(cat .err)"; \
                return; }
            run=$((run + 1))
        done
    done
    pass "$name" "$run runs, $(($(wc -c <whole.train) / 2)) and $(($(wc -c <whole.val) / 2)) tokens"
}
same "one document: the same for any threads and slices" text
sum=$({ tail -c +193 whole.train; tail -c +193 whole.val; cat tokenizer.model; } | sha256sum | cut -c1-16)
# what the first tools gave, which knew neither threads nor slices
if [ "$sum" = 54df9983188c65cd ]; then
    pass "tokens and tokenizer are those of earlier versions" "$sum"
else
    fail "tokens and tokenizer are those of earlier versions" "$sum"
fi

mkdir many
split -l 25 -a 4 text many/part
same "many documents: the same for any threads and slices" many
tr -d ' \n\r\t[:punct:]' <text >piece # one line without a blank; few places to cut
same "a line without blanks: the same for any threads and slices" piece
tr -dc 'a-z' <text >letters # none
same "a text without a place to cut: the same for any threads and slices" letters

# ---------------------------------------------------------------- JSON lines and compressed files
# json_lines FIELD FILE… : a line for each file
json_lines() {
    local field=$1
    shift
    awk -v field="$field" '
        FNR == 1 { if (NR > 1) printf "\"}\n"; printf "{\"n\": %d, \"%s\": \"", ++files, field }
        { gsub(/\\/, "\\\\"); gsub(/"/, "\\\""); gsub(/\t/, "\\t"); gsub(/\r/, "\\r"); printf "%s\\n", $0 }
        END { printf "\"}\n" }' "$@"
}
# gives NAME ARGUMENT… : the tokens are those of whole.train and whole.val
gives() {
    local name=$1
    shift
    if tokens given "$@" <in && cmp whole.train given.train && cmp whole.val given.val; then
        pass "$name" "$(tail -n 1 .out)"
    else
        fail "$name" "$(cat .err)"
    fi
}
: >in
json_lines text many/* >many.jsonl
json_lines content many/* >content.jsonl
tokens whole --threads 1 many
gives "JSON lines have the tokens of a folder of the same texts" many.jsonl
gives "JSON lines: one byte at a time on eight threads" --threads 8 --slice 1 many.jsonl
gives "JSON lines with the text in another field" --field content content.jsonl
cp many.jsonl in
gives "JSON lines from standard input" -
: >in
{ awk '{ printf "%s\r\n\n", $0 }' many.jsonl; printf '{"text":""}\n\n  \r\n{"text": ""}'; } >odd.jsonl
gives "JSON lines that end with CRLF, empty lines and texts, and a last line without an end" odd.jsonl
if grep -q "^2 lines were skipped: their text is empty" .out; then pass "empty texts are counted" "$(head -n 1 .out)"
else fail "empty texts are counted" "$(cat .out)"; fi
head -n 100 many.jsonl | gzip >parts.jsonl.gz; tail -n +101 many.jsonl | gzip >>parts.jsonl.gz
gives "JSON lines in two gzip members" parts.jsonl.gz
head -n 7 many.jsonl >first.jsonl; tail -n +8 many.jsonl | head -n 50 | gzip >middle.jsonl.gz
tail -n +58 many.jsonl >last.jsonl
gives "several files of JSON lines, one of them compressed" first.jsonl middle.jsonl.gz last.jsonl
awk '{ gsub(/[[:cntrl:]]/, ""); printf "%s ", $0 }' text >line
{ cat line line line >long; json_lines text long; head -n 30 many.jsonl; } >large.jsonl
tokens whole --val-fraction 0.4 large.jsonl
size=$(wc -c <long)
gives "a document of $size bytes in a JSON line: the same for other threads and slices" --val-fraction 0.4 --threads 3 \
    --slice 5000 large.jsonl
tokens whole text
gzip -k text
gives "a compressed text" text.gz
head -c 100000 text | gzip >members.gz; tail -c +100001 text | gzip -1 >>members.gz
gives "a text in two gzip members, cut anywhere" members.gz
head -c -20 text.gz >cut.gz
bad "a truncated gzip file" "cut.gz is damaged after [0-9]+ decompressed bytes: the file ends too early" \
    $tokens --tokenizer tokenizer.model --out-train bad.train --out-val bad.val cut.gz
{ cat text.gz; echo more; } >more.gz
bad "a gzip file with something behind it" "more.gz is damaged after [0-9]+ decompressed bytes: incorrect header" \
    $tokens --tokenizer tokenizer.model --out-train bad.train --out-val bad.val more.gz
: >none.jsonl.gz
bad "an empty gzip file" "none.jsonl.gz is damaged after 0 decompressed bytes: the file ends too early" \
    $tokens --tokenizer tokenizer.model --out-train bad.train --out-val bad.val none.jsonl.gz
cp text no.gz
bad "a text that is named as if it were compressed" "no.gz is damaged after 0 decompressed bytes: incorrect header" \
    $tokens --tokenizer tokenizer.model --out-train bad.train --out-val bad.val no.gz
: >some.zst
$tokens --tokenizer tokenizer.model --out-train bad.train --out-val bad.val some.zst >.out 2>.err
if grep -q "built without zstd" .err; then
    bad "zstd without libzstd" "some.zst cannot be read: these tools were built without zstd; install libzstd-dev" \
        $tokens --tokenizer tokenizer.model --out-train bad.train --out-val bad.val some.zst
elif ! command -v zstd >/dev/null; then
    echo "left out: zstd files, without the zstd command"
else
    zstd -q text -o text.zst
    gives "a text compressed by zstd" text.zst
    { head -c 100000 text | zstd -q; tail -c +100001 text | zstd -q; } >frames.zst
    gives "a text in two zstd frames" frames.zst
    head -c -20 text.zst >cut.zst
    bad "a truncated zstd file" "cut.zst is damaged after [0-9]+ decompressed bytes: the file ends too early" \
        $tokens --tokenizer tokenizer.model --out-train bad.train --out-val bad.val cut.zst
    tokens whole many.jsonl
    zstd -q many.jsonl -o many.jsonl.zst
    gives "JSON lines compressed by zstd" many.jsonl.zst
fi
rm some.zst
head -n 2 many.jsonl >two.jsonl
bad "too few JSON lines" "2 documents are too few to give whole ones to both training and validation" \
    $tokens --tokenizer tokenizer.model --out-train bad.train --out-val bad.val --save-seconds 0 two.jsonl
bad "too few JSON lines, once more" "2 documents are too few" \
    $tokens --tokenizer tokenizer.model --out-train bad.train --out-val bad.val --save-seconds 0 two.jsonl

# line NAME PATTERN LINE : as line 3 of a file it is refused
line() {
    { head -n 2 many.jsonl; printf "$3\n"; } >bad.jsonl
    bad "a line of JSON with $1" "bad.jsonl, line 3: found $2" $tokens --tokenizer tokenizer.model --out-train \
        bad.train --out-val bad.val bad.jsonl
}
line "no text" 'no field "text", expected a JSON object with its text in "text" \(--field NAME' '{"content": "a"}'
line "a number for a text" 'a field "text" that is not a string' '{"text": 7}'
line "no object" "JSON that is not an object" '["text"]'
line "an end that is missing" "invalid JSON at byte" '{"text": "a"'
line "more behind it" "invalid JSON at byte" '{"text": "a"} {"text": "b"}'
line "a zero byte" "a zero byte in the line" '{"text": "\0"}'
line "an escaped zero byte" '\\u0000 in a string' '{"text": "a\\u0000b"}'
line "invalid UTF-8" "invalid UTF-8 at byte 10 of the line" '{"text": "\377"}'
line "half of a surrogate pair" "invalid JSON at byte" '{"text": "\\ud83d"}'
gzip -kf bad.jsonl
bad "a bad line in a compressed file" "bad.jsonl.gz, line 3: found invalid JSON" $tokens \
    --tokenizer tokenizer.model --out-train bad.train --out-val bad.val bad.jsonl.gz
bad "a tokenizer from JSON lines" "many.jsonl is JSON lines, but a tokenizer is trained on text files" \
    $train --out none.model many.jsonl

python3 -c "
import json
for i in range(400): print(json.dumps({'text': 'a word ' * (500 if i % 8 == 3 else 1)}))" >lengths.jsonl
tokens whole --val-fraction 0.25 lengths.jsonl
long=$(tail -c +193 whole.val | python3 -c "
import struct, sys
ids = [str(id) for id, in struct.iter_unpack('<H', sys.stdin.buffer.read())]
documents = ' '.join(ids).split(' ' + ids[-1])
print(sum(len(d) > 1000 for d in documents), len(documents) - 1)")
read -r many_long all <<<"$long"
if [ "$all" = 100 ] && [ "$many_long" -ge 6 ] && [ "$many_long" -le 20 ]; then
    pass "long documents are as often for validation as short ones" "$many_long of $all, expected about 12"
else fail "long documents are as often for validation as short ones" "$many_long of $all, expected about 12 of 100"; fi

# ---------------------------------------------------------------- Parquet
python=${PYTHON:-python3}
if "$python" -c 'import pyarrow' 2>/dev/null; then
    mkdir parquet
    "$python" - <<'END'
import json
import pyarrow
import pyarrow.parquet

texts = [json.loads(line)["text"] for line in open("many.jsonl", encoding="utf-8", newline="\n")]
for name, part in (("1", texts[:300]), ("2", [None, *texts[300:], ""])):
    table = pyarrow.table({"id": list(range(len(part))), "text": pyarrow.array(part, pyarrow.string())})
    pyarrow.parquet.write_table(table, f"parquet/{name}.parquet", row_group_size=100)
END
    parquet=("$python" "$top/dev/data/parquet.py")
    into=(-- $tokens --tokenizer tokenizer.model --out-train given.train --out-val given.val -)
    tokens whole many.jsonl
    rm -f given.*
    if "${parquet[@]}" parquet "${into[@]}" >.out 2>.err && cmp whole.train given.train && cmp whole.val given.val &&
        grep -q "2 of them skipped because they have no text" .err; then
        pass "Parquet files have the tokens of JSON lines" "$(cat .err)"
    else
        fail "Parquet files have the tokens of JSON lines" "$(cat .err)"
    fi
    rm -f given.*
    head -c -100 parquet/2.parquet >parquet/3.parquet
    bad "a truncated Parquet file" "parquet/3.parquet cannot be read: .*; expected a Parquet file" "${parquet[@]}" \
        parquet "${into[@]}"
    if [ ! -e given.train ]; then pass "tokens of a part of the Parquet files are not taken for all" "no given.train"
    else fail "tokens of a part of the Parquet files are not taken for all" "given.train was written"; fi
    rm parquet/3.parquet
    bad "a column that a Parquet file does not have" "1.parquet has no column 'content', only id, text" \
        "${parquet[@]}" --field content parquet
    bad "a column that is no text" "column 'id' is of type int64, expected text" "${parquet[@]}" --field id parquet
    "$python" - <<'END'
import pyarrow
import pyarrow.parquet

talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
pyarrow.parquet.write_table(pyarrow.table({"messages": [talk], "weight": [0]}), "weighted.parquet")
END
    bad "a column of losses beside the conversations" '"weight" beside the messages has no effect' "${parquet[@]}" \
        --field messages weighted.parquet -- $tokens --conversations --tokenizer tokenizer.model --out-train bad.train -
    bad "a folder without Parquet files" "many holds no \*.parquet file" "${parquet[@]}" many
else
    echo "left out: Parquet files, without pyarrow"
fi

# ---------------------------------------------------------------- interrupted runs
# interrupt ARGUMENT… : a run that ends when its first output reaches a size, and leaves its state
interrupt() {
    (trap '' XFSZ; ulimit -f 200; exec $tokens --tokenizer tokenizer.model --out-train kept.train --out-val \
        kept.val --save-seconds 0 "$@") >.out 2>.err && return 1
    [ -f kept.train.state ] && [ -f kept.train.partial ] && [ ! -f kept.train ]
}
# continues NAME ARGUMENT… : the same command then gives the tokens of a run that was not interrupted
continues() {
    local name=$1 said empty
    shift
    tokens whole "$@" || { fail "$name" "$(cat .err)"; return; }
    empty=$(grep "their text is empty" .out)
    interrupt --threads 2 "$@" || { fail "$name" "it was not interrupted: $(cat .err)"; return; }
    tokens kept --threads 3 "$@"
    said=$(grep -E "^continuing after [1-9][0-9]* documents" .out)
    if [ "$said" ] && [ "$(grep "their text is empty" .out)" = "$empty" ] &&
        cmp whole.train kept.train && cmp whole.val kept.val && [ ! -e kept.train.state ] &&
        [ ! -e kept.train.partial ]; then
        pass "$name" "$said"
    else
        fail "$name" "$(cat .out .err)"
    fi
    rm -f kept.*
}
continues "an interrupted run over JSON lines gives the same tokens" many.jsonl
continues "an interrupted run over a compressed file gives the same tokens" parts.jsonl.gz
continues "an interrupted run over several files gives the same tokens" first.jsonl middle.jsonl.gz last.jsonl
awk '{ print; for (i = 0; i < NR % 4; i++) print "{\"text\": \"\"}" }' many.jsonl >gaps.jsonl
continues "an interrupted run over JSON lines, some of which have an empty text" gaps.jsonl
continues "an interrupted run over texts gives the same tokens" many
# killed while it waits for more
mkfifo feed
(cat many.jsonl; exec sleep 60) >feed &
feeder=$!
$tokens --tokenizer tokenizer.model --out-train kept.train --out-val kept.val --save-seconds 0 - <feed >.out \
    2>.err &
writer=$!
for ((i = 0; i < 200; i++)); do [ ! -f kept.train.state ] || break; sleep 0.05; done
sleep 0.3
cp kept.train.partial before
bad "outputs that another run is writing" "kept.train.partial is being written by another run" $tokens \
    --tokenizer tokenizer.model --out-train kept.train --out-val kept.val --save-seconds 0 -
if cmp before <(head -c "$(wc -c <before)" kept.train.partial); then
    pass "the other run keeps what it has written" "$(wc -c <before) bytes"
else fail "the other run keeps what it has written" "kept.train.partial has changed"; fi
kill -9 $writer $feeder
wait $writer $feeder 2>/dev/null
rm feed
cp many.jsonl in
tokens whole --threads 1 - <in
if tokens kept - <in && grep -q "^continuing after" .out && cmp whole.train kept.train && cmp whole.val kept.val; then
    pass "a killed run over standard input gives the same tokens" "$(grep continuing .out)"
else
    fail "a killed run over standard input gives the same tokens" "$(cat .out .err)"
fi
rm -f kept.*
interrupt - <in
sed 's/"n": 7,/"n": 8,/' many.jsonl >other
bad "another standard input than that of the interrupted run" \
    "the first [0-9]+ bytes of standard input are not those that the interrupted run has read: give the same input" \
    bash -c "$tokens --tokenizer tokenizer.model --out-train kept.train --out-val kept.val - <other"
if tokens kept - <in && cmp whole.train kept.train; then
    pass "after another standard input, the right one still continues the run" "$(grep continuing .out)"
else
    fail "after another standard input, the right one still continues the run" "$(cat .err)"
fi
rm -f kept.*
interrupt many.jsonl
cp many.jsonl changed.jsonl; head -n 1 many.jsonl >>changed.jsonl
cp kept.train.partial before
bad "a run over other inputs than the interrupted one" "kept.train.state belongs to an interrupted run with other" \
    $tokens --tokenizer tokenizer.model --out-train kept.train --out-val kept.val changed.jsonl
if cmp before kept.train.partial; then pass "which can still be continued" "$(wc -c <before) bytes"
else fail "which can still be continued" "kept.train.partial has changed"; fi
rm -f kept.*
interrupt many.jsonl
printf '\377' | dd of=kept.train.state bs=1 seek=20 conv=notrunc status=none
tokens whole many.jsonl
if tokens kept many.jsonl && cmp whole.train kept.train && ! grep -q continuing .out; then
    pass "a damaged state is not continued" "$(head -n 1 .out)"
else
    fail "a damaged state is not continued" "$(cat .out .err)"
fi
rm -f kept.*
if command -v script >/dev/null; then
    cat many.jsonl many.jsonl many.jsonl many.jsonl >four.jsonl
    cat four.jsonl four.jsonl four.jsonl four.jsonl >sixteen.jsonl
    script -qec "$tokens --tokenizer tokenizer.model --out-train shown.train --out-val shown.val --threads 1 \
        sixteen.jsonl" /dev/null </dev/null >.out 2>.err
    said=$(tr '\r' '\n' <.out | grep -aE '^\[#* *\] +[0-9]+ % \| [0-9.]+ MB \| [0-9.]+ MB/s \| [0-9.]+ M tokens/s' |
        tail -n 1)
    if [ "$said" ]; then pass "a terminal shows the progress" "$said"
    else fail "a terminal shows the progress" "$(head -c 300 .out)"; fi
fi

# ---------------------------------------------------------------- a long run of blanks
# blanks N : N blanks and a word.   ids FILE : its ids, each run of equal ones once
blanks() { head -c "$1" /dev/zero | tr '\0' ' '; echo word; }
ids() { $tokens --encode "$1" --tokenizer tokenizer.model 2>.err | uniq; }
blanks 1000000 >blanks-1
blanks 12000000 >blanks-12
if $train --vocab-size 1000 --out none.model text blanks-12 >.out 2>.err; then
    pass "a tokenizer is trained on text with 12 million blanks" "$(cat .out)"
else
    fail "a tokenizer is trained on text with 12 million blanks" "$(cat .err)"
fi
if [ -n "$(ids blanks-1)" ] && [ "$(ids blanks-1)" = "$(ids blanks-12)" ]; then
    pass "12 million blanks have the ids of a million" "$(ids blanks-1 | tr -s '\n' ' ')"
else
    fail "12 million blanks have the ids of a million" "$(ids blanks-12 | head -n 9) $(cat .err)"
fi
rm blanks-*

# ---------------------------------------------------------------- larger than memory
# large NAME MB : text of so many MB, with 2 threads in 64 MB of addresses (one heap for both; else it reserves 64 MB
# for each)
large() {
    local name=$1 bytes=0 size
    size=$(wc -c <text)
    for ((; bytes < $2 * 1000000; bytes += size)); do cat text; done >large
    if (export MALLOC_ARENA_MAX=1 && ulimit -v 64000 && tokens large --threads 2 large); then
        pass "$name" "$(tail -n 1 .out)"
    else
        fail "$name" "$(cat .err)"
    fi
}
large "100 MB of text are tokenized in less than 64 MB" 100
if [ "${2:-}" = all ]; then
    large "3 GB of text are tokenized in less than 64 MB" 3000
    if (ulimit -v 3000000 && $train --vocab-size 1000 --out large.model large >.out 2>.err) &&
        grep -q "a sample: the first 17" .out; then
        pass "a tokenizer is trained on a sample of 3 GB" "$(tr '\n' ' ' <.out)"
    else
        fail "a tokenizer is trained on a sample of 3 GB" "$(cat .out .err)"
    fi
fi
rm -f large large.train large.val

# ---------------------------------------------------------------- what is no text
give() { echo $tokens --tokenizer tokenizer.model --out-train bad.train --out-val bad.val; }
# characters lie across the ends of what is read at a time
{ printf a; yes "$(printf '\303\251')" | head -n 1000000 | tr -d '\n'; } >long
{ cat long; printf '\377 and on'; } >broken; bad "a byte that is no UTF-8, far into a file" \
    "broken is not text: invalid UTF-8 at byte 2000001;" $(give) broken
{ cat long; printf '\0 and on'; } >broken; bad "a zero byte, far into a file" \
    "broken is not text: a zero byte at byte 2000001;" $(give) broken
{ cat long; printf '\342\202'; } >broken; bad "a character cut by the file's end" \
    "broken is not text: invalid UTF-8 at byte 2000001;" $(give) broken
printf '\377' >broken
bad "a byte that is no UTF-8, alone" "invalid UTF-8 at byte 0;" $(give) broken
bad "a tokenizer from what is no text" "broken is not text" $train --vocab-size 600 --out none.model broken
: >empty; bad "an empty file" "1 files were given, none with text" $(give) empty
echo few >small; bad "too little text" "too few to split" $(give) small
bad "a pipe, which cannot be read twice" "/dev/fd/[0-9]+ is not a regular file, but it is read twice" $(give) \
    <(cat text)
mkfifo pipe
bad "a named pipe that nobody writes to" "pipe is a pipe, expected a text file: write" timeout 5 $(give) pipe
bad "a device" "/dev/zero is a device, expected a text file: write" timeout 5 $(give) /dev/zero
bad "a tokenizer from a named pipe" "pipe is a pipe, expected a text file" timeout 5 $train --out \
    none.model pipe
bad "a named pipe as tokenizer" "pipe is a pipe, expected a regular file" timeout 5 $tokens --tokenizer pipe \
    --out-train bad.train --out-val bad.val text
if command -v python3 >/dev/null; then
    python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind("socket")'
    bad "a socket" "socket is a socket, expected a text file" timeout 5 $(give) socket
fi
bad "a text that is not there" "nowhere cannot be found" $(give) nowhere
bad "no threads" "--threads 0: expected a whole number from 1" $(give) --threads 0 text
bad "words for threads" "--threads two: expected a whole number" $(give) --threads two text
bad "a folder that cannot be written to" "none/bad.train.partial cannot be written" $tokens --tokenizer \
    tokenizer.model --out-train none/bad.train --out-val bad.val text
# KB a file
bad "a disk that is full" "bad.train.partial cannot be written to: .*; is the disk full" bash -c \
    "trap '' XFSZ; ulimit -f 400; $(give) text"
mkdir mixed; cp text mixed/a; cp broken mixed/b; : >mixed/c; cp letters mixed/d
tokens plain text letters; cp .out plain.out
if tokens mixed mixed && cmp plain.train mixed.train && cmp plain.val mixed.val &&
    grep -q "^1 files were skipped: they are empty or not UTF-8 text" .out; then
    pass "files in a folder that are not text are skipped" "$(head -n 1 .out)"
else
    fail "files in a folder that are not text are skipped" "$(cat .out .err)"
fi

# ---------------------------------------------------------------- outputs that would replace inputs
state() { find . -type f ! -name .out ! -name .err -printf '%C@ %i %p\n' | sort; }
# keeps NAME PATTERN COMMAND… : the command is refused, and no file is changed, made or removed
keeps() {
    local name=$1 before said
    before=$(state)
    said=$(bad "$@")
    if [ "$before" != "$(state)" ]; then said="FAIL $name: a file has changed"; fi
    if [[ $said == pass* ]]; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
    echo "$said"
}
mkdir inputs
cp text inputs/t.txt
cp tokenizer.model inputs/k.model
ln -s inputs/t.txt symbolic
ln inputs/t.txt hard
cp text name.partial
input="would overwrite the input"
tokenize=($tokens --tokenizer inputs/k.model --out-val bad.val)
keeps "tokens onto their text" "--out-train inputs/t.txt $input inputs/t.txt: choose another name" \
    "${tokenize[@]}" --out-train inputs/t.txt inputs/t.txt
keeps "tokens onto their text, spelled differently" "--out-train ./inputs/../inputs/t.txt $input inputs/t.txt" \
    "${tokenize[@]}" --out-train ./inputs/../inputs/t.txt inputs/t.txt
keeps "tokens onto a symbolic link to their text" "--out-train symbolic $input inputs/t.txt" "${tokenize[@]}" \
    --out-train symbolic inputs/t.txt
keeps "tokens onto a hard link to their text" "--out-train hard $input inputs/t.txt" "${tokenize[@]}" --out-train \
    hard inputs/t.txt
keeps "tokens onto a text of the folder that they come from" "--out-train inputs/t.txt $input inputs/t.txt" \
    "${tokenize[@]}" --out-train inputs/t.txt inputs
keeps "validation tokens onto their text" "--out-val inputs/t.txt $input inputs/t.txt" $tokens --tokenizer \
    inputs/k.model --out-train bad.train --out-val inputs/t.txt inputs/t.txt
keeps "tokens onto a text that is empty" "--out-train empty $input empty" "${tokenize[@]}" --out-train empty \
    text empty
keeps "tokens onto the tokenizer" "--out-train inputs/k.model $input inputs/k.model" "${tokenize[@]}" --out-train \
    inputs/k.model text
keeps "tokens through a file that is the text" "--out-train name $input name.partial" "${tokenize[@]}" --out-train \
    name name.partial
keeps "a tokenizer onto its text" "--out inputs/t.txt $input ./inputs/t.txt" $train --vocab-size 600 \
    --out inputs/t.txt ./inputs/t.txt
keeps "both outputs in one file" "--out-train x and --out-val x would overwrite each other" $tokens --tokenizer \
    tokenizer.model --out-train x --out-val x text
keeps "both outputs in one file, spelled differently" "--out-train x and --out-val inputs/../x would overwrite" \
    $tokens --tokenizer tokenizer.model --out-train x --out-val inputs/../x text
keeps "an output through the other one" "--out-train x.partial and --out-val x would overwrite each other" \
    $tokens --tokenizer tokenizer.model --out-train x.partial --out-val x text
keeps "a folder as output" "inputs is a folder, expected the name of a file" "${tokenize[@]}" --out-train inputs text
ln -sf inputs/t.txt linked.partial
before=$(cksum inputs/t.txt)
if "${tokenize[@]}" --out-train linked text >.out 2>.err && [ "$before" = "$(cksum inputs/t.txt)" ]; then
    pass "an unfinished output that is a link is not written through" "$(head -n 1 .out)"
else
    fail "an unfinished output that is a link is not written through" "$(cksum inputs/t.txt) $(cat .err)"
fi

# ---------------------------------------------------------------- a standard output that is full
for command in "$tokens --tokenizer tokenizer.model --out-train full.train --out-val full.val text" \
    "$train --vocab-size 600 --out full.model text" "$tokens --encode text --tokenizer tokenizer.model"; do
    name=${command%% *}
    bad "${name#bin/} into a full standard output" "standard output cannot be written: No space left on device" \
        bash -c "$command >/dev/full"
done
$tokens --tokenizer tokenizer.model --out-train closed.train --out-val closed.val text >&- 2>.err
cp .err closed.err
tokens open text
if cmp closed.train open.train && cmp closed.val open.val; then
    pass "a closed standard output does not end up in the tokens" "$(cat closed.err)"
else
    fail "a closed standard output does not end up in the tokens" "closed.train and open.train differ"
fi

echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
