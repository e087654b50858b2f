/* export.h: writes the model, or its adapters, as a Hugging Face directory.
 *
 * A caller may rely on: export_check refuses an unusable directory before training starts; nothing that exists is
 * overwritten; the directory appears under its name, by one rename, when all of it is on disk.
 */
#ifndef EXPORT_H
#define EXPORT_H
#include "checkpoint_writer.h" // defines: CheckpointWriter, write_start, write_finish

/* Which weights --dtype stores in int8. The others are in export_dtype: with int8, the dtype in which this build
 * computes. */
static BaseKind export_base(const Options *o) {
    if (!strcmp(o->dtype, "int8")) return BASE_INT8;
    if (!strcmp(o->dtype, "int8:all")) return BASE_INT8_ALL;
    return BASE_TRAINED;
}
static StDtype export_dtype(const Options *o) {
    return strcmp(export_base(o) > BASE_FROZEN ? PRECISION_NAME : o->dtype, "bf16") ? ST_F32 : ST_BF16;
}

/* The files that --export writes: the model (with --merge, including the adapters' update), or the adapters alone. */
static void export_files(OutputFiles *files, const TensorTable *whole, const Options *o) {
    int first = table_first_adapter(whole), adapters_only = first < whole->num_tensors && !o->merge;
    files->base = export_base(o);
    files->dtype = export_dtype(o);
    output_files_add(files, whole, adapters_only ? first : 0, adapters_only ? whole->num_tensors : first,
                     adapters_only ? adapters_stem : "model", STATE_MASTER, STATE_MASTER);
}

/* The directory that receives DIR of --export: DIR itself if it exists (links are followed), else its path without
 * slashes at its end. */
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

/* Removes what interrupted exports of `path` have left: directories without configuration, which is written last, that
 * no running export has locked. */
static void remove_unfinished_exports(const char *path, const char *parent) {
    static const char *const last[] = {"config.json", "adapter_config.json"};
    const char *slash = strrchr(path, '/'), *base = slash ? slash + 1 : path;
    char part[4096 + 600], file[4096 + 700];
    DIR *d = opendir(parent);
    for (struct dirent *item = d ? readdir(d) : NULL; item; item = readdir(d)) {
        int is_complete = 0;
        if (!is_part_of(item->d_name, base)) continue;
        snprintf(part, sizeof part, "%s/%s", parent, item->d_name);
        for (int i = 0; i < 2; i++) {
            snprintf(file, sizeof file, "%s/%s", part, last[i]);
            is_complete |= entry_exists(file);
        }
        int fd = is_complete ? -1 : open(part, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (fd >= 0 && !flock(fd, LOCK_EX | LOCK_NB)) remove_directory(part);
        if (fd >= 0) close(fd);
    }
    if (d) closedir(d);
}

/* Refuses an unusable directory before training starts, so that its result is not lost. */
static void export_check(const char *dir) {
    char path[4096], parent[4096], name[300];
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
    if (lstat(path, &info)) return;
    if (!S_ISDIR(info.st_mode))
        user_error("--export %s exists already and is not a directory: choose another name", dir);
    if (has_entries(path, name))
        user_error("%s/%s exists already: give a new or an empty directory to --export, or remove what is in this one",
                   dir, name);
    if (stat(parent, &above) || info.st_dev != above.st_dev)
        user_error("--export %s is the root of a file system, which cannot be replaced by the complete model: give a "
                   "new directory in it, %s/model for example",
                   dir, dir);
}

/* Writes the weights, config.json and, if there is one, the tokenizer into a new directory, which gets the name of
 * --export when all of it is on disk. */
static void model_export(CheckpointWriter *w) {
    Comm *comm = w->fsdp->comm;
    const char *dir = w->opt->export_dir;
    char path[4096], parent[4096];
    Phase before = comm_phase(comm, PHASE_SAVING);
    export_path(path, sizeof path, dir);
    export_parent(parent, sizeof parent, path);
    snprintf(w->dir, sizeof w->dir, "%s%s%016" PRIx64, path, part_mark, comm_random_name(comm, "export: name"));
    write_start(w, &w->exported);
    write_finish(w);
    if (comm->rank == 0) {
        Companions companions;
        write_companions(w, &companions);
        companions_free(&companions);
        sync_directory(w->dir);
        if (rename(w->dir, path)) // replaces an empty directory, and nothing else
            user_error("cannot rename %s, which holds the complete model, to --export %s: %s; rename it yourself",
                       w->dir, dir, strerror(errno));
        sync_directory(parent);
        unlock_directory(w);
    }
    w->files = NULL;
    comm_barrier(comm, "export: done");
    comm_phase(comm, before);
}

#endif
