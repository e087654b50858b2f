/* test_streams.h: streams, events, the logical clock, two devices, and ranks that are threads. What events order comes
 * in that order, under every seed. */
#ifndef TEST_STREAMS_H
#define TEST_STREAMS_H
#include "test.h"
#include <pthread.h>

__global__ void add(float *y, const float *x, float a, int n) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) y[i] = y[i] * a + x[i];
}

/* Two streams hand a buffer to and fro; `waits` 0 leaves out one wait. */
static uint64_t ping_pong(int waits) {
    enum { N = 300 };
    float *x = device_floats(N, small), *y = device_floats(N, small), *pinned;
    cudaStream_t s[2];
    cudaEvent_t e;
    MUST(cudaStreamCreateWithFlags(&s[0], cudaStreamNonBlocking));
    MUST(cudaStreamCreateWithFlags(&s[1], cudaStreamNonBlocking));
    MUST(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
    MUST(cudaMallocHost(&pinned, N * 4));
    for (int i = 0; i < 6; i++) {
        RUN(add, 3, 128, 0, s[i % 2], y, x, 0.5f + i, N);
        MUST(cudaEventRecord(e, s[i % 2]));
        if (waits || i != 3) MUST(cudaStreamWaitEvent(s[(i + 1) % 2], e, 0));
    }
    MUST(cudaMemcpyAsync(pinned, y, N * 4, cudaMemcpyDeviceToHost, s[0]));
    MUST(cudaStreamSynchronize(s[0]));
    uint64_t h = fingerprint(1, pinned, N * 4);
    MUST(cudaStreamDestroy(s[0]));
    MUST(cudaStreamDestroy(s[1]));
    MUST(cudaEventDestroy(e));
    MUST(cudaFree(x));
    MUST(cudaFree(y));
    MUST(cudaFreeHost(pinned));
    return h;
}

/* The default stream and one that waits for it, without events; and red zones that come and go in a stream's order. */
static uint64_t default_stream_and_zones() {
    float *x = device_floats(128, small), *y = device_floats(128, small);
    cudaStream_t s;
    MUST(cudaStreamCreateWithFlags(&s, cudaStreamDefault));
    for (int i = 0; i < 6; i++) RUN(add, 1, 128, 0, i % 3 ? s : 0, y, x, 0.5f + (float)i, 128);
    cuda_on_cpu_red_zone(x + 64, 256, s);
    RUN(add, 1, 64, 0, s, y, x, 2.0f, 64);
    cuda_on_cpu_forget_zones(x, 512, s);
    MUST(cudaMemsetAsync(x, 0, 512, s));
    RUN(add, 1, 128, 0, 0, y, x, 3.0f, 128);
    std::vector<float> h = host_floats(y, 128);
    MUST(cudaStreamDestroy(s));
    MUST(cudaFree(x));
    MUST(cudaFree(y));
    return fingerprint(1, h.data(), 512);
}

static void add_one(void *p) { ++*(int *)p; }
static void call_api(void *p) { *(cudaError_t *)p = cudaDeviceSynchronize(); }

static void test_streams() {
    check(!different_bits([] { return ping_pong(1); }),
          "two streams that wait for each other: %d seeds give equal bits", SEEDS);
    check(!different_bits(default_stream_and_zones),
          "the default stream and one that waits for it, red zones in their order: %d seeds give equal bits", SEEDS);
    cudaStream_t s;
    cudaEvent_t from, to;
    float *pinned, *d = device_floats(4, nullptr), ms = -1, back[4] = {0};
    int calls = 0;
    MUST(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    MUST(cudaEventCreateWithFlags(&from, cudaEventDefault));
    MUST(cudaEventCreateWithFlags(&to, cudaEventDefault));
    MUST(cudaHostAlloc(&pinned, 16, cudaHostAllocDefault));
    MUST(cudaEventRecord(from, s));
    MUST(cudaMemsetAsync(d, 0, 16, s));
    MUST(cudaLaunchHostFunc(s, add_one, &calls));
    MUST(cudaEventRecord(to, s));
    check(cudaEventElapsedTime(&ms, from, to) == cudaErrorNotReady && cudaGetLastError() == cudaErrorNotReady && !calls,
          "nothing runs before it is waited for");
    int polls = 0;
    while (cudaEventQuery(to) == cudaErrorNotReady) polls++;
    check(cudaGetLastError() == cudaErrorNotReady && calls == 1 && polls, "an event is reached by asking for it");
    MUST(cudaEventElapsedTime(&ms, from, to));
    check(fabsf(ms - 0.005f - 0.0000016f) < 1e-6f && cudaStreamQuery(s) == cudaSuccess, "time between events: %g ms",
          ms);
    float pageable[4] = {1, 2, 3, 4};
    for (int i = 0; i < 4; i++) pinned[i] = 5;
    MUST(cudaMemcpyAsync(d, pageable, 8, cudaMemcpyHostToDevice, s));
    MUST(cudaMemcpyAsync(d + 2, pinned, 8, cudaMemcpyHostToDevice, s));
    pageable[0] = 100;
    pinned[0] = 6;
    MUST(cudaMemcpyAsync(back, d, 16, cudaMemcpyDeviceToHost, s)); // pageable: done when it returns
    check(back[0] == 1 && back[1] == 2 && back[2] == 6 && back[3] == 5,
          "a pageable source is read at the call, a pinned one later");
    MUST(cudaMemcpy2DAsync(d, 4, pageable + 1, 8, 4, 2, cudaMemcpyHostToDevice, s));
    MUST(cudaMemcpy2DAsync(back, 8, d, 4, 4, 2, cudaMemcpyDefault, s));
    check(back[0] == 2 && back[1] == 2 && back[2] == 4, "copies of rows");
    MUST(cudaEventRecord(to, s));
    MUST(cudaEventSynchronize(to));
    cudaError_t inside = cudaSuccess;
    MUST(cudaLaunchHostFunc(s, call_api, &inside));
    MUST(cudaStreamSynchronize(s));
    check(inside == cudaErrorNotPermitted, "a host function may not call the API");
    MUST(cudaEventDestroy(from));
    check(cudaEventRecord(from, s) == cudaErrorInvalidResourceHandle &&
              cudaGetLastError() == cudaErrorInvalidResourceHandle,
          "an event that is gone is refused");
    MUST(cudaFree(d));
    MUST(cudaFreeHost(pinned));
    MUST(cudaStreamDestroy(s));
    MUST(cudaEventDestroy(to));
}

/* A trace by the logical clock, us: two streams that run side by side, then one that waits for the other. */
static struct { float wide, narrow, copied, waited, host; } trace;

static uint64_t trace_of_two_streams() {
    float *x = device_floats(4096, small), *y = device_floats(4096, small), *z = device_floats(4096, small), *pinned;
    cudaStream_t s[2];
    cudaEvent_t e[8];
    int least = 0, greatest = 0, priority = 0;
    MUST(cudaMallocHost(&pinned, 16384));
    MUST(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    MUST(cudaStreamCreateWithPriority(&s[0], cudaStreamNonBlocking, greatest - 3));
    MUST(cudaStreamCreateWithPriority(&s[1], cudaStreamNonBlocking, least));
    MUST(cudaStreamGetPriority(s[0], &priority));
    if (least != 0 || greatest != -5 || priority != -5) return 0;
    for (cudaEvent_t &i : e) MUST(cudaEventCreate(&i));
    MUST(cudaEventRecord(e[0], s[0]));
    RUN(add, 40, 1024, 0, s[0], y, x, 0.5f, 4096); // 2 + 40.96
    MUST(cudaEventRecord(e[1], s[0]));
    MUST(cudaEventRecord(e[2], s[1]));
    RUN(add, 32, 128, 0, s[1], z, x, 2.0f, 4096); // 2 + 4.096, at the same time
    MUST(cudaEventRecord(e[3], s[1]));
    MUST(cudaStreamWaitEvent(s[1], e[1], 0));
    MUST(cudaMemcpyAsync(pinned, y, 16384, cudaMemcpyDeviceToHost, s[1])); // 2 + 1.6384, behind s[0]
    MUST(cudaEventRecord(e[4], s[1]));
    while (cudaEventQuery(e[4]) == cudaErrorNotReady) {}
    cudaGetLastError();                // perhaps that it was asked too early
    MUST(cudaEventRecord(e[5], s[0])); // the host was at e[4]
    MUST(cudaStreamSynchronize(s[0]));
    MUST(cudaEventElapsedTime(&trace.wide, e[0], e[1]));
    MUST(cudaEventElapsedTime(&trace.narrow, e[2], e[3]));
    MUST(cudaEventElapsedTime(&trace.waited, e[0], e[3]));
    MUST(cudaEventElapsedTime(&trace.copied, e[1], e[4]));
    MUST(cudaEventElapsedTime(&trace.host, e[4], e[5]));
    uint64_t h = fingerprint(1, pinned, 16384);
    for (cudaEvent_t i : e) MUST(cudaEventDestroy(i));
    MUST(cudaStreamDestroy(s[0]));
    MUST(cudaStreamDestroy(s[1]));
    MUST(cudaFree(x));
    MUST(cudaFree(y));
    MUST(cudaFree(z));
    MUST(cudaFreeHost(pinned));
    return fingerprint(h, &trace, sizeof trace);
}

static void test_clock() {
    check(!different_bits(trace_of_two_streams), "a trace of two streams: %d seeds give equal times", SEEDS);
    auto is = [](float ms, double us) { return fabs(ms * 1e3 - us) < 1e-3; };
    check(is(trace.wide, 42.96 + 1), "a kernel of 40,960 threads and the call before it: %g ms", trace.wide);
    check(is(trace.narrow, 6.096 + 1) && is(trace.waited, 10.096),
          "one that waits for nothing runs meanwhile: %g ms, ends %g ms after the first began", trace.narrow,
          trace.waited);
    check(is(trace.copied, 3.6384), "a copy that waits for an event ends %g ms after it", trace.copied);
    check(is(trace.host, 1), "what the host queues after it has waited comes %g ms later", trace.host);
}

/* Two devices, copies between all places, and what may be used where. */
static uint64_t places() {
    cuda_on_cpu.devices = 2;
    float *p[4], back[16], zeros[16] = {0}; // device 0, device 1, mapped, pinned
    for (int i = 0; i < 2; i++) {
        MUST(cudaSetDevice(i));
        p[i] = device_floats(16, nullptr);
    }
    MUST(cudaSetDevice(0));
    MUST(cudaHostAlloc(&p[2], 64, cudaHostAllocMapped));
    MUST(cudaHostAlloc(&p[3], 64, cudaHostAllocDefault));
    for (int i = 0; i < 16; i++) p[3][i] = (float)i;
    uint64_t bad = 0;
    for (int from = 0; from < 4; from++)
        for (int to = 0; to < 4; to++) {
            if (from == to) continue;
            MUST(cudaMemcpyAsync(p[from], p[3], 64, cudaMemcpyDefault, 0)); // to itself for 3
            MUST(cudaMemcpyAsync(p[to], zeros, 64, cudaMemcpyDefault, 0));
            MUST(cudaMemcpyAsync(p[to], p[from], 64, cudaMemcpyDefault, 0));
            MUST(cudaMemcpy(back, p[to], 64, cudaMemcpyDefault));
            for (int i = 0; i < 16; i++) bad += back[i] != (float)i;
            MUST(cudaMemcpy(p[3], back, 64, cudaMemcpyDefault));
        }
    RUN(add, 1, 16, 0, 0, p[2], p[2], 1.0f, 16); // a kernel, in mapped memory
    MUST(cudaMemsetAsync(p[2] + 8, 0, 32, 0));
    MUST(cudaDeviceSynchronize());
    void *mapped = nullptr, *none = nullptr;
    bad += p[2][3] != 6 || p[2][9] != 0 || cudaHostGetDevicePointer(&mapped, p[2], 0) || mapped != p[2] ||
           cudaHostGetDevicePointer(&none, p[3], 0) != cudaErrorInvalidValue || none;
    cudaGetLastError();
    for (int i = 0; i < 2; i++) {
        MUST(cudaFree(p[i]));
        MUST(cudaFreeHost(p[2 + i]));
    }
    cuda_on_cpu.devices = 1;
    return bad;
}

static void test_devices() {
    int bad = 0;
    for (cuda_on_cpu.seed = 0; cuda_on_cpu.seed < SEEDS; cuda_on_cpu.seed++) bad += places() != 0;
    cuda_on_cpu.seed = 1;
    check(!bad, "copies between two devices, mapped and pinned memory, under %d seeds: %d wrong", SEEDS, bad);
    cuda_on_cpu.devices = 2;
    cudaStream_t s[2];
    cudaEvent_t e[2];
    float ms;
    for (int i = 0; i < 2; i++) {
        MUST(cudaSetDevice(i));
        MUST(cudaStreamCreateWithFlags(&s[i], cudaStreamNonBlocking));
        MUST(cudaEventCreate(&e[i]));
        MUST(cudaEventRecord(e[i], s[i]));
    }
    check(cudaEventRecord(e[0], s[1]) == cudaErrorInvalidResourceHandle &&
              cudaGetLastError() == cudaErrorInvalidResourceHandle,
          "an event is recorded on its own device alone");
    MUST(cudaStreamWaitEvent(s[1], e[0], 0));
    MUST(cudaDeviceSynchronize());
    check(cudaEventQuery(e[0]) == cudaSuccess, "a stream waits for another device's event");
    check(cudaEventElapsedTime(&ms, e[0], e[1]) == cudaErrorInvalidResourceHandle &&
              cudaGetLastError() == cudaErrorInvalidResourceHandle,
          "no time between two devices");
    LAUNCH(add, 1, 16, 0, s[0], nullptr, nullptr, 1.0f, 0);
    check(cudaGetLastError() == cudaErrorInvalidResourceHandle, "a launch in another device's stream is refused");
    for (int i = 0; i < 2; i++) {
        MUST(cudaStreamDestroy(s[i]));
        MUST(cudaEventDestroy(e[i]));
    }
    MUST(cudaSetDevice(0));
    cuda_on_cpu.devices = 1;
}

/* Ranks that are threads: each has its stream, and passes a token to the next by an event that both know; now and then
 * functions of the host meet on all streams. */
static struct {
    pthread_barrier_t barrier, meeting;
    float *x;
    cudaEvent_t done[4];
} ring;

static void ring_meet(void *) { pthread_barrier_wait(&ring.meeting); }

static void *ring_rank(void *arg) {
    int rank = (int)(size_t)arg;
    cudaStream_t s;
    MUST(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    for (int round = 0; round < 20; round++) {
        if (round % 5 == 4) MUST(cudaLaunchHostFunc(s, ring_meet, NULL));
        for (int turn = 0; turn < 4; turn++) {
            if (turn == rank) {
                MUST(cudaStreamWaitEvent(s, ring.done[(rank + 3) % 4], 0));
                RUN(add, 1, 64, 0, s, ring.x, ring.x + 64, 1.0f + (float)rank, 64);
                MUST(cudaEventRecord(ring.done[rank], s));
            }
            if (turn != rank && round % 7 == rank) MUST(cudaStreamSynchronize(s));
            pthread_barrier_wait(&ring.barrier);
        }
    }
    MUST(cudaStreamSynchronize(s));
    MUST(cudaStreamDestroy(s));
    return NULL;
}

static void test_ranks() {
    pthread_t threads[4];
    ring.x = device_floats(128, small);
    pthread_barrier_init(&ring.barrier, NULL, 4);
    pthread_barrier_init(&ring.meeting, NULL, 4);
    for (cudaEvent_t &e : ring.done) MUST(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
    for (size_t i = 0; i < 4; i++) pthread_create(&threads[i], NULL, ring_rank, (void *)i);
    for (pthread_t t : threads) pthread_join(t, NULL);
    std::vector<float> h = host_floats(ring.x, 64);
    int bad = 0;
    for (size_t i = 0; i < 64; i++) {
        float want = small(i);
        for (int k = 0; k < 80; k++) want = want * (1.0f + (float)(k % 4)) + small(64 + i);
        bad += !(want == h[i] || (isinf(want) && isinf(h[i])) || fabsf(want - h[i]) <= 1e-4f * fabsf(want));
    }
    check(!bad, "four threads on four streams, ordered by events: %d of 64 differ", bad);
    for (cudaEvent_t e : ring.done) MUST(cudaEventDestroy(e));
    MUST(cudaFree(ring.x));
}
#endif
