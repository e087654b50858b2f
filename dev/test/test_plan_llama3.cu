/* test_plan_llama3.cu: includes plan_llama3 and checks it: plans against the dry runs of the
 * trainer's ranks (test_plan.h), simulations of all ranks (test_simulate.h) and of failing hosts (test_goodput.h).
 *
 *   test_plan_llama3 [GROUP…]    all groups, or the named ones; list: their names; short: what `make test` runs
 *   mpirun -np N test_plan_llama3 mpi      what compares plans with runs on processes
 */
#include "conditions.h"
#include "../../train_llama3.cu"
#include "../../programs/plan_llama3.cu"
#include "harness.h"
#include "jobs.h"
#include "models.h"
#include "test_plan.h"
#include "test_simulate.h"
#include "test_goodput.h"

static Job *plan_or_training_job(int argc, char **argv) {
    if (!has_word(argv, argc, "--plan")) return training_job(argc, argv);
    Planning *p = new_array(Planning, 1);
    p->program = plan_program;
    job_take_options(&p->job, program_options_parse(&p->program, &p->opt, argc, argv));
    p->job.purpose = plan_purpose();
    return &p->job;
}

int main(int argc, char **argv) {
    static const TestGroup groups[] = {
        {"plan", test_plan, C_BUILD}, {"simulate", test_simulate, BOTH_BUILDS}, {"goodput", test_goodput, C_BUILD}};
    device_prepare_process(1);
    command_line.job = plan_or_training_job;
    if (argc < 2 || strcmp(argv[1], "mpi")) return run_tests(groups, 3, argc, argv);
#ifdef HAVE_MPI
    LaunchInfo started = comm_start_process(&argc, &argv, 60, 60);
    open_scratch_of_processes(started.rank);
    test_events(started.rank, started.world, &transport_mpi);
    int failed = started.rank == 0 ? end_tests() : checks_failed > 0;
    comm_end_process();
    return failed;
#else
    user_error("mpi: this build has no MPI");
#endif
}
