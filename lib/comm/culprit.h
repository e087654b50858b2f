/* culprit.h: finds the rank that the others wait for, from the heartbeat tables of all hosts.
 *
 * A rank whose wait has timed out reads its host's heartbeat table, and the transport asks the other hosts for theirs
 * (Transport.ask_hosts). A member of the group that was killed or stopped, or that does not answer, is to blame. So is
 * one that does not wait and either has not started the collective or has given no sign of life for half of the limit:
 * on CPUs data moves only when both sides poll. A member that waits for another collective is not: the search goes on
 * with the members of that one.
 */
#ifndef CULPRIT_H
#define CULPRIT_H
#include "watchdog.h" // defines: Heartbeat, HeartbeatTable, say_rank, say_last_collective
#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

/* The heartbeat of one rank, as it was last read or received. */
typedef struct {
    int known;     // 0: it was neither read nor received
    int question;  // the number of the question that this answers
    int process;   // ProcessState
    int state;     // RankState
    double silent; // seconds since its last sign of life
    int wait_line; // RANK_WAITING: it waits for this collective
    int64_t wait_number;
    RankLines lines;
    int64_t started[LINES];
    char doing[384]; // "rank 2 on host b7 (process 77) has been running adamw for 61.2 s"
} RankNews;

typedef struct WorldNews {
    const Mesh *mesh;
    HeartbeatTable *table; // of this host
    double limit;          // seconds that a wait may last
    int asked;             // the other hosts had time to answer, so a rank without an answer counts as lost
    RankNews *ranks;       // (world)
} WorldNews;

static inline RankNews news_of_rank(const HeartbeatTable *table, Heartbeat *k) {
    RankNews r = ZERO;
    double now = seconds_now();
    Sentence doing = {r.doing, sizeof r.doing, 0};
    r.known = 1;
    r.process = process_state(k);
    r.state = k->state;
    r.silent = now - last_sign(k);
    r.wait_line = k->wait_line;
    r.wait_number = k->wait_number;
    r.lines = k->lines;
    memcpy(r.started, k->started, sizeof r.started);
    say_rank(&doing, table, k, (ProcessState)r.process, now);
    return r;
}

/* Copies this host's heartbeat table into `news`. */
static inline void news_of_host(WorldNews *news) {
    for (int i = 0; i < __atomic_load_n(&news->table->attached, __ATOMIC_ACQUIRE); i++) {
        Heartbeat *k = heartbeat_at(news->table, i);
        if (__atomic_load_n(&k->process, __ATOMIC_ACQUIRE)) news->ranks[k->lines.rank] = news_of_rank(news->table, k);
    }
}

/* Was a rank of this rank's host killed or stopped? Then this host need not wait for what others say. */
static inline int lost_on_host_of(const WorldNews *news, int rank) {
    for (int i = 0; i < news->mesh->world; i++)
        if (news->ranks[i].known && news->ranks[i].process != PROCESS_RUNS && host_of_rank(i) == host_of_rank(rank))
            return 1;
    return 0;
}

// ---------------------------------------------------------------------------
// who is suspect

typedef enum {
    SUSPECT_LOST,    // its process was killed or is stopped, or its host does not answer
    SUSPECT_BUSY,    // it does not wait, and has not started the collective or shown no sign of life for half the limit
    SUSPECT_WAITING, // it has not started the collective, because it waits for another one
    NOT_SUSPECT
} Suspicion;

/* How many ranks must take part in a collective or message on a line of `rank`, and the i-th of them. */
static inline int members_of_line(const WorldNews *news, int line) {
    return is_channel(line) ? 1 : mesh_group_size(news->mesh, (Axis)line);
}
static inline int member_of_line(const WorldNews *news, int rank, int line, int i) {
    return is_channel(line) ? news->ranks[rank].lines.channels[line - AXES].peer
                            : mesh_member(news->mesh, rank, (Axis)line, i);
}

static inline int has_started(const WorldNews *news, int other, int rank, int line, int64_t number) {
    int there = line_of_other(&news->ranks[other].lines, &news->ranks[rank].lines, line);
    return there >= 0 && news->ranks[other].started[there] >= number;
}

/* How suspect another rank is while `rank` waits for collective `number` on its line. */
static inline Suspicion suspicion_of(const WorldNews *news, int other, int rank, int line, int64_t number) {
    const RankNews *r = &news->ranks[other];
    if (!r->known) return news->asked ? SUSPECT_LOST : NOT_SUSPECT;
    if (r->process != PROCESS_RUNS) return SUSPECT_LOST;
    int is_behind = !has_started(news, other, rank, line, number);
    if (r->state != RANK_WAITING && (is_behind || r->silent > news->limit / 2)) return SUSPECT_BUSY;
    return is_behind && r->state == RANK_WAITING ? SUSPECT_WAITING : NOT_SUSPECT;
}

// ---------------------------------------------------------------------------
// the sentence

/* "rank 2 on host n2 (process 77) has been running adamw for 61.2 s; its last collective was …" or "host n3 with
 * ranks 4, 5 does not answer: …" */
static inline void say_suspect(Sentence *t, const WorldNews *news, int other, int rank, int line, int64_t number) {
    const RankNews *r = &news->ranks[other];
    const RankLines *mine = &news->ranks[rank].lines;
    int there = line_of_other(&r->lines, mine, line);
    if (!r->known) {
        enum { SHOWN = 16 };
        const RunHost *host = host_of_rank(other);
        int listed = 0;
        say(t, "host %s with rank%s", host->name, host->ranks == 1 ? "" : "s");
        for (int i = host->first_rank; i < news->mesh->world && listed < SHOWN; i++)
            if (host_of_rank(i) == host) say(t, "%s%d", listed++ ? ", " : " ", i);
        say(t, "%s does not answer: it is down, or all its processes have stopped, or the network to it is cut",
            host->ranks > SHOWN ? ", …" : "");
        return;
    }
    say(t, "%s", r->doing);
    if (has_started(news, other, rank, line, number)) return;
    for (int i = 0; i < news->table->attached && there >= 0; i++)
        if (heartbeat_at(news->table, i)->lines.rank == other)
            say_last_collective(t, heartbeat_at(news->table, i), there);
    if (is_channel(line) && there < 0)
        say(t, "; it has not %s %s",
            mine->channels[line - AXES].receives ? "sent anything to" : "received anything from", rank_name(rank));
}

/* Names up to four members with this suspicion. Returns how many there are. */
static inline int say_suspects(Sentence *t, const WorldNews *news, int rank, int line, int64_t number,
                               Suspicion suspicion) {
    int named = 0;
    char *is_said = new_array(char, run_hosts.count + 1); // all ranks of a host that does not answer are named together
    for (int i = 0; i < members_of_line(news, line); i++) {
        int other = member_of_line(news, rank, line, i);
        if (other == rank || suspicion_of(news, other, rank, line, number) != suspicion) continue;
        if (!news->ranks[other].known) {
            char *said = &is_said[host_of_rank(other) - run_hosts.hosts];
            if (*said) continue;
            *said = 1;
        }
        if (named++ >= 4) continue;
        if (named > 1) say(t, ". Also ");
        say_suspect(t, news, other, rank, line, number);
    }
    if (named > 4) say(t, ", and %d more", named - 4);
    free(is_said);
    return named;
}

/* A member that has not started the collective because it waits for another one, and was not `seen` yet; -1: none. */
static inline int waiting_member(const WorldNews *news, int rank, int line, int64_t number, const char *seen) {
    for (int i = 0; i < members_of_line(news, line); i++) {
        int other = member_of_line(news, rank, line, i);
        if (!seen[other] && suspicion_of(news, other, rank, line, number) == SUSPECT_WAITING) return other;
    }
    return -1;
}

/* Names the ranks that keep this collective of `rank` from completing. Returns whether it found any; otherwise the
 * sentence says where to look. */
static inline int say_culprits(Sentence *t, const WorldNews *news, int rank, int line, int64_t number) {
    int found = 0, world = news->mesh->world, known = 0, followed = 0;
    char *seen = new_array(char, world);
    while (rank >= 0 && !found) {
        seen[rank] = 1;
        found = say_suspects(t, news, rank, line, number, SUSPECT_LOST) ||
                say_suspects(t, news, rank, line, number, SUSPECT_BUSY);
        int next = found ? -1 : waiting_member(news, rank, line, number, seen);
        if (next >= 0) {
            if (followed++ < 3) {
                say_suspect(t, news, next, rank, line, number);
                say(t, "; ");
            }
            line = news->ranks[next].wait_line;
            number = news->ranks[next].wait_number;
        }
        rank = next;
    }
    for (int i = 0; i < world; i++) known += news->ranks[i].known;
    if (!found) {
        say(t, "none of the %d ranks that answered keeps it from completing", known);
        if (known < world) say(t, ": look at the other hosts");
        else if (run_hosts.count > 1) say(t, ": look at the network between the hosts");
    }
    free(seen);
    return found;
}

// ---------------------------------------------------------------------------
// this host's networks, for messages of runs whose hosts do not reach each other

enum { MAX_INTERFACES = 8 };

typedef struct {
    char name[16];
    uint32_t address, mask; // IPv4, in network byte order
} Interface;

/* Lists the IPv4 interfaces that are up, without the loopback. Returns how many there are, at most MAX_INTERFACES. */
static inline int list_interfaces(Interface list[MAX_INTERFACES]) {
    struct ifaddrs *all = NULL;
    int count = 0;
    if (getifaddrs(&all)) return 0;
    for (const struct ifaddrs *i = all; i && count < MAX_INTERFACES; i = i->ifa_next) {
        if (!i->ifa_addr || i->ifa_addr->sa_family != AF_INET) continue;
        if (!(i->ifa_flags & IFF_UP) || i->ifa_flags & IFF_LOOPBACK) continue;
        const struct sockaddr_in *at = (const struct sockaddr_in *)(const void *)i->ifa_addr;
        const struct sockaddr_in *mask = (const struct sockaddr_in *)(const void *)i->ifa_netmask;
        Interface *added = &list[count++];
        snprintf(added->name, sizeof added->name, "%.15s", i->ifa_name);
        added->address = at->sin_addr.s_addr;
        added->mask = mask ? mask->sin_addr.s_addr : UINT32_MAX;
    }
    freeifaddrs(all);
    return count;
}

/* "10.77.0.2/24" */
static inline void say_network(Sentence *t, uint32_t address, uint32_t mask) {
    char text[INET_ADDRSTRLEN];
    inet_ntop(AF_INET, &address, text, sizeof text);
    say(t, "%s/%d", text, __builtin_popcount(mask));
}

/* Names up to four TCP connections of this host that the other side has not answered: "10.77.0.2 to 10.88.0.3 port
 * 1024". Returns how many there are. */
static inline int say_unanswered_connections(Sentence *t) {
    char line[512];
    unsigned from, to, from_port, to_port, state;
    int count = 0;
    FILE *f = fopen("/proc/net/tcp", "r"); // a line for each: number, local and remote address in hexadecimal, state
    while (f && fgets(line, sizeof line, f)) {
        enum { SYN_SENT = 2 };
        if (sscanf(line, " %*d: %8X:%4X %8X:%4X %2X", &from, &from_port, &to, &to_port, &state) != 5) continue;
        if (state != SYN_SENT || count++ >= 4) continue;
        char names[2][INET_ADDRSTRLEN];
        inet_ntop(AF_INET, &from, names[0], sizeof names[0]);
        inet_ntop(AF_INET, &to, names[1], sizeof names[1]);
        say(t, "%s%s to %s port %u", count > 1 ? ", " : "", names[0], names[1], to_port);
    }
    if (f) fclose(f);
    return count;
}

#endif
