/* export.h: writes the model, or its adapters, as a Hugging Face directory, or the model as a GGUF file.
 *
 * A caller may rely on: export_check refuses an unusable path before the weights are read; nothing that exists is
 * overwritten; the directory or file appears under its name, by one rename, when all of it is on disk. */
#ifndef EXPORT_H
#define EXPORT_H
#include "../../run/checkpoint/checkpoint_writer.h" // defines: CheckpointWriter, write_start, write_finish
#include "conversion.h" // defines: Conversion, ConvertOptions, is_gguf, gguf_layout, modelfile_text

/* The weights that --dtype stores in int8. The others have export_dtype, with --dtype int8 this build's precision. */
static BaseKind export_base(const ConvertOptions *o) {
    if (o->dtype == EXPORT_INT8) return BASE_INT8;
    return o->dtype == EXPORT_INT8_ALL ? BASE_INT8_ALL : BASE_TRAINED;
}
static StDtype export_dtype(const ConvertOptions *o) {
    if (export_base(o) > BASE_FROZEN) return FLOATX == DTYPE_F32 ? ST_F32 : ST_BF16;
    if (o->dtype == EXPORT_Q8_0) return GGUF_Q8_0;
    if (o->dtype == EXPORT_FP16) return ST_F16;
    return o->dtype == EXPORT_BF16 ? ST_BF16 : ST_F32;
}

/* The files of a directory: the model, with the adapters' update if they are merged. */
static void export_files(OutputFiles *files, const TensorTable *whole, const ConvertOptions *o) {
    files->base = export_base(o);
    files->dtype = export_dtype(o);
    output_files_add(files, whole, 0, table_first_adapter(whole), "model", STATE_MASTER, STATE_MASTER);
}

/* The last component of a path. */
static const char *export_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

/* The GGUF file: the whole model. */
static void export_gguf(OutputFiles *files, const TensorTable *whole, const Conversion *c) {
    char name[4096];
    snprintf(name, sizeof name, "%s", export_name(c->opt.path));
    name[strlen(name) - strlen(".gguf")] = 0;
    files->dtype = export_dtype(&c->opt);
    gguf_layout(files, whole, table_first_adapter(whole), &c->job.config, &c->gguf_tokenizer, name);
}

/* Where --export DIR writes: DIR if it exists (links are followed), else its path without slashes at its end. */
static void export_path(char *path, size_t size, const char *dir) {
    char real[PATH_MAX];
    snprintf(path, size, "%s", realpath(dir, real) ? real : dir);
    for (size_t n = strlen(path); n > 1 && path[n - 1] == '/'; n--) path[n - 1] = 0;
}

static void export_parent(char *parent, size_t size, const char *path) {
    const char *slash = strrchr(path, '/');
    if (!slash) snprintf(parent, size, ".");
    else snprintf(parent, size, "%.*s", slash == path ? 1 : (int)(slash - path), path);
}

static const char part_mark[] = ".part-"; // an unfinished export of DIR is DIR.part-0123456789abcdef

/* Is `name` an unfinished export of the directory `base`? */
static int is_part_of(const char *name, const char *base) {
    size_t n = strlen(base), mark = strlen(part_mark);
    if (strncmp(name, base, n) || strncmp(name + n, part_mark, mark)) return 0;
    const char *random = name + n + mark;
    return strspn(random, "0123456789abcdef") == 16 && !random[16];
}

/* Removes the directories of interrupted exports to `path`: those that no running export has locked and that lack the
 * configuration file, which is written last. */
static void remove_unfinished_exports(const char *path, const char *parent) {
    static const char *const last[] = {"config.json", "adapter_config.json", "Modelfile"};
    const char *base = export_name(path);
    char part[4096 + 600], file[4096 + 700];
    DIR *d = opendir(parent);
    for (struct dirent *item = d ? readdir(d) : NULL; item; item = readdir(d)) {
        int is_complete = 0;
        if (!is_part_of(item->d_name, base)) continue;
        snprintf(part, sizeof part, "%s/%s", parent, item->d_name);
        for (int i = 0; i < 3; i++) {
            snprintf(file, sizeof file, "%s/%s", part, last[i]);
            is_complete |= entry_exists(file);
        }
        int fd = is_complete ? -1 : open(part, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (fd >= 0 && !flock(fd, LOCK_EX | LOCK_NB)) remove_directory(part);
        if (fd >= 0) close(fd);
    }
    if (d) closedir(d);
}

/* Refuses an unusable path before the weights are read. A model that is there already is not refused here: model_export
 * compares it with the new one. */
static void export_check(const char *dir) {
    char path[4096], parent[4096];
    struct stat info, above;
    export_path(path, sizeof path, dir);
    export_parent(parent, sizeof parent, path);
    int failed = make_directories(parent);
    if (failed) user_error("cannot create the directory --export %s: %s", dir, strerror(failed));
    if (access(parent, W_OK))
        user_error("cannot write to %s, where --export %s is created by a rename: %s; give a directory in one that you "
                   "can write to, %s/model for example",
                   parent, dir, strerror(errno), dir);
    remove_unfinished_exports(path, parent);
    for (const char *c = export_name(path); *c && is_gguf(dir); c++)
        if ((uint8_t)*c < ' ')
            user_error("--export: the GGUF file's name has a control character, which its Modelfile cannot hold: "
                       "choose another name");
    if (is_gguf(dir)) return;
    if (lstat(path, &info)) return;
    if (!S_ISDIR(info.st_mode))
        user_error("--export %s exists already and is not a directory: choose another name", dir);
    if (stat(parent, &above) || info.st_dev != above.st_dev)
        user_error("--export %s is the root of a file system, which cannot be replaced by the complete model: give a "
                   "new directory in it, %s/model for example",
                   dir, dir);
}

/* Creates the directory of an unfinished export. Returns the descriptor of a lock that shows other exports that this
 * one still writes there; -1: there is no lock. */
static int create_part(const char *dir) {
    if (mkdir(dir, 0777)) user_error("cannot create %s: %s", dir, strerror(errno));
    int lock = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (lock >= 0) flock(lock, LOCK_EX | LOCK_NB);
    return lock;
}

static int files_are_equal(const char *a, const char *b) {
    enum { BLOCK = 1 << 20 };
    FILE *f = fopen(a, "rb"), *g = fopen(b, "rb");
    char *block = (char *)checked_malloc(2 * BLOCK);
    int equal = f && g;
    for (size_t n = 1, m; equal && n; equal = n == m && !memcmp(block, block + BLOCK, n)) {
        n = fread(block, 1, BLOCK, f);
        m = fread(block + BLOCK, 1, BLOCK, g);
    }
    free(block);
    if (f) fclose(f);
    if (g) fclose(g);
    return equal;
}

/* Does `path` hold the files in w->dir already? If it has others instead, that is an error. */
static int is_exported_already(const CheckpointWriter *w, const char *dir, const char *path) {
    char from[4096 + 600], to[4096 + 600], name[300] = "";
    struct stat info;
    if (lstat(path, &info) || (S_ISDIR(info.st_mode) && !has_entries(path))) return 0;
    int is_file = !S_ISDIR(info.st_mode), equal = 1;
    DIR *d = opendir(w->dir);
    for (struct dirent *item = d ? readdir(d) : NULL; item && equal; item = readdir(d)) {
        if (item->d_name[0] == '.') continue;
        snprintf(name, sizeof name, "%s", item->d_name);
        snprintf(from, sizeof from, "%s/%s", w->dir, name);
        snprintf(to, sizeof to, "%s%s%s", path, is_file ? "" : "/", is_file ? "" : name);
        equal = files_are_equal(from, to);
    }
    if (d) closedir(d);
    remove_directory(w->dir);
    if (!equal)
        user_error(
            "--export %s exists already and is another model (%s differs): choose another name, or remove it first",
            dir, is_file ? "it" : name);
    printf("%s holds this model already\n", path);
    return 1;
}

/* Gives a complete file its name, unless there is one with that name already. Returns 0 or errno. */
static int move_file(const char *from, const char *to) {
    if (!link(from, to)) return unlink(from) ? errno : 0;
    if (errno == EEXIST) return errno;
    if (entry_exists(to)) return EEXIST;
    return rename(from, to) ? errno : 0; // on a file system without hard links
}

/* Puts the GGUF file in w->dir in its place, and ollama's Modelfile next to it. If there is a Modelfile already, the
 * new one is named NAME.Modelfile after NAME.gguf. */
static void export_publish_gguf(CheckpointWriter *w, const Conversion *c, const char *path, const char *parent) {
    char from[4096 + 128], to[4096 + 32];
    size_t length;
    char *modelfile = modelfile_text(export_name(path), &c->files, &length);
    write_new_file(w->dir, "Modelfile", modelfile, length);
    free(modelfile);
    sync_directory(w->dir);
    snprintf(from, sizeof from, "%s/model.gguf", w->dir);
    int failed = move_file(from, path);
    if (failed)
        user_error("cannot rename %s, which holds the complete model, to --export %s: %s; rename it yourself", from,
                   c->opt.path, strerror(failed));
    snprintf(from, sizeof from, "%s/Modelfile", w->dir);
    snprintf(to, sizeof to, "%s/Modelfile", parent);
    failed = move_file(from, to);
    if (failed == EEXIST) {
        snprintf(to, sizeof to, "%.*s.Modelfile", (int)(strlen(path) - strlen(".gguf")), path);
        failed = move_file(from, to);
    }
    if (failed)
        fprintf(stderr, "note: the Modelfile could not be moved from %s to %s: %s; move it yourself\n", from, to,
                strerror(failed));
    else rmdir(w->dir);
    sync_directory(parent);
    printf("wrote %s%s%s\n", path, failed ? "" : " and ", failed ? "" : to);
}

/* Writes the weights and the files next to them into a new directory. When everything is on disk, renames the
 * directory, or the GGUF file in it, to the path of --export. */
static void model_export(CheckpointWriter *w, const Conversion *c) {
    Comm *comm = w->fsdp->comm;
    const char *dir = c->opt.path;
    char path[4096], parent[4096];
    Phase before = comm_phase(comm, PHASE_SAVING);
    export_path(path, sizeof path, dir);
    export_parent(parent, sizeof parent, path);
    snprintf(w->dir, sizeof w->dir, "%s%s%016" PRIx64, path, part_mark, comm_random_name(comm, "export: name"));
    int lock = comm->rank == 0 ? create_part(w->dir) : -1;
    write_start(w);
    write_finish(w);
    if (comm->rank == 0 && is_gguf(dir)) {
        if (!is_exported_already(w, dir, path)) export_publish_gguf(w, c, path, parent);
    } else if (comm->rank == 0) {
        Companions companions;
        write_companions(w, &companions);
        companions_free(&companions);
        sync_directory(w->dir);
        if (!is_exported_already(w, dir, path) && rename(w->dir, path)) // replaces an empty directory, and nothing else
            user_error("cannot rename %s, which holds the complete model, to --export %s: %s; rename it yourself",
                       w->dir, dir, strerror(errno));
        sync_directory(parent);
    }
    if (lock >= 0) close(lock); // the directory has been renamed or removed
    w->is_open = 0;
    comm_barrier(comm, "export: done");
    comm_phase(comm, before);
}

#endif
