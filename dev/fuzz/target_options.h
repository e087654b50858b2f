/* target_options.h: the command line, and config.txt, which is one.
 * Input: a word a line (or up to a zero).
 */
#ifndef TARGET_OPTIONS_H
#define TARGET_OPTIONS_H

typedef struct {
    int count;
    char *words[130];
} Words;

static Words words_open(Bytes in) {
    Words w = ZERO;
    w.words[w.count++] = strdup("train_llama3");
    for (size_t i = 0, n; i < in.left && w.count < 120; i += n + 1) {
        for (n = 0; i + n < in.left && in.at[i + n] && in.at[i + n] != '\n';) n++;
        w.words[w.count++] =
            strndup((const char *)in.at + i, n); // each in a block of its own: nothing reads past its end unseen
    }
    return w;
}

static void words_add(Words *w, const char *word) { w->words[w->count++] = strdup(word); }

static void words_close(Words *w) {
    while (w->count) free(w->words[--w->count]);
}

static void check_limits(const Options *o) {
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow *row = &option_rows[i];
        const char *field = (const char *)&o->run + row->offset;
        double x = row->low;
        if (row->kind == OPT_INT) x = *(const int *)field;
        if (row->kind == OPT_REAL) x = *(const double *)field;
        if (row->kind == OPT_CHOICE) {
            char word[64];
            choice_text(word, sizeof word, row->values, *(const int *)field);
            EXPECT(choice_index(word, strlen(word), row->values) == *(const int *)field, "--%s is %s, choice %d of %s",
                   row->name, word, *(const int *)field, row->values);
            continue;
        }
        int is_absent = !row->fallback && !o->given[i] && x == 0;
        EXPECT(is_absent || (x >= row->low && x <= row->high), "--%s is %g, its limits are %g and %g", row->name, x,
               row->low, row->high);
        const char *text = row->kind == OPT_TEXT ? *(const char *const *)field : NULL;
        int may_be_empty = row->kind == OPT_TEXT && row->high == 1; // --help
        EXPECT(!text || text[0] || may_be_empty, "--%s has an empty value", row->name);
    }
    EXPECT(o->run.min_lr >= 0, "--min-lr is %g", o->run.min_lr);
}

/* The words once more: an option has what was last said of it, or what the table says. */
static void check_said(const Options *o, const Words *w) {
    const char *said[OPTION_ROWS] = {NULL};
    for (int i = 1; i < w->count; i++) {
        EXPECT(!strncmp(w->words[i], "--", 2), "the word %s was taken", w->words[i]);
        const char *name = w->words[i] + 2, *equals = strchr(name, '=');
        size_t n = equals ? (size_t)(equals - name) : strlen(name);
        int r = OPTION_ROWS - 1;
        while (r >= 0 && (option_rows[r].kind == OPT_GROUP || strlen(option_rows[r].name) != n ||
                          memcmp(option_rows[r].name, name, n)))
            r--;
        int may_stand_alone = r >= 0 && option_rows[r].kind == OPT_TEXT && option_rows[r].low == 1; // --help
        if (may_stand_alone && !equals && (i + 1 == w->count || !strncmp(w->words[i + 1], "--", 2))) said[r] = "";
        else if (r >= 0 && option_rows[r].kind == OPT_FLAG) said[r] = "1";
        else if (r >= 0) said[r] = equals ? equals + 1 : w->words[++i];
        else i += !equals && i + 1 < w->count && strncmp(w->words[i + 1], "--", 2); // not built: its only value
    }
    for (int r = 0; r < OPTION_ROWS; r++) {
        const OptionRow *row = &option_rows[r];
        const char *field = (const char *)&o->run + row->offset, *value = said[r] ? said[r] : row->fallback;
        double number = value ? strtod(value, NULL) : 0; // of auto: 0
        if (row->kind == OPT_INT || row->kind == OPT_FLAG)
            EXPECT(*(const int *)field == number, "--%s is %d, given was %s", row->name, *(const int *)field, value);
        if (row->kind == OPT_REAL)
            EXPECT(*(const double *)field == number || (row->offset == offsetof(RunSettings, min_lr) && number < 0),
                   "--%s is %g, given was %s", row->name, *(const double *)field, value);
        if (row->kind == OPT_CHOICE) {
            char is[64]; // without the number that another field has
            choice_as_text(&o->run, row, is, sizeof is);
            EXPECT(!strcmp(is, value) || (row->number_size && !strncmp(is, value, strcspn(value, ":"))),
                   "--%s is %s, given was %s", row->name, is, value);
        }
        const char *text = row->kind == OPT_TEXT ? *(const char *const *)field : value;
        EXPECT(text == value || !strcmp(text, value), "--%s is another text than was given", row->name);
    }
}

/* config.txt, given as options, gives the same config.txt. */
static void check_config_txt(const Options *o) {
    options_write(o, &o->run, stdout);
    size_t length = said_length(&said_out);
    char *first = (char *)memcpy(checked_malloc(length + 1), said_out.text, length);
    Words w = ZERO;
    words_add(&w, "train_llama3");
    for (char *line = first, *end = strchr(line, '\n'); end; line = end + 1, end = strchr(line, '\n')) {
        char *blank = (char *)memchr(line, ' ', (size_t)(end - line));
        *end = 0;
        if (blank) *blank = 0;
        words_add(&w, line);
        if (blank) {
            words_add(&w, blank + 1);
            *blank = ' ';
        }
        *end = '\n';
    }
    held.promise = "config.txt as options";
    const Options *again = options_parse(w.count, w.words);
    held.promise = NULL;
    rewind(stdout);
    options_write(again, &again->run, stdout);
    EXPECT(said_length(&said_out) == length && !memcmp(first, said_out.text, length),
           "config.txt is\n%.*s\ngiven as options it is\n%.*s", (int)length, first, (int)said_length(&said_out),
           said_out.text);
    free((void *)again);
    words_close(&w);
    free(first);
}

static void fuzz_options(Bytes in) {
    static Job j;
    Words w = words_open(in);
    const Options *o = options_parse(w.count, w.words);
    held.taken = 1;
    check_limits(o);
    check_said(o, &w);
    check_config_txt(o);
    if (o->run.help) options_print_help(option_rows, 0, NULL, o->run.help);
    if (preset_find(o->run.model) && !o->run.data &&
        !o->run.recipe) { // else files that are not ours would be looked for
        memset(&j, 0, sizeof j);
        job_take_options(&j, o);
        j.purpose = plan_purpose();
        job_prepare(&j, plan_launch(&j, 0).world, 1, 1);
        double product = 1;
        for (int a = 0; a < MESH_AXES; a++) product *= j.mesh.size[a];
        EXPECT(product == j.mesh.world && j.threads_per_rank > 0, "world %d of %.0f, %d threads", j.mesh.world, product,
               j.threads_per_rank);
        job_close(&j);
    } else free((void *)o);
    words_close(&w);
}

static const char *option_words[400]; // of the dictionary

/* From the table: every option with each of its choices, the value it has when none is given, its limits. */
static void option_word(const char *name, const char *value) { // both up to a |
    static char text[1 << 14];
    static size_t used, count;
    char *p = text + used;
    used += (size_t)snprintf(p, sizeof text - used, "--%.*s%s%.*s", (int)strcspn(name, "|"), name, value ? "=" : "",
                             value ? (int)strcspn(value, "|") : 0, value) +
            1;
    if (used < sizeof text && count + 1 < sizeof option_words / sizeof option_words[0]) option_words[count++] = p;
}

static const char *next_choice(const char *list) { return list && strchr(list, '|') ? strchr(list, '|') + 1 : NULL; }

static void collect_option_words(void) {
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow *row = &option_rows[i];
        char limits[64];
        for (const char *name = row->kind == OPT_GROUP ? NULL : row->name; name; name = next_choice(name)) {
            option_word(name, NULL);
            for (const char *value = row->values; value; value = next_choice(value)) option_word(name, value);
            if (row->fallback) option_word(name, row->fallback);
            snprintf(limits, sizeof limits, "%.10g|%.10g", row->low, row->high);
            for (const char *value = row->high ? limits : NULL; value; value = next_choice(value))
                option_word(name, value);
        }
    }
}

#endif
