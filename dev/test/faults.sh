#!/usr/bin/env bash
# faults.sh : plants one fault at a time into a copy of the source and expects a named test to fail.
# A test that no fault can fail proves nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
flags=$(cat build/cpu-fp32/flags)  # compiler, flags and libraries of the build under test
passed=0 failed=0

# fault NAME FILE SED GROUP EXPECTED : after SED on FILE, a failing check of GROUP must match EXPECTED
fault() {
    local name=$1 file=$2 edit=$3 group=$4 expected=$5
    rm -rf "$work/src"
    mkdir -p "$work/src/dev"
    cp ./*.h ./*.cu "$work/src/"
    cp -r dev/test dev/data "$work/src/dev/"
    sed -i "$edit" "$work/src/$file"
    if cmp -s "$file" "$work/src/$file"; then
        echo "FAIL planted: $name: the edit no longer matches $file"
        failed=$((failed + 1))
        return
    fi
    local compile=${flags%% -L*} libs=-L${flags#* -L}
    [ "$compile" != "$flags" ] || libs=${flags#* -pthread}
    (cd "$work/src" && ${compile/-O3/-O1} -Wno-unused-function -Wno-unused-variable -Wno-unused-parameter -x c test_llama3.cu -o "$work/test" -x none $libs -lcjson -lpcre2-8 -lm -pthread)
    local said
    said=$(cd "$work/src" && timeout 100 "$work/test" "$group" 2>&1) || true
    local caught
    caught=$(grep -E "^(FAIL|failure:)" <<<"$said" | grep -m1 -E "$expected" || true)
    if [ -n "$caught" ]; then
        echo "pass planted: $name: caught by ${caught:0:150}"
        passed=$((passed + 1))
    else
        echo "FAIL planted: $name: no failing check like '$expected'; the test ended with: $(tail -n 1 <<<"$said")"
        failed=$((failed + 1))
    fi
}

fault "a unit is not reduced" fsdp.h \
    's|^    tree_sum(f->dev, sum, f->receive|    if (u->unit->kind != UNIT_HEAD) tree_sum(f->dev, sum, f->receive|' faults "gradients of one rank"
fault "a unit's reduction is never started" fsdp.h \
    's|^    reduce_finish(f);|&\n    if (u->unit->kind == UNIT_HEAD \&\& f->ranks > 1) { slot_release(f->gradient_slots, f->num_gradient_slots, u->dweights); u->dweights = NULL; return; }|' faults "law, walk and wire"
fault "gradients are scaled by the world" fsdp.h \
    's|^    tree_sum(f->dev, sum, f->receive.*|&\n    for (int64_t i = 0; i < u->shard \&\& !f->dev->walk \&\& replace; i++) sum[i] *= (float)f->ranks;|' faults "gradients of one rank"
fault "two ranks take the same samples" dataloader.h \
    's|m) \* s->shards + s->shard;|m) * s->shards + s->shard / 2 * 2;|' data "perm"
fault "two ranks take the same samples, at run time" dataloader.h \
    's|m) \* s->shards + s->shard;|m) * s->shards + s->shard / 2 * 2;|' faults "train on the same samples"
fault "padding of the last shard is trained" fsdp.h \
    's|    memset(u->dweights + written, 0, sizeof(float) \* (size_t)(u->padded - written));||; s|p.unit->grad + p.at, copy, p.count,|&|; s|u->exp_avg_sq + p.at, u->grad + p.at, copy, p.count,|u->exp_avg_sq + p.at, u->grad + p.at, copy, p.tensor == \&f->table->tensors[u->unit->first + u->unit->count - 1] ? u->shard - p.at : p.count,|' faults "padding stays zero"
fault "a gather is waited for only after its weights were used" fsdp.h \
    's|    collective_wait(f->comm, &u->gather);||; s|^    slot_release(f->weight_slots|    collective_wait(f->comm, \&u->gather);\n&|' faults "gradients of one rank"
fault "a reduction is not waited for" fsdp.h \
    's|    collective_wait(f->comm, &f->reduce);||' faults "gradients of one rank|in flight"
fault "the mean is divided by the micro-batches once more" train_llama3.cu \
    's|    s.grad_norm = sqrt(exact_value(&squared_norm)) / |    s.grad_norm = sqrt(exact_value(\&squared_norm)) / r->opt->accum / |; s|(float)(clip / (double)max_i64|(float)(clip / o->accum / (double)max_i64|' faults "gradient norm of one rank"
fault "--deterministic does nothing" train_llama3.cu \
    's|j->opt.deterministic, r->training|0, r->training|' bits "have one rank's bits"
fault "local accumulation takes samples in the order of the other" dataloader.h \
    's|    if (s->local) j = .*||' bits "have one rank's bits"
fault "local accumulation reduces every micro-batch" fsdp.h \
    's/ || (f->local && micro < f->accumulation - 1)) return/) return/' faults "law, walk and wire"
fault "a block is gathered once too often" train_llama3.cu \
    's|        block_forward(r, l);|&\n        if (l == 0) { unit_free(f, block); unit_gather(f, block); unit_weights(f, block); }|' faults "law, walk and wire"
fault "a rank skips a reduction" fsdp.h \
    's|^static void unit_reduce.*|&\n    if (f->rank == 1 \&\& u->unit->kind == UNIT_HEAD) { slot_release(f->gradient_slots, f->num_gradient_slots, u->dweights); u->dweights = NULL; return; }|' faults "exchange [0-9]+ of fsdp: .*rank 1 started"
fault "a rank gathers in another order" fsdp.h \
    's|^static void unit_prefetch.*|&\n    if (f->rank == 1) return;|' faults "exchange [0-9]+ of fsdp: .*rank 1 started"
fault "exchanges are not compared as they start" watchdog.h 's/other->order != h/0/' failures "a rank that skips an exchange is told"
fault "a rank does not show which op it is in" device.h 's/dev->shown->op = op, //' failures "a rank that computes for ever"
fault "the last exchanges are not written" watchdog.h 's/if (code == 2 && process_end.board) board/if (0) board/' failures "last exchanges are under OUT/flight"
fault "orders are not compared across hosts" train_llama3.cu 's/if (mine->order\[a\] != /if (0 \&\& mine->order[a] != /' failures "told by the step's reports"
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
