/* goodput.h: the part of a run's wall-clock time that trains, on hosts that fail (plan_llama3 --mtbf).
 *
 * Hosts fail independently, with exponentially distributed times between failures. A failure of any host of the run
 * stops it: the failure is detected, a spare or repaired host is waited for, the run is relaunched, and the steps since
 * the newest complete checkpoint are repeated. A failure during the relaunch starts all of this again. Runs are
 * simulated from failure to failure; in between, steps and saves alternate regularly. Times are in seconds.
 * A caller may rely on: the same input and seed give the same result, and all save intervals see the same failures. */
#ifndef GOODPUT_H
#define GOODPUT_H
#include "../../lib/device/base.h" // defines: mix64, checked_malloc
#include <math.h>

typedef struct {
    int hosts;        // that the run uses
    int spares;       // further hosts, which do not fail while they are idle
    double host_mtbf; // mean time between failures of a host
    double repair;    // from a host's failure until it can be used again
    double detect;    // from a failure until the run has ended
    double relaunch;  // from the launch to the first step
    double step;      // of one step
    double save;      // from the start of a save until it is complete
    double pause;     // for which an async save stops training
    int64_t steps;
    uint64_t seed;
} GoodputInput;

typedef enum { LOST_SAVING, LOST_REPEATED, LOST_DETECTION, LOST_RELAUNCH, LOST_WAITING, LOST_CAUSES } LostCause;
static const char *const lost_names[LOST_CAUSES] = {"saving", "repeating", "detection", "relaunch", "waiting"};

typedef struct {
    double useful, lost[LOST_CAUSES]; // seconds of all simulated runs
    double failures;                  // interruptions of all simulated runs
    double standard_error;            // of the goodput
    int runs, unfinished;             // unfinished: runs that hardly advance, and were given up
} Goodput;

enum { MIN_RUNS = 100, MAX_RUNS = 10000, MAX_UNFINISHED = 10 };
static const double WANTED_FAILURES = 2e5; // in all simulated runs together

static double wall_seconds(const Goodput *g) {
    double sum = g->useful;
    for (int i = 0; i < LOST_CAUSES; i++) sum += g->lost[i];
    return sum;
}

static double goodput_of(const Goodput *g) { return g->useful / wall_seconds(g); }

/* Mean time between failures of any host of the run. */
static double run_mtbf(const GoodputInput *in) { return in->host_mtbf / in->hosts; }

/* Failures of the run while it trains, if nothing is repeated and saves take no time. */
static double expected_failures(const GoodputInput *in) { return (double)in->steps * in->step / run_mtbf(in); }

// ---------------------------------------------------------------------------
// steps and saves between two failures

typedef struct {
    int64_t interval; // steps between two saves
    double work;      // seconds of these steps
    double pause;     // training stops for it at the start of a save
    double write;     // from the start of a save until its files are on disk
    double period;    // from the start of a save to the start of the next, which waits until the files are on disk
    double lag;       // from the start of a save until it is a checkpoint: at the first end of a step after `write`
} SavePlan;

static SavePlan save_plan(const GoodputInput *in, int is_async, int64_t interval) {
    SavePlan s = {interval, (double)interval * in->step, is_async ? in->pause : in->save, in->save, 0, 0};
    s.period = fmax(s.work + s.pause, s.write);
    s.lag = fmin(s.period, s.pause + ceil((s.write - s.pause) / in->step) * in->step);
    return s;
}

typedef struct {
    double stepping, saving; // seconds; saving: training is stopped by a save
    int64_t durable;         // steps that a failure at the end of the stretch does not undo
    int finished;            // the run's last save is complete
} Stretch;

/* What happens within `x` seconds after a (re)launch, if `remaining` steps are left. */
static Stretch stretch_until(const SavePlan *s, double step, int64_t remaining, double x) {
    Stretch r = {fmin(x, s->work), 0, 0, 0};
    int64_t saves = (remaining + s->interval - 1) / s->interval;
    double last_work = (double)(remaining - (saves - 1) * s->interval) * step, last_save = last_work;
    if (saves > 1) last_save = s->work + (double)(saves - 2) * s->period + fmax(s->pause + last_work, s->write);
    if (x >= last_save + s->write) {
        r.stepping = (double)remaining * step;
        r.saving = last_save + s->write - r.stepping;
        r.durable = remaining;
        r.finished = 1;
        return r;
    }
    if (x > s->work) { // after the start of a save
        double earlier = floor((x - s->work) / s->period), after = x - s->work - earlier * s->period;
        r.stepping = (earlier + 1) * s->work + fmin(fmax(after - s->pause, 0), s->work);
    }
    r.stepping = fmin(r.stepping, (double)remaining * step);
    r.saving = x - r.stepping;
    if (x >= s->work + s->lag) r.durable = (int64_t)fmin(floor((x - s->work - s->lag) / s->period) + 1, 1e15);
    if (x >= last_save) r.durable = saves; // a save first completes the one before it
    r.durable = min_i64(r.durable, saves - 1) * s->interval;
    return r;
}

// ---------------------------------------------------------------------------
// failures

typedef struct {
    const GoodputInput *in;
    double now, next_failure;
    uint64_t key, draws;              // random numbers of this run
    double *back_at;                  // (hosts + spares) ring: when each host under repair is back, the earliest first
    int64_t first_repair, in_repairs; // in the ring
    double *lost;                     // (LOST_CAUSES) seconds
} SimulatedRun;

/* Uniform in (0, 1]. */
static double draw(SimulatedRun *r) {
    return (double)((mix64(r->key + ++r->draws * 0x9E3779B97F4A7C15ull) >> 11) + 1) * 0x1p-53;
}

/* The run has failed so much more often than expected that it will hardly end. At most a million draws per run keep the
 * simulation of hopeless runs short. */
static int is_hopeless(const SimulatedRun *r) {
    return (double)r->draws > fmin(20000 + 40 * expected_failures(r->in), 1e6);
}

static void draw_next_failure(SimulatedRun *r) { r->next_failure -= log(draw(r)) * run_mtbf(r->in); }

/* Hosts, spares included, that are not under repair. */
static int64_t good_hosts(SimulatedRun *r) {
    int64_t all = r->in->hosts + r->in->spares;
    while (r->in_repairs && r->back_at[r->first_repair % all] <= r->now) {
        r->first_repair++;
        r->in_repairs--;
    }
    return all - r->in_repairs;
}

/* Advances to the time of the next failure. It hits one of the in->hosts hosts at random; if that host has already
 * failed (only `healthy` have not), nothing happens. Returns whether a host failed. */
static int next_failure_strikes(SimulatedRun *r, int64_t healthy) {
    r->now = r->next_failure;
    draw_next_failure(r);
    good_hosts(r);
    int strikes = draw(r) * r->in->hosts <= (double)healthy;
    int64_t all = r->in->hosts + r->in->spares;
    if (strikes) r->back_at[(r->first_repair + r->in_repairs++) % all] = r->now + r->in->repair;
    return strikes;
}

/* Until the failure of a host is detected, more of them can fail. */
static void detect_failure(SimulatedRun *r) {
    double end = r->now + r->in->detect;
    int64_t healthy = r->in->hosts - 1;
    while (r->next_failure < end) healthy -= next_failure_strikes(r, healthy);
    r->now = end;
    r->lost[LOST_DETECTION] += r->in->detect;
}

/* Waits until enough hosts are good. */
static void wait_for_hosts(SimulatedRun *r) {
    int64_t all = r->in->hosts + r->in->spares, good = good_hosts(r);
    double start = r->now;
    for (; good < r->in->hosts && !is_hopeless(r); good = good_hosts(r)) {
        double back = r->back_at[r->first_repair % all];
        if (r->next_failure < back) next_failure_strikes(r, good);
        else r->now = back;
    }
    r->lost[LOST_WAITING] += r->now - start;
}

/* From the failure of a host until training resumes. Returns how often the run was interrupted. */
static int64_t recover(SimulatedRun *r) {
    for (int64_t failures = 1;; failures++) {
        detect_failure(r);
        wait_for_hosts(r);
        double start = r->now, end = start + r->in->relaunch;
        if (r->next_failure < end) next_failure_strikes(r, r->in->hosts);
        else r->now = end;
        r->lost[LOST_RELAUNCH] += r->now - start;
        if (r->now >= end || is_hopeless(r)) return failures;
    }
}

/* Adds a run to `g`. `back_at` (hosts + spares): working memory. */
static void simulate_run(Goodput *g, const GoodputInput *in, const SavePlan *plan, int number, double *back_at) {
    SimulatedRun r = {in, 0, 0, mix64(in->seed + mix64((uint64_t)number)), 0, back_at, 0, 0, g->lost};
    int64_t done = 0, failures = 0;
    draw_next_failure(&r);
    while (!is_hopeless(&r)) {
        Stretch s = stretch_until(plan, in->step, in->steps - done, r.next_failure - r.now);
        done += s.durable;
        g->lost[LOST_SAVING] += s.saving;
        g->lost[LOST_REPEATED] += s.stepping - (double)s.durable * in->step;
        if (s.finished) break;
        next_failure_strikes(&r, in->hosts);
        failures += recover(&r);
    }
    g->useful += (double)done * in->step;
    g->failures += (double)failures;
    g->unfinished += done < in->steps;
}

/* Simulates runs that save every `interval` steps, and after the last one. */
static Goodput simulate_goodput(const GoodputInput *in, int is_async, int64_t interval) {
    Goodput g = ZERO;
    SavePlan plan = save_plan(in, is_async, interval);
    double *back_at = (double *)checked_malloc(sizeof(double) * (size_t)(in->hosts + in->spares));
    double useful_squares = 0, wall_squares = 0, products = 0;
    int runs = (int)fmin(fmax(WANTED_FAILURES / (1 + expected_failures(in)), MIN_RUNS), MAX_RUNS);
    for (; g.runs < runs && g.unfinished < MAX_UNFINISHED; g.runs++) {
        double useful = -g.useful, wall = -wall_seconds(&g);
        simulate_run(&g, in, &plan, g.runs, back_at);
        useful += g.useful;
        wall += wall_seconds(&g);
        useful_squares += useful * useful;
        wall_squares += wall * wall;
        products += useful * wall;
    }
    double ratio = goodput_of(&g), residuals = useful_squares - 2 * ratio * products + ratio * ratio * wall_squares;
    g.standard_error = sqrt(fmax(0, residuals)) / wall_seconds(&g); // of a ratio of sums
    free(back_at);
    return g;
}

// ---------------------------------------------------------------------------
// intervals

/* Seconds of training between two saves that lose least to first order: sqrt(2 · cost of a save · MTBF) (Young 1974, A
 * First Order Approximation to the Optimum Checkpoint Interval; Daly 2006, A Higher Order Estimate of the same). */
static double young_daly_seconds(const GoodputInput *in, int is_async) {
    return sqrt(2 * (is_async ? in->pause : in->save) * run_mtbf(in));
}

static int64_t steps_of_seconds(const GoodputInput *in, double seconds) {
    return (int64_t)fmin(fmax(1, round(seconds / in->step)), (double)in->steps);
}

/* The interval, in steps, with the best simulated goodput, among intervals that grow by a factor of 2^(1/8) each and
 * lie around Young and Daly's. Async saves can also profit from an interval as long as the write. */
static int64_t best_interval(const GoodputInput *in, int is_async) {
    double middle = young_daly_seconds(in, is_async), most = -1;
    int64_t best = 1, last = 0;
    for (double w = fmax(middle / 8, in->step); w <= 8 * fmax(fmax(middle, in->save), in->step); w *= exp2(0.125)) {
        int64_t interval = steps_of_seconds(in, w);
        if (interval == last) continue;
        last = interval;
        Goodput g = simulate_goodput(in, is_async, interval);
        if (goodput_of(&g) <= most) continue;
        most = goodput_of(&g);
        best = interval;
    }
    return best;
}

#endif
