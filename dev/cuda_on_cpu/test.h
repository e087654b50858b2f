/* test.h: what the two tests have in common: checks that count, calls that must succeed, errors planted in a child. */
#ifndef CUDA_ON_CPU_TEST_H
#define CUDA_ON_CPU_TEST_H
#include <cuda_runtime.h>
#include <sys/wait.h>

static int passed, failed;

__attribute__((format(printf, 2, 3))) static void check(int ok, const char *format, ...) {
    va_list args;
    va_start(args, format);
    printf("%s ", ok ? "  ok  " : "FAILED");
    vprintf(format, args);
    printf("\n");
    va_end(args);
    ++*(ok ? &passed : &failed);
}

static void must(int code, const char *what) { // a call that the test itself relies on
    if (!code) return;
    fprintf(stderr, "test: %s gave %d (%s)\n", what, code, cudaGetErrorName((cudaError_t)code));
    _exit(1);
}
#define MUST(call) must((int)(call), #call)
#define RUN(...) (LAUNCH(__VA_ARGS__), MUST(cudaGetLastError()))

enum { SEEDS = 8 };

static uint64_t fingerprint(uint64_t h, const void *data, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) h = (h ^ ((const unsigned char *)data)[i]) * 0x100000001B3ull;
    return h;
}

static float *device_floats(size_t count, float (*value)(size_t i)) {
    float *d;
    MUST(cudaMalloc(&d, count * sizeof *d));
    if (!value) return d;
    std::vector<float> h(count);
    for (size_t i = 0; i < count; i++) h[i] = value(i);
    MUST(cudaMemcpy(d, h.data(), count * sizeof *d, cudaMemcpyHostToDevice));
    return d;
}

[[maybe_unused]] static std::vector<float> host_floats(const float *d, size_t count) {
    std::vector<float> h(count);
    MUST(cudaMemcpy(h.data(), d, count * sizeof *d, cudaMemcpyDeviceToHost));
    return h;
}

static float small(size_t i) { return (float)(int)((i * 2654435761u >> 7) % 33) / 16.0f - 1.0f; } // exact in bf16

static int different_bits(uint64_t (*run)(void)) { // under SEEDS seeds: how many give other bits than the first
    int different = 0;
    uint64_t before = cuda_on_cpu.seed, first = 0;
    for (int i = 0; i < SEEDS; i++) {
        cuda_on_cpu.seed = (uint64_t)i;
        uint64_t h = run();
        if (!i) first = h;
        different += h != first;
    }
    cuda_on_cpu.seed = before;
    return different;
}

/* Runs `wrong` in a child. It must end with exit code 3 and say all of `texts`, separated by |; under a sanitizer, its
 * report may come first: then the kernel's name (up to the first |) suffices. */
static void planted(const char *title, const char *texts, void (*wrong)(void)) {
    int ends[2];
    if (pipe(ends)) must(1, "pipe");
    fflush(stdout);
    pid_t child = fork();
    if (!child) {
        emu::opened_by = 0; // as if it were a process of its own
        dup2(ends[1], 1);
        dup2(ends[1], 2);
        close(ends[0]);
        alarm(60);
        wrong();
        _exit(0);
    }
    close(ends[1]);
    std::string said;
    char buffer[4096];
    for (ssize_t n = 1; n > 0;) {
        n = read(ends[0], buffer, sizeof buffer);
        if (n > 0) said.append(buffer, (size_t)n);
    }
    close(ends[0]);
    int status = 0;
    waitpid(child, &status, 0);
    int code = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
    size_t line = said.rfind("CUDA on a CPU: ");
    bool report = CUDA_ON_CPU_ASAN && said.find("AddressSanitizer") != std::string::npos,
         all = line != std::string::npos && (report || code == 3);
    std::string wanted = texts, missing;
    for (size_t from = 0; all && from <= wanted.size();) {
        size_t to = std::min(wanted.find('|', from), wanted.size());
        missing = wanted.substr(from, to - from);
        all = said.find(missing, line) != std::string::npos;
        from = to + 1;
        if (report) break;
    }
    check(all, "%s", title);
    if (!all)
        printf("       exit code %d, wanted 3 and \"%s\", said: %.600s\n", code, missing.c_str(),
               said.substr(line == std::string::npos ? 0 : line).c_str());
    else printf("         %s", said.substr(line).c_str());
}
#endif
