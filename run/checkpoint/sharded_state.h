/* sharded_state.h: sets and reads the state of FSDP's shards tensor by tensor, for initial weights, import, checkpoints
 * and export.
 *
 * Sources of weights (a seed, safetensors, a checkpoint) know whole tensors of the model; a rank keeps a range of its
 * part of each. A caller may rely on: state is set in pieces of bounded size, so loading needs little memory; what is
 * set depends on (tensor, element) only, so every layout gets the same weights.
 */
#ifndef SHARDED_STATE_H
#define SHARDED_STATE_H
#include "../../optimizer.h" // defines: StateKind, state_of, ShardPiece, next_state_piece; includes fsdp.h
#include "../../lib/ops/int8.h"

enum { SET_STATE_PIECE = 1 << 20 }; // elements; whole int8 blocks

// ---------------------------------------------------------------------------
// sources

/* Writes elements [first, first + count) of the whole tensor's state of one kind to `out` (count), in the host's
 * memory. `source` is the function's own: an open file, or for random weights the Fsdp. */
typedef void (*StateSource)(void *source, StateKind kind, float *out, const Tensor *tensor, int64_t first,
                            int64_t count);

/* The same for weights that are stored as int8 blocks: bytes (count) and their scales; `first` begins a block. Returns
 * 0 if this tensor is not stored so. */
typedef int (*Int8Source)(void *source, int8_t *out, float *scales, const Tensor *tensor, int64_t first, int64_t count);

/* A source, and buffers of SET_STATE_PIECE elements. */
typedef struct {
    StateSource read;
    Int8Source read_int8; // NULL: nothing is stored in int8
    void *source;
    float *fp32;   // as they are read
    void *rounded; // int8 or floatX; NULL: only fp32 is set
    float *scales;
} StateReader;

/* Reads elements [first, first + count) of this rank's part of a tensor, which may be some columns of the whole one: as
 * fp32 or, if `as_int8`, as int8 with scales. Returns 0 if int8 is asked for, and the file has no int8. Tensor
 * parallelism cuts between int8 blocks, so every run is of whole blocks. */
static int read_part(const StateReader *from, StateKind kind, const Tensor *t, int64_t first, int64_t count,
                     int as_int8) {
    int8_t *bytes = (int8_t *)from->rounded;
    for (int64_t at = 0, run, whole; at < count; at += run) {
        run = min_i64(count - at, tensor_run(t, first + at, &whole));
        if (!as_int8) from->read(from->source, kind, from->fp32 + at, t, whole, run);
        else if (!from->read_int8(from->source, bytes + at, from->scales + at / INT8_BLOCK, t, whole, run)) return 0;
    }
    return 1;
}

static void random_weights(void *fsdp, StateKind kind, float *out, const Tensor *tensor, int64_t first, int64_t count) {
    const Fsdp *f = (const Fsdp *)fsdp;
    (void)kind;
    tensor_init(out, tensor, f->config, f->seed, first, count, f->dev->on.threads);
}

// ---------------------------------------------------------------------------
// setting state

/* Rounds the master weights to the compute dtype, after something other than AdamW has set them. */
static void fsdp_refresh_copies(Fsdp *fsdp) {
    for (int i = 0; i < fsdp->table->num_units; i++) {
        FsdpUnit *u = &fsdp->units[i];
        bf16 *copy = (bf16 *)state_of(u, STATE_COPY);
        if (u->master && copy) cast_to_bf16(fsdp->dev, copy, u->master, u->state_count);
    }
    device_wait_stream(fsdp->dev, STREAM_GATHER, STREAM_COMPUTE);
}

/* The state of a piece of a tensor; NULL: the tensor has no such state. */
static float *piece_state(const ShardPiece *p, StateKind kind) {
    if (kind == STATE_EXP_AVG_SQ) return p->adamw_at < 0 ? NULL : p->unit->exp_avg_sq + p->adamw_at;
    return (float *)state_of(p->unit, kind) + p->at;
}

/* Sets elements [first, first + count) of a tensor at `out` (count): the state of the kind, in floatX if the reader has
 * a buffer for rounded elements, and in fp32 otherwise. */
static void set_elements(Fsdp *fsdp, const StateReader *from, StateKind kind, const Tensor *t, int64_t first,
                         int64_t count, void *out) {
    floatX *rounded = (floatX *)from->rounded;
    const void *elements = rounded ? from->rounded : from->fp32;
    size_t size = rounded ? sizeof(floatX) : sizeof(float);
    for (int64_t done = 0, n; done < count; done += n) {
        n = min_i64(SET_STATE_PIECE, count - done);
        read_part(from, kind, t, first + done, n, 0);
        for (int64_t i = 0; i < n && rounded; i++) rounded[i] = from_float(from->fp32[i]);
        device_write(fsdp->dev, (char *)out + (size_t)done * size, elements, size * (size_t)n);
        comm_alive(fsdp->comm);
    }
}

/* Sets one kind of state of all trained tensors. */
static void fsdp_set_state(Fsdp *fsdp, StateKind kind, StateSource read, void *source) {
    StateReader from = {read, NULL, source, new_array(float, SET_STATE_PIECE), NULL, NULL};
    ShardPiece p;
    for (int i = 0; next_state_piece(fsdp, &i, &p) && !fsdp->dev->dry_run;) {
        float *state = piece_state(&p, kind);
        if (state) set_elements(fsdp, &from, kind, p.tensor, p.first, p.count, state);
    }
    free(from.fp32);
    if (kind == STATE_MASTER) fsdp_refresh_copies(fsdp);
}

/* Sets elements [first, first + count) of a quantized tensor: out (count) and their blocks' scales. Weights that are
 * stored in int8 are copied unchanged; others are quantized here. */
static void set_frozen_int8(Fsdp *fsdp, const StateReader *from, const Tensor *t, int64_t first, int64_t count,
                            int8_t *out, float *scales) {
    int8_t *bytes = (int8_t *)from->rounded;
    for (int64_t done = 0, n; done < count; done += n) {
        n = min_i64(SET_STATE_PIECE, count - done);
        int64_t blocks = int8_blocks(n);
        if (!from->read_int8 || !read_part(from, STATE_MASTER, t, first + done, n, 1)) {
            read_part(from, STATE_MASTER, t, first + done, n, 0);
            for (int64_t b = 0, at = 0; b < blocks; b++, at += INT8_BLOCK)
                from->scales[b] = quantize_int8_block(bytes + at, from->fp32 + at, min_i64(INT8_BLOCK, n - at));
        }
        device_write(fsdp->dev, out + done, bytes, (size_t)n);
        device_write(fsdp->dev, scales + done / INT8_BLOCK, from->scales, sizeof(float) * (size_t)blocks);
        comm_alive(fsdp->comm);
    }
}

/* Sets the elements of tensor t that this rank's shard of a quantized unit holds. Int8 elements are numbered and
 * sharded apart from unquantized ones; t's begin at number t0. */
static void set_quantized_tensor(Fsdp *fsdp, const StateReader *from, FsdpUnit *u, const Tensor *t) {
    const QuantizedLayout *l = &u->quantized;
    int64_t per_shard = quantized_shard_elements(l, t->is_quantized), t0 = t->stored_at;
    int64_t shard_begin = fsdp->sharding.strategy->sharded ? fsdp->rank * per_shard : 0;
    int64_t begin = max_i64(t0, shard_begin), end = min_i64(t0 + t->rows * t->cols, shard_begin + per_shard);
    int64_t first = begin - t0, at = begin - shard_begin;
    char *shard = (char *)u->sharded_weights;
    if (end <= begin) return;
    if (t->is_quantized) {
        float *scales = (float *)(void *)(shard + quantized_scales_at(l));
        set_frozen_int8(fsdp, from, t, first, end - begin, (int8_t *)shard + at, scales + at / INT8_BLOCK);
    } else {
        floatX *rest = (floatX *)(void *)(shard + quantized_rest_at(l));
        set_elements(fsdp, from, STATE_MASTER, t, first, end - begin, rest + at);
    }
}

/* Sets the frozen tensors. read_int8 NULL: no tensor is stored in int8. */
static void fsdp_set_base(Fsdp *fsdp, StateSource read, Int8Source read_int8, void *source) {
    if (fsdp->config->base == BASE_TRAINED || fsdp->dev->dry_run) return;
    float *fp32 = new_array(float, SET_STATE_PIECE), *scales = new_array(float, int8_blocks(SET_STATE_PIECE));
    StateReader from = {read, read_int8, source, fp32, new_array(floatX, SET_STATE_PIECE), scales};
    for (int i = 0; i < fsdp->table->num_tensors; i++) {
        const Tensor *t = &fsdp->table->tensors[i];
        FsdpUnit *u = &fsdp->units[t->unit];
        if (!u->table_unit->frozen) continue;
        if (u->quantized.shards) {
            set_quantized_tensor(fsdp, &from, u, t);
            continue;
        }
        int64_t first, count = tensor_overlap(t, u->state_begin, u->state_begin + u->state_count, &first);
        if (!count) continue;
        floatX *out = u->sharded_weights + (t->offset + first - u->state_begin);
        set_elements(fsdp, &from, STATE_MASTER, t, first, count, out);
    }
    free(fp32);
    free(from.rounded);
    free(scales);
    device_wait_stream(fsdp->dev, STREAM_GATHER, STREAM_COMPUTE);
}

// ---------------------------------------------------------------------------
// gathering whole units to write them

static void fsdp_release_state(Fsdp *f, const float *whole) { pool_release(f->dev, &f->pools[POOL_GRADIENTS], whole); }

/* What gathers all of a unit's state of one kind, as gather_trained does. */
typedef const float *(*GatherState)(Fsdp *fsdp, FsdpUnit *u, StateKind kind);

/* All of a trained unit's state of one kind (padded), in the device's memory: either where it is kept, or gathered into
 * a gradient buffer. Only between steps. Valid until fsdp_release_state. A collective of the fsdp group. */
static const float *gather_trained(Fsdp *fsdp, FsdpUnit *u, StateKind kind) {
    float *mine = (float *)state_of(u, kind);
    MemCategory category = kind == STATE_MASTER ? MEM_PARAMS : MEM_OPTIMIZER;
    int is_spread = kind == STATE_EXP_AVG_SQ && u->table_unit->has_muon;
    if (u->state_count == u->padded && !is_spread) return mine;
    float *whole = (float *)pool_take(fsdp, POOL_GRADIENTS, u);
    if (is_spread) {
        // Muon's matrices have no second moments, so a rank keeps those of the unit's other tensors without gaps. They
        // are copied to their places in the whole unit.
        ShardPiece p;
        for (int i = u->table_unit->first_tensor; next_state_piece(fsdp, &i, &p) && p.unit == u;) {
            const float *state = piece_state(&p, STATE_EXP_AVG_SQ);
            if (state) device_copy(fsdp->dev, whole + u->state_begin + p.at, state, sizeof(float) * (size_t)p.count);
        }
        mine = whole + u->state_begin;
    } else if (fsdp->dev->arenas[category].offloaded && !OFFLOAD_IN_PLACE) {
        device_copy(fsdp->dev, whole + u->state_begin, mine, sizeof(float) * (size_t)u->state_count);
        mine = whole + u->state_begin;
    }
    if (u->state_count == u->padded) return whole;
    all_gather_now(fsdp->comm, AXIS_FSDP, u->table_unit->name, mine, whole, sizeof(float) * (size_t)u->shard_size);
    return whole;
}

#endif
