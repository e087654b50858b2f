/* recipe_data.h: how far the stages of a recipe have used each source of their data.
 *
 * Stages with the same "data" continue one order of its windows. Other data begins a new order, but each source
 * continues its own epochs. A caller may rely on this: over all stages, no window of a source is used twice before
 * every other window of the source was used once.
 */
#ifndef RECIPE_DATA_H
#define RECIPE_DATA_H
#include "../lib/token_files.h" // defines: Dataset, mixture_count
#include "recipe.h"             // defines: Recipe, RecipeStage

/* How many windows the stages [first, end) use, which share one order of the data. */
static int64_t windows_of_stages(const Recipe *r, const RecipeStage *first, const RecipeStage *end) {
    int64_t tokens = 0;
    for (const RecipeStage *s = first; s < end; s++) tokens += s->tokens;
    return tokens / r->longest;
}

/* The stage after those that continue the data of `first`. */
static const RecipeStage *end_of_data(const Recipe *r, const RecipeStage *first) {
    const RecipeStage *end = first + 1;
    while (end < r->stages + r->count && !end->begins_data) end++;
    return end;
}

/* Numbers the sources of `d` in the order in which the stages name them, so that a source has the same order of windows
 * in every stage. */
static void recipe_number_sources(const Recipe *r, Dataset *d) {
    char *seen[MOST_RECIPE_STAGES * 4];
    int count = 0;
    for (int i = 0; i < r->count && r->path && r->stages[i].opt.data; i++) {
        DataList list;
        if (!r->stages[i].begins_data) continue;
        data_list_parse(&list, r->stages[i].opt.data);
        for (int k = 0; k < list.count; k++) {
            int n = 0;
            while (n < count && strcmp(seen[n], list.entries[k].pattern)) n++;
            if (n == MOST_RECIPE_STAGES * 4)
                user_error("%s: found more than %d sources of data in all stages", r->path, MOST_RECIPE_STAGES * 4);
            if (n == count) seen[count++] = checked_strdup(list.entries[k].pattern);
            for (int own = 0; own < d->num_sources; own++)
                if (!strcmp(d->sources[own].pattern, list.entries[k].pattern)) d->sources[own].number = n;
        }
        data_list_close(&list);
    }
    for (int n = 0; n < count; n++) free(seen[n]);
}

/* Adds to d->sources[].used what the first `windows` windows of the mixture `text` use. */
static void add_used(const char *text, int64_t windows, Dataset *d) {
    DataList list;
    Mixture mixture;
    int units[MOST_SOURCES];
    data_list_parse(&list, text);
    shares_of_weights(&list, units);
    mixture_open(&mixture, units, list.count);
    for (int k = 0; k < list.count; k++)
        for (int own = 0; own < d->num_sources; own++)
            if (!strcmp(d->sources[own].pattern, list.entries[k].pattern))
                d->sources[own].used += mixture_count(&mixture, k, windows);
    mixture_close(&mixture);
    data_list_close(&list);
}

/* Sets d->sources[].used: how many windows of each source earlier orders of the data have used. */
static void recipe_count_used(const Recipe *r, const RecipeStage *s, Dataset *d) {
    if (!d->mixture || !r->path) return;
    for (const RecipeStage *first = r->stages; end_of_data(r, first) <= s; first = end_of_data(r, first))
        add_used(first->opt.data, windows_of_stages(r, first, end_of_data(r, first)), d);
}

/* Refuses a stage by whose end a source is used more often than "max_epochs". */
static void recipe_check_epochs(const Recipe *r, const RecipeStage *s, const Dataset *d) {
    const RecipeStage *first = s;
    while (!first->begins_data) first--;
    int64_t windows = windows_of_stages(r, first, s + 1);
    for (int k = 0; k < d->num_sources; k++) {
        int64_t by_end = d->mixture ? source_windows_used(d, k, windows) : windows;
        int64_t have = d->mixture ? d->sources[k].windows : d->windows;
        double epochs = (double)by_end / (double)have;
        if (epochs > s->max_epochs)
            user_error("%s: \"data\": '%s' has %" PRId64 " tokens, and the stages up to this one use %" PRId64
                       " of them: %.2f epochs, where \"max_epochs\" allows %g; add data, lower its weight, give the "
                       "stage fewer tokens, or raise \"max_epochs\"",
                       stage_place(r, s), d->mixture ? d->sources[k].pattern : s->opt.data, have * r->longest,
                       by_end * r->longest, epochs, s->max_epochs);
        if (!d->mixture) return;
    }
}

#endif
