/* recipe.h: --recipe FILE: a training run in periods, which may differ in batch, sequence length, learning rate, data,
 * RoPE and in what is frozen.
 *
 * FILE is a JSON object {"stages": [...]} with // comments. Its "stages" are called periods here, because a stage is a
 * part of a pipeline. A period lasts for a number of tokens; a field that it does not give keeps its value. A run
 * without --recipe is one period, which the options describe. A caller may rely on: after recipe_schedule every period
 * has a whole number of steps, its batch divides over the ranks, and it ends where a sequence of the next one ends. */
#ifndef RECIPE_H
#define RECIPE_H
#include "../../lib/io/json.h"        // defines: json_parse_object, json_number
#include "../../lib/comm/mesh.h"      // defines: Mesh, mesh_data_ranks
#include "../../lib/io/mixture.h"     // defines: LARGEST_WEIGHT
#include "../../optimizer.h"          // defines: LearningRate
#include "config_json.h"              // defines: Llama3Config, config_read_rope
#include "options.h"                  // defines: Options, option_set
#include "../../lib/io/token_files.h" // defines: Dataset, mixture_count
#include <fnmatch.h>                  // defines: fnmatch

enum { MOST_RECIPE_PERIODS = 64, MOST_FROZEN = 32 };

typedef struct {
    RunSettings run;                 // in force in this period
    char name[64];                   // for messages; "" if the recipe gives none
    int64_t wanted_tokens;           // the period lasts at least so long; 0: --steps steps
    int64_t batch;                   // sequences per step of all ranks; 0: data ranks x --batch x --accum
    int begins_rate, begins_data;    // 0: the learning-rate curve, or the order of the data, continues
    double max_epochs;               // how often a source may be used, over all periods
    Llama3Config config;             // the model's, with the period's RoPE and longest sequence
    const char *frozen[MOST_FROZEN]; // patterns of the names of tensors that are not trained
    int num_frozen;

    // set by recipe_schedule
    char problem[1024];        // why the batch does not divide over the ranks; "": it does
    int64_t first_step, steps; // the period begins after this step of the run
    int64_t tokens;            // of all ranks, in the period
    LearningRate rate;         // its curve, which may span several periods
} RecipePeriod;

typedef struct {
    const char *path; // NULL: the options alone
    RecipePeriod *periods;
    int count;
    int longest;          // tokens of the longest sequence
    uint64_t fingerprint; // hash of the file
} Recipe;

/* A period's name in errors: "recipe.json, stage 2 (long context)" or "the options". Valid until the next call. */
static const char *period_place(const Recipe *r, const RecipePeriod *p) {
    static __thread char place[4300];
    if (!r->path) return "the options";
    int used = snprintf(place, sizeof place, "%s, stage %d", r->path, (int)(p - r->periods) + 1);
    if (p->name[0]) snprintf(place + used, sizeof place - (size_t)used, " (%s)", p->name);
    return place;
}

// ---------------------------------------------------------------------------
// reading a period

// clang-format off
/* The fields of a period. */
static const struct {
    const char *field, *option; // NULL: it is no option
    int of_rate;                // belongs to a learning-rate curve, which begins with "lr"
} period_fields[] = {
    {"name", NULL, 0}, {"tokens", NULL, 0}, {"batch", NULL, 0}, {"data", NULL, 0}, {"max_epochs", NULL, 0},
    {"rope_theta", NULL, 0}, {"rope_scaling", NULL, 0}, {"max_position_embeddings", NULL, 0}, {"frozen", NULL, 0},
    {"seq", "seq", 0}, {"lr", "lr", 1}, {"min_lr", "min-lr", 1}, {"warmup", "warmup", 1},
    {"lr_schedule", "lr-schedule", 1}, {"lr_decay", "lr-decay", 1}, {"weight_decay", "weight-decay", 0},
    {"beta1", "beta1", 0}, {"beta2", "beta2", 0}, {"clip", "clip", 0}, {"z_loss", "z-loss", 0},
    {"doc_mask", "doc-mask", 0},
};
// clang-format on
enum { PERIOD_FIELDS = sizeof period_fields / sizeof *period_fields };

static void period_check_fields(const cJSON *json, const char *place) {
    const cJSON *item;
    char known[512];
    size_t used = 0;
    for (int i = 0; i < PERIOD_FIELDS; i++)
        used += (size_t)snprintf(known + used, sizeof known - used, "%s%s", i ? ", " : "", period_fields[i].field);
    cJSON_ArrayForEach(item, json) {
        int is_known = 0;
        for (int i = 0; i < PERIOD_FIELDS; i++) is_known |= !strcmp(item->string, period_fields[i].field);
        if (!is_known) user_error("%s: a stage has no field \"%s\": expected some of %s", place, item->string, known);
    }
}

/* Sets the option that a field stands for. */
static void period_set_option(RecipePeriod *p, const char *place, int i, const cJSON *item) {
    const OptionRow *row = option_find(period_fields[i].option);
    char called[4400], value[64];
    snprintf(called, sizeof called, "%s: \"%s\":", place, period_fields[i].field);
    if (row->kind == OPT_FLAG) {
        if (!cJSON_IsBool(item)) user_error("%s expected true or false", called);
        *(int *)((char *)&p->run + row->offset) = cJSON_IsTrue(item);
        return;
    }
    int is_word = row->kind == OPT_TEXT || row->kind == OPT_CHOICE;
    if (cJSON_IsNumber(item) && !is_word) snprintf(value, sizeof value, "%.17g", item->valuedouble);
    else if (cJSON_IsString(item) && is_word) snprintf(value, sizeof value, "%.60s", item->valuestring);
    else user_error("%s expected %s", called, is_word ? row->values : "a number");
    option_set(&p->run, row, called, checked_strdup(value));
}

/* Can a recipe change this option from period to period? */
static int is_period_option(const char *option) {
    for (int i = 0; i < PERIOD_FIELDS; i++)
        if (period_fields[i].option && !strcmp(option, period_fields[i].option)) return 1;
    return 0;
}

/* A field that is also given as an option would have two values. `given`: the options of the command line. */
static void period_check_given(const Options *given, const char *option, const char *place, const char *field) {
    if (option_given(given, option))
        user_error("--%s is also given by %s, in \"%s\": remove one of the two", option, place, field);
}

/* Reads the fields that are options. What a new curve does not give is the command line's value in the first period,
 * and later the program's default, without a warm-up. */
static void period_read_options(RecipePeriod *p, const Options *given, const cJSON *json, const char *place,
                                int is_first) {
    const cJSON *lr = cJSON_GetObjectItemCaseSensitive(json, "lr");
    p->begins_rate = is_first || lr;
    for (int i = 0; i < PERIOD_FIELDS && p->begins_rate && !is_first; i++) {
        if (!period_fields[i].of_rate) continue;
        const OptionRow *row = option_find(period_fields[i].option);
        option_set(&p->run, row, row->name, row->fallback);
    }
    if (!is_first && lr) p->run.warmup = 0;
    for (int i = 0; i < PERIOD_FIELDS; i++) {
        const char *field = period_fields[i].field;
        const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, field);
        if (!item || !period_fields[i].option) continue;
        if (period_fields[i].of_rate && !p->begins_rate)
            user_error("%s: \"%s\" without \"lr\": the stage continues the learning-rate curve of the stage before it; "
                       "add \"lr\" to begin a new curve, or remove \"%s\"",
                       place, field, field);
        period_check_given(given, period_fields[i].option, place, field);
        period_set_option(p, place, i, item);
    }
    if (!p->begins_rate) return;
    int gives_minimum = cJSON_GetObjectItemCaseSensitive(json, "min_lr") || (is_first && option_given(given, "min-lr"));
    if (!gives_minimum) p->run.min_lr = -1;
    settings_check_rate(&p->run, place);
}

/* {"PATTERN": WEIGHT, ...} as a value of --data. */
static void period_read_data(RecipePeriod *p, const cJSON *data, const char *place) {
    const cJSON *item;
    char *text;
    size_t length;
    FILE *f = text_stream_open(&text, &length);
    double sum = 0;
    if (!cJSON_IsObject(data) || !data->child)
        user_error("%s: \"data\" must be an object of files and weights, such as {\"web-*.tok\": 0.7, \"code.tok\": "
                   "0.3}",
                   place);
    cJSON_ArrayForEach(item, data) {
        double weight = cJSON_IsNumber(item) ? item->valuedouble : -1;
        if (!item->string[0] || strpbrk(item->string, ",:"))
            user_error("%s: \"data\": found '%s', expected a path or a glob without commas and colons", place,
                       item->string);
        if (!(weight >= 0 && weight <= LARGEST_WEIGHT))
            user_error("%s: \"data\": the weight of '%s' must be a number from 0 to %g", place, item->string,
                       LARGEST_WEIGHT);
        sum += weight;
        if (weight > 0) fprintf(f, "%s%s:%.15g", ftell(f) > 0 ? "," : "", item->string, weight);
    }
    text_stream_close(f);
    if (!(sum > 0)) user_error("%s: the weights of \"data\" sum to 0: give at least one file a weight above 0", place);
    p->run.data = text;
}

/* RoPE, the longest sequence, and what is frozen. */
static void period_read_model(RecipePeriod *p, const cJSON *json, const char *place) {
    const cJSON *scaling = cJSON_GetObjectItemCaseSensitive(json, "rope_scaling");
    const cJSON *frozen = cJSON_GetObjectItemCaseSensitive(json, "frozen"), *pattern;
    Llama3Config *c = &p->config, rope = ZERO; // without positions: the original ones must be given
    if (cJSON_GetObjectItemCaseSensitive(json, "rope_theta"))
        c->rope_theta = json_number(json, place, "rope_theta", NAN, 1, 1e12);
    if (cJSON_GetObjectItemCaseSensitive(json, "max_position_embeddings"))
        c->max_positions = json_integer(json, place, "max_position_embeddings", NAN, 1, 1 << 30);
    if (cJSON_GetObjectItemCaseSensitive(scaling, "rope_theta"))
        user_error("%s: \"rope_theta\" within \"rope_scaling\": move it out of there, to be a field of the stage",
                   place);
    if (scaling) {
        config_read_rope(&rope, json, place);
        c->rope_factor = rope.rope_factor;
        c->rope_low = rope.rope_low;
        c->rope_high = rope.rope_high;
        c->rope_original = rope.rope_original;
    }
    if (!frozen) return;
    p->num_frozen = 0;
    if (!cJSON_IsArray(frozen) || cJSON_GetArraySize(frozen) > MOST_FROZEN)
        user_error("%s: \"frozen\" must be an array of at most %d patterns of tensor names, such as "
                   "\"model.embed_tokens.weight\" or \"model.layers.0.*\"",
                   place, MOST_FROZEN);
    if (p->run.lora_rank)
        user_error("%s: \"frozen\" with --lora-rank %d: LoRA freezes the whole model already; remove one of them",
                   place, p->run.lora_rank);
    cJSON_ArrayForEach(pattern, frozen) {
        if (!cJSON_IsString(pattern)) user_error("%s: \"frozen\" must hold patterns of tensor names only", place);
        p->frozen[p->num_frozen++] = checked_strdup(pattern->valuestring);
    }
}

/* Reads a period on top of the period before it; the first one on top of the options. */
static void period_read(Recipe *r, RecipePeriod *p, const Options *given, const cJSON *json) {
    int is_first = p == r->periods;
    const cJSON *name = cJSON_GetObjectItemCaseSensitive(json, "name");
    const cJSON *data = cJSON_GetObjectItemCaseSensitive(json, "data");
    if (!cJSON_IsObject(json)) user_error("%s must be a JSON object", period_place(r, p));
    p->name[0] = 0;
    if (cJSON_IsString(name)) snprintf(p->name, sizeof p->name, "%.60s", name->valuestring);
    else if (name) user_error("%s: \"name\" must be a text", period_place(r, p));
    const char *place = period_place(r, p);
    period_check_fields(json, place);
    p->wanted_tokens = json_whole_number(json, place, "tokens", NAN, 1, 1e18);
    if (cJSON_GetObjectItemCaseSensitive(json, "batch")) {
        period_check_given(given, "accum", place, "batch");
        p->batch = json_whole_number(json, place, "batch", NAN, 1, 1e12);
    }
    p->max_epochs = json_number(json, place, "max_epochs", p->max_epochs, 1e-6, 1e12);
    period_read_options(p, given, json, place, is_first);
    period_read_model(p, json, place);
    p->begins_data = is_first;
    if (!data) return;
    const char *old_data = p->run.data;
    period_check_given(given, "data", place, "data");
    period_read_data(p, data, place);
    p->begins_data |= !old_data || strcmp(old_data, p->run.data);
}

/* Replaces // comments with blanks; // inside a string is not a comment. */
static void blank_comments(char *text) {
    int in_text = 0;
    for (char *c = text; *c; c++) {
        if (*c == '\\' && in_text && c[1]) c++;
        else if (*c == '"') in_text = !in_text;
        else if (!in_text && c[0] == '/' && c[1] == '/')
            while (*c && *c != '\n') *c++ = ' ';
        if (!*c) return;
    }
}

/* The recipe of a run: one period, or the periods of --recipe. `config`: of the model. */
static Recipe recipe_open(const RunSettings *run, const Options *given, const Llama3Config *config) {
    Recipe r = {run->recipe, new_array(RecipePeriod, MOST_RECIPE_PERIODS), 1, 0, 0};
    r.periods->run = *run;
    r.periods->config = *config;
    r.periods->begins_rate = r.periods->begins_data = 1;
    r.periods->max_epochs = run->recipe ? 1 : INFINITY;
    if (!run->recipe) return r;
    size_t length;
    char *text = read_regular_file(run->recipe, &length);
    if (!text) user_error("cannot read --recipe %s: %s", run->recipe, strerror(errno));
    r.fingerprint = hash_bytes(HASH_START, text, length);
    blank_comments(text);
    cJSON *json = json_parse_object(text, length, run->recipe, "a recipe, {\"stages\": [{\"tokens\": …}, …]}");
    json_refuse_duplicates(json, run->recipe);
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(json, "stages"), *field, *period;
    int count = cJSON_GetArraySize(list);
    cJSON_ArrayForEach(field, json) {
        if (strcmp(field->string, "stages"))
            user_error("%s: a recipe has no field \"%s\": expected \"stages\" alone", run->recipe, field->string);
    }
    if (!cJSON_IsArray(list) || count < 1 || count > MOST_RECIPE_PERIODS)
        user_error("%s: \"stages\" must be an array of 1 to %d stages", run->recipe, MOST_RECIPE_PERIODS);
    if (option_given(given, "steps"))
        user_error("--steps %d has no effect with --recipe, whose stages last for their \"tokens\": remove --steps",
                   run->steps);
    r.count = 0;
    cJSON_ArrayForEach(period, list) {
        RecipePeriod *p = &r.periods[r.count++];
        if (p > r.periods) *p = p[-1];
        period_read(&r, p, given, period);
    }
    cJSON_Delete(json);
    free(text);
    for (int i = 1; i < r.count; i++)
        if (r.periods[i].run.data && !r.periods->run.data)
            user_error("%s: \"data\" is missing, and stage %d has it: the first stage needs \"data\", too",
                       period_place(&r, r.periods), i + 1);
    return r;
}

// ---------------------------------------------------------------------------
// the schedule: steps, micro-batches and learning-rate curves

/* Divides the batch over the ranks: "batch" = data ranks x --batch x --accum. Without --batch a micro-batch has at most
 * as many tokens as the model's default. */
static void period_micro_batches(const Recipe *r, RecipePeriod *p, const Options *given, const Mesh *mesh) {
    const Llama3Config *c = &p->config;
    int64_t ranks = mesh_data_ranks(mesh), each = max_i64(1, p->batch / ranks);
    RunSettings *run = &p->run;
    p->problem[0] = 0;
    if (!p->batch) {
        if (!run->batch) run->batch = c->B;
        return;
    }
    int64_t unit = ranks * (option_given(given, "batch") ? run->batch : 1);
    if (p->batch % unit)
        snprintf(p->problem, sizeof p->problem,
                 "\"batch\" is %" PRId64 " sequences, which %" PRId64 " data rank%s x --batch %" PRId64
                 " do not divide: use %" PRId64 ", another multiple of %" PRId64 ", or another layout",
                 p->batch, ranks, ranks == 1 ? "" : "s", unit / ranks, blocks_of(p->batch, unit) * unit, unit);
    if (!option_given(given, "batch")) {
        int64_t most = max_i64(1, (int64_t)c->B * c->T / run->seq);
        run->batch = (int)min_i64(most, each);
        while (each % run->batch) run->batch--;
    }
    if (each / run->batch > 1 << 16)
        user_error("%s: \"batch\" %" PRId64 " takes %" PRId64
                   " micro-batches a step, but at most %d are supported: use more ranks or a larger --batch",
                   period_place(r, p), p->batch, each / run->batch, 1 << 16);
    run->accum = (int)max_i64(1, each / run->batch);
}

/* Sequences per step of all ranks. */
static int64_t period_batch(const RecipePeriod *p, const Mesh *mesh) {
    return p->batch ? p->batch : (int64_t)mesh_data_ranks(mesh) * p->run.batch * p->run.accum;
}

/* a · b, but at most MOST_TOKENS_OF_RUN. job_enter_period (job.h) refuses steps that are too large for counters. */
#define MOST_TOKENS_OF_RUN ((int64_t)1 << 61)
static int64_t product_or_most(int64_t a, int64_t b) {
    return (double)a * (double)b < (double)MOST_TOKENS_OF_RUN ? a * b : MOST_TOKENS_OF_RUN;
}

static int64_t greatest_common_divisor(int64_t a, int64_t b) { return b ? greatest_common_divisor(b, a % b) : a; }

/* The patterns of frozen tensors as one text, separated by blanks. */
static const char *period_frozen(const RecipePeriod *p, char *text, size_t size) {
    size_t used = 0;
    text[0] = 0;
    for (int i = 0; i < p->num_frozen && used < size; i++)
        used += (size_t)snprintf(text + used, size - used, "%s%s", i ? " " : "", p->frozen[i]);
    return text;
}

/* Sets the learning-rate curve that begins in period p, in every period that it spans. */
static void period_rates(Recipe *r, RecipePeriod *p) {
    const RunSettings *run = &p->run;
    RecipePeriod *end = p + 1;
    while (end < &r->periods[r->count] && !end->begins_rate) end++;
    LearningRate rate = ZERO;
    rate.shape = (RateShape)run->lr_schedule;
    rate.peak = run->lr;
    rate.minimum = run->min_lr;
    rate.warmup = run->warmup;
    rate.first_step = p->first_step;
    rate.steps = end[-1].first_step + end[-1].steps - p->first_step;
    rate.decay = run->lr_decay ? run->lr_decay : max_i64(1, rate.steps / 10);
    if (rate.shape == RATE_WSD && rate.warmup + rate.decay > rate.steps && (r->path || run->lr_decay))
        user_error("%s: a warm-up of %" PRId64 " steps and a decay of %" PRId64 " steps do not fit into the %" PRId64
                   " steps of the learning-rate curve: shorten one of them, or train for more steps",
                   period_place(r, p), rate.warmup, rate.decay, rate.steps);
    for (RecipePeriod *t = p; t < end; t++) t->rate = rate;
}

/* Sets what depends on the ranks. `given`: the options of the command line. Every period but the last ends on a whole
 * window of the recipe's longest sequence, so that the next one can begin with a sequence of any length, or with other
 * data. */
static void recipe_schedule(Recipe *r, const Options *given, const Mesh *mesh) {
    RecipePeriod *last = &r->periods[r->count - 1];
    for (RecipePeriod *p = r->periods; p <= last; p++) {
        int least = p > r->periods ? p[-1].run.seq : 1;
        if (!p->run.seq) p->run.seq = p->config.T;
        if (p->run.seq < least)
            user_error("%s: \"seq\" is %d, and the stage before has %d: sequences may only grow; use %d or more",
                       period_place(r, p), p->run.seq, least, least);
    }
    r->longest = last->run.seq;
    for (RecipePeriod *p = r->periods; p <= last; p++) {
        if (r->longest % p->run.seq)
            user_error("%s: \"seq\" %d does not divide %d, the longest sequence of the recipe: use a divisor of %d",
                       period_place(r, p), p->run.seq, r->longest, r->longest);
        period_micro_batches(r, p, given, mesh);
        int64_t per_step = product_or_most(period_batch(p, mesh), p->run.seq);
        int64_t ends_at = p < last ? r->longest : 1; // the period's tokens are a multiple of this
        p->steps = p->wanted_tokens ? blocks_of(p->wanted_tokens, per_step) : p->run.steps;
        if (p->wanted_tokens) p->steps = round_up(p->steps, ends_at / greatest_common_divisor(ends_at, per_step));
        if (p > r->periods) p->first_step = p[-1].first_step + p[-1].steps;
        if (p->first_step + p->steps > 1 << 30)
            user_error("%s: the run would have %" PRId64 " steps, but at most %d are supported: use fewer tokens or a "
                       "larger batch",
                       period_place(r, p), p->first_step + p->steps, 1 << 30);
        p->tokens = product_or_most(p->steps, per_step);
    }
    for (RecipePeriod *p = r->periods; p <= last; p++)
        if (p->begins_rate) period_rates(r, p);
}

/* Marks the tensors that the period does not train, and counts the steps before it that did not train them. */
static void table_freeze(TensorTable *table, const Recipe *r, const RecipePeriod *p) {
    int is_whole = table->part.tp * table->part.pp == 1, trained = 0; // a part of the model may lack named tensors
    for (const RecipePeriod *q = r->periods; q <= p; q++) {
        for (int i = 0; i < q->num_frozen; i++) {
            int matched = 0;
            for (int t = 0; t < table->num_tensors; t++) {
                if (fnmatch(q->frozen[i], table->tensors[t].name, 0)) continue;
                table->tensors[t].is_frozen = 1;
                matched = 1;
            }
            if (!matched && is_whole)
                user_error("%s: \"frozen\": no tensor is called '%s': expected patterns such as "
                           "\"model.embed_tokens.weight\" or \"model.layers.0.*\"",
                           period_place(r, q), q->frozen[i]);
        }
        for (Tensor *t = table->tensors; q < p && t < table->tensors + table->num_tensors; t++) {
            if (t->is_frozen) t->frozen_steps += q->steps;
            t->is_frozen = 0; // the next period begins without frozen tensors
        }
    }
    for (int t = 0; t < table->num_tensors; t++) trained += !table->tensors[t].is_frozen;
    if (!trained && is_whole)
        user_error("%s: \"frozen\" names every tensor, so that nothing is trained: remove some of the patterns",
                   period_place(r, p));
}

/* The period that trains the step after `step`; at the end of the run the last period. */
static int recipe_period_after(const Recipe *r, int64_t step) {
    int i = 0;
    while (i < r->count - 1 && step >= r->periods[i].first_step + r->periods[i].steps) i++;
    return i;
}

static int64_t recipe_steps(const Recipe *r) {
    const RecipePeriod *last = &r->periods[r->count - 1];
    return last->first_step + last->steps;
}

// ---------------------------------------------------------------------------
// how far the periods have used each source of their data
//
// Periods with the same "data" continue one order of its windows. Other data begins a new order, but each source
// continues its own epochs: over all periods, no window of a source is used twice before every other one was used once.

/* How many windows the periods [first, end) use, which share one order of the data. */
static int64_t windows_of_periods(const Recipe *r, const RecipePeriod *first, const RecipePeriod *end) {
    int64_t tokens = 0;
    for (const RecipePeriod *p = first; p < end; p++) tokens += p->tokens;
    return tokens / r->longest;
}

/* The period after those that continue the data of `first`. */
static const RecipePeriod *end_of_data(const Recipe *r, const RecipePeriod *first) {
    const RecipePeriod *end = first + 1;
    while (end < r->periods + r->count && !end->begins_data) end++;
    return end;
}

/* Numbers the sources of `d` as the periods name them: a source has the same order of windows in every period. */
static void recipe_number_sources(const Recipe *r, Dataset *d) {
    char *seen[MOST_RECIPE_PERIODS * 4];
    int count = 0;
    for (int i = 0; i < r->count && r->path && r->periods[i].run.data; i++) {
        DataList list;
        if (!r->periods[i].begins_data) continue;
        data_list_parse(&list, r->periods[i].run.data);
        for (int k = 0; k < list.count; k++) {
            int n = 0;
            while (n < count && strcmp(seen[n], list.entries[k].pattern)) n++;
            if (n == MOST_RECIPE_PERIODS * 4)
                user_error("%s: found more than %d sources of data in all stages", r->path, MOST_RECIPE_PERIODS * 4);
            if (n == count) seen[count++] = checked_strdup(list.entries[k].pattern);
            for (int own = 0; own < d->num_sources; own++)
                if (!strcmp(d->sources[own].pattern, list.entries[k].pattern)) d->sources[own].number = n;
        }
        data_list_close(&list);
    }
    for (int n = 0; n < count; n++) free(seen[n]);
}

/* Sets d->sources[].used: how many windows of each source earlier orders of the data have used. */
static void recipe_count_used(const Recipe *r, const RecipePeriod *p, Dataset *d) {
    DataList list;
    Mixture mixture;
    int units[MOST_SOURCES];
    if (!d->mixture || !r->path) return;
    for (const RecipePeriod *first = r->periods; end_of_data(r, first) <= p; first = end_of_data(r, first)) {
        int64_t windows = windows_of_periods(r, first, end_of_data(r, first));
        data_list_parse(&list, first->run.data);
        shares_of_weights(&list, units);
        mixture_open(&mixture, units, list.count);
        for (int k = 0; k < list.count; k++)
            for (int own = 0; own < d->num_sources; own++)
                if (!strcmp(d->sources[own].pattern, list.entries[k].pattern))
                    d->sources[own].used += mixture_count(&mixture, k, windows);
        mixture_close(&mixture);
        data_list_close(&list);
    }
}

/* Refuses a period by whose end a source is used more often than "max_epochs". */
static void recipe_check_epochs(const Recipe *r, const RecipePeriod *p, const Dataset *d) {
    const RecipePeriod *first = p;
    while (!first->begins_data) first--;
    int64_t windows = windows_of_periods(r, first, p + 1);
    for (int k = 0; k < d->num_sources; k++) {
        int64_t by_end = d->mixture ? source_windows_used(d, k, windows) : windows;
        int64_t have = d->mixture ? d->sources[k].windows : d->windows;
        double epochs = (double)by_end / (double)have;
        if (epochs > p->max_epochs)
            user_error("%s: \"data\": '%s' has %" PRId64 " tokens, and the stages up to this one use %" PRId64
                       " of them: %.2f epochs, where \"max_epochs\" allows %g; add data, lower its weight, give the "
                       "stage fewer tokens, or raise \"max_epochs\"",
                       period_place(r, p), d->mixture ? d->sources[k].pattern : p->run.data, have * r->longest,
                       by_end * r->longest, epochs, p->max_epochs);
        if (!d->mixture) return;
    }
}

#endif
