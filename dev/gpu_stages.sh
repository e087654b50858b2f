#!/usr/bin/env bash
# gpu_stages.sh: the stages of dev/gpu_check.sh, which sources this file. Each function prints its findings, and a line
# `bound: name | limit | measured | met or MISSED` per bound. It returns nonzero if it failed.

build() { # builds what is missing, without looking at the age of what is there
    local p program
    for p in bf16 fp32; do
        for program in {train,eval,test}_llama3_cuda $([ $p = bf16 ] && echo generate_llama3_cuda bench_gpu); do
            [ -x build/cuda-$p/$program ] || make --no-print-directory CUDA=1 PRECISION=$p build/cuda-$p/$program ||
                return
        done
    done
    [ -x build/cuda-bf16/nccl_check ] || make --no-print-directory CUDA=1 build/cuda-bf16/nccl_check ||
        echo "no NCCL here: its check is left out"
    [ -s "$curve/metrics.jsonl" ] || loss_curve_on_cpu || return
    echo "programs are there"
}

machine() {
    local linked versions
    nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.max.sm,clocks.mem,power.limit \
        --format=csv,noheader
    nvcc --version | tail -n 1
    linked=$("${ours[@]}" ldd $bench | grep -E 'cublas|cudart|cjson|pcre2' | tr -s ' \t' ' ' | tr '\n' ';')
    echo "libraries of the program: $linked"
    versions='"PyTorch", torch.__version__, "CUDA", torch.version.cuda, "cuDNN", torch.backends.cudnn.version()'
    $python -c "import torch; print($versions)" || echo "no PyTorch: nothing to compare with"
    "${ours[@]}" "$bench" probe
}

# limited SECONDS COMMAND…: runs a command for at most so long, and never beyond the end of the stage, which would leave
# it running beside the next one. Exit code 124: out of time; nothing is started when less than 5 seconds are left.
limited() {
    local most=$1 left=$((${STAGE_LIMIT:-3600} - SECONDS - 6))
    shift
    [ $left -ge 5 ] || return 124
    timeout -k 2 $((left < most ? left : most)) "$@"
}
out_of_time() { [ $((${STAGE_LIMIT:-3600} - SECONDS - 6)) -lt 5 ]; }

# in_fours PROGRAM TEST…: runs each test in a process of its own, because the first error of a kernel ends a process.
# Four run at a time. A test that fails runs once more, alone, under the memory checker, which names the line, or else
# with launches that block.
in_fours() {
    local program=$1 name code counts late= total_passed=0 total_failed=0 checker=(env CUDA_LAUNCH_BLOCKING=1)
    shift
    for name; do
        while [ "$(jobs -rp | wc -l)" -ge 4 ]; do wait -n; done
        if out_of_time; then late+=" $name"; continue; fi
        (
            start=$SECONDS
            limited 60 "${ours[@]}" "$program" "$name" >"$work/test-$name" 2>&1
            echo "$? $((SECONDS - start))" >"$work/code-$name"
        ) &
    done
    wait
    for name; do
        [ -e "$work/code-$name" ] || continue
        read -r code seconds <"$work/code-$name"
        echo "-- $name, $seconds s"
        cat "$work/test-$name"
        counts=$(grep -E '^[0-9]+ passed, [0-9]+ failed$' "$work/test-$name" | tail -n 1)
        total_passed=$((total_passed + $(cut -d' ' -f1 <<<"${counts:-0}")))
        total_failed=$((total_failed + $(cut -d' ' -f3 <<<"${counts:-0 passed, 0 failed}")))
        [ "$code" != 0 ] || continue
        if [ -z "$counts" ]; then
            echo "FAIL $name: ended with exit code $code before its last line"
            total_failed=$((total_failed + 1))
        fi
        if sanitizer | grep -q '^works'; then checker=(compute-sanitizer); fi
        echo "-- $name again: ${checker[*]}"
        limited 30 "${ours[@]}" "${checker[@]}" "$program" "$name" 2>&1 | tail -n 60 |
            sed -E 's/^([0-9]+ passed, [0-9]+ failed)$/  \1/'
    done
    [ -z "$late" ] || echo "left out, because the stage's time is over:$late"
    echo "$total_passed passed, $total_failed failed"
    [ $total_failed = 0 ]
}

# tests PROGRAM: all groups of tests that run on one GPU, and each test of kernels
tests() {
    local names
    names=$("${ours[@]}" "$1" list | grep -vE '^(kernels|mesh|streams|orders|mesh-orders)$') # kernels: one by one
    in_fours "$1" ${TESTS:-$names}
}

# step_figures FOLDER: step, loss and gradient norm of each step, to the last digit
step_figures() {
    sed -n 's/.*"step":\([0-9]*\),"loss":\([^,]*\),"grad_norm":\([^,]*\),.*/\1 \2 \3/p' "$1/metrics.jsonl"
}

# 1, 2 and 4 ranks on one GPU, and 1 again: losses and norms must have equal bits; then the collectives without
# --deterministic
ranks() {
    local program=build/cuda$on-bf16/train_llama3_cuda equal=0 runs=0 run model=tiny seq=256 times result=MISSED
    if [ -n "$dry" ]; then
        seq=24 model=$work/model
        small_model "$model"
    fi
    local -a common=(--model "$model" --data "$work/random.tok" --seq $seq --batch 1 --steps 4 --warmup 2 --threads 1
        --transport threads) # ranks share a GPU on machines with several, too
    "${ours[@]}" "$bench" tokens "$work/random.tok" || return 1
    for run in "--accum 4" "--accum 4" "--accum 2 --ranks 2" "--accum 1 --ranks 4" \
        "--accum 1 --ranks 4 --dp-replicate 2 --recompute selective" "--accum 2 --ranks 2 --sharding no_shard" \
        "--accum 2 --ranks 2 --offload all"; do
        rm -rf "$work/run"
        if ! "${ours[@]}" "$program" "${common[@]}" --deterministic $run --out "$work/run"; then
            echo "FAIL $run"
            return 1
        fi
        step_figures "$work/run" >"$work/bits"
        [ $runs = 0 ] && cp "$work/bits" "$work/first"
        runs=$((runs + 1))
        if [ "$(wc -l <"$work/bits")" = 4 ] && cmp -s "$work/bits" "$work/first"; then
            equal=$((equal + 1))
        else
            echo "FAIL other bits: $run: $(tr '\n' ';' <"$work/bits") not $(tr '\n' ';' <"$work/first")"
        fi
    done
    for run in "--ranks 2" "--ranks 4 --sharding shard_grad_op"; do
        rm -rf "$work/run"
        if ! "${ours[@]}" "$program" "${common[@]}" $run --out "$work/run"; then
            echo "FAIL $run"
            return 1
        fi
        times='.*"step":4,.*"wait_s":\([^,]*\),.*"communication_s":\([^,]*\),.*'
        sed -n "s/$times/\\1 \\2/p" "$work/run/metrics.jsonl" | awk -v run="$run" '{
            printf "%s: collectives take %.3f ms of a step, ", run, 1e3 * $2
            printf "of which %.3f ms keep the compute stream waiting\n", 1e3 * $1
        }'
    done
    [ $equal != $runs ] || result=met
    echo "bound: deterministic runs of 1, 1 again, 2 and 4 ranks have the same bits | = $runs | $equal | $result"
    [ $equal = $runs ]
}

# The run whose losses are compared: 200 steps of Llama 3 with 6.8 million parameters on invented text. CURVE is the
# folder of the reference; with DRY, CURVE_OPTIONS chooses a smaller run.
curve=${CURVE:-build/curve}
loss_curve_options() { # [SEED]
    echo --data "$curve/text/train.tok" --lr 3e-4 --min-lr 3e-5 --seed "${1:-7}" --save-every 0 \
        "${CURVE_OPTIONS:---model tiny --seq 128 --batch 8 --steps 200 --warmup 20}"
}

# The reference: the losses of the CPU build in fp32. It is made beforehand, and comes along to the GPU machine.
loss_curve_on_cpu() {
    rm -rf "$curve"
    dev/test/sample_text.sh "$curve/sample" &&
        VOCAB_SIZE=${CURVE_VOCABULARY:-4096} dev/data/text.sh "$curve/text" "$curve/sample" &&
        build/cpu-fp32/train_llama3 $(loss_curve_options) --out "$curve/run" &&
        cp "$curve/run/metrics.jsonl" "$curve/" && rm -rf "$curve/run" "$curve/sample"
}

# curves_differ FILE FILE: steps, the mean and the largest difference of their losses, and the second file's first and
# last loss; nothing if a step is missing or a loss is no number
curves_differ() {
    losses() { sed -nE 's/.*"step":([0-9]+),"loss":([^,]*),.*/\1 \2/p' "$1"; }
    paste -d' ' <(losses "$1") <(losses "$2") | awk '
        $1 != $3 || $2 !~ /^[0-9.]+$/ || $4 !~ /^[0-9.]+$/ { bad++ }
        {
            d = $2 > $4 ? $2 - $4 : $4 - $2
            sum += d
            if (d > most) most = d
            if (NR == 1) first = $4
            last = $4
        }
        END { if (NR && !bad) printf "%d %.5f %.5f %s %s\n", NR, sum / NR, most, first, last }'
}

# What bf16 alone changes: the run on CPUs in bf16 and in fp32, for ten seeds. The bound of a curve in bf16 is 1.5 times
# the largest mean difference. Runs that are complete are not repeated.
curve_bound() {
    local seed p file largest=0 steps mean most first last
    for seed in 1 2 3 4 5 6 7 8 9 10; do
        for p in fp32 bf16; do
            file=$curve/$p-$seed.jsonl
            [ ! -s "$file" ] || continue
            rm -rf "$curve/run"
            build/cpu-$p/train_llama3 $(loss_curve_options $seed) --out "$curve/run" >"$work/said" 2>&1 ||
                { tail -n 3 "$work/said"; return 1; }
            mv "$curve/run/metrics.jsonl" "$file" && rm -rf "$curve/run"
        done
        read -r steps mean most first last < <(curves_differ "$curve/fp32-$seed.jsonl" "$curve/bf16-$seed.jsonl") ||
            { echo "seed $seed: the losses cannot be compared"; return 1; }
        echo "seed $seed: $steps steps, losses in fp32 and bf16 differ by $mean on average, at most $most"
        largest=$(awk -v a="$largest" -v b="$mean" 'BEGIN { print (a > b ? a : b) }')
    done
    awk -v d="$largest" 'BEGIN { printf "the largest mean difference is %s; bound: %.4f\n", d, 1.5 * d }'
}

# 1.5 times the largest mean difference of ten seeds, 0.01856, by dev/gpu_check.sh --function curve_bound on CPUs
bf16_bound=0.0278
# loss_curve PRECISION LIMIT: the same run on the GPU; LIMIT is what losses may differ by on average
loss_curve() {
    local program=build/cuda$on-$1/train_llama3_cuda result=MISSED steps mean most first last
    [ -s "$curve/metrics.jsonl" ] || { echo "error: $curve is not here: make gpu-programs"; return 1; }
    rm -rf "$work/run"
    "${ours[@]}" "$program" $(loss_curve_options) --out "$work/run" || return
    read -r steps mean most first last < <(curves_differ "$curve/metrics.jsonl" "$work/run/metrics.jsonl") ||
        { echo "error: the losses cannot be compared with $curve/metrics.jsonl"; return 1; }
    echo "$steps steps, from loss $first to $last, at most $most from the CPU build in one step"
    awk -v a="$mean" -v b="$2" 'BEGIN { exit a > b }' && result=met
    echo "bound: loss curve in $1: mean difference to the CPU build in fp32 | <= $2 | $mean | $result"
    [ $result = met ]
}

# ---------------------------------------------------------------------------
# 2 and 4 processes that share the GPU, over NCCL

# over_mpi RANKS COMMAND…: starts processes with the mpirun of build/openmpi (make gpu-programs), or of this machine. By
# its NCCL_HOSTID each rank is on a host of its own to NCCL, which then lets them share a GPU and communicates by
# sockets. Processes take turns on the GPU, so times mean nothing.
over_mpi() {
    local ranks=$1 mpi=$PWD/build/openmpi from=()
    shift
    [ ! -x "$mpi/bin/mpirun" ] || from=("OPAL_PREFIX=$mpi" "PATH=$mpi/bin:$PATH" OMPI_MCA_plm=isolated
        OMPI_MCA_plm_rsh_agent=/bin/true PMIX_MCA_pcompress_base_silence_warning=1)
    limited $((dry ? 400 : 100)) env "LD_LIBRARY_PATH=${from:+$mpi/lib:}$libraries" "${from[@]}" \
        OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,vader \
        OMPI_MCA_mpi_yield_when_idle=1 OMPI_MCA_btl_vader_single_copy_mechanism=none \
        NCCL_SOCKET_IFNAME=lo NCCL_NET=Socket NCCL_IB_DISABLE=1 NCCL_MNNVL_ENABLE=0 \
        NCCL_NVLS_ENABLE=0 NCCL_PXN_DISABLE=1 NCCL_RAS_ENABLE=0 NCCL_DEBUG=WARN \
        mpirun --oversubscribe --bind-to none -np "$ranks" \
        bash -c 'NCCL_HOSTID=h$OMPI_COMM_WORLD_RANK exec "$@"' - "$@"
}

# lost_process SIGNAL PATTERN: rank 1 of 2 gets the signal while they train; a message must name it
lost_process() {
    local signal=$1 pattern=$2 launched process victim= i
    rm -rf "$work/lost"
    over_mpi 2 "$program" "${common[@]}" --steps 1000000 --timeout 5 --out "$work/lost" >"$work/said" 2>&1 &
    launched=$!
    for ((i = 0; i < 900; i++)); do
        [ "$(wc -l 2>/dev/null <"$work/lost/metrics.jsonl" || echo 0)" -lt 3 ] || break
        sleep 0.1
    done
    for process in $(pgrep -f -- "--out $work/lost" | sort -n); do
        if [ -z "$victim" ] && grep -zqx OMPI_COMM_WORLD_RANK=1 "/proc/$process/environ" 2>/dev/null; then
            victim=$process
        fi
    done
    [ -z "$victim" ] || kill "-$signal" "$victim"
    wait $launched
    [ -z "$victim" ] || kill -KILL "$victim" 2>/dev/null
    if grep -aE -m1 "$pattern" "$work/said"; then return 0; fi
    echo "FAIL a rank that got SIG$signal is not named: $(tail -n 3 "$work/said" | tr '\n' ' ')"
    return 1
}

nccl_ranks() {
    local program=build/cuda-nccl-bf16/train_llama3_cuda threads=build/cuda$on-bf16/train_llama3_cuda seq=256 run start
    local ranks equal=0 runs=0 named=0 result=MISSED beside
    if [ -n "$dry" ]; then
        program=build/cuda-on-mpi-fp32/train_llama3_cuda threads=build/cuda-on-cpu-fp32/train_llama3_cuda seq=16
        echo "CUDA on a CPU, and NCCL emulated over MPI: this tests the script, not NCCL"
    fi
    [ -x $program ] || { echo "left out: no $program (make gpu-programs, where MPI and NCCL are)"; return; }
    mkdir -p "$work/four"
    cat >"$work/four/config.json" <<'EOF'
{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2,
 "head_dim": 64, "intermediate_size": 96, "vocab_size": 4096, "max_position_embeddings": 256, "rope_theta": 500000}
EOF
    sed -i "s/\"vocab_size\": 4096/\"vocab_size\": ${CURVE_VOCABULARY:-4096}/" "$work/four/config.json"
    local -a common=(--model "$work/four" --data "$curve/text/train.tok" --seq $seq --batch 1 --warmup 2 --threads 1)
    for run in "2" "4" "4 --dp-replicate 2" "2 --tp 2" "2 --cp 2" "2 --pp 2 --accum 2" "4 --pp 4 --accum 4" \
        "2 --pp 2 --accum 4 --pp-schedule interleaved --pp-chunks 2"; do
        read -r ranks run <<<"$run"
        rm -rf "$work/one" "$work/several"
        start=$SECONDS runs=$((runs + 1))
        "${ours[@]}" "$threads" "${common[@]}" --steps 3 --deterministic --ranks "$ranks" --transport threads $run \
            --out "$work/one" >"$work/said-threads" 2>&1 &
        beside=$!
        over_mpi "$ranks" $program "${common[@]}" --steps 3 --deterministic --timeout 60 $run --out "$work/several" \
            >"$work/said" 2>&1 || echo "FAIL exit code $?: $(tail -n 3 "$work/said" | tr '\n' ' ')"
        wait $beside || echo "FAIL ranks that are threads: $(tail -n 3 "$work/said-threads" | tr '\n' ' ')"
        if grep -qa "over nccl" "$work/said" && [ "$(wc -l <"$work/several/metrics.jsonl")" = 3 ] &&
            cmp -s <(step_figures "$work/one") <(step_figures "$work/several"); then
            equal=$((equal + 1))
            echo "$ranks processes $run: the bits of threads, $((SECONDS - start)) s"
        else echo "FAIL other bits: $ranks processes $run: $(step_figures "$work/several" | tr '\n' ';')"; fi
    done
    [ $equal != $runs ] || result=met
    echo "bound: processes that share a GPU over NCCL have the bits of threads | = $runs | $equal | $result"
    lost_process KILL "^failure: rank 1.* died" && named=$((named + 1))
    lost_process STOP "rank 1 .*is stopped" && named=$((named + 1))
    echo "bound: a killed and a stopped process are named | = 2 | $named | $([ $named = 2 ] && echo met || echo MISSED)"
    [ $equal = $runs ] && [ $named = 2 ]
}

# ---------------------------------------------------------------------------
# what users do: each with its time and the memory of the GPU

# timed NAME COMMAND…: runs a command, whose output is in $work/said. Prints its seconds, the memory that it planned
# (training prints that), and the memory of the GPU that was in use meanwhile and before, CUDA's own included.
timed() {
    local name=$1 start=$EPOCHREALTIME sampler= code planned
    shift
    : >"$work/memory"
    if command -v nvidia-smi >/dev/null; then
        stdbuf -oL nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits -lms 100 >"$work/memory" \
            2>/dev/null &
        sampler=$!
    fi
    limited 60 "${ours[@]}" "$@" >"$work/said" 2>&1
    code=$?
    [ -z "$sampler" ] || { kill $sampler; wait $sampler; } 2>/dev/null
    [ $code = 0 ] || { echo "FAIL $name: exit code $code: $(tail -n 2 "$work/said" | tr '\n' ' ')"; return 1; }
    planned=$(sed -nE 's/^memory per rank: ([0-9.]+ MB).*/planned \1, /p' "$work/said")
    awk -v name="$name" -v a="$start" -v b="$EPOCHREALTIME" -v planned="$planned" '
        $1 ~ /^[0-9]+$/ {
            if (!n++) before = $1
            if ($1 > most) most = $1
        }
        END {
            printf "%s: %.1f s, %s", name, b - a, planned
            if (n) printf "%d MiB of the GPU in use at most, %d before\n", most, before
            else print "memory of the GPU unknown"
        }' "$work/memory"
}

# built NAME [PRECISION]: the program NAME_llama3 for GPUs
built() { echo "build/cuda$on-${2:-bf16}/$1_llama3_cuda"; }

# A directory as Hugging Face has it, with a model that was trained for some steps here, and its tokenizer.
use_model() {
    [ ! -e "$curve/model/config.json" ] || return 0
    local size=(--seq 1024 --batch 4 --steps 40)
    mkdir -p "$work/new"
    cat >"$work/new/config.json" <<'EOF'
{"model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16,
 "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2816, "vocab_size": 4096,
 "max_position_embeddings": 4096, "rope_theta": 500000}
EOF
    [ -z "$dry" ] || { small_model "$work/new"; size=(--seq 24 --batch 1 --steps 4); }
    sed -i "s/\"vocab_size\": 4096/\"vocab_size\": ${CURVE_VOCABULARY:-4096}/" "$work/new/config.json"
    rm -rf "$curve"/model*
    timed "training" "$(built train)" --model "$work/new" --data "$curve/text/train.tok" "${size[@]}" --lr 1e-3 \
        --out "$work/trained" && mv "$(realpath "$work/trained/latest")" "$curve/model" &&
        rm "$curve/model/optimizer.safetensors"
}

# scores_agree NAME FILE: log-probabilities in bf16 and in fp32 differ by no more than losses may, on average per token
scores_agree() {
    local p
    for p in bf16 fp32; do
        timed "$1 in $p" "$(built eval $p)" --model "$curve/model" --score "$2" || return
        grep '"logprob"' "$work/said" >"$work/scores-$p"
    done
    paste <(sed -nE 's/.*"logprob":([^,]*),"tokens":([0-9]+).*/\1 \2/p' "$work/scores-bf16") \
        <(sed -nE 's/.*"logprob":([^,]*),"tokens":([0-9]+).*/\1 \2/p' "$work/scores-fp32") |
        awk -v name="$1" -v bound="$bf16_bound" '
            NF != 4 || $2 != $4 { bad++ }
            { tokens += $2; d = $1 - $3; sum += d < 0 ? -d : d }
            END {
                mean = tokens ? sum / tokens : 1
                met = !bad && mean <= bound
                printf "bound: %s: log-probability per token, bf16 from fp32 | <= %s | %.5f | %s\n", name, bound, mean,
                    met ? "met" : "MISSED"
                exit !met
            }'
}

use_generation() {
    local prompt="In the" text
    use_model && timed "64 tokens" "$(built generate)" --model "$curve/model" --prompt "$prompt" --max-tokens 64 \
        --temperature 0 || return
    # special tokens and what cannot stand in JSON as it is are left out of what is forced
    text=$(grep -avE '^(note|model|weights|ranks): ' "$work/said" | sed 's/<|[^|]*|>//g' | tr -cd ' !#-[]-~')
    [[ "$text" = "$prompt"* ]] && [ ${#text} -gt 20 ] || { echo "FAIL the text is not continued: $text"; return 1; }
    printf '{"context":"%s","continuation":"%s"}\n' "$prompt" "${text#"$prompt"}" >"$work/forced.jsonl"
    scores_agree "the generated tokens" "$work/forced.jsonl"
}

use_scores() {
    use_model || return
    awk -v requests="$([ -n "$dry" ] && echo 4 || echo 256)" 'BEGIN {
        srand(7)
        for (i = 0; i < requests; i++) {
            context = continuation = ""
            for (k = 0; k < 12; k++) context = context (k ? "," : "") int(500 * rand())
            for (k = 0; k < 6; k++) continuation = continuation (k ? "," : "") int(500 * rand())
            printf "{\"context_ids\":[%s],\"continuation_ids\":[%s]}\n", context, continuation
        }
    }' >"$work/requests.jsonl"
    scores_agree "scores of requests" "$work/requests.jsonl"
}

# learns NAME FILE OPTION…: trains on the directory; the loss must fall, and the result is saved as FILE
learns() {
    local name=$1 file=$2 size=(--seq 1024 --batch 4 --steps 30) first last result=MISSED
    shift 2
    [ -z "$dry" ] || size=(--seq 24 --batch 1 --steps 8)
    rm -rf "$work/run"
    use_model && timed "$name" "$(built train)" --model "$curve/model" --data "$curve/text/train.tok" "${size[@]}" \
        --warmup 2 --seed 3 "$@" --out "$work/run" || return
    read -r first last < <(step_figures "$work/run" | awk '{ loss[NR] = $2 } END {
        third = int(NR / 3)
        for (i = 1; i <= third; i++) { a += loss[i]; b += loss[NR + 1 - i] }
        print a / third, b / third
    }')
    awk -v a="$first" -v b="$last" 'BEGIN { exit !(b < a) }' && [ -s "$work/run/latest/$file" ] && result=met
    echo "bound: $name: loss of the last third | < $first | $last | $result"
    [ $result = met ]
}
use_lora_int8() {
    learns "LoRA on an int8 base" adapter_model.safetensors --lora-rank 8 --base int8 --lr 1e-2
}
use_directory() { learns "fine-tuning a directory" model.safetensors --lr 1e-3; }

# A run that resumes from a checkpoint has the bits of one that was not interrupted.
use_resume() {
    local size=(--seq 1024 --batch 4) result=MISSED
    [ -z "$dry" ] || size=(--seq 24 --batch 1)
    use_model || return
    size+=(--model "$curve/model" --data "$curve/text/train.tok" --steps 6 --warmup 2 --deterministic)
    timed "6 steps and 2 checkpoints" "$(built train)" "${size[@]}" --save-every 3 --out "$work/whole" &&
        timed "3 steps, resumed" "$(built train)" "${size[@]}" --save-every 0 --resume "$work/whole/step-00000003" \
            --out "$work/resumed" || return
    [ "$(step_figures "$work/resumed" | wc -l)" = 3 ] && result=met
    cmp -s <(step_figures "$work/whole" | tail -n 3) <(step_figures "$work/resumed") || result=MISSED
    echo "bound: steps after resuming with the bits of the run that was not interrupted | = 3 |" \
        "$(step_figures "$work/resumed" | wc -l) | $result"
    [ $result = met ]
}

sanitizer() { # compute-sanitizer does not support the GPUs of some machines
    command -v compute-sanitizer >/dev/null || { echo "not available: no compute-sanitizer"; return; }
    if "${ours[@]}" compute-sanitizer --error-exitcode 1 "$bench" probe; then
        echo "works"
    else
        echo "not available: $(compute-sanitizer --version | tail -n 1) fails on a program of one kernel"
    fi
}

# checked TOOL: the tests of kernels, one by one, under a tool of compute-sanitizer. Tests that do not end in time are
# named.
checked() {
    local program=build/cuda$on-bf16/test_llama3_cuda name clean=0 errors=0 late=""
    for name in ${TESTS:-$("${ours[@]}" "$program" list | grep '^kernels:')}; do
        limited 40 "${ours[@]}" compute-sanitizer --tool "$1" --error-exitcode 9 "$program" "$name" >"$work/one" 2>&1
        case $? in
            0) clean=$((clean + 1)) ;;
            124) late+=" $name" ;;
            *)
                errors=$((errors + 1))
                echo "FAIL $name under $1"
                grep -m 20 '^=========' "$work/one" ;;
        esac
    done
    echo "not ended in time:${late:- none}"
    echo "$clean passed, $errors failed"
    [ $errors = 0 ]
}

nccl() {
    local program=build/cuda$on-bf16/nccl_check
    if [ -x "$program" ]; then "${ours[@]}" "$program"
    else echo "left out: built without NCCL"; fi
}

# Profiles the attention kernels: the unit closest to its peak rate is what limits them.
profiler() {
    local metrics=gpu__time_duration.sum
    command -v ncu >/dev/null || { echo "not available: no ncu"; return; }
    for unit in sm__throughput dram__throughput l1tex__data_pipe_lsu_wavefronts_mem_shared \
        sm__pipe_tensor_cycles_active; do
        metrics+=,$unit.avg.pct_of_peak_sustained_elapsed
    done
    # The clocks stay as they are: ncu would lock them, and leave them locked if it were ended.
    if printf '64 1\n128 1\n' |
        limited 90 "${ours[@]}" ncu --clock-control none --csv --launch-count 200 --kernel-name regex:attention \
            --metrics "$metrics" "$bench" attention ${dry:+tiny} >"$work/profile" 2>&1; then
        grep '^"' "$work/profile" || echo "no kernel was profiled: $(tail -n 1 "$work/profile")"
    else echo "not available: $(grep -E '^==(ERROR|WARNING)==' "$work/profile" || tail -n 1 "$work/profile")"; fi
}

# The time of a training step with other options.
variants() {
    local options model=$work/model more=(--seq 8192 --batch 1 --accum 2)
    mkdir -p "$model"
    cat >"$model/config.json" <<'END'
{"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
 "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192, "vocab_size": 128256,
 "max_position_embeddings": 8192, "rope_theta": 500000, "tie_word_embeddings": true}
END
    [ -z "$dry" ] || { small_model "$model"; more=(--seq 24 --batch 1 --accum 2); }
    for options in "" mma "--deterministic" "--recompute selective" \
        "--recompute full" "--accumulate local" "--lora-rank 16 --base int8"; do
        local lines='steps 2\nsteps 4\nquit\n'
        [ "$options" != mma ] || lines="attention mma\n$lines"
        printf "$lines" | "${ours[@]}" "$bench" train --model "$model" "${more[@]}" ${options/mma/} \
            >"$work/answers" || { tail -n 3 "$work/answers"; return 1; }
        sed -nE 's/.*"ms":\[([0-9.,e+]*)\].*/\1/p' "$work/answers" | tail -n 1 | tr , '\n' | middle |
            sed "s/^/step in ms, ${options:-default}: /"
    done
}

small_model() { # DIR
    mkdir -p "$1"
    cat >"$1/config.json" <<'END'
{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
 "head_dim": 64, "intermediate_size": 96, "vocab_size": 4096, "max_position_embeddings": 256, "rope_theta": 500000}
END
}

pages() { # as many as fit into the time
    local p names="" programs="" code
    for p in dev/kernels/*.cuh; do p=$(basename "$p" .cuh); [ "$p" = page ] || names+=" $p"; done
    [ -n "$dry" ] && names=cast
    for p in bf16 fp32; do
        [ -n "$dry" ] && [ ! -x build/kernels-cuda$on-$p/pages ] && continue
        [ -x build/kernels-cuda$on-$p/pages ] || make --no-print-directory -C dev/kernels CUDA=1 \
            ../../build/kernels-cuda-$p/pages >&2 || return
        programs+=" $PWD/build/kernels-cuda$on-$p/pages"
    done
    limited 3600 env "NAMES=$names" "PAGES=$programs" "COMMIT=$commit" "${ours[@]}" dev/kernels/pages.sh table-cuda |
        tee "$out/kernels-gpu.md"
    code=$?
    [ $code != 124 ] || echo "the stage's time is over: the pages after these are left out"
    [ $code = 0 ] || [ $code = 124 ]
}

