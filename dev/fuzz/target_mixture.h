/* target_mixture.h: the list of files and weights of --data.
 * Input: the list, where @ stands for the directory of the token files.
 */
#ifndef TARGET_MIXTURE_H
#define TARGET_MIXTURE_H

/* The list in `in`. A slash becomes a dot, except after @, so that globs stay in the directory of the token files. */
static char *list_of(Bytes in) {
    char *text, *given = text_of(in);
    size_t length;
    FILE *f = text_stream_open(&text, &length);
    for (const char *at = given; *at; at++) {
        if (*at == '@') fprintf(f, "%s/", folder);
        else fputc(*at == '/' ? '.' : *at, f);
    }
    text_stream_close(f);
    free(given);
    return text;
}

/* The entries, written as a list again, must be the same entries. */
static void check_list(const DataList *list) {
    char *text;
    size_t length;
    DataList again;
    FILE *f = text_stream_open(&text, &length);
    for (int i = 0; i < list->count; i++) {
        fprintf(f, "%s%s", i ? "," : "", list->entries[i].pattern);
        if (list->has_weights) fprintf(f, ":%.17g", list->entries[i].weight);
    }
    text_stream_close(f);
    data_list_parse(&again, text);
    EXPECT(again.count == list->count && again.has_weights == list->has_weights, "%d entries of %d in %s", again.count,
           list->count, text);
    for (int i = 0; i < list->count; i++)
        EXPECT(!strcmp(again.entries[i].pattern, list->entries[i].pattern) &&
                   again.entries[i].weight == list->entries[i].weight,
               "entry %d of %s is %s:%g", i, text, again.entries[i].pattern, again.entries[i].weight);
    data_list_close(&again);
    free(text);
}

/* The shares must be those of the weights, and the schedule must keep them. Returns the cycle of the schedule. */
static int check_shares(const DataList *list) {
    int units[MOST_SOURCES], sum = 0, step = SHARE_UNITS;
    double weights = 0;
    shares_of_weights(list, units);
    for (int i = 0; i < list->count; i++) weights += list->entries[i].weight;
    for (int i = 0; i < list->count; i++) {
        sum += units[i];
        while (units[i] % step || SHARE_UNITS % step) step--; // the largest divisor of all units
        EXPECT(fabs(units[i] - list->entries[i].weight / weights * (double)SHARE_UNITS) < 1 + 1e-6,
               "entry %d has %d units", i, units[i]);
    }
    EXPECT(sum == SHARE_UNITS, "the shares sum to %d", sum);
    return SHARE_UNITS / step;
}

static void check_mixture(const Dataset *d, int cycle) {
    const Mixture *mixture = d->mixture;
    int64_t counts[MOST_SOURCES] = {0};
    EXPECT(mixture->cycle == cycle && mixture->num_sources == d->num_sources, "cycle %d, not %d", mixture->cycle,
           cycle);
    Sampler s = {d->windows, 1, 0, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0, d, 1};
    for (int64_t n = 0; n < cycle + 3; n++) {
        MixtureSample sample = mixture_sample(mixture, n);
        EXPECT(sample.index == counts[sample.source]++, "sample %d is number %d of source %d", (int)n,
               (int)sample.index, sample.source);
        int64_t w = sampler_sample(&s, n, 0, 0) - d->sources[sample.source].first_window;
        EXPECT(w >= 0 && w < d->sources[sample.source].windows, "window %d of source %d", (int)w, sample.source);
        for (int k = 0; k < mixture->num_sources; k++)
            EXPECT(fabs((double)counts[k] - (double)mixture->quota[k] * (double)(n + 1) / cycle) < 1,
                   "%d of %d samples from source %d", (int)counts[k], (int)n + 1, k);
    }
}

static void fuzz_mixture(Bytes in) {
    static const uint8_t file[64 + 2 * 9] = "LLM3TOK1\1\0\0\0\2\0\0\0\2\0\0\0\0\0\0\0\11"; // nine tokens 0
    static const char *const names[] = {"a.mix", "b.mix", "c,d.mix", "e:1.mix"};
    static int made;
    for (; made < 4; made++) give(names[made], file, sizeof file);
    DataList list;
    char *text = list_of(in);
    data_list_parse(&list, text);
    check_list(&list);
    int cycle = list.has_weights ? check_shares(&list) : 1;
    if (cycle <= 2000) { // longer schedules take longer than everything else
        Dataset d = dataset_open(text, 4, 2, 0);
        held.taken = 1;
        if (d.mixture) check_mixture(&d, cycle);
        dataset_close(&d);
    }
    data_list_close(&list);
    free(text);
}

static const char *const mixture_words[] = {"@a.mix", "@b.mix:0.3", "@?.mix", "@c,d.mix", "@e:1.mix",
                                            ":0.7",   ":1e3",       ",",      "nan",      NULL};

#endif
