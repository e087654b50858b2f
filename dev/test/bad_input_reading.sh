# bad_input_reading.sh: the part of bad_input.sh, which sources it, on inputs that cannot be read, or only in parts, or
# that never end.

# ---------------------------------------------------------------- unreachable and endless inputs
# stripped DIR : the fixture's directory without its weights
stripped() { mkdir -p "$1" && cp "$fixture/config.json" "$1/"; }

# weights that are there but cannot be reached must not count as absent: the run would start from random weights
unreachable_weights() {
    local nobody=(setpriv --reuid 65534 --regid 65534 --clear-groups)
    mkdir -p cache/blobs cache/snapshots/a
    cp "$fixture/model.safetensors" cache/blobs/weights
    cp "$fixture/config.json" cache/blobs/config
    ln -s ../../blobs/weights cache/snapshots/a/model.safetensors
    ln -s ../../blobs/config cache/snapshots/a/config.json
    works "a Hugging Face cache snapshot" "$evaluator" --model cache/snapshots/a "${evaluate[@]}"
    cp -a cache/snapshots/a copied
    bad "a copied snapshot whose config.json is a dangling link" \
        "copied/config.json is a symbolic link to ../../blobs/config, which cannot be reached .*cp -rL" "${train[@]}" \
        --model copied
    rm copied/config.json && cp model/config.json copied/
    everywhere "a copied snapshot whose weights are a dangling link" \
        "copied/model.safetensors is a symbolic link to ../../blobs/weights, which cannot be reached .*cp -rL" \
        "${train[@]}" --model copied
    config loop && ln -s model.safetensors loop/model.safetensors
    bad "weights that are a link to themselves" "loop/model.safetensors is a symbolic link .*Too many levels" \
        "${train[@]}" --model loop
    config noindex && ln -s gone noindex/model.safetensors.index.json
    bad "an index that is a dangling link" "noindex/model.safetensors.index.json is a symbolic link to gone" \
        "${train[@]}" --model noindex
    config parts && touch parts/model-00001-of-00002.safetensors
    bad "parts of weights without their index" "parts holds model-00001-of-00002.safetensors, but neither" \
        "${train[@]}" --model parts
    echo '{"weight_map": {"a": "part.safetensors"}}' >parts/model.safetensors.index.json
    ln -s gone parts/part.safetensors
    ln -s nowhere dangling
    bad "--model is a dangling link" "dangling is a symbolic link to nowhere, which cannot be reached" "${train[@]}" \
        --model dangling
    bad "a part of weights that is a dangling link" "parts/part.safetensors is a symbolic link to gone.*cp -rL" \
        "${train[@]}" --model parts
    command -v setpriv >/dev/null && [ "$(id -u)" = 0 ] || return
    chmod 755 "$work" # so that another user may look into it
    cp "$program" as_nobody
    mkdir locked && cp "$fixture/model.safetensors" locked/ && chmod 700 locked
    config barred && ln -s ../locked/model.safetensors barred/model.safetensors
    refused "weights in a directory that one may not enter" \
        "barred/model.safetensors is a symbolic link .*Permission denied" "${nobody[@]}" ./as_nobody "${train[@]}" \
        --model barred
    config hidden && echo '{}' >hidden/model.safetensors.index.json && chmod 000 hidden/model.safetensors.index.json
    refused "an index that one may not read" "cannot read hidden/model.safetensors.index.json: Permission denied" \
        "${nobody[@]}" ./as_nobody "${train[@]}" --model hidden
    mkdir mute && cp good/train.tok mute/ && cp good/tokenizer.model mute/ && chmod 000 mute/tokenizer.model
    cp -r saved sealed && cp -r trained locked/ && chown -R 65534 sealed && chmod 300 sealed
    refused "--resume auto in a directory that one may not list" \
        "cannot look for checkpoints in sealed: Permission denied" "${nobody[@]}" ./as_nobody "${train[@]}" --out \
        sealed --resume auto
    refused "a model in a directory that one may not enter" "cannot look for locked/trained: Permission denied" \
        "${nobody[@]}" ./as_nobody "${train[@]}" --model locked/trained
    refused "a tokenizer that one may not read" "cannot read the tokenizer mute/tokenizer.model: Permission denied" \
        "${nobody[@]}" ./as_nobody "${train[@]}" --data mute/train.tok
}

# not_a_file NAME PATH OPTIONS… : a pipe at PATH is refused at once, by name
not_a_file() {
    local name=$1 path=$2
    shift 2
    rm -f "$path"
    mkfifo "$path"
    bad "$name is a pipe" "$path is a pipe, expected a regular file" "$@"
    rm -f "$path"
}

endless_inputs() {
    mkdir -p piped adapted_pipe
    not_a_file "config.json" piped/config.json "${train[@]}" --model piped
    ln -s /dev/zero piped/config.json
    bad "config.json is /dev/zero" "piped/config.json is a device, expected a regular file" "${train[@]}" --model piped
    rm piped/config.json
    cp model/config.json piped/
    not_a_file "model.safetensors" piped/model.safetensors "${train[@]}" --model piped
    not_a_file "the index of the weights" piped/model.safetensors.index.json "${train[@]}" --model piped
    not_a_file "--data" pipe.tok "${train[@]}" --data pipe.tok
    not_a_file "--val" pipe.tok "${train[@]}" --val pipe.tok
    not_a_file "--eval" pipe.tok --model trained --eval pipe.tok --seq 16
    not_a_file "--tokenizer" pipe.model "${train[@]}" --tokenizer pipe.model
    by=$tokens not_a_file "--tokenizer of --encode" pipe.model --encode sample/00.txt --tokenizer pipe.model
    not_a_file "tokenizer.model beside the model" piped/tokenizer.model --model piped --data bytes.tok --seq 8
    not_a_file "--cluster" pipe.json --cluster pipe.json --world 2
    bad "--cluster is /dev/zero" "/dev/zero is a device" --cluster /dev/zero --world 2
    not_a_file "adapter_config.json" adapted_pipe/adapter_config.json --model trained --eval good/val.tok --seq 16 \
        --adapters adapted_pipe
    cp adapters/adapter_config.json adapted_pipe/
    not_a_file "adapter_model.safetensors" adapted_pipe/adapter_model.safetensors --model trained --eval good/val.tok \
        --seq 16 --adapters adapted_pipe
    rm -rf saved3 && cp -r saved/step-00000001 saved3
    not_a_file "trainer.json" saved3/trainer.json "${train[@]}" --resume saved3
    mkdir -p piped_run
    by=$tokens not_a_file "samples.jsonl" piped_run/samples.jsonl --audit --out piped_run
    bad "--data is a device" "/dev/null is a device" "${train[@]}" --data /dev/null
    truncate -s 2G sparse.json
    mkdir -p sparse && mv sparse.json sparse/config.json
    bad "config.json of 2 GB" "sparse/config.json has 2147483648 bytes, expected at most 1 GiB" "${train[@]}" --model \
        sparse
    works "--encode of a pipe" bash -c "'$tokens' --encode <(cat sample/00.txt) --tokenizer good/tokenizer.model"
    command -v python3 >/dev/null || return
    python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind("socket.tok")' 2>/dev/null || return
    bad "--data is a socket" "socket.tok is a socket, expected a regular file" "${train[@]}" --data socket.tok
}

# JSON that readers may understand in different ways
ambiguous_json() {
    bad_config "a key twice" 'the key "hidden_size" occurs twice' 's/("hidden_size": )32/\164, \132/'
    bad_config "a key of rope_scaling twice" 'the key "factor" occurs twice' 's/"factor": 8/"factor": 8, "factor": 9/'
    bad_config_text "text after its end" "found 'hidden_size = 64' after the end of the JSON object" \
        "$(cat model/config.json)hidden_size = 64"
    config changed && printf '\0{"hidden_size": 64}' >>changed/config.json
    bad "config.json: a NUL byte" "changed/config.json is not a JSON object: byte [0-9]+ is NUL" "${train[@]}" \
        --model changed
    config changed
    echo '{"weight_map": {"a": "x", "b": "y", "a": "z"}}' >changed/model.safetensors.index.json
    bad "an index with a key twice" 'index.json: the key "a" occurs twice' "${train[@]}" --model changed
    echo '{"weight_map": {"a": "x"}} more' >changed/model.safetensors.index.json
    bad "an index with text after its end" "found 'more' after the end" "${train[@]}" --model changed
    rm changed/model.safetensors.index.json
    spoiled_adapters "an adapter_config.json with a key twice" 'the key "r" occurs twice' 's/"r": 4/"r": 4, "r": 8/'
    bad_cluster "a key twice" 'the key "name" occurs twice' '0,/"name"/s//"name": "a", "name"/'
    header | sed -E 's/"dtype":"F32",/"dtype":"F32","dtype":"F16",/' | weights changed
    bad "safetensors: a key of a tensor twice" 'the key "dtype" occurs twice' --model changed "${evaluate[@]}"
}

# same_result NAME COMMAND… : prints what COMMAND printed without the shim
same_result() {
    local name=$1 code
    shift
    "$@" >want 2>&1 </dev/null
    LD_PRELOAD=$shim HALVE_READS=1 "$@" >got 2>&1 </dev/null
    code=$?
    if [ "$code" != 0 ]; then fail "$name" "exit code $code: $(tail -n 1 got)"
    elif ! cmp -s <(grep -oE '"?loss"?:? *[0-9.]+' want) <(grep -oE '"?loss"?:? *[0-9.]+' got); then
        fail "$name" "another loss: $(tail -n 1 got), was $(tail -n 1 want)"
    else pass "$name" "$(grep -oE '"?loss"?:? *[0-9.]+' got | tail -n 1), the same"; fi
}

short_reads() {
    local n file
    same_result "halved reads: training from token files" "$program" "${train[@]}" --model trained --steps 3
    same_result "halved reads: --eval" "$evaluator" --model "$fixture" "${evaluate[@]}"
    works "a run that saves each step" "$program" "${train[@]}" --steps 2 --save-every 1 --out each
    same_result "halved reads: --resume" "$program" "${train[@]}" --steps 2 --resume each/step-00000001
    for file in config.json model.safetensors bytes.tok; do
        for n in 1 2; do
            works "read $n of $file is interrupted by a signal" env LD_PRELOAD="$shim" FAIL_READ_OF="/$file" \
                FAIL_READ_AT="$n" READ_ERROR=EINTR "$evaluator" --model "$fixture" "${evaluate[@]}"
            refused "read $n of $file fails" "$file.*(Input/output error|cannot be read)" env LD_PRELOAD="$shim" \
                FAIL_READ_OF="/$file" FAIL_READ_AT="$n" "$evaluator" --model "$fixture" "${evaluate[@]}"
        done
    done
}

# under a stack of 128 KB, which is also the size of musl's threads
small_stacks() {
    local small=(bash -c 'ulimit -s 128 && exec "$@"' small)
    works "a stack of 128 KB: training" "${small[@]}" "$program" "${train[@]}" --model trained --steps 3 --out stack
    works "a stack of 128 KB: --resume" "${small[@]}" "$program" "${train[@]}" --steps 4 --out stack --resume auto \
        --allow-changes
    works "a stack of 128 KB: 2 ranks as threads" "${small[@]}" "$program" "${train[@]}" --model trained --ranks 2
    works "a stack of 128 KB: --eval" "${small[@]}" "$evaluator" --model "$fixture" "${evaluate[@]}"
    works "a stack of 128 KB: --export --dtype bf16" "${small[@]}" "$converter" --model trained --export half16 \
        --dtype bf16
    works "a stack of 128 KB: --eval of bf16 files" "${small[@]}" "$evaluator" --model half16 --eval good/val.tok \
        --seq 16
    works "a stack of 128 KB: --prompt" "${small[@]}" "$generator" --model trained --prompt hello --max-tokens 3
    works "a stack of 128 KB: plan_llama3" "${small[@]}" "$planner" --model llama3-8b --world 64 --tp 4 --pp 2
    works "a stack of 128 KB: plan_llama3 --search" "${small[@]}" "$planner" --cluster \
        "$top/dev/clusters/h100-8.json" --world 4 --model tiny --search
    works "a stack of 128 KB: --export --dtype int8" "${small[@]}" "$converter" --model trained --export int8 \
        --dtype int8
}

unreachable_and_endless_inputs() {
    shim=$work/io_shim.so
    cc -O1 -shared -fPIC "$top/dev/test/io_shim.c" -o "$shim" -ldl || fail "io_shim.c" "does not build"
    unreachable_weights
    endless_inputs
    ambiguous_json
    short_reads
    small_stacks
    "$top/dev/test/allocations.sh" "$program" 20 >.allocations 2>&1
    sed '$d' .allocations
    passed=$((passed + $(sed -nE '$s/^([0-9]+) passed.*/\1/p' .allocations)))
    failed=$((failed + $(sed -nE '$s/.* ([0-9]+) failed/\1/p' .allocations)))
}
