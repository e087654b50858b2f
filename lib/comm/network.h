/* network.h: this host's network interfaces and its TCP connections that were not answered, for messages of runs whose
 * hosts do not reach each other. check_hosts tests the networks themselves (programs/hosts/network_test.h).
 */
#ifndef NETWORK_H
#define NETWORK_H
#include "watchdog.h" // defines: Sentence, say
#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

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

/* "eth0 10.77.0.2/24, docker0 172.17.0.1/16" */
static inline void say_interfaces(Sentence *t) {
    Interface list[MAX_INTERFACES];
    int count = list_interfaces(list);
    for (int i = 0; i < count; i++) {
        say(t, "%s%s ", i ? ", " : "", list[i].name);
        say_network(t, list[i].address, list[i].mask);
    }
    if (!count) say(t, "none but the loopback");
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
