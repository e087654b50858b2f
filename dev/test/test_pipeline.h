/* test_pipeline.h: the schedules of all shapes, replayed rank by rank, and messages between two ranks. A part of test_llama3.cu. */

enum { MOST_STAGES = 8, MOST_CHUNKS = 4, MOST_MICROS = 24, MOST_STEPS = 2 * MOST_CHUNKS * MOST_MICROS };

/* Is every micro-batch once forward and once backward in every chunk, a set of activations never taken while it is in use, and none more than needed? */
static int schedule_is_whole(const Schedule *s) {
    int forward[MOST_CHUNKS] = ZERO, backward[MOST_CHUNKS] = ZERO, alive[MOST_CHUNKS] = ZERO, most[MOST_CHUNKS] = ZERO, holds[MOST_CHUNKS][MOST_MICROS], whole = s->count == 2 * s->chunks * s->micros;
    memset(holds, -1, sizeof holds);
    for (int i = 0; i < s->count && whole; i++) {
        const PipeStep *step = &s->steps[i];
        if (step->chunk < 0 || step->chunk >= s->chunks || step->slot < 0 || step->slot >= s->slots[step->chunk]) return 0;
        int *held = &holds[step->chunk][step->slot], before = *held, *next = step->kind == PIPE_FORWARD ? forward : backward;
        whole &= step->micro == next[step->chunk]++ && before == (step->kind == PIPE_FORWARD ? -1 : step->micro);
        *held = step->kind == PIPE_FORWARD ? step->micro : -1;
        alive[step->chunk] += step->kind == PIPE_FORWARD ? 1 : -1;
        most[step->chunk] = (int)max_i64(most[step->chunk], alive[step->chunk]);
    }
    for (int c = 0; c < s->chunks; c++) whole &= forward[c] == s->micros && backward[c] == s->micros && most[c] == s->slots[c];
    return whole && (s->chunks > 1 || s->slots[0] == min_i64(s->micros, s->stages - s->stage));
}

/* On the last stage a backward comes right after its forward. */
static int loss_is_followed(const Schedule *s) {
    for (int i = 0; i < s->count; i++) {
        const PipeStep *step = &s->steps[i];
        if (step->kind == PIPE_BACKWARD || virtual_stage(s, step->chunk) != s->stages * s->chunks - 1) continue;
        if (i + 1 == s->count || step[1].kind != PIPE_BACKWARD || step[1].chunk != step->chunk || step[1].micro != step->micro) return 0;
    }
    return 1;
}

/* What a step makes for another: its kind, micro-batch and the stage it is for. */
static int message_to(const Schedule *s, const PipeStep *step) {
    return (step->kind * MOST_MICROS + step->micro) * MOST_STAGES * MOST_CHUNKS + virtual_stage(s, step->chunk) + (step->kind == PIPE_FORWARD ? 1 : -1);
}
static int message_for(const Schedule *s, const PipeStep *step) { return (step->kind * MOST_MICROS + step->micro) * MOST_STAGES * MOST_CHUNKS + virtual_stage(s, step->chunk); }

/* Does `q` await what comes from `p`, activations and gradients, in the order in which p sends it? */
static int order_is_kept(const Schedule *p, const Schedule *q) {
    int i = 0, j = 0;
    for (;; i++, j++) {
        while (i < p->count && pipe_target(p, &p->steps[i]) != q->stage) i++;
        while (j < q->count && pipe_source(q, &q->steps[j]) != p->stage) j++;
        if (i == p->count || j == q->count) return i == p->count && j == q->count;
        if (message_to(p, &p->steps[i]) != message_for(q, &q->steps[j])) return 0;
    }
}

/* Every rank begins each step as soon as it is through with the one before and the step's input is there. When is the last one done? -1: never. */
static int replay(const Schedule *ranks, int forward_takes, int backward_takes) {
    static int done[2 * MOST_MICROS * MOST_STAGES * MOST_CHUNKS]; // when what a message holds was made, +1
    int at[MOST_STAGES] = ZERO, now[MOST_STAGES] = ZERO, left = ranks->count * ranks->stages, moved = 1, end = 0;
    memset(done, 0, sizeof done);
    while (moved) {
        moved = 0;
        for (int p = 0; p < ranks->stages; p++) {
            const Schedule *s = &ranks[p];
            for (; at[p] < s->count; at[p]++, left--, moved = 1) {
                const PipeStep *step = &s->steps[at[p]];
                int input = pipe_source(s, step) < 0 ? 1 : done[message_for(s, step)];
                if (!input) break;
                now[p] = (int)max_i64(now[p], input - 1) + (step->kind == PIPE_FORWARD ? forward_takes : backward_takes);
                if (pipe_target(s, step) >= 0) done[message_to(s, step)] = now[p] + 1;
                end = (int)max_i64(end, now[p]);
            }
        }
    }
    return left ? -1 : end;
}

/* The same where nothing is kept on the way: a message goes only when it is the first of those its sender has yet to send,
 * and its receiver waits for it. A rank waits for a send before the next one that way (at_once: before it goes on). Do all come to their end? */
static int replay_synchronous(const Schedule *ranks, int at_once) {
    static int queue[MOST_STAGES][MOST_STEPS], got[2 * MOST_MICROS * MOST_STAGES * MOST_CHUNKS];
    int at[MOST_STAGES] = ZERO, first[MOST_STAGES] = ZERO, last[MOST_STAGES] = ZERO, left = ranks->count * ranks->stages, moved = 1;
    memset(got, 0, sizeof got);
    while (moved) {
        moved = 0;
        for (int p = 0; p < ranks->stages; p++) {
            const Schedule *s = &ranks[p];
            for (; at[p] < s->count; at[p]++, left--, moved = 1) {
                const PipeStep *step = &s->steps[at[p]];
                int waits = at_once && first[p] < last[p], sends = pipe_target(s, step) >= 0;
                for (int i = first[p]; i < last[p] && sends; i++) waits |= queue[p][i] / (MOST_MICROS * MOST_STAGES * MOST_CHUNKS) == (int)step->kind;
                if (waits || (pipe_source(s, step) >= 0 && !got[message_for(s, step)])) break;
                if (sends) queue[p][last[p]++] = message_to(s, step);
            }
            for (int q = 0; q < ranks->stages; q++) { // whoever waits for the first of p's
                const PipeStep *step = &ranks[q].steps[at[q]];
                if (first[p] == last[p] || at[q] == ranks[q].count || pipe_source(&ranks[q], step) != p || message_for(&ranks[q], step) != queue[p][first[p]]) continue;
                got[queue[p][first[p]++]] = 1, moved = 1;
            }
        }
    }
    return !left;
}

static void test_schedules(void) {
    int shapes = 0, ranks = 0, whole = 0, followed = 0, pairs = 0, ordered = 0, exact = 0, through = 0, stuck = 0, most_of_chunk = 0;
    for (int P = 1; P <= MOST_STAGES; P++)
        for (int V = 1; V <= MOST_CHUNKS; V++)
            for (int k = 1; k <= MOST_MICROS; k++) {
                if (V > 1 && k % P) continue;
                Schedule of[MOST_STAGES];
                for (int p = 0; p < P; p++) schedule_open(&of[p], P, p, V, k);
                for (int p = 0; p < P; p++, ranks++) {
                    whole += schedule_is_whole(&of[p]), followed += loss_is_followed(&of[p]);
                    for (int q = 0; q < P; q++, pairs++) ordered += order_is_kept(&of[p], &of[q]);
                    for (int c = 0; c < V; c++) most_of_chunk = (int)max_i64(most_of_chunk, of[p].slots[c]);
                }
                // a chunk's forward takes F, its backward B: V * k * (F + B) of work, and the bubble of (P - 1) / V micro-batches of V chunks
                exact += replay(of, 1, 1) == 2 * V * k + 2 * (P - 1) && replay(of, 1, 2) == 3 * V * k + 3 * (P - 1) && replay(of, 3, 2) == 5 * V * k + 5 * (P - 1);
                through += replay_synchronous(of, 0);
                if (P > 1 && k > 1) stuck += !replay_synchronous(of, 1);
                shapes++;
                for (int p = 0; p < P; p++) schedule_close(&of[p]);
            }
    CHECK("every micro-batch is once forward and once backward in every chunk, in order; sets of activations are not shared, and as few as can be", whole == ranks, "%d of %d ranks of %d shapes, at most %d sets a chunk", whole, ranks, shapes, most_of_chunk);
    CHECK("on the last stage a backward follows its forward at once", followed == ranks, "%d of %d ranks", followed, ranks);
    CHECK("messages between two ranks are awaited in the order in which they are sent", ordered == pairs, "%d of %d ordered pairs", ordered, pairs);
    CHECK("a step takes its work and (P - 1) / V micro-batches more", exact == shapes, "%d of %d shapes, backwards 1, 2 and 2/3 times as long as forwards", exact, shapes);
    CHECK("no schedule needs messages to be kept on the way, if a send is waited for before the next one that way", through == shapes, "%d of %d shapes come to their end", through, shapes);
    CHECK("the replay notices ranks that wait for each other: each waits for its send at once", stuck > 0, "%d of %d shapes do", stuck, shapes);
}

static void test_stage_blocks(void) {
    int cases = 0, right = 0, none_empty = 0, largest = 0;
    for (int S = 1; S <= 32; S++)
        for (int L = S; L <= 130; L++)
            for (int light = 0; light < 2; light++, cases++) {
                if (light && L < 2 * S - 2) { cases--; continue; }
                int next = 0, first, least = L, most = 0, inner_least = L, sum_right = 1, empty = 0, ends[2] = {0, 0};
                for (int s = 0; s < S; s++) {
                    int n = stage_blocks(L, S, light, s, &first), whole = n + (light && S > 1 && (s == 0 || s == S - 1));
                    sum_right &= first == next, next += n, empty += n < 1;
                    least = (int)min_i64(least, whole), most = (int)max_i64(most, whole);
                    if (s > 0 && s < S - 1) inner_least = (int)min_i64(inner_least, n);
                    if (s == 0) ends[0] = n;
                    if (s == S - 1) ends[1] = n;
                }
                right += sum_right && next == L && most - least <= 1 && (!light || S < 3 || (ends[1] < inner_least && ends[0] <= inner_least));
                none_empty += !empty;
                largest = (int)max_i64(largest, most - least);
            }
    CHECK("stages have all blocks, as equal as can be, the ends one less where they are to be lighter", right == cases && none_empty == cases, "%d of %d partitions, none with an empty stage: %d, largest difference %d", right, cases, none_empty, largest);
    int first, n = stage_blocks(126, 16, 1, 0, &first), middle = stage_blocks(126, 16, 1, 7, &first), last = stage_blocks(126, 16, 1, 15, &first);
    CHECK("the 126 blocks of Llama 3 405B on 16 lighter-ended stages: 7, 14 times 8, 7", n == 7 && middle == 8 && last == 7 && first == 119, "%d, %d, %d from block %d", n, middle, last, first);
}

static void test_pipeline(void) {
    test_schedules();
    test_stage_blocks();
}
