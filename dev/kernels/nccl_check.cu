/* nccl_check.cu: every call of NCCL that the program makes, by one rank on one GPU. dev/gpu_check.sh runs it.
 *
 * dev/gpu_check.sh nccl-ranks runs several. One rank shows that the library is found, that its version has these calls,
 * that communicators open, end and abort, and that memory can be registered. With one rank a collective copies, and
 * in place it does nothing; only messages launch NCCL's kernels.
 */
#include <cuda_runtime.h>
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { COUNT = 1 << 18, LIMIT_S = 60 };
static int passed, failed;

static void check(int ok, const char *name, const char *figure) {
    printf("%s %s: %s\n", ok ? "pass" : "FAIL", name, figure);
    fflush(stdout);
    passed += ok;
    failed += !ok;
}

static void cuda(cudaError_t error, const char *what) {
    if (!error) return;
    printf("error: %s: %s\n", what, cudaGetErrorString(error));
    exit(1);
}

/* Waits until a call on a communicator that does not block has ended. */
static ncclResult_t finished(ncclComm_t comm, ncclResult_t result) {
    time_t end = time(NULL) + LIMIT_S;
    while (result == ncclInProgress && time(NULL) < end)
        if (ncclCommGetAsyncError(comm, &result)) return ncclSystemError;
    return result;
}

/* A call that the next ones need: without it the program ends. */
static void needed(ncclComm_t comm, ncclResult_t result, const char *what) {
    result = finished(comm, result);
    check(result == ncclSuccess, what, ncclGetErrorString(result));
    if (result == ncclSuccess) return;
    printf("%d passed, %d failed\n", passed, failed);
    exit(1);
}

static float numbers[COUNT], found[COUNT];

/* Writes random numbers to `from` and zeros to `to`, if it is another buffer, on the collective's stream. */
static void fill(float *from, float *to, cudaStream_t stream) {
    for (int i = 0; i < COUNT; i++) numbers[i] = (float)(rand() % 1000) - 500;
    cuda(cudaMemcpyAsync(from, numbers, sizeof numbers, cudaMemcpyHostToDevice, stream), "copying to the GPU");
    if (to != from) cuda(cudaMemsetAsync(to, 0, sizeof numbers, stream), "clearing memory");
}

static void expect_copy(ncclComm_t comm, ncclResult_t result, const float *to, cudaStream_t stream, const char *name) {
    char figure[96];
    int wrong = 0;
    result = finished(comm, result);
    cuda(cudaMemcpyAsync(found, to, sizeof found, cudaMemcpyDeviceToHost, stream), "copying from the GPU");
    cuda(cudaStreamSynchronize(stream), name);
    for (int i = 0; i < COUNT; i++) wrong += found[i] != numbers[i];
    snprintf(figure, sizeof figure, "%s, %d of %d numbers are wrong", ncclGetErrorString(result), wrong, COUNT);
    check(result == ncclSuccess && !wrong, name, figure);
}

static ncclResult_t send_to_itself(const float *from, float *to, ncclComm_t comm, cudaStream_t stream) {
    ncclGroupStart();
    ncclSend(from, COUNT, ncclFloat, 0, comm, stream);
    ncclRecv(to, COUNT, ncclFloat, 0, comm, stream);
    return ncclGroupEnd();
}

/* Messages of two communicators on two streams, with no event between them, issued in turns: x (2, COUNT), y too. */
static void alternate(ncclComm_t a, ncclComm_t b, float *x, float *y, cudaStream_t one, cudaStream_t two) {
    enum { ROUNDS = 100 };
    int bad = 0;
    char figure[64];
    for (int i = 0; i < ROUNDS; i++) {
        bad += finished(a, send_to_itself(x, x + COUNT, a, one)) != ncclSuccess;
        bad += finished(b, send_to_itself(y, y + COUNT, b, two)) != ncclSuccess;
    }
    cuda(cudaStreamSynchronize(one), "the first stream");
    cuda(cudaStreamSynchronize(two), "the second stream");
    snprintf(figure, sizeof figure, "%d of %d failed", bad, 2 * ROUNDS);
    check(!bad, "two communicators on two streams, in implicit order", figure);
}

/* Each operation that the program enqueues, with from (2, COUNT). */
static void run_operations(ncclComm_t first, ncclComm_t second, float *from, cudaStream_t one, cudaStream_t two) {
    float *to = from + COUNT, *others = NULL;
    fill(from, to, one);
    expect_copy(first, ncclAllGather(from, to, COUNT, ncclFloat, first, one), to, one, "an all-gather");
    fill(from, from, one);
    expect_copy(first, ncclAllGather(from, from, COUNT, ncclFloat, first, one), from, one, "an all-gather in place");
    fill(from, from, one);
    expect_copy(first, ncclReduceScatter(from, from, COUNT, ncclFloat, ncclSum, first, one), from, one,
                "a reduce-scatter in place, fp32");
    fill(from, from, one);
    expect_copy(first, ncclReduceScatter(from, from, 2 * COUNT, ncclBfloat16, ncclSum, first, one), from, one,
                "a reduce-scatter in place, bf16");
    fill(from, to, one);
    expect_copy(second, send_to_itself(from, to, second, one), to, one, "a send and a receive of one group");
    cuda(cudaMalloc((void **)&others, 2 * sizeof numbers), "memory");
    fill(from, to, one);
    fill(others, others + COUNT, two);
    cuda(cudaStreamSynchronize(one), "the first stream");
    cuda(cudaStreamSynchronize(two), "the second stream");
    alternate(first, second, from, others, one, two);
    expect_copy(second, ncclSuccess, others + COUNT, two, "what the second of them received");
    cuda(cudaFree(others), "freeing memory");
}

int main(void) {
    ncclUniqueId ids[2];
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t first = NULL, second = NULL;
    cudaStream_t one, two;
    float *from = NULL;
    void *registered = NULL;
    int version = 0;
    char text[64];
    setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 1); // as the program does
    setenv("NCCL_NVLS_ENABLE", "0", 0);
    cuda(cudaSetDevice(0), "choosing the GPU");
    cuda(cudaStreamCreateWithFlags(&one, cudaStreamNonBlocking), "making a stream");
    cuda(cudaStreamCreateWithFlags(&two, cudaStreamNonBlocking), "making a stream");
    ncclGetVersion(&version);
    snprintf(text, sizeof text, "%d.%d.%d", version / 10000, version / 100 % 100, version % 100);
    check(version >= NCCL_VERSION(2, 27, 3), "NCCL is as new as the program demands (2.27.3)", text);
    for (int i = 0; i < 2; i++) needed(NULL, ncclGetUniqueId(&ids[i]), "an identifier");
    config.blocking = 0;
    ncclResult_t opening[2];
    opening[0] = ncclCommInitRankConfig(&first, 1, ids[0], 0, &config);
    opening[1] = ncclCommInitRankConfig(&second, 1, ids[1], 0, &config);
    needed(first, opening[0], "the first of two communicators that open at once");
    needed(second, opening[1], "the second of two communicators that open at once");

    ncclResult_t memory = ncclMemAlloc((void **)&from, 2 * sizeof numbers);
    check(memory == ncclSuccess, "memory from NCCL", ncclGetErrorString(memory));
    if (memory) cuda(cudaMalloc((void **)&from, 2 * sizeof numbers), "memory");
    ncclResult_t known = finished(first, ncclCommRegister(first, from, 2 * sizeof numbers, &registered));
    check(known == ncclSuccess, "memory is registered", ncclGetErrorString(known));

    run_operations(first, second, from, one, two);
    if (registered) needed(first, ncclCommDeregister(first, registered), "memory is no longer registered");
    ncclGroupStart();
    ncclCommFinalize(second);
    needed(second, ncclGroupEnd(), "the end of a communicator, in a group");
    ncclResult_t ended = ncclCommDestroy(second);
    check(ended == ncclSuccess, "a communicator is destroyed", ncclGetErrorString(ended));
    ended = ncclCommAbort(first);
    check(ended == ncclSuccess, "a communicator is aborted", ncclGetErrorString(ended));
    if (memory) cuda(cudaFree(from), "freeing memory");
    else check(ncclMemFree(from) == ncclSuccess, "memory goes back to NCCL", "");
    cuda(cudaDeviceSynchronize(), "the GPU after all of this");
    printf("%d passed, %d failed\n", passed, failed);
    return failed > 0;
}
