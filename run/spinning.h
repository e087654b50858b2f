/* spinning.h: limits how long OpenMP's threads spin at a barrier before they sleep.
 *
 * By default, a waiting thread spins for some milliseconds, which is the fastest way to wait as long as every thread
 * has a core of its own. When another program needs one of the cores, spinning threads occupy the core that the thread
 * they wait for needs, and a step takes three times as long. The limits below were chosen by the measurements in
 * dev/results/busy-cpu.md.
 */
#ifndef SPINNING_H
#define SPINNING_H
#include "../lib/base.h" // defines: the C library, LINUX
#include <limits.h>
#include <omp.h>

#define GNU_SPINS "2000"      // spins of GNU's library, of a few dozen cycles each
#define LLVM_MILLISECONDS "0" // how long a thread of LLVM's library spins

/* limit_spinning is called first in main. A setting that the user has made is left alone, and the program's own is
 * removed from the environment afterwards: the programs that this one starts must not inherit it. */

#ifdef __clang__
static void limit_spinning(char **argv) {
    (void)argv;
    if (getenv("OMP_WAIT_POLICY") || getenv("KMP_BLOCKTIME")) return;
    setenv("KMP_BLOCKTIME", LLVM_MILLISECONDS, 1);
    omp_get_max_threads(); // LLVM's library reads its settings when it is first called
    unsetenv("KMP_BLOCKTIME");
}
#elif defined(LINUX)
#include <elf.h>
#include <link.h>

extern const ElfW(Ehdr) __ehdr_start; // the linker's name for the header of this program in memory

/* Is this the file that the program was loaded from? When the user starts the dynamic loader with this program
 * as its argument, /proc/self/exe is the loader. */
static int is_file_of_this_program(const char *path) {
    ElfW(Ehdr) header;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    int same = read(fd, &header, sizeof header) == sizeof header && !memcmp(&header, &__ehdr_start, sizeof header);
    close(fd);
    return same;
}

/* GNU's library reads its settings while it is loaded, so the program sets them and then starts itself again with
 * execv, which keeps the process ID. Where that fails, threads spin for the library's time. */
static void limit_spinning(char **argv) {
    static const char started_again[] = "LLAMA3_STARTED_AGAIN";
    char program[PATH_MAX];
    if (!getenv(started_again)) {
        if (getenv("OMP_WAIT_POLICY") || getenv("GOMP_SPINCOUNT")) return;
        ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
        if (length <= 0) return;
        program[length] = 0;
        if (!is_file_of_this_program(program)) return;
        setenv("GOMP_SPINCOUNT", GNU_SPINS, 1);
        setenv(started_again, "1", 1);
        execv(program, argv);
    }
    unsetenv(started_again);
    unsetenv("GOMP_SPINCOUNT");
}
#else
static void limit_spinning(char **argv) { (void)argv; }
#endif

#endif
