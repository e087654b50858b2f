#!/usr/bin/env bash
# golden.sh [quick] : this tree against commit 0494a48, both built and run on this machine.
# Losses, gradient norms, the samples of each step and every byte of every checkpoint must be equal; so must what
# --eval, --export, --generate and a resumed checkpoint of the old program give. `quick` leaves out bf16 and the
# emulator. ONLY=REGEX runs the cases whose names match. GOLDEN_BASE=DIR is a checkout of 0494a48 (default: a git
# worktree in build/golden-base). Ends with `N passed, N failed`.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export OMP_NUM_THREADS=1 LC_ALL=C
top=$PWD
base=${GOLDEN_BASE:-$PWD/build/golden-base}
[ -d "$base" ] || git worktree add -q --detach "$base" 0494a48 || exit 1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
passed=0 failed=0
quick=
[ "${1:-}" != quick ] || quick=1

# Without AVX-512, oneDNN's bits depend on the number of threads: both sides use the plain C matmul there.
library=
grep -q -m1 avx512f /proc/cpuinfo || library=HAVE_ONEDNN=

# build TREE : the programs that are compared
build() {
    make -s -C "$1" PRECISION=fp32 CUDA= $library BUILD=build/golden-cpu-fp32 build/golden-cpu-fp32/train_llama3 ||
        exit 1
    [ -z "$quick" ] || return 0
    make -s -C "$1" PRECISION=bf16 CUDA= $library BUILD=build/golden-cpu-bf16 build/golden-cpu-bf16/train_llama3 ||
        exit 1
    make -s -C "$1" PRECISION=fp32 CPU_CUDA_BUILD=build/golden-emulator build/golden-emulator/train_llama3_cuda ||
        exit 1
}
build "$base"
build "$top"

VOCAB_SIZE=600 "$base/dev/data/text.sh" "$work/text" "$base"/*.h >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
mkdir "$work/model"
cat >"$work/model/config.json" <<'END_OF_CONFIG'
{"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
 "intermediate_size": 48, "vocab_size": 600, "max_position_embeddings": 256, "rope_theta": 500000}
END_OF_CONFIG
sed 's/"model_type"/"tie_word_embeddings": true, "model_type"/' "$work/model/config.json" >"$work/tied.json"
mkdir "$work/wide"
sed 's/: 32/: 128/; s/: 48/: 256/' "$work/tied.json" >"$work/wide/config.json"
mkdir "$work/tied" && mv "$work/tied.json" "$work/tied/config.json"

pass() { echo "pass $1"; passed=$((passed + 1)); }
fail() { echo "FAIL $1: $2"; failed=$((failed + 1)); }
wanted() { [[ $1 =~ ${ONLY:-} ]]; }

# run TREE PROGRAM OUT OPTIONS… : one run of one side
run() {
    local tree=$1 program=$2 out=$3
    shift 3
    (cd "$work" && exec timeout 300 "$tree/$program" "$@" --out "$out") >"$work/$out.log" 2>&1
}

# results OUT : what both sides must have alike
results() {
    sed -nE 's/^\{"step":([0-9]+),"(val_)?loss":([^,]*),("grad_norm":[^,]*,"lr":[^,]*)?.*/\1 \3 \4/p' \
        "$work/$1/metrics.jsonl"
    (cd "$work/$1" && cat samples.jsonl 2>/dev/null | sha256sum; sha256sum step-*/* 2>/dev/null; readlink latest)
}

# compare NAME OUT : old/OUT and new/OUT
compare() {
    local old new
    old=$(results "old-$2") new=$(results "new-$2")
    if [ -z "$old" ]; then fail "$1" "the old program gives nothing: $(tail -n 1 "$work/old-$2.log")"
    elif [ "$old" = "$new" ]; then pass "$1: $(wc -l <<<"$old") values and hashes"
    else
        fail "$1" "$(diff <(echo "$old") <(echo "$new") | head -n 4 | tr '\n' ' '); $(tail -n 1 "$work/new-$2.log")"
    fi
}

common=(--data text/train.tok --val text/val.tok --val-every 3 --seq 32 --batch 1 --threads 1 --steps 6 --save-every \
    3 --lr 0.003 --warmup 2 --deterministic)
count=0
# golden NAME PROGRAM OPTIONS… : six steps with two checkpoints and two validations
golden() {
    local name=$1 program=$2
    shift 2
    wanted "$name" || return 0
    count=$((count + 1))
    run "$base" "$program" "old-$count" "${common[@]}" "$@" &
    run "$top" "$program" "new-$count" "${common[@]}" "$@" &
    wait
    compare "$name" "$count"
}
fp32=build/golden-cpu-fp32/train_llama3 bf16=build/golden-cpu-bf16/train_llama3 \
    emulator=build/golden-emulator/train_llama3_cuda
m=(--model model)

golden "one rank" $fp32 "${m[@]}" --accum 2
golden "full_shard on 4 ranks" $fp32 "${m[@]}" --ranks 4 --accum 2
golden "shard_grad_op, sums kept locally" $fp32 "${m[@]}" --ranks 2 --accum 3 --sharding shard_grad_op --accumulate \
    local
golden "no_shard, selective recomputation" $fp32 "${m[@]}" --ranks 2 --sharding no_shard --recompute selective
golden "hybrid, units by size" $fp32 "${m[@]}" --ranks 4 --dp-replicate 2 --wrap size:20000 --recompute every:2
golden "tensor parallelism" $fp32 "${m[@]}" --ranks 4 --tp 2 --recompute full
golden "context parallelism, documents" $fp32 "${m[@]}" --ranks 4 --cp 2 --doc-mask --batch 2
golden "1F1B" $fp32 "${m[@]}" --ranks 4 --pp 2 --accum 4 --recompute selective
golden "interleaved pipeline, tied" $fp32 --model tied --ranks 4 --pp 2 --pp-schedule interleaved --pp-chunks 2 \
    --accum 4
golden "tp, cp, pp and shards" $fp32 --model tied --ranks 16 --tp 2 --cp 2 --pp 2 --accum 2 --doc-mask
golden "offload of everything, asynchronous saves" $fp32 "${m[@]}" --ranks 2 --offload all --save-mode async
golden "gradients reduced in bf16" $fp32 "${m[@]}" --ranks 4 --reduce-dtype bf16
golden "LoRA on fp32" $fp32 "${m[@]}" --ranks 2 --lora-rank 4 --lora-alpha 8 --base fp32
golden "LoRA on int8" $fp32 "${m[@]}" --ranks 4 --lora-rank 4 --lora-alpha 8 --base int8 --dp-replicate 2
golden "LoRA on int8:all with tp" $fp32 --model wide --ranks 4 --tp 2 --lora-rank 4 --lora-targets q,v,down --base \
    int8:all --recompute full
if [ -z "$quick" ]; then
    golden "bf16, one rank" $bf16 "${m[@]}" --accum 2
    golden "bf16, full_shard and recomputation" $bf16 "${m[@]}" --ranks 4 --recompute selective
    golden "bf16, tp, cp, pp" $bf16 --model tied --ranks 8 --tp 2 --cp 2 --pp 2 --accum 2
    golden "bf16, LoRA on int8" $bf16 "${m[@]}" --ranks 2 --lora-rank 4 --base int8
    golden "bf16, interleaved, light ends" $bf16 "${m[@]}" --ranks 2 --pp 2 --pp-light-ends --accum 2 --recompute \
        every:2
    golden "emulator, full_shard" $emulator "${m[@]}" --ranks 2 --accum 2
    golden "emulator, tp and pp" $emulator --model tied --ranks 4 --tp 2 --pp 2 --accum 2
    golden "emulator, LoRA on int8" $emulator "${m[@]}" --ranks 2 --lora-rank 4 --base int8
fi

# same NAME COMMAND… : standard output of both programs, word by word
same() {
    local name=$1 old new
    wanted "$name" || return 0
    shift
    old=$(cd "$work" && "$base/$fp32" "$@" 2>&1) new=$(cd "$work" && "$top/$fp32" "$@" 2>&1)
    if [ -n "$old" ] && [ "$old" = "$new" ]; then
        pass "$name: ${#old} characters"
    else
        fail "$name" "$(diff <(echo "$old") <(echo "$new") | head -n 4 | tr '\n' ' ')"
    fi
}

# what the old program wrote: read, evaluated, exported, sampled from, and trained on by both
run "$base" $fp32 old-start "${common[@]}" "${m[@]}" --ranks 2
start=old-start/step-00000003
same "--eval" --model $start --eval text/val.tok --seq 32 --batch 1 --threads 1 --deterministic
same "--encode" --encode text/tokenizer.model --tokenizer text/tokenizer.model
if wanted "--generate"; then
    for side in base top; do
        (cd "$work" && "${!side}/$fp32" --model $start --generate "int main" --max-tokens 40 --temperature 0.8 --seed \
            3 --threads 1 --deterministic 2>/dev/null | grep -v '^[a-z ]*:\| tokens/s' >"generated-$side")
    done
    if [ -s "$work/generated-base" ] && cmp -s "$work/generated-base" "$work/generated-top"; then
        pass "--generate: $(wc -c <"$work/generated-base") bytes"
    else fail "--generate" "$(diff "$work/generated-base" "$work/generated-top" | head -n 6 | tr '\n' ' ')"; fi
fi
for dtype in fp32 bf16 int8; do
    wanted "--export" || continue
    for side in base top; do (cd "$work" && "${!side}/$fp32" --model $start --export "export-$dtype-$side" --dtype \
        $dtype --threads 1 >/dev/null 2>&1); done
    old=$(cd "$work/export-$dtype-base" && sha256sum *) new=$(cd "$work/export-$dtype-top" && sha256sum *)
    if [ -n "$old" ] && [ "$old" = "$new" ]; then
        pass "--export --dtype $dtype: $(wc -l <<<"$old") files"
    else
        fail "--export --dtype $dtype" "$(diff <(echo "$old") <(echo "$new") | tr '\n' ' ')"
    fi
done
for layout in "--accum 2" "--ranks 4 --tp 2" "--ranks 4 --pp 2 --sharding no_shard"; do
    wanted "resumed" || continue
    count=$((count + 1))
    run "$base" $fp32 "old-$count" "${common[@]}" "${m[@]}" $layout --resume "$work/$start" &
    run "$top" $fp32 "new-$count" "${common[@]}" "${m[@]}" $layout --resume "$work/$start" &
    wait
    compare "a checkpoint of the old program, resumed with $layout" "$count"
done
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
