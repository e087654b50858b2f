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

/* The name of an entry of a directory; "" if it is empty. */
static void first_entry(char *name, size_t size, const char *dir) {
    DIR *d = opendir(dir);
    name[0] = 0;
    for (struct dirent *item = d ? readdir(d) : NULL; item && !name[0]; item = readdir(d))
        if (strcmp(item->d_name, ".") && strcmp(item->d_name, "..")) snprintf(name, size, "%s", item->d_name);
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
        user_error("cannot write to %s, where --export %s belongs: %s", parent, dir, strerror(errno));
    if (lstat(path, &info)) return;
    if (!S_ISDIR(info.st_mode))
        user_error("--export %s exists already and is not a directory: choose another name", dir);
    first_entry(name, sizeof name, path);
    if (name[0])
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
    snprintf(w->dir, sizeof w->dir, "%s.part-%016" PRIx64, path, comm_random_name(comm, "export: name"));
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
    }
    w->files = NULL;
    comm_barrier(comm, "export: done");
    comm_phase(comm, before);
}

#endif
