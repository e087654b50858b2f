/* test_nccl.cu: the emulator of NCCL, against plain computations; and misuse planted, each of which must be found.
 *
 * Ranks are threads, each with its device. What is planted runs in a child, which must end as a failure that names the
 * call. The last line is `N passed, N failed`; the program ends with 1 when a check failed.
 */
#include "test.h"
#include <nccl.h>
#include <pthread.h>

enum { MAX_RANKS = 4, COUNT = 12 };

struct Rank {
    int rank, ranks;
    cudaStream_t stream, second;
    ncclComm_t world;
    uint64_t hash; // what it has seen
};

static struct {
    int ranks, blocking, same_device;
    ncclUniqueId id;
    void (*body)(Rank *);
    pthread_barrier_t barrier;
    Rank of[MAX_RANKS];
} run;

static void nc_must(ncclResult_t e, const char *what) {
    if (e == ncclSuccess) return;
    fprintf(stderr, "test_nccl: %s gave %d (%s): %s\n", what, e, ncclGetErrorString(e), ncclGetLastError(NULL));
    _exit(1);
}
#define NC(call) nc_must(call, #call)

static ncclResult_t settled(ncclComm_t comm) { // until it is in progress no more
    ncclResult_t state = ncclInProgress;
    while (state == ncclInProgress) NC(ncclCommGetAsyncError(comm, &state));
    return state;
}
/* A call on a communicator that may not block: it may be in progress whatever it returned. */
#define DO(call, comm)                                                                                                 \
    do {                                                                                                               \
        ncclResult_t e_ = (call);                                                                                      \
        if (e_ == ncclInProgress || !e_) e_ = settled(comm);                                                           \
        nc_must(e_, #call);                                                                                            \
    } while (0)

static ncclConfig_t config_of(const char *name) {
    ncclConfig_t c = NCCL_CONFIG_INITIALIZER;
    c.blocking = run.blocking;
    c.commName = name;
    return c;
}

static void *rank_main(void *arg) {
    Rank *r = (Rank *)arg;
    MUST(cudaSetDevice(run.same_device ? 0 : r->rank));
    MUST(cudaStreamCreateWithFlags(&r->stream, cudaStreamNonBlocking));
    MUST(cudaStreamCreateWithFlags(&r->second, cudaStreamNonBlocking));
    ncclConfig_t config = config_of("world");
    if (!run.same_device) DO(ncclCommInitRankConfig(&r->world, r->ranks, run.id, r->rank, &config), r->world);
    run.body(r);
    if (r->world) {
        DO(ncclCommFinalize(r->world), r->world);
        NC(ncclCommDestroy(r->world));
    }
    MUST(cudaStreamDestroy(r->stream));
    MUST(cudaStreamDestroy(r->second));
    return NULL;
}

/* `body` on threads; their hashes as one. */
static uint64_t on_ranks(int ranks, int blocking, void (*body)(Rank *), int same_device = 0) {
    pthread_t threads[MAX_RANKS];
    cuda_on_cpu.devices = ranks;
    run.ranks = ranks;
    run.blocking = blocking;
    run.same_device = same_device;
    run.body = body;
    NC(ncclGetUniqueId(&run.id));
    pthread_barrier_init(&run.barrier, NULL, (unsigned)ranks);
    for (int i = 0; i < ranks; i++) {
        run.of[i] = Rank{i, ranks, NULL, NULL, NULL, 1};
        pthread_create(&threads[i], NULL, rank_main, &run.of[i]);
    }
    uint64_t h = 1;
    for (int i = 0; i < ranks; i++) {
        pthread_join(threads[i], NULL);
        h = fingerprint(h, &run.of[i].hash, 8);
    }
    pthread_barrier_destroy(&run.barrier);
    cuda_on_cpu.devices = 1;
    return h;
}

__global__ void scale(float *x, float a, int n) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) x[i] = x[i] * a + 1;
}

// ---------------------------------------------------------------------------
// every collective, type and reduction; in place and not

static double value_of(int rank, size_t i) {
    return (double)((i * 7 + (size_t)rank * 5) % 11);
} // sums are exact in bf16

static void put(void *to, int type, size_t i, double v) {
    if (type == ncclFloat) ((float *)to)[i] = (float)v;
    if (type == ncclBfloat16) ((__nv_bfloat16 *)to)[i] = __float2bfloat16((float)v);
    if (type == ncclInt8 || type == ncclUint8) ((uint8_t *)to)[i] = (uint8_t)v;
    if (type == ncclInt32 || type == ncclUint32) ((uint32_t *)to)[i] = (uint32_t)v;
    if (type == ncclInt64 || type == ncclUint64) ((uint64_t *)to)[i] = (uint64_t)v;
}

static int bad; // elements that are wrong, of all ranks
static void count_bad(Rank *r, const void *device, size_t bytes, const void *want) {
    std::vector<char> h(bytes);
    MUST(cudaMemcpyAsync(h.data(), device, bytes, cudaMemcpyDeviceToHost, r->stream));
    MUST(cudaStreamSynchronize(r->stream));
    if (memcmp(h.data(), want, bytes)) __atomic_add_fetch(&bad, 1, __ATOMIC_RELAXED);
    r->hash = fingerprint(r->hash, h.data(), bytes);
}

static void collectives(Rank *r) {
    static const struct {
        ncclDataType_t type;
        size_t bytes;
    } types[] = {{ncclInt8, 1},  {ncclUint8, 1},  {ncclInt32, 4}, {ncclUint32, 4},
                 {ncclInt64, 8}, {ncclUint64, 8}, {ncclFloat, 4}, {ncclBfloat16, 2}};
    size_t R = (size_t)r->ranks, me = (size_t)r->rank;
    char *send, *recv;
    MUST(cudaMalloc(&send, R * COUNT * 8));
    NC(ncclMemAlloc((void **)&recv, R * COUNT * 8));
    for (auto &t : types)
        for (int in_place = 0; in_place < 2; in_place++)
            for (ncclRedOp_t op : {ncclSum, ncclMax}) {
                std::vector<char> mine(R * COUNT * 8), want(R * COUNT * 8), part(COUNT * 8), sums(R * COUNT * 8),
                    root(R * COUNT * 8);
                for (size_t i = 0; i < R * COUNT; i++) {
                    double all = op == ncclSum ? 0 : -1;
                    for (int k = 0; k < r->ranks; k++)
                        all = op == ncclSum ? all + value_of(k, i) : fmax(all, value_of(k, i));
                    put(mine.data(), t.type, i, value_of(r->rank, i));
                    put(sums.data(), t.type, i, all);
                    put(want.data(), t.type, i, value_of((int)(i / COUNT), i % COUNT));
                    put(root.data(), t.type, i, value_of(r->ranks - 1, i));
                }
                size_t piece = COUNT * t.bytes;
                auto fresh = [&](char *to, const char *from, size_t bytes) {
                    MUST(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, r->stream));
                };
                char *from = in_place ? recv + me * piece : send;
                fresh(from, mine.data(), piece);
                DO(ncclAllGather(from, recv, COUNT, t.type, r->world, r->stream), r->world);
                count_bad(r, recv, R * piece, want.data());
                from = in_place ? recv : send;
                char *to = in_place ? recv + me * piece : recv;
                fresh(from, mine.data(), R * piece);
                DO(ncclReduceScatter(from, to, COUNT, t.type, op, r->world, r->stream), r->world);
                count_bad(r, to, piece, sums.data() + me * piece);
                fresh(from, mine.data(), R * piece);
                DO(ncclAllReduce(from, recv, R * COUNT - 1, t.type, op, r->world, r->stream), r->world);
                count_bad(r, recv, R * piece - t.bytes, sums.data());
                fresh(from, mine.data(), R * piece);
                const void *source = r->rank == r->ranks - 1 || in_place ? from : NULL;
                DO(ncclBroadcast(source, recv, R * COUNT, t.type, r->ranks - 1, r->world, r->stream), r->world);
                count_bad(r, recv, R * piece, root.data());
            }
    MUST(cudaFree(send));
    NC(ncclMemFree(recv));
}

/* Sends around the ring in groups, some to oneself; two collectives in a group; a source that a kernel writes just
 * before. */
static void groups(Rank *r) {
    int next = (r->rank + 1) % r->ranks, before = (r->rank + r->ranks - 1) % r->ranks;
    float *x = device_floats(64, NULL), want[64];
    std::vector<float> h(64);
    for (int round = 0; round < 3; round++) {
        for (size_t i = 0; i < 64; i++) h[i] = (float)r->rank;
        MUST(cudaMemcpyAsync(x, h.data(), 256, cudaMemcpyHostToDevice, r->stream));
        RUN(scale, 1, 64, 0, r->stream, x, 10.0f, 32); // 10 rank + 1
        NC(ncclGroupStart());
        NC(ncclSend(x, 16, ncclFloat, next, r->world, r->stream));
        NC(ncclRecv(x + 32, 16, ncclFloat, before, r->world, r->stream));
        NC(ncclGroupStart());
        NC(ncclSend(x + 16, 8, ncclFloat, r->rank, r->world, r->stream));
        NC(ncclRecv(x + 48, 8, ncclFloat, r->rank, r->world, r->stream));
        NC(ncclGroupEnd());
        DO(ncclGroupEnd(), r->world);
        NC(ncclGroupStart());
        NC(ncclAllReduce(x + 56, x + 56, 4, ncclFloat, ncclSum, r->world, r->stream));
        NC(ncclBroadcast(x + 60, x + 60, 4, ncclFloat, 0, r->world, r->stream));
        DO(ncclGroupEnd(), r->world);
        NC(ncclGroupStart());
        NC(ncclGroupEnd()); // nothing
        for (int i = 0; i < 56; i++) want[i] = 10.0f * (float)(i >= 32 && i < 48 ? before : r->rank) + 1;
        for (int i = 56; i < 64; i++) want[i] = i < 60 ? (float)(r->ranks * (r->ranks - 1) / 2) : 0;
        count_bad(r, x, 256, want);
    }
    ncclComm_t other = NULL;
    ncclConfig_t config = config_of("other");
    DO(ncclCommSplit(r->world, 0, -r->rank, &other, &config), r->world);
    ncclResult_t state = settled(other);
    for (int i = 0; i < 4 && state == ncclSuccess; i++) { // a group of two communicators
        bool first = i % 2;
        NC(ncclGroupStart());
        if (first) NC(ncclAllReduce(x + 8, x + 8, 8, ncclFloat, ncclMax, other, r->stream));
        NC(ncclAllReduce(x, x, 8, ncclFloat, ncclMax, r->world, r->stream));
        if (!first) NC(ncclAllReduce(x + 8, x + 8, 8, ncclFloat, ncclMax, other, r->stream));
        ncclResult_t e = ncclGroupEnd();
        if (e == ncclInProgress)
            e = settled(i % 2 ? other : r->world) ? ncclInternalError : settled(i % 2 ? r->world : other);
        NC(e);
    }
    for (int i = 0; i < 16; i++) want[i] = 10.0f * (float)(r->ranks - 1) + 1;
    count_bad(r, x, 64, want);
    for (size_t i = 0; i < 16; i++) h[i] = 1;
    MUST(cudaMemcpyAsync(x, h.data(), 64, cudaMemcpyHostToDevice, r->stream));
    DO(ncclCommFinalize(other), other);
    NC(ncclCommDestroy(other));
    if (r->rank) DO(ncclRecv(x, 4, ncclFloat, r->rank - 1, r->world, r->stream), r->world); // a chain, not in groups
    if (r->rank + 1 < r->ranks) DO(ncclSend(x, 4, ncclFloat, r->rank + 1, r->world, r->stream), r->world);
    float first[4] = {1, 1, 1, 1};
    count_bad(r, x, 16, first);
    MUST(cudaFree(x));
}

/* Gathers on one stream, reductions on another, of two communicators; kernels between, buffers used in turn. */
static void overlap(Rank *r) {
    enum { N = 32, LAYERS = 6 };
    size_t R = (size_t)r->ranks;
    ncclConfig_t config = config_of("reduce");
    ncclComm_t reduce = NULL;
    DO(ncclCommSplit(r->world, 0, r->rank, &reduce, &config), r->world);
    if (settled(reduce) != ncclSuccess) nc_must(ncclInternalError, "the split");
    float *shard = device_floats(N * LAYERS, NULL), *full[2], *sum = device_floats(N * LAYERS, NULL);
    cudaStream_t compute;
    cudaEvent_t ready[2], freed[2], done[2];
    MUST(cudaStreamCreateWithFlags(&compute, cudaStreamNonBlocking));
    for (int i = 0; i < 2; i++) {
        full[i] = device_floats(N * R, NULL);
        for (cudaEvent_t *e : {&ready[i], &freed[i], &done[i]})
            MUST(cudaEventCreateWithFlags(e, cudaEventDisableTiming));
    }
    std::vector<float> h(N * LAYERS);
    for (size_t i = 0; i < h.size(); i++) h[i] = (float)((i * 3 + (size_t)r->rank) % 17);
    MUST(cudaMemcpyAsync(shard, h.data(), h.size() * 4, cudaMemcpyHostToDevice, r->stream));
    for (int l = 0; l < LAYERS; l++) {
        int b = l % 2;
        MUST(cudaStreamWaitEvent(r->stream, done[b], 0));
        DO(ncclAllGather(shard + l * N, full[b], N, ncclFloat, r->world, r->stream), r->world);
        MUST(cudaEventRecord(ready[b], r->stream));
        MUST(cudaStreamWaitEvent(compute, ready[b], 0));
        RUN(scale, 4, 64, 0, compute, full[b], 2.0f, (int)(N * R));
        MUST(cudaEventRecord(freed[b], compute));
        MUST(cudaStreamWaitEvent(r->second, freed[b], 0));
        DO(ncclReduceScatter(full[b], sum + l * N, N, ncclFloat, ncclSum, reduce, r->second), reduce);
        MUST(cudaEventRecord(done[b], r->second));
    }
    MUST(cudaStreamSynchronize(r->second));
    std::vector<float> want(h.size());
    for (size_t i = 0; i < h.size(); i++) want[i] = (float)R * (2 * h[i] + 1); // each gathered the same
    count_bad(r, sum, want.size() * 4, want.data());
    MUST(cudaStreamSynchronize(r->stream));
    DO(ncclCommFinalize(reduce), reduce);
    NC(ncclCommDestroy(reduce));
    for (int i = 0; i < 2; i++) {
        MUST(cudaFree(full[i]));
        for (cudaEvent_t e : {ready[i], freed[i], done[i]}) MUST(cudaEventDestroy(e));
    }
    MUST(cudaStreamDestroy(compute));
    MUST(cudaFree(shard));
    MUST(cudaFree(sum));
}

static int run_ranks, run_blocking;
static void (*run_body)(Rank *);
static uint64_t run_once() { return on_ranks(run_ranks, run_blocking, run_body); }

static void other_places(Rank *r) {
    float *x = device_floats(64, small);
    void *handle;
    NC(ncclCommRegister(r->world, x, 256, &handle));
    NC(ncclAllReduce(x, x + 16 + 16 * r->rank, 8, ncclFloat, ncclSum, r->world, r->stream));
    MUST(cudaStreamSynchronize(r->stream));
}

/* One communicator's calls are one after the other, whatever their streams: what one gathers the next may send. */
static void two_streams(Rank *r) {
    size_t R = (size_t)r->ranks, me = (size_t)r->rank;
    float *x = device_floats(8 + 8 * R, small);
    std::vector<float> want(8 * R), first(8, (float)(me + 1));
    MUST(cudaMemcpyAsync(x, first.data(), 32, cudaMemcpyHostToDevice, r->stream));
    DO(ncclAllGather(x, x + 8, 8, ncclFloat, r->world, r->stream), r->world);
    DO(ncclAllReduce(x + 8, x + 8, 8 * R, ncclFloat, ncclSum, r->world, r->second), r->world);
    for (size_t i = 0; i < 8 * R; i++) want[i] = (float)(R * (i / 8 + 1));
    MUST(cudaStreamSynchronize(r->second));
    count_bad(r, x + 8, 32 * R, want.data());
    MUST(cudaFree(x));
}

static void test_results() {
    static const struct {
        const char *name;
        void (*body)(Rank *);
    } bodies[] = {{"collectives of every type", collectives},
                  {"sends, receives and groups", groups},
                  {"two communicators on two streams", overlap},
                  {"one communicator on two streams", two_streams}};
    for (auto &b : bodies)
        for (int ranks = 2; ranks <= MAX_RANKS; ranks++) {
            int different = 0;
            bad = 0;
            run_ranks = ranks;
            run_body = b.body;
            for (run_blocking = 0; run_blocking < 2; run_blocking++) different += different_bits(run_once);
            check(!different && !bad, "%s, %d ranks: %d of %d seeds differ, %d results are wrong", b.name, ranks,
                  different, 2 * SEEDS, bad);
        }
    bad = 0;
    on_ranks(1, 0, collectives);
    on_ranks(1, 1, groups);
    check(!bad, "one rank alone: %d results are wrong", bad);
}

static void ring_order(Rank *r) { // in bf16 256 + 1 is 256, but 1 + 1 + 256 is 258
    std::vector<__nv_bfloat16> h(3, __float2bfloat16(r->rank ? 1.0f : 256.0f));
    __nv_bfloat16 *x;
    MUST(cudaMalloc(&x, 6));
    MUST(cudaMemcpyAsync(x, h.data(), 6, cudaMemcpyHostToDevice, r->stream));
    NC(ncclAllReduce(x, x, 3, ncclBfloat16, ncclSum, r->world, r->stream));
    __nv_bfloat16 want[3] = {__float2bfloat16(258.0f), __float2bfloat16(256.0f), __float2bfloat16(256.0f)};
    count_bad(r, x, 6, want);
    MUST(cudaFree(x));
}

// ---------------------------------------------------------------------------
// communicators

static struct { int in_progress, null_child, bad; } seen;
static int which; // of several cases or mistakes

static void splits(Rank *r) { // 4 ranks: pairs in turned order; a group of three, whose fourth rank takes no part
    ncclComm_t pair = NULL, three = NULL;
    ncclConfig_t config = config_of("pair");
    int wrong = 0, rank = -1, count = -1, device = -1;
    ncclResult_t e = ncclCommSplit(r->world, r->rank % 2, -r->rank, &pair, &config);
    if (!run.blocking) {
        wrong += e != ncclInProgress && e != ncclSuccess;
        __atomic_add_fetch(&seen.in_progress, e == ncclInProgress, __ATOMIC_RELAXED);
        __atomic_add_fetch(&seen.null_child, !pair, __ATOMIC_RELAXED);
    }
    wrong += settled(r->world) != ncclSuccess || !pair || settled(pair) != ncclSuccess;
    DO(ncclCommSplit(r->world, r->rank == 1 ? NCCL_SPLIT_NOCOLOR : 5, 0, &three, NULL), r->world);
    wrong += !three != (r->rank == 1);
    NC(ncclCommUserRank(pair, &rank));
    NC(ncclCommCount(pair, &count));
    NC(ncclCommCuDevice(pair, &device));
    wrong += rank != (r->rank < 2) || count != 2 || device != r->rank;
    if (three) {
        wrong += settled(three) != ncclSuccess;
        NC(ncclCommUserRank(three, &rank));
        NC(ncclCommCount(three, &count));
        wrong += rank != (r->rank ? r->rank - 1 : 0) || count != 3;
    }
    float *x = device_floats(4, NULL), mine[4] = {(float)r->rank, 0, 0, 0}, want[4];
    void *handle;
    MUST(cudaMemcpyAsync(x, mine, 16, cudaMemcpyHostToDevice, r->stream));
    NC(ncclCommRegister(pair, x, 16, &handle));
    DO(ncclAllGather(x, x + 2, 1, ncclFloat, pair, r->stream), pair);
    if (three) DO(ncclAllReduce(x, x, 1, ncclFloat, ncclSum, three, r->stream), three);
    want[0] = three ? 5 : (float)r->rank;
    want[1] = 0;
    want[2] = (float)(2 + r->rank % 2);
    want[3] = (float)(r->rank % 2);
    count_bad(r, x, 16, want);
    NC(ncclCommDeregister(pair, handle));
    DO(ncclCommFinalize(pair), pair);
    NC(ncclCommDestroy(pair));
    if (three) NC(ncclCommDestroy(three));
    MUST(cudaFree(x));
    __atomic_add_fetch(&seen.bad, wrong, __ATOMIC_RELAXED);
}

static void progress(Rank *r) { // what may be in progress is, now and then
    float *x = device_floats(8, small);
    for (int i = 0; i < 16; i++) {
        ncclResult_t e = ncclAllReduce(x, x, 8, ncclFloat, ncclMax, r->world, r->stream);
        if (e == ncclInProgress) {
            __atomic_add_fetch(&seen.in_progress, 1, __ATOMIC_RELAXED);
            e = settled(r->world);
        }
        NC(e);
    }
    MUST(cudaStreamSynchronize(r->stream));
    MUST(cudaFree(x));
}

static void duplicates(Rank *r) {
    ncclConfig_t config = config_of("twice");
    ncclComm_t comm = NULL;
    ncclResult_t e = ncclCommInitRankConfig(&comm, r->ranks, run.id, r->rank, &config);
    if (e == ncclInProgress) e = settled(comm);
    if (e != ncclInvalidUsage || !strstr(ncclGetLastError(comm), "Duplicate GPU") || (run.blocking && comm))
        __atomic_add_fetch(&seen.bad, 1, __ATOMIC_RELAXED);
    pthread_barrier_wait(&run.barrier);
    if (comm) NC(ncclCommAbort(comm));
}

static void test_communicators() {
    int version = 0;
    NC(ncclGetVersion(&version));
    check(version == 22809, "version %d", version);
    bad = 0;
    on_ranks(3, 1, ring_order);
    check(!bad, "sums in bf16 round at each hop, and begin at another rank for each piece");
    run_ranks = 4;
    run_body = splits;
    bad = 0;
    seen.bad = 0;
    int different = 0;
    for (run_blocking = 0; run_blocking < 2; run_blocking++) different += different_bits(run_once);
    check(!different && !bad && !seen.bad, "splits by color and key, and no color: %d of %d seeds differ, %d wrong",
          different, 2 * SEEDS, bad + seen.bad);
    check(seen.null_child == 4 * SEEDS && seen.in_progress < 2 * SEEDS,
          "a split that does not block is NULL until its parent is ready, %d times of %d, and yet mostly says "
          "ncclSuccess: %d times it is ncclInProgress",
          seen.null_child, 4 * SEEDS, seen.in_progress);
    seen.in_progress = 0;
    cuda_on_cpu.seed = 3;
    on_ranks(2, 0, progress);
    check(seen.in_progress > 0 && seen.in_progress < 32, "a collective is in progress, %d times of 32",
          seen.in_progress);
    cuda_on_cpu.seed = 1;
    for (int blocking = 0; blocking < 2; blocking++) {
        seen.bad = 0;
        on_ranks(2, blocking, duplicates, 1);
        check(!seen.bad, "two ranks on one device are refused, %s", blocking ? "blocking" : "not blocking");
    }
}

/* The first operation of a kind is in progress until the other rank's host makes its call, however late that is. */
static void first_use(Rank *r) {
    float *x = device_floats(64, small);
    size_t before = 0, after[3] = {}, total;
    int wrong = 0;
    MUST(cudaMemGetInfo(&before, &total));
    for (int i = 0; i < 3; i++) { // a collective, a message, and a collective again
        if (r->rank) {
            pthread_barrier_wait(&run.barrier); // rank 0 has begun
            usleep(20000);
        }
        ncclResult_t e, state = ncclInProgress;
        if (i == 1 && r->rank) e = ncclSend(x, 8, ncclFloat, 0, r->world, r->stream);
        else if (i == 1) e = ncclRecv(x + 32, 8, ncclFloat, 1, r->world, r->stream);
        else e = ncclAllGather(x + 8 * r->rank, x, 8, ncclFloat, r->world, r->stream);
        for (int polls = 0; polls < 20 && !r->rank && i < 2; polls++) {
            NC(ncclCommGetAsyncError(r->world, &state));
            wrong += state != ncclInProgress || e != ncclInProgress;
        }
        for (int polls = 0; polls < 20 && !r->rank && i == 2; polls++) NC(ncclCommGetAsyncError(r->world, &state));
        wrong += i == 2 && !r->rank && state != ncclSuccess; // connected: it waits for nobody
        if (!r->rank) pthread_barrier_wait(&run.barrier);
        if (e == ncclInProgress) NC(settled(r->world));
        MUST(cudaStreamSynchronize(r->stream));
        pthread_barrier_wait(&run.barrier);
        MUST(cudaMemGetInfo(&after[i], &total));
    }
    // 24 channels: their ring takes 12 MiB each, and the 32 of a pair as much each
    wrong += before - after[0] != 12ull * 24 << 20 || after[0] - after[1] != 12ull * 32 << 20 || after[1] != after[2];
    MUST(cudaFree(x));
    __atomic_add_fetch(&seen.bad, wrong, __ATOMIC_RELAXED);
}

/* Communicators that a device has no room for, or that the switch has no multicast slot for. */
static void not_opened(Rank *r) {
    ncclConfig_t config = config_of("too large");
    ncclComm_t comm = NULL;
    static ncclUniqueId id;
    if (!r->rank) NC(ncclGetUniqueId(&id));
    pthread_barrier_wait(&run.barrier);
    ncclResult_t e = ncclCommInitRankConfig(&comm, r->ranks, id, r->rank, &config);
    if (e == ncclInProgress) e = settled(comm);
    int wrong = e != ncclUnhandledCudaError || !strstr(ncclGetLastError(NULL), which ? "NVLS" : "out of memory");
    __atomic_add_fetch(&seen.bad, wrong, __ATOMIC_RELAXED);
    pthread_barrier_wait(&run.barrier);
    if (comm) NC(ncclCommAbort(comm));
}

/* Two communicators finalize in one group: each is in progress until both ranks have come. */
static void close_together(Rank *r) {
    ncclConfig_t config = config_of("second");
    ncclComm_t other = NULL;
    ncclResult_t state;
    static ncclUniqueId id;
    int wrong = 0;
    if (!r->rank) NC(ncclGetUniqueId(&id));
    pthread_barrier_wait(&run.barrier);
    DO(ncclCommInitRankConfig(&other, r->ranks, id, r->rank, &config), other);
    if (r->rank) pthread_barrier_wait(&run.barrier);
    NC(ncclGroupStart());
    NC(ncclCommFinalize(other));
    NC(ncclCommFinalize(r->world));
    ncclResult_t e = ncclGroupEnd();
    wrong += e != ncclInProgress;
    for (int polls = 0; polls < 20 && !r->rank; polls++) {
        NC(ncclCommGetAsyncError(polls % 2 ? r->world : other, &state));
        wrong += state != ncclInProgress;
    }
    if (!r->rank) pthread_barrier_wait(&run.barrier);
    NC(settled(other));
    NC(settled(r->world));
    NC(ncclCommDestroy(other));
    NC(ncclCommDestroy(r->world));
    r->world = NULL;
    __atomic_add_fetch(&seen.bad, wrong, __ATOMIC_RELAXED);
}

static void test_connecting() {
    seen.bad = 0;
    for (cuda_on_cpu.seed = 0; cuda_on_cpu.seed < SEEDS; cuda_on_cpu.seed++) on_ranks(2, 0, first_use);
    check(!seen.bad, "the first collective and the first message wait for the other host and take memory: %d wrong",
          seen.bad);
    cuda_on_cpu.seed = 1;
    seen.bad = 0;
    for (int blocking = 0; blocking < 2; blocking++) {
        which = 0;
        cuda_on_cpu.memory = 300 << 20; // the first of two has room
        on_ranks(2, blocking, not_opened);
        cuda_on_cpu.memory = 80ull << 30;
    }
    check(!seen.bad, "a communicator that has no room in memory does not open: %d wrong", seen.bad);
    seen.bad = 0;
    on_ranks(2, 0, close_together);
    check(!seen.bad, "communicators that close in one group are in progress until all ranks close them: %d wrong",
          seen.bad);
    seen.bad = 0;
    which = 1;
    on_ranks(2, 0, [](Rank *r) {
        pthread_barrier_wait(&run.barrier);
        if (!r->rank) unsetenv("NCCL_NVLS_ENABLE");
        not_opened(r);
    });
    setenv("NCCL_NVLS_ENABLE", "0", 1);
    check(!seen.bad, "without NCCL_NVLS_ENABLE=0 a communicator does not open: %d wrong", seen.bad);
}

static void refusals(Rank *r) {
    float *x = device_floats(8, small);
    int wrong = ncclAllReduce(x, x, 8, ncclFloat64, ncclSum, r->world, r->stream) != ncclInvalidArgument;
    wrong += ncclAllReduce(x, x, 8, ncclFloat, ncclAvg, r->world, r->stream) != ncclInvalidArgument;
    wrong += ncclBroadcast(x, x, 8, ncclFloat, 2, r->world, r->stream) != ncclInvalidArgument;
    wrong += ncclSend(x, 8, ncclFloat, -1, r->world, r->stream) != ncclInvalidArgument;
    wrong += ncclAllReduce(NULL, x, 8, ncclFloat, ncclSum, r->world, r->stream) != ncclInvalidArgument;
    wrong += ncclAllReduce(x, x, 8, ncclFloat, ncclSum, NULL, r->stream) != ncclInvalidArgument;
    NC(ncclGroupStart()); // one that is refused, and the group with it
    wrong += ncclBroadcast(x, x, 8, ncclFloat, 7, r->world, r->stream) != ncclInvalidArgument;
    NC(ncclAllReduce(x, x, r->rank ? 8 : 7, ncclFloat, ncclSum, r->world, r->stream));
    wrong += ncclGroupEnd() != ncclInvalidArgument || cudaStreamQuery(r->stream) != cudaSuccess;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t comm;
    config.minCTAs = 4;
    config.maxCTAs = 2;
    wrong += ncclCommSplit(r->world, 0, 0, &comm, &config) != ncclInvalidArgument ||
             !strstr(ncclGetLastError(r->world), "ncclCommSplit");
    pthread_barrier_wait(&run.barrier); // the next failure is rank 0's: no other rank may have a call left
    if (!r->rank) {
        cuda_on_cpu_fail("ncclAllReduce", (cudaError_t)ncclSystemError, 1);
        wrong += ncclAllReduce(x, x, 8, ncclFloat, ncclSum, r->world, r->stream) != ncclSystemError;
        void *p = &config;
        cuda_on_cpu.memory = 1 << 20;
        wrong += ncclMemAlloc(&p, 2 << 20) != ncclUnhandledCudaError || p;
        cuda_on_cpu.memory = 80ull << 30;
        NC(ncclMemAlloc(&p, 64));
        wrong += cudaFree(p) != cudaErrorInvalidValue || cudaGetLastError() != cudaErrorInvalidValue;
        NC(ncclMemFree(p));
    }
    MUST(cudaFree(x));
    __atomic_add_fetch(&seen.bad, wrong, __ATOMIC_RELAXED);
}

static void traffic(Rank *r) {
    float *x = device_floats(64, small);
    NC(ncclAllGather(x, x + 16, 4, ncclFloat, r->world, r->stream));              // 48 each
    NC(ncclReduceScatter(x, x + 32, 4, ncclFloat, ncclSum, r->world, r->stream)); // 48
    NC(ncclAllReduce(x, x, 16, ncclFloat, ncclSum, r->world, r->stream));         // 96
    NC(ncclBroadcast(x, x, 16, ncclFloat, 2, r->world, r->stream));               // 64, not the root
    NC(ncclGroupStart());
    NC(ncclSend(x, 2, ncclFloat, 3 - r->rank, r->world, r->stream));
    NC(ncclRecv(x + 8, 2, ncclFloat, 3 - r->rank, r->world, r->stream)); // 8
    NC(ncclSend(x, 2, ncclFloat, r->rank, r->world, r->stream));
    NC(ncclRecv(x + 10, 2, ncclFloat, r->rank, r->world, r->stream)); // 0
    NC(ncclGroupEnd());
    MUST(cudaStreamSynchronize(r->stream));
    MUST(cudaFree(x));
}

// ---------------------------------------------------------------------------
// the logical clock

static float times[MAX_RANKS][3];

static void clocks(Rank *r) { // ranks begin at times of their own, and end a collective together
    float *x = device_floats(1024, small);
    cudaEvent_t e[4];
    for (cudaEvent_t &i : e) MUST(cudaEventCreate(&i));
    DO(ncclAllReduce(x, x, 1, ncclInt32, ncclMax, r->world, r->stream), r->world);
    MUST(cudaStreamSynchronize(r->stream)); // all ranks' clocks are one
    MUST(cudaEventRecord(e[0], r->stream));
    RUN(scale, 10 * (1 + (unsigned)r->rank), 1000, 0, r->stream, x, 1.0f, 1024); // 2 + 10, 20, 30 us
    MUST(cudaEventRecord(e[1], r->stream));
    DO(ncclAllReduce(x, x, 1024, ncclFloat, ncclSum, r->world, r->stream), r->world); // 5 + 2/3 · 2 · 4096 · 2e-4 us
    MUST(cudaEventRecord(e[2], r->stream));
    RUN(scale, 1, 1000, 0, r->second, x + 512, 1.0f, 0); // meanwhile
    MUST(cudaEventRecord(e[3], r->second));
    MUST(cudaStreamSynchronize(r->stream));
    MUST(cudaStreamSynchronize(r->second));
    MUST(cudaEventElapsedTime(&times[r->rank][0], e[0], e[1]));
    MUST(cudaEventElapsedTime(&times[r->rank][1], e[1], e[2]));
    MUST(cudaEventElapsedTime(&times[r->rank][2], e[0], e[3]));
    r->hash = fingerprint(r->hash, times[r->rank], sizeof times[0]);
    for (cudaEvent_t i : e) MUST(cudaEventDestroy(i));
    MUST(cudaFree(x));
}

static void test_clock() {
    run_ranks = 3;
    run_body = clocks;
    int different = 0;
    for (run_blocking = 0; run_blocking < 2; run_blocking++) different += different_bits(run_once);
    double moved = 5 + (double)(2 * 2 * 4096 / 3) * 2e-4;
    int right = 1;
    for (int i = 0; i < 3; i++) {
        right &= fabs(times[i][0] * 1e3 - (1 + 2 + 10 * (i + 1))) < 1e-3 &&
                 fabs(times[i][1] * 1e3 - (20 - 10 * i + moved)) < 1e-3;
        right &= fabs(times[i][2] * 1e3 - 8) < 1e-3; // queued 5 us after e[0]
    }
    check(!different && right,
          "a collective ends with its last rank: %g, %g, %g ms; a kernel meanwhile: %g ms; %d of %d seeds differ",
          times[0][1], times[1][1], times[2][1], times[0][2], different, 2 * SEEDS);
}

// ---------------------------------------------------------------------------
// lost ranks

static void lost(
    Rank *r) { // rank 1 is lost at its third call; each polls until a deadline, aborts all it has, and goes on
    float *x = device_floats(16, NULL), h[16] = {1, 2, 3};
    ncclComm_t other = NULL;
    ncclConfig_t config = config_of("other");
    DO(ncclCommSplit(r->world, 0, 0, &other, &config), r->world);
    ncclResult_t state = settled(other);
    MUST(cudaMemcpyAsync(x, h, 64, cudaMemcpyHostToDevice, r->stream));
    for (int i = 0; i < 2; i++)
        DO(ncclAllReduce(x, x, 2, ncclFloat, ncclSum, i ? other : r->world, r->stream), i ? other : r->world);
    MUST(cudaStreamSynchronize(r->stream));
    DO(ncclAllReduce(x, x, 2, ncclFloat, ncclSum, r->world, r->stream), r->world);
    RUN(scale, 1, 16, 0, r->stream, x, 1.0f, 16);
    MUST(cudaMemsetAsync(x + 8, 0, 32, r->second)); // other streams go on
    MUST(cudaStreamSynchronize(r->second));
    int polls = 0, wrong = 0;
    for (; polls < 200 && cudaStreamQuery(r->stream) == cudaErrorNotReady; polls++) {
        NC(ncclCommGetAsyncError(r->world, &state));
        wrong += state != ncclSuccess;
    }
    wrong += polls < 200;
    cudaGetLastError();
    pthread_barrier_wait(&run.barrier);
    NC(ncclCommAbort(r->world));
    NC(ncclCommAbort(other));
    r->world = NULL;
    MUST(cudaStreamSynchronize(r->stream));
    float n = (float)(r->ranks * r->ranks), want[3] = {n * 1 + 1, n * 2 + 1, 4};
    count_bad(r, x, 12, want);
    MUST(cudaFree(x));
    __atomic_add_fetch(&seen.bad, wrong, __ATOMIC_RELAXED);
}

static void remote(Rank *r) { // rank 0 fails at its second call: the others are told
    float *x = device_floats(4, small);
    ncclResult_t state = ncclSuccess;
    DO(ncclAllReduce(x, x, 4, ncclFloat, ncclSum, r->world, r->stream), r->world);
    MUST(cudaStreamSynchronize(r->stream));
    pthread_barrier_wait(&run.barrier); // the first call is over on every rank
    ncclResult_t e = ncclAllReduce(x, x, 4, ncclFloat, ncclSum, r->world, r->stream);
    if (e == ncclInProgress) e = settled(r->world);
    while (r->rank && state != ncclRemoteError) NC(ncclCommGetAsyncError(r->world, &state));
    pthread_barrier_wait(&run.barrier);
    NC(ncclCommGetAsyncError(r->world, &state));
    int wrong = r->rank ? state != ncclRemoteError ||
                              ncclAllReduce(x, x, 4, ncclFloat, ncclSum, r->world, r->stream) != ncclRemoteError
                        : e != ncclSuccess || state != ncclSuccess;
    NC(ncclCommAbort(r->world));
    r->world = NULL;
    MUST(cudaStreamSynchronize(r->stream));
    MUST(cudaFree(x));
    __atomic_add_fetch(&seen.bad, wrong, __ATOMIC_RELAXED);
}

static void test_lost() {
    bad = seen.bad = 0;
    for (cuda_on_cpu.seed = 0; cuda_on_cpu.seed < SEEDS; cuda_on_cpu.seed++)
        for (int blocking = 0; blocking < 2; blocking++) {
            cuda_on_cpu.nccl_lose = "1:3";
            on_ranks(3, blocking, lost);
            cuda_on_cpu.nccl_lose = nullptr;
            cuda_on_cpu.nccl_error = "0:2";
            on_ranks(2, blocking, remote);
            cuda_on_cpu.nccl_error = nullptr;
        }
    cuda_on_cpu.seed = 1;
    check(!bad && !seen.bad,
          "a rank is lost, or fails: the others time out, or are told; abort; streams go on: %d wrong", bad + seen.bad);
}

// ---------------------------------------------------------------------------
// misuse: `with` what, on two ranks (four where it says so)

static void differs(Rank *r) { // the two ranks' calls
    float *x = device_floats(64, small);
    bool one = r->rank == 1;
    if (which == 0) ncclAllReduce(x, x, one ? 9 : 8, ncclFloat, ncclSum, r->world, r->stream);
    if (which == 1) ncclAllReduce(x, x, 8, one ? ncclInt32 : ncclFloat, ncclSum, r->world, r->stream);
    if (which == 2) ncclAllReduce(x, x, 8, ncclFloat, one ? ncclMax : ncclSum, r->world, r->stream);
    if (which == 3) ncclBroadcast(x, x, 8, ncclFloat, r->rank, r->world, r->stream);
    if (which == 4 && one) ncclAllGather(x, x + 8, 8, ncclFloat, r->world, r->stream);
    if (which == 4 && !one) ncclReduceScatter(x, x + 32, 8, ncclFloat, ncclSum, r->world, r->stream);
    if (which == 5 && one) ncclSend(x, 8, ncclFloat, 0, r->world, r->stream);
    if (which == 5 && !one) ncclRecv(x, 7, ncclFloat, 1, r->world, r->stream);
    MUST(cudaStreamSynchronize(r->stream));
}

static void buffers(Rank *r) {
    float *x = device_floats(64, small), host[8];
    static float *of_rank_0;
    bool one = r->rank == 1;
    if (!one) of_rank_0 = x;
    pthread_barrier_wait(&run.barrier);
    if (which == 0) ncclAllReduce(one ? of_rank_0 : x, x, 8, ncclFloat, ncclSum, r->world, r->stream);
    if (which == 1) ncclAllReduce(one ? host : x, x, 8, ncclFloat, ncclSum, r->world, r->stream);
    if (which == 2) ncclAllGather(x, x + 8, 32, ncclFloat, r->world, r->stream);
    if (which == 3) {
        cuda_on_cpu_red_zone(x + 7, 4, r->stream);
        ncclAllReduce(x, x, 8, ncclFloat, ncclSum, r->world, r->stream);
    }
    if (which == 4) ncclAllReduce((char *)x + 2, (char *)x + 2, 8, ncclFloat, ncclSum, r->world, r->stream);
    if (which == 5) ncclAllGather(x, x, 8, ncclFloat, r->world, r->stream); // in place for rank 0 alone
    if (which == 6) ncclReduceScatter(x, x, 8, ncclFloat, ncclSum, r->world, r->stream);
    if (which == 7) ncclAllReduce(x, x + 1, 8, ncclFloat, ncclSum, r->world, r->stream);
    if (which == 8) ncclAllReduce(x, x, 8, ncclFloat, ncclSum, r->world, run.of[0].stream);
    MUST(cudaStreamSynchronize(r->stream));
    pthread_barrier_wait(&run.barrier);
}

static void misuse(Rank *r) {
    float *x = device_floats(64, small);
    void *p, *handle;
    NC(ncclMemAlloc(&p, 256));
    if (which == 0) {
        NC(ncclGroupStart());
        ncclAllReduce(x, x, 8, ncclFloat, ncclSum, r->world, r->stream);
    }
    if (which == 1) ncclGroupEnd();
    if (which == 2) {
        ncclCommFinalize(r->world);
        ncclAllReduce(x, x, 8, ncclFloat, ncclSum, r->world, r->stream);
    }
    if (which == 3) {
        ncclCommAbort(r->world);
        ncclAllReduce(x, x, 8, ncclFloat, ncclSum, r->world, r->stream);
    }
    if (which == 4) {
        ncclAllReduce(x, x, 8, ncclFloat, ncclSum, r->world, r->stream);
        ncclCommDestroy(r->world);
    }
    if (which == 5) ncclSend(x, 8, ncclFloat, r->rank, r->world, r->stream);
    if (which == 6) {
        NC(ncclCommRegister(r->world, p, 256, &handle));
        ncclMemFree(p);
    }
    if (which == 7) {
        MUST(cudaMemsetAsync(p, 0, 4, r->stream));
        ncclMemFree(p);
    }
    if (which == 8) ncclMemFree(x);
    if (which == 9) ncclCommDeregister(r->world, x);
    if (which == 10) {
        ncclUniqueId id = {};
        ncclComm_t comm;
        ncclCommInitRankConfig(&comm, 2, id, r->rank, NULL);
    }
    if (which == 11) {
        ncclComm_t comm;
        ncclCommInitRankConfig(&comm, 2, run.id, r->rank, NULL); // the world's
    }
    if (which == 12) {
        NC(ncclGroupStart());
        NC(ncclAllReduce(x, x, 8, ncclFloat, ncclSum, r->world, r->stream));
        NC(ncclAllReduce(x + 8, x + 8, 8, ncclFloat, ncclSum, r->world, r->second));
        ncclGroupEnd();
    }
    MUST(cudaStreamSynchronize(r->stream));
}

static void impatient(Rank *r) { // not blocking
    float *x = device_floats(64, small);
    ncclConfig_t config = config_of("hasty");
    ncclComm_t comm = NULL;
    if (which == 0) {
        static ncclUniqueId id;
        if (!r->rank) NC(ncclGetUniqueId(&id));
        pthread_barrier_wait(&run.barrier);
        ncclCommInitRankConfig(&comm, 2, id, r->rank, &config);
        ncclAllReduce(x, x, 8, ncclFloat, ncclSum, comm, r->stream);
    }
    if (which == 1) {
        ncclCommSplit(r->world, 0, 0, &comm, &config);
        ncclAllReduce(x, x, 8, ncclFloat, ncclSum, r->world, r->stream);
    }
    if (which == 5) {
        DO(ncclCommSplit(r->world, 0, 0, &comm, &config), r->world);
        settled(comm);
    }
    for (int i = 0; i < 20 && which == 5; i++) {
        ncclAllReduce(x, x, 8, ncclFloat, ncclSum, r->world, r->stream);
        ncclAllReduce(x + 8, x + 8, 8, ncclFloat, ncclSum, comm, r->second);
        settled(r->world);
        settled(comm);
    }
    for (int i = 0; i < 20 && which == 2; i++) ncclAllReduce(x, x, 8, ncclFloat, ncclSum, r->world, r->stream);
    for (int i = 0; i < 20 && which == 3; i++)
        if (ncclAllReduce(x, x, 8, ncclFloat, ncclSum, r->world, r->stream) == ncclInProgress)
            RUN(scale, 1, 8, 0, r->stream, x, 1.0f, 8);
    for (int i = 0; i < 20 && which == 4; i++)
        if (ncclAllReduce(x, x, 8, ncclFloat, ncclSum, r->world, r->stream) == ncclInProgress)
            cudaStreamSynchronize(r->stream);
    MUST(cudaStreamSynchronize(r->stream));
}

/* Connects both ranks of a communicator, in one order, for collectives and for messages. */
static void connect_both(Rank *r, ncclComm_t comm, float *x) {
    NC(ncclAllReduce(x, x, 8, ncclFloat, ncclSum, comm, r->stream));
    if (r->rank) NC(ncclSend(x, 8, ncclFloat, 0, comm, r->stream));
    else NC(ncclRecv(x, 8, ncclFloat, 1, comm, r->stream));
    MUST(cudaStreamSynchronize(r->stream));
}

static void two_orders(
    Rank *r) { // 0: two collectives; 1: a send and a collective; 2: the second rank is late; 3: in a group
    float *x = device_floats(64, small);
    ncclComm_t other;
    ncclConfig_t config = config_of("other");
    NC(ncclCommSplit(r->world, 0, 0, &other, &config));
    connect_both(r, r->world, x);
    connect_both(r, other, x);
    if (which == 3) NC(ncclGroupStart()); // communicators are launched one after the other
    for (int i = 0; i < 2; i++) {
        bool on_other = i == (r->rank == 1);
        if (on_other && which == 1 && r->rank) NC(ncclSend(x, 8, ncclFloat, 0, other, r->second));
        else if (on_other && which == 1) NC(ncclRecv(x, 8, ncclFloat, 1, other, r->second));
        else
            NC(ncclAllReduce(x + 8 * i, x + 8 * i, 8, ncclFloat, ncclSum, on_other ? other : r->world,
                             on_other ? r->second : r->stream));
        if (which == 2 && r->rank) usleep(20000);
    }
    if (which == 3) NC(ncclGroupEnd());
    MUST(cudaStreamSynchronize(r->stream));
    MUST(cudaStreamSynchronize(r->second));
    MUST(cudaFree(x));
    NC(ncclCommDestroy(other));
}

static void send_first(Rank *r) { // 0: both ranks; 1: a send and a collective of one communicator; 2: on another
                                  // stream; 3: right, in a group
    float *x = device_floats(64, small);
    cudaStream_t other = which == 2 ? r->second : r->stream;
    connect_both(r, r->world, x);
    if (which == 3) NC(ncclGroupStart());
    if (which != 1 || r->rank) NC(ncclSend(x, 8, ncclFloat, !r->rank, r->world, other));
    if (which == 1) NC(ncclAllReduce(x + 16, x + 16, 8, ncclFloat, ncclSum, r->world, r->stream));
    if (which != 1 || !r->rank) NC(ncclRecv(x + 8, 8, ncclFloat, !r->rank, r->world, r->stream));
    if (which == 3) NC(ncclGroupEnd());
    MUST(cudaStreamSynchronize(r->stream));
    MUST(cudaStreamSynchronize(r->second));
    MUST(cudaFree(x));
}

static void unordered(
    Rank *r) { // in one order, but nothing says that the first is over: NCCL_LAUNCH_ORDER_IMPLICIT is not set
    float *x = device_floats(64, small);
    ncclComm_t other;
    ncclConfig_t config = config_of("other");
    NC(ncclCommSplit(r->world, 0, 0, &other, &config));
    for (int i = 0; i < 8; i++) {
        NC(ncclAllReduce(x, x, 8, ncclFloat, ncclSum, r->world, r->stream));
        if (which) MUST(cudaStreamSynchronize(r->stream)); // right
        NC(ncclAllReduce(x + 8, x + 8, 8, ncclFloat, ncclSum, other, r->second));
        if (which) MUST(cudaStreamSynchronize(r->second));
    }
    MUST(cudaStreamSynchronize(r->stream));
    MUST(cudaStreamSynchronize(r->second));
    MUST(cudaFree(x));
    NC(ncclCommDestroy(other));
}

static void first_launch(Rank *r) { // behind a collective that waits for the other rank
    float *x = device_floats(64, small);
    {
        std::unique_lock<std::mutex> lock(emu::machine().lock);
        emu::machine().eager = false;
        emu::machine().loaded.clear();
    }
    NC(ncclAllReduce(x, x, 8, ncclFloat, ncclSum, r->world, r->stream));
    RUN(scale, 1, 8, 0, r->second, x + 8, 1.0f, 8);
    MUST(cudaStreamSynchronize(r->stream));
    MUST(cudaStreamSynchronize(r->second));
    MUST(cudaFree(x));
}

static void hasty_kernel(Rank *r) { // another stream reads what is gathered, and does not wait
    float *x = device_floats(64, [](size_t) { return 0.0f; }), back;
    std::vector<float> h(8, 1.0f);
    MUST(cudaMemcpyAsync(x, h.data(), 32, cudaMemcpyHostToDevice, r->stream));
    NC(ncclAllGather(x, x + 8, 8, ncclFloat, r->world, r->stream));
    RUN(scale, 1, 16, 0, r->second, x + 8, 3.0f, 16);
    pthread_barrier_wait(&run.barrier); // both ranks have queued all: the seed alone decides what runs first
    MUST(cudaStreamSynchronize(r->stream));
    MUST(cudaStreamSynchronize(r->second));
    MUST(cudaMemcpyAsync(&back, x + 8, 4, cudaMemcpyDeviceToHost, r->stream));
    r->hash = fingerprint(r->hash, &back, 4);
    MUST(cudaFree(x));
}

#define MISUSE(title, texts, body, number, blocking)                                                                   \
    planted(title, texts, [] {                                                                                         \
        which = number;                                                                                                \
        on_ranks(2, blocking, body);                                                                                   \
    })

static void planted_arguments() {
    MISUSE(
        "counts differ",
        "ncclAllReduce (9 of float, sum) on communicator 'world', rank 1|ncclAllReduce (8 of float, sum)|rank 0|agree",
        differs, 0, 1);
    MISUSE("types differ", "(8 of int32, sum)|(8 of float, sum)|agree", differs, 1, 1);
    MISUSE("reductions differ", "(8 of float, max)|(8 of float, sum)|agree", differs, 2, 1);
    MISUSE("roots differ", "root 0|root 1|agree", differs, 3, 1);
    MISUSE("calls differ", "ncclAllGather|ncclReduceScatter|agree", differs, 4, 1);
    MISUSE("a send and its receive differ", "ncclSend (8 of float, peer 0)|ncclRecv (7 of float, peer 1)|agree",
           differs, 5, 1);
}

static void planted_buffers() {
    MISUSE("another device's memory", "the source of ncclAllReduce|rank 1|memory of device 0, used by device 1",
           buffers, 0, 1);
    MISUSE("host memory", "the source of ncclAllReduce|rank 1|should be device memory|pageable", buffers, 1, 1);
    MISUSE("over an allocation's end",
           "the destination of ncclAllGather|of 256 bytes begins at byte 32 of an allocation of 256", buffers, 2, 1);
    MISUSE("over a red zone", "the source of ncclAllReduce|red zone at its byte 28", buffers, 3, 1);
    MISUSE("misaligned", "ncclAllReduce|not aligned to the 4 bytes", buffers, 4, 1);
    MISUSE("AllGather in place at the wrong place",
           "ncclAllGather|rank 1|begins at byte 0 of the destination, in place it is 32", buffers, 5, 1);
    MISUSE("ReduceScatter in place at the wrong place",
           "ncclReduceScatter|rank 1|begins at byte 0 of the destination, in place it is -32", buffers, 6, 1);
    MISUSE("buffers that overlap", "ncclAllReduce|begins at byte -4 of the destination, in place it is 0", buffers, 7,
           1);
    MISUSE("another device's stream", "ncclAllReduce|rank 1|its stream is none of device 1", buffers, 8, 1);
}

static void planted_misuse() {
    MISUSE("a group that is not ended", "ncclGroupEnd is missing", misuse, 0, 1);
    MISUSE("a group that was not started", "ncclGroupEnd without ncclGroupStart", misuse, 1, 1);
    MISUSE("a call after ncclCommFinalize", "ncclAllReduce|after ncclCommFinalize", misuse, 2, 1);
    MISUSE("a call after ncclCommAbort", "ncclAllReduce: no such communicator", misuse, 3, 1);
    MISUSE("ncclCommDestroy with a call in flight", "ncclCommDestroy|ncclAllReduce (8 of float, sum)|in flight", misuse,
           4, 1);
    MISUSE("a send to oneself alone", "ncclSend|to itself", misuse, 5, 1);
    MISUSE("memory is freed that is registered", "ncclMemFree of memory that is registered", misuse, 6, 1);
    MISUSE("memory is freed while operations are queued", "ncclMemFree while operations", misuse, 7, 1);
    MISUSE("memory of cudaMalloc is given to ncclMemFree", "ncclMemFree|none of ncclMemAlloc's", misuse, 8, 1);
    MISUSE("a handle that is none", "ncclCommDeregister|no such handle", misuse, 9, 1);
    MISUSE("an id from nowhere", "not ncclGetUniqueId's", misuse, 10, 1);
    MISUSE("an id used twice", "another call with this id", misuse, 11, 1);
    MISUSE("two streams for one communicator in a group", "its group has another stream", misuse, 12, 1);
}

static void planted_impatience() {
    MISUSE("a communicator is used before it is ready",
           "ncclAllReduce on communicator 'hasty'|ncclCommInitRankConfig is still in progress", impatient, 0, 0);
    MISUSE("a parent is used before its split is over",
           "ncclAllReduce on communicator 'world'|ncclCommSplit is still in progress", impatient, 1, 0);
    MISUSE("a second collective while the first is in progress",
           "ncclAllReduce on communicator 'world'|while ncclAllReduce is still in progress", impatient, 2, 0);
    MISUSE(
        "a kernel behind a collective that is in progress",
        "a stream is used again while ncclAllReduce (8 of float, sum) on communicator 'world', rank |still in progress",
        impatient, 3, 0);
    MISUSE(
        "a stream is waited for while a collective is in progress",
        "a stream is used again while ncclAllReduce (8 of float, sum) on communicator 'world', rank |still in progress",
        impatient, 4, 0);
    MISUSE("a kernel's first launch behind a collective, without CUDA_MODULE_LOADING=EAGER",
           "kernel scale|launched for the first time while a collective is queued|CUDA_MODULE_LOADING=EAGER",
           first_launch, 0, 1);
    MISUSE("another communicator's call while the first is in progress",
           "two ranks issue in two orders|'world'|'hasty'", impatient, 5, 0);
}

static void planted_orders() {
    static const char *const orders[] = {"two collectives in two orders", "a send and a collective in two orders",
                                         "two orders, of which one rank is late", "two orders in a group"};
    static int order;
    for (order = 0; order < 4; order++)
        planted(orders[order], "two ranks issue in two orders|'world', rank |'other', rank |But |what meets", [] {
            which = order;
            on_ranks(2, 1, two_orders);
        });
    MISUSE("registered memory at other places",
           "ncclAllReduce|rank 0|rank 1|at bytes 64 and 128 of what was registered", other_places, 0, 1);
    static const char *const sends[] = {"two ranks that each send before they receive",
                                        "a send and a collective of one communicator in two orders",
                                        "two sends on streams of their own"};
    static int first;
    for (first = 0; first < 3; first++)
        planted(sends[first], "two ranks issue in two orders|'world', rank |ncclSend|But |what meets", [] {
            which = first;
            on_ranks(2, 1, send_first);
        });
    which = 3;
    on_ranks(2, 1, send_first);
    check(1, "in a group they may");
}

static void test_planted() {
    printf("misuse\n");
    planted_arguments();
    planted_buffers();
    planted_misuse();
    planted_impatience();
    planted_orders();
    MISUSE(
        "two communicators in flight without NCCL_LAUNCH_ORDER_IMPLICIT",
        "ncclAllReduce|ncclAllReduce|in flight at once: set NCCL_LAUNCH_ORDER_IMPLICIT=1",
        [](Rank *r) { unordered(r); }, unsetenv("NCCL_LAUNCH_ORDER_IMPLICIT"), 1);
    unsetenv("NCCL_LAUNCH_ORDER_IMPLICIT");
    which = 1;
    on_ranks(2, 1, unordered);
    setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 1);
    check(1, "one after the other they need it not");
    run_ranks = 2;
    run_blocking = 1;
    run_body = hasty_kernel;
    int different = 0; // the ranks' threads take the seed's numbers in any order, so that a seed alone proves nothing
    for (int i = 0; i < 8 && !different; i++) different = different_bits(run_once);
    check(different, "a kernel that does not wait for a gather: %d of %d seeds differ", different, SEEDS);
}

int main(void) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 1);
    setenv("CUDA_MODULE_LOADING", "EAGER", 1);
    setenv("NCCL_NVLS_ENABLE", "0", 1);
    test_results();
    test_communicators();
    test_connecting();
    seen.bad = 0;
    on_ranks(2, 1, refusals);
    check(!seen.bad, "what NCCL refuses, and what a test injects: %d wrong", seen.bad);
    uint64_t before = cuda_on_cpu_nccl_bytes("world"), of_2 = cuda_on_cpu_nccl_bytes("world", 2);
    on_ranks(4, 1, traffic);
    check(cuda_on_cpu_nccl_bytes("world") - before == 4 * (48 + 48 + 96 + 64 + 8) - 64 &&
              cuda_on_cpu_nccl_bytes("world", 2) - of_2 == 200 && !cuda_on_cpu_nccl_bytes("none"),
          "bytes received: %llu, by rank 2 %llu", (unsigned long long)(cuda_on_cpu_nccl_bytes("world") - before),
          (unsigned long long)(cuda_on_cpu_nccl_bytes("world", 2) - of_2));
    test_clock();
    test_lost();
    test_planted();
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
