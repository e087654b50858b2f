/* page_cpu.h: memory and times on a CPU, for page.h.
 *
 * The roofline is measured in the same run as the versions. It is the longer of two times: that of the call's
 * arithmetic at the processor's peak of FMAs, and that of a loop that reads, writes and updates the same bytes of the
 * same buffers and does nothing else. So a case that fits a cache is compared with that cache, not with memory. A
 * processor that adds in other units than its FMAs can exceed the first, and a version that reads a cache better than
 * this loop the second. */
#ifndef PAGE_CPU_H
#define PAGE_CPU_H
#include "../../lib/ops/cpu/vectors.h" // defines: vfloat, vfma, vload, vstore, vstream

#define FOR_CPU(...) __VA_ARGS__ // sizes that take a reasonable time on a CPU
#define FOR_GPU(...)
static const double FLOPS_UNIT = 1e9;
static const char *const COLUMNS[3] = {"GFLOP/s", "of the roofline", "roofline"};

static void *page_alloc(size_t bytes) { // large pages where there are some, as in training
    size_t size = (bytes + (2 << 20)) & ~(size_t)((2 << 20) - 1);
    void *data = aligned_alloc(2 << 20, size);
    if (!data) run_failure("out of memory: a page needs %zu bytes", bytes);
    return memset(data, 0, size);
}
static void page_free(void *data) { free(data); }
static void page_copy(void *to, const void *from, size_t bytes) { memcpy(to, from, bytes); }
static void page_wait(const OpStream *on) { (void)on; }

/* FLOPs done from registers by one thread: ten chains, enough for two units with a latency of four. of_matmul: with the
 * instructions of a matmul's inner loop. */
enum { PEAK_CHAINS = 10, PEAK_TURNS = 20000 };
static __attribute__((noinline)) double peak_turns(int of_matmul) {
    vfloat sum[PEAK_CHAINS] = ZERO, a = vrounded(vsplat(0.5f)), b = vrounded(vsplat(1.0f));
    int by_pairs = 0;                 // an instruction multiplies and adds two bf16 in each lane
    (void)of_matmul;                  // without such an instruction a matmul has FMAs
    __asm__ volatile("" : "+m"(sum)); // equal chains, known to be equal, would be computed once
#if defined(PRECISION_BF16) && defined(__AVX512BF16__)
    by_pairs = of_matmul;
    for (int k = 0; k < PEAK_TURNS && by_pairs; k++) {
#pragma GCC unroll 10
        for (int i = 0; i < PEAK_CHAINS; i++) sum[i] = _mm512_dpbf16_ps(sum[i], (__m512bh)a, (__m512bh)b);
    }
#endif
    for (int k = 0; k < PEAK_TURNS && !by_pairs; k++) {
#pragma GCC unroll 10
        for (int i = 0; i < PEAK_CHAINS; i++) sum[i] = vfma(sum[i], a, b);
    }
    __asm__ volatile("" : : "m"(sum));
    return (by_pairs ? 4.0 : 2.0) * (int)VL * PEAK_CHAINS * PEAK_TURNS;
}
static double peak_rate(int threads, int of_matmul) { // FLOP/s of all threads together, starting together
    double flops = 0, start = 0;
#pragma omp parallel num_threads(threads) reduction(+ : flops)
    {
#pragma omp barrier
#pragma omp master
        start = omp_get_wtime();
        flops += peak_turns(of_matmul);
    }
    return flops / (omp_get_wtime() - start);
}

static double peaks[2]; // FLOP/s of FMAs and of matmul instructions: the fastest while versions were timed

enum { STREAMS = 4 };

/* Reads, writes or updates all tensors, a part by each thread, at STREAMS places at once, since one sequential
 * stream alone does not use all of a cache's bandwidth. past_caches: writes leave the caches alone. */
static void stream(Case *c, int past_caches) {
#pragma omp parallel for num_threads(c->on->threads)
    for (int64_t thread = 0; thread < c->on->threads; thread++)
        for (const PageTensor *t = c->tensors; t < c->tensors + c->num_tensors; t++) {
            int64_t lines = t->touched / 64 / STREAMS, end = lines * (thread + 1) / c->on->threads * 64;
            vint sum[STREAMS] = {ZERO}, x; // integers: no denormals, which are slow
            for (int64_t i = lines * thread / c->on->threads * 64; i < end; i += (int64_t)sizeof x)
#pragma GCC unroll 4
                for (int s = 0; s < STREAMS; s++) {
                    float *at = (float *)(void *)((char *)t->data + s * lines * 64 + i);
                    memcpy(&x, at, t->role == READ ? sizeof x : 0);
                    if (t->role == READ) sum[s] ^= x;
                    else if (t->role == UPDATED) vstore(at, vrounded(vload(at)));
                    else if (past_caches) vstream(at, vsplat(0));
                    else vstore(at, vsplat(0));
                }
            __asm__ volatile("" : : "m"(sum));
        }
}

/* One turn: untimed calls for about 5 ms, after which times no longer depend on what ran before; then as many calls as
 * fit in a millisecond, each timed by itself, so that restoring tensors between two calls is not counted. */
static void take_turn(Case *c, Times *t, const Version *version, int past_caches, double estimate) {
    if (t->n && t->total > 0.6) return; // 0.6 s of a slow version are enough
    int calls = (int)fmin(32, fmax(1, 1e-3 / estimate)), warm = estimate > 0.05 ? 0 : (int)fmax(1, 5e-3 / estimate);
    double spent = 0;
    for (int i = -warm; i < calls; i++) {
        case_restore(c, 0);
        double start = omp_get_wtime();
        if (version) version->run(c);
        else stream(c, past_caches);
        if (i >= 0) spent += omp_get_wtime() - start;
    }
    t->at[t->n++] = spent / calls;
    t->total += spent;
}

/* Medians over rounds. Each round begins with another version. */
static Roofline case_times(Case *c, const Version *versions, const double *estimate, int rounds, double *seconds) {
    Times *t = new_array(Times, PAGE_VERSIONS + 2), *streams = t + PAGE_VERSIONS;
    int count = 0;
    while (count < PAGE_VERSIONS && versions[count].run) count++;
    for (int r = 0; r < rounds; r++) {
        for (int i = 0; i < 2; i++) {
            take_turn(c, &streams[i], NULL, i, r ? streams[i].at[r - 1] : 1e-3);
            peaks[i] = fmax(peaks[i], peak_rate(c->on->threads, i));
        }
        for (int i = r; i < r + count; i++)
            if (estimate[i % count] > 0) take_turn(c, &t[i % count], &versions[i % count], 0, estimate[i % count]);
    }
    for (int v = 0; v < PAGE_VERSIONS; v++) seconds[v] = times_median(&t[v]);
    Roofline roof = {fmin(times_median(&streams[0]), times_median(&streams[1])),
                     2 * c->slots / peaks[0] + c->matmul_flops / peaks[1]};
    free(t);
    return roof;
}

static void page_open(OpStream *on, PageOptions *o) {
    double first[2] = {0, 0}; // of a cold processor, which may be faster than it remains
    if (o->check) return;
    for (int i = 0; i < 20; i++) first[i % 2] = fmax(first[i % 2], peak_rate(on->threads, i % 2) / 1e9);
    printf("\n%d threads, %d rounds, medians; peaks from registers: %.0f GFLOP/s in FMAs, %.0f in %s matmuls.\n",
           on->threads, o->rounds, first[0], first[1], PRECISION_NAME);
}

#endif
