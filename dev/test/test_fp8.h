/* test_fp8.h: dev/kernels/fp8.h, the definition of 8-bit floating point, against PyTorch's casts and a plain rounding.
 * Part of test_llama3.cu. */
#include "../kernels/fp8.h" // defines: fp8_round, fp8_value, fp8_scale

/* Reads a fixture of make_kernel_fixtures.py: its size after the first, and its four columns `in`, `out`, `amax` and
 * `scale`. Returns the values, or NULL. */
static double *fp8_fixture(int number, int *mantissa, int64_t (*counts)[4]) {
    char path[64], line[64];
    int64_t all = 0;
    snprintf(path, sizeof path, "dev/kernels/fixtures/fp8.%d.bin", number);
    FILE *f = fopen(path, "rb");
    if (!f) return NULL;
    if (!fgets(line, sizeof line, f) || sscanf(line, "size %*d %d", mantissa) != 1) *mantissa = 0;
    for (int i = 0; i < 4; i++) {
        if (!fgets(line, sizeof line, f) || sscanf(line, "%*s %" SCNd64, &(*counts)[i]) != 1) (*counts)[i] = 0;
        all += (*counts)[i];
    }
    double *values = (double *)checked_malloc(sizeof(double) * (size_t)(all + 1));
    int complete = fgetc(f) == '\n' && (int64_t)fread(values, sizeof(double), (size_t)all, f) == all && all;
    fclose(f);
    if (complete) return values;
    free(values);
    return NULL;
}

/* The nearest value of the format by searching all of them; among two the one with an even last bit. */
static float fp8_nearest(float x, Fp8Format f) {
    float best = 0;
    int best_code = 0;
    for (int code = 0; code < 128; code++) {
        float value = fp8_value((uint8_t)code, f);
        double now = fabs((double)value - fabsf(x)), before = fabs((double)best - fabsf(x));
        if (!isfinite(value) || now > before || (now == before && best_code % 2 == 0)) continue;
        best = value;
        best_code = code;
    }
    return copysignf(best, x);
}

static void test_fp8_format(KernelTest *t, int number, Fp8Format f, const char *name) {
    int64_t counts[4], wrong = 0, casts = 0, scales = 0;
    int mantissa = 0;
    char what[96];
    double *values = fp8_fixture(number, &mantissa, &counts);
    for (int64_t i = 0; values && i < counts[0]; i++)
        casts += fp8_value(fp8_round((float)values[i], f), f) != (float)values[counts[0] + i];
    const double *amax = values ? values + counts[0] + counts[1] : NULL;
    for (int64_t i = 0; values && i < counts[2]; i++)
        scales += fp8_scale((float)amax[i], f) != (float)amax[counts[2] + i];
    snprintf(what, sizeof what, "%s: PyTorch's saturating casts and scales, bit for bit", name);
    CHECK(what, values && mantissa == f.mantissa && !casts && !scales,
          "%" PRId64 " casts and %" PRId64 " scales differ of %" PRId64 " and %" PRId64, casts, scales,
          values ? counts[0] : 0, values ? counts[2] : 0);
    free(values);
    for (int i = 0; i < 20000; i++) {
        float x = ldexpf(test_random(t), (int)(40 * test_random(t)));
        wrong += fp8_value(fp8_round(x, f), f) != fp8_nearest(x, f);
    }
    for (int code = 0; code < 256; code++) {
        float value = fp8_value((uint8_t)code, f);
        if (isfinite(value)) wrong += fp8_round(value, f) != code;
    }
    snprintf(what, sizeof what, "%s: values are rounded to the nearest, and values of the format stay", name);
    CHECK(what, !wrong, "%" PRId64 " of 20256 differ", wrong);
    int ends = fp8_scale(0, f) == 1 && fp8_scale(1e-40f, f) == 1 && isnan(fp8_scale(INFINITY, f)) &&
               isnan(fp8_scale(NAN, f)) && fp8_scale(1.2e-38f, f) == ldexpf(1, 126);
    int special = fp8_round(NAN, f) == FP8_NAN && isnan(fp8_value(FP8_NAN, f)) &&
                  fp8_value(fp8_round(-INFINITY, f), f) == -f.largest && fp8_round(-0.0f, f) == 0x80;
    snprintf(what, sizeof what, "%s: amax of 0, infinity and NaN; values that are NaN, infinite and -0", name);
    CHECK(what, ends && special, "scales %s, values %s", ends ? "right" : "wrong", special ? "right" : "wrong");
}

static void test_fp8(KernelTest *t) {
    test_fp8_format(t, 1, E4M3, "E4M3");
    test_fp8_format(t, 2, E5M2, "E5M2");
}
