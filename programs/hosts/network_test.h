/* network_test.h: tests which networks connect the hosts of a run.
 *
 * Open MPI tries every network that two hosts seem to share. One that does not connect them, or on which both have the
 * same address, makes a run hang at its start or in a later collective. */
#ifndef NETWORK_TEST_H
#define NETWORK_TEST_H
#include "../../lib/comm/culprit.h" // defines: Interface, MAX_INTERFACES
#include <poll.h>
#include <pthread.h>

// Flags that some systems lack. Without SOCK_CLOEXEC, child processes inherit a socket; without MSG_NOSIGNAL, sending
// to a closed connection raises SIGPIPE.
#ifndef SOCK_CLOEXEC
#define SOCK_CLOEXEC 0
#endif
#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0
#endif

// ---------------------------------------------------------------------------
// which networks Open MPI uses for its messages

/* Does a list like "eth0,10.77.0.0/16" hold this interface? A network holds all whose address begins with its bits. */
static int names_interface(const char *list, const Interface *i) {
    for (const char *at = list; *at; at += strspn(at, ",")) {
        char word[64];
        uint32_t network = 0;
        int n = (int)strcspn(at, ",");
        snprintf(word, sizeof word, "%.*s", n, at);
        at += n;
        char *slash = strchr(word, '/');
        if (!strcmp(word, i->name)) return 1;
        if (!slash) continue;
        *slash = 0; // ends the address
        int bits = atoi(slash + 1);
        uint32_t mask = bits > 0 && bits <= 32 ? htonl(UINT32_MAX << (32 - bits)) : 0;
        if (inet_pton(AF_INET, word, &network) == 1 && (network & mask) == (i->address & mask)) return 1;
    }
    return 0;
}

/* May Open MPI use this interface, by the settings that it was started with? */
static int interface_in_use(const Interface *i) {
    const char *include = getenv("OMPI_MCA_btl_tcp_if_include"), *exclude = getenv("OMPI_MCA_btl_tcp_if_exclude");
    if (include) return names_interface(include, i);
    return !exclude || !names_interface(exclude, i);
}

// ---------------------------------------------------------------------------
// a test of the networks: each host listens, and other hosts connect over every network that they seem to share

/* What a host tells the others before the test. */
typedef struct {
    int count;
    Interface interfaces[MAX_INTERFACES];
    uint64_t id;   // what its listener answers
    uint16_t port; // of its listener, in network byte order; 0: it could not open one
} HostNetwork;

typedef struct {
    int socket;
    uint64_t id;
    pthread_t thread;
} Listener;

static void *listener_thread(void *arg) {
    const Listener *l = (const Listener *)arg;
    for (;;) {
        int from = accept(l->socket, NULL, NULL);
        if (from < 0 && errno != EINTR && errno != ECONNABORTED) return NULL; // listener_close has shut the socket
        if (from < 0) continue;
        ssize_t sent = send(from, &l->id, sizeof l->id, MSG_NOSIGNAL);
        (void)sent; // if this failed, the connecting host reports the network as not connected
        close(from);
    }
}

/* Listens on all interfaces, and answers each connection with `id`. Returns the port, or 0. */
static uint16_t listener_open(Listener *l, uint64_t id) {
    struct sockaddr_in at = ZERO;
    socklen_t size = sizeof at;
    at.sin_family = AF_INET;
    l->id = id;
    l->socket = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (l->socket < 0) return 0;
    int failed = bind(l->socket, (struct sockaddr *)(void *)&at, size) || listen(l->socket, 128);
    if (!failed) failed = getsockname(l->socket, (struct sockaddr *)(void *)&at, &size);
    if (!failed) failed = thread_start(&l->thread, listener_thread, l);
    if (!failed) return at.sin_port;
    close(l->socket);
    return 0;
}

static void listener_close(Listener *l) {
    shutdown(l->socket, SHUT_RDWR);
    pthread_join(l->thread, NULL);
    close(l->socket);
}

/* Begins to connect from an interface of this host. Returns the socket, or -1. */
static int connect_start(const Interface *from, uint32_t address, uint16_t port) {
    struct sockaddr_in own = ZERO, other = ZERO;
    int s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (s < 0) return -1;
    fcntl(s, F_SETFL, O_NONBLOCK);
    own.sin_family = other.sin_family = AF_INET;
    own.sin_addr.s_addr = from->address;
    other.sin_addr.s_addr = address;
    other.sin_port = port;
    int failed = bind(s, (struct sockaddr *)(void *)&own, sizeof own);
    if (!failed) failed = connect(s, (struct sockaddr *)(void *)&other, sizeof other) && errno != EINPROGRESS;
    if (!failed) return s;
    close(s);
    return -1;
}

typedef enum { NOT_SHARED, CONNECTS, SAME_ADDRESS, NOT_CONNECTED } NetworkState;

typedef struct {
    struct pollfd socket; // fd -1: nothing is tried, or the try has ended
    uint64_t expected;    // what the other host's listener answers
    uint8_t *state;       // NetworkState
} ConnectTry;

/* Begins to connect to another host over an interface of this one, if both have an address in its network. */
static void try_start(ConnectTry *t, const Interface *mine, const HostNetwork *other) {
    t->expected = other->id;
    for (int i = 0; i < other->count && t->socket.fd < 0; i++) {
        const Interface *its = &other->interfaces[i];
        if (its->mask != mine->mask || (its->address & its->mask) != (mine->address & mine->mask)) continue;
        *t->state = its->address == mine->address ? SAME_ADDRESS : NOT_CONNECTED;
        if (*t->state == NOT_CONNECTED) t->socket.fd = connect_start(mine, its->address, other->port);
    }
}

/* Reads the other host's answer if it has arrived. Returns whether the try is still open. */
static int try_read(ConnectTry *t) {
    uint64_t answer = 0;
    if (t->socket.fd < 0) return 0;
    poll(&t->socket, 1, 0);
    if (!t->socket.revents) return 1;
    if (recv(t->socket.fd, &answer, sizeof answer, 0) == sizeof answer && answer == t->expected) *t->state = CONNECTS;
    close(t->socket.fd);
    t->socket.fd = -1;
    return 0;
}

/* Whether this host reaches `count` other hosts over each of its interfaces: states (count, MAX_INTERFACES). All
 * connections are tried at once, for at most a second. */
static void try_networks(const HostNetwork *own, const HostNetwork *const *others, int count,
                         uint8_t (*states)[MAX_INTERFACES]) {
    ConnectTry *tries = new_array(ConnectTry, count * MAX_INTERFACES);
    int open = 1;
    for (int n = 0; n < count * MAX_INTERFACES; n++) {
        const HostNetwork *other = others[n / MAX_INTERFACES];
        int interface = n % MAX_INTERFACES;
        tries[n].socket.fd = -1;
        tries[n].socket.events = POLLIN;
        tries[n].state = &states[n / MAX_INTERFACES][interface];
        *tries[n].state = NOT_SHARED;
        if (interface < own->count && other->port && interface_in_use(&own->interfaces[interface]))
            try_start(&tries[n], &own->interfaces[interface], other);
    }
    for (double end = seconds_now() + 1; open && seconds_now() < end; usleep(1000)) {
        open = 0;
        for (int n = 0; n < count * MAX_INTERFACES; n++) open += try_read(&tries[n]);
    }
    for (int n = 0; n < count * MAX_INTERFACES; n++)
        if (tries[n].socket.fd >= 0) close(tries[n].socket.fd);
    free(tries);
}

#endif
