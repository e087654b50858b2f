/* spinning.h: limits how long OpenMP's threads spin at a barrier before they sleep.
 *
 * GNU's library lets a waiting thread spin for some milliseconds, which is the fastest way to wait as long as every
 * thread has a core of its own. When another program needs one of the cores, threads that spin keep the one that they
 * wait for from running, and a step takes three times as long. The library reads its settings when it is loaded, so the
 * program sets them and then starts itself once more, as the same process.
 */
#ifndef SPINNING_H
#define SPINNING_H
#include "../lib/base.h" // defines: the C library
#include <limits.h>

/* Spins of GNU's library, of a few dozen cycles each, and milliseconds of LLVM's. dev/results/busy-cpu.md has the
 * measurements by which they were chosen. */
#define GNU_SPINS "2000"
#define LLVM_MILLISECONDS "0"

/* Settings that the user has made are left alone. Returns if they, or an earlier call, have set them. */
static void limit_spinning(char **argv) {
    static const char *const settings[] = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"};
    char program[PATH_MAX];
    for (int i = 0; i < 3; i++)
        if (getenv(settings[i])) return;
    ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
    if (length <= 0) return; // without /proc they spin longer
    program[length] = 0;
    setenv("GOMP_SPINCOUNT", GNU_SPINS, 1);
    setenv("KMP_BLOCKTIME", LLVM_MILLISECONDS, 1);
    execv(program, argv); // if that fails, they spin longer
}

#endif
