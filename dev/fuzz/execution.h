/* execution.h: the targets of a fuzzer, and one execution. Included last, after `targets`, their table; fuzz_prepare,
 * which is called once; and fuzz_reset, which is called before each execution and clears what a program keeps. Whatever
 * comes, the program has to take it or refuse it with one line `error: …` and exit code 1; what it takes has to be what
 * the bytes say, which each target reads again in a way of its own.
 *
 * An engine (libFuzzer, or plain.h) calls LLVMFuzzerTestOneInput; the name by which the program is called is the
 * target's.
 */
#ifndef FUZZ_EXECUTION_H
#define FUZZ_EXECUTION_H

enum { TARGETS = sizeof targets / sizeof targets[0] };
static const Target *target;
static long long executions, taken; // taken: see held

/* Exit code 1 after one line that says something, and nothing else: that is a refusal. */
static void check_refusal(void) {
    size_t length = said_length(&said_err);
    const char *line = said_err.text, *end = (const char *)memchr(line, '\n', length);
    EXPECT(program_code == 1, "exit code %d: %.*s", program_code, (int)length, line);
    EXPECT(!held.promise, "%s is refused: %.*s", held.promise, (int)length, line);
    EXPECT(length > 12 && !memcmp(line, "error: ", 7) && end == line + length - 1, "not one line: '%.*s'", (int)length,
           line);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    Bytes in = {data, size};
    executions++;
    fuzz_reset();
    rewind(stdout);
    rewind(stderr);
    held.promise = NULL;
    held.taken = 0;
    running = 1;
    if (!_setjmp(program_ended)) {
        target->run(in);
        running = 0;
        EXPECT(!held.num_blocks && !held.num_files && !held.num_fds,
               "left behind: %d blocks of memory, %d files, %d descriptors", held.num_blocks, held.num_files,
               held.num_fds);
        EXPECT(!said_length(&said_err), "an input that is taken, and on stderr: %.*s", (int)said_length(&said_err),
               said_err.text);
    } else {
        take_back();
        check_refusal();
    }
    taken += held.taken;
    return 0;
}

/* As libFuzzer reads dictionaries. */
static void print_dictionary(const Target *t) {
    for (int i = 0; t->words[i]; i++) {
        dprintf(1, "\"");
        for (const char *c = t->words[i]; *c; c++)
            dprintf(1, *c >= '0' && *c <= 'z' && *c != '\\' ? "%c" : "\\x%02x", (uint8_t)*c);
        dprintf(1, "\"\n");
    }
}

static int remove_one(const char *path, const struct stat *info, int kind, struct FTW *where) {
    (void)info;
    (void)kind;
    (void)where;
    return remove(path);
}

static void say_how_many(void) {
    dprintf(2, "taken: %lld of %lld\n", taken, executions);
    if (!getenv("FUZZ_DIR")) nftw(folder, remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

/* From clang's and gcc's sanitizers alike; gcc has no header for it. */
int __sanitizer_install_malloc_and_free_hooks(void (*taken)(const volatile void *, size_t),
                                              void (*given)(const volatile void *));

#ifdef PLAIN_ENGINE
#define ENDS_BY_ABORT "abort_on_error=1:"
#else
#define ENDS_BY_ABORT ""
#endif
const char *__asan_default_options(void) {
    return ENDS_BY_ABORT "detect_leaks=0:allocator_may_return_null=1:quarantine_size_mb=4";
} // leaks: see held
const char *__ubsan_default_options(void) { return ENDS_BY_ABORT "print_stacktrace=1"; }

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    static const char *const launchers[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"};
    const char *slash = strrchr((*argv)[0], '/'), *name = slash ? slash + 1 : (*argv)[0], *given = getenv("FUZZ_DIR");
    for (int i = 0; i < TARGETS; i++)
        if (!strcmp(name, targets[i].name)) target = &targets[i];
    fuzz_prepare();
    if (target && *argc >= 2 && !strcmp((*argv)[1], "--dictionary")) {
        print_dictionary(target);
        exit(0);
    }
    const char *place = access("/dev/shm", W_OK) ? "/tmp/llama3-fuzz-XXXXXX" : "/dev/shm/llama3-fuzz-XXXXXX";
    snprintf(folder, sizeof folder, "%s", given ? given : place);
    if (!target || (!given && !mkdtemp(folder)))
        finding("'%s' is the name of no target, or there is no folder %s", name, folder);
    mkdir(path_of("weights"), 0700);
    mkdir(path_of("parts"), 0700);
    mkdir(path_of("saved"), 0700);
    mkdir(path_of("adapted"), 0700);
    for (int i = 0; i < 3; i++) unsetenv(launchers[i]);
    said_out.file = fmemopen(said_out.text, sizeof said_out.text, "w");
    said_err.file = fmemopen(said_err.text, sizeof said_err.text, "w");
    static char *with_length[64], longest[32]; // the engine learns how long inputs may be
    if (*argc > 62) finding("%d arguments", *argc);
    memcpy(with_length, *argv, sizeof(char *) * (size_t)*argc);
    snprintf(longest, sizeof longest, "-max_len=%zu", target->longest);
    with_length[(*argc)++] = longest;
    *argv = with_length;
    __sanitizer_install_malloc_and_free_hooks(block_taken, block_given);
    atexit(say_how_many);
    return 0;
}

#include "mutate.h"
#ifdef PLAIN_ENGINE
#include "plain.h"
#endif

#endif
