#!/usr/bin/env bash
# chat.sh [PROGRAM] : instruction data. Conversations become the ids and the targets that their template asks for, by
# hand; what is no conversation is refused with its line; PROGRAM trains on the targets alone, and eval_llama3 next to
# it evaluates them.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. dev/test/checks.sh
program=$(realpath "${1:-build/cpu-fp32/train_llama3}")
evaluate=$(program_for --eval)
top=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export LC_ALL=C

cd "$work" || exit
mkdir bin
ln -s "${program%/*}/tokens_llama3" bin/
chat="bin/tokens_llama3 --conversations"

# ---------------------------------------------------------------- tokenizers whose ids can be told by hand
# Each tokenizer has its own folder, because the tool writes tokenizer_config.json next to token files, which belongs to
# the tokenizer that is there. Token files of Llama 3's tokenizer are made next to it.
mkdir chatml other shared
# base64 ID BYTE… : a token's line
base64() {
    local alphabet=ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/ a=$2 b=${3:-0}
    printf '%s%s%s= %d\n' "${alphabet:a >> 2:1}" "${alphabet:((a & 3) << 4) + (b >> 4):1}" \
        "$([ $# = 3 ] && echo "${alphabet:(b & 15) << 2:1}" || echo =)" "$1"
}
# bytes FIRST : the 256 bytes from that id on, then "\n\n" and "er"
bytes() {
    local i
    for ((i = 0; i < 256; i++)); do base64 $(($1 + i)) $i; done
    base64 $(($1 + 256)) 10 10
    base64 $(($1 + 257)) 101 114
}
# a byte is its own id and 3, "\n\n" 259, "er" 260, <|endoftext|> 0, <|im_start|> 1, <|im_end|> 2
{
    printf '%s\n' 'byte-level-bpe 1' 'tokens 261' 'missing 0'
    printf '%s\n' 'bos <|im_start|>' 'eos <|endoftext|>' 'eot <|im_end|>'
    printf '%s\n' 'split  ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+'
    printf '%s\n' 'special <|endoftext|> 0' 'special <|im_start|> 1' 'special <|im_end|> 2'
    bytes 3
} >chatml/tokenizer.model
# a byte is its own id, "\n\n" 256, "er" 257; <|begin_of_text|> 258, <|end_of_text|> 259, the headers' 264 and 265,
# <|eot_id|> 267
bytes 0 >llama3.model

# dump FILE : ids, a target with a star behind it
dump() {
    local count=$(($(od -An -v -tu8 -j24 -N8 "$1")))
    paste -d' ' <(od -An -v -w2 -tu2 -j192 -N$((2 * count)) "$1") <(od -An -v -w1 -tu1 -j$((192 + 2 * count)) "$1") |
        awk '{ printf "%s%s%s", (NR > 1 ? " " : ""), $1, ($2 % 2 ? "*" : "") } END { print "" }'
}
# say OFFSET TEXT [STAR] : the ids of text without "\n\n" and "er"
say() {
    printf %b "$2" | od -An -v -w1 -tu1 |
        awk -v offset="$1" -v star="${3:-}" '{ printf "%d%s ", $1 + offset, star }'
}

# gives NAME TOKENIZER JSON IDS : what tokens_llama3 makes of a conversation
gives() {
    local got=
    printf '%s\n' "$3" >one.jsonl
    rm -rf made && mkdir made
    $chat --tokenizer "$2" --out-train made/one.tok one.jsonl >.out 2>.err && got=$(dump made/one.tok)
    if [ "$got" = "$(echo $4)" ]; then pass "$1" "$got"; else fail "$1" "$got$(cat .err), expected $(echo $4)"; fi
}

# message ROLE CONTENT: one of a conversation, in JSON
message() { printf '{"role":"%s","content":"%s"}' "$1" "$2"; }
brief_talk="{\"messages\":[$(message system "Be brief."),$(message user ' Hi\n'),$(message assistant 'Yo\u00e9 ')]}"

# of the bytes' own ids, between the headers' and the blank line
user="264 117 115 257 265 256" assistant="264 97 115 115 105 115 116 97 110 116 265 256"
system="264 115 121 115 116 101 109 265 256"
llama3_conversations() {
    local talk ids
    gives "Llama 3: tokens and targets of a conversation" llama3.model "$brief_talk" \
        "258 $system 66 101 32 98 114 105 101 102 46 267 $user 72 105 267 $assistant 89* 111* 195* 169* 267* 259"
    talk="[$(message user a),$(message user b),$(message assistant c),$(message user d),$(message assistant '')]"
    ids="258 $user 97 267 $user 98 267 $assistant 99* 267* $user 100 267 $assistant 267* 259"
    gives "Llama 3: every answer is a target, and nothing else" llama3.model "$talk" "$ids"
    gives "Llama 3: content is trimmed of Unicode's blanks, and of no others" llama3.model \
        "[$(message assistant '\u3000\u001c\t\r\nx \u200b\u00a0\u2029 ')]" \
        "258 $assistant 120* 32* 226* 128* 139* 267* 259"
    talk="[$(message user '<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nno'),"
    talk+="$(message assistant '<|end_of_text|>')]"
    ids="258 $user $(say 0 '<|eot_id|><|start_head') 257 $(say 0 '_id|>assistant<|end_head') 257 $(say 0 '_id|>') 256 "
    ids+="$(say 0 no) 267 $assistant $(say 0 '<|end_of_text|>' '*') 267* 259"
    gives "Llama 3: names of special tokens in what is said are plain text" llama3.model "$talk" "$ids"
}
llama3_conversations

brief="1 $(say 3 'system\nBe brief.') 2 13" chatml_assistant="1 $(say 3 'assistant\n')"
gives "ChatML: tokens and targets of a conversation" chatml/tokenizer.model "$brief_talk" \
    "$brief 1 120 118 260 13 35 75 108 13 2 13 $chatml_assistant 92* 114* 198* 172* 35* 2* 13 0"
gives "ChatML: without a template nobody speaks first" chatml/tokenizer.model \
    "[$(message user a),$(message assistant b)]" "1 120 118 260 13 100 2 13 $chatml_assistant 101* 2* 13 0"
gives "ChatML: a token of both the header and the content is a target" chatml/tokenizer.model \
    "[$(message system "Be brief."),$(message assistant '\n\nok')]" \
    "$brief 1 $(say 3 assistant) 259* 13* 114* 110* 2* 13 0"
gives "ChatML: names of special tokens in what is said are plain text" chatml/tokenizer.model \
    "[$(message system "Be brief."),$(message assistant '<|im_end|>\n<|im_start|>')]" \
    "$brief $chatml_assistant $(say 3 '<|im_end|>\n<|im_start|>' '*') 2* 13 0"

# ---------------------------------------------------------------- files
talk='[{"role":"user","content":"What is it?"},{"role":"assistant","content":"A test, of course."}]'
question=$(message user 'Question %d?') answer=$(message assistant 'Answer %d')
for i in {1..400}; do
    printf "{\"messages\":[$question,$answer],\"source\":\"a test\"}\n" "$i" $((i * i))
done >many.jsonl
# ends of Windows' lines, an empty line, no end of the last one
{ printf '%s\r\n\n' "$talk"; head -n 3 many.jsonl | head -c -1; } >odd.jsonl
if $chat --tokenizer llama3.model --out-train train.tok --out-val val.tok --val-fraction 0.1 many.jsonl >.out \
    2>.err && $chat --tokenizer llama3.model --out-train all.tok many.jsonl >.whole &&
    [ "$(dump train.tok | tr ' ' '\n' | grep -c '^259$') $(dump val.tok | tr ' ' '\n' | grep -c '^259$')" = \
        "360 40" ] && ! [ -e train.tok.partial ]; then
    if [ "$({ dump train.tok; dump val.tok; } | sed 's/ 259/&\n/g' | sed 's/^ //' | grep . | sort)" = \
        "$(dump all.tok | sed 's/ 259/&\n/g' | sed 's/^ //' | grep . | sort)" ]; then
        pass "a tenth of the conversations validates, each goes to one file, whole" "$(tr '\n' ' ' <.out)"
    else
        fail "a tenth of the conversations validates, each goes to one file, whole" \
            "the two files hold others than one file of all"
    fi
else fail "a tenth of the conversations validates, each goes to one file, whole" "$(cat .out .err)"; fi
if $chat --tokenizer llama3.model --out-train odd.tok odd.jsonl >.out 2>.err &&
    [ "$(dump odd.tok | tr ' ' '\n' | grep -c '^259$')" = 4 ]; then
    pass "line ends of Windows, an empty line, no end of the last line" "$(tail -n 1 .out)"
else fail "line ends of Windows, an empty line, no end of the last line" "$(cat .out .err)"; fi
if $chat --tokenizer llama3.model --out-train piped.tok <(cat many.jsonl) >.out 2>.err &&
    cmp -s piped.tok all.tok; then
    pass "a pipe is read like a file" "$(tail -n 1 .out)"
else
    fail "a pipe is read like a file" "$(cat .out .err)"
fi

# ---------------------------------------------------------------- packing
# documents FILE : a line for each, without padding
documents() { dump "$1" | sed 's/ 259/&\n/g' | sed 's/^ //' | grep -vxE '(259)?'; }
# cut FILE WINDOW : the documents that cross the end of a window, and what follows the last window
cut_documents() {
    dump "$1" | tr -d '*' | tr ' ' '\n' | awk -v window="$2" '
        !inside { first = NR - 1; inside = 1 }
        $1 == 259 {
            inside = 0
            if (int(first / window) != int((NR - 1) / window)) printf "tokens %d to %d are cut, ", first, NR - 1
        }
        END { if (NR % window != 1 || inside) printf "%d tokens are not windows and one more", NR }'
}
# packs NAME FILE.jsonl WINDOW PATTERN : the conversations of FILE, each once and whole; what is printed matches
packs() {
    local cut
    rm -f packed.tok loose.tok
    if $chat --tokenizer llama3.model --out-train loose.tok "$2" >.out 2>.err &&
        $chat --tokenizer llama3.model --out-train packed.tok --pack "$3" "$2" >.out 2>.err &&
        grep -qE "^packed.tok: $4 of $3 tokens, [0-9.]+ % .* --seq $3 --doc-mask" .out; then
        cut=$(cut_documents packed.tok "$3")
        if [ -z "$cut" ] && [ "$(documents packed.tok | sort)" = "$(documents loose.tok | sort)" ]; then
            pass "packed: $1" "$(grep windows .out)"
        else
            fail "packed: $1" "${cut:-there are other conversations than without --pack}"
        fi
    else fail "packed: $1" "$(cat .out .err), expected $4"; fi
}
for i in {1..60}; do
    printf '[%s,%s]\n' "$(message user "Count to $i.")" "$(message assistant "$(seq -s, "$i")")"
done >counts.jsonl
cat many.jsonl counts.jsonl >some.jsonl
packs "each conversation is there once, whole" some.jsonl 512 '460 conversations in [0-9]+ windows'
head -n 1 many.jsonl >first.jsonl
cat first.jsonl first.jsonl >two.jsonl
$chat --tokenizer llama3.model --out-train first.tok first.jsonl >.out
length=$(dump first.tok | wc -w)
packs "one conversation" first.jsonl 512 '1 conversations in 1 windows'
packs "one of the window's length" first.jsonl "$length" '1 conversations in 1 windows'
packs "one that is a token shorter" first.jsonl $((length + 1)) '1 conversations in 1 windows'
packs "two that fit exactly" two.jsonl $((2 * length)) '2 conversations in 1 windows'
packs "two that are a token too long" two.jsonl $((2 * length - 1)) '2 conversations in 2 windows'
rm -f packed.tok
if $chat --tokenizer llama3.model --out-train packed.tok --pack $((length - 1)) two.jsonl >.out 2>.err &&
    grep -q "^packed.tok: 2 conversations in 4 windows" .out &&
    grep -q "^packed.tok: 2 conversations are longer than $((length - 1)) tokens and were cut" .out &&
    [ "$(documents packed.tok)" = "$(documents first.tok; documents first.tok)" ] &&
    [ "$(dump packed.tok | tr -cd '*' | wc -c)" = $((2 * $(dump first.tok | tr -cd '*' | wc -c))) ]; then
    pass "packed: one that is a token longer is cut, and that is reported" "$(tail -n 1 .out)"
else
    fail "packed: one that is a token longer is cut, and that is reported" "$(cat .out .err) $(dump packed.tok)"
fi
if $chat --tokenizer llama3.model --out-train a.tok --out-val av.tok --val-fraction 0.1 --pack 256 many.jsonl \
    >.out 2>.err && $chat --tokenizer llama3.model --out-train b.tok --out-val bv.tok --val-fraction 0.1 \
    --pack 256 <(cat many.jsonl) >.out 2>.err && cmp a.tok b.tok && cmp av.tok bv.tok &&
    [ "$({ documents a.tok; documents av.tok; } | sort)" = "$(documents all.tok | sort)" ]; then
    pass "packed: the same file each time, also of a pipe, and one for validation" "$(grep windows .out | tr '\n' ' ')"
else
    fail "packed: the same file each time, also of a pipe, and one for validation" "$(cat .out .err)"
fi

# more than the memory allowed
for i in {1..10}; do cat many.jsonl; done >ten.jsonl
for i in {1..150}; do cat ten.jsonl; done >large.jsonl
if (ulimit -v 40000 && $chat --tokenizer llama3.model --out-train large.tok large.jsonl >.out 2>.err) &&
    [ "$(wc -c <large.jsonl)" -gt 60000000 ]; then
    pass "$(($(wc -c <large.jsonl) / 1000000)) MB of conversations are read in less than 40 MB" "$(tail -n 1 .out)"
else fail "more conversations than memory" "$(cat .out .err)"; fi
if (ulimit -v 60000 && $chat --tokenizer llama3.model --out-train large-packed.tok --pack 512 large.jsonl >.out \
    2>.err) && [ -z "$(cmp -n 20 large.tok large-packed.tok)" ]; then
    pass "they are packed in less than 60 MB" "$(tail -n 1 .out)"
else fail "more conversations to pack than memory" "$(cat .out .err)"; fi
rm -f ten.jsonl large.* large-packed.tok

# ---------------------------------------------------------------- what is no conversation
# line NAME PATTERN JSON : behind a good line
line() {
    { printf '%s\n' "$talk"; printf '%s\n' "$3"; } >wrong.jsonl
    bad "$1" "wrong.jsonl, line 2: $2.*; expected one conversation per line" $chat --tokenizer llama3.model \
        --out-train bad.tok wrong.jsonl
}
line "no JSON" "invalid JSON at byte [0-9]+ of the line, 'hello" '{"messages": hello}'
line "half a line of JSON" "invalid JSON at byte" '[{"role":"user","content":"a"}'
line "two values on a line" "invalid JSON at byte [0-9]+ of the line, '\[" "$talk $talk"
line "half a surrogate" "invalid JSON at byte" '[{"role":"user","content":"\ud800"}]'
line "a number" "there is no list of messages" '12'
line "no messages" "there is no list of messages" '{"conversation":[]}'
line "messages that are no list" "there is no list of messages" '{"messages":"hello"}'
line "an empty conversation" "the conversation is empty" '{"messages":[]}'
line "a message that is none" "message 1 is not an object" '["hello"]'
line "a message without a role" "message 2 has no \"role\" that is a string" \
    '[{"role":"user","content":"a"},{"content":"b"}]'
line "an unknown role" "message 1 has the unknown role 'tool'" '[{"role":"tool","content":"a"}]'
line "a role with a capital" "message 1 has the unknown role 'User'" '[{"role":"User","content":"a"}]'
line "a message without content" "message 1 has no \"content\" that is a string" '[{"role":"user"}]'
line "content in parts" "message 1 has no \"content\" that is a string" \
    '[{"role":"user","content":[{"type":"text","text":"a"}]}]'
line "content that is null" "message 2 has no \"content\" that is a string" \
    '[{"role":"user","content":"a"},{"role":"assistant","content":null}]'
line "calls of tools" "message 1 has \"tool_calls\", which cannot be rendered" \
    '[{"role":"assistant","content":"","tool_calls":[{"id":"1"}]}]'
line "tools" "\"tools\" cannot be rendered" '{"tools":[{"name":"f"}],"messages":[{"role":"user","content":"a"}]}'
line "a zero in a string" ".u0000 in a string" '[{"role":"user","content":"a\u0000b"}]'
{ printf '%s\n' "$talk"; printf '[{"role":"user","content":"\377"}]\n'; } >wrong.jsonl
bad "no UTF-8" "wrong.jsonl, line 2: invalid UTF-8 at byte 27" $chat --tokenizer llama3.model --out-train bad.tok \
    wrong.jsonl
{ printf '%s\n' "$talk"; printf '[{"role":"user","content":"\0"}]\n'; } >wrong.jsonl
bad "a zero byte" "wrong.jsonl, line 2: a zero byte" $chat --tokenizer llama3.model --out-train bad.tok wrong.jsonl
if { printf '%s\n' '[{"role":"assistant","content":"a\\u0000b"}]'; } >one.jsonl && rm -f one.tok &&
    $chat --tokenizer llama3.model --out-train one.tok one.jsonl >.out 2>.err; then
    pass "a backslash before u0000 is text" "$(dump one.tok)"
else
    fail "a backslash before u0000 is text" "$(cat .err)"
fi
printf '[{"role":"user","content":"a"}]\n' >wrong.jsonl
bad "nothing to learn" "1 conversations leave bad.tok without a target" $chat --tokenizer llama3.model --out-train \
    bad.tok wrong.jsonl
printf '%s\n' "$talk" >one.jsonl
bad "too few to validate" "1 conversations leave bad.val without a target" $chat --tokenizer llama3.model \
    --out-train bad.tok --out-val bad.val one.jsonl
bad "a folder for conversations" "cannot be read: Is a directory" $chat --tokenizer llama3.model --out-train \
    bad.tok shared
bad "conversations that are not there" "nowhere cannot be opened" $chat --tokenizer llama3.model --out-train \
    bad.tok nowhere
sed 's/im_start/start/' chatml/tokenizer.model >other/tokenizer.model
bad "a tokenizer without a template" "other/tokenizer.model does not have the special tokens of a chat template" \
    $chat --tokenizer other/tokenizer.model --out-train bad.tok one.jsonl
bad "an output that exists" "all.tok exists already" $chat --tokenizer llama3.model --out-train all.tok one.jsonl
bad "one file for both" "--out-train bad.tok and --out-val bad.tok would overwrite each other" $chat \
    --tokenizer llama3.model --out-train bad.tok --out-val bad.tok one.jsonl
bad "one file for both, spelled differently" "--out-train bad.tok and --out-val ./bad.tok would overwrite" $chat \
    --tokenizer llama3.model --out-train bad.tok --out-val ./bad.tok one.jsonl
bad "tokens onto the tokenizer" "--out-train llama3.model would overwrite the input llama3.model" $chat \
    --tokenizer llama3.model --out-train llama3.model one.jsonl
bad "tokens onto the conversations" "--out-train ./one.jsonl would overwrite the input one.jsonl" $chat \
    --tokenizer llama3.model --out-train ./one.jsonl one.jsonl
cp one.jsonl talk.mask.partial
bad "tokens through a file of conversations" "--out-train talk would overwrite the input talk.mask.partial" $chat \
    --tokenizer llama3.model --out-train talk talk.mask.partial
mkfifo pipe
bad "a named pipe that nobody writes to" "pipe is a pipe, expected a text file" timeout 5 $chat \
    --tokenizer llama3.model --out-train bad.tok pipe
bad "a device" "/dev/zero is a device, expected a text file" timeout 5 $chat --tokenizer llama3.model \
    --out-train bad.tok /dev/zero
bad "conversations into a full standard output" "standard output cannot be written: No space left on device" bash -c \
    "$chat --tokenizer llama3.model --out-train full.tok many.jsonl >/dev/full"
bad "--help into a full standard output" "standard output cannot be written: No space left" bash -c \
    "bin/tokens_llama3 --help >/dev/full"
bad "no tokenizer" "--tokenizer is missing, which --conversations needs" $chat --out-train bad.tok one.jsonl
bad "a fraction without a file" "--val-fraction has no effect without --out-val" $chat --tokenizer llama3.model \
    --out-train bad.tok --val-fraction 0.1 one.jsonl
for window in 0 1 16777216 x 12x; do
    bad "--pack '$window'" "--pack $window: expected a whole number from 2 to 16777215" \
        $chat --tokenizer llama3.model --out-train bad.tok --pack "$window" one.jsonl
done
bad "--pack without a number" "--pack needs a value" $chat --tokenizer llama3.model --out-train bad.tok \
    one.jsonl --pack
sed 's/eos <|endoftext|>/eos <|im_end|>/' chatml/tokenizer.model >shared/tokenizer.model
if $chat --tokenizer shared/tokenizer.model --out-train shared/packed.tok --pack 512 one.jsonl >.out 2>.err; then
    pass "--pack where a message ends as a document does" "$(tail -n 1 .out)"
else fail "--pack where a message ends as a document does" "$(cat .err)"; fi
# KB a file
bad "a disk that is full" "bad.tok.*; is the disk full" bash -c \
    "trap '' XFSZ; ulimit -f 20; $chat --tokenizer llama3.model --out-train bad.tok many.jsonl"

# ---------------------------------------------------------------- the program trains on the targets alone
mkdir model
cat >model/config.json <<'END'
{"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
 "intermediate_size": 64, "vocab_size": 514, "max_position_embeddings": 512}
END
head -n 4 many.jsonl >four.jsonl
$chat --tokenizer llama3.model --out-train four.tok four.jsonl >.out
count=$(($(od -An -v -tu8 -j24 -N8 four.tok))) targets=$(dump four.tok | tr -cd '*' | wc -c)
seq=$(((count - 1) / 2)) # two windows
# with FILE TRANSLATION : four.tok with another mask, or none
with() { { head -c $((192 + 2 * count)) four.tok; tail -c "$count" four.tok | tr "${@:2}"; } >"$1"; }
with others.tok '\0\1\2' '\1\0\3'
with everything.tok '\0\2' '\1\3'
# number FILE NAME : a figure of a JSON line
number() { sed -n "s/.*\"$2\":\([-0-9.e+]*\).*/\1/p" "$1" | tail -n 1; }
train=(timeout 60 "$program" --model model --tokenizer llama3.model --data four.tok --seq "$seq" --batch 1 --steps 1 \
    --lr 0 --min-lr 0 --threads 1)
if [ $((count % 2)) = 1 ] && "${train[@]}" --ranks 2 --val four.tok --val-every 1 --out run >.out 2>.err; then
    for file in four others everything; do
        timeout 60 "$evaluate" --model run/latest --tokenizer llama3.model --eval $file.tok --seq "$seq" --threads 1 \
            >.eval-$file 2>>.err
    done
    seen=$(number run/metrics.jsonl val_tokens)
    if [ "$(number .eval-four tokens) $(number .eval-others tokens) $seen" = \
        "$targets $((count - 1 - targets)) $targets" ]; then
        pass "--eval and --val count the targets" "$seen of $((count - 1))"
    else
        fail "--eval and --val count the targets" \
            "$(cat .eval-*) $seen, expected $targets and $((count - 1 - targets)): $(cat .err)"
    fi
    # sums of losses over targets and over all others are the sum over all
    difference=$(awk -v n="$targets" -v count=$((count - 1)) -v a="$(number .eval-four loss)" \
        -v b="$(number .eval-others loss)" -v all="$(number .eval-everything loss)" '
        BEGIN {
            d = (a * n + b * (count - n)) / count - all
            printf "%.2e %d", d, (d < 1e-5 && d > -1e-5 && (a - all) ^ 2 > 1e-6)
        }')
    if [ "${difference#* }" = 1 ]; then
        pass "the losses of targets and others add up to that of all" "difference ${difference% *}, bound 1e-5"
    else
        fail "the losses of targets and others add up to that of all" "$difference: $(cat .eval-*)"
    fi
    # two ranks with a window each, and as many targets as fall there
    step_loss=$(sed -n 's/.*"step":1,"loss":\([0-9.e+-]*\).*/\1/p' run/metrics.jsonl)
    difference=$(awk -v a="$(number .eval-four loss)" -v b="$step_loss" \
        'BEGIN { d = a - b; printf "%.2e %d", d, (d < 1e-5 && d > -1e-5 && b > 0) }')
    if [ "${difference#* }" = 1 ]; then
        pass "a step's loss on 2 ranks is the mean over all targets" \
            "difference from --eval ${difference% *}, bound 1e-5"
    else
        fail "a step's loss on 2 ranks is the mean over all targets" "$difference: $(cat run/metrics.jsonl .eval-four)"
    fi
else fail "the program trains on a file with a mask" "$count tokens: $(cat .err)"; fi

# ---------------------------------------------------------------- it trains on packed conversations as on single ones
rm -rf packed.tok single run
mkdir single
head -n 6 counts.jsonl >six.jsonl
i=0
while IFS= read -r line; do
    i=$((i + 1))
    printf '%s\n' "$line" | $chat --tokenizer llama3.model --out-train single/$i.tok --pack 160 /dev/stdin
done <six.jsonl >.out
$chat --tokenizer llama3.model --out-train packed.tok --pack 160 six.jsonl >.out
packed=(--model model --tokenizer llama3.model --seq 160 --doc-mask --threads 1)
windows=$((($(od -An -v -tu8 -j24 -N8 packed.tok) - 1) / 160))
# trains NAME DATA BATCH : one step on all windows; its loss and the norm of its gradient
trains() {
    timeout 60 "$program" "${packed[@]}" --data "$2" --batch "$3" --steps 1 --out "run-$1" >.out-"$1" 2>&1 &&
        timeout 60 "$evaluate" "${packed[@]}" --model "run-$1/latest" --eval "$2" >.eval-"$1" 2>>.out-"$1" &&
        echo "$(number "run-$1/metrics.jsonl" loss) $(number "run-$1/metrics.jsonl" grad_norm) $(
            number ".eval-$1" loss) $(number ".eval-$1" tokens)"
}
if single=$(trains single 'single/*.tok' 6) && together=$(trains packed packed.tok "$windows"); then
    worst=$(echo "$single $together" | awk '
        {
            for (i = 1; i < 4; i++) {
                d = $i / $(i + 4) - 1
                if (d < 0) d = -d
                if (d > worst) worst = d
            }
            printf "%.2e %d", worst, worst < 1e-6 && $4 == $8
        }')
    if [ "${worst#* }" = 1 ] && [ "$windows" -lt 5 ]; then
        pass "packed: loss, gradient norm, and loss after the step of one conversation a window" \
            "$windows windows instead of 6, off by ${worst% *}, bound 1e-6"
    else
        fail "packed: loss, gradient norm, and loss after the step of one conversation a window" \
            "$windows windows; $together, expected $single"
    fi
else
    fail "packed: loss, gradient norm, and loss after the step of one conversation a window" "$(cat .out-*)"
fi
bad "packed conversations with another --seq" "packed.tok .* windows of 160 tokens, --seq is 128: use --seq 160" \
    "$evaluate" "${packed[@]}" --model run-packed/latest --seq 128 --eval packed.tok
bad "packed conversations without --doc-mask" "packed.tok .*add --doc-mask" "$evaluate" --model run-packed/latest \
    --tokenizer llama3.model --seq 160 --eval packed.tok

echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
