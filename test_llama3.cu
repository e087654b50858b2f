/* test_llama3.cu: includes the program and checks it. Each check says the property in its name and prints the
 * measured figure next to the bound.
 *
 *   test_llama3 [GROUP…]              all groups, or the named ones, in this process (ranks as threads); kernels:NAME
 *                                     is one test of the group kernels
 *   test_llama3 list                  the names of the groups that this build runs, and of the tests of kernels
 *   test_llama3 short                 what `make test` runs: fewer layouts, and no group that another build covers
 *   mpirun -np N test_llama3 mpi      the groups that need processes
 *   mpirun -np 2 test_llama3 mpi waiting   of these, that the reported waiting is what MPI's profiling interface sees
 *   mpirun … test_llama3 mpi network  the same on hosts with a slow network between them (dev/test/hosts.sh)
 */
#include "dev/test/conditions.h"
#include "train_llama3.cu"
#include "programs/tokens/audit.h" // defines: audit
#include "dev/test/harness.h"
#include "dev/test/jobs.h"
#include "dev/test/models.h"
#include "dev/test/witnesses.h"

// ---------------------------------------------------------------------------
// the tests

#include "dev/test/test_kernels.h"
#include "dev/test/test_family.h"
#include "dev/test/test_mfu.h"
#include "dev/test/test_data.h"
#include "dev/test/test_safetensors.h"
#include "dev/test/test_pytorch.h"
#include "dev/test/test_ranks.h"
#include "dev/test/test_layouts.h"
#include "dev/test/test_mesh.h"
#include "dev/test/test_bits.h"
#include "dev/test/test_timeline.h"
#include "dev/test/test_waiting.h"
#include "dev/test/test_mpi.h"
#include "dev/test/test_messages.h"
#include "dev/test/test_pipeline.h"
#include "dev/test/test_failures.h"
#include "dev/test/test_documents.h"
#include "dev/test/test_packing.h"
#include "dev/test/test_mesh_bits.h"
#include "dev/test/test_run_page.h"
#include "dev/test/test_hard_places.h"
#include "dev/test/test_checkpoints.h"
#include "dev/test/test_mixture.h"
#include "dev/test/test_adapters.h"
#include "dev/test/test_muon.h"
#include "dev/test/test_mesh_use.h"
#include "dev/test/test_z_loss.h"
#include "dev/test/test_logits.h"
#include "dev/test/test_outliers.h"
#ifdef CUDA_ON_CPU
#include "dev/test/test_streams.h"
#else
static void test_mesh_of_gpus(void) {}
static void test_streams(void) {} // these need several GPUs, or dev/cuda_on_cpu
static void test_orders(void) {}
static void test_mesh_orders(void) {}
#endif

// ---------------------------------------------------------------------------
// the table of groups

static const char *spaced(const char *word) {
    static char text[64];
    snprintf(text, sizeof text, " %s ", word);
    return text;
}

/* `short` runs a group in the build that finds the most with it; all builds together run each group. */
static const char *left_out_if_short(void) {
    if (CUDA_BUILD && FLOATX == DTYPE_BF16) return " mesh orders mesh-orders streams pipeline faults adapters muon ";
    if (CUDA_BUILD) return " documents bits pytorch mesh adapters ";
    if (FLOATX == DTYPE_BF16)
        return " data layouts mesh-use mesh-bits bits adapters run-page hard-places checkpoints failures pipeline "
               "mixture "
               "outliers muon z-loss timeline ";
    return " ";
}

static const TestGroup groups[] = {{"kernels", test_kernels, BOTH_BUILDS},
                                   {"family", test_family, C_BUILD},
                                   {"mfu", test_mfu, C_BUILD},
                                   {"data", test_data, C_BUILD},
                                   {"safetensors", test_safetensors, C_BUILD},
                                   {"pytorch", test_pytorch, BOTH_BUILDS},
                                   {"documents", test_doc_mask, BOTH_BUILDS},
                                   {"packing", test_packing, C_BUILD},
                                   {"ranks", test_ranks, C_BUILD},
                                   {"layouts", test_layouts, C_BUILD},
                                   {"mesh", test_mesh_of_gpus, CUDA},
                                   {"mesh-use", test_mesh_use, C_BUILD},
                                   {"mesh-use-all", test_mesh_use_all, IF_NAMED},
                                   {"mesh-bits", test_mesh_bits, C_BUILD},
                                   {"mesh-faults", test_mesh_faults, IF_NAMED},
                                   {"reduce-dtype", test_reduce_dtype, C_BUILD},
                                   {"validation", test_validation_between, C_BUILD},
                                   {"bits", test_bits, BOTH_BUILDS},
                                   {"replicas", test_replicas, BOTH_BUILDS},
                                   {"checkpoints", test_checkpoints, C_BUILD},
                                   {"mixture", test_mixture, C_BUILD},
                                   {"checkpoints-all", test_checkpoints_all, IF_NAMED},
                                   {"z-loss", test_z_loss, C_BUILD},
                                   {"logits", test_logits_of_model, BOTH_BUILDS},
                                   {"outliers", test_outliers, C_BUILD},
                                   {"timeline", test_timeline, C_BUILD},
                                   {"adapters", test_adapters, BOTH_BUILDS},
                                   {"muon", test_muon, BOTH_BUILDS},
                                   {"run-page", test_run_page, C_BUILD},
                                   {"failures", test_failures, C_BUILD},
                                   {"hard-places", test_hard_places, C_BUILD},
                                   {"pipeline", test_pipeline, BOTH_BUILDS},
                                   {"faults", test_faults, CUDA}, // a part of "ranks"
                                   {"streams", test_streams, CUDA},
                                   {"accumulation", test_accumulation, IF_NAMED}, // a part of "ranks"
                                   {"orders", test_orders, CUDA},
                                   {"mesh-orders", test_mesh_orders, CUDA}};

static const char KERNEL_TEST[] = "kernels:";

/* The test of kernels that an argument names, or NULL. */
static const char *named_kernel_test(const char *argument) {
    size_t length = strlen(KERNEL_TEST);
    return strncmp(argument, KERNEL_TEST, length) ? NULL : argument + length;
}

static void list_groups(void) {
    for (size_t g = 0; g < sizeof groups / sizeof *groups; g++)
        if (runs_here(&groups[g])) printf("%s\n", groups[g].name);
    for (int i = 0; i < KERNEL_TESTS; i++) printf("%s%s\n", KERNEL_TEST, kernel_tests[i].name);
}

/* A name that is no group's must not end as a run that found nothing wrong. */
static void check_names(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        const char *test = named_kernel_test(argv[i]);
        int known = is_short;
        for (size_t g = 0; g < sizeof groups / sizeof *groups; g++) known |= !strcmp(argv[i], groups[g].name);
        for (int k = 0; k < KERNEL_TESTS && test; k++) known |= !strcmp(test, kernel_tests[k].name);
        if (!known) user_error("%s is not a group of tests; `%s list` prints their names", argv[i], argv[0]);
    }
}

/* Runs the groups that are named, or those of this build. */
static void run_groups(int argc, char **argv) {
    check_names(argc, argv);
    for (int i = 1; i < argc; i++) {
        const char *test = named_kernel_test(argv[i]);
        if (test) run_kernel_tests(test);
    }
    // dev/test/cuda.sh compares some layouts' bits, and so do "orders" and "mesh-orders"
    int bits_too = !CUDA_BUILD || (FLOATX == DTYPE_BF16 && !is_short);
    for (size_t g = 0; g < sizeof groups / sizeof *groups; g++) {
        int elsewhere = is_short && strstr(left_out_if_short(), spaced(groups[g].name));
        int of_orders = groups[g].run == test_orders || groups[g].run == test_mesh_orders;
        int left_out = bits_too ? CUDA_BUILD && of_orders : groups[g].run == test_bits;
        int wanted = (argc == 1 || is_short) && runs_here(&groups[g]) && !elsewhere && !left_out;
        for (int i = 1; i < argc; i++) wanted |= !strcmp(argv[i], groups[g].name);
        if (wanted) run_group(&groups[g]);
    }
}

int main(int argc, char **argv) {
    device_prepare_process(1);
    is_short = argc == 2 && !strcmp(argv[1], "short");
    if (argc == 2 && !strcmp(argv[1], "list")) {
        list_groups();
        return 0;
    }
    int process = 0, processes = 1, mpi = argc > 1 && !strcmp(argv[1], "mpi");
    if (mpi) {
        LaunchInfo started = comm_start_process(&argc, &argv, 60, 60);
        process = started.rank;
        processes = started.world;
        (void)processes;
    }
    if (process == 0) open_scratch();
#ifdef HAVE_MPI
    if (mpi) MPI_Bcast(scratch_dir, sizeof scratch_dir, MPI_CHAR, 0, MPI_COMM_WORLD);
    int on_network = mpi && argc > 2 && !strcmp(argv[2], "network");
    if (on_network) test_waiting_network(process, processes);
    else if (mpi) test_waiting(process, processes);
    int all_of_mpi = mpi && !on_network && !(argc > 2 && !strcmp(argv[2], "waiting"));
    if (all_of_mpi) {
        test_mpi(process, processes);
        test_layouts_mpi(process, processes);
        test_mesh_bits_mpi(process, processes);
        test_trace(process, processes, &transport_mpi);
        test_checkpoints_mpi(process, processes);
        test_muon_mpi(process, processes);
    }
    if (all_of_mpi && processes > 1 && processes <= 4) {
        test_messages(process, processes, &transport_mpi);
        test_toys(process, processes, &transport_mpi);
    }
#endif
    if (!mpi) run_groups(argc, argv);
    int failed = process == 0 ? end_tests() : checks_failed > 0;
    if (mpi) comm_end_process();
    return failed;
}
