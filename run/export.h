/* export.h: writes the model, or its adapters, as a Hugging Face directory.
 *
 * A caller may rely on: export_check refuses an unusable directory before training starts; nothing that exists is
 * overwritten; files appear under their names when all of them are on the disk.
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

/* Refuses an unusable directory before training starts, so that neither its result nor an existing file is lost. */
static void export_check(const char *dir, const TensorTable *table, const Options *o) {
    static const char *const names[] = {"model.safetensors",
                                        "model.safetensors.index.json",
                                        "adapter_model.safetensors",
                                        "adapter_config.json",
                                        "config.json",
                                        "tokenizer.model"};
    enum { NAMES = sizeof names / sizeof names[0] };
    char path[4096 + 128];
    OutputFiles files = ZERO;
    int failed = make_directories(dir);
    if (failed) user_error("cannot create the directory --export %s: %s", dir, strerror(failed));
    export_files(&files, table, o);
    for (int i = 0; i < NAMES + files.num_files; i++) {
        snprintf(path, sizeof path, "%s/%s", dir, i < NAMES ? names[i] : files.files[i - NAMES].name);
        if (!access(path, F_OK))
            user_error("%s exists already: choose another --export directory, or remove the file first", path);
    }
    output_files_close(&files);
    if (access(dir, W_OK)) user_error("cannot write to --export %s: %s", dir, strerror(errno));
}

/* Writes the weights, config.json and, if there is one, the tokenizer. Weights are renamed when all are on disk. */
static void model_export(CheckpointWriter *w) {
    Comm *comm = w->fsdp->comm;
    Phase before = comm_phase(comm, PHASE_SAVING);
    snprintf(w->dir, sizeof w->dir, "%s", w->opt->export_dir);
    write_start(w, &w->exported, ".part");
    write_finish(w);
    for (int i = 0; i < w->files->num_files && comm->rank == 0; i++) {
        char path[4096 + 128], temporary[4096 + 128];
        output_path(w, path, sizeof path, i, "");
        output_path(w, temporary, sizeof temporary, i, w->suffix);
        if (rename(temporary, path)) user_error("cannot rename %s: %s", temporary, strerror(errno));
    }
    Companions companions = ZERO;
    if (comm->rank == 0) {
        write_companions(w, &companions);
        sync_directory(w->dir);
    }
    companions_free(&companions);
    w->files = NULL;
    comm_barrier(comm, "export: done");
    comm_phase(comm, before);
}

#endif
