/* pairs.h: all-pairs testing. Of options with a few values each it chooses a short list of combinations in which each
 * value of each option occurs together with each value of every other option. A fault that shows only when two options
 * meet shows in one of them; the product of all options would be millions of combinations. The choice depends on the
 * options alone, so that it is the same on every machine. Part of test_llama3.cu. */

enum { MOST_OPTIONS = 24, MOST_VALUES = 8, MOST_CHOSEN = 200, UNDECIDED = -1 };

typedef char PairSet[MOST_OPTIONS][MOST_VALUES][MOST_OPTIONS][MOST_VALUES]; // [a][value of a][b][value of b], a < b

typedef struct {
    int options, counts[MOST_OPTIONS];     // of options; of values of each
    int coarse;                            // combinations with a value of this option other than its first are
                                           // compared less exactly, so they count for that value's pairs only
    int (*allowed)(const int *v);          // can a combination have these values? Some may be UNDECIDED
    int chosen[MOST_CHOSEN][MOST_OPTIONS]; // the combinations: number of each option's value
    int num_chosen;
    PairSet met; // the pairs of values in `chosen`, and those that no combination may have
} Pairs;

/* Does a combination with these values count for the pair of options a and b? */
static int pairs_counts(const Pairs *p, const int *v, int a, int b) {
    return v[p->coarse] <= 0 || a == p->coarse || b == p->coarse;
}

/* How many pairs that have not met yet `value` of `option` forms with the values of v that are decided. */
static int pairs_added(const Pairs *p, const int *v, int option, int value) {
    int added = 0;
    for (int i = 0; i < p->options; i++) {
        if (i == option || v[i] == UNDECIDED || !pairs_counts(p, v, i, option)) continue;
        added += i < option ? !p->met[i][v[i]][option][value] : !p->met[option][value][i][v[i]];
    }
    return added;
}

/* Decides what is undecided in v: for one option after the other the value that adds most pairs, or, if that value
 * allows no whole combination, the next best one. Returns whether any combination has the values that v had. */
static int pairs_complete(const Pairs *p, int *v, int option) {
    char tried[MOST_VALUES] = ZERO;
    while (option < p->options && v[option] != UNDECIDED) option++;
    if (option == p->options) return 1;
    for (int i = 0; i < p->counts[option]; i++) {
        int best = UNDECIDED, most = -1;
        for (int k = 0; k < p->counts[option]; k++) {
            int turn = option == p->coarse ? 0 : p->num_chosen; // of equally good values another one each time
            int value = (k + turn) % p->counts[option];
            int added = tried[value] ? -1 : pairs_added(p, v, option, value);
            if (added > most) {
                most = added;
                best = value;
            }
        }
        tried[best] = 1;
        v[option] = best;
        if (p->allowed(v) && pairs_complete(p, v, option + 1)) return 1;
    }
    v[option] = UNDECIDED;
    return 0;
}

/* The combination that has value x of option a, value y of option b, and as many new pairs as can be found. Returns how
 * many those are; 0: no combination is allowed to have both values. */
static int pairs_combine(const Pairs *p, int *v, int a, int x, int b, int y) {
    int added = 0;
    for (int i = 0; i < p->options; i++) v[i] = UNDECIDED;
    v[a] = x;
    v[b] = y;
    if (!p->allowed(v) || !pairs_complete(p, v, 0)) return 0;
    for (int i = 0; i < p->options; i++) added += pairs_added(p, v, i, v[i]);
    return added / 2; // each pair was counted for both of its options
}

/* Adds the combination with the most new pairs of all that begin with a pair that has not met. Returns 0 if none is
 * left. */
static int pairs_add(Pairs *p) {
    int most = 0, v[MOST_OPTIONS], *best = p->chosen[p->num_chosen];
    for (int a = 0; a < p->options; a++)
        for (int b = a + 1; b < p->options; b++)
            for (int x = 0; x < p->counts[a]; x++)
                for (int y = 0; y < p->counts[b]; y++) {
                    if (p->met[a][x][b][y]) continue;
                    int added = pairs_combine(p, v, a, x, b, y);
                    if (!added) p->met[a][x][b][y] = 1; // it never can
                    if (added <= most) continue;
                    most = added;
                    memcpy(best, v, sizeof v);
                }
    if (!most) return 0;
    for (int a = 0; a < p->options; a++)
        for (int b = a + 1; b < p->options; b++)
            if (pairs_counts(p, best, a, b)) p->met[a][best[a]][b][best[b]] = 1;
    if (++p->num_chosen == MOST_CHOSEN) user_error("all pairs need more than %d combinations", MOST_CHOSEN - 1);
    return 1;
}

static void pairs_choose(Pairs *p) {
    while (pairs_add(p)) {}
}

/* Counts which pairs occur, from the list of combinations and the constraints alone. */
static void check_pairs(const Pairs *p, const char *of) {
    int pairs = 0, refused = 0, missed = 0, wrong = 0, v[MOST_OPTIONS];
    char name[200];
    for (int i = 0; i < p->num_chosen; i++) wrong += !p->allowed(p->chosen[i]);
    for (int i = 0; i < p->options; i++) v[i] = UNDECIDED;
    for (int a = 0; a < p->options; v[a++] = UNDECIDED)
        for (int b = a + 1; b < p->options; v[b++] = UNDECIDED)
            for (v[a] = 0; v[a] < p->counts[a]; v[a]++)
                for (v[b] = 0; v[b] < p->counts[b]; v[b]++) {
                    int i = 0;
                    while (i < p->num_chosen &&
                           (p->chosen[i][a] != v[a] || p->chosen[i][b] != v[b] || !pairs_counts(p, p->chosen[i], a, b)))
                        i++;
                    pairs += i < p->num_chosen;
                    refused += i == p->num_chosen && !p->allowed(v);
                    missed += i == p->num_chosen && p->allowed(v);
                }
    snprintf(name, sizeof name, "%d pairs of values of %d options, each in at least one of %d %s", pairs, p->options,
             p->num_chosen, of);
    CHECK(name, pairs && !missed && !wrong, "%d pairs missed, %d of %s not allowed; %d pairs cannot be", missed, wrong,
          of, refused);
}
