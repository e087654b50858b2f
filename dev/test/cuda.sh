#!/usr/bin/env bash
# cuda.sh [all] : the CUDA build as a whole, its kernels run on this processor (dev/cuda_on_cpu); beside the C build.
# With `all` in both precisions, in more orders of streams, and on a mesh; and where nvcc is installed: it compiles for
# GPUs without a spill, and attention is made of the instructions it should be made of.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. dev/test/checks.sh
top=$PWD all=${1:+all}
precisions="bf16${all:+ fp32}" seq=${all:+75}
seq=${seq:-43}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

# cuda PRECISION [NAME], cpu PRECISION [NAME]: the program NAME_llama3 (train_llama3) of these builds
cuda() { echo "$top/build/cuda-on-cpu-$1/${2:-train}_llama3_cuda"; }
cpu() { echo "$top/build/cpu-$1/${2:-train}_llama3"; }

prepare() {
    "$top/dev/test/sample_text.sh" sample
    VOCAB_SIZE=600 "$top/dev/data/text.sh" text sample >.out 2>&1 || {
        cat .out
        fail "the data" "dev/data/text.sh refuses the text of dev/test/sample_text.sh"
        exit 1
    }
    mkdir model wide
    cat >model/config.json <<'END'
{"model_type": "llama", "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
 "head_dim": 64, "intermediate_size": 176, "vocab_size": 600, "max_position_embeddings": 256, "rope_theta": 500000}
END
    sed 's/"head_dim": 64/"head_dim": 320/' model/config.json >wide/config.json
    train=(--model model --data text/train.tok --seq $seq --batch 2 --threads 2 --warmup 2 --lr 3e-3)
}

losses() { sed -n 's/.*"step":\([0-9]*\),"loss":\([^,]*\),"grad_norm":\([^,]*\),.*/\1 \2 \3/p' "$1/metrics.jsonl"; }

# run OUT PROGRAM ARGUMENT… : its losses and norms into OUT.txt
run() {
    local out=$1
    shift
    timeout 300 "$@" --out "$out" </dev/null >.out 2>.err ||
        { fail "$out" "exit code $?: $(cat .out .err | tail -n 1)"; return 1; }
    losses "$out" >"$out.txt"
}

# ---------------------------------------------------------------- training, beside C
training() {
    local precision limit
    for precision in $precisions; do
        [ $precision = fp32 ] && limit=1e-4 || limit=2e-2
        run "c-$precision" "$top/build/cpu-$precision/train_llama3" "${train[@]}" --steps 20 || continue
        run "cuda-$precision" "$(cuda $precision)" "${train[@]}" --steps 20 || continue
        local worst
        worst=$(paste -d' ' "c-$precision.txt" "cuda-$precision.txt" |
            awk '{d = $2 - $5; if (d < 0) d = -d; if (!(d <= w)) w = d} END {printf "%d %.3g", NR, w}')
        if [ "${worst%% *}" = 20 ] && awk "BEGIN {exit !(${worst#* } <= $limit)}"; then
            pass "$precision: 20 steps on CUDA have the C build's losses" "largest difference ${worst#* } <= $limit"
        else
            fail "$precision: 20 steps on CUDA have the C build's losses" \
                "steps and largest difference $worst, expected 20 and $limit"
        fi
    done
}

# the same bits: however the streams, warps and lanes take turns; on one rank, two ranks, four as two replicas
same_bits() {
    local precision seed name gathers
    local -a common=(--model model --data text/train.tok --seq $seq --batch 1 --threads 1 --steps 2 --warmup 2 --lr 3e-3
        --deterministic)
    for precision in $precisions; do
        run "one-$precision" "$(cuda $precision)" "${common[@]}" --accum 4 || continue
        run "two-$precision" "$(cuda $precision)" "${common[@]}" --accum 2 --ranks 2 || continue
        CUDA_ON_CPU_DEVICES=4 run "four-$precision" "$(cuda $precision)" "${common[@]}" --accum 1 --ranks 4 \
            --dp-replicate 2 --recompute selective --transport nccl --trace "four-$precision.json" || continue
        run "far-$precision" "$(cuda $precision)" "${common[@]}" --accum 2 --ranks 2 --offload all --slots 3 || continue
        name="$precision: deterministic, 2 ranks, 2 x 2 over NCCL and 2 with all state offloaded"
        name+=" have one rank's bits on CUDA"
        if [ -s "one-$precision.txt" ] && cmp -s "one-$precision.txt" "two-$precision.txt" &&
            cmp -s "one-$precision.txt" "four-$precision.txt" && cmp -s "one-$precision.txt" "far-$precision.txt"; then
            pass "$name" "$(tail -n 1 "one-$precision.txt")"
        else
            fail "$name" "$(tail -qn 1 {one,two,four,far}-$precision.txt | tr '\n' ';')"
        fi
        gathers=$(grep -c '"cat":"communication","name":"all_gather: model' "four-$precision.json")
        if [ "$gathers" -gt 0 ]; then
            pass "$precision: the timeline of four GPUs has their gathers" "$gathers"
        else
            fail "$precision: the timeline of four GPUs has their gathers" "$(head -c 200 "four-$precision.json")"
        fi
    done
    local equal=0 seeds=1
    [ -z "$all" ] || seeds=8
    for ((seed = 1; seed <= seeds; seed++)); do
        CUDA_ON_CPU_SEED=$seed run "seed-$seed" "$(cuda bf16)" "${common[@]}" --accum 2 --ranks 2 &&
            cmp -s two-bf16.txt "seed-$seed.txt" && equal=$((equal + 1))
    done
    if [ $equal = $seeds ]; then
        pass "$seeds random orders of streams, warps and lanes give equal bits" "$equal of $seeds"
    else
        fail "$seeds random orders of streams, warps and lanes give equal bits" "$equal of $seeds"
    fi
}

# a model that two GPUs wrote, and its loss as one and two have it: nothing but weights is in memory there
use() {
    local one two
    local model=written/latest measure=(--eval text/val.tok --seq $seq --batch 2)
    CUDA_ON_CPU_DEVICES=2 run written "$(cuda fp32)" "${train[@]}" --steps 1 --ranks 2 --transport nccl --sharding \
        no_shard || return
    one=$("$(cuda fp32 eval)" --model $model "${measure[@]}" 2>&1 | tail -n 1)
    two=$(CUDA_ON_CPU_DEVICES=2 "$(cuda fp32 eval)" --model $model "${measure[@]}" --ranks 2 --transport nccl 2>&1 |
        tail -n 1)
    if [[ "$one" == *'"loss":'* ]] && [ "$one" = "$two" ]; then
        pass "two GPUs write a model and measure it as one does" "$two"
    else
        fail "two GPUs write a model and measure it as one does" "$one; $two"
    fi
    # … and in 8 bits: the files and the loss of the processor's
    local by how losses=
    for by in cuda cpu; do
        how=$("$("$by" fp32 convert)" --model $model --export "stored-$by" --dtype int8 2>&1) ||
            { fail "a model is written in 8 bits by $by" "$how"; return; }
    done
    losses=$(
        for how in "" "--ranks 2 --transport nccl"; do
            CUDA_ON_CPU_DEVICES=2 "$(cuda fp32 eval)" --model stored-cuda "${measure[@]}" $how 2>&1 | tail -n 1
        done | sort -u
    )
    two=$("$(cpu fp32 eval)" --model stored-cpu "${measure[@]}" 2>&1 | tail -n 1)
    if diff -r stored-cuda stored-cpu >/dev/null && [ "$(wc -l <<<"$losses")" = 1 ] &&
        awk -v a="$(sed 's/.*"loss":\([^,]*\).*/\1/' <<<"$losses")" \
            -v b="$(sed 's/.*"loss":\([^,]*\).*/\1/' <<<"$two")" \
            'BEGIN { exit !(a > 0 && a / b - 1 < 1e-5 && b / a - 1 < 1e-5) }'; then
        pass "a model in 8 bits: CUDA writes the processor's files, and has its loss" "$losses"
    else
        fail "a model in 8 bits: CUDA writes the processor's files, and has its loss" \
            "$(diff -r stored-cuda stored-cpu); $losses; $two"
    fi
}

# ---------------------------------------------------------------- saved, and gone on from
# same_files NAME STEPS OUT OUT… : the checkpoints of these steps that the runs left, byte by byte
same_files() {
    local name=$1 steps=$2 first=$3 last=$3/step-0000000${2: -1} step out sum told=
    shift 3
    for out in "$@"; do
        for step in $steps; do
            told+=$(diff -r "$first/step-0000000$step" "$out/step-0000000$step" 2>&1 | head -n 1)
        done
    done
    if [ -s "$last/trainer.json" ] && [ -z "$told" ]; then
        sum=$(cat "$last"/* | sha256sum | cut -c1-16)
        pass "$name" "$sum, and loss $(tail -n 1 "$first.txt" | cut -d' ' -f2)"
    else
        fail "$name" "$told"
    fi
}

# resume OUT OF PROGRAM ARGUMENT… : from the first checkpoint of run OF; trains the step that is left, and no other
resume() {
    run "$1" "${@:3}" --resume "$2/step-00000001" || return 1
    if ! cmp -s <(tail -n 1 "$2.txt") "$1.txt"; then
        fail "$1: goes on with the step that is left" \
            "its steps, losses and norms: $(tr '\n' ';' <"$1.txt"), expected $(tail -n 1 "$2.txt")"
        return 1
    fi
}

saves() {
    local precision
    local -a common=(--model model --data text/train.tok --seq $seq --batch 1 --threads 1 --steps 2 --save-every 1
        --warmup 1 --lr 3e-3 --deterministic)
    for precision in $precisions; do
        run "saved-$precision" "$(cuda $precision)" "${common[@]}" --accum 4 || continue
        resume "resumed-$precision" "saved-$precision" "$(cuda $precision)" "${common[@]}" --accum 4 || continue
        same_files "$precision: a run that is resumed on CUDA leaves what the one that was not stopped leaves" 2 \
            "saved-$precision" "resumed-$precision"
    done
    CUDA_ON_CPU_DEVICES=2 run saved-far "$(cuda bf16)" "${common[@]}" --accum 2 --ranks 2 --transport nccl --offload \
        all || return
    CUDA_ON_CPU_DEVICES=2 resume resumed-far saved-far "$(cuda bf16)" "${common[@]}" --accum 2 --ranks 2 --transport \
        nccl --offload all || return
    same_files "two GPUs over NCCL with all state offloaded are resumed as well" 2 saved-far resumed-far
    CUDA_ON_CPU_DEVICES=4 run saved-nccl "$(cuda bf16)" "${common[@]}" --ranks 4 --dp-replicate 2 --transport nccl \
        --save-mode async || return
    run saved-threads "$(cuda bf16)" "${common[@]}" --ranks 4 --dp-replicate 2 || return
    same_files "one GPU, two offloaded, 2 x 2 over NCCL that save meanwhile, and 2 x 2 threads save the same files" \
        "1 2" saved-bf16 saved-far saved-nccl saved-threads
}

# tensor, context and pipeline parallelism, which validate, save, and go on: both transports make the same files
meshes() {
    local precision
    local -x CUDA_ON_CPU_PROTECT=0 # to open and close the memory of eight takes longest
    local -a common=(--model model --data text/train.tok --val text/val.tok --val-every 1 --val-batches 2 --seq 76 \
        --batch 1 --accum 2 --threads 1 --ranks 8 --tp 2 --cp 2 --pp 2
                     --steps 2 --save-every 1 --warmup 1 --lr 3e-3 --deterministic)
    for precision in $precisions; do
        run "mesh-$precision" "$(cuda $precision)" "${common[@]}" || continue
        CUDA_ON_CPU_DEVICES=8 run "mesh-nccl-$precision" "$(cuda $precision)" "${common[@]}" --transport nccl \
            --save-mode async || continue
        CUDA_ON_CPU_DEVICES=8 resume "mesh-resumed-$precision" "mesh-nccl-$precision" "$(cuda $precision)" \
            "${common[@]}" --transport nccl || continue
        same_files "$precision: tp 2 x cp 2 x pp 2 over NCCL saves what it saves over threads" "1 2" \
            "mesh-$precision" "mesh-nccl-$precision"
        same_files "$precision: tp 2 x cp 2 x pp 2 over NCCL is resumed" 2 "mesh-$precision" "mesh-resumed-$precision"
        local one
        one=$(sed -n 's/.*"val_loss":\([^,}]*\).*/\1/p' "mesh-$precision/metrics.jsonl" | tr '\n' ' ')
        if [ "$(wc -w <<<"$one")" -ge 2 ] && [ "$one" = \
            "$(sed -n 's/.*"val_loss":\([^,}]*\).*/\1/p' "mesh-nccl-$precision/metrics.jsonl" | tr '\n' ' ')" ]; then
            pass "$precision: and measures the same losses of what it does not train on" "$one"
        else fail "$precision: and measures the same losses of what it does not train on" "$one"; fi
    done
}

# ---------------------------------------------------------------- what is refused
# bad NAME PATTERN CODE ARGUMENT… : one line that matches, exit code CODE
bad() {
    local name=$1 pattern=$2 code=$3 got expected
    shift 3
    timeout 60 "$(cuda bf16)" "$@" </dev/null >.out 2>.err
    got=$?
    if [ "$got" = "$code" ] && [ "$(grep -cE '^(error|failure): ' .err)" = 1 ] && grep -qE "$pattern" .err; then
        pass "$name" "$(head -n 1 .err)"
    else
        expected="$code and one line like '$pattern'"
        fail "$name" "exit code $got, expected $expected: $(head -n 3 .err | tr '\n' ' ')"
    fi
}

# what is wrong with a machine, a driver or a container, each in a sentence that says what to do
problems_of_machine() {
    local what=(1 "${train[@]}" --steps 1)
    local busy="^error: CUDA: .*another process has it for itself.*nvidia-smi -c DEFAULT"
    CUDA_ON_CPU_FAIL=cudaGetDeviceCount:802:1 bad "GPUs whose NVSwitch nobody manages" \
        "^error: CUDA: looking for a GPU: .*nvidia-fabricmanager must run" "${what[@]}"
    CUDA_ON_CPU_FAIL=cudaGetDeviceCount:803:1 bad "a driver and a library of two versions" \
        "^error: CUDA: looking for a GPU: .*different versions.*restart the machine" "${what[@]}"
    CUDA_ON_CPU_FAIL=cudaGetDeviceCount:804:1 bad "a cuda-compat package that the GPU does not support" \
        "^error: CUDA: looking for a GPU: .*cuda-compat.*LD_LIBRARY_PATH" "${what[@]}"
    CUDA_ON_CPU_FAIL=cudaSetDevice:46:1 bad "a GPU that another process has for itself" "$busy" "${what[@]}"
    CUDA_ON_CPU_FAIL=cudaMemGetInfo:46:1 bad "a GPU that another process takes meanwhile" "$busy" "${what[@]}"
    CUDA_ON_CPU_FAIL=LAUNCH:222:1 bad "PTX that is newer than the driver" \
        "^error: CUDA: the launch of .*its PTX is newer than the driver: update the driver" "${what[@]}"
    CUDA_ON_CPU_MEMORY=80000000000 CUDA_ON_CPU_HELD=79990000000 bad "a GPU whose memory others hold, by the plan" \
        "^error: the run needs 0\.[0-9]+ GB .*but 0\.01 GB of 80\.00 GB are free: end other processes.*nvidia-smi" \
        "${what[@]}"
    CUDA_ON_CPU_MEMORY=80000000000 CUDA_ON_CPU_HELD=79000000000 CUDA_ON_CPU_FAIL=cudaMalloc:2:3 bad \
        "memory that others take meanwhile" \
        "^error: could not allocate .* 1\.00 GB of the GPU's 80\.00 GB are free.*End other processes" "${what[@]}"
    CUDA_ON_CPU_MEMORY=80000000000 CUDA_ON_CPU_FAIL=cudaEventCreateWithFlags:2:1 bad "memory that CUDA itself lacks" \
        "^error: CUDA: .*out of memory: [0-9.]+ GB of the GPU's 80\.00 GB are free" "${what[@]}"
    CUDA_ON_CPU_DEVICES=2 bad "more ranks than GPUs" \
        "^error: --ranks 8, but this host has 2 GPUs, and NCCL needs one .*: use --ranks 2, .*--transport threads" \
        "${what[@]}" --ranks 8
    CUDA_ON_CPU_DEVICES=4 CUDA_VISIBLE_DEVICES=3,1 bad "more ranks than visible GPUs" \
        "^error: --ranks 4, but this host has 2 GPUs \(CUDA_VISIBLE_DEVICES=3,1\)" "${what[@]}" --ranks 4
    CUDA_ON_CPU_DEVICES=4 CUDA_VISIBLE_DEVICES=-1 bad "no visible GPU" \
        "^error: no NVIDIA GPU is visible \(CUDA_VISIBLE_DEVICES may hide some\)" "${what[@]}"
    CUDA_ON_CPU_DEVICES=2 CUDA_ON_CPU_NAME="NVIDIA H200 MIG 1g.18gb" bad "NCCL between MIG instances" \
        "^error: the GPU is a MIG instance \(NVIDIA H200 MIG 1g\.18gb\), and NCCL cannot" "${what[@]}" --ranks 2
}

# says NAME PATTERN ARGUMENT… : the run succeeds and prints one line that matches, on either stream
says() {
    local name=$1 pattern=$2 got
    shift 2
    timeout 120 "$(cuda bf16)" "${train[@]}" --steps 1 "$@" </dev/null >.out 2>&1
    got=$?
    if [ "$got" = 0 ] && [ "$(grep -cE "$pattern" .out)" = 1 ]; then pass "$name" "$(grep -E "$pattern" .out)"
    else fail "$name" "exit code $got, expected 0 and one line like '$pattern': $(head -n 6 .out | tr '\n' ';')"; fi
}

# which GPUs a run takes, and what it says about them
gpus_of_run() {
    local h200="NVIDIA H200" slice="NVIDIA H200 MIG 1g.18gb"
    CUDA_ON_CPU_DEVICES=2 says "as many ranks as GPUs use NCCL" "^ranks: 2 x .* over nccl," --ranks 2
    CUDA_ON_CPU_DEVICES=4 CUDA_ON_CPU_NAME=$h200 says "the banner names the GPUs" "^GPUs: 2 x NVIDIA H200\$" --ranks 2
    CUDA_ON_CPU_DEVICES=4 CUDA_VISIBLE_DEVICES=2,3 says "two of four GPUs are visible, and two ranks take them" \
        "^ranks: 2 x .* over nccl," --ranks 2
    says "ranks share the only GPU" "^ranks: 3 x .* over threads," --ranks 3
    CUDA_ON_CPU_DEVICES=4 says "--transport threads shares a GPU of four" "^GPU: 1 x .*, shared by 3 ranks\$" \
        --ranks 3 --transport threads
    CUDA_ON_CPU_NAME=$slice says "ranks share a slice of a GPU" "^GPU: 1 x NVIDIA H200 MIG 1g.18gb, shared by 2 ranks" \
        --ranks 2
    CUDA_ON_CPU_NAME=$h200 says "MFU by the datasheet of the GPU" "^step .* \| MFU +[0-9.]+ %" --out rated
    CUDA_ON_CPU_NAME=$slice says "a slice of a GPU has no MFU" "^step [^M]* \| MB per rank" --out sliced
    if grep -q '"mfu":0\.[0-9]*,' rated/metrics.jsonl && grep -q '"mfu":null,' sliced/metrics.jsonl; then
        pass "metrics.jsonl: mfu is a number on an H200 and null on a slice of one" \
            "$(grep -ho '"mfu":[^,]*' rated/metrics.jsonl sliced/metrics.jsonl | tr '\n' ' ')"
    else
        fail "metrics.jsonl: mfu is a number on an H200 and null on a slice of one" \
            "$(grep -ho '"mfu":[^,]*' rated/metrics.jsonl sliced/metrics.jsonl | tr '\n' ' ')"
    fi
    CUDA_ON_CPU_DEVICES=2 CUDA_ON_CPU_RUNTIME=12020 CUDA_ON_CPU_DRIVER=12020 says \
        "a driver with which NCCL does not overlap" "^note: the NVIDIA driver supports CUDA 12\.2, and before 12\.3" \
        --ranks 2
    if "${CC:-cc}" -shared -fPIC -O1 -o shim.so "$top/dev/test/file_system_shim.c" 2>.out; then
        CUDA_ON_CPU_DEVICES=2 LD_PRELOAD=$PWD/shim.so WITHOUT=shm says "a container with a small /dev/shm" \
            "^note: /dev/shm has 0\.07 GB free\. .*docker run --shm-size=1g" --ranks 2
    else fail "dev/test/file_system_shim.c" "does not build: $(head -n 1 .out)"; fi
}

# A GPU's default sequence is the model's positions, at most 4,096. A batch that does not fit into memory is refused.
default_batch() {
    local chosen running tries=600
    mkdir long
    sed 's/"max_position_embeddings": 256/"max_position_embeddings": 8192/' model/config.json >long/config.json
    "$(cuda bf16)" --model long --data text/train.tok --threads 1 --steps 1 --out long-run >.out 2>&1 &
    running=$!
    # config.txt is there before the first step, which would take long
    until grep -qs '^--seq' long-run/config.txt || ! kill -0 $running 2>/dev/null; do
        [ $((tries--)) -gt 0 ] || break
        sleep 0.1
    done
    kill -KILL $running
    wait $running 2>/dev/null
    chosen=$(grep -s '^--seq' long-run/config.txt)
    if [ "$chosen" = "--seq 4096" ]; then pass "a GPU's default is 4,096 of 8,192 positions" "$chosen"
    else fail "a GPU's default is 4,096 of 8,192 positions" "$chosen: $(tail -n 1 .out)"; fi
    train=(--model model --data text/train.tok --threads 1)
    CUDA_ON_CPU_MEMORY=300000000 bad "a batch that does not fit" "^error: the run needs 0\.[0-9]+ GB" 1 \
        "${train[@]}" --steps 1 --batch 128
}

refusals() {
    bad "heads that no kernel has" "head.* 320.*256" 1 "${train[@]}" --model wide --steps 1
    bad "MPI between GPUs" "^error: --transport mpi needs a launcher: start with mpirun" 1 "${train[@]}" --steps 1 \
        --transport mpi
    bad "two ranks on one GPU over NCCL" \
        "^error: 2 ranks were started on a host with 1 GPU, .*--ranks N --transport threads" 1 "${train[@]}" \
        --steps 1 --ranks 2 --transport nccl
    export CUDA_ON_CPU_DEVICES=2
    bad "offloaded sums that NCCL should reduce" "^error: --offload all keeps gradients" 1 "${train[@]}" --steps 1 \
        --ranks 2 --transport nccl --accum 2 --accumulate local --offload all
    bad "offloaded gradients that NCCL should sum" \
        "^error: --offload all keeps gradients in host memory, where NCCL.*--offload optimizer" 1 "${train[@]}" \
        --steps 1 --ranks 2 --transport nccl --sharding no_shard --offload all
    unset CUDA_ON_CPU_DEVICES
    CUDA_ON_CPU_DEVICES=0 bad "no GPU" "^error: no NVIDIA GPU is visible.*\./train_llama3" 1 "${train[@]}" --steps 1
    local old='^error: the NVIDIA driver supports CUDA 12\.4, but this program was built with CUDA 13\.[0-9]: '
    CUDA_ON_CPU_DRIVER=12040 bad "a driver that is too old" "${old}install a newer driver" 1 "${train[@]}" --steps 1
    CUDA_ON_CPU_CHIP=sm_70 bad "a GPU that is too old" \
        "^error: .*compute capability 7\.0 \(older than Turing\), but 8\.0.*needed" 1 "${train[@]}" --steps 1
    CUDA_ON_CPU_CHIP=sm_75 bad "a GPU like a T4" \
        "^error: .*compute capability 7\.5 \(Turing, as a T4 has\), but 8\.0.*needed" 1 "${train[@]}" --steps 1
    problems_of_machine
    if make --no-print-directory -C "$top" -n PRECISION=fp8 >.out 2>&1; then
        fail "fp8 is refused by name" "make takes it"
    elif grep -q "PRECISION=fp8: this program has no arithmetic in fp8" .out; then
        pass "fp8 is refused by name" "$(grep -m1 -o 'PRECISION=.*' .out)"
    else fail "fp8 is refused by name" "$(head -n 2 .out)"; fi
    CUDA_ON_CPU_MEMORY=4000000000000 bad "more memory to pin than the host has" \
        "^error: the run needs [0-9.]+ GB of pinned memory on this host for 1 rank, but [0-9.]+ GB are free" 1 \
        --model llama3-70b --vocab-size 600 --data text/train.tok --seq 64 --batch 1 --steps 1 --offload all
    CUDA_ON_CPU_MEMORY=4000000 bad "a GPU that is too small, by the plan" \
        "^error: the run needs 0\.[0-9]+ GB of memory on this GPU for 2 ranks, but 0\.00 GB are free: .*--recompute" \
        1 "${train[@]}" --steps 1 --ranks 2
    CUDA_ON_CPU_FAIL=cudaMalloc:2:3 bad "memory that is gone meanwhile" \
        "^error: could not allocate .* GB for [a-z]+: a rank needs .* GB" 1 "${train[@]}" --steps 1 --ranks 2
    CUDA_ON_CPU_FAIL=cudaStreamQuery:700:3 bad "a kernel that went wrong" \
        "^failure: CUDA: .*an illegal memory access.*CUDA_LAUNCH_BLOCKING=1.*cuda-on-cpu" 2 "${train[@]}" --steps 1 \
        --ranks 2
    CUDA_ON_CPU_FAIL=LAUNCH:700:40 bad "a fault of one launch" \
        "^failure: CUDA: [A-Za-z_0-9<>, ()]+ failed.*an illegal memory access" 2 "${train[@]}" --steps 1 --ranks 3
    CUDA_ON_CPU_FAIL=LAUNCH:209:1 bad "a build without code for this GPU" \
        "^error: CUDA: the launch of .*no kernel for this GPU.*make CUDA=1" 1 "${train[@]}" --steps 1
}

# ---------------------------------------------------------------- compiled for GPUs, where nvcc is
# instructions of each attention kernel of tensor cores: name, mma, ldmatrix, accesses to local memory, wgmma, copies by
# TMA; of the machine's code where it can be read, else of PTX
instructions() {
    local compile
    if command -v cuobjdump >/dev/null && command -v nvdisasm >/dev/null; then
        cuobjdump -sass "$top/build/cuda-bf16/test_llama3_cuda" | awk '
            /Function :/ { name = $3 }
            /HMMA/       { mma[name]++ }
            /LDSM/       { load[name]++ }
            /LDL|STL/    { spill[name]++ }
            /HGMMA/      { mma[name] += 0; wgmma[name]++ }
            /UTMALDG/    { tma[name]++ }
            END          { for (n in mma) print n, mma[n], load[n] + 0, spill[n] + 0, wgmma[n] + 0, tma[n] + 0 }'
    else
        compile=$(sed -E 's/-gencode [^ ]+//g; s/ -t [0-9]+//; s/-Xptxas [^ ]+//; s/ -l[^ ]+//g' \
            "$top/build/cuda-bf16/flags")
        (cd "$top" && $compile -arch=compute_90a -ptx train_llama3.cu -o "$work/ptx") >.out 2>&1
        awk '
            /\.entry / {
                match($0, /_Z[A-Za-z0-9_]+/)
                name = substr($0, RSTART, RLENGTH)
            }
            /mma\.sync/            { mma[name]++ }
            /ldmatrix/             { load[name]++ }
            /ld\.local|st\.local/  { spill[name]++ }
            /wgmma\.mma_async/     { mma[name] += 0; wgmma[name]++ }
            /bulk\.tensor.*global/ { tma[name]++ }
            END { for (n in mma) print n, mma[n], load[n] + 0, spill[n] + 0, wgmma[n] + 0, tma[n] + 0 }' ptx
    fi
}

compiled() {
    [ -n "$all" ] || return # all of this takes minutes
    if (cd "$top" && $(<build/cuda-on-cpu-bf16/flags) -Wno-unused-function -I. -fsyntax-only \
        dev/kernels/bench_gpu.cu) >.out 2>&1; then
        pass "what measures ops and steps on a GPU compiles with the program" "dev/kernels/bench_gpu.cu"
    else fail "what measures ops and steps on a GPU compiles with the program" "$(grep -m3 error .out)"; fi
    if ! command -v nvcc >/dev/null && [ ! -x /usr/local/cuda/bin/nvcc ]; then
        echo "no nvcc: whether the kernels compile for GPUs is left out"
        return
    fi
    local precision count
    for precision in $precisions; do
        if make --no-print-directory -C "$top" CUDA=1 PRECISION=$precision build/cuda-$precision/test_llama3_cuda \
            >.out 2>&1; then
            pass "$precision: the program, in its test, compiles for sm_80, sm_90 and PTX" "no warning of ptxas"
        else
            fail "$precision: the program, in its test, compiles for sm_80, sm_90 and PTX" \
                "$(grep -iE 'error|warning' .out | head -n 3)"
        fi
    done
    if "$top/dev/test/cuda_table.sh" >.out 2>&1; then
        pass "no kernel spills, uses local memory, or takes more registers than the table says" "$(tail -n 1 .out)"
    else fail "no kernel spills, uses local memory, or takes more registers than the table says" "$(tail -n 3 .out)"; fi
    if ! command -v cuobjdump >/dev/null || ! command -v nvdisasm >/dev/null; then
        echo "no cuobjdump and nvdisasm: whether loads are in flight together is left out"
    elif "$top/dev/test/loads.py" "$top"/build/cuda-{bf16,fp32}/test_llama3_cuda >.out 2>&1; then
        pass "loads of memory-bound kernels are in flight together, as their comments say" "$(tail -n 1 .out)"
    else fail "loads of memory-bound kernels are in flight together, as their comments say" "$(head -n 3 .out)"; fi
    instructions >.sass
    grep attention .sass | grep hopper >.hopper
    grep attention .sass | grep -v hopper >.mma
    count=$(wc -l <.mma)
    if [ "$count" -ge 8 ] && ! awk '$2 < 16 || $3 < 8 || $4 > 0' .mma | grep -q .; then
        pass "attention is mma and ldmatrix, without local memory" \
            "$count kernels: $(awk '{m += $2; l += $3} END {print m " mma, " l " ldmatrix"}' .mma)"
    else fail "attention is mma and ldmatrix, without local memory" "$(cat .mma)"; fi
    count=$(wc -l <.hopper)
    if [ "$count" -ge 8 ] && ! awk '$2 > 0 || $4 > 0 || $5 < 12 || $6 < 2' .hopper | grep -q .; then
        pass "attention for Hopper is wgmma and TMA, without local memory" \
            "$count kernels: $(awk '{m += $5; l += $6} END {print m " wgmma, " l " loads by TMA"}' .hopper)"
    else fail "attention for Hopper is wgmma and TMA, without local memory" "$(cat .hopper)"; fi
}

prepare
training
same_bits
[ -z "$all" ] || use
saves
[ -z "$all" ] || meshes
refusals
gpus_of_run
default_batch
compiled
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
