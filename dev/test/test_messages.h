/* test_messages.h: messages between ranks without a model, all of them on one pipeline: they arrive whole and in order,
 * are counted, and end the run where they do not meet. Part of test_llama3.cu. */
#include "../../lib/comm/comm_open.h"

enum { NAMED_MESSAGES = 24 };
static const char *const message_names[NAMED_MESSAGES] = {"m0",  "m1",  "m2",  "m3",  "m4",  "m5",  "m6",  "m7",
                                                          "m8",  "m9",  "m10", "m11", "m12", "m13", "m14", "m15",
                                                          "m16", "m17", "m18", "m19", "m20", "m21", "m22", "m23"};
static const size_t message_bytes[] = {1,    7,     256,
                                       1003, 65537, (3 << 20) + 4}; // two of them more than MPI keeps at hand
enum { MESSAGE_SIZES = sizeof message_bytes / sizeof *message_bytes, MOST_BYTES = (3 << 20) + 256 };

typedef struct {
    Device dev;
    Comm comm;
    Mesh mesh;
    int rank, world;
    int64_t wrong, sent, received, sent_bytes, received_bytes;
} Member;

static Member *member_open(Job *j, int rank, size_t bytes) {
    Member *m = (Member *)checked_malloc(sizeof *m);
    Device dry_run;
    m->mesh = j->mesh;
    m->rank = rank;
    m->world = j->mesh.world;
    device_open_dry_run(&dry_run, 1, 0);
    dry_run.arenas[MEM_COMM].peak = bytes;
    dry_run.gpu = device_of(rank);
    dry_run.by_nccl = uses_nccl(j);
    device_open(&m->dev, &dry_run, ".", rank, NULL);
    comm_open(&m->comm, &m->dev, &m->mesh, rank, j->transport, j->host_transport, &j->thread_world, j->run.timeout);
    comm_phase(&m->comm, PHASE_STEP);
    return m;
}

static void member_close(Member *m) {
    comm_close(&m->comm);
    device_close(&m->dev);
    free(m);
}

static void *member_buffer(Member *m, size_t bytes) { return arena_alloc(&m->dev, MEM_COMM, "message", bytes); }

static void run_members(int process, int world, const Transport *transport, double timeout, void (*body)(Job *, int)) {
    Job *j = (Job *)checked_malloc(sizeof *j);
    Mesh mesh = {world, {1, 1, world, 1, 1}};
    j->mesh = mesh;
    j->transport = transport;
    j->run.timeout = timeout;
    j->host_transport = !strcmp(transport->name, "nccl") ? &transport_threads : transport;
    pthread_mutex_init(&j->thread_world.lock, NULL);
    launch(j, process, body);
    thread_world_close(&j->thread_world);
    free(j);
}

/* On a stream of its own, after what the compute stream did with the buffer. */
static void message(Member *m, Request *r, Collective way, int peer, int name, void *buffer, size_t bytes) {
    StreamKind on = way == SEND ? STREAM_SEND_NEXT : STREAM_RECEIVE_PREVIOUS, before = device_set_stream(&m->dev, on);
    device_wait_stream(&m->dev, on, STREAM_COMPUTE);
    if (way == SEND) send_start(&m->comm, r, AXIS_PP, peer, message_names[name], buffer, bytes, DTYPE_BYTE);
    else receive_start(&m->comm, r, AXIS_PP, peer, message_names[name], buffer, bytes, DTYPE_BYTE);
    device_set_stream(&m->dev, before);
    if (way == SEND) {
        m->sent++;
        m->sent_bytes += (int64_t)bytes;
    } else {
        m->received++;
        m->received_bytes += (int64_t)bytes;
    }
}

static unsigned char message_byte(int from, int to, int name, size_t i) {
    return (unsigned char)mix64((uint64_t)(((from * 8 + to) * NAMED_MESSAGES + name)) * 4099 + i / 64);
}

static void message_fill(Member *m, void *buffer, int to, int name, size_t bytes) {
    unsigned char *near = (unsigned char *)checked_malloc(bytes);
    for (size_t i = 0; i < bytes; i++) near[i] = message_byte(m->rank, to, name, i);
    device_write(&m->dev, buffer, near, bytes);
    free(near);
}

static void message_check(Member *m, const void *buffer, int from, int name, size_t bytes) {
    unsigned char *near = (unsigned char *)on_host(&m->dev, buffer, bytes);
    int same = 1;
    for (size_t i = 0; i < bytes && same; i++) same = near[i] == message_byte(from, m->rank, name, i);
    m->wrong += !same;
    free(near);
}

static int64_t messages_wrong, messages_miscounted, messages_told_apart, messages_passed; // of all ranks

static void add_up(Member *m, int64_t of_this, int64_t *of_all) {
    int64_t all[8], sum = 0;
    all_gather_now(&m->comm, AXIS_WORLD, "sum", &of_this, all, sizeof of_this);
    for (int i = 0; i < m->world; i++) sum += all[i];
    if (m->rank == 0) *of_all += sum;
}

enum { MANY_MESSAGES = 12 };

/* A rank of the ring, and its buffers. */
typedef struct {
    Member *m;
    int next, before;
    char *out, *in, *many[2 * MANY_MESSAGES];
    Request r[2 * MANY_MESSAGES];
} Messenger;

/* Round the ring; receive and send take turns at being first, and some ranks come late. */
static void messages_ring(Messenger *g, int rank) {
    Member *m = g->m;
    for (int s = 0; s < MESSAGE_SIZES; s++) {
        size_t bytes = message_bytes[s];
        message_fill(m, g->out, g->next, s, bytes);
        if ((rank + s) % 3 == 0) usleep(3000);
        for (int k = 0; k < 2; k++) {
            if ((rank + s + k) % 2) message(m, &g->r[0], RECEIVE, g->before, s, g->in, bytes);
            else message(m, &g->r[1], SEND, g->next, s, g->out, bytes);
        }
        comm_wait(&m->comm, &g->r[s % 2]);
        comm_wait(&m->comm, &g->r[!(s % 2)]);
        message_check(m, g->in, g->before, s, bytes);
    }
}

/* Messages of different sizes are in flight at once, both ways, and a collective of the same ranks with them. */
static void messages_at_once(Messenger *g, int rank) {
    Member *m = g->m;
    int n = m->world;
    for (int k = 0; k < MANY_MESSAGES; k++) {
        size_t bytes = (size_t)(k + 1) * 331;
        message_fill(m, g->many[k], k % 2 ? g->before : g->next, k, bytes);
        message(m, &g->r[k], SEND, k % 2 ? g->before : g->next, k, g->many[k], bytes);
        if (k == MANY_MESSAGES / 2) {
            int mine = rank, all[8];
            all_gather_now(&m->comm, AXIS_PP, "ranks", &mine, all, sizeof mine);
            for (int i = 0; i < n; i++) m->wrong += all[i] != i;
        }
    }
    for (int k = 0; k < MANY_MESSAGES; k++)
        message(m, &g->r[MANY_MESSAGES + k], RECEIVE, k % 2 ? g->next : g->before, k, g->many[MANY_MESSAGES + k],
                (size_t)(k + 1) * 331);
    for (int k = 2 * MANY_MESSAGES - 1; k >= 0; k--) comm_wait(&m->comm, &g->r[k]);
    for (int k = 0; k < MANY_MESSAGES; k++)
        message_check(m, g->many[MANY_MESSAGES + k], k % 2 ? g->next : g->before, k, (size_t)(k + 1) * 331);
}

/* More messages than a channel remembers. */
static void messages_repeated(Messenger *g) {
    Member *m = g->m;
    for (int k = 0; k < 3 * THREAD_SLOTS; k++) {
        message_fill(m, g->many[0], g->next, k % NAMED_MESSAGES, 64);
        message(m, &g->r[0], RECEIVE, g->before, k % NAMED_MESSAGES, g->many[1], 64);
        message(m, &g->r[1], SEND, g->next, k % NAMED_MESSAGES, g->many[0], 64);
        comm_wait(&m->comm, &g->r[1]);
        comm_wait(&m->comm, &g->r[0]);
        message_check(m, g->many[1], g->before, k % NAMED_MESSAGES, 64);
    }
}

static void messages_all_to_all(Messenger *g, int rank) {
    Member *m = g->m;
    int n = m->world;
    for (int p = 0; p < n; p++) {
        if (p == rank) continue;
        message_fill(m, g->many[p], p, p, 100);
        message(m, &g->r[p], SEND, p, rank, g->many[p], 100);
        message(m, &g->r[MANY_MESSAGES + p], RECEIVE, p, p, g->many[MANY_MESSAGES + p], 100);
    }
    for (int p = 0; p < n; p++) {
        comm_wait(&m->comm, &g->r[p]);
        comm_wait(&m->comm, &g->r[MANY_MESSAGES + p]);
    }
    for (int p = 0; p < n; p++)
        if (p != rank) message_check(m, g->many[MANY_MESSAGES + p], p, rank, 100);
}

/* How many counts of started, measured and, over MPI, profiled traffic differ from what was sent and received. */
static int64_t messages_miscounted_by(const Job *j, const Member *m) {
    int64_t miscounted = 0;
    Traffic told[2][2] = {{m->comm.traffic_started[AXIS_PP][SEND], m->comm.traffic_measured[AXIS_PP][SEND]},
                          {m->comm.traffic_started[AXIS_PP][RECEIVE], m->comm.traffic_measured[AXIS_PP][RECEIVE]}};
    for (int k = 0; k < 4; k++) {
        Traffic t = told[k / 2][k % 2],
                want = {k / 2 ? m->received : m->sent, k / 2 ? m->received_bytes : m->sent_bytes};
        miscounted += !traffic_equal(t, want);
    }
#ifdef HAVE_MPI
    for (int c = 0; c < num_profiled; c++)
        if (j->transport == &transport_mpi && profiled[c].comm == m->comm.groups[AXIS_PP].mpi)
            miscounted +=
                !traffic_equal(profiled[c].of[SEND], told[0][0]) + !traffic_equal(profiled[c].of[RECEIVE], told[1][0]);
#endif
    (void)j;
    return miscounted;
}

/* The orders of all channels are equal; a difference in any of them is found, whichever rank compares first. Returns
 * how many are. */
static int64_t messages_orders(Member *m, int rank) {
    int64_t told_apart = 0;
    int n = m->world;
    RankLines mine = m->comm.heartbeat->lines, all[8];
    all_gather_now(&m->comm, AXIS_WORLD, "lines", &mine, all, sizeof mine);
    for (int p = 0; p < n; p++) m->wrong += line_that_differs(&all[p], &mine) >= 0;
    for (int i = 0; i < mine.num_channels; i++) {
        const RankLines *peer = &all[mine.channels[i].peer];
        mine.order[AXES + i] ^= 1;
        int line = line_that_differs(&mine, peer);
        int is_mine = line >= AXES && peer->channels[line - AXES].peer == rank;
        told_apart += is_mine && line_that_differs(peer, &mine) == AXES + i;
        mine.order[AXES + i] ^= 1;
    }
    return told_apart;
}

static void messages_body(Job *j, int rank) {
#ifdef HAVE_MPI
    if (j->transport == &transport_mpi) {
        memset(profiled, 0, sizeof profiled);
        num_profiled = 0;
    }
#endif
    Member *m = member_open(j, rank, 2 * MOST_BYTES + 64 * 8192);
    Messenger g = ZERO;
    g.m = m;
    g.next = (rank + 1) % m->world;
    g.before = (rank + m->world - 1) % m->world;
    g.out = (char *)member_buffer(m, MOST_BYTES);
    g.in = (char *)member_buffer(m, MOST_BYTES);
    for (int i = 0; i < 2 * MANY_MESSAGES; i++) g.many[i] = (char *)member_buffer(m, 4096);
    messages_ring(&g, rank);
    messages_at_once(&g, rank);
    messages_repeated(&g);
    messages_all_to_all(&g, rank);
    int64_t miscounted = messages_miscounted_by(j, m), told_apart = messages_orders(m, rank);
    for (int a = 0; a < AXES; a++) // the transport has the same members
        for (int i = 0; i < m->comm.groups[a].size; i++)
            m->wrong +=
                m->comm.hosts->group_member(&m->comm, &m->comm.groups[a], i) != mesh_member(&m->mesh, rank, (Axis)a, i);
    add_up(m, m->wrong, &messages_wrong);
    add_up(m, m->received, &messages_passed);
    add_up(m, miscounted, &messages_miscounted);
    add_up(m, told_apart, &messages_told_apart);
    member_close(m);
}

static void test_messages(int process, int world, const Transport *transport) {
    char name[200];
    int ends = 2 * world * (world - 1); // everybody's to and from everybody
    messages_wrong = messages_miscounted = messages_told_apart = messages_passed = 0;
    run_members(process, world, transport, 60, messages_body);
    snprintf(name, sizeof name,
             "%d ranks over %s: messages of 1 byte to 3 MB arrive whole and in order, round the ring, many at once, "
             "both ways, beside a collective",
             world, transport->name);
    if (process == 0)
        CHECK(name, messages_wrong == 0 && messages_passed > 200 * world, "%d wrong of %d", (int)messages_wrong,
              (int)messages_passed);
    snprintf(name, sizeof name,
             "%d ranks over %s: the dry run, the transport and the caller count the same calls and bytes of messages",
             world, transport->name);
    if (process == 0) CHECK(name, messages_miscounted == 0, "%d of %d differ", (int)messages_miscounted, world * 4);
    snprintf(name, sizeof name,
             "%d ranks over %s: an order of messages that differs between two ranks shows in what they tell", world,
             transport->name);
    if (process == 0) CHECK(name, messages_told_apart == ends, "%d of %d", (int)messages_told_apart, ends);
}

static void test_messages_of_a_dry_run(void) {
    Device dev;
    Comm comm;
    Mesh mesh = {4, {1, 1, 4, 1, 1}};
    Request from[2] = ZERO, to = ZERO;
    device_open_dry_run(&dev, 1, 0);
    comm_open_dry_run(&comm, &dev, &mesh, 1);
    send_start(&comm, &to, AXIS_PP, 2, "m0", NULL, 3000000, DTYPE_BYTE);
    for (int k = 0; k < 2; k++) receive_start(&comm, &from[k], AXIS_PP, 0, message_names[k], NULL, 1000000, DTYPE_BYTE);
    for (int k = 0; k < 2; k++) comm_wait(&comm, &from[k]);
    comm_wait(&comm, &to);
    Traffic sent = comm.traffic_started[AXIS_PP][SEND], received = comm.traffic_started[AXIS_PP][RECEIVE];
    CHECK("a dry run counts the bytes of a send and of a receive",
          sent.calls == 1 && sent.bytes == 3000000 && received.calls == 2 && received.bytes == 2000000,
          "%d and %d bytes", (int)sent.bytes, (int)received.bytes);
}

// ---------------------------------------------------------------------------
// messages that do not meet

static int failing_case;

static const Heartbeat *heartbeat_of(const Member *m, int rank) {
    const Heartbeat *h = heartbeat_at(m->comm.heartbeats, 0);
    for (int i = 1; h->lines.rank != rank; i++) h = heartbeat_at(m->comm.heartbeats, i);
    return h;
}

static void failing_body(Job *j, int rank) {
    enum { NOBODY_SENDS, ONE_TOO_MANY, SWAPPED, OTHER_SIZE, EMPTY, TO_ITSELF };
    Member *m = member_open(j, rank, 1 << 16);
    char *buffer = (char *)member_buffer(m, 4096);
    int mine = rank, all[8], c = failing_case;
    Request r[3] = ZERO;
    for (int k = 0; k < 2 && c < EMPTY; k++) { // two that do meet
        if (rank < 2) {
            message(m, &r[0], rank ? RECEIVE : SEND, !rank, k, buffer, 64);
            comm_wait(&m->comm, &r[0]);
        }
        all_gather_now(&m->comm, AXIS_WORLD, "ranks", &mine, all, sizeof mine);
    }
    if (c == NOBODY_SENDS && rank == 1) {
        message(m, &r[0], RECEIVE, 2, 2, buffer, 64);
        comm_wait(&m->comm, &r[0]);
    }
    if (c == NOBODY_SENDS && rank == 2) {
        op_begin(&m->dev, OP_SWIGLU_FORWARD, 0, 0);
        sleep(20); // computes for ever
    }
    if (c == ONE_TOO_MANY && rank == 0) {
        message(m, &r[0], SEND, 1, 2, buffer, 4096);
        comm_wait(&m->comm, &r[0]);
    }
    if (c == SWAPPED && rank < 2) {
        message(m, &r[1], rank ? RECEIVE : SEND, !rank, rank ? 3 : 2, buffer, 64);
        message(m, &r[2], rank ? RECEIVE : SEND, !rank, rank ? 2 : 3, buffer + 64, 64);
    }
    if (c == OTHER_SIZE && rank < 2) message(m, &r[1], rank ? RECEIVE : SEND, !rank, 2, buffer, rank ? 128 : 64);
    if (c == EMPTY && rank == 0) message(m, &r[0], SEND, 1, 0, buffer, 0);
    if (c == TO_ITSELF && rank == 0) message(m, &r[0], SEND, 0, 0, buffer, 64);
    while (c == ONE_TOO_MANY && heartbeat_of(m, 0)->state != RANK_WAITING) usleep(1000); // its deadline is the first
    usleep(c <= ONE_TOO_MANY ? 300000 : rank * 20000);
    all_gather_now(&m->comm, AXIS_WORLD, "reports", &mine, all, sizeof mine);
    sleep(20);
}

static void run_failing(void *arguments) {
    (void)arguments;
    run_members(0, 3, &transport_threads, 1, failing_body);
}

static void test_messages_that_fail(void) {
    static const struct {
        const char *name, *said, *also;
        double within;
    } cases[] = {
        {"a message that nobody sends ends the run at the deadline, by its name and the rank that should have",
         "for receive #1 of 'm2' on pp from rank 2; rank 2 has been running swiglu_forward for ",
         "it has not sent anything to rank 1", 3},
        {"a message too many ends the run at the deadline, by its name and the rank that awaits none",
         "for send #3 of 'm2' on pp to rank 1; rank 1 has been waiting for all_gather #",
         "; its last message was receive #2 of 'm1' on pp from rank 0", 3},
        {"two messages in another order are told as the second rank starts the first",
         "message #3 from rank 0 to rank 1 on pp: 'm2' (64 bytes) is sent, but 'm3' (64 bytes) is expected", "", 0.9},
        {"a message of another size is told before it moves",
         "message #3 from rank 0 to rank 1 on pp: 'm2' (64 bytes) is sent, but 'm2' (128 bytes) is expected", "", 0.9},
        {"a message of no bytes is refused", "send of 'm0', 0 bytes, with", "", 0.9},
        {"a message to oneself is refused", "send of 'm0', 64 bytes, with member 0 of its pp group: exp", "", 0.9}};
    for (failing_case = 0; failing_case < 6; failing_case++) {
        Ending end;
        end_run(&end, run_failing, NULL);
        CHECK(cases[failing_case].name,
              end.code == 2 && end.seconds < cases[failing_case].within && strstr(end.said, cases[failing_case].said) &&
                  strstr(end.said, cases[failing_case].also),
              "code %d after %.1f s (bound %.1f): %s", end.code, end.seconds, cases[failing_case].within, end.said);
    }
}
