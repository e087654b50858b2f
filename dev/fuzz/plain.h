/* plain.h: the engine where libFuzzer is not to be had. Changes seeds at random and hopes: no coverage guides it.
 * Understands of libFuzzer's command line what run.sh uses, and ends as libFuzzer does. The same seed number, seeds and
 * number of executions give the same inputs: the hash of all of them is printed.
 */
#ifndef PLAIN_H
#define PLAIN_H
#include <dirent.h>

enum { PLAIN_SEEDS = 1000, PLAIN_LONGEST = 1 << 16 };

typedef struct {
    uint8_t *bytes;
    size_t size;
    char path[512];
} PlainInput;

static PlainInput plain_seeds[PLAIN_SEEDS];
static int num_plain_seeds;
static uint8_t plain_input[PLAIN_LONGEST];
static size_t plain_size;
static const char *plain_artifacts = "";

/* Keeps the input under way when it ends the process: the sanitizers, too, end it by abort. */
static void plain_keep(int number) {
    char path[512];
    snprintf(path, sizeof path, "%sfinding-%016" PRIx64, plain_artifacts,
             hash_bytes(HASH_START, plain_input, plain_size));
    int fd = (open)(path, O_WRONLY | O_CREAT | O_TRUNC, 0666);
    if (fd >= 0 && write(fd, plain_input, plain_size) == (ssize_t)plain_size)
        dprintf(2, "Test unit written to %s\n", path);
    signal(number, SIG_DFL);
    raise(number);
}

static void plain_add(const char *path) {
    struct stat info;
    DIR *dir = opendir(path);
    if (!dir && num_plain_seeds < PLAIN_SEEDS && !stat(path, &info) && info.st_size <= PLAIN_LONGEST) {
        PlainInput *seed = &plain_seeds[num_plain_seeds++];
        seed->bytes = (uint8_t *)read_file(path, &seed->size);
        snprintf(seed->path, sizeof seed->path, "%s", path);
    }
    for (struct dirent *entry = dir ? readdir(dir) : NULL; entry; entry = readdir(dir)) {
        char below[512];
        snprintf(below, sizeof below, "%s/%s", path, entry->d_name);
        if (entry->d_name[0] != '.') plain_add(below);
    }
    if (dir) closedir(dir);
}

static int plain_by_name(const void *a, const void *b) {
    return strcmp(((const PlainInput *)a)->path, ((const PlainInput *)b)->path);
}

/* Bytes, wherever they are. */
static void plain_change(Text *t) {
    size_t at = below(t->size + 1), most = t->size - at, n = most ? below(most < 32 ? most : 32) + 1 : 0;
    uint8_t byte = (uint8_t)below(256);
    const PlainInput *other = &plain_seeds[below((uint64_t)num_plain_seeds)];
    const char *word = random_word();
    size_t from = below(other->size + 1), length = below(other->size - from + 1);
    switch (below(8)) {
    case 0:
        if (n) t->bytes[at] ^= (uint8_t)(1 << byte % 8);
        break;
    case 1:
        if (n) t->bytes[at] = byte;
        break;
    case 2:
        if (n) t->bytes[at] = (uint8_t)(t->bytes[at] + byte % 9 - 4);
        break;
    case 3: text_replace(t, at, n, NULL, 0); break;                                    // erased
    case 4: text_replace(t, below(t->size - n + 1), 0, t->bytes + at, n); break;       // copied within
    case 5: text_replace(t, at, byte & 1 ? n : 0, other->bytes + from, length); break; // spliced
    case 6: text_replace(t, at, byte & 1 ? n : 0, (const uint8_t *)word, strlen(word)); break;
    case 7: text_replace(t, at, 0, &byte, 1); break;
    }
}

/* What libFuzzer offers its mutators. */
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t most) {
    Text t = {data, size, most};
    for (uint64_t changes = 1 + below(4); changes; changes--) plain_change(&t);
    return t.size;
}

int main(int argc, char **argv) {
    long long runs = -1, seed = 1;
    LLVMFuzzerInitialize(&argc, &argv);
    for (int i = 1; i < argc; i++) {
        if (!strncmp(argv[i], "-runs=", 6)) runs = atoll(argv[i] + 6);
        else if (!strncmp(argv[i], "-seed=", 6)) seed = atoll(argv[i] + 6);
        else if (!strncmp(argv[i], "-artifact_prefix=", 17)) plain_artifacts = argv[i] + 17;
        else if (argv[i][0] != '-') plain_add(argv[i]);
    }
    qsort(plain_seeds, (size_t)num_plain_seeds, sizeof *plain_seeds, plain_by_name);
    signal(SIGABRT, plain_keep);
    signal(SIGALRM, plain_keep);
    uint64_t hash = HASH_START;
    double start = seconds_now();
    long long run = 0;
    for (; run < (runs < 0 ? num_plain_seeds : runs) && num_plain_seeds; run++) { // the seeds themselves come first
        random_state = mix64((uint64_t)seed) + (uint64_t)run;
        const PlainInput *from = &plain_seeds[run < num_plain_seeds ? (uint64_t)run : below((uint64_t)num_plain_seeds)];
        plain_size = from->size;
        memcpy(plain_input, from->bytes, plain_size);
        for (uint64_t changes = run < num_plain_seeds ? 0 : 1 + below(3); changes; changes--)
            plain_size = LLVMFuzzerCustomMutator(plain_input, plain_size,
                                                 target->longest > plain_size ? target->longest : plain_size,
                                                 (unsigned)below(1u << 31));
        uint8_t *exact = (uint8_t *)memcpy(malloc(plain_size ? plain_size : 1), plain_input,
                                           plain_size); // nothing reads past its end unseen
        hash = hash_bytes(hash, exact, plain_size);
        alarm(20); // seconds are enough for thousands
        LLVMFuzzerTestOneInput(exact, plain_size);
        free(exact);
    }
    dprintf(2, "inputs: %016" PRIx64 "\nDone %lld runs in %.0f second(s)\n", hash, run, seconds_now() - start);
    return 0;
}

#endif
