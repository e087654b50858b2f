/* network.h: this host's network in words, for the message that ranks did not find each other. */
#ifndef NETWORK_H
#define NETWORK_H
#include "watchdog.h" // defines: Sentence, say
#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>

/* "eth0 10.77.0.2/24, docker0 172.17.0.1/16": the IPv4 interfaces that are up, without the loopback. */
static inline void say_interfaces(Sentence *t) {
    struct ifaddrs *all = NULL;
    int count = 0;
    if (getifaddrs(&all)) all = NULL;
    for (const struct ifaddrs *i = all; i; i = i->ifa_next) {
        char address[INET_ADDRSTRLEN];
        if (!i->ifa_addr || i->ifa_addr->sa_family != AF_INET) continue;
        if (!(i->ifa_flags & IFF_UP) || i->ifa_flags & IFF_LOOPBACK) continue;
        const struct sockaddr_in *at = (const struct sockaddr_in *)(const void *)i->ifa_addr;
        const struct sockaddr_in *mask = (const struct sockaddr_in *)(const void *)i->ifa_netmask;
        inet_ntop(AF_INET, &at->sin_addr, address, sizeof address);
        say(t, "%s%s %s/%d", count++ ? ", " : "", i->ifa_name, address,
            mask ? __builtin_popcount(mask->sin_addr.s_addr) : 32);
    }
    if (!count) say(t, "none but the loopback");
    if (all) freeifaddrs(all);
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
