/* fuzz.cu: the program's readers, given any bytes whatever: token files, tokenizers, chat templates, config.json,
 * safetensors, their index, adapters, trainer.json, cluster files, samples.jsonl, conversations, the command line.
 * Whatever comes, the program has to take it or refuse it with one line `error: …` and exit code 1; what it takes has
 * to be what the bytes say, which each target reads again in a way of its own.
 *
 *   make -C dev/fuzz             every target, 1,000,000 executions each; see Makefile and run.sh
 *   build/fuzz/TARGET FILE…      these inputs again, such as one that was a finding
 *
 * An engine (libFuzzer, or plain.h) calls LLVMFuzzerTestOneInput; the name by which the program is called is the
 * target's.
 */
#include "harness.h" // defines: give, finding, EXPECT, held, said_out
#include <ftw.h>
#include "run/config_json.h"

/* A dry run takes as long as the model has blocks, and a deep model has only more of the same: a few have to do. */
static Llama3Config config_shallow(const char *model) {
    Llama3Config c = config_load(model);
    c.L = 1 + (c.L - 1) % 4;
    return c;
}
#define config_load(model) config_shallow(model)
#define TESTING_PROGRAM
#include "programs/plan_llama3.cu"
#include "programs/eval_llama3.cu"
#include "programs/tokens/audit.h"
#include "programs/tokens/encode.h"

typedef struct {
    const uint8_t *at;
    size_t left;
} Bytes; // what is left of an input

static int next_byte(Bytes *b) {
    if (!b->left) return 0;
    b->left--;
    return *b->at++;
}

/* The bytes up to the first zero; what follows it is left. */
static Bytes up_to_zero(Bytes *b) {
    Bytes head = {b->at, strnlen((const char *)b->at, b->left)};
    size_t taken = head.left + (head.left < b->left);
    b->at += taken;
    b->left -= taken;
    return head;
}

static char *text_of(Bytes b) {
    char *text = (char *)checked_malloc(b.left + 1);
    if (b.left) memcpy(text, b.at, b.left);
    return text;
}

#include "target_token_file.h"
#include "target_tokenizer.h"
#include "target_options.h"
#include "target_config.h"
#include "target_safetensors.h"
#include "target_checkpoint.h"
#include "target_adapters.h"
#include "target_cluster.h"
#include "target_lines.h"
#include "target_tokenizer_json.h"

// ---------------------------------------------------------------------------
// a fault that is no fault of the program: an engine that does not find it finds nothing

static void fuzz_planted(Bytes in) {
    char *volatile word = (char *)malloc(7);
    for (size_t i = 0; i + 7 <= in.left; i++)
        if (!memcmp(in.at + i, "planted", 7)) word[7] = 0; // one byte too far
    free(word);
}

// ---------------------------------------------------------------------------
// the targets, and one execution

typedef struct {
    const char *name;
    void (*run)(Bytes in);
    size_t longest;           // of its inputs, bytes
    int as_text;              // how many of eight changes are those of a text
    int json;                 // where in an input JSON begins; -1: there is none
    const char *const *words; // what it understands, for the engine to put together; ends with NULL
} Target;

static const char *const planted_words[] = {"planted", NULL};

static const Target targets[] = {
    {"token_file", fuzz_token_file, 400, 1, -1, token_file_words},
    {"tokenizer", fuzz_tokenizer, 400, 4, -1, tokenizer_words},
    {"config", fuzz_config, 1200, 7, 1, config_words},
    {"options", fuzz_options, 400, 7, -1, option_words},
    {"safetensors", fuzz_safetensors, 2000, 7, 1, safetensors_words},
    {"index", fuzz_index, 2000, 7, 1, index_words},
    {"trainer", fuzz_trainer, 800, 7, 1, trainer_words},
    {"adapters", fuzz_adapter_files, 1200, 7, 0, adapter_words},
    {"cluster", fuzz_cluster, 3000, 7, 1, cluster_words},
    {"audit", fuzz_audit, 600, 7, 1, audit_words},
    {"chat", fuzz_chat, 600, 7, 1, chat_words},
    {"requests", fuzz_requests, 600, 7, 1, request_words},
    {"mixture", fuzz_mixture, 160, 6, -1, mixture_words},
    {"tokenizer_json", fuzz_tokenizer_json, 1500, 7, 1, tokenizer_json_words},
    {"chat_template", fuzz_chat_template, 900, 6, 1, chat_template_words},
    {"planted", fuzz_planted, 64, 4, -1, planted_words},
};
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
    memset(&process_end, 0, sizeof process_end);
    memset(&own_heartbeat, 0, sizeof own_heartbeat);
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
    collect_option_words();
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
    split_open("", 0, llama3_split);
    __sanitizer_install_malloc_and_free_hooks(block_taken, block_given);
    atexit(say_how_many);
    return 0;
}

#include "mutate.h"
#ifdef PLAIN_ENGINE
#include "plain.h"
#endif
