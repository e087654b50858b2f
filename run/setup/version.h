/* version.h: --version prints what a bug report needs: version and commit, how the program was built, the features of
 * this processor, and the versions of the libraries that are in use now, which may differ from those of the build. */
#ifndef VERSION_H
#define VERSION_H
#include "../../lib/device/base.h" // defines: PRECISION_NAME, CUDA_BUILD
#include <cjson/cJSON.h>           // defines: cJSON_Version
#include <zlib.h>                  // defines: zlibVersion
#ifdef HAVE_MPI
#define OMPI_SKIP_MPICXX
#include <mpi.h>
#endif
#if defined(__aarch64__) && defined(LINUX)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif
#ifdef HAVE_ONEDNN
#include <dnnl.h>
#endif
#ifdef HAVE_NCCL
#include <nccl.h>
#endif

#define LLAMA3_VERSION "0.1.0" // of all programs; CHANGELOG.md has an entry for it
/* `git describe --always --dirty`, from the object that the Makefile links; other builds keep this value. */
__attribute__((weak)) const char *build_commit = "unknown";

typedef struct {
    const char *name;
    int in_build, in_processor; // the compiler may use it; this processor has it
} Feature;

#define TEXT_OF(macro) #macro
#define IN_BUILD(macro) (strcmp(#macro, TEXT_OF(macro)) != 0) // is it defined? Then TEXT_OF has its value

static void print_features(void) {
#if defined(__x86_64__)
    const Feature features[] = {{"AVX2", IN_BUILD(__AVX2__), __builtin_cpu_supports("avx2") != 0},
                                {"AVX512", IN_BUILD(__AVX512BW__) && IN_BUILD(__AVX512VL__),
                                 __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")},
                                {"AVX512_BF16", IN_BUILD(__AVX512BF16__), __builtin_cpu_supports("avx512bf16") != 0}};
#elif defined(__aarch64__)
    int build_has_bf16 = IN_BUILD(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC), has_bf16 = build_has_bf16;
#ifdef LINUX // other systems do not tell: the processor has what the build uses
    has_bf16 = (getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0;
#endif
    const Feature features[] = {{"NEON", 1, 1}, {"BF16", build_has_bf16, has_bf16}};
#else
    const Feature features[] = {{"of this kind of processor", 0, 0}};
#endif
    for (int of_processor = 0; of_processor < 2; of_processor++) {
        int shown = 0;
        printf(of_processor ? "this processor has:" : "the build uses:");
        for (int i = 0; i < (int)(sizeof features / sizeof *features); i++) {
            int has = of_processor ? features[i].in_processor : features[i].in_build;
            if (has) shown += printf(" %s", features[i].name);
        }
        printf(shown ? "\n" : " no features beyond the minimum\n");
    }
}

static void print_libraries(void) {
#ifdef HAVE_MPI
    char mpi[MPI_MAX_LIBRARY_VERSION_STRING] = "";
    int length = 0;
    MPI_Get_library_version(mpi, &length); // the only MPI call, with MPI_Initialized, that may precede MPI_Init
    printf("MPI: %.*s\n", (int)strcspn(mpi, ",\n"), mpi);
#else
    printf("MPI: not in this build\n");
#endif
#ifdef HAVE_ONEDNN
    const dnnl_version_t *onednn = dnnl_version();
    printf("oneDNN: %d.%d.%d\n", onednn->major, onednn->minor, onednn->patch);
#else
    if (!CUDA_BUILD) printf("oneDNN: not in this build\n");
#endif
#ifdef USE_CUDA
    int runtime = 0, driver = 0; // a driver that is missing has version 0
    (void)cudaRuntimeGetVersion(&runtime);
    (void)cudaDriverGetVersion(&driver);
    printf("CUDA runtime: %d.%d\nCUDA driver: %d.%d\n", runtime / 1000, runtime % 1000 / 10, driver / 1000,
           driver % 1000 / 10);
#ifdef HAVE_NCCL
    int nccl = 0;
    (void)ncclGetVersion(&nccl);
    printf("NCCL: %d.%d.%d\n", nccl / 10000, nccl % 10000 / 100, nccl % 100);
#else
    printf("NCCL: not in this build\n");
#endif
#endif
    printf("cJSON: %s\nzlib: %s\n", cJSON_Version(), zlibVersion());
}

static void print_version(const char *cpu_program) {
    printf("%s%s %s, commit %s\nprecision: %s\ncompiler: %s%s", cpu_program, CUDA_BUILD ? "_cuda" : "", LLAMA3_VERSION,
           build_commit, PRECISION_NAME, IN_BUILD(__clang__) ? "" : "gcc ", __VERSION__);
#ifdef __CUDACC_VER_MAJOR__
    printf(", nvcc %d.%d", __CUDACC_VER_MAJOR__, __CUDACC_VER_MINOR__);
#endif
    printf("\n");
    print_features();
    print_libraries();
}

#endif
