/* target_checkpoint.h: trainer.json, with the files that it lists.
 * Input: f FILE, or b OBJECT, to which the line with the checksum is added. Next to the file are config.json of 3 bytes
 * and model.safetensors of 100 zero bytes.
 */
#ifndef TARGET_CHECKPOINT_H
#define TARGET_CHECKPOINT_H

/* Puts the checksum of the text before it in the place of the last brace, as every trainer.json ends. */
static const char *give_trainer(Bytes text) {
    char *file = (char *)checked_malloc(text.left + 32);
    while (text.left && text.at[text.left - 1] != '}') text.left--;
    size_t end = text.left ? text.left - 1 : 0;
    if (end) memcpy(file, text.at, end);
    int more = sprintf(file + end, ",\n\"crc32\":%u}\n", crc32_of(file, (int64_t)end));
    const char *path = give("saved/trainer.json", file, end + (size_t)more);
    free(file);
    return path;
}

/* What a run writes at this point is read as the same point. */
static void check_trainer_written(const Progress *p, const cJSON *settings) {
    OutputFiles files = ZERO;
    Companions companions = ZERO;
    char path[512], small[] = "{}\n";
    size_t length;
    uint64_t fingerprint;
    CompanionFile *config = companion_add(&companions, "config.json");
    config->text = small;
    config->length = strlen(small);
    char *text = trainer_text(p, cJSON_Duplicate(settings, 1), &files, NULL, &companions, &length);
    snprintf(path, sizeof path, "%s", give("saved/again.json", text, length));
    free(text);
    held.promise = "the trainer.json that a run writes";
    cJSON *again = trainer_read(path, &fingerprint);
    Progress read = trainer_progress(again, path);
    companions_check(path_of("saved"), json_object(again, path, "files"), path);
    held.promise = NULL;
    EXPECT(!memcmp(&read, p, offsetof(Progress, data)), "other progress was written");
    EXPECT(read.outliers.skipped == p->outliers.skipped, "another number of outliers was written");
    for (int k = 0; k < OUTLIER_KINDS; k++) {
        const OutlierWindow *was = &p->outliers.windows[k], *is = &read.outliers.windows[k];
        EXPECT(is->count == was->count && !memcmp(is->values, was->values, sizeof *is->values * (size_t)is->count),
               "another window of outliers was written");
    }
    cJSON_Delete(again);
}

static void fuzz_trainer(Bytes in) {
    static const char zeros[100];
    char path[512], weights[512];
    uint64_t fingerprint;
    int kind = next_byte(&in);
    give("saved/config.json", "{}\n", 3);
    snprintf(weights, sizeof weights, "%s", give("saved/model.safetensors", zeros, sizeof zeros));
    const char *given = kind == 'b' ? give_trainer(in) : give("saved/trainer.json", in.at, in.left);
    snprintf(path, sizeof path, "%s", given);
    cJSON *json = trainer_read(path, &fingerprint);
    const cJSON *files = json_object(json, path, "files");
    Progress p = trainer_progress(json, path);
    held.taken = 1;
    EXPECT(p.step >= 0 && p.updates >= 0 && p.skips >= 0 && p.samples >= 0 && p.epoch >= 0 && p.samples_in_epoch >= 0,
           "a negative count was taken");
    check_trainer_written(&p, json_object(json, path, "settings"));
    companions_check(path_of("saved"), files, path);
    if (cJSON_GetObjectItemCaseSensitive(files, "model.safetensors")) {
        uint32_t *sums = expected_sums(files, path, weights, sizeof zeros);
        chunk_check(weights, 0, zeros, sizeof zeros, sums[0]);
        free(sums);
    }
    cJSON_Delete(json);
}

static const char *const trainer_words[] = {"\"format\":1",
                                            "\"step\":3",
                                            "\"updates\":2",
                                            "\"skips\":1",
                                            "\"samples\":96",
                                            "\"epoch\":0",
                                            "\"samples_of_epoch\":96",
                                            "\"outliers\":{\"skipped\":1,\"loss\":[1.5],\"grad_norm\":[]}",
                                            "\"settings\":{\"--seq\":\"16\"}",
                                            "\"chunk_bytes\":4194304",
                                            "\"files\":{}",
                                            "\"config.json\":{\"bytes\":3,\"crc32\":[0]}",
                                            "\"trainer.json\":{\"bytes\":3,\"crc32\":[0]}",
                                            "\"crc32\":[]",
                                            "\"bytes\":0",
                                            NULL};

#endif
