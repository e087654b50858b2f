/* test_safetensors.h: the time to open weights grows in proportion to the number of tensors, and a tensor's name is
 * unique. Part of test_llama3.cu. */

/* A file of `count` tensors of one element, all zero. `twice`: the last one has the name of the first. */
static const char *make_tensors_file(const char *name, int count, int twice) {
    const char *path = scratch_path(name);
    char *header, separator = '{';
    size_t length;
    FILE *text = text_stream_open(&header, &length);
    for (int i = 0; i < count; i++) {
        int number = twice && i == count - 1 ? 0 : i;
        fprintf(text, "%c\"model.layers.%d.weight\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[%d,%d]}",
                separator, number, 4 * i, 4 * i + 4);
        separator = ',';
    }
    fprintf(text, "}");
    text_stream_close(text);
    FILE *f = fopen(path, "wb");
    uint64_t bytes = length;
    if (!f || fwrite(&bytes, 8, 1, f) != 1 || fwrite(header, 1, length, f) != length || fflush(f) ||
        ftruncate(fileno(f), (off_t)(8 + length + 4 * (size_t)count)) || fclose(f))
        run_failure("test file %s could not be written", path);
    free(header);
    return path;
}

/* Seconds to open such a file and to find each of its tensors by name; the best of three. */
static double seconds_to_open_tensors(int count, int *found) {
    const char *path = make_tensors_file("many.safetensors", count, 0);
    double best = INFINITY;
    for (int turn = 0; turn < 3; turn++) {
        StFiles s = ZERO;
        double start = seconds_now();
        st_add_file(&s, path);
        st_find_scales(&s);
        *found = 0;
        for (int i = 0; i < count; i++) {
            char name[64];
            snprintf(name, sizeof name, "model.layers.%d.weight", i);
            const StTensor *t = st_find(&s, name);
            *found += t && !strcmp(t->name, name) && t->elements == 1;
        }
        best = fmin(best, seconds_now() - start);
        st_close(&s);
    }
    return best;
}

/* Opens the files whose paths `arg` lists; the list ends with NULL. */
static void open_tensor_files(void *arg) {
    StFiles s = ZERO;
    for (const char **path = (const char **)arg; *path; path++) st_add_file(&s, *path);
    st_close(&s);
}

static void test_safetensors(void) {
    enum { MANY = 200000 };
    int few_found, many_found;
    double few = seconds_to_open_tensors(MANY / 10, &few_found), many = seconds_to_open_tensors(MANY, &many_found);
    CHECK("safetensors: 10 times as many tensors take at most 40 times as long to open and find",
          many < 40 * few && few_found == MANY / 10 && many_found == MANY,
          "%d tensors in %.3f s, %d in %.3f s: %.1f times as long", MANY / 10, few, MANY, many, many / few);
    const char *one[] = {make_tensors_file("twice.safetensors", 1000, 1), NULL};
    expect_user_error("safetensors: a name twice in a file of 1,000 tensors is refused", open_tensor_files, one,
                      "holds tensor model.layers.0.weight twice: the file is damaged; copy it again");
    const char *two[] = {make_tensors_file("first.safetensors", 1000, 0),
                         make_tensors_file("second.safetensors", 10, 0), NULL};
    expect_user_error("safetensors: a name in two files is refused", open_tensor_files, two,
                      "both hold tensor model.layers.0.weight: remove the file that does not belong to this model");
}
