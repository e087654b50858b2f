/* mixture.h: what --data 'web-*.tok:0.7,code-*.tok:0.3' means: which source each sample of a mixture comes from.
 *
 * A list of entries without weights is one data set. With weights it is a mixture, an endless sequence of samples whose
 * sources follow a schedule that repeats. Weights are shares of samples, which are equally long, and so of tokens.
 * A caller may rely on this: of the first n samples of a mixture, every source gives its share of n, rounded up or
 * down; and which source gives sample n depends on n and the shares only.
 */
#ifndef MIXTURE_H
#define MIXTURE_H
#include "../device/base.h" // defines: user_error, new_array, checked_strdup
#include <glob.h>

// ---------------------------------------------------------------------------
// the list of --data, --val and --eval

enum { MOST_SOURCES = 64 };
#define LARGEST_WEIGHT 1e15

typedef struct {
    char *pattern; // a path or a glob
    double weight; // 0: none was given
} DataEntry;

typedef struct {
    DataEntry entries[MOST_SOURCES];
    int count;
    int has_weights; // all entries have one; 0: none has
} DataList;

/* Does `pattern`, a path or a glob, match a file? A path that exists is that file, whatever characters it has. */
static int pattern_matches(const char *pattern) {
    struct stat info;
    glob_t found = ZERO;
    int matches = !lstat(pattern, &info) || !glob(pattern, GLOB_NOSORT, NULL, &found);
    globfree(&found);
    return matches;
}

/* Splits an entry PATTERN:WEIGHT. The text after the last colon is the weight, unless the entry as a whole matches
 * files or that text contains a slash: then the colon belongs to the pattern. */
static DataEntry entry_parse(const char *text) {
    DataEntry entry = {checked_strdup(text), 0};
    char *colon = strrchr(entry.pattern, ':'), *end;
    if (!colon || strchr(colon, '/') || pattern_matches(text)) return entry;
    const char *weight = colon + 1;
    int has_other_letters = weight[strspn(weight, "+-.0123456789eE")] != 0; // strtod also reads inf, nan and 0x10
    entry.weight = strtod(weight, &end);
    if (has_other_letters || end == weight || *end || !(entry.weight > 0 && entry.weight <= LARGEST_WEIGHT))
        user_error("%s: the weight after the last colon is '%s', expected a number above 0 and at most %g: give one "
                   "such as 0.7, or leave the entry out",
                   text, weight, LARGEST_WEIGHT);
    *colon = 0;
    if (!entry.pattern[0]) user_error("%s: a weight without files: expected FILE:WEIGHT or 'GLOB:WEIGHT'", text);
    return entry;
}

/* Splits PATTERN[:WEIGHT][,PATTERN[:WEIGHT]]…. A value that matches files as a whole is one pattern, even if it has
 * commas or colons. */
static void data_list_parse(DataList *list, const char *text) {
    memset(list, 0, sizeof *list);
    if (!strpbrk(text, ",:") || pattern_matches(text)) {
        list->entries[list->count++].pattern = checked_strdup(text);
        return;
    }
    char *copy = checked_strdup(text), *rest = copy;
    int weighted = 0;
    while (rest) {
        const char *entry = strsep(&rest, ",");
        if (!entry[0])
            user_error("%s: found an empty entry, expected FILE or 'GLOB', or FILE:WEIGHT, separated by single commas",
                       text);
        if (list->count == MOST_SOURCES)
            user_error("%s: found more than %d entries: let a glob match several files", text, MOST_SOURCES);
        list->entries[list->count] = entry_parse(entry);
        weighted += list->entries[list->count++].weight > 0;
    }
    free(copy);
    if (weighted && weighted < list->count)
        user_error("%s: %d of %d entries have a weight: give all of them one, or none to use every file in full", text,
                   weighted, list->count);
    list->has_weights = weighted > 0;
}

static void data_list_close(DataList *list) {
    for (int i = 0; i < list->count; i++) free(list->entries[i].pattern);
}

// ---------------------------------------------------------------------------
// shares: weights need not add up to 1; a share is a whole number of millionths

enum { SHARE_UNITS = 1000000 };

/* units (count): each weight's share of SHARE_UNITS, which they add up to. Shares are rounded down, and the units that
 * are left go to those with the largest remainders. */
static void shares_of_weights(const DataList *list, int *units) {
    double sum = 0, remainders[MOST_SOURCES];
    int left = SHARE_UNITS;
    for (int i = 0; i < list->count; i++) sum += list->entries[i].weight;
    for (int i = 0; i < list->count; i++) {
        double exact = list->entries[i].weight / sum * (double)SHARE_UNITS;
        units[i] = (int)exact;
        remainders[i] = exact - units[i];
        left -= units[i];
    }
    for (; left > 0; left--) {
        int most = 0;
        for (int i = 1; i < list->count; i++)
            if (remainders[i] > remainders[most]) most = i;
        units[most]++;
        remainders[most]--;
    }
    for (int i = 0; i < list->count; i++)
        if (units[i] <= 0)
            user_error("%s:%g: its share is less than one sample in %d: give it a larger weight, or leave it out",
                       list->entries[i].pattern, list->entries[i].weight, SHARE_UNITS);
}

// ---------------------------------------------------------------------------
// the schedule of a mixture: which source gives each sample

typedef struct {
    int num_sources;
    int cycle;               // samples after which the schedule repeats
    int quota[MOST_SOURCES]; // samples of each source in a cycle
    uint8_t *source;         // (cycle) which source gives each sample
    int32_t *before;         // (cycle) how many earlier samples of the cycle come from the same source
} Mixture;

/* A sample of a mixture: number `index`, from 0, of those that come from `source`. */
typedef struct {
    int source;
    int64_t index;
} MixtureSample;

/* Sample i of a source with quota q must not come before the schedule's sample floor(i·cycle / q), and must come
 * before ceil((i + 1)·cycle / q). Among the sources whose next sample may come, the one with the earliest deadline
 * gives it. This meets all deadlines, so that after n samples a source has given n·q / cycle, rounded up or down
 * (Baruah et al. 1996, P-fair scheduling). */
static void mixture_fill(Mixture *mixture) {
    int64_t taken[MOST_SOURCES] = {0}, release[MOST_SOURCES] = {0}, deadline[MOST_SOURCES];
    for (int k = 0; k < mixture->num_sources; k++) deadline[k] = blocks_of(mixture->cycle, mixture->quota[k]);
    for (int n = 0; n < mixture->cycle; n++) {
        int next = -1;
        for (int k = 0; k < mixture->num_sources; k++)
            if (release[k] <= n && (next < 0 || deadline[k] < deadline[next])) next = k;
        mixture->source[n] = (uint8_t)next;
        mixture->before[n] = (int32_t)taken[next]++;
        release[next] = taken[next] * mixture->cycle / mixture->quota[next];
        deadline[next] = blocks_of((taken[next] + 1) * mixture->cycle, mixture->quota[next]);
    }
}

/* `units` (num_sources): the shares, in whole numbers; they may have a common divisor. */
static void mixture_open(Mixture *mixture, const int *units, int num_sources) {
    int divisor = 0;
    memset(mixture, 0, sizeof *mixture);
    mixture->num_sources = num_sources;
    for (int k = 0; k < num_sources; k++)
        for (int rest = units[k]; rest;) { // Euclid's algorithm
            int remainder = divisor % rest;
            divisor = rest;
            rest = remainder;
        }
    for (int k = 0; k < num_sources; k++) {
        mixture->quota[k] = units[k] / divisor;
        mixture->cycle += mixture->quota[k];
    }
    mixture->source = new_array(uint8_t, mixture->cycle);
    mixture->before = new_array(int32_t, mixture->cycle);
    mixture_fill(mixture);
}

static void mixture_close(Mixture *mixture) {
    free(mixture->source);
    free(mixture->before);
}

static MixtureSample mixture_sample(const Mixture *mixture, int64_t n) {
    int64_t at = n % mixture->cycle;
    int source = mixture->source[at];
    MixtureSample sample = {source, n / mixture->cycle * mixture->quota[source] + mixture->before[at]};
    return sample;
}

/* How many of the first n samples come from `source`. */
static int64_t mixture_count(const Mixture *mixture, int source, int64_t n) {
    int64_t whole = n / mixture->cycle * mixture->quota[source];
    for (int64_t at = n % mixture->cycle - 1; at >= 0; at--)
        if (mixture->source[at] == source) return whole + mixture->before[at] + 1;
    return whole;
}

#endif
