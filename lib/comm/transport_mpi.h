/* transport_mpi.h: ranks as processes on any number of hosts, over MPI's non-blocking collectives and messages.
 *
 * A reduce-scatter is an MPI_Ialltoall, and the caller adds the parts in its own order. Empty in a build without MPI.
 */
#ifndef TRANSPORT_MPI_H
#define TRANSPORT_MPI_H
#include "comm_types.h"

#ifdef HAVE_MPI
static inline void mpi_group_open(Comm *comm, Group *g, int colour) {
    (void)comm;
    MPI_Comm_split(MPI_COMM_WORLD, colour, g->rank, &g->mpi);
    MPI_Comm_rank(g->mpi, &g->rank);
    MPI_Comm_size(g->mpi, &g->size);
}

static inline int mpi_group_member(Comm *comm, Group *g, int i) {
    (void)comm;
    int world_rank;
    MPI_Group group, world;
    MPI_Comm_group(g->mpi, &group);
    MPI_Comm_group(MPI_COMM_WORLD, &world);
    MPI_Group_translate_ranks(group, 1, &i, world, &world_rank);
    MPI_Group_free(&group);
    MPI_Group_free(&world);
    return world_rank;
}

/* The number of elements of *type in r->bytes. MPI's counts are int, so buffers above 2 GiB are counted in larger
 * units: the largest power of two up to 256 bytes that divides the size. That is 256 for shards of floatX or fp32, at
 * least 16 for int8 shards (quantized_layout). */
static inline int mpi_count(const Request *r, MPI_Datatype *type) {
    size_t unit = 256;
    *type = MPI_BYTE;
    if (r->bytes <= INT32_MAX) return (int)r->bytes;
    while (r->bytes % unit) unit /= 2;
    if (r->bytes / unit > INT32_MAX)
        run_failure("%s: MPI cannot send a part of %zu bytes: its counts are at most %d, here in units of %zu bytes. "
                    "Use smaller FSDP units (--wrap), a smaller --batch or more ranks",
                    r->what, r->bytes, INT32_MAX, unit);
    MPI_Type_contiguous((int)unit, MPI_BYTE, type);
    MPI_Type_commit(type);
    return (int)(r->bytes / unit);
}

static inline void mpi_start(Comm *comm, Request *r) {
    MPI_Datatype type;
    int n = mpi_count(r, &type), error = MPI_SUCCESS;
    MPI_Comm on = r->group->mpi;
    int in_place = r->send == r->recv + (size_t)r->group->rank * r->bytes; // of an all-gather
    const void *send = in_place ? MPI_IN_PLACE : r->send;
    switch (r->collective) {
    case ALL_GATHER: error = MPI_Iallgather(send, n, type, r->recv, n, type, on, &r->mpi); break;
    case REDUCE_SCATTER:
    case ALL_TO_ALL: error = MPI_Ialltoall(r->send, n, type, r->recv, n, type, on, &r->mpi); break;
    case SEND: error = MPI_Isend(r->send, n, type, r->channel->peer, 0, on, &r->mpi); break;
    case RECEIVE: error = MPI_Irecv(r->recv, n, type, r->channel->peer, 0, on, &r->mpi); break;
    case COLLECTIVES: break;
    }
    note_moving(comm, r);
    if (error != MPI_SUCCESS)
        run_failure("%s: MPI refused %s of '%s' with error code %d", rank_name(comm->rank),
                    collective_names[r->collective], r->what, error);
    if (type != MPI_BYTE) MPI_Type_free(&type);
    traffic_count(comm->traffic_measured, r, r->group->size); // MPI's number of members: see mpi_group_open
}

/* Ends the run unless a received message has the expected size. That finds differences between hosts; within a host the
 * watchdog compares both ends before any byte is sent. */
static inline void mpi_check_received(const Comm *comm, const Request *r, const MPI_Status *status, int error) {
    MPI_Count bytes = 0;
    int kind = MPI_SUCCESS;
    MPI_Error_class(error, &kind);
    if (kind == MPI_SUCCESS) MPI_Get_elements_x(status, MPI_BYTE, &bytes);
    if (kind == MPI_SUCCESS ? (size_t)bytes == r->bytes : kind != MPI_ERR_TRUNCATE) return;
    run_failure("%s: message %" PRId64 " from member %d of %s has %s bytes than the %zu of '%s', which this rank "
                "expects. Both ranks must send and receive the same messages in the same order",
                rank_name(comm->rank), r->number, r->channel->peer, axis_names[r->group->axis],
                kind == MPI_SUCCESS ? "fewer" : "more", r->bytes, r->what);
}

static inline int mpi_test(Comm *comm, Request *r) {
    int complete = 0;
    MPI_Status status;
    int error = MPI_Test(&r->mpi, &complete, &status);
    if (r->collective == RECEIVE && (complete || error != MPI_SUCCESS)) mpi_check_received(comm, r, &status, error);
    if (error != MPI_SUCCESS)
        run_failure("%s: %s of '%s' over MPI failed with error code %d", rank_name(comm->rank),
                    collective_names[r->collective], r->what, error);
    return complete;
}

/* This process's record has existed since before MPI started. Clears what an earlier mesh left there; nobody reads it
 * before all ranks have opened the new mesh. */
static inline Heartbeat *mpi_heartbeat_open(Comm *comm) {
    Heartbeat *me = own_heartbeat.record;
    memset(me->started, 0, sizeof me->started);
    memset(me->flights, 0, sizeof me->flights);
    rank_state(me, RANK_COMPUTING, seconds_now());
    heartbeat_groups(me, &comm->mesh, comm->rank);
    comm->heartbeats = own_heartbeat.table;
    comm->heartbeats->mesh = comm->mesh;
    return me;
}

// ---------------------------------------------------------------------------
// point-to-point messages in MPI_COMM_WORLD: questions between hosts when a wait has timed out

enum { TAG_QUESTION = 1, TAG_ANSWER = 2 };

/* Answers the questions that have arrived with what this host's heartbeat table says; one rank answers for its host. */
static inline void mpi_answer_hosts(Comm *comm) {
    HeartbeatTable *table = comm->heartbeats;
    MPI_Status from;
    int arrived = 0, question;
    comm->answered_at = seconds_now();
    while (MPI_Iprobe(MPI_ANY_SOURCE, TAG_QUESTION, MPI_COMM_WORLD, &arrived, &from) == MPI_SUCCESS && arrived) {
        MPI_Recv(&question, 1, MPI_INT, from.MPI_SOURCE, TAG_QUESTION, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        int *answered = &table->answered[host_of_rank(from.MPI_SOURCE) - run_hosts.hosts], before = *answered;
        if (before >= question ||
            !__atomic_compare_exchange_n(answered, &before, question, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            continue;
        RankNews *news = new_array(RankNews, table->attached); // not freed: it may be on its way until the run ends
        MPI_Request sent;
        for (int i = 0; i < table->attached; i++) {
            news[i] = news_of_rank(table, heartbeat_at(table, i));
            news[i].question = question;
        }
        if (MPI_Isend(news, (int)sizeof *news * table->attached, MPI_BYTE, from.MPI_SOURCE, TAG_ANSWER, MPI_COMM_WORLD,
                      &sent) == MPI_SUCCESS)
            MPI_Request_free(&sent);
    }
}

/* Called repeatedly by a rank whose wait has timed out. On the first ASKING_HOSTS hosts, the first such rank asks all
 * ranks of the other hosts, and adds their answers to comm->news. Returns the number of hosts whose state is known, or
 * 0 if this rank does not ask. */
static inline int mpi_ask_hosts(Comm *comm) {
    HeartbeatTable *table = comm->heartbeats;
    int nobody = 0, own = comm->rank + 1, arrived = 0, heard = 0, bytes;
    MPI_Status from;
    if (host_of_rank(comm->rank) - run_hosts.hosts >= ASKING_HOSTS) return 0;
    if (__atomic_compare_exchange_n(&table->asker, &nobody, own, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
        int *question = new_array(int, 1); // not freed, like the answers
        *question = comm->question = __atomic_add_fetch(&table->times_asked, 1, __ATOMIC_SEQ_CST);
        for (int i = 0; i < comm->mesh.world; i++) {
            MPI_Request sent;
            if (host_of_rank(i) == host_of_rank(comm->rank)) continue;
            if (MPI_Isend(question, 1, MPI_INT, i, TAG_QUESTION, MPI_COMM_WORLD, &sent) == MPI_SUCCESS)
                MPI_Request_free(&sent);
        }
    }
    if (table->asker != own) return 0;
    while (MPI_Iprobe(MPI_ANY_SOURCE, TAG_ANSWER, MPI_COMM_WORLD, &arrived, &from) == MPI_SUCCESS && arrived) {
        MPI_Get_count(&from, MPI_BYTE, &bytes);
        RankNews *news = (RankNews *)checked_malloc((size_t)bytes);
        MPI_Recv(news, bytes, MPI_BYTE, from.MPI_SOURCE, TAG_ANSWER, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        for (int i = 0; i < bytes / (int)sizeof *news; i++)
            if (news[i].question == comm->question) comm->news[news[i].lines.rank] = news[i];
        free(news);
    }
    for (int i = 0; i < run_hosts.count; i++) heard += comm->news[run_hosts.hosts[i].first_rank].known;
    return heard;
}

static const Transport transport_mpi = {
    "mpi",         mpi_group_open,   mpi_group_member, mpi_start, mpi_test, mpi_heartbeat_open,
    NULL, // gpus_open
    NULL, // gpus_close
    NULL, // gpus_connect
    NULL, // last_error
    NULL, // channel_open
    mpi_ask_hosts, mpi_answer_hosts,
    NULL, // check_host
};
#endif

#endif
