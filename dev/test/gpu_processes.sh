#!/usr/bin/env bash
# gpu_processes.sh: ranks that are processes of mpirun, each with a GPU of the emulator, start and train over NCCL. NCCL
# is emulated over MPI (dev/cuda_on_cpu/nccl_processes.h). hosts.sh does the same on several hosts.
# gpu_processes.sh [PROGRAM]: the build of several processes
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
. dev/test/checks.sh
export LC_ALL=C OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_mpi_yield_when_idle=1
threads=build/cuda-on-cpu-fp32/train_llama3_cuda processes=${1:-build/cuda-on-mpi-fp32/train_llama3_cuda}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

[ -n "${1:-}" ] || make --no-print-directory PRECISION=fp32 "$threads" "$processes" >"$work/said" 2>&1 || {
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
own_host= # a command before the program
train=(--model "$work/model" --data "$work/text/train.tok" --seq 32 --batch 1 --threads 1 --steps 3 --timeout 20)

# start RANKS GPUS OPTION…: trains under mpirun on a host with so many GPUs; sets `code`
start() {
    local ranks=$1 gpus=$2
    shift 2
    CUDA_ON_CPU_DEVICES=$gpus timeout 120 mpirun --oversubscribe --bind-to none -np "$ranks" $own_host "$processes" \
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
    start "$ranks" $((${#own_host} ? 1 : ranks)) --deterministic "$@" --out "$work/several"
    if [ "$code" = 0 ] && [ "$(hash_of "$work/several")" = "$expected" ] && grep -q "over nccl" "$work/said"; then
        pass "mpirun, $ranks GPUs, $name: the checkpoint of ranks that are threads" "$expected"
    else fail "mpirun, $ranks GPUs, $name: the checkpoint of ranks that are threads" \
        "exit code $code: $(grep -aE '^(error|failure)|CUDA on a CPU' "$work/said" | head -n 2)"; fi
}

old="$(cat build/cuda-on-mpi-fp32/flags) -DCUDA_ON_CPU_NCCL_HEADER=22606 -fmax-errors=1 -fsyntax-only"
if ! $old lib/comm/transport_nccl.h >"$work/said" 2>&1 && grep -q "NCCL 2.27.3 or newer is needed" "$work/said"; then
    pass "the header of an NCCL that is too old is refused" "$(grep -m1 -o '"NCCL.*' "$work/said")"
else fail "the header of an NCCL that is too old is refused" "$(head -n 2 "$work/said")"; fi

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
# Ranks that share one GPU, each of which claims to be a host of its own, as dev/gpu_check.sh nccl-ranks has them
cat >"$work/own_host" <<'END'
#!/bin/sh
NCCL_HOSTID=h$OMPI_COMM_WORLD_RANK exec "$@"
END
chmod +x "$work/own_host"
own_host=$work/own_host
same_bits "full_shard, on one GPU" 2
same_bits "interleaved pipeline, on one GPU" 4 --pp 2 --accum 4 --pp-schedule interleaved --pp-chunks 2
own_host=

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
    "^error: the GPU is a MIG instance .*NCCL cannot connect MIG instances"
[ "$(grep -ac '^error' "$work/said")" = 1 ] || fail "one line for all ranks" "$(grep -a '^error' "$work/said")"
CUDA_ON_CPU_RUNTIME=12020 CUDA_ON_CPU_DRIVER=12020 start 2 2
if [ "$code" = 0 ] && [ "$(grep -ac '^note: the NVIDIA driver supports CUDA 12\.2' "$work/said")" = 1 ]; then
    pass "an old driver is noted once for all ranks" "$(grep -a -m1 '^note: the NVIDIA driver' "$work/said")"
else fail "an old driver is noted once for all ranks" "exit code $code: $(grep -a '^note' "$work/said")"; fi

# ends NAME CODE PATTERN RANKS OPTION…: a run on as many GPUs as ranks that must fail so, within 20 seconds
ends() {
    local name=$1 expected=$2 pattern=$3 ranks=$4 began=$SECONDS
    shift 4
    start "$ranks" "$ranks" --timeout 1 "$@"
    if { [ "$expected" = any ] || [ "$code" = "$expected" ]; } && [ $((SECONDS - began)) -lt 20 ] &&
        grep -qaE "$pattern" "$work/said"; then
        pass "$name" "exit code $code after $((SECONDS - began)) s; $(grep -aE -m1 "$pattern" "$work/said")"
    else fail "$name" "exit code $code after $((SECONDS - began)) s, expected $expected and '$pattern': $(
        grep -aE '^(error|failure)' "$work/said" | head -n 2)"; fi
}
# The signals 9 and 19 kill and stop a process: while it opens its first communicator, at its first operation, later
CUDA_ON_CPU_NCCL_SIGNAL=2:0:9 ends "a rank that dies while communicators open is named" any \
    "^failure: rank 2 .*died" 4
CUDA_ON_CPU_NCCL_SIGNAL=1:0:19 ends "a rank that is stopped while communicators open is named" 2 \
    "^failure: .*rank 1 on host .*is stopped" 4 --pp 4 --accum 4
CUDA_ON_CPU_NCCL_SIGNAL=3:1:19 ends "a rank that is stopped before its first operation is named, within NCCL" 2 \
    "^failure: .*rank 3 on host .*is stopped" 4
CUDA_ON_CPU_NCCL_SIGNAL=2:9:19 ends "a rank that is stopped before its first message is named" 2 \
    "^failure: .*rank 2 on host .*is stopped" 4 --pp 4 --accum 4
own_host=$work/own_host
for operation in 20 27 34 41; do # which of the two is first is a matter of chance
    CUDA_ON_CPU_NCCL_SIGNAL=3:$operation:9 ends \
        "a rank of another host that dies is named, though NCCL reports its connection first, operation $operation" \
        any "^failure: rank 3 .*died" 4
done
own_host=

# Every rank finds the error, so none closes its communicators before the first one ends, and aborting does not return.
tokens=$(stat -c %s "$work/text/train.tok")
head -c 192 "$work/text/train.tok" >"$work/bad.tok"
head -c $((tokens - 192)) /dev/zero | tr '\0' '\377' >>"$work/bad.tok"
ends "an error of the user keeps its exit code though NCCL cannot abort" 1 \
    "^error: .*bad.tok: token .* is 65535" 2 --data "$work/bad.tok"

# a rank is killed while others wait for it in NCCL
CUDA_ON_CPU_DEVICES=4 mpirun --oversubscribe --bind-to none -np 4 "$processes" "${train[@]}" --steps 1000000 \
    --timeout 2 --out "$work/lost" >"$work/said" 2>&1 &
launched=$!
for ((i = 0; i < 300; i++)); do
    [ "$(wc -l 2>/dev/null <"$work/lost/metrics.jsonl" || echo 0)" -lt 3 ] || break
    sleep 0.1
done
start=$EPOCHREALTIME
victim=$(pgrep -P "$launched" -x "$(basename "$processes" | cut -c 1-15)" | tail -n 1)
[ -z "$victim" ] || kill -KILL "$victim"
wait "$launched"
code=$?
seconds=$(awk -v a="$start" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.1f", b - a }')
if [ "$code" != 0 ] && grep -qaE "^failure: rank [0-3].* died" "$work/said"; then
    pass "a killed rank is named" "exit code $code after $seconds s; $(grep -aE -m1 '^failure: rank' "$work/said")"
else fail "a killed rank is named" "exit code $code after $seconds s: $(tail -n 2 "$work/said" | tr '\n' ' ')"; fi

echo "$passed passed, $failed failed"
exit $((failed > 0))
