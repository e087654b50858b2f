#!/usr/bin/env bash
# demo.sh : text, tokens, training with FSDP on two ranks, text again. `make demo` builds first and calls it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
ranks=${RANKS:-2}
out=out/demo
say() { printf '\n== %s\n' "$*"; }

say "a text, and a tokenizer trained on it"
if command -v bible >/dev/null || [ -x /usr/games/bible ]; then
    dev/data/kjv.sh data/kjv
    data=data/kjv prompt="And God said unto Moses"
else
    echo "no package manager with the King James Bible here: this repository's own text instead"
    dev/data/self.sh data/self
    data=data/self prompt="static void"
fi
ls -l "$data"/*.tok

launch=(./train_llama3 --ranks "$ranks")
if command -v mpirun >/dev/null && build_has_mpi=$(./train_llama3 --transport mpi --data "$data/train.tok" 2>&1 | grep -c mpirun || true) && [ "$build_has_mpi" != 0 ]; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
    launch=(mpirun --bind-to none -np "$ranks" ./train_llama3)
fi

say "training: ${launch[*]} --model tiny …"
rm -rf "$out"
"${launch[@]}" --model tiny --data "$data/train.tok" --val "$data/val.tok" --seq 128 --batch 4 --steps "${STEPS:-400}" --lr 2e-3 --warmup 40 \
    --val-every "${VAL_EVERY:-100}" --val-batches 20 --out "$out" --export "$out/model"

say "what the trained model writes"
./train_llama3 --model "$out/model" --generate "$prompt" --max-tokens 120 --temperature 0.7
say "its loss on all of the validation text"
./train_llama3 --model "$out/model" --eval "$data/val.tok" --seq 128 --batch 8
echo
echo "metrics, layout and the ledger of planned and counted traffic lie under $out"
