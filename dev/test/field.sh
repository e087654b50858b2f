#!/usr/bin/env bash
# field.sh [PROGRAM [SECTION]]: reads models, tokenizers, chat templates, adapters, conversations and corpora in the
# forms that users and other programs produce. Each check says how one form is read, or that it is refused with its
# cause. The programs that generate, evaluate and convert are those next to PROGRAM, which trains.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. dev/test/checks.sh
program=$(realpath "${1:-build/cpu-fp32/train_llama3}")
tokens=${program%/*}/tokens_llama3
chat="$tokens --conversations"
top=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit
export LC_ALL=C
files() { python3 "$top/dev/test/field_files.py" "$@"; }
llama3="<|begin_of_text|>,<|end_of_text|>,<|start_header_id|>,<|end_header_id|>,<|eot_id|>"
chatml="{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
chatml+="'\n'}}"
chatml+="{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
# json KEY=VALUE… : an object of texts
json() { python3 -c 'import json, sys; print(json.dumps(dict(a.split("=", 1) for a in sys.argv[1:])))' "$@"; }

# says NAME CODE PATTERN COMMAND… : exit code and output, on standard output or error, as expected
says() {
    local name=$1 code=$2 pattern=$3 got
    shift 3
    "$@" >said 2>&1 </dev/null
    got=$?
    if [ "$got" = "$code" ] && grep -aqE -e "$pattern" said; then pass "$name" "$(grep -aE -m1 -e "$pattern" said)"
    else fail "$name" "exit code $got, expected $code and '$pattern': $(tail -n 2 said | tr '\n' ' ')"; fi
}
# run OPTION… : the program that takes these options
run() { timeout 60 "$(program_for "$@")" "$@" --threads 1; }
# equal NAME EXPECTED FOUND: the two texts are equal, and not empty
equal() { if [ -n "$2" ] && [ "$2" = "$3" ]; then pass "$1" "$3"; else fail "$1" "'$3', expected '$2'"; fi; }
# field FILE KEY: a value of a JSON file
field() { python3 -c 'import json, sys; print(json.dumps(json.load(open(sys.argv[1])).get(sys.argv[2], "absent")))' \
    "$@"; }
loss() { run "$@" 2>err | grep -oE '"loss":[^,}]*' | cut -d: -f2; }

# ---------------------------------------------------------------- ends, and ids in exports
ends() {
    files model turns --specials "$llama3,<|im_start|>,<|im_end|>" --says "<|im_end|>" \
        --tokenizer-config "$(json "eos_token=<|im_end|>" "chat_template=$chatml")"
    local answer
    answer=$(echo Hi | run --model turns --chat --temperature 0 --max-tokens 3)
    equal "--chat stops at the end of a turn of the template in use" "0, no text" "$?, ${answer:-no text}"
    run --model turns --export turned >said 2>&1
    equal "an export's generation_config.json has the template's end of a turn in eos_token_id" "[257, 260, 262]" \
        "$(field turned/generation_config.json eos_token_id)"
    equal "an export's config.json has the same eos_token_id" "[257, 260, 262]" \
        "$(field turned/config.json eos_token_id)"
    files model ids --config '{"bos_token_id": 4, "eos_token_id": [5, 6, 7], "pad_token_id": 8}'
    echo '{"eos_token_id": [7, 9], "temperature": 0.6}' >ids/generation_config.json
    run --model ids --export ided >said 2>&1
    equal "an export keeps the ids of config.json and generation_config.json, in their order" "4 [5, 6, 7, 9] 8" \
        "$(field ided/config.json bos_token_id) $(field ided/config.json eos_token_id) $(field ided/config.json \
        pad_token_id)"
    equal "generation_config.json is copied without a tokenizer, and its other keys stay" "[5, 6, 7, 9] 0.6" \
        "$(field ided/generation_config.json eos_token_id) $(field ided/generation_config.json temperature)"
    files model plain
    run --model plain --export plained >said 2>&1
    equal "unknown token ids are exported as null" "null null null" \
        "$(field plained/config.json bos_token_id) $(field plained/config.json eos_token_id) $(field \
        plained/config.json pad_token_id)"
    says "an export that is repeated with equal bytes is done" 0 "plained holds this model already" \
        run --model plain --export plained
    says "another model is not exported over it" 1 "plained exists already and is another model" \
        run --model ids --export plained
}

# ---------------------------------------------------------------- what is put in front of a text
front() {
    files model fronted --specials "$llama3" --front "<|begin_of_text|>" \
        --tokenizer-config "$(json "bos_token=<|begin_of_text|>" "eos_token=<|end_of_text|>")"
    printf '%s\n' '{"context":"a b","continuation":" c"}' '{"context":"","continuation":" c"}' \
        '{"context_ids":[256,64,220,65],"continuation_ids":[220,66]}' \
        '{"context_ids":[256],"continuation_ids":[220,66]}' >q.jsonl
    run --model fronted --score q.jsonl >scores 2>err
    equal "--score puts the tokenizer's front before a context, and scores an empty one after it" \
        "$(sed -n '3,4p' scores)" "$(sed -n '1,2p' scores)"
    printf '%s\n' '{"context":"is\u00a0","continuation":"b"}' '{"context":"is","continuation":"\u00a0b"}' \
        '{"context":"は\u3000","continuation":"b"}' '{"context":"は","continuation":"\u3000b"}' >q.jsonl
    run --model fronted --score q.jsonl >scores 2>err
    equal "white space at the end of a context is Python's" "$(sed -n '2p;4p' scores)" "$(sed -n '1p;3p' scores)"
    echo '{"id":1,"prompt":"a b","temperature":0,"max_tokens":5}' >p.jsonl
    echo '{"prompt_ids":[256,64,220,65],"temperature":0,"max_tokens":5}' >>p.jsonl
    run --model fronted --prompts p.jsonl >answers 2>err
    equal "--prompts FILE.jsonl: a text begins with the front, and ids are taken as they are" \
        "$(sed -n 2p answers)" "$(sed -n 1p answers | sed 's/"id":1,//')"
    equal "--prompt prints the text, without the front" "a b" \
        "$(run --model fronted --prompt "a b" --max-tokens 5 --temperature 0 | head -c 3)"
    for ((i = 0; i < 400; i++)); do echo '{"text":"caf\u00e9 one"}'; done >a.jsonl
    says "token files begin each document with the front, and say so" 0 "each document begins with <.begin_of_text.>" \
        "$tokens" --tokenizer fronted/tokenizer.json --out-train t.tok --out-val v.tok --val-fraction 0.3 \
        a.jsonl
    equal "a document has its front, its text and its end" "256 66 64 69 127 102 220 78 77 68 257 256" \
        "$(od -An -v -tu2 -j192 -N24 t.tok | tr -s ' \n' ' ' | sed 's/^ //; s/ $//')"
    equal "the header of version 2 has the front and the end" "2 257 256" \
        "$(od -An -v -td4 -j8 -N4 t.tok | tr -d ' ') $(od -An -v -td4 -j64 -N8 t.tok | tr -s ' ' | sed 's/^ //')"
    files model front2 --specials "<s>,</s>,<|endoftext|>" --front "<s>" --tokenizer-config \
        "$(json "bos_token=<s>" "eos_token=</s>")"
    run --model front2 --export front2.gguf >said 2>&1
    equal "a GGUF puts the tokenizer's own front before a text" "256 1" "$(python3 - front2.gguf <<'END'
import sys, struct
b = open(sys.argv[1], "rb").read()
key = lambda k: b.index(k) + len(k)
print(struct.unpack_from("<I", b, key(b"ggml.bos_token_id") + 4)[0], b[key(b"ggml.add_bos_token") + 4])
END
)"
    python3 - <<'END'
import json
t = json.load(open("fronted/tokenizer.json"))
t["post_processor"]["single"].append({"SpecialToken": {"id": "<|eot_id|>", "type_id": 0}})
import os; os.makedirs("behind", exist_ok=True)
json.dump(t, open("behind/tokenizer.json", "w"))
END
    echo text >text
    says "a tokenizer that puts a token behind a text is refused by its name" 1 "to put '<.eot_id.>' behind a text" \
        "$tokens" --encode text --tokenizer behind/tokenizer.json
}

# ---------------------------------------------------------------- documents and turns that end with one token
one_end() {
    local x
    files model oneend --specials "<s>,<|im_start|>,<|im_end|>" \
        --tokenizer-config "$(json "bos_token=<s>" "eos_token=<|im_end|>" "chat_template=$chatml")"
    for x in X Y; do
        echo '{"messages":[{"role":"user","content":"secret is '$x'"},{"role":"assistant","content":"X"}]}' >$x.jsonl
        $chat --tokenizer oneend/tokenizer.json --out-train $x.tok $x.jsonl >said 2>&1
    done
    equal "--doc-mask: an answer sees its question where one token ends both turns and documents" \
        "$(loss --model oneend --eval X.tok --seq 64) $(loss --model oneend --eval Y.tok --seq 64)" \
        "$(loss --model oneend --eval X.tok --seq 64 --doc-mask) $(loss --model oneend --eval Y.tok --seq 64 \
        --doc-mask)"
    python3 - <<'END'
import struct
b = open("X.tok", "rb").read()
magic, _, width, vocabulary, flags, count = struct.unpack_from("<8sIIIIQ", b)
body = b[192 : 192 + count * width] + bytes(x & 1 for x in b[192 + count * width :])
open("old1.tok", "wb").write(struct.pack("<8sIIIIQ", magic, 1, width, vocabulary, flags, count) + b[32:64] + body)
END
    says "in files of version 1 they cannot be told apart" 1 \
        "old1.tok is a token file of version 1, and .* ends each message" \
        run --model oneend --eval old1.tok --seq 64 --doc-mask
    says "training refuses files of version 1 with --doc-mask, and says what to do" 1 \
        "old1.tok is a token file of version 1, .* bring it to version 2 with tokens_llama3 --upgrade old1.tok" \
        run --model oneend --data old1.tok --seq 16 --doc-mask --batch 1 --steps 1
    says "a conversation is packed where one token ends both" 0 "conversations in" $chat --tokenizer \
        oneend/tokenizer.json \
        --out-train packed.tok --pack 64 X.jsonl Y.jsonl
}

# ---------------------------------------------------------------- weights
# weights DIR COMMAND: changes the tensors of a model's file: t is {name: (shape, bytes)}
weights() {
    python3 - "$1/model.safetensors" "$2" <<'END'
import json, struct, sys
path, change = sys.argv[1:]
b = open(path, "rb").read()
n = struct.unpack_from("<Q", b)[0]
header, data = json.loads(b[8 : 8 + n]), b[8 + n :]
t = {k: (v["shape"], data[slice(*v["data_offsets"])]) for k, v in header.items() if k != "__metadata__"}
exec(change)
out, at = {"__metadata__": {"format": "pt"}}, 0
for k, (shape, part) in t.items():
    out[k] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + len(part)]}
    at += len(part)
text = json.dumps(out).encode()
text += b" " * (-len(text) % 8)
open(path, "wb").write(struct.pack("<Q", len(text)) + text + b"".join(p for _, p in t.values()))
END
}

weights_of_others() {
    local name
    files tokens w.tok 256 65
    files model base
    local before
    for name in pytorch_model.bin Model.safetensors model.fp16.safetensors consolidated.00.pth model.safetensors.part \
        model-q8.gguf \
        adapter_model.safetensors weights/model.safetensors; do
        rm -rf other && mkdir -p "other/$(dirname "$name")" && cp base/config.json other/ && cp base/model.safetensors \
            "other/$name"
        says "weights in $name are not passed over" 1 "other has no model.safetensors, but other/$name" \
            run --model other --data w.tok --seq 16 --batch 1 --steps 1
    done
    cp -r base stale && echo '{"weight_map":{"x":"model-00001-of-00002.safetensors"}}' \
        >stale/model.safetensors.index.json
    says "model.safetensors comes before an index that names others, which a line says" 0 \
        "index.json names other files; they are not read" \
        run --model stale --eval w.tok --seq 64
    cp -r base named && python3 -c \
        'import json
c = json.load(open("named/config.json"))
json.dump(c | {"transformers_weights": "x.safetensors"}, open("named/config.json", "w"))'
    says "weights that config.json names are refused by that name" 1 '"transformers_weights" is x.safetensors' \
        run --model named --eval w.tok --seq 64
    files model tied --config '{"tie_word_embeddings": true}'
    before=$(loss --model tied --eval w.tok --seq 64)
    cp -r tied copied && weights copied 't["lm_head.weight"] = t["model.embed_tokens.weight"]'
    equal "a head that equals its tied embedding is accepted" "$before" "$(loss --model copied --eval w.tok --seq 64)"
    cp -r tied differs && weights differs \
        't["lm_head.weight"] = (t["model.embed_tokens.weight"][0], bytes(4 * 32 * 256))'
    says "a head that differs from its tied embedding is refused" 1 \
        "element 0 of lm_head.weight is 0 and that of model.embed_tokens.weight" \
        run --model differs --eval w.tok --seq 64
    cp -r tied smaller && weights smaller 't["lm_head.weight"] = ([1, 1], bytes(4))'
    says "a head of another shape is refused" 1 "lm_head.weight is 1 x 1 and model.embed_tokens.weight 256 x 32" \
        run --model smaller --eval w.tok --seq 64
    cp -r tied saved && weights saved 't["lm_head.weight"] = t.pop("model.embed_tokens.weight")'
    equal "save_model's file of a tied model, with the head's name, is read" "$before" \
        "$(loss --model saved --eval w.tok --seq 64)"
    cp -r tied inner && weights inner 't = {k.removeprefix("model."): v for k, v in t.items()}'
    equal "names without \"model.\" are read" "$before" "$(loss --model inner --eval w.tok --seq 64)"
    cp -r base lacks && weights lacks 't.pop("lm_head.weight")'
    says "a missing head hints at tie_word_embeddings" 1 'config.json needs "tie_word_embeddings": true' \
        run --model lacks --eval w.tok --seq 64
    cp -r base nan && weights nan \
        't["model.norm.weight"] = (t["model.norm.weight"][0], struct.pack("<32f", float("nan"), *[1] * 31))'
    mkdir -p tokens && files model tokens --specials "<|endoftext|>,<|im_start|>,<|im_end|>"
    weights tokens 't["model.norm.weight"] = (t["model.norm.weight"][0], struct.pack("<32f", float("nan"), *[1] * 31))'
    says "logits that are NaN end generation" 1 "the logits of token 1 are not finite numbers" run --model tokens \
        --prompt a --temperature 0
}

# ---------------------------------------------------------------- RoPE
rope() {
    local llama='{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0'
    llama+=', "original_max_position_embeddings": 32}'
    rope_loss() { files model rope --config "$1" && loss --model rope --eval w.tok --seq 64; }
    files tokens w.tok 256 65
    local scaled plain big
    scaled=$(rope_loss '{"rope_scaling": '"$llama"'}') plain=$(rope_loss '{}') \
        big=$(rope_loss '{"rope_theta": 500000.0}')
    if [ "$plain" != "$big" ] && [ "$plain" != "$scaled" ]; then pass "the loss depends on RoPE" "$plain, $big, $scaled"
    else fail "the loss depends on RoPE" "$plain, $big, $scaled"; fi
    equal "rope_scaling replaces rope_parameters" "$scaled" \
        "$(rope_loss \
        '{"rope_scaling": '"$llama"', "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}')"
    equal "rope_parameters without a type is the default" "$big" \
        "$(rope_loss '{"rope_parameters": {"rope_theta": 500000.0}}')"
    equal "an empty rope_scaling is none" "$big" "$(rope_loss '{"rope_theta": 500000.0, "rope_scaling": {}}')"
    equal "rope_theta is taken from inside, else from the top" "$plain" \
        "$(rope_loss '{"rope_scaling": {"rope_type": "default"}, "rope_parameters": {"rope_theta": 500000.0}}')"
    equal "original_max_position_embeddings at the top wins" "$scaled" \
        "$(rope_loss '{"original_max_position_embeddings": 32, "rope_scaling": '"${llama/: 32/: 64}"'}')"
    equal "without it, max_position_embeddings counts" "$(rope_loss '{"rope_scaling": '"${llama/: 32/: 512}"'}')" \
        "$(rope_loss '{"rope_scaling": '"${llama/, \"original_max_position_embeddings\": 32/}"'}')"
}

# ---------------------------------------------------------------- chat templates
templates() {
    local plain end talk=talk.jsonl
    echo '{"messages":[{"role":"user","content":"Hi"},{"role":"assistant","content":"Yo."}]}' >$talk
    files model chatty --specials "<|endoftext|>,<|im_start|>,<|im_end|>"
    # ids TEMPLATE: of the conversation with this chat_template.jinja
    ids() {
        printf "$1" >chatty/chat_template.jinja
        rm -f talk.tok
        $chat --tokenizer chatty/tokenizer.json --out-train talk.tok $talk >said 2>&1 && tail -c +193 talk.tok \
            | cksum
    }
    printf '%s' "$chatml" >template
    plain=$(ids "$(sed 's/\\/\\\\/g; s/%/%%/g' template)")
    for end in '\n' '\r\n' '\r' '\n\n'; do
        equal "a template that ends with $end is the same" "$plain" \
            "$(ids "$(sed 's/\\/\\\\/g; s/%/%%/g' template)$end")"
    done
    equal "a template with a line end after each block is the same" "$plain" \
        "$(ids "$(sed 's/\\/\\\\/g; s/%/%%/g; s/%%}/%%}\\n/g' template)")"
    ids "$(sed 's/\\/\\\\/g; s/%/%%/g' template)\n\n\n" >/dev/null
    says "three line ends are another template" 1 "which this program cannot render" $chat --tokenizer \
        chatty/tokenizer.json --out-train no.tok $talk
    rm chatty/chat_template.jinja
    says "ChatML's tokens without a template mean plain ChatML" 0 "chat template: ChatML$" $chat --tokenizer \
        chatty/tokenizer.json --out-train plain.tok $talk
    echo '{"tokenizer_class":"PreTrainedTokenizerFast"}' >chatty/tokenizer_config.json
    run --model chatty --export chatted >said 2>&1
    equal "the template that chat uses is in an export" "$chatml" \
        "$(sed 's/$/\\n/' chatted/chat_template.jinja | tr -d '\n' | sed 's/\\n$//')"
    run --model chatty --export chatted.gguf >said 2>&1
    says "the Modelfile of a GGUF stops at the template's end of a turn" 0 \
        'PARAMETER stop "<.im_end.>"' cat Modelfile
}

# ---------------------------------------------------------------- adapters
adapters() {
    local kind
    files tokens w.tok 256 65
    files model base
    run --model base --data w.tok --seq 16 --batch 1 --steps 1 --lora-rank 2 --out first >said 2>&1
    mkdir adapted && cp first/latest/adapter_* adapted/
    equal "the base model's path is in the adapters" '"base"' \
        "$(field adapted/adapter_config.json base_model_name_or_path)"
    for kind in pissa pissa_niter_4 olora OLoRA corda loftq; do
        cp -r adapted "a-$kind" && sed -i 's/"r": 2,/"r": 2, "init_lora_weights": "'$kind'",/' \
            "a-$kind/adapter_config.json"
        says "adapters of $kind, which change the base, are refused" 1 \
            "\"init_lora_weights\" is \"$kind\", with which PEFT changes" \
            run --model base --adapters "a-$kind" --eval w.tok --seq 64
    done
    cp -r adapted a-eva && sed -i \
        's/"r": 2,/"r": 2, "init_lora_weights": "eva",/; s/"lora_dropout": 0.0/"lora_dropout": 0.05/
            s/: "base"/: "org\/name"/' \
        a-eva/adapter_config.json
    says "a note says that dropout is off" 0 'note: a-eva/adapter_config.json has "lora_dropout" 0.05' run --model \
        base --adapters a-eva \
        --data w.tok --seq 16 --batch 1 --steps 1 --out again
    equal "the base model's name of loaded adapters is kept" '"org/name"' \
        "$(field again/latest/adapter_config.json base_model_name_or_path)"
}

# ---------------------------------------------------------------- conversations
conversations() {
    local key
    files model chatty --specials "<|endoftext|>,<|im_start|>,<|im_end|>"
    # chat MESSAGE-REST [TOP]: an answer "bad" with more in its object, or in the conversation's
    chat() {
        local first='{"role":"user","content":"a"},{"role":"assistant","content":"bad"'"$1"'}'
        local second='{"role":"user","content":"b"},{"role":"assistant","content":"good"}'
        echo '{"messages":['"$first,$second]${2:-}}" >one.jsonl
        rm -f one.tok
        $chat --tokenizer chatty/tokenizer.json --out-train one.tok one.jsonl
    }
    for key in '"weight":0' '"train":false' '"masked":true' '"loss_mask":0' '"trainable":false' '"training":0' \
        '"loss":false' '"loss_weight":0' '"ignore":1'; do
        says "$key switches off the loss of a message" 0 " 5 of them targets" chat ",$key"
    done
    says "\"weight\":1 leaves it on" 0 " 9 of them targets" chat ',"weight":1'
    says "a weight between them is refused" 1 'line 1: message 2 has a "weight" that is neither' chat ',"weight":0.5'
    says "a key that would be dropped is refused by its name and line" 1 'line 1: message 2 has "reasoning_content"' \
        chat ',"reasoning_content":"2"'
    says "a function call is refused" 1 'message 2 has "function_call"' chat ',"function_call":{"name":"f"}'
    says "null and empty values are nothing" 0 " 9 of them targets" chat ',"tool_calls":[],"name":null'
    for key in tools functions documents; do
        says "\"$key\" beside the messages is refused" 1 "\"$key\" cannot be rendered" chat "" \
            ',"'$key'":[{"name":"f"}]'
    done
    says "\"system\" beside the messages is refused" 1 '"system" cannot be rendered' chat "" ',"system":"You"'
    says "other keys next to the messages are ignored" 0 " 9 of them targets" chat "" ',"source":"x","id":7'
    says "a key twice in a message is refused" 1 'line 1: the key "content" occurs twice' chat ',"content":"b"'
    chat "" >said && gzip -c one.jsonl >one.jsonl.gz
    $chat --tokenizer chatty/tokenizer.json --out-train zipped.tok one.jsonl.gz >said 2>&1
    $chat --tokenizer chatty/tokenizer.json --out-train piped.tok - <one.jsonl >said 2>&1
    if cmp one.tok zipped.tok && cmp one.tok piped.tok; then pass "conversations are read from .gz and standard input" \
        "equal bytes"
    else fail "conversations are read from .gz and standard input" "$(tail -n 1 said)"; fi
}

# ---------------------------------------------------------------- files of a corpus, and names of files
corpora() {
    local name
    files model m --specials "<|endoftext|>,<|im_start|>,<|im_end|>"
    # made_of FILE…: how many tokens they have, or what is wrong
    made_of() { rm -f t.tok v.tok; "$tokens" --tokenizer m/tokenizer.json --out-train t.tok --out-val v.tok \
        --val-fraction 0.3 "$@" 2>&1 | grep -E "^t.tok|^error|skipped|links"; }
    for ((i = 0; i < 400; i++)); do echo '{"text":"caf\u00e9 one"}'; done >a.jsonl
    cp a.jsonl a.ndjson && cp a.jsonl a.JSON && gzip -c a.jsonl >a.json.gz && cp a.jsonl B.JSONL
    for name in a.ndjson a.JSON a.json.gz B.JSONL; do equal "$name holds JSON lines" "$(made_of a.jsonl)" \
        "$(made_of $name)"; done
    cp a.jsonl named.ndjson
    says "a file that is named as JSON lines needs the field" 1 'named.ndjson, line 1: found no field "content"' \
        made_of --field content named.ndjson
    python3 -c 'import json; print(json.dumps([{"text": "a"}] * 400))' >list.json
    says "a list of objects is refused, with the way out" 1 "list.json is one list of objects, .* jq -c" made_of \
        list.json
    python3 -c 'import json; print(json.dumps({"settings": ["a"] * 9000}, indent=1))' >other.json
    says "other JSON is text" 0 "^t.tok: " made_of other.json
    says "--train-tokenizer refuses JSON lines under any name" 1 "a.ndjson is JSON lines" "$tokens" --train-tokenizer \
        --vocab-size 600 --out x.model a.ndjson
    for ((i = 0; i < 200; i++)); do echo '{"text":"first","text":"second"}'; done >twice.jsonl
    says "a key twice in a line of a corpus is refused" 1 'line 1: the key "text" occurs twice' "$tokens" \
        --tokenizer m/tokenizer.json --out-train t2.tok --out-val v2.tok twice.jsonl
    mkdir -p blobs snap real && seq 9000 >blobs/a && seq 5000 >snap/b.txt && ln -s ../blobs/a snap/a.txt && ln -s \
        a.txt snap/c.txt && ln -s ../blobs snap/d
    cp blobs/a real/a.txt && cp snap/b.txt real/b.txt
    equal "links to files are followed, each file once" "$(made_of real | cut -d' ' -f2)" \
        "$(made_of snap | grep '^t.tok' | cut -d' ' -f2)"
    says "links to folders are counted" 0 "^1 symbolic links to folders" made_of snap
    { printf '\xef\xbb\xbf'; seq 9000; } >marked.txt && seq 9000 >unmarked.txt
    equal "a byte-order mark is no text" "$(made_of unmarked.txt | cut -d' ' -f2-3)" \
        "$(made_of marked.txt | cut -d' ' -f2-3)"
    seq 900 | iconv -t utf-16 >wide.txt
    says "UTF-16 is refused by its name" 1 "iconv -f utf-16" made_of wide.txt
    echo x >a.txt.xz
    says "a compressed file of another kind is refused with the way out" 1 "a.txt.xz: .* decompress it with xz" \
        made_of a.txt.xz
    printf 'version https://git-lfs.github.com/spec/v1\noid sha256:%064d\nsize 12345\n' 7 >pointer
    mkdir -p lfs && cp pointer lfs/a.txt && seq 9000 >lfs/b.txt
    says "a pointer of Git LFS is no text" 1 "lfs/a.txt is a Git LFS pointer" made_of lfs
    for name in tokenizer.json model.safetensors config.json; do
        rm -rf pointed && cp -r m pointed && cp pointer pointed/$name
        says "$name that is a pointer of Git LFS" 1 "pointed/$name is a Git LFS pointer" run --model pointed --export \
            "out-$name"
    done
    files tokens n.tok 259 3000 && files tokens v.tok 259 300
    rm -rf pointed && cp -r m pointed && cp pointer pointed/tokenizer.json && mkdir alone && cp n.tok alone/
    says "training does not copy a tokenizer that is a pointer of Git LFS" 1 "tokenizer.json is a Git LFS pointer" \
        run --model pointed --data alone/n.tok --seq 16 --batch 1 --steps 1
    mkdir -p 'r[1]' r1 && cp n.tok 'r[1]/n.tok' && cp v.tok r1/n.tok
    equal "a path that exists is that file, and no pattern" 2999 \
        "$(run --model m --eval 'r[1]/n.tok' --seq 64 2>err | grep -oE '"tokens":[0-9]+' | cut -d: -f2)"
    cp n.tok 'lr=[1,2].tok'
    says "a path with brackets and a comma that exists is that file" 0 '"tokens":2999' \
        run --model m --eval 'lr=[1,2].tok' --seq 64
    mkdir -p set1 bare && cp n.tok m/tokenizer.json set1/ && cp m/config.json m/model.safetensors bare/
    says "the tokenizer beside a pattern's files is found" 0 '"bits_per_byte"' run --model bare --eval 'set*/n.tok' \
        --seq 64
    cp n.tok $'caf\xe9.tok'
    run --model m --eval $'caf\xe9.tok' --seq 64 >e.json 2>err
    says "a name that is not UTF-8 gives JSON in UTF-8" 0 "caf.ufffd.tok" python3 -c \
        'import json; print(ascii(json.loads(open("e.json","rb").read().decode())["file"]))'
    files tokens none.tok 259 300 --no-targets
    says "--eval without any target has no loss" 1 "none.tok has no training target" \
        run --model m --eval none.tok --seq 64
    says "a token file of an unknown tokenizer is accepted with a note" 0 \
        "note: n.tok does not say with which tokenizer" \
        run --model m --eval n.tok --seq 64
    says "training accepts it with the same note" 0 "note: n.tok does not say with which tokenizer" \
        run --model m --data n.tok --seq 16 --batch 1 --steps 1
}

# ---------------------------------------------------------------- tokenizers that are only copied, and small things
others() {
    files model y --specials "<|endoftext|>,<|im_start|>,<|im_end|>"
    files tokens n.tok 259 3000
    cp -r y gap && python3 -c '
import json
t = json.load(open("gap/tokenizer.json"))
t["added_tokens"].append({**t["added_tokens"][-1], "id": 300, "content": "<x>"})
json.dump(t, open("gap/tokenizer.json", "w"))'
    says "a tokenizer with a gap is only copied" 0 \
        "needs the added token '<x>' to have the id 300.*; it is copied as it is" run --model gap --export E1
    cp -r y unk && python3 -c '
import json
t = json.load(open("unk/tokenizer.json"))
v = t["model"]["vocab"]
v["<unk>"] = v.pop(min(v, key=v.get))
t["model"]["unk_token"] = "<unk>"
json.dump(t, open("unk/tokenizer.json", "w"))'
    says "a tokenizer with an unknown token is only copied" 0 \
        "needs the unknown token '<unk>'.*; it is copied as it is" run --model unk --export E2
    cp -r y pad && python3 -c '
import json
t = json.load(open("pad/tokenizer.json"))
t["added_tokens"].append({**t["added_tokens"][-1], "id": 259, "content": "<pad>"})
json.dump(t, open("pad/tokenizer.json", "w"))'
    says "a pad token beyond the embedding is in no text" 0 "^a" run --model pad --prompt a --max-tokens 2
    says "a GGUF refuses a pad token beyond the embedding by its name" 1 "without <pad>" \
        run --model pad --export pad.gguf
    says "OMP_NUM_THREADS is honoured, and the banner names it" 0 "ranks: 1 x 1 thread \(OMP_NUM_THREADS\)" \
        env OMP_NUM_THREADS=1 "$program" --model y --data n.tok --seq 16 --batch 1 --steps 1
    says "--threads comes before OMP_NUM_THREADS" 0 "ranks: 1 x 2 threads over" \
        env OMP_NUM_THREADS=1 "$program" --model y --data n.tok --seq 16 --batch 1 --steps 1 --threads 2
    says "a run that never reaches the peak rate says so" 0 "note: with --warmup 10 and --steps 5" run --model y \
        --data n.tok --seq 16 --batch 1 --steps 5
    python3 -c 'import json
question = {"role": "user", "content": "long question " * 40}
for _ in range(20): print(json.dumps({"messages": [question, {"role": "assistant", "content": "Yo."}]}))' >c.jsonl
    $chat --tokenizer y/tokenizer.json --out-train c.tok c.jsonl >said 2>&1
    says "a step without a target has no loss" 0 "no targets" run --model y --data c.tok --seq 64 --batch 1 --steps 1 \
        --out lossless
    equal "a step without a target has the loss null in metrics.jsonl" null "$(field lossless/metrics.jsonl loss)"
    echo '{"stages":[{"tokens":32,"batch":1,"seq":16,"rope_scaling":{},"data":{"n.tok":1}}]}' >recipe.json
    says "a recipe's empty rope_scaling is none" 0 "step" run --model y --recipe recipe.json
}

# ---------------------------------------------------------------- what a file says beside what is usual
# changed FILE STATEMENT : runs Python's statement on the JSON object `t` of a file
changed() {
    python3 -c 'import json, sys
t = json.load(open(sys.argv[1]))
exec(sys.argv[2])
json.dump(t, open(sys.argv[1], "w"))' "$@"
}

unusual() {
    local end
    files model stops --specials "$llama3,<|stop|>" --config '{"eos_token_id": 261}' \
        --tokenizer-config "$(json "eos_token=<|stop|>")"
    run --model stops --export stops.gguf >said 2>&1
    equal "a GGUF's eos_token_id is the model's" 261 "$(python3 - stops.gguf <<'END'
import sys, struct
b = open(sys.argv[1], "rb").read()
at = b.index(b"ggml.eos_token_id")
print(struct.unpack_from("<I", b, at + 17 + 4)[0])
END
)"
    files model both --specials "$llama3" --front "<|begin_of_text|>" --tokenizer-config \
        "$(json "eos_token=<|end_of_text|>")"
    python3 -c 'import base64
for i in range(256): print(base64.b64encode(bytes([255 - i])).decode(), i)' >both/tokenizer.model
    printf '%s\n' '{"context":"a b","continuation":" c"}' \
        '{"context_ids":[256,64,220,65],"continuation_ids":[220,66]}' >q.jsonl
    run --model both --score q.jsonl >scores 2>err
    equal "tokenizer.json comes before another tokenizer.model" "$(sed -n 2p scores)" "$(sed -n 1p scores)"
    printf '\n\016\n\005<unk>\025\0\0\0\0\030\002' >both/tokenizer.model
    run --model both --export bothed >said 2>&1
    equal "an export has the tokenizer.json that is next to a SentencePiece model" "$(cksum <both/tokenizer.json)" \
        "$(cksum <bothed/tokenizer.json)"
    printf '{"id":%s,"context_ids":[1],"continuation_ids":[2]}\n' 1234567890123456789 8000000000000001 1.50 >q.jsonl
    run --model both --score q.jsonl >scores 2>err
    equal "the id of a request keeps all its digits" "1234567890123456789 8000000000000001 1.50" \
        "$(sed 's/.*"id":\([^,]*\),.*/\1/' scores | xargs)"
    echo '{"prompt_ids":[64],"temperature":0,"max_tokens":2}' >p.jsonl
    run --model both --prompts p.jsonl >answers 2>err
    for end in JSONL ndjson json; do
        cp p.jsonl p.$end
        equal "--prompts FILE.$end is JSON lines" "$(cat answers)" "$(run --model both --prompts p.$end 2>err)"
    done
    says "--prompt refuses invalid UTF-8" 1 "--prompt: found invalid UTF-8 at byte 1" run --model both --prompt \
        $'a\xff'
    files model ends --specials "$llama3" --says "<|eot_id|>" --config '{"eos_token_id": 257}'
    run --model ends --prompts p.jsonl >answers 2>err
    equal "the answer to a request ends only where the model's files say so" '{"text":"","ids":[260,260]}' \
        "$(cat answers)"
    echo '{"bos_token":"<|begin_of_text|>","eos_token":"<|eot_id|>"}' >ends/special_tokens_map.json
    echo '{"eos_token_id":7,"temperature":2.0}' >ends/generation_config.json
    run --model ends --export ended >said 2>&1
    equal "special_tokens_map.json is in an export" "$(cat ends/special_tokens_map.json)" \
        "$(cat ended/special_tokens_map.json)"
    says "generation_config.json keeps the form of its numbers when an id is added" 0 \
        '^\{"eos_token_id":\[257,7,260\],"temperature":2.0\}$' cat ended/generation_config.json
    rm ends/tokenizer.json && echo '{"a": 0}' >ends/vocab.json && echo '#version: 0.2' >ends/merges.txt
    says "a tokenizer of vocab.json and merges.txt is copied, and a note says so" 0 \
        "note: the tokenizer vocab.json and merges.txt" run --model ends --export slow
    equal "both files are in the export" "a tokenizer" "$(cmp ends/vocab.json slow/vocab.json && cmp ends/merges.txt \
        slow/merges.txt && echo a tokenizer)"

    # templates and post-processors
    echo '{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}' >talk.jsonl
    files model llama --specials "$llama3" --tokenizer-config "$(json "bos_token=<|end_of_text|>")"
    run --model llama --export talker >said 2>&1
    rm -f talk.tok && $chat --tokenizer talker/tokenizer.json --out-train talk.tok talk.jsonl >said 2>&1
    equal "a template's bos_token is that of tokenizer_config.json" 257 "$(od -An -v -tu2 -j192 -N2 talk.tok | xargs)"
    mkdir llama/additional_chat_templates
    printf '%s' "$chatml" >llama/additional_chat_templates/default.jinja
    run --model llama --export default >said 2>&1
    equal "an export has additional_chat_templates/default.jinja as its template" \
        "$(cksum <llama/additional_chat_templates/default.jinja)" "$(cksum <default/chat_template.jinja)"
    rm -r llama/additional_chat_templates
    changed talker/tokenizer_config.json 't.pop("bos_token")'
    says "a template that needs a bos_token is refused without one" 1 'names no "bos_token"' $chat --tokenizer \
        talker/tokenizer.json --out-train unread.tok talk.jsonl
    changed both/tokenizer.json 't["post_processor"]["special_tokens"]["<|begin_of_text|>"]["ids"] = [257]'
    rm both/tokenizer.model
    printf '%s\n' '{"context":"a","continuation":"b"}' '{"context_ids":[257,64],"continuation_ids":[65]}' >q.jsonl
    run --model both --score q.jsonl >scores 2>err
    equal "the front has the id that the post-processor gives" "$(sed -n 2p scores)" "$(sed -n 1p scores)"
    changed both/tokenizer.json 't["post_processor"]["single"].pop()'
    says "a post-processor that drops the text is refused, with the cause" 1 \
        "texts need a tokenizer, and both/tokenizer.json needs .* to put a text 0 times" run \
        --model both --score q.jsonl

    # adapters and conversations
    mkdir -p llama && echo '{"peft_type":"LORA"}' >llama/adapter_config.json
    says "adapters in the model's own directory are not passed over" 1 "give --adapters llama to do so" \
        run --model llama --score q.jsonl
    rm llama/adapter_config.json
    for end in '"images":["a.png"]' '"weight":0' '"chat_template_kwargs":{"a":1}'; do
        echo '{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}],'"$end}" >talk.jsonl
        says "$end beside the messages is refused" 1 "${end%%:*} (cannot be rendered|beside the messages has no)" \
            $chat --tokenizer llama/tokenizer.json --out-train unread.tok talk.jsonl
    done
}

# ---------------------------------------------------------------- tokenizer files in checkpoints
# The data tools write a tokenizer's files next to the token files, and training copies them, unread, into checkpoints.
# same_files WHAT FROM TO FILE… : these files of the folder FROM are in TO, byte for byte
same_files() {
    local what=$1 from=$2 to=$3 file differs=
    shift 3
    for file in "$@"; do cmp -s "$from/$file" "$to/$file" || differs+=" $file"; done
    if [ -z "$differs" ]; then pass "$what" "$*"; else fail "$what" "these differ or are missing:$differs"; fi
}
# trains OPTION… : one step
trains() { run --seq 16 --batch 1 --steps 1 "$@" >said 2>&1 || fail "training with $*" "$(tail -n 1 said)"; }

copies() {
    local own="tokenizer.json tokenizer_config.json special_tokens_map.json" i
    for ((i = 0; i < 40; i++)); do echo '{"text":"caf\u00e9 one"}'; done >a.jsonl
    echo '{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}' >talk.jsonl
    for ((i = 0; i < 8; i++)); do cat talk.jsonl; done >talks.jsonl

    # what the data tools write
    files model llama --specials "$llama3" --front "<|begin_of_text|>" --tokenizer-config \
        "$(json "bos_token=<|begin_of_text|>" "eos_token=<|end_of_text|>")"
    echo '{"bos_token":"<|begin_of_text|>"}' >llama/special_tokens_map.json
    mkdir text chats templated bare
    "$tokens" --tokenizer llama/tokenizer.json --out-train text/t.tok --out-val text/v.tok --val-fraction 0.3 \
        a.jsonl >said 2>&1
    same_files "tokenize writes the tokenizer's files next to the token files" llama text $own
    equal "tokenize writes generation_config.json with the ends of documents and of turns" "256 [257, 260]" \
        "$(field text/generation_config.json bos_token_id) $(field text/generation_config.json eos_token_id)"
    $chat --tokenizer llama/tokenizer.json --out-train chats/t.tok talks.jsonl >said 2>&1
    same_files "chat writes the same files" text chats $own generation_config.json
    grep -q "message\['role'\] + '<|end_header_id|>" chats/chat_template.jinja &&
        pass "chat writes the template with which it rendered the conversations" "Llama 3's" ||
        fail "chat writes the template with which it rendered the conversations" "$(ls chats)"
    mkdir llama/additional_chat_templates
    printf '%s' "${chatml//im_/}" >llama/chat_template.jinja
    printf '%s' "$(cat chats/chat_template.jinja)" >llama/additional_chat_templates/default.jinja
    $chat --tokenizer llama/tokenizer.json --out-train templated/t.tok talk.jsonl >said 2>&1
    equal "additional_chat_templates/default.jinja is written as chat_template.jinja" \
        "$(cksum <llama/additional_chat_templates/default.jinja)" "$(cksum <templated/chat_template.jinja)"
    rm -r llama/additional_chat_templates llama/chat_template.jinja

    # what training copies from there
    cp llama/{config.json,model.safetensors} bare/
    trains --model bare --data chats/t.tok --out chatted
    same_files "a checkpoint has the files next to the data" chats chatted/latest $own generation_config.json \
        chat_template.jinja
    run --model chatted/latest --export converted >said 2>&1
    same_files "convert_llama3 keeps a checkpoint's files" chatted/latest converted $own generation_config.json \
        chat_template.jinja
    equal "a checkpoint's config.json has the ids of the tokenizer's files" "256 [257, 260]" \
        "$(field chatted/latest/config.json bos_token_id) $(field chatted/latest/config.json eos_token_id)"
    echo '{"eos_token_id":7,"temperature":2.0}' >bare/generation_config.json
    trains --model bare --data chats/t.tok --out settings
    says "a checkpoint has the model's generation_config.json, with the ends of the data's turns" 0 \
        '^\{"eos_token_id":\[7,257,260\],"temperature":2.0\}$' cat settings/latest/generation_config.json
    rm bare/generation_config.json
    printf 'no tokenizer' >chats/tokenizer.model
    trains --model bare --data chats/t.tok --out unread
    same_files "of two files next to the data, a checkpoint has the one that the data were made with" chats \
        unread/latest tokenizer.json
    [ ! -e unread/latest/tokenizer.model ] && pass "the other file is not copied" "tokenizer.model" ||
        fail "the other file is not copied" "$(ls unread/latest)"

    # two tokenizers
    files model chatty --specials "<|endoftext|>,<|im_start|>,<|im_end|>"
    says "files of another tokenizer next to the data are kept, and a note says so" 0 \
        "note: text/tokenizer.json is not of the tokenizer chatty/tokenizer.json, .* train with --tokenizer chatty" \
        "$tokens" --tokenizer chatty/tokenizer.json --out-train text/t2.tok --out-val text/v2.tok a.jsonl
    same_files "nothing was written over them" llama text $own
    says "data of another tokenizer than the one next to them are refused" 1 \
        "text/t2.tok was tokenized with a different tokenizer than text/tokenizer.json" \
        run --model chatty --data text/t2.tok --seq 16 --batch 1 --steps 1
    trains --model chatty --data text/t2.tok --out named --tokenizer chatty/tokenizer.json
    same_files "with --tokenizer, a checkpoint has the files next to that tokenizer" chatty named/latest tokenizer.json

    # what training copies from the model's directory
    files tokens n.tok 259 300
    printf '\n\016\n\005<unk>\025\0\0\0\0\030\002' >chatty/tokenizer.model
    printf '%s' "$chatml" >chatty/chat_template.jinja
    trains --model chatty --data n.tok --out of-model
    same_files "without a tokenizer next to the data, a checkpoint has the files next to the model" chatty \
        of-model/latest tokenizer.json chat_template.jinja
    [ ! -e of-model/latest/tokenizer.model ] && pass "tokenizer.json comes before a SentencePiece model" "not copied" ||
        fail "tokenizer.json comes before a SentencePiece model" "$(ls of-model/latest)"
    rm chatty/tokenizer.json chatty/tokenizer.model
    echo '{"a": 0}' >chatty/vocab.json && echo '#version: 0.2' >chatty/merges.txt
    trains --model chatty --data n.tok --out slow
    same_files "a tokenizer of vocab.json and merges.txt is copied" chatty slow/latest vocab.json merges.txt
    echo '{"model":{"type":"Unigram"},"added_tokens":[]}' >chatty/tokenizer.json
    trains --model chatty --data n.tok --out unknown
    same_files "a tokenizer that these programs cannot read is copied" chatty unknown/latest tokenizer.json
}

for section in ${2:-ends front one_end weights_of_others rope templates adapters conversations corpora others \
    unusual copies}; do
    mkdir "$work/$section" && cd "$work/$section" || exit
    $section
done
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
