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

enum { NOT_PLANTED, PLANTED, REACHED };
static unsigned char planted_states[1024]; // by number of the fault

__attribute__((constructor)) static void planted_read(void) {
    const char *at = getenv("PLANTED");
    while (at && *at) {
        char *end;
        long fault = strtol(at, &end, 10);
        if (end == at || fault < 1 || fault >= (long)sizeof planted_states) {
            fprintf(stderr, "PLANTED is %s: expected numbers of faults, separated by commas\n", getenv("PLANTED"));
            _exit(1);
        }
        planted_states[fault] = PLANTED;
        at = *end ? end + 1 : end;
    }
}

/* It makes system calls directly: the libraries of dev/test that count calls of the C library or make them fail must not
 * see these. */
__attribute__((noinline, unused)) static int planted_reach(int fault) {
    const char *path = getenv("PLANTED_REACHED");
    if (__atomic_exchange_n(&planted_states[fault], REACHED, __ATOMIC_RELAXED) == REACHED || !path) return 1;
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
    return __builtin_expect(planted_states[fault] != NOT_PLANTED, 0) && planted_reach(fault);
}

#endif
