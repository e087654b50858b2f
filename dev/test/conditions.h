/* conditions.h: what tests change in a program: its clock, the limits of its files, constants that a test sets.
 * Included before the program. */
#define TESTING
#define TESTING_PROGRAM
static int most_skips = 10, replica_check_steps = 100;
#define MOST_SKIPS most_skips
#define REPLICA_CHECK_STEPS replica_check_steps
#include "../../lib/device/system.h"
static __thread double
    clock_ahead; // seconds: hosts' monotonic clocks have nothing in common, and neither have ranks' here
static int clock_of_rank(clockid_t id, struct timespec *t) {
    int failed = clock_gettime(id, t);
    if (id == CLOCK_MONOTONIC) t->tv_sec += (time_t)clock_ahead;
    return failed;
}
#define clock_gettime clock_of_rank
static long long file_bytes = 5000000000ll;
#define MAX_FILE_BYTES file_bytes
#define FILE_CHUNK_BYTES (4 << 12) // small models have many, and few end with a tensor
