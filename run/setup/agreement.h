/* agreement.h: checks, before the weights are loaded, that all ranks were started alike.
 *
 * Options, checkpoint, data and --out must be the same for all ranks, or the run ends with an error. Programs and
 * processors may differ from host to host; rank 0 prints which do. */
#ifndef AGREEMENT_H
#define AGREEMENT_H
#include "../../lib/comm/comm.h" // defines: Comm, all_gather_now, comm_barrier, run_hosts, rank_name
#include "../../lib/io/output.h" // defines: out_file_create
#include "job.h"                 // defines: Job, Dataset, options_write

/* A hash of pieces of the data, evenly spread over all files: it finds other data without reading all of them. */
static uint64_t data_contents(const Dataset *d) {
    enum { PIECES = 64, TOKENS = 1024 };
    char raw[5 * TOKENS];
    int64_t before = 0; // tokens of the files before f
    uint64_t h = HASH_START;
    const TokenFile *f = d->files;
    for (int i = 0; i < PIECES && d->tokens; i++) {
        int64_t at = d->tokens / PIECES * i;
        while (at - before >= (int64_t)f->header.count) {
            before += (int64_t)f->header.count;
            f++;
        }
        int64_t n = min_i64(TOKENS, (int64_t)f->header.count - (at - before));
        int bytes = (int)f->header.width + (f->header.flags & TOKEN_FILE_MASKED ? 1 : 0);
        if (!token_file_read(f, at - before, n, raw))
            user_error("%s: tokens %" PRId64 " to %" PRId64 " cannot be read: check the disk, or copy the file again",
                       f->path, at - before, at - before + n - 1);
        h = hash_bytes(h, raw, (size_t)(n * bytes));
    }
    return h;
}

/* What each rank tells all others at start-up. */
typedef struct {
    uint64_t options;   // hash of the options, the recipe, the checkpoint and the headers of the data
    uint64_t contents;  // data_contents of --data and --val
    uint64_t input;     // hash of a file that the program reads
    uint64_t program;   // hash of the program that should be the same on all hosts; 0: one host, or it cannot be read
    char processor[64]; // of read_processor
} RankStart;

/* The processor's name as the kernel gives it; "" if it gives none. */
static void read_processor(char *name, size_t size) {
    char line[256];
    FILE *f = fopen("/proc/cpuinfo", "r");
    while (f && !name[0] && fgets(line, sizeof line, f)) {
        const char *colon = strchr(line, ':');
        if (colon && !strncmp(line, "model name", 10))
            snprintf(name, size, "%.*s", (int)strcspn(colon + 2, "\n"), colon + 2);
    }
    if (f) fclose(f);
}

/* What all ranks were started with, (world); the caller frees it. */
static RankStart *gather_starts(Comm *comm, const Job *j) {
    RankStart mine = ZERO, *all = new_array(RankStart, comm->mesh.world);
    char *text;
    size_t length;
    FILE *f = text_stream_open(&text, &length);
    options_write(j->options, &j->run, f);
    text_stream_close(f);
    mine.options = hash_bytes(HASH_START, text, length);
    mine.options = hash_bytes(mine.options, &j->data.fingerprint, sizeof j->data.fingerprint);
    mine.options = hash_bytes(mine.options, &j->recipe.fingerprint, sizeof j->recipe.fingerprint);
    mine.options ^= j->resume_from.fingerprint;
    free(text);
    mine.contents = mix64(data_contents(&j->data)) ^ data_contents(&j->val);
    mine.input = j->purpose.input_hash;
    if (run_hosts.count > 1) {
        char *program = read_file(j->purpose.program_file ? j->purpose.program_file : "/proc/self/exe", &length);
        mine.program = program ? hash_bytes(HASH_START, program, length) : 0;
        free(program);
    }
    read_processor(mine.processor, sizeof mine.processor);
    all_gather_now(comm, AXIS_WORLD, "what ranks were started with", &mine, all, sizeof mine);
    return all;
}

/* Describes a difference in options, data or checkpoint between `rank` and rank 0. Returns whether there is one. */
static int say_other_start(Sentence *t, const Job *j, const RankStart *all, int rank) {
    if (all[rank].options != all[0].options)
        say(t,
            "%s was started with different options, data or checkpoint than rank 0: start all ranks with the same "
            "command and the same files",
            rank_name(rank));
    else if (all[rank].contents != all[0].contents)
        say(t,
            "the token files of %s have the size of those of %s, but other contents: copy the same files to all "
            "hosts, or give a directory that they share",
            rank_name(rank), rank_name(0));
    else if (all[rank].input != all[0].input)
        say(t, "the file of --%s has other contents on %s than on %s: copy the same file to all hosts",
            j->purpose.input_option, rank_name(rank), rank_name(0));
    return t->used > 0;
}

/* Ends the run unless all ranks were started with the same options, data and checkpoint. Rank 0 prints which hosts have
 * another program or processor than host 0; not to standard output, which belongs to --eval. */
static void check_agreement(Comm *comm, const Job *j) {
    char text[1024];
    Sentence t = {text, sizeof text, 0};
    RankStart *all = gather_starts(comm, j);
    for (int i = 1; i < comm->mesh.world; i++)
        if (say_other_start(&t, j, all, i)) user_error("%s", text);
    for (int i = 1; i < run_hosts.count && comm->rank == 0; i++) {
        const RunHost *host = &run_hosts.hosts[i];
        const RankStart *other = &all[host->first_rank];
        if (other->program != all[0].program)
            fprintf(stderr,
                    "note: host %s runs another build of the program than host %s: its results may differ in the last "
                    "bits; copy one build to all hosts\n",
                    host->name, run_hosts.hosts[0].name);
        if (strcmp(other->processor, all[0].processor))
            fprintf(stderr,
                    "note: host %s has another processor (%s) than host %s (%s): its results may differ in the last "
                    "bits\n",
                    host->name, other->processor, run_hosts.hosts[0].name, all[0].processor);
    }
    free(all);
}

/* Whether the host of each rank sees the directory --out of rank 0, (world); the caller frees it. Rank 0 creates a file
 * there, and the first rank of each host looks for it. */
static int *gather_views_of_out(Comm *comm, const char *out) {
    char path[4096 + 64];
    int world = comm->mesh.world, *all = new_array(int, world);
    snprintf(path, sizeof path, "%s/.shared-%016" PRIx64, out, comm_random_name(comm, "name of the shared file"));
    if (comm->rank == 0) fclose(out_file_create(out, strrchr(path, '/') + 1));
    comm_barrier(comm, "the shared file is there");
    int sees = comm->rank != host_of_rank(comm->rank)->first_rank || !access(path, F_OK);
    all_gather_now(comm, AXIS_WORLD, "visibility of the shared file", &sees, all, sizeof sees);
    if (comm->rank == 0) unlink(path);
    return all;
}

static void say_unshared_out(Sentence *t, const char *out, const RunHost *host) {
    say(t,
        "--out %s on host %s is not the directory that host %s has there: give a directory on a file system that "
        "all hosts share, because every rank writes its part of a checkpoint",
        out, host->name, host_of_rank(0)->name);
}

/* Ends the run unless all hosts see the same directory at --out: each would get only some parts of a checkpoint. */
static void check_shared_out(Comm *comm, const char *out) {
    char text[8192];
    Sentence t = {text, sizeof text, 0};
    if (!out || run_hosts.count < 2) return;
    int *sees = gather_views_of_out(comm, out);
    for (int i = 0; i < comm->mesh.world; i++)
        if (!sees[i]) {
            say_unshared_out(&t, out, host_of_rank(i));
            user_error("%s", text);
        }
    free(sees);
}

#endif
