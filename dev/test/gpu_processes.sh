#!/usr/bin/env bash
# gpu_processes.sh: ranks that are processes of mpirun, each with a GPU of the emulator, start and train over NCCL. NCCL
# is emulated over MPI (dev/cuda_on_cpu/nccl_processes.h). hosts.sh does the same on several hosts.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
. dev/test/checks.sh
export LC_ALL=C OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_mpi_yield_when_idle=1
threads=build/cuda-on-cpu-fp32/train_llama3_cuda processes=build/cuda-on-mpi-fp32/train_llama3_cuda
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

make --no-print-directory PRECISION=fp32 "$threads" "$processes" >"$work/said" 2>&1 || {
    fail "the programs" "do not build: $(tail -n 2 "$work/said")"
    exit 1
}
dev/test/sample_text.sh "$work/sample"
VOCAB_SIZE=600 dev/data/text.sh "$work/text" "$work/sample" >"$work/said" 2>&1 || {
    fail "the data" "$(tail -n 2 "$work/said")"
    exit 1
}
mkdir "$work/model"
cat >"$work/model/config.json" <<'END'
{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
 "intermediate_size": 160, "vocab_size": 600, "max_position_embeddings": 256, "rope_theta": 500000}
END
train=(--model "$work/model" --data "$work/text/train.tok" --seq 32 --batch 1 --threads 1 --steps 3 --timeout 20)

# start RANKS GPUS OPTION…: trains under mpirun on a host with so many GPUs; sets `code`
start() {
    local ranks=$1 gpus=$2
    shift 2
    CUDA_ON_CPU_DEVICES=$gpus timeout 120 mpirun --oversubscribe --bind-to none -np "$ranks" "$processes" \
        "${train[@]}" "$@" >"$work/said" 2>&1
    code=$?
}
hash_of() { (cd "$1/latest" && sha256sum -- * | sha256sum | cut -c1-16); }

# same_bits NAME RANKS OPTION…: processes write the checkpoint that threads write
same_bits() {
    local name=$1 ranks=$2 expected
    shift 2
    rm -rf "$work/one" "$work/several"
    CUDA_ON_CPU_DEVICES=$ranks "$threads" "${train[@]}" --ranks "$ranks" --transport nccl --deterministic "$@" \
        --out "$work/one" >"$work/said" 2>&1
    expected=$(hash_of "$work/one")
    start "$ranks" "$ranks" --deterministic "$@" --out "$work/several"
    if [ "$code" = 0 ] && [ "$(hash_of "$work/several")" = "$expected" ] && grep -q "over nccl" "$work/said"; then
        pass "mpirun, $ranks GPUs, $name: the checkpoint of ranks that are threads" "$expected"
    else fail "mpirun, $ranks GPUs, $name: the checkpoint of ranks that are threads" \
        "exit code $code: $(grep -aE '^(error|failure)|CUDA on a CPU' "$work/said" | head -n 2)"; fi
}

same_bits "full_shard" 4
same_bits "tensor parallelism" 4 --tp 2 --recompute every:2
same_bits "a pipeline of two" 4 --pp 2 --accum 2
same_bits "an interleaved pipeline" 4 --pp 2 --accum 4 --pp-schedule interleaved --pp-chunks 2
same_bits "a pipeline of four" 4 --pp 4 --accum 4
same_bits "replicas" 4 --dp-replicate 2

start 4 4 --out "$work/summed"
if [ "$code" = 0 ] && [ "$(grep -c '"loss"' "$work/summed/metrics.jsonl")" = 3 ]; then
    pass "mpirun, 4 GPUs: NCCL sums the gradients" "$(grep -c '"loss"' "$work/summed/metrics.jsonl") steps"
else fail "mpirun, 4 GPUs: NCCL sums the gradients" "exit code $code: $(tail -n 1 "$work/said")"; fi

# refused NAME RANKS GPUS PATTERN
refused() {
    start "$2" "$3"
    if [ "$code" = 1 ] && grep -qaE "$4" "$work/said"; then pass "$1" "$(grep -aE -m1 "$4" "$work/said")"
    else fail "$1" "exit code $code, expected 1 and '$4': $(tail -n 2 "$work/said" | tr '\n' ' ')"; fi
}
refused "more ranks on a host than it has GPUs" 4 2 "^error: 4 ranks were started on a host with 2 GPUs"
refused "each rank sees one GPU, and it is the same" 2 1 "^error: ranks 0 and 1 share one GPU"

# shown RANKS WHICH: under mpirun on a host with 4 GPUs; each rank sees those that WHICH, a shell expression, names
shown() {
    CUDA_ON_CPU_DEVICES=4 timeout 120 mpirun --oversubscribe --bind-to none -np "$1" bash -c \
        "CUDA_VISIBLE_DEVICES=$2 exec \"\$@\"" - "$processes" "${train[@]}" >"$work/said" 2>&1
    code=$?
}
shown 2 '$OMPI_COMM_WORLD_LOCAL_RANK'
if [ "$code" = 0 ] && grep -q "^ranks: 2 x .* over nccl" "$work/said"; then
    pass "a launcher that shows each rank a GPU of its own" "$(grep '^GPUs' "$work/said")"
else fail "a launcher that shows each rank a GPU of its own" "exit code $code: $(tail -n 2 "$work/said")"; fi
shown 2 '3,1'
if [ "$code" = 0 ] && grep -q "^ranks: 2 x .* over nccl" "$work/said"; then
    pass "two visible GPUs of four for two ranks" "$(grep '^GPUs' "$work/said")"
else fail "two visible GPUs of four for two ranks" "exit code $code: $(tail -n 2 "$work/said")"; fi
shown 2 2
if [ "$code" = 1 ] && grep -qa "^error: ranks 0 and 1 share one GPU" "$work/said"; then
    pass "a launcher that shows all ranks the same GPU" "$(grep -a -m1 '^error' "$work/said")"
else fail "a launcher that shows all ranks the same GPU" "exit code $code: $(tail -n 2 "$work/said")"; fi
CUDA_ON_CPU_NAME="NVIDIA H200 MIG 1g.18gb" refused "a slice of a GPU for each rank" 2 2 \
    "^error: this rank's GPU is a slice of one, .*NCCL cannot connect slices"
[ "$(grep -ac '^error' "$work/said")" = 1 ] || fail "one line for all ranks" "$(grep -a '^error' "$work/said")"
CUDA_ON_CPU_RUNTIME=12020 CUDA_ON_CPU_DRIVER=12020 start 2 2
if [ "$code" = 0 ] && [ "$(grep -ac '^note: the NVIDIA driver supports CUDA 12\.2' "$work/said")" = 1 ]; then
    pass "an old driver is noted once for all ranks" "$(grep -a -m1 '^note: the NVIDIA driver' "$work/said")"
else fail "an old driver is noted once for all ranks" "exit code $code: $(grep -a '^note' "$work/said")"; fi

# a rank is killed while others wait for it in NCCL
CUDA_ON_CPU_DEVICES=4 mpirun --oversubscribe --bind-to none -np 4 "$processes" "${train[@]}" --steps 1000000 \
    --timeout 2 --out "$work/lost" >"$work/said" 2>&1 &
launched=$!
for ((i = 0; i < 300; i++)); do
    [ "$(wc -l 2>/dev/null <"$work/lost/metrics.jsonl" || echo 0)" -lt 3 ] || break
    sleep 0.1
done
start=$EPOCHREALTIME
victim=$(pgrep -P "$launched" -x train_llama3_cu | tail -n 1)
[ -z "$victim" ] || kill -KILL "$victim"
wait "$launched"
code=$?
seconds=$(awk -v a="$start" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.1f", b - a }')
if [ "$code" != 0 ] && grep -qaE "^failure: rank [0-3].* died" "$work/said"; then
    pass "a killed rank is named" "exit code $code after $seconds s; $(grep -aE -m1 '^failure: rank' "$work/said")"
else fail "a killed rank is named" "exit code $code after $seconds s: $(tail -n 2 "$work/said" | tr '\n' ' ')"; fi

echo "$passed passed, $failed failed"
exit $((failed > 0))
