/* planted.h: faults behind branches, in a copy of the source that dev/test/plant.py has changed. The compiler includes
 * this file before all others (-include). PLANTED=12,40 plants two faults; each process adds the numbers of those whose
 * branches it reaches to the file that PLANTED_REACHED names.
 */
#ifndef PLANTED_H
#define PLANTED_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { PLANTED_NOT, PLANTED_HERE, PLANTED_AND_REACHED, MOST_PLANTED = 1024 };
static unsigned char planted_states[MOST_PLANTED]; // by number of the fault

__attribute__((constructor)) static void planted_read(void) {
    const char *at = getenv("PLANTED");
    while (at && *at) {
        char *end;
        long fault = strtol(at, &end, 10);
        if (end == at || fault < 1 || fault >= MOST_PLANTED) {
            fprintf(stderr, "PLANTED is %s: expected numbers of faults, separated by commas\n", getenv("PLANTED"));
            _exit(1);
        }
        planted_states[fault] = PLANTED_HERE;
        at = *end ? end + 1 : end;
    }
}

/* System calls without the C library: the libraries of dev/test that count its calls, or let them fail, see none. */
__attribute__((noinline, unused)) static int planted_reach(int fault) {
    if (__atomic_exchange_n(&planted_states[fault], PLANTED_AND_REACHED, __ATOMIC_RELAXED) == PLANTED_AND_REACHED) return 1;
    const char *path = getenv("PLANTED_REACHED");
    if (!path) return 1;
    int before = errno;
    char line[16];
    int length = snprintf(line, sizeof line, "%d\n", fault);
    long fd = syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (fd < 0 || syscall(SYS_write, fd, line, length) != length) _exit(1);
    syscall(SYS_close, fd);
    errno = before;
    return 1;
}

__attribute__((unused)) static inline int planted(int fault) {
    return __builtin_expect(planted_states[fault] != PLANTED_NOT, 0) && planted_reach(fault);
}

#endif
