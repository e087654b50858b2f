/* int8.h: weights in int8: blocks of INT8_BLOCK elements with one fp32 scale each, and their layout in shards.
 *
 * Quantization is absmax per block (Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization", with linear
 * steps): scale = largest magnitude / 127, weight = byte * scale, so the rounding error is at most half a scale.
 * Blocks follow a tensor's row-major order; its last block may be short. A caller may rely on: no block is divided
 * between two shards, so a tensor has the same bytes for any number of ranks.
 */
#ifndef INT8_H
#define INT8_H
#include "../device/device.h"
#include "ops.h"

static int64_t int8_blocks(int64_t elements) { return blocks_of(elements, INT8_BLOCK); }

/* Quantizes one block: out (count) from in (count), count <= INT8_BLOCK. Returns its scale. If an element is not
 * finite, the scale is NaN, so that all elements are NaN after dequantization and the damage is not hidden. */
static float quantize_int8_block(int8_t *out, const float *in, int64_t count) {
    float largest = 0;
    int finite = 1;
    for (int64_t i = 0; i < count; i++) {
        largest = fmaxf(largest, fabsf(in[i]));
        finite &= fabsf(in[i]) < INFINITY;
    }
    float step = finite ? largest / 127 : NAN;
    for (int64_t i = 0; i < count; i++) out[i] = (int8_t)(step > 0 ? lrintf(fminf(127, fmaxf(-127, in[i] / step))) : 0);
    return step;
}

/* A quantized FSDP unit is stored, and all-gathered, as the bytes of its shards, one after the other. Each shard holds
 *
 *     int8 elements (blocks * INT8_BLOCK) | scales (blocks), fp32 | unquantized elements (unquantized), floatX
 *
 * Tensors that are not quantized, such as norms under --base int8, are in the last part. */
typedef struct {
    int64_t shards;      // 0: the unit is not quantized
    int64_t blocks;      // per shard
    int64_t unquantized; // elements per shard
    int64_t bytes;       // per shard
} QuantizedLayout;

/* Divides a unit's blocks and unquantized elements evenly. `align` is in elements: where the next shard may begin. */
static QuantizedLayout quantized_layout(int64_t blocks, int64_t unquantized, int64_t shards, int64_t align) {
    QuantizedLayout l = ZERO;
    if (!blocks) return l; // not quantized
    l.shards = shards;
    l.blocks = round_up(blocks, 4 * shards) / shards; // four scales: every part begins at a multiple of 16 bytes
    l.unquantized = round_up(unquantized, align * shards) / shards;
    l.bytes = l.blocks * (int64_t)(INT8_BLOCK + sizeof(float)) + l.unquantized * (int64_t)sizeof(floatX);
    return l;
}

/* How many int8 elements, or how many unquantized ones, a shard holds. */
static int64_t quantized_shard_elements(const QuantizedLayout *l, int quantized) {
    return quantized ? l->blocks * INT8_BLOCK : l->unquantized;
}

/* Where the scales and the unquantized elements begin within a shard, in bytes. */
static int64_t quantized_scales_at(const QuantizedLayout *l) { return l->blocks * INT8_BLOCK; }
static int64_t quantized_rest_at(const QuantizedLayout *l) { return l->blocks * (int64_t)(INT8_BLOCK + sizeof(float)); }

/* Converts elements [first, first + count) of a gathered unit to floatX, out (count). The int8 elements of all shards
 * are numbered from 0, and so are the unquantized ones; `quantized` says which of the two are meant. */
static void dequantize_elements(Device *dev, floatX *out, const void *gathered, const QuantizedLayout *l, int quantized,
                                int64_t first, int64_t count) {
    int64_t per_shard = quantized_shard_elements(l, quantized);
    for (int64_t done = 0, n; done < count; done += n) {
        int64_t shard = (first + done) / per_shard, within = (first + done) % per_shard;
        const char *bytes = (const char *)gathered + shard * l->bytes;
        n = min_i64(count - done, per_shard - within);
        if (quantized) {
            const float *scales = (const float *)(const void *)(bytes + quantized_scales_at(l));
            dequantize(dev, out + done, (const int8_t *)bytes + within, scales + within / INT8_BLOCK, n);
        } else {
            const floatX *rest = (const floatX *)(const void *)(bytes + quantized_rest_at(l));
            device_copy(dev, out + done, rest + within, sizeof(floatX) * n);
        }
    }
}

#endif
