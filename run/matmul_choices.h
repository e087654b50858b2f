/* matmul_choices.h: --matmul-choices FILE: which of cuBLASLt's algorithms computes each matmul, chosen by measurement.
 *
 * cuBLASLt proposes several algorithms for a matmul, and the first one is not always the fastest. Before the first
 * step, those matmuls of the dry run that FILE does not have yet are measured, each by one rank, and added to FILE. A
 * caller may rely on: all ranks make the same choices; a later run with the same FILE makes them again, with the same
 * bits.
 */
#ifndef RUN_MATMUL_CHOICES_H
#define RUN_MATMUL_CHOICES_H
#include "../lib/comm.h" // defines: Comm, all_gather_now, comm_alive
#include "../lib/json.h" // defines: json_read_object, json_number, json_add_integer
#include "../lib/ops.h"  // defines: MatmulChoices, MatmulLibrary, ops_matmul_library, ops_measure_matmul
#include "out_dir.h"     // defines: write_all

static const char *const matmul_fields[] = {
    "M",     "N",       "K",   "a_row",     "a_col",     "b_row",    "b_col",
    "c_row", "c_float", "add", "aligned_a", "aligned_b", "aligned_c"}; // of MatmulKey, in its order
enum { MATMUL_FIELDS = sizeof matmul_fields / sizeof *matmul_fields };
static_assert(sizeof(MatmulKey) == sizeof(int64_t) * MATMUL_FIELDS, "a name for each field");

// ---------------------------------------------------------------------------
// the file

/* The 64 bytes of an algorithm from 128 hexadecimal digits. Returns whether there are as many. */
static int algorithm_from_hex(const char *text, uint8_t algorithm[ALGORITHM_BYTES]) {
    unsigned byte;
    if (!text || strlen(text) != 2 * ALGORITHM_BYTES || text[strspn(text, "0123456789abcdef")]) return 0;
    for (int i = 0; i < ALGORITHM_BYTES; i++) {
        sscanf(text + 2 * i, "%2x", &byte);
        algorithm[i] = (uint8_t)byte;
    }
    return 1;
}

static MatmulChoice choice_from_json(const cJSON *item, const char *path) {
    MatmulChoice choice = ZERO;
    int64_t fields[MATMUL_FIELDS];
    for (int i = 0; i < MATMUL_FIELDS; i++)
        fields[i] = (int64_t)json_number(item, path, matmul_fields[i], NAN, 0, 9e15);
    memcpy(&choice.key, fields, sizeof choice.key);
    choice.seconds = json_number(item, path, "seconds", NAN, 0, 1e6);
    choice.first_seconds = json_number(item, path, "first_seconds", INFINITY, 0, INFINITY);
    choice.is_chosen = choice.is_of_file = 1;
    if (!algorithm_from_hex(cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(item, "algorithm")),
                            choice.algorithm))
        user_error("%s: \"algorithm\" of a matmul is no text of %d hexadecimal digits: restore the file, or remove it "
                   "to have the matmuls measured again",
                   path, 2 * ALGORITHM_BYTES);
    return choice;
}

static cJSON *choice_to_json(const MatmulChoice *choice) {
    cJSON *item = cJSON_CreateObject();
    int64_t fields[MATMUL_FIELDS];
    char hex[2 * ALGORITHM_BYTES + 1];
    memcpy(fields, &choice->key, sizeof fields);
    for (int i = 0; i < MATMUL_FIELDS; i++) json_add_integer(item, matmul_fields[i], fields[i]);
    cJSON_AddItemToObject(item, "seconds", json_real("%.4g", choice->seconds));
    cJSON_AddItemToObject(item, "first_seconds", json_real("%.4g", choice->first_seconds));
    for (int i = 0; i < ALGORITHM_BYTES; i++) snprintf(hex + 2 * i, 3, "%02x", choice->algorithm[i]);
    cJSON_AddStringToObject(item, "algorithm", hex);
    return item;
}

/* A text of the file's head; "" if it is missing. */
static const char *head_text(const cJSON *root, const char *key) {
    const char *text = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(root, key));
    return text ? text : "";
}

/* The content of `path`, or that of a new file if there is none. A file for another library, GPU or precision, or one
 * that cannot be read, is an error. */
static cJSON *choices_read(const char *path, const MatmulLibrary *library) {
    cJSON *root = json_read_object(path, "the matmul choices that an earlier run wrote; to have the matmuls measured "
                                         "again, remove the file");
    if (!root && errno != ENOENT)
        user_error("--matmul-choices %s cannot be read: %s; give a file that this user may read and write", path,
                   strerror(errno));
    if (!root) {
        root = cJSON_CreateObject();
        cJSON_AddStringToObject(root, "gpu", library->gpu);
        cJSON_AddStringToObject(root, "cublaslt", library->version);
        cJSON_AddStringToObject(root, "precision", PRECISION_NAME);
        cJSON_AddItemToObject(root, "matmuls", cJSON_CreateArray());
    }
    if (!cJSON_IsArray(cJSON_GetObjectItemCaseSensitive(root, "matmuls")))
        user_error("%s has no list \"matmuls\", so it is no file of --matmul-choices: give another name, or remove the "
                   "file to have it written",
                   path);
    const char *gpu = head_text(root, "gpu"), *version = head_text(root, "cublaslt");
    const char *precision = head_text(root, "precision");
    if (strcmp(gpu, library->gpu) || strcmp(version, library->version) || strcmp(precision, PRECISION_NAME))
        user_error("%s holds choices for \"%s\", cuBLASLt %s and %s, but this run computes on \"%s\" with cuBLASLt %s "
                   "in " PRECISION_NAME ": give another name to --matmul-choices, and that file will be written",
                   path, gpu, version, precision, library->gpu, library->version);
    return root;
}

/* Takes the choices that the file has for these matmuls. */
static void choices_take(MatmulChoices *choices, const cJSON *root, const char *path) {
    const cJSON *item;
    cJSON_ArrayForEach(item, cJSON_GetObjectItemCaseSensitive(root, "matmuls")) {
        MatmulChoice of_file = choice_from_json(item, path);
        MatmulChoice *wanted = matmul_choice_find(choices, &of_file.key);
        if (!wanted) continue;
        of_file.owner = wanted->owner;
        *wanted = of_file;
    }
}

/* Replaces `path` by a file with this content, at once. Deletes `root`. */
static void choices_write(const char *path, cJSON *root) {
    char temporary[4096 + 32], *text = json_text(root, 1);
    snprintf(temporary, sizeof temporary, "%s.%d", path, (int)getpid());
    int fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0)
        user_error("--matmul-choices %s cannot be written: %s; give a file in an existing directory that this user may "
                   "write",
                   path, strerror(errno));
    write_all(fd, temporary, text, strlen(text), 0);
    if (fsync(fd) || close(fd) || rename(temporary, path)) user_error("cannot write %s: %s", path, strerror(errno));
    free(text);
}

// ---------------------------------------------------------------------------
// all ranks

/* Afterwards all ranks have the matmuls of all ranks, and each choice that any of them has. */
static void choices_spread(Comm *comm, MatmulChoices *choices) {
    static const Axis axes[] = {AXIS_TP, AXIS_PP, AXIS_FSDP, AXIS_DP_REPLICATE}; // the whole mesh
    for (int a = 0; a < 4; a++) {
        int members = comm->groups[axes[a]].size;
        if (members == 1) continue;
        MatmulChoices *all = new_array(MatmulChoices, members);
        all_gather_now(comm, axes[a], "matmul choices", choices, all, sizeof *choices);
        choices->count = 0; // in the order of members, which is the same on all of them
        for (int m = 0; m < members; m++)
            for (int i = 0; i < all[m].count; i++) {
                int is_new = !matmul_choice_find(choices, &all[m].list[i].key);
            matmul_choice_add(choices, &all[m].list[i].key);
                MatmulChoice *mine = matmul_choice_find(choices, &all[m].list[i].key);
                if (mine && (is_new || (!mine->is_chosen && all[m].list[i].is_chosen))) *mine = all[m].list[i];
            }
        free(all);
    }
}

/* Memory for measuring, from an arena that has no other buffers yet. */
static void *measuring_memory(Device *dev, const MatmulChoices *of_dry_run) {
    return arena_alloc(dev, MEM_ACTIVATIONS, "operands of measured matmuls", matmul_measure_bytes(of_dry_run));
}

/* Dry run, whose buffers exist already: counts the memory for measuring as if it had come before them. */
static void matmul_choices_reserve(Device *dev) {
    if (!dev->matmul_choices) return;
    size_t used = arena_mark(dev, MEM_ACTIVATIONS);
    arena_release(dev, MEM_ACTIVATIONS, 0);
    measuring_memory(dev, dev->matmul_choices);
    dev->arenas[MEM_ACTIVATIONS].used = used;
}

/* Measures the matmuls of this rank that have no choice yet, unless a rank before it has them too: several ranks would
 * choose differently. Ranks that differ in their data alone have the same matmuls, and the first of them measures. */
static void choices_measure(Device *dev, Comm *comm, MatmulChoices *choices, const MatmulChoices *of_dry_run) {
    int leads = comm->groups[AXIS_FSDP].rank == 0 && comm->groups[AXIS_DP_REPLICATE].rank == 0;
    int owner = comm->groups[AXIS_TP].rank + comm->groups[AXIS_TP].size * comm->groups[AXIS_PP].rank;
    size_t bytes = matmul_measure_bytes(of_dry_run), mark = arena_mark(dev, MEM_ACTIVATIONS);
    void *memory = measuring_memory(dev, of_dry_run);
    for (int i = 0; i < choices->count && leads; i++) {
        MatmulChoice *choice = &choices->list[i];
        if (choice->is_chosen || choice->owner != owner) continue;
        ops_measure_matmul(dev, choice, memory);
        comm_alive(comm);
    }
    arena_release(dev, MEM_ACTIVATIONS, mark);
    device_zero(dev, memory, bytes); // the first buffers of an arena are zero
}

/* What was chosen, and how much faster that is than cuBLASLt's first proposals, adding up one call of each matmul. */
static void choices_say(const MatmulChoices *choices, int from_file, int measured, double took, const char *path) {
    double chosen = 0, first = 0;
    for (int i = 0; i < choices->count; i++) {
        const MatmulChoice *c = &choices->list[i];
        if (!c->is_chosen || !isfinite(c->first_seconds)) continue;
        chosen += c->seconds;
        first += c->first_seconds;
    }
    fprintf(stderr, "note: matmul choices: %d from %s", from_file, path);
    if (measured) fprintf(stderr, ", %d measured in %.1f s and added to it", measured, took);
    fprintf(stderr, "; they take %.1f %% less time than cuBLASLt's first proposals\n",
            first > 0 ? 100 * (1 - chosen / first) : 0);
}

static int choices_made(const MatmulChoices *choices) {
    int made = 0;
    for (int i = 0; i < choices->count; i++) made += choices->list[i].is_chosen;
    return made;
}

/* Chooses an algorithm for each matmul that the ranks' dry runs had, and has `dev` use these choices. Called before any
 * buffer of activations exists. */
static void matmul_choices_open(Device *dev, Comm *comm, MatmulChoices *choices, const MatmulChoices *of_dry_run,
                                const char *path) {
    double start = seconds_now();
    cJSON *root = NULL;
    MatmulLibrary library;
    ops_matmul_library(dev, &library);
    *choices = *of_dry_run;
    for (int i = 0; i < choices->count; i++)
        choices->list[i].owner = comm->groups[AXIS_TP].rank + comm->groups[AXIS_TP].size * comm->groups[AXIS_PP].rank;
    choices_spread(comm, choices);
    if (comm->rank == 0) {
        root = choices_read(path, &library);
        choices_take(choices, root, path);
    }
    choices_spread(comm, choices);
    int from_file = choices_made(choices);
    choices_measure(dev, comm, choices, of_dry_run);
    choices_spread(comm, choices);
    int measured = choices_made(choices) - from_file;
    dev->matmul_choices = choices;
    if (comm->rank) return;
    cJSON *matmuls = cJSON_GetObjectItemCaseSensitive(root, "matmuls");
    for (int i = 0; i < choices->count; i++)
        if (choices->list[i].is_chosen && !choices->list[i].is_of_file)
            cJSON_AddItemToArray(matmuls, choice_to_json(&choices->list[i]));
    if (measured) choices_write(path, root);
    else cJSON_Delete(root);
    choices_say(choices, from_file, measured, seconds_now() - start, path);
}

#endif
