#!/usr/bin/env bash
# demo.sh: fetches a text, trains a tokenizer and a model on it with FSDP on two ranks, and lets the model write.
# `make demo` builds first and calls it. RANKS=2, STEPS=400 and VAL_EVERY=100 may be set.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
ranks=${RANKS:-2}
out=out/demo
say() { printf '\n== %s\n' "$*"; }

# Whether this machine and this build can run under mpirun: with --transport mpi, a build with MPI asks for mpirun.
has_mpi() {
    command -v mpirun >/dev/null || return 1
    [[ $(./train_llama3 --transport mpi --data "$data/train.tok" 2>&1) == *mpirun* ]]
}

say "a text, and a tokenizer trained on it"
if command -v bible >/dev/null || [ -x /usr/games/bible ]; then
    dev/data/kjv.sh data/kjv
    data=data/kjv prompt="And God said unto Moses"
else
    echo "the King James Bible is not installed here: training on this repository's own text instead"
    dev/data/self.sh data/self
    data=data/self prompt="static void"
fi
ls -l "$data"/*.tok

launch=(./train_llama3 --ranks "$ranks")
if has_mpi; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
    launch=(mpirun --bind-to none -np "$ranks" ./train_llama3)
fi

say "training: ${launch[*]} --model tiny …"
rm -rf "$out"
"${launch[@]}" --model tiny --data "$data/train.tok" --val "$data/val.tok" --seq 128 --batch 4 --lr 2e-3 --warmup 40 \
    --steps "${STEPS:-400}" --val-every "${VAL_EVERY:-100}" --val-batches 20 --out "$out"

say "what the trained model writes"
./generate_llama3 --model "$out/latest" --prompt "$prompt" --max-tokens 120 --temperature 0.7
say "its loss on all of the validation text"
./eval_llama3 --model "$out/latest" --eval "$data/val.tok" --seq 128 --batch 8
echo
echo "under $out: metrics, the layout, and the ledger of expected, dry-run and measured traffic"
