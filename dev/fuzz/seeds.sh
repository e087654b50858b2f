#!/usr/bin/env bash
# seeds.sh : writes the seeds of every target into seeds/, from which they come; its header says what an input means.
# Those named was-* once were findings.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
export LC_ALL=C

# le BYTES NUMBER… : little-endian
le() {
    local i byte text='' width=$1 n
    shift
    for n; do
        for ((i = 0; i < width; i++, n >>= 8)); do
            printf -v byte '\\x%02x' $((n & 255))
            text+=$byte
        done
    done
    printf '%b' "$text"
}
# seed TARGET/NAME: standard input becomes that seed
seed() {
    mkdir -p "seeds/$(dirname "$1")"
    cat >"seeds/$1"
}

# ---------------------------------------------------------------- token files
# tokens WIDTH VOCABULARY FLAGS TOKEN… : a token file; a mask is written by whoever sets its flag
tokens() {
    local width=$1 vocabulary=$2 flags=$3
    shift 3
    printf LLM3TOK1
    le 4 1 "$width" "$vocabulary" "$flags"
    le 8 $#
    head -c 32 /dev/zero
    le "$width" "$@"
}
{ le 1 3 98 0 0; tokens 2 100 0 {0..19}; } | seed token_file/narrow
{ le 1 4 50 66 1; le 2 {1..60}; } | seed token_file/built
{ le 1 2 200 119 23; le 4 {1..30}; } | seed token_file/built-masked-wide
{ le 1 4 50 226 1; le 2 {1..60}; printf '\0\1\2\3%.0s' {1..15}; } | seed token_file/built-masked-version-2
{ le 1 3 98 1 5; tokens 4 100 0 {99..80} 1; } | seed token_file/wide-partial
{ le 1 7 254 3 22; tokens 2 256 1 {200..239}; printf '\0\1\1\1\0%.0s' {1..8}; } | seed token_file/masked
{ le 1 7 254 1 3; tokens 2 256 $((1 | 8 << 8)) {1..17}; printf '\0\1\1\1%.0s' {1..4}; printf '\0'; } |
    seed token_file/packed
{ le 1 1 30 12 37; tokens 4 32 1 {1..9}; printf '\1%.0s' {1..9}; } | seed token_file/two-files-padded
{ le 1 0 0 2 0; tokens 2 2 0 0 1 1; } | seed token_file/smallest
{ le 1 3 8 0 0; tokens 2 10 0 9 10 11 12 13; } | seed token_file/beyond-the-vocabulary
{ le 1 3 98 0 0; tokens 2 100 0 {0..19} | head -c 90; } | seed token_file/cut-off
{ le 1 3 98 0 0; tokens 3 100 0 1 2 3 4 5; } | seed token_file/width-3

# ---------------------------------------------------------------- tokenizers
words() {
    local word
    for word; do
        le 1 ${#word}
        printf %s "$word"
    done
}
{
    printf v
    words ab abc bc ' the' '  ' aa
    printf '\0%s' "The abc isn't  the aaaa 12345, ab!"
} | seed tokenizer/words
{
    printf v
    printf '\2\xc3\xa9'
    printf '\3\xe3\x81\x82'
    printf '\0é\xe3\x81\x82 \xf0\x9f\x98\x80\r\n\r\n  \t x \xc2\xa0y'
} | seed tokenizer/unicode
{ printf v; words aa aaaa aaa; printf '\0%s' aaaaaaaaaaaaaaaaaaaaaaaaaaa; } | seed tokenizer/long-piece
{ printf v; words ab; printf '\0ab  \xff\xfeab \xc3'; } | seed tokenizer/not-utf-8
{ printf 'e\0YWI= 256\nYWJj 257\nIHRoZQ== 258\n\0'; printf '0\n97\n256 258'; } | seed tokenizer/lines-and-ids
{ printf 'e\0YWI= 256\nYWI= 257\n\0x'; } | seed tokenizer/twice
{ printf 'e\0YWI= 257\n\0x'; } | seed tokenizer/wrong-rank
{ printf 'e\1VA== 255\n\0#)'; } | seed tokenizer/a-byte-that-is-missing
{ printf 'e\1qg== 255\n\0'; } | seed tokenizer/last-byte
{ printf 'f{"version": "1.0"}'; } | seed tokenizer/json
expression="\\p{N}|'(?:s|t|re|ve|m|ll|d)| ?\\p{L}++| ?[^\\s\\p{L}\\p{N}]++|\\s+(?![^\\s\\p{N}])|\\s+"
{
    printf 'o\0%s\0' "$expression"
    words ab abc bc ' the' '  '
    printf '\0%s' "The abc isn't  12 ab!"
} | seed tokenizer/other
{ printf 'o\20%s\0' "$expression"; words '!!'; printf '\0!\252!\1a\x0\377!'; } | seed tokenizer/other-missing
{ printf 'o\0[^\\s\\p{N}]{1,3}|(?i:B)+?|\\r\0'; words ab; printf '\0ab\r7'; } | seed tokenizer/other-leaves-text
{ printf 'o\0(a*)*|.\0\0aaaa'; } | seed tokenizer/other-nothing
{
    printf 'f%s\n' 'byte-level-bpe 1'
    printf '%s\n' 'tokens 4' 'missing 254' 'bos -' 'eos <|e|>' 'eot <|t|>' "split $expression"
    printf '%s\n' 'special <|e|> 0' 'YQ== 1' 'special <|t|> 2' 'Yg== 3'
    printf '\0abba 0 1 3'
} | seed tokenizer/other-file
{ printf 'f\n\n'; } | seed tokenizer/blank

# ---------------------------------------------------------------- tokenizer.json
added='{"id":6,"content":"<|endoftext|>","special":true},{"id":7,"content":"<e>","special":true}'
vocab='"vocab":{"a":0,"b":1,"c":2,"bc":3,"ab":4,"\u0120":5}'
level='{"type":"ByteLevel","add_prefix_space":false}'
digits='{"type":"Digits","individual_digits":true}'
sequence='"pre_tokenizer":{"type":"Sequence","pretokenizers":'
# whole NAME SPLITTING MODEL TEXT : a file with these parts
whole() {
    printf 'f{"added_tokens":[%s],"normalizer":null,%s,"post_processor":null,"model":{"type":"BPE",%s}}\0%s' "$added" \
        "$2" "$3" "$4" | seed "tokenizer_json/$1"
}
whole in-order "\"pre_tokenizer\":$level" "$vocab,\"merges\":[\"b c\",\"a b\"]" 'abc ab bc'
whole out-of-order "\"pre_tokenizer\":$level" "$vocab,\"merges\":[[\"a\",\"b\"],[\"b\",\"c\"]]" 'abc abab'
whole digits "$sequence[$digits,$level]}" "$vocab,\"merges\":[\"a b\"],\"unk_token\":null" 'ab 12 bc'
whole ignore-merges "\"pre_tokenizer\":$level" "$vocab,\"merges\":[],\"ignore_merges\":true" 'bc abc'
whole unknown "\"pre_tokenizer\":$level" "$vocab,\"merges\":[],\"unk_token\":\"a\"" 'abd'
whole metaspace '"pre_tokenizer":{"type":"Metaspace"}' "$vocab,\"merges\":[]" 'abc'
{
    printf 'm{"type":"BPE","vocab":{"a":0,"b":1,"ab":2,"aab":3,"<e>":4,"<":5,">":6,"e":7},'
    printf '"merges":["a b","a ab"]}\0aab <e> aaab'
} | seed tokenizer_json/model-alone

# ---------------------------------------------------------------- chat templates
chatml="{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + "
chatml+="'\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
printf 'c{"eos_token":"x"}' | seed chat_template/none
printf 'c{"chat_template":"%s"}' "$chatml" | seed chat_template/chatml
printf 'c{"chat_template":[{"name":"tools","template":"x"},{"name":"default","template":"%s"}]}' "$chatml" |
    seed chat_template/several
printf 'c{"chat_template":{"name":"default"}}' | seed chat_template/object
printf 'j%s' "$chatml" | seed chat_template/jinja
printf 'j{{ bos_token }}{%% for m in messages %%}' | seed chat_template/another

# ---------------------------------------------------------------- config.json
# config NAME JSON [OPTION…]: options are on a line each, behind a zero byte
config() {
    local name=$1 json=$2 IFS=$'\n'
    shift 2
    {
        printf %s "$json"
        [ $# = 0 ] || printf '\0%s' "$*"
    } | seed "config/$name"
}
whole='{"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, '
whole+='"num_key_value_heads": 2,'$'\n'' "intermediate_size": 48, "vocab_size": 600, '
whole+='"max_position_embeddings": 256, "attention_bias": false, "rope_theta": 500000'
scaling='{"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, '
scaling+='"original_max_position_embeddings": 128}'
config plain "f$whole}"
config scaled-4-ranks "f$whole, \"rope_scaling\": $scaling}" --world 4 --accum 3 --deterministic
config tied-8-ranks \
    "f$whole, \"tie_word_embeddings\": true, \"rope_parameters\": ${scaling%\}}, \"rope_theta\": 10000}}" \
    --world 8 --slots 3 --seq 16
rest=', "head_dim": 16, "rms_norm_eps": 1e-05, "hidden_act": "silu", "mlp_bias": false, "rope_scaling": null}'
config head-dim "f$whole$rest" --batch 4 --vocab-size 1000 --ranks 3
config lacks-all 'd{}'
config lacks-most "d{\"rope_parameters\": $scaling}" --world=3 --tail=pad
config larger 'd{"vocab_size": 128256, "num_hidden_layers": 16, "tie_word_embeddings": true}' \
    --world=16 --accum=8 --accumulate=local --seq=1024 --batch=2
config largest-world 'd{}' --world=1048576 --accum=65536
config mesh 'd{"num_key_value_heads": 4, "num_hidden_layers": 10, "tie_word_embeddings": true}' \
    --world=32 --tp=2 --cp=2 --pp=4 --pp-schedule=interleaved --pp-light-ends --accum=4 --seq=64
config tp 'd{}' --world=8 --tp=4 --dp-shard=2 --seq=33 --deterministic
config widest 'd{"num_attention_heads": 65536, "head_dim": 65536}'
json='d{"hidden_size": 1048576, "num_hidden_layers": 65536, "num_attention_heads": 64, "head_dim": 128, '
json+='"intermediate_size": 16777216, "vocab_size": 268435456}'
config largest-model "$json"
config was-more-tokens-than-63-bits 'd{}' --world=1048576 --accum=8192 --batch=1048576 --seq=1024
config was-more-bytes-than-63-bits \
    'd{"hidden_size": 1048576, "num_hidden_layers": 4, "head_dim": 256, "intermediate_size": 8388608}' \
    --world=1048576 --accum=65536 --seq=1
config adapters-8-bits 'd{"num_attention_heads": 8, "hidden_size": 64, "intermediate_size": 128}' \
    --world=4 --lora-rank=4 --base=int8 --tp=2 --seq=64
config stored-in-8-bits 'd{"quantization_config": {"method": "absmax_int8_block64", "all_tensors": true}}' \
    --world=3 --lora-rank=2 --lora-targets=q,v,down
json='a{"peft_type": "LORA", "r": 8, "lora_alpha": 15, "bias": "none", "use_dora": false, "rank_pattern": {}, '
json+='"target_modules": ["q_proj", "v_proj", "down_proj"]}'
config adapters "$json"
config cut-off "f$whole"
config array 'f[1, 2]'

# ---------------------------------------------------------------- options
printf '%s\n' --model tiny --data 'data/*.tok' --steps 400 --lr 1e-3 --tail pad --workers 3 | seed options/train
printf '%s\n' --ranks 64 --model llama3-70b --seq 512 --batch=2 --accum 4 | seed options/plan
printf '%s\n' --ranks 3 --dp-shard auto --deterministic --slots 4 --threads 2 | seed options/plan-ranks
printf '%s\n' --lr 1e-3 --lr-schedule constant | seed options/constant-rate
printf '%s\n' --tp 2 --generate '' --temperature=0 --top-p 1 --max-tokens 1 --min-lr=-1 --dtype bf16 |
    seed options/generate
printf '%s\n' --model out/a --eval val.tok --tokenizer t.model --vocab-size 0 --transport threads | seed options/eval
printf '%s\n' --max-tokens 100 --world=0 --choices-every 0 --top-p 0.95 --dtype fp32 --ranks 2 | seed options/retired
printf '%s\n' --sharding full_shard --wrap=block --tp 1 --recompute none --offload none --timeout 0.1 |
    seed options/later
printf '%s\n' --ranks 64 --model llama3-8b --tp 4 --cp 2 --pp 4 --pp-schedule interleaved --pp-chunks 2 \
    --pp-light-ends --accum 8 --seq 64 --dp-replicate 2 | seed options/mesh
printf '%s\n' --out out --help | seed options/help
printf '%s\n' --steps 1e9 --beta2 0.999999999 --eps 1 --clip 1e30 --seed 2147483647 --weight-decay 0 |
    seed options/limits
printf '%s\n' --steps many | seed options/not-a-number
printf '%s\n' --encode= | seed options/empty
{ printf -- --; printf 'x%.0s' {1..100}; } | seed options/long

# ---------------------------------------------------------------- safetensors
# tensor NAME ROWS COLUMNS : its entry, behind those before it; ROWS '' for a vector
at=0
tensor() {
    local size=$((${2:-1} * $3 * width))
    entries+=${entries:+,}"\"$1\":{\"dtype\":\"$dtype\",\"shape\":[${2:+$2,}$3],\"data_offsets\":[$at,$((at + size))]}"
    at=$((at + size))
}
# model DTYPE WIDTH [tied] : the entries of the smallest model
model() {
    local block=model.layers.0
    dtype=$1 width=$2 at=0 entries=
    tensor model.embed_tokens.weight 2 2
    tensor $block.input_layernorm.weight '' 2
    for name in q k v o; do tensor $block.self_attn.${name}_proj.weight 2 2; done
    tensor $block.post_attention_layernorm.weight '' 2
    tensor $block.mlp.gate_proj.weight 1 2
    tensor $block.mlp.up_proj.weight 1 2
    tensor $block.mlp.down_proj.weight 2 1
    tensor model.norm.weight '' 2
    [ "${3:-}" = tied ] || tensor lm_head.weight 2 2
}
data() { for ((i = 0; i < at; i++)); do le 1 $((i * 37)); done; }
# file FORMAT: the file of the last model; FORMAT prints its entries
file() {
    printf "$1" "$entries"
    data
}
model F32 4
file 'h{"__metadata__":{"format":"pt"},%s}\0' | seed safetensors/fp32
model BF16 2
file 'h{%s}\0' | seed safetensors/bf16
model F16 2 tied
file 'H{%s}\0' | seed safetensors/fp16-tied
model F32 4
file 'H{%s}\0' | seed safetensors/tied-with-head
{ printf 'h{%s}\0' "$(sed 's/\[1,2\]/[2,1]/' <<<"$entries")"; data; } | seed safetensors/another-shape
{ printf f; le 8 $((${#entries} + 2)); file '{%s}'; } | seed safetensors/file
# header ENTRY…: of tensors that are no model's
header() {
    local IFS=,
    printf 'h{%s}\0' "$*"
}
{
    header '"a":{"dtype":"I32","shape":[],"data_offsets":[0,4]}' \
        '"b":{"dtype":"F16","shape":[2,0,3],"data_offsets":[4,4]}'
    le 4 7
} | seed safetensors/scalar-and-nothing
{
    header '"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}' \
        '"b":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}'
    le 6 7
} | seed safetensors/overlap
header | seed safetensors/was-no-tensor
header '"a":{"dtype":"F32","shape":[0,1e19],"data_offsets":[0,0]}' | seed safetensors/was-larger-than-63-bits
printf 't%s\n' 'a F32 2,3' 'b BF16 4' 'c F16 1,2,2' 'd I32 1' 'e F32 2,0' | seed safetensors/lines
# lines: the entries as the 't' and 'q' inputs name them
lines() {
    sed -E 's/\},?/\n/g; s/"([a-z0-9_.]*)":\{"dtype":"F32","shape":\[([0-9,]*)\][^\n]*/\1 F32 \2/g' <<<"$entries"
}
printf 'q%s\n' "$(lines | sed -E '/proj/ { s/(.*) F32 (.*)/\1 I8 \2\n\1.scale F32 1/ }')" |
    seed safetensors/model-in-8-bits
printf 't%s\n' 'a I8 2,65' 'a.scale F32 3' 'b I8 0' 'b.scale F32 0' 'c I8 3' | seed safetensors/in-8-bits
printf 't%s\n' "$(lines)" | seed safetensors/model-as-lines
map() { sed -E 's/:\{[^}]*\}/:"part-1.safetensors"/g' <<<"{$entries}"; }
two_files=$(map | sed -E 's/("model.layers.0.self_attn.o_proj)/\n\1/' | sed '2s/part-1/part-2/g')

# ---------------------------------------------------------------- the index of weights
printf 'i{"metadata":{},"weight_map":%s}' "$two_files" | seed index/two-files
printf 'i{"weight_map":{"a":"part-1.safetensors","b":"part-2.safetensors"}}' | seed index/other-names
printf 'i{"weight_map":{"a":"../b"}}' | seed index/elsewhere
printf 'i{"weight_map":{"a":"part-1.safetensors"}}' | seed index/half
printf 'i{"weight_map":{"a":"part-1.safetensors","a":"part-2.safetensors"}}' | seed index/a-key-twice
printf 'i{"weight_map":[]}' | seed index/a-list

# ---------------------------------------------------------------- trainer.json
# crc32 : of standard input, as a number
crc32() { gzip -c | tail -c 8 | od -An -tu4 -N4 | tr -d ' '; }
config_sum=$(printf '{}\n' | crc32)
weights_sum=$(head -c 100 /dev/zero | crc32)
progress='"step":3,"updates":2,"skips":1,"samples":96,"epoch":1,"samples_of_epoch":32'
listed='"config.json":{"bytes":3,"crc32":['$config_sum']}'
listed+=',"model.safetensors":{"bytes":100,"crc32":['$weights_sum']}'
# trainer PROGRESS FILES
trainer() {
    printf 'b{\n"format":1,\n%s,\n"settings":{"--seq":"16"},\n"chunk_bytes":4194304,\n"files":{%s}}' "$1" "$2"
}
trainer "$progress" "$listed" | seed trainer/whole
trainer "$progress" '' | seed trainer/no-files
trainer "$progress" "${listed/$config_sum/1}" | seed trainer/another-sum
trainer "$progress" "${listed/$config_sum/-1e300}" | seed trainer/a-sum-beyond-all
trainer "$progress" "${listed/model/optimizer}" | seed trainer/a-file-missing
trainer "${progress/96/9e15}" "$listed" | seed trainer/many-samples
outliers='"outliers":{"skipped":1,"loss":[2.5,2.25,0.1],"grad_norm":[1e-3,7,-0.0]}'
trainer "$progress,$outliers" "$listed" | seed trainer/outliers
trainer "$progress,${outliers/2.5/1e999}" "$listed" | seed trainer/an-infinite-outlier
{ printf f; trainer "$progress" "$listed" | tail -c +2; } | seed trainer/no-sum

# ---------------------------------------------------------------- adapters
adapters='{"peft_type": "LORA", "r": 1, "lora_alpha": 15, "bias": "none", "target_modules": ["q_proj", "down_proj"]}'
printf %s "$adapters" | seed adapters/two-targets
printf %s "${adapters/\"r\": 1/\"r\": 2}" | seed adapters/rank-2
entries=
at=0 dtype=F32 width=4
for name in A B; do
    tensor "base_model.model.model.layers.0.self_attn.q_proj.lora_$name.weight" $([ $name = A ] && echo 1 2 || echo 2 1)
done
{ printf '%s\0{%s}\0' "${adapters/, \"down_proj\"/}" "$entries"; data; } | seed adapters/with-a-file
{ printf '%s\0{%s}\0' "$adapters" "$entries"; data; } | seed adapters/a-file-of-others

# ---------------------------------------------------------------- cluster files
# ops : a row of each rated op
ops() {
    local op comma=
    printf '"matmuls":['
    for op in linear_forward linear_backward_weight linear_backward_input; do
        printf '%s{"dtype":"fp32","op":"%s","M":8,"N":16,"K":32,"flops_per_s":1e9}' "$comma" $op
        comma=,
    done
    printf '],"attention":[' && comma=
    for op in attention_forward attention_backward; do
        printf '%s{"dtype":"fp32","op":"%s","B":1,"T":64,"HD":32,"NH":4,"NKV":2,"flops_per_s":1e9}' "$comma" $op
        comma=,
    done
    printf ']'
}
host='"name":"a","rates_of":"host","cores_per_host":8,"memory_bytes_per_s":1e9'
links='"links":{"within_host":{"latency_s":1e-6,"bytes_per_s":1e9},'
links+='"between_hosts":{"latency_s":1e-5,"bytes_per_s":1e8}}'
row='"transport":"threads","ranks":2,"hosts":1,"latency_s":1e-6,"bytes_per_s":1e9'
row+=',"measured_bytes":[256,1024],"measured_s":[1e-6,2e-6]'
rows='"collectives":[{"op":"all_gather",'$row'},{"op":"reduce_scatter",'$row'},{"op":"reduce_scatter+sum",'$row'}]'
printf '\1{%s,%s,%s}' "$host" "$(ops)" "$rows" | seed cluster/rows
printf '\16{%s,%s,%s}' "$host" "$(ops)" "$rows" | seed cluster/rows-of-threads
printf '\2{%s,%s,%s}' "${host/host/device},\"ranks_per_host\":4" "$(ops)" "$links" | seed cluster/links
printf '\3{%s,%s,%s,%s}' "$host,\"ranks_per_host\":8,\"hosts_per_rack\":2" "$(ops)" "$links" "$rows" |
    seed cluster/links-and-rows
printf '\0{%s,%s}' "$host" "$(ops)" | seed cluster/one-rank
printf '\1{%s,%s}' "$host" "$rows" | seed cluster/no-ops

# ---------------------------------------------------------------- samples.jsonl
data_line='{"windows":4,"tail":"drop","consumed_before":0}'
# audit NAME LINE…
audit() {
    local name=$1 IFS=,
    shift
    printf 'j[%s]' "$*" | seed "audit/$name"
}
audit two-epochs "$data_line" '{"step":1,"epoch":0,"samples":[2,0]}' '{"step":2,"epoch":0,"samples":[1,3]}' \
    '{"step":3,"epoch":1,"samples":[3,2]}'
audit padded "${data_line/drop/pad}" '{"step":1,"epoch":0,"samples":[2,0,1]}' '{"step":2,"epoch":0,"samples":[3,2,0]}'
audit resumed "${data_line/0\}/3\}}" '{"step":7,"epoch":2,"samples":[1,3]}'
audit twice "$data_line" '{"step":1,"epoch":0,"samples":[2,2]}'
audit windows-beyond-all "${data_line/4/1e300}"
audit steps-beyond-all "$data_line" '{"step":1e300,"epoch":-1e300,"samples":[1e300]}'
sources='"sources":[{"data":"a","windows":3,"share":0.75,"consumed_before":0},'
sources+='{"data":"b","windows":1,"share":0.25,"consumed_before":0}]'
audit mixture "${data_line/%\}/,$sources\}}" '{"step":1,"epoch":0,"samples":[2,0]}' \
    '{"step":2,"epoch":0,"samples":[3,1]}' '{"step":3,"epoch":0,"samples":[1,2,3,0]}'
printf 'f%s\n' "$data_line" '{"step":1,"epoch":0,"samples":[2,0]}' '{"step":2,"ep' | seed audit/torn

# ---------------------------------------------------------------- conversations
user='{"role":"user","content":"Hello, <|im_end|> 1 2 é"}'
assistant='{"role":"assistant","content":" Good day.\n"}'
system='{"role":"system","content":"Be brief."}'
for form in c l; do
    printf '%s{"messages":[%s,%s]}\n' $form "$user" "$assistant" | seed chat/one-$form
    printf '%s{"messages":[%s,%s,%s,%s,%s]}\n[%s,%s]\n' $form "$system" "$user" "$assistant" "$user" "$assistant" \
        "$user" "$assistant" | seed chat/longer-$form
done
printf 'c{"messages":[%s],"tools":[{}]}\n' "$user" | seed chat/tools
printf 'c{"messages":[{"role":"user","content":"\\u0000"}]}\n' | seed chat/zero
printf 'l[{"role":"assistant","content":" \302\240\\u2003 "}]\n' | seed chat/spaces-alone

# requests
printf 's{"id":1,"context":"a b","continuation":" c"}\n\n{"id":"x","context":"","continuation":"d"}' |
    seed requests/texts
printf 's{"context_ids":[1,2,3],"continuation_ids":[4]}\n{"context_ids":[0],"continuation_ids":[7,8]}\n' |
    seed requests/ids
printf 'c{"context":"a","endings":["b","c "],"label":1}\n{"ctx":"a ","endings":["b","c","d"],"label":"2"}\n' |
    seed requests/choices
printf 's{"context":"%s","continuation":"%s"}\n' aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa bbbbbb | seed requests/cut

echo seq | seed planted/word
du -sb seeds

# ---------------------------------------------------------------- mixtures
printf '@a.mix:0.7,@b.mix:0.3' | seed mixture/two
printf '@a.mix:5,@b.mix:3,@e:1.mix:2' | seed mixture/colon-in-a-name
printf '@c,d.mix' | seed mixture/comma-in-a-name
printf '@?.mix,@e:1.mix' | seed mixture/without-weights
printf '@a.mix:1,@?.mix:1' | seed mixture/same-file-twice
printf '@a.mix:nan,@b.mix:1' | seed mixture/weight-that-is-no-number
