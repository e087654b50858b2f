#!/usr/bin/env bash
# exports.sh [PROGRAM] : tokenizer.json and GGUF files with the whole programs: PROGRAM, which trains, and those next to
# it. Checkpoints and exports carry a tokenizer.json, data of the same vocabulary is accepted in either format, runs
# that resume write the same bytes, and other kinds are named. GGUF files come from a checkpoint, an export and merged
# adapters, and overwrite nothing.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. dev/test/checks.sh
program=$(realpath "${1:-build/cpu-fp32/train_llama3}")
tokens=${program%/*}/tokens_llama3 generate=$(program_for --prompt) evaluate=$(program_for --eval)
convert=$(program_for --export)
top=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export LC_ALL=C

mkdir "$work/bin"
ln -s "${program%/*}/tokens_llama3" "$work/bin/"
cat "$top"/docs/guide/*.md >"$work/text"
cd "$work"

# works NAME COMMAND… : exit code 0, nothing on standard error but notes
works() {
    local name=$1
    shift
    if timeout 120 "$@" </dev/null >.out 2>.err && ! grep -qv '^note: ' .err; then pass "$name" "$(head -n 1 .err)"
    else fail "$name" "exit code $?: $(cat .err)"; fi
}
# tokens TOKENIZER FOLDER : FOLDER/train.tok
tokens() {
    mkdir -p "$2"
    bin/tokens_llama3 --tokenizer "$1" --out-train "$2/train.tok" --out-val "$2/val.tok" text >.out 2>.err ||
        fail "tokenize with $1" "$(cat .err)"
}

mkdir model data
cat >model/config.json <<'END'
{"model_type":"llama","hidden_size":32,"num_hidden_layers":1,"num_attention_heads":2,"num_key_value_heads":2,
"head_dim":16,"intermediate_size":32,"max_position_embeddings":256,"vocab_size":600,"rms_norm_eps":1e-5}
END
bin/tokens_llama3 --train-tokenizer --vocab-size 600 --out data/tokenizer.model text >.out ||
    fail "train_tokenizer" "$(cat .out)"
tokens data/tokenizer.model data
train=("$program" --seq 16 --batch 2 --threads 1 --model model)

# ---------------------------------------------------------------- what checkpoints and exports carry
works "training with a tokenizer.model" "${train[@]}" --data data/train.tok --steps 2 --out a --save-every 1
works "an export of its checkpoint" "$convert" --threads 1 --model a/latest --export e
for file in tokenizer.json tokenizer_config.json generation_config.json; do
    same "$file is the same next to the data and in the checkpoint" data/$file a/latest/$file
    same "$file is the same in the checkpoint and the export" a/latest/$file e/$file
    if grep -q "\"$file\":{\"bytes\":" a/latest/trainer.json; then pass "trainer.json lists $file" "with its CRC-32"
    else fail "trainer.json lists $file" "it does not"; fi
done
same "a checkpoint keeps tokenizer.model" a/latest/tokenizer.model data/tokenizer.model
if [ -e e/tokenizer.model ]; then fail "an export has no tokenizer.model, which GGUF converters misread" "it has"
else pass "an export has no tokenizer.model, which GGUF converters misread" "$(cd e && echo *)"; fi
mkdir elsewhere
cp data/train.tok elsewhere/
works "data of the tokenizer.model, and its export" "$evaluate" --seq 16 --threads 1 --model e --eval \
    elsewhere/train.tok
for file in data/tokenizer.model a/latest/tokenizer.json; do
    "$tokens" --encode text --tokenizer $file >"ids-${file##*.}" 2>.err || fail "--encode with $file" "$(cat .err)"
done
same "--encode gives the same ids with tokenizer.model and the checkpoint's tokenizer.json" ids-model ids-json
works "a run on two ranks" "${train[@]}" --batch 1 --ranks 2 --data data/train.tok --steps 2 --out two --save-every 2
works "a resumed run" "${train[@]}" --data data/train.tok --steps 2 --out b --resume a/step-00000001
for file in config.json tokenizer.json tokenizer.model tokenizer_config.json generation_config.json; do
    same "resumed: $file" a/latest/$file b/latest/$file
    same "on two ranks: $file" a/latest/$file two/latest/$file
done
same "resumed: trainer.json" a/latest/trainer.json b/latest/trainer.json

# ---------------------------------------------------------------- tokenizer.json in place of tokenizer.model
mkdir other only
cp data/train.tok other/
cp a/latest/{config.json,model.safetensors,tokenizer.json,tokenizer_config.json} only/
works "data of the tokenizer.model, a model directory with tokenizer.json alone" "$program" --seq 16 --batch 2 \
    --threads 1 --model only --data other/train.tok --steps 1 --out c
same "a tokenizer.json is kept as it is" only/tokenizer.json c/latest/tokenizer.json
[ ! -e c/latest/tokenizer.model ] || fail "no tokenizer.model is made of a tokenizer.json" "there is one"
works "--prompt with tokenizer.json beside the model" "$generate" --model only --prompt "In the" --max-tokens 4
tokens a/latest/tokenizer.json made
same "token files of both formats have the same ids" <(tail -c +193 made/train.tok) <(tail -c +193 data/train.tok)
works "data of the tokenizer.json, a tokenizer.model" "${train[@]}" --data made/train.tok --steps 1 --tokenizer \
    data/tokenizer.model --out d
sed 's/"version": "1.0"/"version":  "1.0"/' a/latest/tokenizer.json >spaced.json
works "data of the tokenizer.model, a tokenizer.json that is written otherwise" "$evaluate" --seq 16 --threads 1 \
    --model e --eval other/train.tok --tokenizer spaced.json
bad "training takes only the bytes of a tokenizer that the data name" \
    "was tokenized with a different tokenizer than spaced.json" "${train[@]}" --data other/train.tok --steps 1 \
    --tokenizer spaced.json --out f
bin/tokens_llama3 --train-tokenizer --vocab-size 590 --out different.model text >.out
bad "data of another tokenizer" "was tokenized with a different tokenizer than different.model" "${train[@]}" --data \
    other/train.tok --steps 1 --tokenizer different.model --out g
TOKENIZER=a/latest/tokenizer.json works "text.sh takes a tokenizer.json" "$top/dev/data/text.sh" by-text text
same "text.sh with a tokenizer.json gives the same ids" <(tail -c +193 by-text/train.tok) <(tail -c +193 data/train.tok)
same "text.sh keeps the tokenizer.json" by-text/tokenizer.json a/latest/tokenizer.json

mkdir strange
tokens different.model strange
cp different.model strange/tokenizer.model
works "weights are trained on data of another tokenizer" "${train[@]}" --model e --data strange/train.tok --steps 1
if grep -q "^note: strange/train.tok was not made with e/tokenizer.json, the tokenizer of the weights" .err; then
    pass "a note says that the weights have another tokenizer" "$(cat .err)"
else fail "a note says that the weights have another tokenizer" "$(cat .err)"; fi

# ---------------------------------------------------------------- what stands in front of texts
mkdir meta front
python3 -c "
import base64
for i in range(256): print(base64.b64encode(bytes([i])).decode(), i)" >meta/tokenizer.model
cp meta/tokenizer.model front/
echo '{"add_bos_token": true, "bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}' \
    >front/tokenizer_config.json
for folder in meta front; do
    bin/tokens_llama3 --tokenizer $folder/tokenizer.model --out-train $folder/train.tok --out-val $folder/val.tok text \
        >$folder/said 2>&1 || fail "tokenize with $folder/tokenizer.model" "$(cat $folder/said)"
done
if grep -q "^each document begins with <|begin_of_text|>" front/said && ! grep -q "begins with" meta/said; then
    pass "\"add_bos_token\" puts a token in front of a tokenizer.model's texts" "$(grep begins front/said)"
else fail "\"add_bos_token\" puts a token in front of a tokenizer.model's texts" "$(cat front/said meta/said)"; fi
mkdir again
cp front/tokenizer.json again/
bin/tokens_llama3 --tokenizer again/tokenizer.json --out-train again/train.tok --out-val again/val.tok text >said 2>&1
meant() { head -c 80 "$1" | tail -c 16; tail -c +193 "$1"; } # ids of ends and fronts, bytes of text; tokens
same "the tokenizer.json that is written for it does the same" <(meant front/train.tok) <(meant again/train.tok)

# ---------------------------------------------------------------- other kinds
printf '{"model":{"type":"Unigram"},"added_tokens":[]}' >only/tokenizer.json
named="needs the model 'Unigram', which this program does not implement"
bad "--prompt with a tokenizer of another kind" "$named" "$generate" --model only --prompt "In the"
bad "--tokenizer of another kind" "$named" "$evaluate" --seq 16 --threads 1 --model e --eval other/train.tok \
    --tokenizer only/tokenizer.json
mkdir bytes
{
    head -c 32 data/train.tok
    sha256sum only/tokenizer.json | cut -d' ' -f1 | sed 's/../\\x&/g' | { IFS= read -r hash; printf '%b' "$hash"; }
    tail -c +65 data/train.tok
} >bytes/train.tok
works "training does not need a tokenizer of another kind beside the model" "$program" --seq 16 --batch 2 --threads 1 \
    --model only --data bytes/train.tok --steps 1 --out i
same "a tokenizer of another kind is copied" only/tokenizer.json i/latest/tokenizer.json
works "an export of a model with a tokenizer of another kind" "$convert" --threads 1 --model i/latest --export unread
if grep -q "^note: the tokenizer i/latest/tokenizer.json $named; it is copied as it is$" .err; then
    pass "a note says that it is only copied" "$(cat .err)"
else fail "a note says that it is only copied" "$(cat .err)"; fi
same "an export has it, too" only/tokenizer.json unread/tokenizer.json

# ---------------------------------------------------------------- GGUF files
gguf=("$convert" --threads 1 --export)
works "a GGUF file of a checkpoint" "${gguf[@]}" g/m.gguf --model a/latest
works "a GGUF file of an exported directory" "${gguf[@]}" k/m.gguf --model e
same "an exported directory's GGUF file is the same" g/m.gguf k/m.gguf
printf '%s\n' '# for ollama: ollama create NAME -f THIS_FILE' 'FROM ./m.gguf' \
    'TEMPLATE """<|begin_of_text|>{{ range .Messages }}<|start_header_id|>{{ .Role }}<|end_header_id|>' '' \
    '{{ .Content }}<|eot_id|>{{ end }}<|start_header_id|>assistant<|end_header_id|>' '' '"""' \
    'PARAMETER stop "<|eot_id|>"' >Modelfile
same "the Modelfile has the chat template" g/Modelfile Modelfile
works "a second GGUF file in the directory" "${gguf[@]}" g/n.gguf --model e --dtype q8_0
same "the first Modelfile stays" g/Modelfile Modelfile
same "the second one has the file's name" g/n.Modelfile <(sed 's/m.gguf/n.gguf/' Modelfile)
[ "$(ls g)" = "$(printf '%s\n' m.gguf Modelfile n.gguf n.Modelfile | LC_ALL=C sort)" ] ||
    fail "nothing else is left beside a GGUF file" "$(ls g)"
works "adapters for the export" "$program" --seq 16 --batch 2 --threads 1 --model e --data data/train.tok --steps 2 \
    --lora-rank 2 --out adapters
works "a GGUF file of a model merged with adapters" "${gguf[@]}" l/m.gguf --model e --adapters adapters/latest --merge
works "the merged model" "${gguf[@]}" merged --model e --adapters adapters/latest --merge
works "its GGUF file" "${gguf[@]}" o/m.gguf --model merged
same "merged weights are those of the merged model" l/m.gguf o/m.gguf
other=${convert/cpu-fp32/cpu-bf16}
version() { "$1" --version | head -n 1; }
if [ "$other" != "$convert" ] && [ -x "$other" ] && [ "$(version "$other")" = "$(version "$convert")" ]; then
    works "a merge by a build in bf16" "$other" --threads 1 --model e --adapters adapters/latest --merge --export \
        merged16
    worst=$(python3 - merged merged16 <<'END'
import array, json, sys
def tensors(folder):
    data = open(f"{folder}/model.safetensors", "rb").read()
    size = int.from_bytes(data[:8], "little")
    for name, t in json.loads(data[8 : 8 + size]).items():
        if name != "__metadata__":
            begin, end = (8 + size + at for at in t["data_offsets"])
            yield array.array("f", data[begin:end])
a, b = tensors(sys.argv[1]), tensors(sys.argv[2])
print("%.3g" % max(abs(x - y) / max(map(abs, s)) for s, t in zip(a, b, strict=True) for x, y in zip(s, t, strict=True)))
END
)
    if python3 -c "exit(not $worst < 1e-6)"; then
        pass "weights that a build in bf16 merges are as exact as the files" "off by $worst of a tensor's largest"
    else fail "weights that a build in bf16 merges are as exact as the files" "off by $worst"; fi
else echo "left out: a merge in bf16, without that build"; fi
cp -rL adapters/latest own && rm own/tokenizer.model && printf '{"model":{"type":"Unigram"}}' >own/tokenizer.json
bad "--prompt reads the tokenizer next to the adapters" "own/tokenizer.json needs the model 'Unigram'" "$generate" \
    --threads 1 --model e --adapters own --prompt "In the"
bad "a GGUF file that exists" "g/m.gguf exists already and is another model" "${gguf[@]}" g/m.gguf --model merged
bad "a GGUF file in int8" "use --dtype q8_0" "${gguf[@]}" x.gguf --model e --dtype int8
bad "a directory in q8_0" "use --export FILE.gguf, or --dtype int8" "${gguf[@]}" x --model e --dtype q8_0
bad "a GGUF file of adapters" "a GGUF file holds a whole model" "${gguf[@]}" x.gguf --model e --adapters \
    adapters/latest
mkdir bare
cp e/config.json e/model.safetensors bare/
bad "a GGUF file without a tokenizer" "needs a tokenizer" "${gguf[@]}" x.gguf --model bare
bad "a GGUF file with a line end in its name" "control character" "${gguf[@]}" $'x\ny.gguf' --model e
sed 's/"add_prefix_space": false/"add_prefix_space": true/' e/tokenizer.json >prefix.json
bad "a GGUF file with a tokenizer of another kind" "this program does not implement" "${gguf[@]}" x.gguf --model e \
    --tokenizer prefix.json
bad "a GGUF file in a file" "cannot create the directory" "${gguf[@]}" text/x.gguf --model e
works "an export in fp16" "${gguf[@]}" half --model e --dtype fp16
works "which is read again" "$evaluate" --seq 16 --threads 1 --model half --eval elsewhere/train.tok
[ ! -e x ] && [ ! -e x.gguf ] || fail "a refused export leaves nothing" "$(ls -d x*)"

# ---------------------------------------------------------------- memory
# 48 million parameters, 97 MB, all zero
mkdir large
cat >large/config.json <<'END'
{"model_type":"llama","hidden_size":512,"num_hidden_layers":4,"num_attention_heads":8,"num_key_value_heads":8,
"intermediate_size":2048,"max_position_embeddings":256,"vocab_size":30000,"rms_norm_eps":1e-5,
"tie_word_embeddings":false}
END
cat >large.py <<'END'
import json, resource, struct, subprocess, sys
C, F, V = 512, 2048, 30000
shapes = {"model.embed_tokens": (V, C), "model.norm": (C,), "lm_head": (V, C)}
for l in range(4):
    of = f"model.layers.{l}."
    shapes |= {of + "self_attn." + x: (C, C) for x in ("q_proj", "k_proj", "v_proj", "o_proj")}
    shapes |= {of + "mlp.gate_proj": (F, C), of + "mlp.up_proj": (F, C), of + "mlp.down_proj": (C, F)}
    shapes |= {of + "input_layernorm": (C,), of + "post_attention_layernorm": (C,)}
header, at = {}, 0
for name, shape in shapes.items():
    size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
    header[name + ".weight"] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
    at += size
text = json.dumps(header).encode()
with open("large/model.safetensors", "wb") as f:
    f.write(struct.pack("<Q", len(text)) + text)
    f.truncate(8 + len(text) + at)
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024)
END
for options in "--dtype bf16" "--dtype int8 --ranks 2 --tp 2"; do
    name="an export holds no weights, $options"
    export=("$convert" --threads 1 --model large --export "large ${options##* }" $options)
    if ! most=$(python3 large.py "${export[@]}" 2>.err); then
        fail "$name" "$(tail -n 1 .err)"
    elif [ "$most" -gt 80 ]; then fail "$name" "$most MB of memory for a file of 97 MB; expected at most 80"
    else pass "$name" "$most MB of memory for a file of 97 MB, <= 80"; fi
done

echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
