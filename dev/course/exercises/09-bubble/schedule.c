/* schedule.c PP V MICRO_BATCHES: simulates a pipeline schedule, where a forward takes 1, a backward 2 and a message 0,
 * and prints when the last step of rank 0 ends, and for how long rank 0 computes. */
#include "pipeline_schedule.h"

int main(int argc, char **argv) {
    Schedule s;
    if (argc != 4) return 1;
    schedule_steps(&s, atoi(argv[1]), 0, atoi(argv[2]), atoi(argv[3]));
    int *ends = new_array(int, s.num_steps), *arrivals = new_array(int, s.num_steps), busy = 0;
    schedule_simulate(&s, ends, arrivals);
    for (int i = 0; i < s.num_steps; i++) busy += s.steps[i].kind == PIPE_BACKWARD ? 2 : 1;
    printf("%d %d\n", ends[s.num_steps - 1], busy);
    return 0;
}
