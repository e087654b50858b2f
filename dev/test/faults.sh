#!/usr/bin/env bash
# faults.sh [all]: plants one fault at a time into a copy of the source and expects a named test to fail.
# A test that no fault can fail proves nothing. `all` plants more of them, also in the order of GPU streams, which the
# CUDA emulator checks. ONLY=REGEX plants only those whose names match, JOBS=N so many at a time.
# faults.sh anchors: compiles nothing; prints each fault whose edit no longer changes its file, and then exits with 1.
# faults.sh compile: prints each fault that no longer compiles, and then exits with 1; no test runs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
count=0 lost=0 all=${1:-} only=${ONLY:-}
source dev/test/planting.sh

# anchors NAME FILE SED: tells whether each command of SED still changes FILE.
anchors() {
    local problem
    count=$((count + 1))
    problem=$(not_matching "$2" "$3")
    [ -z "$problem" ] || { echo "$1: $problem"; lost=$((lost + 1)); }
}

# fault NAME FILE SED GROUP EXPECTED: after SED on FILE, a failing check of GROUP must match EXPECTED. As many faults as
# there are cores run at a time.
# GROUP: of test_llama3, `mpi waiting` for that test on two processes, `checkpoints GROUP` of checkpoints.sh, or
# `recipes all`, recipes.sh
fault() {
    if [ -n "$only" ] && [[ ! $1 =~ $only ]]; then return; fi
    if [ "$all" = anchors ]; then anchors "$@"; return; fi
    count=$((count + 1))
    while [ "$(jobs -rp | wc -l)" -ge "${JOBS:-$(nproc)}" ]; do wait -n || true; done
    plant "$work/$count" "$@" >"$work/$count.said" &
}

# more NAME FILE SED GROUP EXPECTED: a fault that is planted with `all` alone
more() { [ -z "$all" ] || fault "$@"; }

# choose_compiler NAME GROUP: sets plant's `compile` and `libs`
choose_compiler() {
    choose_flags build/cpu-fp32/flags
    compile="${compile/-O3/-O0}" # compiling takes longer than running, except in the next groups
    case $2 in bits | mesh-bits | reduce-dtype | simulate) compile=${compile/-O0/-O1} ;; esac
    if [[ $2 = *orders || $1 = *"over NCCL"* || $1 = *"by cuBLASLt" ]]; then
        compile=$(sed 's/ -O[23]/ -O1/g; s/-O1 -O1/-O1/' build/cuda-on-cpu-fp32/flags)
        libs=
    fi
    if [[ $1 = *"between processes" ]]; then
        compile="$(cat build/cuda-on-mpi-fp32/flags) -DHAVE_MPI -DCUDA_ON_CPU_PROCESSES" # threads' bits need its -O3
    fi
    if [[ $1 = *", in bf16" ]]; then
        choose_flags build/cpu-bf16/flags
        compile="${compile/-O3/-O0}"
    fi
    if [[ $1 = *"by wgmma" || $1 = *"by CUDA in bf16" ]]; then
        compile=$(sed 's/ -O[23]/ -O1/g; s/-O1 -O1/-O1/' build/cuda-on-cpu-bf16/flags)
        libs=
    fi
}

# choose_test SRC GROUP: sets plant's `built` and `test`
choose_test() {
    built=test_llama3.cu
    test=("./test" "$2")
    if [ "$2" = "mpi waiting" ]; then
        test=(mpirun --oversubscribe --bind-to none -np 2 ./test mpi waiting)
    elif [ "${2%% *}" != "$2" ]; then
        built=train_llama3.cu
        test=("$PWD/dev/test/${2%% *}.sh" "$1/test" "${2#* }")
    fi
}

only_compile() {
    if $compile -fsyntax-only -w "$built"; then
        echo "pass planted: $name compiles"
    else
        echo "FAIL planted: $name does not compile"
    fi
}

# plant SRC NAME FILE SED GROUP EXPECTED: one fault, in a copy of the source in SRC
plant() {
    local src=$1 name=$2 file=$3 group=$5 expected=$6 start=$SECONDS
    local compile libs built test caught="" last=""
    choose_compiler "$name" "$group"
    choose_test "$src" "$group"
    copy_source "$src"
    sed -i "$4" "$src/$file"
    if cmp -s "$file" "$src/$file"; then
        echo "FAIL planted: $name: the edit no longer matches $file"
        return
    fi
    cd "$src"
    if [ "$all" = compile ]; then
        only_compile
    else
        compile_planted "$built" test || true
        run_until_caught "$expected" "${test[@]}"
        if [ -n "$caught" ]; then
            echo "pass planted: $name: after $((SECONDS - start)) s, caught by ${caught:0:150}"
        else
            echo "FAIL planted: $name: no failing check like '$expected'; the test ended with: $last"
        fi
    fi
    rm -rf "$src"
}

edit='s|^        tree_sum(fsdp->dev, sum, r->receive|'
edit+='        if (u->table_unit->kind != UNIT_HEAD) tree_sum(fsdp->dev, sum, r->receive|'
fault "a unit is not reduced" fsdp.h "$edit" \
    faults "gradients of one rank"

fault "weights of 8 bits take the scale of a neighbouring block" lib/int8.h \
    's|within / INT8_BLOCK, n);|(within / INT8_BLOCK ^ 1), n);|' \
    adapters "every weight is that of its block"

more "weights of 8 bits are written with the scale of a neighbouring block" run/checkpoint_writer.h \
    's|^        b->scales\[i\] = quantize|        b->scales[i ^ 1] = quantize|' \
    adapters "bytes and scales of the whole tensors. blocks"

edit='s|int64_t per_shard = quantized_shard_elements(l, t->is_quantized),|'
edit+='int64_t per_shard = quantized_shard_elements(l, t->is_quantized) - 32 * t->is_quantized,|'
more "a cut between ranks goes through a block of 8 bits" run/sharded_state.h "$edit" \
    adapters "every weight is that of its block"

edit='s|^        fsdp_reduce_gradients(m->fsdp, trained, micro_batch);|'
edit+='        if (unit != 2 \|\| !adapters_of(m, unit)) fsdp_reduce_gradients(m->fsdp, trained, micro_batch);|'
more "a block's adapters are left out of the reduction" train_llama3.cu "$edit" \
    adapters "no free buffer for the gradient of adapters of"

edit='s/if (count \&\& direction == BUFFER_TO_GRADIENTS)/'
edit+='if (count \&\& direction == BUFFER_TO_GRADIENTS \&\& u->table_unit->kind != UNIT_ADAPTERS)/'
more "adapters' sums of one tp rank are lost" run/shared_gradients.h "$edit" \
    adapters "gradients, losses of one rank"

edit='s/^    if (o->offloaded) device_wait_stream(dev, STREAM_COMPUTE, STREAM_STORE);/&\n'
edit+='    for (int u = 0; u < fsdp->table->num_units; u++) '
edit+='if (fsdp->units[u].table_unit->frozen \&\& !fsdp->units[u].quantized.shards) '
edit+='scale(dev, fsdp->units[u].sharded_weights, 1 - a->lr * a->weight_decay, fsdp->units[u].state_count);/'
more "the base is updated by weight decay" optimizer.h "$edit" \
    adapters "the base is as it was"

more "two ranks take the same samples" dataloader.h \
    's|m) \* s->shards + s->shard;|m) * s->shards + s->shard / 2 * 2;|' \
    data "perm"

fault "two ranks take the same samples, at run time" dataloader.h \
    's|m) \* s->shards + s->shard;|m) * s->shards + s->shard / 2 * 2;|' \
    faults "train on the same samples"

edit='s|    device_zero(fsdp->dev, u->unsharded_gradient + written, sizeof(float) \* (u->padded - written));||'
fault "padding of the last shard is not cleared" fsdp.h "$edit" \
    faults "padding stays zero"

edit='s|    comm_wait(fsdp->comm, &u->all_gather);||; '
edit+='s|^    pool_release(fsdp, POOL_WEIGHTS|    comm_wait(fsdp->comm, \&u->all_gather);\n&|'
more "a gather is waited for only after its weights were used" fsdp.h "$edit" \
    faults "gradients of one rank"

more "a reduction is not waited for" fsdp.h \
    's|    comm_wait(fsdp->comm, &r->request);||' \
    faults "gradients of one rank|in flight"

fault "--deterministic does nothing" run/parallel.h \
    's|    s.deterministic = o->deterministic;||' \
    bits "have one rank's bits"

more "local accumulation takes samples in the order of the other" dataloader.h \
    's|    if (s->local) j = .*||' \
    bits "have one rank's bits"

more "local accumulation reduces every micro-batch" fsdp.h \
    's/(last || !fsdp->accumulates_unsharded);/1;/' \
    faults "expected, dry-run and measured"

more "a step is handed out before its last sample" dataloader.h \
    's|!l->ring\[l->produced % LOADER_DEPTH\].unread|l->ring[l->produced % LOADER_DEPTH].unread <= 1|' \
    data "handed out when all"

more "the bad sample that is found first is named, not the first in order" dataloader.h \
    's/ || i < batch->bad))/))/' \
    failures "first in order"

more "replicas are not exchanged" fsdp.h \
    's|    return fsdp->replicas > 1 && last;.*|    return 0 * last;|' \
    faults "expected, dry-run and measured"

edit='s|^    if (product == world) return m;|'
edit+='    m.size[AXIS_DP_SHARD] *= m.size[AXIS_DP_REPLICATE], m.size[AXIS_DP_REPLICATE] = 1;\n&|'
fault "replicas are flattened into one group that shards" lib/mesh.h "$edit" \
    faults "expected, dry-run and measured"

more "a rank shuffles from another seed" run/job.h \
    's|    s.seed = (uint64_t)o->seed;|    s.seed = (uint64_t)o->seed + (uint64_t)(rank == 2);|' \
    faults "rank 2 shuffles samples"

more "a clipped step of one replica is scaled differently" optimizer.h \
    's|weight_decay, how->grad_scale,|weight_decay, how->grad_scale * (o->fsdp->replica ? 1.001f : 1),|' \
    replicas "are replicas"

more "the rotation is forgotten when activations are recomputed" train_llama3.cu \
    's|    rope_forward(m->dev, a->qkv|    if (!m->dev->recomputing) rope_forward(m->dev, a->qkv|' \
    faults "recompute full: gradients of one rank"

more "without sharding, only the own part of the gradient is summed" fsdp.h \
    's|    if (stage == ALL_GATHER_FSDP) return over_fsdp.*|    if (stage == ALL_GATHER_FSDP) return 0;|' \
    faults "expected, dry-run and measured"

fault "ZeRO-2 frees what it should keep" fsdp.h \
    's|{"shard_grad_op", 1, AFTER_LAST_USE|{"shard_grad_op", 1, AFTER_FORWARD|' \
    faults "expected, dry-run and measured"

more "a micro-batch's gradient is not rounded where it goes nowhere" fsdp.h \
    's|    fsdp->rounds_micro_batches = .*|    fsdp->rounds_micro_batches = 0;|' \
    reduce-dtype "gradients reduced in bf16"

more "an all-reduce rounds the sum so far" fsdp.h \
    's/if (r->rounded && last) tree_sum/if (r->rounded) tree_sum/' \
    reduce-dtype "summed in fp32 without sharding"

edit='s|^static void fsdp_reduce_gradients.*|&\n'
edit+='    if (fsdp->rank == 1 \&\& u->table_unit->kind == UNIT_HEAD) { gradient_release(fsdp, u); return; }|'
more "a rank skips a reduction" fsdp.h "$edit" \
    faults "collective #[0-9]+ on fsdp: .*rank 1 started"

fault "collectives are not compared as they start" lib/watchdog.h \
    's/other->order != mine->order/0/' \
    failures "a rank that skips a collective is named"

more "a rank does not show which op it is in" lib/device.h \
    's/^        dev->activity->op = op;//' \
    failures "a rank that computes for ever"

more "the last collectives are not written" lib/watchdog.h \
    's/if (code == 2 && own_heartbeat.table) heart/if (0) heart/' \
    failures "last collectives are under OUT/flight"

more "orders are not compared across hosts" run/step_report.h \
    's/if (line >= 0)/if (0)/' \
    failures "the step's reports find a different order"

more "receives are started in the order of their steps" lib/pipeline_schedule.h \
    's/^    qsort(order.*//' \
    pipeline "need not even have two at once|started before their steps"

more "a rank fills the pipeline one micro-batch too late" lib/pipeline_schedule.h \
    's/: 2 \* later_ranks + /: later_ranks + /' \
    pipeline "shapes finish|micro-batches more"

edit='s|(int)max_i64(alive.step.stage., s->activation_sets.step.stage.);|'
edit+='(int)max_i64(1 + alive[step.stage] / 2, s->activation_sets[step.stage]);|'
more "a set of activations is used again too soon" lib/pipeline_schedule.h "$edit" \
    pipeline "sets of activations are not shared"

more "messages are not compared as they start" lib/watchdog.h \
    's/other->order != mine->order/!is_channel(line) \&\& &/' \
    failures "two messages in another order"

edit='s/CUDA_BUILD ? dev->current_stream == STREAM_COMPUTE : r->active/'
edit+='dev->current_stream == STREAM_COMPUTE \&\& (r->active || CUDA_BUILD)/'
fault "waiting is not counted while gradients are reduced" lib/comm.h "$edit" \
    "mpi waiting" "the reported waiting is"

more "a send is over before its receiver has read it" lib/transport_threads.h \
    's/if (__atomic_load_n(&slots\[p\].done/if (r->collective != SEND \&\& __atomic_load_n(\&slots[p].done/' \
    pipeline "arrive whole and in order|what one rank makes"

more "documents are off by one" lib/token_files.h \
    's|^        docs\[t\] = ended;|        docs[t] = ended + (inputs[t] == document_end);|' \
    documents "documents: every gradient equals PyTorch's"

fault "packed conversations see those before them" lib/token_files.h \
    's|        ended += inputs\[t\] == document_end;|        (void)document_end;|' \
    packing "packed conversations have the losses of one per window"

edit='s|take_window(p, n);|take_window(p, n - 1);|; '
edit+='s|^    p->windows\[window\].room -= n;|&\n    p->windows[window].room = max_i64(0, p->windows[window].room);|'
fault "a conversation is placed where a token is lacking" dev/data/pack.h "$edit" \
    packing "each conversation is there once, whole"

more "a packed conversation takes any window with room for it" dev/data/pack.h \
    's|__builtin_ctzll(fits)|63 - __builtin_clzll(fits)|' \
    packing "as many windows as best fit decreasing needs"

more "conversations are packed in the order in which they come" dev/data/pack.h \
    's|^    qsort(p->waiting, .*||' \
    packing "as many windows as best fit decreasing needs"

more "packed conversations have the targets of the first" dev/data/pack.h \
    's|p->mask + x->first, x->count|p->mask, x->count|' \
    packing "each conversation is there once, whole"

more "the padding of a window is a target" dev/data/pack.h \
    's|no_target = 0|no_target = 1|' \
    packing "packed conversations have the losses of one per window"

more "the last packed window has no last target" dev/data/pack.h \
    's|^    write_padding(p, 1);||' \
    packing "training and evaluation see every packed window"

more "conversations that wait for their window are lost" dev/data/pack.h \
    's|PACK_WINDOWS \* p->T)) packer_flush(p);|PACK_WINDOWS * p->T)) p->count = p->num_waiting = 0;|' \
    packing "packing in parts: each conversation is there once"

more "windows are written again with the next ones" dev/data/pack.h \
    's|p->num_waiting = p->num_windows = 0;|p->num_waiting = 0;|' \
    packing "packing in parts: each conversation is there once"

more "a file does not say that it is packed" dev/data/corpus.h \
    's/ | w->window << TOKEN_FILE_WINDOW_SHIFT;/;/' \
    packing "packed conversations without --doc-mask are refused"

more "packed windows are read at another length" lib/token_files.h \
    's|if (window \&\& window != (uint32_t)T)|if (0)|' \
    packing "packed conversations with another --seq are refused"

more "packed conversations are trained on without --doc-mask" run/job.h \
    's|^    check_packed(j, &j->data);||' \
    packing "packed conversations without --doc-mask are refused"

more "packed conversations are evaluated without --doc-mask" run/job.h \
    's|^    check_packed(j, &j->val);||' \
    packing "refused for evaluation, too"

more "every micro-batch has the first one's documents" run/model.h \
    's|batch->docs + at \* m->cp->size|batch->docs|' \
    documents "have one rank's bits"

edit='s|    model_forward(m, &p->pipeline, &trainer->eval_batch);|    StepBatch batch = trainer->eval_batch;\n'
edit+='    batch.docs = NULL;\n    model_forward(m, \&p->pipeline, \&batch);|'
more "validation does not tell documents apart" run/evaluate.h "$edit" \
    documents "validation masks"

fault "attention reads as many keys as the largest batch has" run/model.h \
    's|^    cp_set_tokens(m->cp, B, T);||' \
    score "a score is the loss"

fault "the first token of a continuation is not scored" run/score.h \
    's|int t = count - request->scored; t < count|int t = count - request->scored + 1; t < count|' \
    score "a score is the loss"

more "the scores of a context-parallel rank are those of the first one" run/score.h \
    's|^            score->logprob += of_rank|            score->logprob = of_rank|' \
    score "scores on . ranks"

more "a token is greedy if its part of the vocabulary has none that is more probable" run/score.h \
    's|all.target < all.max;|all.target < trainer->host_statistics[3 * i];|' \
    score "the largest alone is greedy"

more "a space at the end of a context stays there" run/requests.h \
    's|^    while (length && strchr.*|    while (0) length--;|' \
    score "tokens of 'ab ' and 'b'"

more "accuracy per byte divides by tokens" run/score.h \
    's|endings\[e\].ending_bytes|endings[e].scored|; s|best_per_byte\].ending_bytes|best_per_byte].scored|' \
    score "accuracy by sums"

more "every tensor-parallel rank counts the bytes of its targets" run/evaluate.h \
    's|!mesh_coordinate(&p->mesh, p->rank, AXIS_TP) &&||' \
    score "bits per byte count"

more "backward sees all documents" train_llama3.cu \
    's|    floatX \*dk = cp_key_gradient.*|&\n    shape.q_doc = shape.k_doc = NULL;|' \
    documents "documents: every gradient equals PyTorch's"

more "a checkpoint's files are not synced" run/checkpoint_writer.h \
    's/if (fsync(fd) || close(fd)) write_failed/if (close(fd)) write_failed/' \
    "checkpoints points" "names as synced"

fault "checksums are not compared" run/checkpoint.h \
    's/^static void chunk_check.*/&\n    if (chunk >= 0) return;/' \
    "checkpoints damage" "flipped bit"

edit='s|^                kind = t->kind;|&\n'
edit+='                memcpy(checked_malloc(sizeof(float) * (size_t)u->size), state, '
edit+='sizeof(float) * (size_t)u->size);|'
more "whole units stay while a checkpoint is saved" run/checkpoint_writer.h "$edit" \
    checkpoints "memory while a checkpoint is saved"

edit='/^static void set_elements/,/^}/s|        comm_alive(fsdp->comm);|'
edit+='        memcpy(checked_malloc(size * (size_t)n), elements, size * (size_t)n);\n&|'
more "what a checkpoint is read into stays" run/sharded_state.h "$edit" \
    checkpoints "memory while a checkpoint is read"

fault "--keep removes the checkpoint that a command is copying" run/out_dir.h \
    's/ || step == used//' \
    "checkpoints after_save" "resumes from the copy"

more "training waits for the command of --after-save" run/after_save.h \
    's/&status, WNOHANG/\&status, 0/' \
    "checkpoints after_save" "does not delay training"

more "mpirun's signals reach the command of --after-save" run/after_save.h \
    's/ | POSIX_SPAWN_SETPGROUP//' \
    "checkpoints after_save" "signals to the launcher do not reach"

more "the run does not wait for the command of --after-save" run/checkpoint_writer.h \
    's/wait = a->process .*;/wait = 0;/' \
    "checkpoints after_save" "the run waits for it"

more "a command has the pipes of the launcher" run/after_save.h \
    '/posix_spawn_file_actions_adddup2/d' \
    "checkpoints after_save" "does not keep the output"

more "a command has the environment of a rank" run/after_save.h \
    's/"OMPI_COMM_", //' \
    "checkpoints after_save" "can run this program"

more "a run that a signal ends exports" train_llama3.cu \
    's/ && complete) model_export/ \&\& complete + 1) model_export/' \
    "checkpoints signals" "is not exported"

more "a resumed run begins its epoch anew" run/job.h \
    's|    s.start_epoch = j->start.epoch;||; s|    s.start_sample = j->start.samples_in_epoch;||' \
    checkpoints "are 4 steps"

more "the second chunk's queries follow the first's directly" lib/ops_common.h \
    's/ + (t >= s->q_split ? s->q_gap : 0);/;/' \
    kernels "attention of two chunks"

more "a slice of the vocabulary takes its neighbour's first token" lib/ops_common.h \
    's/id - first < V ? id - first/id - first <= V ? id - first/' \
    kernels "embedding forward and backward"

more "sums of slices are not brought to one largest logit" lib/ops_common.h \
    's/fmaf(part\[1\], expf(part\[0\] - all.max), all.sum)/all.sum + part[1]/' \
    kernels "cross_entropy in slices"

more "the factor 2 is missing in the gradient of the z-loss" lib/ops_common.h \
    's/1 + 2 \* z.weight \* log_z/1 + z.weight * log_z/' \
    kernels "cross_entropy gradient"

more "masked targets have a z-loss" lib/cpu/cross_entropy.h \
    's/z.losses\[n\] = targets\[n\] < 0 ? 0 : z_loss_value/z.losses[n] = z_loss_value/' \
    kernels "z-losses in slices"

fault "validation has logits in bf16, in bf16" train_llama3.cu \
    's/model_logits(m, goes_backward)/model_logits(m, 1)/' \
    logits "training's losses are those of logits in bf16, validation's of fp32 logits"

fault "rows of logits have no padding, in bf16" lib/ops_common.h \
    's/return FLOATX == DTYPE_BF16 ? round_up(V, 16 . (int64_t)sizeof(bf16)) : V;/return V;/' \
    logits "a chunk of logits takes a row of floatX per token"

more "a chunk of fp32 logits has as many rows as one of bf16 logits, in bf16" run/model.h \
    's/m->logit_rows \* (int64_t)sizeof(floatX) . (int64_t)sizeof(float))/m->logit_rows)/' \
    logits "a chunk of logits takes a row of floatX per token"

more "the head's backward skips no padding, in bf16" train_llama3.cu \
    's/stride = logits_stride(V);/stride = V;/' \
    pytorch "bf16 gradients err at most"

more "the end of a row's last vector counts as logits of 0, in bf16" lib/cpu/vectors.h \
    's/return WHOLE(n) ? x : vselect(lane < (int)n, x, vsplat(fill));/return x;/' \
    kernels:cross-entropy "cross_entropy losses"

more "the padding of a row of logits is read as logits, by CUDA in bf16" lib/cuda/cross_entropy.cuh \
    's/    if (!pairs || i + W <= V) return;/    return;/' \
    kernels:cross-entropy "cross_entropy losses"

more "the gradient is written into the padding of its row, by CUDA in bf16" lib/cuda/cross_entropy.cuh \
    's/store_some(row + i, v, V - i);/store(row + i, v);/' \
    kernels:cross-entropy "cross_entropy without gradient leaves the logits, with it their padding"

more "every tp rank adds up the z-losses of all tokens" train_llama3.cu \
    's/sum_losses(m, m->z_loss_sum, z.losses);/exact_total(m->dev, m->z_loss_sum, z.losses, N);/' \
    z-loss "tp 2: losses and z-losses"

edit='s|^        s->z_scores\[k\] = outlier_z_score(window, size, values\[k\]);||; '
edit+='s|^        outlier_window_add(window, size, values\[k\]);|&\n'
edit+='        s->z_scores[k] = outlier_z_score(window, size, values[k]);|'
fault "a window includes the step that is judged" run/step_report.h "$edit" \
    outliers "a step with random tokens is skipped"

more "checkpoints do not hold the windows of outliers" run/checkpoint.h \
    's|^    outliers_write(&at->outliers, f);||' \
    outliers "finds the outlier"

more "the update of an outlier is made" train_llama3.cu \
    's|if (skip_outlier(trainer, step, s)) return;|skip_outlier(trainer, step, s);|' \
    outliers "neither weights nor moments"

fault "gradients of norms are not summed over tp" run/shared_gradients.h \
    's|^        tree_sum(fsdp->dev, mine, all, DTYPE_F32, tp, n, 0);||' \
    mesh-faults "tp 2 .*worst gradient"

edit='s|\*colour = rank - cp \* .*|'
edit+='int mixed = shard % 2 \&\& m->size[AXIS_TP] > 1; '
edit+='*colour = (rank - cp * mesh_stride(m, AXIS_CP) - shard * mesh_stride(m, AXIS_DP_SHARD)) ^ mixed;|; '
edit+='s|if (axis == AXIS_FSDP) return colour + |'
edit+='if (axis == AXIS_FSDP) return (colour ^ (i / cp % 2 \&\& m->size[AXIS_TP] > 1)) + |'
more "a group that shards has members of two tp slices" lib/mesh.h "$edit" \
    mesh-faults "tp 2 .*worst gradient|fsdp"

edit='s|^    cJSON_ArrayForEach(item, merges) merge_add(t, v, item);|'
edit+='    for (item = merges->child->prev; item; item = item == merges->child ? NULL : item->prev) '
edit+='merge_add(t, v, item);|'
fault "a tokenizer.json's merges are read from the end of the list" run/tokenizer_json.h "$edit" \
    tokenizer "merges follow the list, not the ids"

more "a token to which no merge leads is not divided" run/tokenizer_json.h \
    's|is_divided\[id\] = e.used != 1;|is_divided[id] = 0;|' \
    tokenizer "a token to which no merge leads is divided"

more "a normalizer is ignored" run/tokenizer_json.h \
    's|if (component_parts(json_get(root, "normalizer"), "normalizers", parts)) {|if (0) {|' \
    tokenizer "what this program does not implement is refused by its name"

more "the last of a tokenizer.json's merges is not written" run/tokenizer_files.h \
    's|if (token_length(t, id) == 1) continue;|if (token_length(t, id) == 1 \|\| id == t->n_base - 1) continue;|' \
    tokenizer "gives tiktoken's ids|the ids of merging by the lowest id"

fault "a written tokenizer.json divides tokens to which no merge leads" run/tokenizer_files.h \
    's|reach_all ? "false" : "true"|"false"|' \
    tokenizer "the ids of merging by the lowest id"

fault "data of a vocabulary with merges in another order is accepted" run/tokenizer_files.h \
    's|follow = t->merge_result\[i - 1\] <= t->merge_result\[i\];|follow = 1;|' \
    tokenizer "merges in another order is refused"

fault "an unknown chat template is rendered as that of the special tokens" run/chat_template.h \
    's|jinja ? chat_template_of_jinja(jinja) : |0 ? NULL : |' \
    tokenizer "chat template: another one is refused by its first words"

more "the answer's header is left out of a generation prompt" run/chat_template.h \
    's|^    chat_header(c, "assistant", head, sizeof head);|    head[0] = 0;|' \
    tokenizer "chat template: a message and what the answer follows"

fault "the loss is counted on every tp rank" train_llama3.cu \
    's|sum_losses(m, m->loss_sum, .*|exact_total(m->dev, m->loss_sum, m->losses, m->B * m->T);|' \
    mesh-faults "tp 2 .*losses 1"

edit='s|    s.shard = mesh_coordinate(mesh, rank, AXIS_DP_SHARD);|'
edit+='    s.shard = (mesh_coordinate(mesh, rank, AXIS_DP_SHARD) '
edit+='+ mesh_coordinate(mesh, rank, AXIS_TP)) % s.shards;|'
more "a tp peer takes other samples" run/job.h "$edit" \
    mesh-faults \
    "hold parts of the same replica of the model, but they train on different samples|train on the same samples .both"

edit='s|^    \*whole = (t->first_row + row) \* t->whole_cols + t->first_col + col;|'
edit+='    if (t->row->split == SPLIT_COLUMNS) { *whole = t->first_col * t->whole_rows + at; '
edit+='return t->rows * t->cols - at; }\n&|'
more "a slice of columns is taken as one of rows" llama3.h "$edit" \
    mesh-faults "tp 2 .*worst gradient"

fault "a rank's second half stands one part too early" context_parallel.h \
    's|(2 \* cp->size - 1 - cp->rank) \* half + t - half;|(2 * cp->size - 2 - cp->rank) * half + t - half;|' \
    mesh-faults "cp 2 .*worst gradient"

edit='s|feed_micro_batch(m, batch, step->micro_batch);|'
edit+='feed_micro_batch(m, batch, m->table.embed < 0 ? step->micro_batch ^ 1 : step->micro_batch);|'
fault "the last stage takes two micro-batches in the other order" train_llama3.cu "$edit" \
    mesh-faults "pp 2 .*worst gradient"

more "all stages are planned as the first" run/plan.h \
    's|first %= mesh_stride(m, AXIS_DP_SHARD)|first %= mesh_stride(m, AXIS_PP)|' \
    plan "is that of its own dry run"

more "a reduce-scatter that NCCL sums is planned as an all-to-all" run/cluster.h \
    's|REDUCE_SCATTER, !sums, ranks, hosts|REDUCE_SCATTER, 1, ranks, hosts|' \
    plan "as fast as an all-gather"

more "a reduce-scatter over tp is planned as if NCCL summed it" run/cluster.h \
    's|transport_sums \&\& (a == AXIS_FSDP .. a == AXIS_DP_REPLICATE)|transport_sums|' \
    plan "over tp the program adds by itself"

more "the simulation takes one count for another" plan/simulate.h \
    's|return x->count == y->count \&\& |return |' \
    simulate "another count"

more "a failure falls back to a save that is still being written" plan/goodput.h \
    's|    s.lag = .*|    s.lag = s.pause;|' \
    goodput "a clock that goes step by step"

more "steps since the newest checkpoint are not repeated" plan/goodput.h \
    's|r.durable = min_i64(r.durable, saves - 1) \* s->interval;|r.durable = (int64_t)(r.stepping / step);|' \
    goodput "the wall-clock time is Daly's"

edit='s|    if (r->next_failure < end) next_failure_strikes(r, r->in->hosts);|'
edit+='    while (r->next_failure < end) draw_next_failure(r);|; '
edit+='s|        else r->now = end;|        r->now = end;|'
more "a relaunch cannot fail" plan/goodput.h "$edit" \
    goodput "the wall-clock time is Daly's"

more "a failed host is back at once" plan/goodput.h \
    's|= r->now + r->in->repair;|= r->now;|' \
    goodput "waits until that host is repaired"

more "waiting for an axis is counted as waiting for all ranks" lib/comm.h \
    "s|? (int)r->group->axis :|? AXIS_WORLD :|" \
    "mpi waiting" "waiting is counted for the axis"

more "run.html is overwritten where it is" run/run_page.h \
    's|"%s/.run.html.part"|"%s/run.html"|' \
    run-page "leaves a complete page"

more "run.html is rewritten after every step" run/run_page.h \
    's/ || (!p->has_ended \&\& start < p->next_write)//' \
    run-page "at most every few seconds"

more "markup in a name reaches run.html" run/page.h \
    's|int is_markup = code == .<. .*|int is_markup = 0;|' \
    run-page "do not act"

more "escape sequences reach run.html" run/page.h \
    's|^    if (code < 0x20) return 0x2400 + code;||' \
    run-page "do not act"

more "merging two buckets of a curve loses the later one" run/history.h \
    's|^    b->steps += later->steps;||' \
    run-page "no step is lost"

more "merging two buckets of a curve loses the spike" run/history.h \
    's|^    s->most = s->count ? fmax(s->most, other->most) : other->most;||' \
    run-page "a spike of one step survives"

more "a curve has a point for every step" run/history.h \
    's|enum { HISTORY_BUCKETS = 512 };|enum { HISTORY_BUCKETS = 1 << 17 };|' \
    run-page "below 1 MB"

more "a loss that is not finite enters the curve" run/history.h \
    's|^    if (!isfinite(value)) return;||' \
    run-page "losses that are not finite"

more "run.html takes steps that the run has not reached" run/history.h \
    's|number <= (double)limit|number <= 1e6|' \
    run-page "broken and foreign lines"

more "a message is planned under another name" pipeline_parallel.h \
    's|"gradients", step->micro_batch,$|"gradients", step->micro_batch + p->comm->dev->dry_run,|' \
    simulate "the events of the dry run"

more "ranks that differ in memory are planned as one" run/plan.h \
    's|equal &= dev->arenas\[m\].peak == c->dry_run->arenas\[m\].peak|equal \&= 1|' \
    plan "is that of its own dry run"

more "a pipeline adds up its micro-batches one after the other" run/parallel.h \
    's|    s.deterministic = o->deterministic;|    s.deterministic = o->deterministic \&\& o->pp == 1;|' \
    mesh-bits "expected, dry-run and measured|have one rank's bits"

more "one rank's gradients of keys and values are lost" context_parallel.h \
    's|sum_pieces(cp->dev, cp->own, pieces, cp->size,|sum_pieces(cp->dev, cp->own, pieces, cp->size - 1,|' \
    mesh-faults "cp 2 .*worst gradient"

more "a stage awaits two messages in the other order" pipeline_parallel.h \
    's|s->receives\[p->receives_started\]|s->receives[s->pp_rank ? p->receives_started ^ 1 : p->receives_started]|' \
    mesh-faults "on pp: .*0 to stage 1. .*is sent, .*1 to stage 1. .*is expected"

edit='s|^static void pipeline_send(.*|&\n'
edit+='    static int more;\n'
edit+='    PipelineMessage *again = \&p->out[step->kind][p->sent[step->kind] % 2];\n'
edit+='    if (!p->comm->dev->dry_run \&\& step->micro_batch == 1 \&\& !more++) '
edit+='comm_wait(p->comm, \&again->request), '
edit+='send_start(p->comm, \&again->request, AXIS_PP, pipeline_target(\&p->schedule, step), "again", '
edit+='out->data, p->message_elements, FLOATX), '
edit+='comm_wait(p->comm, \&again->request);|'
more "one message too many" pipeline_parallel.h "$edit" \
    mesh-faults "on pp: .again. .*is sent"

more "the tied weight's gradient is summed twice" run/shared_gradients.h \
    's|^        if (count) tree_sum(fsdp->dev, u->grad, s->tied_buffer, DTYPE_F32, 1, count, 1);|&\n&|' \
    mesh-faults "pp 2 .*tied.*worst gradient"

more "gradients with fewer stages overtake others" fsdp.h \
    's|^    if (would_overtake(fsdp, micro_batch)) reductions_drain(fsdp);||' \
    mesh-bits "while its request is in flight"

more "a validation counts its tokens on every rank that shares them" run/evaluate.h \
    's|        if (counts) mine.targets += n;|        mine.targets += n;|' \
    mesh-use "counts every token once"

more "a checkpoint takes slices of columns as rows" run/checkpoint_writer.h \
    's/rows = t->row->split == SPLIT_COLUMNS ? t->whole_rows : 1;/rows = 1;/' \
    mesh-use "has the same bytes"

more "a resumed run begins its moments anew" run/checkpoint.h \
    's|    fsdp_set_state(f, STATE_EXP_AVG, fill_from_checkpoint, &r);||' \
    checkpoints "are 4 steps"

more "checksums come in the order of ranks" run/checkpoint_writer.h \
    's|sums\[chunk\] = all\[chunk % world \* share + chunk / world\];|sums[chunk] = all[chunk];|' \
    checkpoints "same bytes"

more "a resumed run counts its updates anew" run/trainer.h \
    's|    trainer->progress = j->start;|&\n    trainer->progress.updates = 0;|' \
    checkpoints "are 4 steps"

more "the schedule of a mixture ignores deadlines" lib/mixture.h \
    's/ || deadline\[k\] < deadline\[next\]))/))/' \
    mixture "each within one of its share"

more "the schedule of a mixture ignores releases" lib/mixture.h \
    's/release\[k\] <= n \&\& //' \
    mixture "each within one of its share"

more "the schedule of a mixture is off by one after its first period" lib/mixture.h \
    's|source, n / m->period \* m->quota\[source\]|source, (n + 1) / m->period * m->quota[source]|' \
    mixture "each within one of its share"

more "every epoch of a source has the same order" dataloader.h \
    's/mix64(seed + (uint64_t)epoch + 1));/mix64(seed + 0 * (uint64_t)epoch));/' \
    mixture "in another order"

fault "a mixture begins again when a run resumes" dataloader.h \
    's/return s->start_sample + since_start \* global_batch;/return since_start * global_batch;/' \
    mixture "and 2 more on"

fault "a rank reads another source than the schedule says" dataloader.h \
    's/^    MixtureSample window = mixture_sample(.*/&\n    if (s->shard == 1) window.source = 0;/' \
    mixture "(--audit of a mixture|in one rank)"

more "other weights are not found at a resume" lib/token_files.h \
    's/^    d->fingerprint = hash_bytes(d->fingerprint, d->mixture->quota, .*//' \
    mixture "other weights"

fault "longer sequences begin elsewhere in the data" run/job.h \
    's|    at->samples_in_epoch = at->samples_in_epoch \* before / s->opt.seq;||' \
    "recipes all" "batch and sequence grow: every window is consumed once"

more "a stage loses the moments of the stage before" run/trainer.h \
    's|^    fsdp_refresh_copies(.*|&\n    memset(trainer->parallel.fsdp.units->exp_avg, 0, 64);|' \
    "recipes all" "continued from every checkpoint"

more "each stage begins a learning-rate curve" run/recipe.h \
    's|&& !end->begins_rate) end++|\&\& 0) end++|' \
    "recipes all" "one learning-rate curve spans the stages"

more "sources begin their epochs again in another mixture" run/recipe_data.h \
    's|d->sources\[own\].used += mixture_count|(void)mixture_count|' \
    "recipes all" "no window is used twice more"

more "another learning rate of the past is accepted" run/checkpoint.h \
    's|    return of_rate && !rate_has_changed(.*|    return of_rate;|' \
    "recipes all" "what has happened may not change: the rate"

more "a rank trains frozen tensors" run/trainer.h \
    's|^    table_freeze(&m->table, &j->recipe, j->stage);||' \
    "recipes all" "frozen tensors stay"

more "a rank with other weights is not found" dataloader.h \
    's/    if (!s->mixed) return h;/    return h;/' \
    mixture "a sampler of them too"

more "a file may belong to two sources" lib/token_files.h \
    's/^    sources_check_apart(&d);//' \
    mixture "is refused"

more "the audit does not count the samples of sources" run/audit.h \
    's/^    for (int k = 0; k < a->num_sources; k++) audit_share(a, &a->sources\[k\]);//' \
    mixture "of a wrong source"

more "the audit does not look for missing windows of a source" run/audit.h \
    's/^    for (int k = 0; k < a->num_sources; k++) audit_whole_epochs.*//' \
    mixture "after its epoch has ended"

more "a step that repeats a window of a mixture is not known" dataloader.h \
    's|before / windows != (after - 1) / windows|before / windows + 1 < after / windows|' \
    mixture "known beforehand"

more "an epoch's end is not the audit's" dataloader.h \
    's/s->start_epoch + 1 + after_start_epoch/s->start_epoch + after_start_epoch/' \
    checkpoints "audit"

more "a checkpoint's directory is not synced" run/checkpoint_writer.h \
    '/publish_checkpoint/,/^}/s/^    sync_directory(w->dir);//' \
    "checkpoints points" "names as synced"

more "the name of --out is not synced" run/out_dir.h \
    's/int failed = sync_names(part);/int failed = 0;/' \
    "checkpoints points" "was said to be saved, the run came back from step 0"

more "latest comes before its checkpoint" run/checkpoint_writer.h \
    's/^    if (rename(w->dir, path))$/    update_latest_link(out, w->progress.step);\n&/' \
    "checkpoints points" "latest leads to"

more "what a dead run left stays" run/out_dir.h \
    's/^    remove_leftovers(out);//' \
    "checkpoints points" "left behind"

more "checkpoints that a dead run had no time to remove stay" run/out_dir.h \
    's/^    remove_old_checkpoints(out, keep, -1);.*//' \
    "checkpoints points" "other checkpoints"

more "MFU counts the embedding" run/mfu.h 's/ - (c->tied ? 0 : (int64_t)c->V \* c->C);/;/' mfu \
    "16 blocks of Llama-3-8B: FLOPs per token without the embedding"
more "MFU counts the pairs of the causal mask" run/mfu.h 's/12\.0 \* c->L/6.0 * c->L/' mfu \
    "MFU of two measured steps"
more "a slice of a GPU has the rate of all of it" run/mfu.h \
    's/!strcmp(datasheet_rates\[i\]\.name, name)/strstr(name, datasheet_rates[i].name)/' \
    mfu "a slice of a GPU"
more "metrics are not synced before a checkpoint" run/logger.h \
    's/ || fsync(fileno(l->metrics))//' \
    "checkpoints points" "other figures in metrics.jsonl"

more "metrics are not cut back" run/out_dir.h \
    's/^    truncate_after_step(out, "metrics.jsonl", step);//' \
    "checkpoints points" "other figures in metrics.jsonl"

more "two runs may save to one directory" run/out_dir.h \
    's/if (!flock(lock, LOCK_EX | LOCK_NB)) return lock;/return lock;/' \
    "checkpoints refusals" "two runs"

more "a run resumes from the oldest checkpoint" run/out_dir.h \
    's/step <= newest) continue;/(newest >= 0 \&\& step > newest)) continue;/' \
    "checkpoints points" "."

more "the chain of waiting ranks is not followed" lib/culprit.h \
    's/int next = found ? -1 : waiting_member(news, rank, line, number, seen);/int next = -1;/' \
    failures "a rank that waits for a busy one on another axis is not blamed"

more "a host that does not answer is not suspect" lib/culprit.h \
    's/return news->asked ? SUSPECT_LOST : NOT_SUSPECT;/return NOT_SUSPECT;/' \
    failures "a host that does not answer is blamed with its ranks"

more "any answer counts as that of the right host" lib/network.h \
    's/ \&\& answer == t->expected)/)/' \
    hosts "a network counts as connecting two hosts only if the right host answers"

more "the last host is measured with the wrong partner" run/host_rates.h \
    's/if (host == n - 1) partner = round \* (n \/ 2) % (n - 1);/if (host == n - 1) partner = round % (n - 1);/' \
    hosts "every pair of 2 to 33 hosts is measured once"

more "the contents of the data are not compared" run/agreement.h \
    's/^        h = hash_bytes(h, raw, (size_t)(n \* bytes));//' \
    data "other tokens behind the same header"

more "the tokens of a step are not part of its hash" dataloader.h \
    's/all_inputs, sizeof(int32_t) \* (size_t)T);/all_inputs, 0);/' \
    data "the samples of a step have another hash"

edit='s|^    reductions_advance(fsdp, u, micro_batch);|'
edit+='    if (u->table_unit->kind == UNIT_HEAD \&\& fsdp->ranks > 1) { gradient_release(fsdp, u); return; }\n&|'
more "a unit's reduction is never started" fsdp.h "$edit" \
    faults "expected, dry-run and measured"

edit='s|^        if (!fsdp->accumulates_unsharded) merge_partial_sums(fsdp, u, r->micro_batch);|'
edit+='        for (int64_t i = 0; i < u->shard_size \&\& !fsdp->dev->dry_run \&\& replace; i++) '
edit+='sum[i] *= (float)fsdp->ranks;\n&|'
more "gradients are scaled by the world" fsdp.h "$edit" \
    faults "gradients of one rank"

edit='s|    s.grad_norm = sqrt(exact_value(&squared_norm)) / |'
edit+='    s.grad_norm = sqrt(exact_value(\&squared_norm)) / trainer->job->opt.accum / |'
more "the mean is divided by the micro-batches once more" run/step_report.h "$edit" \
    faults "gradient norm of one rank"

more "replicas are exchanged and not summed" fsdp.h \
    's|^        tree_sum(fsdp->dev, replica_gradient(u), r->receive.*||' \
    faults "gradients of one rank"

edit='s|        fsdp_reduce_gradients(m->fsdp, trained, micro_batch);|&\n'
edit+='        if (l == 0) { fsdp_gradients(m->fsdp, trained, micro_batch); '
edit+='fsdp_reduce_gradients(m->fsdp, trained, micro_batch); }|'
more "a unit is reduced twice" train_llama3.cu "$edit" \
    faults "expected, dry-run and measured"

more "a rank gathers in another order" fsdp.h \
    's|^static void fsdp_prefetch.*|&\n    if (fsdp->rank == 1) return;|' \
    faults "collective #[0-9]+ on fsdp: .*rank 1 started"

edit='s|        block_forward(m, l);|&\n'
edit+='        if (l == 0) { FsdpUnit *again = \&m->fsdp->units[unit]; '
edit+='fsdp_reshard(m->fsdp, again, AFTER_LAST_USE); fsdp_prefetch(m->fsdp, again); '
edit+='fsdp_unshard(m->fsdp, again); }|'
more "a block is gathered once too often" train_llama3.cu "$edit" \
    faults "expected, dry-run and measured"

more "a rank draws its weights from another seed" run/trainer.h \
    's|    p->fsdp.seed = (uint64_t)o->seed;|    p->fsdp.seed = (uint64_t)(o->seed + (rank == 1));|' \
    layouts "initializes weights with a different seed"

more "a gradient is reduced before it is made" fsdp.h \
    's|^        if (from < 0) device_wait_stream(fsdp->dev, STREAM_REDUCE, STREAM_COMPUTE);||' \
    orders "have one rank's bits"

more "a slot is written while its last user reads it" fsdp.h \
    's|    comm_wait_event(fsdp->comm, b->freed, u->table_unit->name, AXIS_FSDP);||' \
    orders "have one rank's bits"

more "weights are gathered before AdamW has written them" optimizer.h \
    's|^    device_wait_stream(dev, STREAM_GATHER,.*||' \
    orders "have one rank's bits"

more "AdamW comes before the last sums" fsdp.h \
    's|    comm_wait_event(fsdp->comm, device_stream_event(fsdp->dev, STREAM_REDUCE), "reductions", last);||' \
    orders "have one rank's bits"

more "weights are used before they have arrived" lib/comm.h \
    's|    if (r->on_device) device_wait_event(dev, r->arrived);||' \
    orders "have one rank's bits"

more "weights are written while another rank copies them" lib/transport_threads.h \
    's|device_wait_event(comm->dev, slots\[p\].copied);|{}|' \
    orders "only after the other rank.s GPU has copied it"

edit='s|    [a-z_]*_start(tp->comm, &tp->request, .*FLOATX);|'
edit+='    StreamKind was = device_set_stream(tp->dev, STREAM_SEND_NEXT);\n&\n'
edit+='    device_set_stream(tp->dev, was);|'
more "tensor parallelism's collectives travel on a stream that nothing orders" tensor_parallel.h "$edit" \
    mesh-orders "have seed 0's bits"

more "tensor parallelism's collectives do not wait for what they send" tensor_parallel.h \
    's|    device_wait_stream(tp->dev, STREAM_TP, STREAM_COMPUTE);||' \
    mesh-orders "have seed 0's bits"

more "gathered tokens are overwritten while they are read" tensor_parallel.h \
    's|        int shared = i > 0 && !training;|        int shared = i > 0 * training;|' \
    mesh-orders "have seed 0's bits"

more "gathered tokens are read before they have arrived" tensor_parallel.h \
    's|    comm_wait(tp->comm, &tp->gathers\[buffer\]);||' \
    mesh-orders "have seed 0's bits|is started while its request is in flight"

edit='s|^        prefetch_d_x(m, l);||; s|^        norm_backward(m, w->d_attn_norm.*|        prefetch_d_x(m, l);\n&|'
more "the residual stream's gradient is gathered before it is whole" train_llama3.cu "$edit" \
    mesh-orders "have seed 0's bits"

more "tensor parallelism's collectives run on the compute stream, over NCCL" tensor_parallel.h \
    's|    return device_set_stream(tp->dev, STREAM_TP);|    return device_set_stream(tp->dev, STREAM_COMPUTE);|' \
    streams "of a block runs beside linear_backward_weight"

more "one communicator gathers and reduces, over NCCL" lib/transport_nccl.h \
    's|    return reduces && reductions_apart .*|    return (int)axis * (reduces < 2);|' \
    streams "the reduce-scatter of block l begins before the all-gather of block l - 2 has ended"

more "a matmul counts on multiprocessors that do not exist, over NCCL" lib/cuda/matmul.cuh \
    's|left ? dev->multiprocessors - left : 0;|left ? dev->multiprocessors + left : 0;|' \
    streams "describing a matmul failed"

more "kernels are loaded behind collectives, over NCCL" lib/device_cuda.h \
    's|    setenv("CUDA_MODULE_LOADING", "EAGER", 0);||' \
    streams "launched for the first time while a collective is queued"

# What NCCL really does, and the emulator with it (dev/cuda_on_cpu/README.md)
edit='s|^    if (returned != ncclSuccess && returned.*|    if (returned != ncclInProgress) return returned;|; '
edit+='s|^    if (is_apart) nccl_begin(comm, NCCL_REDUCTIONS.*|    ncclComm_t all = comm->nccl[axis];\n'
edit+='    ncclComm_t *child = \&comm->nccl[NCCL_REDUCTIONS]; ncclConfig_t own = NCCL_CONFIG_INITIALIZER; '
edit+='own.blocking = 0; if (is_apart) nccl_check(comm, all, ncclInProgress, 0, 0, "open", "fsdp"), '
edit+='nccl_check(comm, all, ncclCommSplit(all, 0, g->rank, child, \&own), 0, 0, "split off", "fsdp"), '
edit+='nccl_check(comm, *child, ncclInProgress, 0, 0, "open", "the split");|'
more "a split that says ncclSuccess counts as made, over NCCL" lib/transport_nccl.h "$edit" \
    streams "could not open the split: invalid argument"

more "a communicator that there is not is asked for its state, over NCCL" lib/transport_nccl.h \
    's|^        if (comm->nccl\[i\])$|        if (1)|' \
    streams "the communicator is NULL"

more "a call that is in progress is not waited for, between processes" lib/transport_nccl.h \
    's|^    nccl_check(comm, c, result, r->line, r->number, starts.*||' \
    "gpu_processes all" "mpirun, 4 GPUs, full_shard: the checkpoint of ranks that are threads"

more "a wait inside NCCL has no limit, between processes" lib/transport_nccl.h \
    's|^        if (waited > wait_limit(comm)) wait_expired.*||' \
    "gpu_processes all" "a rank that is stopped while communicators open is named"

more "nothing is connected before the first step, over NCCL" lib/transport_nccl.h \
    's|^            if (dry_run->traffic_started\[nccl_axes\[i\]\]\[kinds\[k\]\].calls)|            if (0)|' \
    streams "is allocated before the first step"

more "the plan forgets the connections between pairs, over NCCL" lib/transport_nccl.h \
    's|^    if (has_pairs) mib +=.*||' \
    streams "is allocated before the first step, and within the plan"

more "NCCL's memory is not checked, over NCCL" run/trainer.h \
    's|^    return uses_nccl(j) ? of_rank + nccl_need(j, dry) :|    return uses_nccl(j) ? of_rank :|' \
    streams "a GPU without room for NCCL.s communicators is refused"

more "an abort that does not return changes the exit code, between processes" lib/transport_nccl.h \
    's|^    nccl_exit_code = code;|    nccl_exit_code = 2;|' \
    "gpu_processes all" "an error of the user keeps its exit code"

more "a broken connection is reported before the monitor names a process, between processes" lib/transport_nccl.h \
    's|           seconds_now() - start < 2) {|           seconds_now() - start < 0) {|' \
    "gpu_processes all" "a rank of another host that dies is named"

more "messages leave out NCCL's last error, over NCCL" lib/transport_nccl.h \
    's|{ return ncclGetLastError(NULL); }|{ return ""; }|' \
    streams "what NCCL finds broken ends all, with the other rank.s address"

more "NVLink SHARP is left on, over NCCL" lib/device_cuda.h \
    's|^    setenv("NCCL_NVLS_ENABLE", "0", 0);||' \
    streams "NVLink SHARP"

more "a stage sends what is not made yet" pipeline_parallel.h \
    's|    device_wait_stream(dev, on, STREAM_COMPUTE);$||' \
    mesh-orders "have seed 0's bits"

more "a stage receives over what is still read" pipeline_parallel.h \
    's|    device_wait_stream(dev, on, STREAM_COMPUTE); // until.*||' \
    mesh-orders "have seed 0's bits"

more "both ends of a pipeline send first, over NCCL" run/shared_gradients.h \
    's|        int sends = i == !is_first_stage;|        int sends = i == 0;|' \
    mesh "two ranks issue in two orders"

more "receives are started in the order of their steps, over NCCL" lib/pipeline_schedule.h \
    's/^    qsort(order.*//' \
    pipeline "two ranks issue in two orders|waited [0-9.]+ s for|are in flight at once"

more "AdamW does not wait for offloaded state" optimizer.h \
    's|        comm_wait_event(fsdp->comm, unit_state(o, u)->fetched, "offloaded state", WAIT_OWN_COPY);||' \
    orders "have one rank's bits"

more "AdamW joins tensors of unequal weight decay" optimizer.h \
    's|^        if (next.tensor->row->weight_decay != piece->tensor->row->weight_decay) return;||' \
    pytorch "weights after ten steps equal"

more "AdamW joins tensors over the padding between them" optimizer.h \
    's/ || next.at != piece->at + piece->count) return;/) return;/' \
    pytorch "weights after ten steps equal"

more "AdamW is called for each tensor" optimizer.h \
    's|^            join_neighbors(o->fsdp, &i, &p);||' \
    pytorch "one call of AdamW for neighbouring tensors"

more "fp8 rounds ties away from zero" dev/kernels/fp8.h \
    's| - 1 + (bits >> shift & 1);|;|' \
    kernels:fp8 "E4M3: PyTorch's saturating casts"

more "fp8 does not saturate" dev/kernels/fp8.h \
    's|fminf(fabsf(x), f.largest)|fabsf(x)|' \
    kernels:fp8 "E5M2: PyTorch's saturating casts"

more "offloaded state is overwritten on its way back" optimizer.h \
    's|    device_wait_event(dev, s->stored);||' \
    orders "have one rank's bits"

more "offloaded state goes back before AdamW has written it" optimizer.h \
    's|    if (o->offloaded) device_wait_stream(dev, STREAM_STORE, STREAM_COMPUTE);||' \
    orders "have one rank's bits"

# Attention on a GPU of compute capability 9.0: what its asynchronous parts could get wrong
hopper=lib/cuda/attention_hopper
orders=kernels:attention-wgmma-orders same="attention has the same bits in eight orders"
more "a consumer waits for the wrong phase, by wgmma" ${hopper}_common.cuh \
    's|\], n / HOPPER_STAGES % 2);|], (n / HOPPER_STAGES + 1) % 2);|' \
    $orders "$same|mbarrier"

more "a stage is filled while it is read, by wgmma" ${hopper}_common.cuh \
    's|    ptx_mbarrier_wait(&p->empty.*||' \
    $orders "$same|mbarrier"

more "fewer bytes are announced than come, by wgmma" ${hopper}_common.cuh \
    's|expect(&p->full\[n % HOPPER_STAGES\], bytes);|expect(\&p->full[n % HOPPER_STAGES], bytes / 2);|' \
    $orders "announce all bytes"

more "wgmma reads dS without a proxy fence, by wgmma" ${hopper}_backward.cuh \
    '/hopper_store(ds + g/,/ptx_barrier_sync/ s|            ptx_fence_proxy_async();||' \
    kernels:attention-wgmma "attention .*its definition|ptx_fence_proxy_async"

more "scores are read before their matmul has ended, by wgmma" ${hopper}_forward.cuh \
    's|        wgmma_finish<1>(c);|        wgmma_finish<2>(c);|' \
    $orders "$same|before it has ended"

more "a weighted sum is rescaled before its matmul has ended, by wgmma" ${hopper}_forward.cuh \
    's|            wgmma_finish<0>(rows.o);|            wgmma_finish<1>(rows.o);|' \
    $orders "$same|before it has ended"

more "keys are given back before their matmul has ended, by wgmma" ${hopper}_forward.cuh \
    's|        wgmma_finish<1>(c);|        pipeline_release(\&barriers->k, n + 1);\n&|' \
    $orders "$same|mbarrier"

more "TMA permutes a tile in another way than wgmma reads it, by wgmma" $hopper.cuh \
    's|CU_TENSOR_MAP_SWIZZLE_128B|CU_TENSOR_MAP_SWIZZLE_NONE|' \
    kernels:attention-wgmma "attention .*its definition|swizzle"

more "an operand's descriptor says another permutation, by wgmma" lib/cuda/hopper.cuh \
    's|swizzle_128 = 1|swizzle_128 = 2|' \
    kernels:attention-wgmma "attention .*its definition|swizzle"

more "a consumer owns the other consumer's keys, by wgmma" ${hopper}_backward.cuh \
    's|sequence_of(a.s, p.b), t, key + warp|sequence_of(a.s, p.b), t, p.key + warp|' \
    kernels:attention-wgmma "attention .*its definition"

more "a GPU of compute capability 9.0 does not compute attention by wgmma" lib/cuda/attention.cuh \
    's|    dev->hopper_attention = 1;|    dev->hopper_attention = 0;|' \
    kernels:attention-wgmma "computes attention by wgmma and TMA"

more "a refused proposal takes the next one with it, by cuBLASLt" lib/cuda/matmul.cuh \
    's|m->now < m->count; m->now++|m->now < m->count; m->now += 2|' \
    kernels:linear "a matmul proposal that cuBLASLt refuses"

fault "the tail of a row of weights is left out" lib/cpu/few_rows.h \
    's|m < rows \&\& k < p->K; m++)|m < rows \&\& k + 1 < p->K; m++)|' \
    kernels:few-rows "linear layers of 1 to 6 rows"

more "a row's last elements are those of the row before it" lib/cpu/few_rows.h \
    's|dot_step(a + m \* p->a_row + k, w + k, p->K - k|dot_step(a + (m ? m - 1 : 0) * p->a_row + k, w + k, p->K - k|' \
    kernels:few-rows "linear layers of 1 to 6 rows"

fault "blocks of keys are added as if they had the same largest score" lib/cpu/attention_query.h \
    's|vsplat(exp_float(parts\[b \* step + a->width\] - base)), total|vsplat(1), total|' \
    kernels:attention "attention forward and backward"

more "attention of one query leaves out the last block of keys" lib/cpu/attention_query.h \
    's|i < a.groups \* a.blocks; i++) query|i < a.groups * a.blocks - 1; i++) query|' \
    kernels:attention "attention forward and backward|log-sum-exp"

fault "a new token's keys overwrite those of the token before it" run/model.h \
    's|cache + m->past \* 2 \* KV, row|cache + (m->past - (m->past > 0)) * 2 * KV, row|' \
    use "generation with"

fault "bytes of a character are printed before it is complete" run/text_output.h \
    's|    if (out->count < length) return;||' \
    generate "printed text"

fault "escape sequences reach the terminal" run/text_output.h \
    's|else if (!out->no_controls .. is_line_or_tab)|else if (1)|' \
    generate "printed text"

fault "the heap of likely tokens is not restored" run/generate.h \
    's|        heap_sift(scratch, count - taken, 0);||' \
    generate "sampling: the nucleus"

more "the bound of the nucleus cuts off likely tokens" run/generate.h \
    's|(1 - top_p) \* sum / V \* 0.5|(1 - top_p) * sum * 0.5|' \
    generate "sampling: the nucleus"

fault "Windows' line ends stay in prompts" run/prompts.h \
    "s|        if (length .. text.length - 1. == '.r') length--;||" \
    generate "Windows"

fault "the directory's end tokens are not obeyed" run/prompts.h \
    's|        if (stop->ids\[i\] == id) return 1;|        if (stop->ids[i] == id) return 0;|' \
    generate "an answer stops"

more "a GGUF file holds other types than --dtype says" run/gguf.h \
    's|return dtype == GGUF_Q8_0 .*|return ST_F32;|' \
    gguf "the types of matrices"

fault "rows of wq and wk keep their order in GGUF files" run/gguf.h \
    's|t.interleaved_rows = c->HD;|{}|' \
    gguf "every weight in its place"

more "values of q8_0 are rounded towards zero" run/checkpoint_writer.h \
    's|roundf(in\[i\] . inverse)|truncf(in[i] * inverse)|' \
    gguf "q8_0: every weight in its place"

more "tensors of a GGUF file follow each other without padding" run/gguf.h \
    's|round_up(t.bytes, GGUF_ALIGN) - t.bytes|0|' \
    gguf "every weight in its place"

more "RoPE's frequencies are divided by the inverse in GGUF files" run/gguf.h \
    's|rope_base_frequency(c, i) / rope_frequency(c, i)|rope_frequency(c, i) / rope_base_frequency(c, i)|' \
    gguf "divisors of RoPE"

more "an answer is not ended as a message is" run/chat_template.h \
    's|^    chat_turn_end(c, target);|    chat_special(c, c->form->close, target);|' \
    generate "conversation|answer.s tokens"

fault "Muon's momentum is without Nesterov's step" lib/cpu/muon.h \
    's|vfma(m1 - grad, vsplat(momentum), grad)|m1|' \
    muon "Muon changes square, wide and tall matrices"

fault "--muon-momentum has no effect" run/trainer.h \
    's|(float)o->muon_momentum|0.95f|' \
    muon "muon-momentum 0: the momentum is the last gradient"

fault "Muon's shards return to the wrong units" optimizer.h \
    's|muon_shard(&o->muon, first, i)|muon_shard(\&o->muon, first, pass ? first + end - 1 - i : i)|' \
    muon "Muon.s updates have one rank.s bits"

more "Newton-Schulz multiplies tall matrices from the left" lib/ops.h \
    's|y, is_tall ? x : s, is_tall ? s : x);|y, s, x);|' \
    muon "Muon changes square, wide and tall matrices"

more "Newton-Schulz takes the other Gram matrix of square matrices" lib/ops.h \
    '/static void gram_matrix/,/^}/s|rows > cols|rows >= cols|' \
    kernels:muon "Newton-Schulz of square, wide and tall"

more "Muon's update is scaled by the rows" optimizer.h \
    's|max_i64(p->tensor->whole_rows, p->tensor->whole_cols)|p->tensor->whole_rows|' \
    muon "Muon changes square, wide and tall matrices"

more "gaps between the shards of a smaller unit stay" optimizer.h \
    's|int has_gaps = m->owners > 1 .. shard < part;|int has_gaps = 0;|' \
    muon "wrap size:40000: Muon.s updates have one rank.s bits"

more "columns of tp ranks are taken as rows" optimizer.h \
    's|    int by_columns = t->row->split == SPLIT_COLUMNS;|    int by_columns = 0;|' \
    muon "tp 2.*: Muon.s updates have one rank.s bits"

more "an all-to-all takes every member's first part" lib/comm_types.h \
    's/ || r->collective == ALL_TO_ALL;/;/' \
    muon "Muon.s updates have one rank.s bits"

more "second moments are written where Muon's matrices are" run/sharded_state.h \
    's|whole + u->state_begin + p.at, state,|whole + u->state_begin + p.adamw_at, state,|' \
    muon "are 4 steps"

more "the traffic formula forgets the results of Muon" run/traffic.h \
    's|out\[ALL_TO_ALL\].calls = 2 \* |out[ALL_TO_ALL].calls = |' \
    muon "figures of the first step differ"

if [ "$all" = anchors ]; then
    echo "$((count - lost)) of $count planted faults change their files"
    [ "$lost" = 0 ]
    exit
fi
wait
for ((i = 1; i <= count; i++)); do cat "$work/$i.said"; done
passed=$(cat "$work"/*.said | grep -c '^pass ' || true)
echo "$passed passed, $((count - passed)) failed"
[ "$passed" = "$count" ]
