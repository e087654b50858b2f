/* test_pipeline.h: the schedules of all shapes, simulated rank by rank, and followed by a pipeline of numbers. Part of
 * test_llama3.cu. */
#include "../../pipeline_parallel.h"

enum { MOST_STAGES = 8, MOST_CHUNKS = 4, MOST_MICROS = 24, MOST_STEPS = 2 * MOST_CHUNKS * MOST_MICROS };

/* Is every micro-batch once forward and once backward in every chunk, a set of activations never taken while it is in
 * use, and none more than needed? */
static int schedule_is_whole(const Schedule *s) {
    int forward[MOST_CHUNKS] = ZERO, backward[MOST_CHUNKS] = ZERO, alive[MOST_CHUNKS] = ZERO, most[MOST_CHUNKS] = ZERO,
        holds[MOST_CHUNKS][MOST_MICROS], whole = s->num_steps == 2 * s->virtual_stages * s->micro_batches;
    memset(holds, -1, sizeof holds);
    for (int i = 0; i < s->num_steps && whole; i++) {
        const PipelineStep *step = &s->steps[i];
        if (step->stage < 0 || step->stage >= s->virtual_stages || step->activation_set < 0 ||
            step->activation_set >= s->activation_sets[step->stage])
            return 0;
        int *held = &holds[step->stage][step->activation_set], before = *held,
            *next = step->kind == PIPE_FORWARD ? forward : backward;
        whole &=
            step->micro_batch == next[step->stage]++ && before == (step->kind == PIPE_FORWARD ? -1 : step->micro_batch);
        *held = step->kind == PIPE_FORWARD ? step->micro_batch : -1;
        alive[step->stage] += step->kind == PIPE_FORWARD ? 1 : -1;
        most[step->stage] = (int)max_i64(most[step->stage], alive[step->stage]);
    }
    for (int c = 0; c < s->virtual_stages; c++)
        whole &= forward[c] == s->micro_batches && backward[c] == s->micro_batches && most[c] == s->activation_sets[c];
    return whole && (s->virtual_stages > 1 || s->activation_sets[0] == min_i64(s->micro_batches, s->pp - s->pp_rank));
}

/* On the last stage a backward comes right after its forward. */
static int loss_is_followed(const Schedule *s) {
    for (int i = 0; i < s->num_steps; i++) {
        const PipelineStep *step = &s->steps[i];
        if (step->kind == PIPE_BACKWARD || stage_number(s, step->stage) != s->pp * s->virtual_stages - 1) continue;
        if (i + 1 == s->num_steps || step[1].kind != PIPE_BACKWARD || step[1].stage != step->stage ||
            step[1].micro_batch != step->micro_batch)
            return 0;
    }
    return 1;
}

/* What a step makes for another: its kind, micro-batch and the stage it is for. */
static int message_to(const Schedule *s, const PipelineStep *step) {
    return ((int)step->kind * MOST_MICROS + step->micro_batch) * MOST_STAGES * MOST_CHUNKS +
           stage_number(s, step->stage) + (step->kind == PIPE_FORWARD ? 1 : -1);
}
static int message_for(const Schedule *s, const PipelineStep *step) {
    return ((int)step->kind * MOST_MICROS + step->micro_batch) * MOST_STAGES * MOST_CHUNKS +
           stage_number(s, step->stage);
}

/* Does `q` await what comes from `p`, activations and gradients, in the order in which p sends it? */
static int order_is_kept(const Schedule *p, const Schedule *q) {
    int i = 0, j = 0;
    for (;; i++, j++) {
        while (i < p->num_steps && pipeline_target(p, &p->steps[i]) != q->pp_rank) i++;
        while (j < q->num_steps && pipeline_source(q, &q->steps[j]) != p->pp_rank) j++;
        if (i == p->num_steps || j == q->num_steps) return i == p->num_steps && j == q->num_steps;
        if (message_to(p, &p->steps[i]) != message_for(q, &q->steps[j])) return 0;
    }
}

/* Every rank begins each step as soon as it has finished the one before and the step's input is there. When is the
 * last one done? -1: never. */
static int replay(const Schedule *ranks, int forward_takes, int backward_takes) {
    static int done[2 * MOST_MICROS * MOST_STAGES * MOST_CHUNKS]; // when what a message holds was made, +1
    int at[MOST_STAGES] = ZERO, now[MOST_STAGES] = ZERO, left = ranks->num_steps * ranks->pp, moved = 1, end = 0;
    memset(done, 0, sizeof done);
    while (moved) {
        moved = 0;
        for (int p = 0; p < ranks->pp; p++) {
            const Schedule *s = &ranks[p];
            for (; at[p] < s->num_steps; at[p]++, left--, moved = 1) {
                const PipelineStep *step = &s->steps[at[p]];
                int input = pipeline_source(s, step) < 0 ? 1 : done[message_for(s, step)];
                if (!input) break;
                now[p] =
                    (int)max_i64(now[p], input - 1) + (step->kind == PIPE_FORWARD ? forward_takes : backward_takes);
                if (pipeline_target(s, step) >= 0) done[message_to(s, step)] = now[p] + 1;
                end = (int)max_i64(end, now[p]);
            }
        }
    }
    return left ? -1 : end;
}

/* The same where nothing is kept on the way: a message goes only when it is the first of those its sender has yet to
 * send, and its receiver waits for it. A rank waits for a send before the next one that way (at_once: before it goes
 * on). Do all finish? */
static int replay_synchronous(const Schedule *ranks, int at_once) {
    static int queue[MOST_STAGES][MOST_STEPS], got[2 * MOST_MICROS * MOST_STAGES * MOST_CHUNKS];
    int at[MOST_STAGES] = ZERO, first[MOST_STAGES] = ZERO, last[MOST_STAGES] = ZERO,
        left = ranks->num_steps * ranks->pp, moved = 1;
    memset(got, 0, sizeof got);
    while (moved) {
        moved = 0;
        for (int p = 0; p < ranks->pp; p++) {
            const Schedule *s = &ranks[p];
            for (; at[p] < s->num_steps; at[p]++, left--, moved = 1) {
                const PipelineStep *step = &s->steps[at[p]];
                int waits = at_once && first[p] < last[p], sends = pipeline_target(s, step) >= 0;
                for (int i = first[p]; i < last[p] && sends; i++)
                    waits |= queue[p][i] / (MOST_MICROS * MOST_STAGES * MOST_CHUNKS) == (int)step->kind;
                if (waits || (pipeline_source(s, step) >= 0 && !got[message_for(s, step)])) break;
                if (sends) queue[p][last[p]++] = message_to(s, step);
            }
            for (int q = 0; q < ranks->pp; q++) { // whoever waits for the first of p's
                const PipelineStep *step = &ranks[q].steps[at[q]];
                if (first[p] == last[p] || at[q] == ranks[q].num_steps || pipeline_source(&ranks[q], step) != p ||
                    message_for(&ranks[q], step) != queue[p][first[p]])
                    continue;
                got[queue[p][first[p]++]] = 1;
                moved = 1;
            }
        }
    }
    return !left;
}

/* The messages of one rank, sent and received, in the order in which it starts them. Returns how many;
 * `whole`: are receives started before their steps, each once, into buffers that are free? */
static int messages_of(const Schedule *s, int *messages, int *whole) {
    int n = 0, started = 0, taken[2][MOST_MICROS * MOST_CHUNKS];
    memset(taken, 0, sizeof taken);
    *whole = 1;
    for (int i = 0; i < s->num_steps; i++) {
        const PipelineStep *step = &s->steps[i];
        for (; started < step->receives_started; started++) {
            const PipelineStep *to = &s->steps[s->receives[started]];
            *whole &= to->receive_buffer < s->receive_buffers[to->kind] && !taken[to->kind][to->receive_buffer];
            taken[to->kind][to->receive_buffer] = 1 + s->receives[started];
            messages[n++] = message_for(s, to);
        }
        if (pipeline_source(s, step) >= 0) {
            *whole &= taken[step->kind][step->receive_buffer] == 1 + i;
            taken[step->kind][step->receive_buffer] = 0;
        }
        if (pipeline_target(s, step) >= 0) messages[n++] = message_to(s, step);
    }
    *whole &= started == s->num_receives;
    return n;
}

/* Messages of all ranks, of each one after the other, and each waits for its other end: do all finish? */
static int replay_one_by_one(const Schedule *ranks, int *whole) {
    static int list[MOST_STAGES][2 * MOST_STEPS], ends[2 * MOST_MICROS * MOST_STAGES * MOST_CHUNKS];
    int P = ranks->pp, count[MOST_STAGES], at[MOST_STAGES] = ZERO, left = 0, moved = 1;
    *whole = 0;
    for (int p = 0; p < P; p++) {
        int fits;
        left += count[p] = messages_of(&ranks[p], list[p], &fits);
        *whole += fits;
    }
    memset(ends, 0, sizeof ends); // 1 + rank that waits for the other end
    while (moved) {
        moved = 0;
        for (int p = 0; p < P; p++) {
            if (at[p] == count[p]) continue;
            int *end = &ends[list[p][at[p]]];
            if (!*end) {
                *end = 1 + p;
                moved = 1;
            } else if (*end != 1 + p) {
                at[p]++;
                at[*end - 1]++;
                left -= 2;
                moved = 1;
            }
        }
    }
    return !left;
}

static void test_schedules(void) {
    int shapes = 0, ranks = 0, one_by_one = 0, fitting = 0, most[2][2] = ZERO, whole = 0, followed = 0, pairs = 0,
        ordered = 0, exact = 0, through = 0, stuck = 0, most_of_chunk = 0;
    for (int P = 1; P <= MOST_STAGES; P++)
        for (int V = 1; V <= MOST_CHUNKS; V++)
            for (int k = 1; k <= MOST_MICROS; k++) {
                if (V > 1 && k % P) continue;
                Schedule of[MOST_STAGES];
                for (int p = 0; p < P; p++) schedule_open(&of[p], P, p, V, k);
                for (int p = 0; p < P; p++, ranks++) {
                    whole += schedule_is_whole(&of[p]);
                    followed += loss_is_followed(&of[p]);
                    for (int q = 0; q < P; q++, pairs++) ordered += order_is_kept(&of[p], &of[q]);
                    for (int c = 0; c < V; c++) most_of_chunk = (int)max_i64(most_of_chunk, of[p].activation_sets[c]);
                }
                // a chunk's forward takes F, its backward B: V * k * (F + B) of work, and the bubble of (P - 1) / V
                // micro-batches of V chunks
                exact += replay(of, 1, 1) == 2 * V * k + 2 * (P - 1) && replay(of, 1, 2) == 3 * V * k + 3 * (P - 1) &&
                         replay(of, 3, 2) == 5 * V * k + 5 * (P - 1);
                through += replay_synchronous(of, 0);
                int fits = 0;
                if (P > 1) one_by_one += replay_one_by_one(of, &fits);
                fitting += fits;
                for (int p = 0; p < P; p++)
                    for (int kind = 0; kind < 2; kind++)
                        most[V > 1][kind] = (int)max_i64(most[V > 1][kind], of[p].receive_buffers[kind]);
                if (P > 1 && k > 1) stuck += !replay_synchronous(of, 1);
                shapes++;
                for (int p = 0; p < P; p++) schedule_close(&of[p]);
            }
    CHECK("every micro-batch is once forward and once backward in every chunk, in order; sets of activations are not "
          "shared, and as few as can be",
          whole == ranks, "%d of %d ranks of %d shapes, at most %d sets a chunk", whole, ranks, shapes, most_of_chunk);
    CHECK("on the last stage a backward follows its forward at once", followed == ranks, "%d of %d ranks", followed,
          ranks);
    CHECK("messages between two ranks are awaited in the order in which they are sent", ordered == pairs,
          "%d of %d ordered pairs", ordered, pairs);
    CHECK("a step takes its work and (P - 1) / V micro-batches more", exact == shapes,
          "%d of %d shapes, backwards 1, 2 and 2/3 times as long as forwards", exact, shapes);
    CHECK("no schedule needs messages to be kept on the way, if a send is waited for before the next one that way",
          through == shapes, "%d of %d shapes finish", through, shapes);
    CHECK("ranks that start their messages as the schedule says need not even have two at once",
          one_by_one == shapes - MOST_MICROS * MOST_CHUNKS, "%d of %d shapes of several ranks finish", one_by_one,
          shapes - MOST_MICROS * MOST_CHUNKS);
    CHECK("receives are started before their steps, into buffers that are free",
          fitting == ranks - MOST_MICROS * MOST_CHUNKS && most[0][0] <= 2 && most[0][1] <= 1 && most[1][0] <= 2 &&
              most[1][1] <= MOST_STAGES / 2,
          "%d of %d ranks; at most %d activations (bound 2) and %d gradients (1), of several chunks %d (2) and %d "
          "(half the stages)",
          fitting, ranks - MOST_MICROS * MOST_CHUNKS, most[0][0], most[0][1], most[1][0], most[1][1]);
    CHECK("the simulation notices ranks that wait for each other: each waits for its send at once", stuck > 0,
          "%d of %d shapes do", stuck, shapes);
}

static void test_stage_blocks(void) {
    int cases = 0, right = 0, none_empty = 0, largest = 0;
    for (int S = 1; S <= 32; S++)
        for (int L = S; L <= 130; L++)
            for (int light = 0; light < 2; light++, cases++) {
                if (light && L < 2 * S - 2) {
                    cases--;
                    continue;
                }
                int next = 0, first, least = L, most = 0, inner_least = L, sum_right = 1, empty = 0, ends[2] = {0, 0};
                for (int s = 0; s < S; s++) {
                    int n = stage_blocks(L, S, light, s, &first),
                        whole = n + (light && S > 1 && (s == 0 || s == S - 1));
                    sum_right &= first == next;
                    next += n;
                    empty += n < 1;
                    least = (int)min_i64(least, whole);
                    most = (int)max_i64(most, whole);
                    if (s > 0 && s < S - 1) inner_least = (int)min_i64(inner_least, n);
                    if (s == 0) ends[0] = n;
                    if (s == S - 1) ends[1] = n;
                }
                right += sum_right && next == L && most - least <= 1 &&
                         (!light || S < 3 || (ends[1] < inner_least && ends[0] <= inner_least));
                none_empty += !empty;
                largest = (int)max_i64(largest, most - least);
            }
    CHECK("stages have all blocks, as equal as can be, the ends one less where they are to be lighter",
          right == cases && none_empty == cases,
          "%d of %d partitions, none with an empty stage: %d, largest difference %d", right, cases, none_empty,
          largest);
    int first, n = stage_blocks(126, 16, 1, 0, &first), middle = stage_blocks(126, 16, 1, 7, &first),
               last = stage_blocks(126, 16, 1, 15, &first);
    CHECK("the 126 blocks of Llama 3 405B on 16 lighter-ended stages: 7, 14 times 8, 7",
          n == 7 && middle == 8 && last == 7 && first == 119, "%d, %d, %d from block %d", n, middle, last, first);
}

// ---------------------------------------------------------------------------
// a pipeline of numbers: stage s makes 3 x + s of x, and 5 g + x of a gradient g, of which it keeps the sum in the
// order of micro-batches

static int toy_chunks, toy_micros;

static int64_t toy_wrong;

/* What a virtual stage sums without a pipeline. `at_stage`: its number among S; `last`: the index of the last token. */
static float toy_sum(int S, int at_stage, int last) {
    float want = 0;
    for (int k = 0; k < toy_micros; k++) {
        float sum = 0;
        for (int e = 0; e < 2; e++) {
            float in[MOST_STAGES * MOST_CHUNKS], v = (float)(k + (e ? last % 3 : 0)), g = 1;
            for (int at = 0; at < S; at++) {
                in[at] = v;
                v = 3 * v + (float)at;
            }
            for (int at = S - 1; at >= at_stage; at--) g = 5 * g + in[at];
            sum = e ? sum + g : g;
        }
        want = 0.3f * want + sum;
    }
    return want;
}

static void toy_body(Job *j, int rank) {
    enum { FLOATS = 300 };
    Member *m = member_open(j, rank, 1 << 22);
    Schedule s;
    int P = m->world, S = P * toy_chunks;
    schedule_open(&s, P, rank, toy_chunks, toy_micros);
    float *kept[MOST_CHUNKS][MOST_MICROS], *received[2][MOST_STAGES], *sent[2],
        *sums = (float *)checked_malloc(sizeof(float) * MOST_CHUNKS), near[FLOATS], x[FLOATS];
    Request receive[2][MOST_STAGES] = ZERO, send[2] = ZERO; // sent: one each way at a time
    int started = 0;
    for (int c = 0; c < toy_chunks; c++)
        for (int k = 0; k < s.activation_sets[c]; k++) kept[c][k] = (float *)member_buffer(m, sizeof near);
    for (int kind = 0; kind < 2; kind++) {
        sent[kind] = (float *)member_buffer(m, sizeof near);
        for (int k = 0; k < s.receive_buffers[kind]; k++) received[kind][k] = (float *)member_buffer(m, sizeof near);
    }
    for (int i = 0; i < s.num_steps; i++) {
        const PipelineStep *step = &s.steps[i];
        int at = stage_number(&s, step->stage), to = pipeline_target(&s, step), forward = step->kind == PIPE_FORWARD;
        for (; started < step->receives_started; started++) {
            const PipelineStep *awaits = &s.steps[s.receives[started]];
            message(m, &receive[awaits->kind][awaits->receive_buffer], RECEIVE, pipeline_source(&s, awaits),
                    awaits->micro_batch, received[awaits->kind][awaits->receive_buffer], sizeof near);
        }
        for (int e = 0; e < FLOATS; e++)
            near[e] = forward ? (float)(step->micro_batch + e % 3) : 1.0f; // the tokens, or of the loss
        if (pipeline_source(&s, step) >= 0) {
            comm_wait(&m->comm, &receive[step->kind][step->receive_buffer]);
            device_read(&m->dev, near, received[step->kind][step->receive_buffer], sizeof near);
        }
        if (forward) device_write(&m->dev, kept[step->stage][step->activation_set], near, sizeof near);
        else device_read(&m->dev, x, kept[step->stage][step->activation_set], sizeof near);
        for (int e = 0; e < FLOATS; e++) near[e] = forward ? 3 * near[e] + (float)at : 5 * near[e] + x[e];
        if (!forward) sums[step->stage] = 0.3f * sums[step->stage] + near[0] + near[FLOATS - 1];
        if (to < 0) continue;
        comm_wait(&m->comm, &send[step->kind]); // the last one that way has left its buffer
        device_write(&m->dev, sent[step->kind], near, sizeof near);
        message(m, &send[step->kind], SEND, to, step->micro_batch, sent[step->kind], sizeof near);
    }
    for (int way = 0; way < 2; way++) comm_wait(&m->comm, &send[way]);
    for (int c = 0; c < toy_chunks; c++)
        m->wrong += !(fabsf(sums[c] / toy_sum(S, stage_number(&s, c), FLOATS - 1) - 1) < 1e-5f);
    m->wrong += m->comm.traffic_measured[AXIS_PP][SEND].calls != m->sent ||
                m->comm.traffic_measured[AXIS_PP][RECEIVE].bytes != m->received_bytes;
    add_up(m, m->wrong, &toy_wrong);
    schedule_close(&s);
    free(sums);
    member_close(m);
}

static void test_toys(int process, int world, const Transport *transport) {
    char name[200];
    int toys = 0;
    toy_wrong = 0;
    for (toy_chunks = 1; toy_chunks <= 3; toy_chunks++)
        for (toy_micros = 1; toy_micros <= 2 * world + 1; toy_micros++) {
            if ((toy_chunks > 1 || CUDA_BUILD) && toy_micros % world) continue;
            run_members(process, world, transport, 60, toy_body);
            toys++;
        }
    snprintf(name, sizeof name, "%d ranks over %s: a pipeline of numbers by either schedule makes what one rank makes",
             world, transport->name);
    if (process == 0) CHECK(name, toy_wrong == 0, "%d sums or counts differ in %d schedules", (int)toy_wrong, toys);
}

static void test_members(void) {
    Mesh mesh = {2 * 3 * 4 * 5 * 2, {2, 3, 4, 5, 2}};
    int members = 0, right = 0;
    for (int rank = 0; rank < mesh.world; rank++)
        for (int a = 0; a < AXES; a++)
            for (int i = 0; i < mesh_group_size(&mesh, (Axis)a); i++, members++) {
                int colour[2], key[2], member = mesh_member(&mesh, rank, (Axis)a, i);
                mesh_group(&mesh, rank, (Axis)a, &colour[0], &key[0]);
                mesh_group(&mesh, member, (Axis)a, &colour[1], &key[1]);
                right += colour[0] == colour[1] && key[1] == i && (i != key[0] || member == rank);
            }
    CHECK("every rank finds the members of its groups", right == members, "%d of %d in a mesh of 2 x 3 x 4 x 5 x 2",
          right, members);
}

static void test_pipeline(void) {
    test_schedules();
    test_stage_blocks();
    test_members();
    test_messages_of_a_dry_run();
    for (int world = 2; world <= 4; world++) {
        test_messages(0, world, &transport_threads);
        test_toys(0, world, &transport_threads);
    }
#ifdef CUDA_ON_CPU
    int devices = cuda_on_cpu.devices;
    uint64_t seed = cuda_on_cpu.seed;
    cuda_on_cpu.devices = 4;
    for (int world = 2; world <= 4; world++) { // streams go on in another order under each seed
        cuda_on_cpu.seed = (uint64_t)world;
        test_toys(0, world, &transport_threads);
        test_toys(0, world, transport_find("nccl"));
    }
    cuda_on_cpu.devices = devices;
    cuda_on_cpu.seed = seed;
#endif
}
