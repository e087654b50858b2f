/* test_kernels.h: each op against its definition in double precision, at odd sizes; equal bits for 1, 2 and 3
 * threads (CUDA: in three streams) and for every cut of a flat tensor; nothing written outside the outputs; a dry run
 * that counts the same. Part of test_llama3.cu. */
#include "test_buffers.h"
#include "test_rows.h"
#include "test_matmul.h"
#include "test_cross_entropy.h"
#include "test_attention.h"
#include "test_flat.h"
#include "test_fp8.h"
#include "test_muon_ops.h"

/* Every op once. */
static void every_op(Device *dev, float *f, floatX *x, int32_t *ids) {
    const int N = 16, C = 40, V = 17;
    AttentionShape s;
    memset(&s, 0, sizeof s);
    s.B = 2;
    s.Tq = 8;
    s.Tk = 9;
    s.NH = 4;
    s.NKV = 2;
    s.HD = 10;
    s.q_offset = -2;
    s.q_stride = s.o_stride = 40;
    s.k_stride = s.v_stride = 20;
    const int64_t D = 2000; // distance between tensors
    embedding_forward(dev, x, x + D, ids, 0, N, C, V);
    embedding_backward(dev, f, x, ids, 0, N, C, V);
    rmsnorm_forward(dev, x, f, x + D, x + 2 * D, x + 3 * D, x + 4 * D, 1e-5f, N, C);
    rmsnorm_backward(dev, x, f, x + D, NULL, x + 2 * D, f + D, x + 4 * D, N, C);
    residual_add(dev, x, x + D, x + 2 * D, N * C);
    linear_forward(dev, x, x + D, x + 2 * D, N, C, V);
    linear_forward_logits(dev, logits_fp32(f, V), x + D, x + 2 * D, N, C, V);
    linear_backward_input(dev, x, x + D, C, x + 2 * D, N, C, V);
    linear_backward_weight(dev, f, x + D, C, x + 2 * D, N, C, V, 1);
    rope_forward(dev, x, 40, f, ids, N, 8, 2, 10);
    rope_backward(dev, x, 40, f, ids, N, 8, 2, 10);
    attention_forward(dev, x, f, x + D, x + 2 * D, x + 3 * D, &s);
    attention_backward(dev, x + 4 * D, x + 5 * D, x + 6 * D, x + 7 * D, x, f, x + D, x + 2 * D, x + 3 * D, &s);
    swiglu_forward(dev, x, x + D, N, C);
    swiglu_backward(dev, x + D, x, x + 3 * D, N, C);
    cross_entropy(dev, f, logits_fp32(f + D, V), ids, no_z_loss, N, V, 1);
    cross_entropy_part(dev, f + 2 * D, logits_fp32(f + D, V), ids, 5, N, V);
    cross_entropy_join(dev, f, logits_fp32(f + D, V), f + 2 * D, ids, no_z_loss, 1, 5, N, V, 1);
    tree_sum(dev, f, f + D, DTYPE_F32, 3, 500, 1);
    sum_pieces(dev, x, x + D, 3, 500);
    squared_norm(dev, (ExactSum *)(void *)f, f + 1000, 1000);
    adamw(dev, f, f + D, f + 2 * D, f + 3 * D, x, 1000, 1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 1, 1);
    cast_to_bf16(dev, (bf16 *)(void *)x, f, 1000);
    exact_total(dev, (ExactSum *)(void *)f, f + 1000, 1000);
    fingerprint(dev, (uint64_t *)(void *)f, f + 1000, 4000);
    linear_forward_add(dev, x, V, x + D, x + 2 * D, N, C, V);
    linear_backward_input_add(dev, x, x + D, x + 2 * D, N, C, V);
    scale(dev, x, 0.5f, 500);
    dequantize(dev, x, (int8_t *)(void *)(x + D), f, 500);
    adapter_merge(dev, f, f + D, f + 2 * D, 0.5f, 3, 20, 30);
    muon_momentum(dev, x, f, f + D, 500, 0.95f, 1);
    normalize_matrix(dev, x, 500);
    gram_matrix(dev, x, x + D, 20, 30);
    symmetric_matmul(dev, f, x + D, x + 2 * D, 30, 20);
    weighted_sum(dev, x, 2, f, 3, 500);
    muon_update(dev, f, x, x + D, 500, 1e-3f, 1, 0.1f);
}

/* Called after each op, so that its errors are its own and the host may read what it wrote. */
static void wait_for_op(void *dev) { device_synchronize((Device *)dev); }

static void device_wait_for_ops(Device *dev) {
    dev->poll = wait_for_op;
    dev->poll_arg = dev;
}

static void test_dry_run(KernelTest *t) {
    Device dry_run, real;
    float *f = test_floats(t, 20000, 0.1);
    floatX *x = test_xs(t, 20000, 0.1);
    int32_t *ids = (int32_t *)test_alloc(t, 64 * 4);
    for (int i = 0; i < 64; i++) ids[i] = i % 17;
    device_open_dry_run(&dry_run, 2, 0);
    ops_open(&dry_run, 1);
    size_t opened = dry_run.arenas[MEM_WORKSPACE].used;
    every_op(&dry_run, (float *)((uintptr_t)1 << 50), (floatX *)((uintptr_t)1 << 50),
             NULL); // addresses that nothing may touch
    device_open(&real, &dry_run, ".", 0, NULL);
    device_wait_for_ops(&real);
    ops_open(&real, 0);
    every_op(&real, f, x, ids);
    int differ = 0, unused = 0;
    for (int op = 0; op < OP_COUNT; op++) {
        unused += dry_run.rec.ops[op].calls == 0;
        differ += dry_run.rec.ops[op].calls != real.rec.ops[op].calls ||
                  dry_run.rec.ops[op].flops != real.rec.ops[op].flops ||
                  dry_run.rec.ops[op].bytes != real.rec.ops[op].bytes;
    }
    int peaks = dry_run.arenas[MEM_WORKSPACE].peak == real.arenas[MEM_WORKSPACE].peak &&
                real.arenas[MEM_WORKSPACE].used == opened && dry_run.arenas[MEM_WORKSPACE].used == opened;
    CHECK("a dry run of every op touches nothing and counts what computing counts",
          !differ && !unused && peaks && device_flops(&dry_run, 0) > 0,
          "%d ops differ, %d had no dry run, %.0f FLOPs, workspace %zu bytes", differ, unused,
          device_flops(&dry_run, 0), dry_run.arenas[MEM_WORKSPACE].peak);
    double pairs = 0;
    AttentionShape s;
    memset(&s, 0, sizeof s);
    s.B = 1;
    s.NH = 1;
    s.NKV = 1;
    s.HD = 1;
    s.Tk = 9;
    int wrong = 0;
    for (s.Tq = 1; s.Tq < 15; s.Tq++)
        for (int i = 0; i < 40 * 36; i++, pairs = 0) {
            s.q_offset = i % 40 - 20;
            s.q_split = i / 40 % 6 * 3 - 1;
            s.q_gap = i / 240 * 4; // q_split -1 ... 14
            for (int q = 0; q < s.Tq; q++)
                for (int k = 0; k < s.Tk; k++) pairs += test_sees(&s, 0, q, k);
            wrong += pairs != attention_pairs(&s);
            for (int k = 0; k < s.Tk; k++) { // the first query that sees it, Tq: none
                int q = 0;
                while (q < s.Tq && !test_sees(&s, 0, q, k)) q++;
                wrong += min_i64(first_query(&s, k), s.Tq) != q;
            }
        }
    CHECK("attention counts visible pairs exactly, and finds the first query that sees a key", !wrong,
          "%d of %d shapes wrong", wrong, 14 * 40 * 36);
    ops_close(&real);
    device_close(&real);
    device_close(&dry_run);
    test_free_all(t);
}

static const struct {
    const char *name;
    void (*run)(KernelTest *);
} kernel_tests[] = {{"exp", test_exp},
                    {"embedding", test_embedding},
                    {"rmsnorm", test_rmsnorm},
                    {"residual", test_residual_add},
                    {"linear", test_linears},
                    {"few-rows", test_few_rows},
                    {"adapters", test_adapter_ops},
                    {"rope", test_rope},
                    {"attention", test_attention},
                    {"attention-keys", test_attention_chunks},
#if defined(USE_CUDA) && defined(PRECISION_BF16)
                    {"attention-wgmma", test_attention_wgmma},
                    {"attention-wgmma-keys", test_attention_wgmma_chunks},
                    {"attention-wgmma-orders", test_attention_wgmma_orders},
#endif
                    {"swiglu", test_swiglu},
                    {"cross-entropy", test_cross_entropy},
                    {"cross-entropy-slices", test_cross_entropy_slices},
                    {"flat", test_flat},
                    {"sum-pieces", test_sum_pieces},
                    {"adamw", test_adamw},
                    {"fp8", test_fp8},
                    {"muon", test_muon_ops},
                    {"dry-run", test_dry_run}};
enum { KERNEL_TESTS = sizeof kernel_tests / sizeof kernel_tests[0] };

/* Runs one of the tests, or all of them if `only` is NULL. */
static void run_kernel_tests(const char *only) {
    KernelTest t;
    memset(&t, 0, sizeof t);
    const char *seed = getenv("TEST_SEED");
    t.seed = seed ? strtoull(seed, NULL, 10) : 42;
    for (int threads = 1; threads <= TEST_THREADS; threads++) {
        Device dry_run;
        device_open_dry_run(&dry_run, threads, 0);
        dry_run.arenas[MEM_WORKSPACE].peak = 64 << 20;
        device_open(&t.dev[threads], &dry_run, ".", 0, NULL);
        t.dev[threads].on.deterministic = 1;
        device_wait_for_ops(&t.dev[threads]);
        ops_open(&t.dev[threads], 0);
#ifdef USE_CUDA
        t.dev[threads].on.hopper_attention = 0; // the tests of attention by wgmma turn it on
#endif
    }
    for (int i = 0; i < KERNEL_TESTS; i++) {
        if (only && strcmp(only, kernel_tests[i].name)) continue;
        t.random = t.seed; // the test's numbers are the same, whatever other tests draw
        kernel_tests[i].run(&t);
    }
    for (int threads = 1; threads <= TEST_THREADS; threads++) {
        ops_close(&t.dev[threads]);
        device_close(&t.dev[threads]);
    }
}

static void test_kernels(void) { run_kernel_tests(NULL); }
