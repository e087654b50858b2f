#!/usr/bin/env bash
# generation.sh [PROGRAM] : --prompt, --prompts and --chat of generate_llama3, and --score and --choices of eval_llama3,
# as a user meets them. The same text on every layout, end tokens of the model's directory, commands, Ctrl-C, the end of
# the input, and what is refused. PROGRAM is train_llama3; the others are next to it.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. dev/test/checks.sh
program=$(realpath "${1:-build/cpu-fp32/train_llama3}")
tokens=${program%/*}/tokens_llama3 generate=$(program_for --prompt) evaluate=$(program_for --eval)
top=$PWD
work=$(mktemp -d)
chat=
trap '[ -z "$chat" ] || kill -KILL "$chat" 2>/dev/null; rm -rf "$work"' EXIT
cd "$work" || exit
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_mpi_yield_when_idle=1 LC_ALL=C

{ "$top/dev/test/sample_text.sh" sample && VOCAB_SIZE=600 "$top/dev/data/text.sh" text sample; } >said 2>&1 ||
    { fail "the data" "$(tail -n 1 said)"; exit 1; }
mkdir model
cat >model/config.json <<'END'
{"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
 "intermediate_size": 80, "vocab_size": 600, "max_position_embeddings": 40000, "rope_theta": 500000}
END
{ "$program" --model model --data text/train.tok --seq 32 --batch 4 --steps 40 --lr 1e-2 --threads 1 --out first &&
    "$(program_for --export)" --model first/latest --export trained; } >said 2>&1 ||
    { fail "the model" "$(tail -n 1 said)"; exit 1; }

# gives NAME INPUT FILE ARGUMENT… : generates; the output goes to FILE, the notes to `notes`
gives() {
    local name=$1 input=$2 file=$3 code
    shift 3
    timeout -k 1 60 "$generate" --model trained --temperature 0 --threads 1 "$@" <"$input" >"$file" 2>notes
    code=$?
    [ "$code" = 0 ] || fail "$name" "exit code $code: $(tail -n 1 notes)"
}
# has NAME FILE REGEX : a line of FILE matches
has() {
    if grep -qE "$3" "$2"; then pass "$1" "$(grep -m 1 -E "$3" "$2")"; else fail "$1" "no '$3': $(tail -n 3 "$2")"; fi
}
# refused NAME REGEX ARGUMENT… : the program that takes these arguments ends with one line of an error
refused() {
    local name=$1 regex=$2
    shift 2
    bad "$name" "$regex" "$(program_for "$@")" "$@"
}

# ---------------------------------------------------------------- --prompt and --prompts
gives "one prompt" /dev/null river --prompt "The river" --max-tokens 30
gives "another" /dev/null king --prompt "A king and" --max-tokens 30
{ cat river; echo; cat king; } >both
printf 'The river\r\n\n\r\nA king and' >prompts.txt
gives "--prompts" /dev/null out --prompts prompts.txt --max-tokens 30
same "--prompts: each line is continued as if it were alone" both out
for ranks in 2 3; do
    gives "--prompts on $ranks ranks" /dev/null out --prompts prompts.txt --max-tokens 30 --ranks $ranks
    same "--prompts: the same text on $ranks ranks" both out
done
printf 'A king and\n' >king.txt
gives "--prompt and --prompts" /dev/null out --prompt "The river" --prompts king.txt --max-tokens 30
same "the prompt of --prompt comes before those of --prompts" both out
gives "no sharding" /dev/null out --prompts prompts.txt --max-tokens 30 --ranks 2 --sharding no_shard
same "--prompts: the same text without sharding" both out

# the fifth token of the continuation ends it, if the directory says so
"$tokens" --encode river --tokenizer text/tokenizer.model >ids 2>said || fail "the ids" "$(cat said)"
printf 'The river' >start
"$tokens" --encode start --tokenizer text/tokenizer.model >start-ids
fifth=$(sed -n "$(($(wc -l <start-ids) + 5))p" ids)
head -n $(($(sed -n "$(($(wc -l <start-ids) + 1)),\$p" ids | grep -nx -m 1 "$fifth" | cut -d: -f1) + \
    $(wc -l <start-ids) - 1)) ids >stopped-ids
{ "$tokens" --decode stopped-ids --tokenizer text/tokenizer.model; echo; } >stopped
for name in config.json generation_config.json; do
    cp trained/config.json saved.json
    if [ $name = config.json ]; then
        sed -i -E "s/\"eos_token_id\": (\[[^]]*\]|[^,]*),/\"eos_token_id\": $fifth,/" trained/config.json
    else echo "{\"eos_token_id\": [599, $fifth]}" >trained/$name; fi
    gives "eos_token_id" /dev/null out --prompt "The river" --max-tokens 30
    same "a continuation ends at eos_token_id of $name" stopped out
    cp saved.json trained/config.json
    rm -f trained/generation_config.json
done

# ---------------------------------------------------------------- --chat
printf 'Hello\nAnd now?\n/save first.json\n/reset\nHello\n/save second.json\n /reset\n' >input
printf '/nonsense\n/system Be brief.\nHello\r\n/save third.json\n/save nowhere/x.json' >>input
gives "--chat" input talk --chat --max-tokens 20
cp notes talk-notes
[ "$(grep -c . notes)" = 7 ] && pass "--chat: a note for each command" "7" ||
    fail "--chat: a note for each command" "$(cat notes)"
has "--chat: an unknown command is named" notes '^note: /nonsense is not a command; expected /reset, /system'
has "--chat: a file that cannot be written is named" notes '^note: nowhere/x.json cannot be written: No such file'
first=$(grep -o '"role":"assistant","content":"[^"]*"' first.json | head -n 1)
second=$(grep -o '"role":"assistant","content":"[^"]*"' second.json)
if [ -n "$first" ] && [ "$first" = "$second" ]; then pass "--chat: /reset forgets the conversation" "$first"
else fail "--chat: /reset forgets the conversation" "$first / $second"; fi
printf '/save first.json\nHello\n/save own.json\nAnd now?\n/save own.json\n' >saves
cp first.json before.json
gives "--chat: /save in place of a file" saves answers --chat --max-tokens 12
grep -q "first.json cannot be written: File exists" notes && cmp -s first.json before.json &&
    pass "--chat: /save does not replace a file of others" "$(grep -m1 exists notes)" ||
    fail "--chat: /save does not replace a file of others" "$(tail -n 3 notes)"
[ "$(grep -o '"user"' own.json | wc -l)" = 2 ] && pass "--chat: /save replaces its own file" "2 messages of the user" ||
    fail "--chat: /save replaces its own file" "$(cat own.json)"
[ "$(grep -o '"role"' first.json | wc -l)" = 4 ] && pass "--chat: /save writes every message" "4" ||
    fail "--chat: /save writes every message" "$(cat first.json)"
has "--chat: /system is part of the conversation" third.json \
    '^\{"messages":\[\{"role":"system","content":"Be brief."\},\{"role":"user","content":"Hello"\}'
for ranks in 2 3; do
    gives "--chat on $ranks ranks" input out --chat --max-tokens 20 --ranks $ranks
    same "--chat: the same answers on $ranks ranks" talk out
done
mpi=(timeout -k 1 60 mpirun --oversubscribe --bind-to none)
if command -v mpirun >/dev/null && "${mpi[@]}" -np 1 "$generate" --model trained --prompt a >said 2>&1 </dev/null; then
    "${mpi[@]}" -np 2 "$generate" --model trained --temperature 0 --threads 1 --chat --max-tokens 20 <input >out 2>said
    same "--chat: the same answers on 2 processes" talk out
fi
printf 'Hello\nHello again\n' >input
gives "a full conversation" input out --chat --seq 60
has "--chat: an answer ends where the conversation is full" notes 'the conversation is full; /reset begins a new one'
has "--chat: a message that no longer fits is refused" notes 'would have [0-9]+ tokens with this message, and there is'

# Ctrl-C stops an answer that would be long; the next message is answered; two Ctrl-C at the prompt leave
# reads PATTERN FILE : waits until FILE has it
reads() {
    local i
    for ((i = 0; i < 100; i++)); do
        grep -qE "$1" "$2" && return
        sleep 0.1
    done
    fail "Ctrl-C" "no '$1' in: $(tail -c 200 "$2")"
    return 1
}
for ranks in 1 2; do
    name="--chat on $ranks ranks"
    rm -f to-chat stopped.json
    : >out # what the conversation before has left would be taken for an answer
    : >notes
    mkfifo to-chat
    "$generate" --model trained --threads 1 --chat --seq 30000 --timeout 2 --ranks $ranks <to-chat >out 2>notes &
    chat=$!
    exec 3>to-chat
    echo Hello >&3
    reads . out
    kill -INT "$chat"
    reads "press Ctrl-C again, or Ctrl-D, to leave" notes && pass "$name: Ctrl-C stops an answer" "$(wc -c <out) bytes"
    printf '/save stopped.json\n' >&3
    reads "3 messages saved|2 messages saved" notes && pass "$name: the conversation continues after Ctrl-C" "/save"
    sleep 3 # longer than --timeout
    printf '/reset\n' >&3
    reads "begins again" notes && pass "$name: ranks wait for the user longer than --timeout" "3 s"
    kill -INT "$chat"
    sleep 0.5
    kill -INT "$chat"
    wait "$chat"
    code=$?
    [ "$code" = 0 ] && pass "$name: a second Ctrl-C leaves" "exit code 0" ||
        fail "$name: a second Ctrl-C leaves" "exit code $code"
    chat=
    exec 3>&-
done

# ---------------------------------------------------------------- --score and --choices
long=$(printf 'and the %.0s' {1..40})
for i in 1 2 3 4 5; do
    printf '{"context":"%s","endings":["word %d","another","%s"],"label":%d}\n' "$long" $i "third $i" $((i % 3))
done >tasks.jsonl
"$program" --model model --data text/train.tok --seq 32 --batch 4 --steps 5 --lr 1e-2 --threads 1 --save-every 2 \
    --after-save "'$evaluate' --model \"\$1\" --choices '$PWD/tasks.jsonl' --seq 32 --threads 1" --out run --ranks 2 \
    >said 2>notes || fail "--after-save with eval_llama3" "$(tail -n 1 notes)"
saved=$(sed -nE 's/.*step-0*([0-9]+):$/\1/p; s/^[{]"tasks":5,"accuracy":.*/an accuracy/p' run/after-save.log | xargs)
expected="2 an accuracy 4 an accuracy 5 an accuracy"
[ "$saved" = "$expected" ] && pass "--choices of each checkpoint by --after-save" "$saved" ||
    fail "--choices of each checkpoint by --after-save" "$saved, expected $expected"
"$evaluate" --model run/latest --choices tasks.jsonl --seq 32 --threads 1 >out 2>notes
has "--choices: contexts that are cut are noted" notes 'note: 15 of 15 requests are longer than --seq 32'
same "--choices: the last checkpoint has the accuracy that --after-save found" out <(tail -n 1 run/after-save.log)
printf '{"id":"a","context":"In the","continuation":" beginning"}\n' >requests.jsonl
"$evaluate" --model run/latest --score requests.jsonl --threads 1 >out 2>notes
"$evaluate" --model run/latest --score requests.jsonl --threads 1 --ranks 3 --deterministic >out-3 2>notes
has "--score: an answer" out '^[{]"id":"a","logprob":-[0-9.]+,"tokens":[0-9]+,"greedy":(true|false)[}]$'
same "--score: the same answers on 3 ranks" out out-3
VOCAB_SIZE=900 "$top/dev/data/text.sh" larger sample >said 2>&1
refused "--score with a tokenizer that is larger than the model" "larger/tokenizer.model has 900 tokens, but" \
    --model run/latest --score requests.jsonl --tokenizer larger/tokenizer.model
mkdir bare
cp run/latest/{config.json,model.safetensors} bare/
printf '{"model":{"type":"Unigram"},"added_tokens":[]}' >bare/tokenizer.json
printf '{"context_ids":[5,6],"continuation_ids":[7]}\n' >ids.jsonl
answer="$("$evaluate" --model bare --score ids.jsonl --threads 1 2>&1)"
if grep -q '"tokens":1' <<<"$answer"; then pass "--score of ids needs no tokenizer" "$answer"
else fail "--score of ids needs no tokenizer" "$answer"; fi

# ---------------------------------------------------------------- bad input
refused "--prompts without a file" "nowhere.txt cannot be opened" --model trained --prompts nowhere.txt
: >empty.txt
refused "--prompts of an empty file" "has no prompt" --model trained --prompts empty.txt
refused "--prompts with a long prompt" \
    "the prompt of line [14] has [0-9]+ tokens and --max-tokens is 39998, together more than" --model trained \
    --prompts prompts.txt --max-tokens 39998
refused "--chat with --prompt" "expected --prompt or --prompts, or --chat, found both" --model trained --chat \
    --prompt hello
bad "neither --chat nor a prompt" "expected --prompt or --prompts, or --chat, found none of them" "$generate" \
    --model trained
refused "--seq without --chat" "--seq 64 has no effect without --chat" --model trained --prompt hello --seq 64
refused "--chat with --tp" "generate_llama3 computes one token at a time, without --tp" --model trained --chat --tp 2 \
    --ranks 2
refused "--chat with --doc-mask" "unknown option --doc-mask: generate_llama3 --help lists all options" \
    --model trained --chat --doc-mask
refused "--chat without weights" "has no weights" --model model --chat
refused "--max-tokens in an evaluation" "unknown option --max-tokens: eval_llama3 --help lists all options" \
    --model trained --max-tokens 3 --eval text/val.tok
refused "--score with --eval" "expected one of --eval, --score and --choices, found several" --model trained \
    --score requests.jsonl --eval text/val.tok
echo '{"eos_token_id": "end"}' >trained/generation_config.json
refused "an eos_token_id that is a word" '"eos_token_id" has "end"; expected' --model trained --prompt hello
rm trained/generation_config.json
printf 'byte-level-bpe 1\n' >other.model
refused "--chat with a file that is no tokenizer" "other.model" --model trained --chat --tokenizer other.model

echo
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
