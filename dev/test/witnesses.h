/* witnesses.h: witnesses of our own: allocations, which the linker wraps, and MPI's profiling interface. Part of
 * test_llama3.cu. */

static int64_t allocations;              // of all threads
static __thread int64_t own_allocations; // of this one

#ifdef WRAP_MALLOC
static void count_allocation(void) {
    __atomic_fetch_add(&allocations, 1, __ATOMIC_RELAXED);
    own_allocations++;
}

#ifdef __cplusplus
extern "C" {
#endif
void *__real_malloc(size_t);
void *__real_calloc(size_t, size_t);
void *__real_realloc(void *, size_t);
void *__wrap_malloc(size_t n) {
    count_allocation();
    return __real_malloc(n);
}
void *__wrap_calloc(size_t n, size_t m) {
    count_allocation();
    return __real_calloc(n, m);
}
void *__wrap_realloc(void *p, size_t n) {
    count_allocation();
    return __real_realloc(p, n);
}
#ifdef __cplusplus
}
#endif
#endif

#ifdef HAVE_MPI
static struct {
    MPI_Comm comm;
    Traffic of[COLLECTIVES];
} profiled[AXES]; // by communicator, in the order in which they appeared
static int num_profiled;
static useconds_t profile_delay_us; // this process sleeps so long before each collective, send or receive
static struct {
    int count;      // requests that were started and not found complete yet
    double since;   // when the first of them was started
    double seconds; // in which there was at least one, so far
} in_flight;

static void profile(Collective op, int count, MPI_Datatype type, MPI_Comm comm) { // of one part, or of a message
    int size, bytes, i = 0;
    if (profile_delay_us) usleep(profile_delay_us);
    if (in_flight.count++ == 0) in_flight.since = seconds_now();
    MPI_Comm_size(comm, &size);
    MPI_Type_size(type, &bytes);
    while (i < num_profiled && profiled[i].comm != comm) i++;
    if (i == AXES) {
        memset(profiled, 0, sizeof profiled);
        i = num_profiled = 0; // those of earlier cases, at which nobody looks any more
    }
    if (i == num_profiled) profiled[num_profiled++].comm = comm;
    profiled[i].of[op].calls++;
    profiled[i].of[op].bytes += (op == SEND || op == RECEIVE ? 1 : (int64_t)(size - 1)) * count * bytes;
}

int MPI_Iallgather(const void *send, int count, MPI_Datatype type, void *recv, int recv_count, MPI_Datatype recv_type,
                   MPI_Comm comm, MPI_Request *request) {
    profile(ALL_GATHER, count, type, comm);
    return PMPI_Iallgather(send, count, type, recv, recv_count, recv_type, comm, request);
}

int MPI_Ialltoall(const void *send, int count, MPI_Datatype type, void *recv, int recv_count, MPI_Datatype recv_type,
                  MPI_Comm comm, MPI_Request *request) {
    profile(REDUCE_SCATTER, count, type, comm); // or an all-to-all: MPI does not see the difference
    return PMPI_Ialltoall(send, count, type, recv, recv_count, recv_type, comm, request);
}

int MPI_Isend(const void *send, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm, MPI_Request *request) {
    profile(SEND, count, type, comm);
    return PMPI_Isend(send, count, type, to, tag, comm, request);
}

int MPI_Irecv(void *recv, int count, MPI_Datatype type, int from, int tag, MPI_Comm comm, MPI_Request *request) {
    profile(RECEIVE, count, type, comm);
    return PMPI_Irecv(recv, count, type, from, tag, comm, request);
}
#endif
