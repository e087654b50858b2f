#!/usr/bin/env bash
# seeds.sh : writes the seeds of every target into seeds/, from which they come; what an input means says fuzz.cu.
# Those named was-* once were findings.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
export LC_ALL=C

# le BYTES NUMBER… : little-endian
le() {
    local i byte text='' width=$1 n
    shift
    for n; do for ((i = 0; i < width; i++, n >>= 8)); do printf -v byte '\\x%02x' $((n & 255)); text+=$byte; done; done
    printf '%b' "$text"
}
seed() { mkdir -p "seeds/$(dirname "$1")"; cat >"seeds/$1"; }

# ---------------------------------------------------------------- token files
# tokens WIDTH VOCABULARY FLAGS TOKEN… : a token file; a mask is written by whoever sets its flag
tokens() { local w=$1 v=$2 f=$3; shift 3; printf LLM3TOK1; le 4 1 "$w" "$v" "$f"; le 8 $#; head -c 32 /dev/zero; le \
    "$w" "$@"; }
{ le 1 3 98 0 0; tokens 2 100 0 {0..19}; } | seed token_file/narrow
{ le 1 4 50 66 1; le 2 {1..60}; } | seed token_file/built
{ le 1 2 200 119 23; le 4 {1..30}; } | seed token_file/built-masked-wide
{ le 1 3 98 1 5; tokens 4 100 0 {99..80} 1; } | seed token_file/wide-partial
{ le 1 7 254 3 22; tokens 2 256 1 {200..239}; printf '\0\1\1\1\0%.0s' {1..8}; } | seed token_file/masked
{ le 1 1 30 12 37; tokens 4 32 1 {1..9}; printf '\1%.0s' {1..9}; } | seed token_file/two-files-padded
{ le 1 0 0 2 0; tokens 2 2 0 0 1 1; } | seed token_file/smallest
{ le 1 3 8 0 0; tokens 2 10 0 9 10 11 12 13; } | seed token_file/beyond-the-vocabulary
{ le 1 3 98 0 0; tokens 2 100 0 {0..19} | head -c 90; } | seed token_file/cut-off
{ le 1 3 98 0 0; tokens 3 100 0 1 2 3 4 5; } | seed token_file/width-3

# ---------------------------------------------------------------- tokenizers
word() { le 1 ${#1}; printf %s "$1"; }
{ printf v; word ab; word abc; word bc; word ' the'; word '  '; word aa; printf '\0%s' \
    "The abc isn't  the aaaa 12345, ab!"; } | seed tokenizer/words
{ printf v; printf '\2\xc3\xa9'; printf '\3\xe3\x81\x82'; printf \
    '\0é\xe3\x81\x82 \xf0\x9f\x98\x80\r\n\r\n  \t x \xc2\xa0y'; } | seed tokenizer/unicode
{ printf v; word aa; word aaaa; word aaa; printf '\0%s' aaaaaaaaaaaaaaaaaaaaaaaaaaa; } | seed tokenizer/long-piece
{ printf v; word ab; printf '\0ab  \xff\xfeab \xc3'; } | seed tokenizer/not-utf-8
{ printf 'e\0YWI= 256\nYWJj 257\nIHRoZQ== 258\n\0'; printf '0\n97\n256 258'; } | seed tokenizer/lines-and-ids
{ printf 'e\0YWI= 256\nYWI= 257\n\0x'; } | seed tokenizer/twice
{ printf 'e\0YWI= 257\n\0x'; } | seed tokenizer/wrong-rank
{ printf 'e\1VA== 255\n\0#)'; } | seed tokenizer/a-byte-that-is-missing
{ printf 'e\1qg== 255\n\0'; } | seed tokenizer/last-byte
{ printf 'f{"version": "1.0"}'; } | seed tokenizer/json
expression="\\p{N}|'(?:s|t|re|ve|m|ll|d)| ?\\p{L}++| ?[^\\s\\p{L}\\p{N}]++|\\s+(?![^\\s\\p{N}])|\\s+"
{ printf 'o\0%s\0' "$expression"; word ab; word abc; word bc; word ' the'; word '  '; printf '\0%s' \
    "The abc isn't  12 ab!"; } | seed tokenizer/other
{ printf 'o\20%s\0' "$expression"; word '!!'; printf '\0!\252!\1a\x0\377!'; } | seed tokenizer/other-missing
{ printf 'o\0[^\\s\\p{N}]{1,3}|(?i:B)+?|\\r\0'; word ab; printf '\0ab\r7'; } | seed tokenizer/other-leaves-text
{ printf 'o\0(a*)*|.\0\0aaaa'; } | seed tokenizer/other-nothing
{ printf 'fbyte-level-bpe 1\ntokens 4\nmissing 254\nbos -\neos <|e|>\neot <|t|>\nsplit %s\nspecial <|e|> 0\nYQ== 1\nspecial <|t|> 2\nYg== 3\n\0abba 0 1 3' "$expression"; } | seed tokenizer/other-file
{ printf 'f\n\n'; } | seed tokenizer/blank

# ---------------------------------------------------------------- config.json
config='{"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
 "intermediate_size": 48, "vocab_size": 600, "max_position_embeddings": 256, "attention_bias": false, "rope_theta": 500000'
scaling='{"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 128}'
printf 'f%s}' "$config" | seed config/plain
printf 'f%s, "rope_scaling": %s}\0--world\n4\n--accum\n3\n--deterministic' "$config" "$scaling" |
    seed config/scaled-4-ranks
printf 'f%s, "tie_word_embeddings": true, "rope_parameters": %s}\0--world\n8\n--slots\n3\n--seq\n16' "$config" \
    "${scaling%\}}"', "rope_theta": 10000}' | seed config/tied-8-ranks
printf 'f%s, "head_dim": 16, "rms_norm_eps": 1e-05, "hidden_act": "silu", "mlp_bias": false, "rope_scaling": null}\0--batch\n4\n--vocab-size\n1000\n--ranks\n3' "$config" | seed config/head-dim
printf 'd{}' | seed config/lacks-all
printf 'd{"rope_parameters": %s}\0--world=3\n--tail=pad' "$scaling" | seed config/lacks-most
printf 'd{"vocab_size": 128256, "num_hidden_layers": 16, "tie_word_embeddings": true}\0--world=16\n--accum=8\n--accumulate=local\n--seq=1024\n--batch=2' | seed config/larger
printf 'd{}\0--world=1048576\n--accum=65536' | seed config/largest-world
printf 'd{"num_key_value_heads": 4, "num_hidden_layers": 10, "tie_word_embeddings": true}\0--world=32\n--tp=2\n--cp=2\n--pp=4\n--pp-schedule=interleaved\n--pp-light-ends\n--accum=4\n--seq=64' | seed config/mesh
printf 'd{}\0--world=8\n--tp=4\n--dp-shard=2\n--seq=33\n--deterministic' | seed config/tp
printf 'd{"num_attention_heads": 65536, "head_dim": 65536}' | seed config/widest
printf 'd{"hidden_size": 1048576, "num_hidden_layers": 65536, "num_attention_heads": 64, "head_dim": 128, "intermediate_size": 16777216, "vocab_size": 268435456}' | seed config/largest-model
printf 'd{}\0--world=1048576\n--accum=8192\n--batch=1048576\n--seq=1024' | seed config/was-more-tokens-than-63-bits
printf 'd{"hidden_size": 1048576, "num_hidden_layers": 4, "head_dim": 256, "intermediate_size": 8388608}\0--world=1048576\n--accum=65536\n--seq=1' | seed config/was-more-bytes-than-63-bits
printf 'd{"num_attention_heads": 8, "hidden_size": 64, "intermediate_size": 128}\0--world=4\n--lora-rank=4\n--base=int8\n--tp=2\n--seq=64' | seed config/adapters-8-bits
printf 'd{"quantization_config": {"method": "absmax_int8_block64", "all_tensors": true}}\0--world=3\n--lora-rank=2\n--lora-targets=q,v,down' | seed config/stored-in-8-bits
printf 'a{"peft_type": "LORA", "r": 8, "lora_alpha": 15, "bias": "none", "use_dora": false, "rank_pattern": {}, "target_modules": ["q_proj", "v_proj", "down_proj"]}' | seed config/adapters
printf 'f%s' "$config" | seed config/cut-off
printf 'f[1, 2]' | seed config/array

# ---------------------------------------------------------------- options
printf '%s\n' --model tiny --data 'data/*.tok' --steps 400 --lr 1e-3 --tail pad --workers 3 | seed options/train
printf '%s\n' --plan --world 64 --model llama3-70b --seq 512 --batch=2 --accum 4 | seed options/plan
printf '%s\n' --plan --ranks 3 --dp-shard auto --deterministic --slots 4 --threads 2 | seed options/plan-ranks
printf '%s\n' --generate '' --temperature 0 --top-p 1 --max-tokens 1 --min-lr=-1 --dtype bf16 | seed options/generate
printf '%s\n' --model out/a --eval val.tok --tokenizer t.model --vocab-size 0 --transport threads | seed options/eval
printf '%s\n' --sharding full_shard --wrap=block --tp 1 --recompute none --offload none --timeout 0.1 |
    seed options/later
printf '%s\n' --plan --world 64 --model llama3-8b --tp 4 --cp 2 --pp 4 --pp-schedule interleaved --pp-chunks 2 \
    --pp-light-ends --accum 8 --seq 64 --dp-replicate 2 | seed options/mesh
printf '%s\n' --plan --out out --export dir --help | seed options/help
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
    tensor $block.mlp.gate_proj.weight 1 2; tensor $block.mlp.up_proj.weight 1 2; tensor $block.mlp.down_proj.weight 2 1
    tensor model.norm.weight '' 2
    [ "${3:-}" = tied ] || tensor lm_head.weight 2 2
}
data() { for ((i = 0; i < at; i++)); do le 1 $((i * 37)); done; }
model F32 4; { printf 'h{"__metadata__":{"format":"pt"},%s}\0' "$entries"; data; } | seed safetensors/fp32
model BF16 2; { printf 'h{%s}\0' "$entries"; data; } | seed safetensors/bf16
model F16 2 tied; { printf 'H{%s}\0' "$entries"; data; } | seed safetensors/fp16-tied
model F32 4; { printf 'H{%s}\0' "$entries"; data; } | seed safetensors/tied-with-head
model F32 4; { printf 'h{%s}\0' "$(sed 's/\[1,2\]/[2,1]/' <<<"$entries")"; data; } | seed safetensors/another-shape
model F32 4; { printf f; le 8 $((${#entries} + 2)); printf '{%s}' "$entries"; data; } | seed safetensors/file
{ printf 'h{"a":{"dtype":"I32","shape":[],"data_offsets":[0,4]},"b":{"dtype":"F16","shape":[2,0,3],"data_offsets":[4,4]}}\0'; le 4 7; } | seed safetensors/scalar-and-nothing
{ printf 'h{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}}\0'; le 6 7; } | seed safetensors/overlap
printf 'h{}\0' | seed safetensors/was-no-tensor
printf 'h{"a":{"dtype":"F32","shape":[0,1e19],"data_offsets":[0,0]}}\0' | seed safetensors/was-larger-than-63-bits
printf 't%s\n' 'a F32 2,3' 'b BF16 4' 'c F16 1,2,2' 'd I32 1' 'e F32 2,0' | seed safetensors/lines
lines() { sed -E 's/\},?/\n/g; s/"([a-z0-9_.]*)":\{"dtype":"F32","shape":\[([0-9,]*)\][^\n]*/\1 F32 \2/g' \
    <<<"$entries"; }
model F32 4; printf 'q%s\n' "$(lines | sed -E '/proj/ { s/(.*) F32 (.*)/\1 I8 \2\n\1.scale F32 1/ }')" |
    seed safetensors/model-in-8-bits
printf 't%s\n' 'a I8 2,65' 'a.scale F32 3' 'b I8 0' 'b.scale F32 0' 'c I8 3' | seed safetensors/in-8-bits
map() { sed -E 's/:\{[^}]*\}/:"part-1.safetensors"/g' <<<"{$entries}"; }
model F32 4; printf 't%s\n' "$(lines)" | seed safetensors/model-as-lines
model F32 4; printf 'i{"metadata":{},"weight_map":%s}' \
    "$(map | sed -E 's/("model.layers.0.self_attn.o_proj)/\n\1/' | sed '2s/part-1/part-2/g')" | seed safetensors/index
printf 'i{"weight_map":{"a":"../b"}}' | seed safetensors/index-elsewhere

echo seq | seed planted/word
du -sb seeds
