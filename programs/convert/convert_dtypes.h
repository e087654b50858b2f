/* convert_dtypes.h: weights in other dtypes than fp32, and in the row order of GGUF files.
 *
 * A caller may rely on: values that a dtype cannot represent are refused with the tensor's name; the bytes of a tensor
 * are the same whichever part of it is asked for. */
#ifndef CONVERT_DTYPES_H
#define CONVERT_DTYPES_H
#include "../../run/checkpoint/checkpoint_writer.h" // defines: CheckpointWriter, OutputTensor, read_elements
#include "conversion.h"                             // defines: Conversion, export_dtypes
#include <float.h>                                  // defines: FLT_MIN

enum { PUT_ELEMENTS = 1 << 14 }; // how many elements are converted at a time: whole int8 blocks

typedef struct {
    float fp32[PUT_ELEMENTS];
    bf16 half[PUT_ELEMENTS];
    int8_t int8[PUT_ELEMENTS];
    float scales[(int)PUT_ELEMENTS / (int)INT8_BLOCK];
    char q8_0[(int)PUT_ELEMENTS / (int)Q8_0_BLOCK * (int)Q8_0_BLOCK_BYTES];
} PutBuffers;

/* x as an IEEE 754 binary16: rounded to nearest, ties to even. What is too large or not finite becomes infinite. */
static uint16_t float_to_half(float x) {
    const int largest_exponent = 15, least_exponent = -14, infinite = 0x7C00;
    int exponent, sign = signbit(x) ? 0x8000 : 0;
    float magnitude = fabsf(x);
    if (!(magnitude < INFINITY)) return (uint16_t)(sign | infinite);
    if (magnitude == 0) return (uint16_t)sign;
    frexpf(magnitude, &exponent); // magnitude is in [2^(exponent-1), 2^exponent)
    exponent = exponent - 1 < least_exponent ? least_exponent : exponent - 1;
    long steps = lrintf(ldexpf(magnitude, 10 - exponent)); // of 2^(exponent-10): below 1024 for subnormal numbers
    long bits = ((long)(exponent - least_exponent) << 10) + steps; // a carry into the exponent is right, too
    return (uint16_t)(sign | (exponent > largest_exponent ? infinite : (int)bits));
}

__attribute__((noreturn)) static void refuse_values(const CheckpointWriter *w, const OutputTensor *t, const char *what,
                                                    const char *instead) {
    const Conversion *c = (const Conversion *)w->conversion;
    user_error("--dtype %s: tensor %s has values that are %s, which this dtype cannot represent: %s",
               export_dtypes[c->opt.dtype], t->tensor->name, what, instead);
}
static const char not_finite[] = "not finite", find_out[] = "export with --dtype fp32, and find out why training "
                                                            "diverged";

static uint16_t checked_half(const CheckpointWriter *w, const OutputTensor *t, float x) {
    uint16_t half = float_to_half(x);
    if ((half & 0x7C00) != 0x7C00) return half; // finite
    if (isfinite(x)) refuse_values(w, t, "too large", "export with --dtype bf16");
    refuse_values(w, t, not_finite, find_out);
}

/* Quantizes one block as ggml does: an fp16 scale, largest magnitude / 127, and the elements divided by it. */
static void quantize_q8_0_block(const CheckpointWriter *w, const OutputTensor *t, char *out, const float *in) {
    float largest = 0;
    for (int i = 0; i < Q8_0_BLOCK; i++) {
        if (!(fabsf(in[i]) < INFINITY)) refuse_values(w, t, not_finite, find_out);
        largest = fmaxf(largest, fabsf(in[i]));
    }
    float scale = largest / 127, inverse = scale >= FLT_MIN ? 1 / scale : 0; // below that, the fp16 scale is 0
    uint16_t half = checked_half(w, t, scale);
    memcpy(out, &half, sizeof half);
    for (int i = 0; i < Q8_0_BLOCK; i++) out[2 + i] = (char)(int8_t)roundf(in[i] * inverse);
}

/* Converts n elements of b->fp32 to what the file holds, whose bytes are returned. */
static const void *convert_elements(const CheckpointWriter *w, const OutputTensor *t, PutBuffers *b, int64_t n) {
    if (t->dtype == ST_BF16) {
        for (int64_t i = 0; i < n; i++) b->half[i] = float_to_bf16(b->fp32[i]);
        return b->half;
    }
    if (t->dtype == ST_F16) {
        for (int64_t i = 0; i < n; i++) b->half[i].bits = checked_half(w, t, b->fp32[i]);
        return b->half;
    }
    if (t->dtype == GGUF_Q8_0) {
        for (int64_t i = 0; i < n / Q8_0_BLOCK; i++)
            quantize_q8_0_block(w, t, b->q8_0 + i * Q8_0_BLOCK_BYTES, b->fp32 + i * Q8_0_BLOCK);
        return b->q8_0;
    }
    if (t->dtype != ST_I8 && !t->scales) return b->fp32;
    for (int64_t i = 0; i < int8_blocks(n); i++) {
        int64_t at = i * INT8_BLOCK;
        b->scales[i] = quantize_int8_block(b->int8 + at, b->fp32 + at, min_i64(INT8_BLOCK, n - at));
        if (!isfinite(b->scales[i])) refuse_values(w, t, not_finite, find_out);
    }
    return t->scales ? (const void *)b->scales : b->int8;
}

/* How many bytes PUT_ELEMENTS elements take in the file. */
static int64_t put_piece_bytes(const OutputTensor *t) {
    const int64_t elements = PUT_ELEMENTS;
    if (t->dtype == GGUF_Q8_0) return elements / Q8_0_BLOCK * Q8_0_BLOCK_BYTES;
    return elements * st_dtype_sizes[t->dtype] / (t->scales ? INT8_BLOCK : 1);
}

/* A build in bf16 rounds the model's weights when it loads them. Adds what the rounding took away, so that merged
 * weights are as exact as the files. */
static void add_rest_of_files(const Job *j, const Tensor *t, float *out, int64_t first, int64_t count) {
    float *exact = new_array(float, count);
    fill_from_files((void *)(uintptr_t)&j->weights, STATE_MASTER, exact, t, first, count);
    for (int64_t i = 0; i < count; i++) out[i] += exact[i] - to_float(from_float(exact[i]));
    free(exact);
}

/* Reads elements [first, first + count) of the whole tensor from the model's files, or as they were gathered. */
static void read_weights(const CheckpointWriter *w, const OutputTensor *t, const GatheredTensor *g, float *out,
                         int64_t first, int64_t count) {
    const Job *j = &((const Conversion *)w->conversion)->job;
    if (job_streams_weights(j))
        fill_from_files((void *)(uintptr_t)&j->weights, STATE_MASTER, out, t->tensor, first, count);
    else {
        read_elements(w, g, out, first, count);
        if (FLOATX != DTYPE_F32 && !is_quantized(j->config.base, t->tensor->row))
            add_rest_of_files(j, t->tensor, out, first, count);
    }
}

/* The same in the order of the file. */
static void read_in_file_order(const CheckpointWriter *w, const OutputTensor *t, const GatheredTensor *g, float *out,
                               int64_t first, int64_t count) {
    int64_t head = t->interleaved_rows, cols = t->tensor->cols;
    if (!head) {
        read_weights(w, t, g, out, first, count);
        return;
    }
    for (int64_t at = first, n; at < first + count; at += n) {
        int64_t row = at / cols, col = at % cols, in_head = row % head;
        int64_t from =
            row - in_head + in_head % 2 * (head / 2) + in_head / 2; // alternately from both halves of the head
        n = min_i64(cols - col, first + count - at);
        read_weights(w, t, g, out + (at - first), from * cols + col, n);
    }
}

/* Produces bytes [begin, end) of a tensor at `out`. */
static void convert_tensor(const CheckpointWriter *w, const OutputTensor *t, const GatheredTensor *g, char *out,
                           int64_t begin, int64_t end) {
    int64_t elements = t->tensor->rows * t->tensor->cols, size = sizeof(float), piece = put_piece_bytes(t);
    if (t->dtype == ST_F32 && !t->scales && begin % size == 0 && end % size == 0) { // from the device to the chunk
        read_in_file_order(w, t, g, (float *)(void *)out, begin / size, (end - begin) / size);
        return;
    }
    PutBuffers *b = new_array(PutBuffers, 1); // on the heap: the stack may be small
    for (int64_t at = begin, next; at < end; at = next) {
        int64_t number = at / piece, n = min_i64(PUT_ELEMENTS, elements - number * PUT_ELEMENTS);
        next = min_i64(end, (number + 1) * piece);
        read_in_file_order(w, t, g, b->fp32, number * PUT_ELEMENTS, n);
        const char *bytes = (const char *)convert_elements(w, t, b, n);
        memcpy(out + (at - begin), bytes + at % piece, (size_t)(next - at));
    }
    free(b);
}

#endif
