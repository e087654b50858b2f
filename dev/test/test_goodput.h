/* test_goodput.h: simulated goodput against a clock that goes step by step, and against formulas of expected times. */
#include "../../programs/plan/goodput_plan.h"

/* A run of two hours of steps on 16 hosts, whose failed hosts are back at once. */
static GoodputInput goodput_input(double run_mtbf_seconds) {
    GoodputInput in = ZERO;
    in.hosts = 16;
    in.host_mtbf = 16 * run_mtbf_seconds;
    in.step = 2;
    in.save = 20;
    in.pause = 20;
    in.steps = 3600;
    in.seed = 1;
    return in;
}

/* What stretch_until computes, by a clock that goes step by step and save by save. */
static Stretch stretch_step_by_step(const SavePlan *s, double step, int64_t remaining, double x) {
    Stretch r = ZERO;
    double now = 0, written_at = 0;
    int64_t writing = 0; // steps that the save being written holds; 0: none is
    for (int64_t done = 1; done <= remaining; done++) {
        r.stepping += fmin(step, x - now);
        r.saving = x - r.stepping;
        if (now + step > x) return r;
        now += step;
        if (writing && written_at <= now) r.durable = writing;
        if (done % s->interval && done < remaining) continue;
        if (writing && written_at > x) return r;
        if (writing) now = fmax(now, written_at);
        if (writing) r.durable = writing;
        if (now + s->pause > x) return r;
        writing = done;
        written_at = now + s->write;
        now += s->pause;
        if (written_at <= now) r.durable = done < remaining ? done : r.durable;
    }
    if (written_at > x) return r;
    r.durable = remaining;
    r.saving = written_at - r.stepping;
    r.finished = 1;
    return r;
}

static void test_stretches(void) {
    enum { CASES = 20000 };
    int differ = 0, finished = 0, waits = 0;
    uint64_t key = 0;
    double numbers[6];
    for (int i = 0; i < CASES; i++) {
        for (int k = 0; k < 6; k++) numbers[k] = (double)(mix64(++key * 0x9E3779B97F4A7C15ull) >> 11) * 0x1p-53;
        GoodputInput in = goodput_input(1);
        in.step = 0.5 + numbers[0];
        in.save = 12 * numbers[1];
        in.pause = in.save * numbers[2];
        SavePlan s = save_plan(&in, i % 3 > 0, 1 + (int64_t)(8 * numbers[3]));
        int64_t remaining = 1 + (int64_t)(40 * numbers[4]);
        double x = 120 * numbers[5];
        Stretch have = stretch_until(&s, in.step, remaining, x), want = stretch_step_by_step(&s, in.step, remaining, x);
        differ += have.durable != want.durable || have.finished != want.finished ||
                  fabs(have.stepping - want.stepping) > 1e-9 || fabs(have.saving - want.saving) > 1e-9;
        finished += have.finished;
        waits += s.write > s.work + s.pause;
    }
    CHECK("steps, saves and checkpoints until a failure are those of a clock that goes step by step",
          !differ && finished > CASES / 10 && waits > CASES / 10,
          "%d of %d cases differ; in %d the run ends first, in %d a save waits for the one before it", differ, CASES,
          finished, waits);
}

/* The run's expected wall-clock time if a failure costs `down` seconds and then a relaunch, which can fail too: each
 * interval takes (M + down) e^(relaunch / M) (e^(work and save / M) - 1) (Daly 2006 for down = 0; Bougeret et al. 2011,
 * Checkpointing Strategies for Parallel Jobs). The interval must divide the steps. */
static double expected_wall(const GoodputInput *in, int64_t interval, double down) {
    double M = run_mtbf(in), work = (double)interval * in->step;
    return (double)(in->steps / interval) * (M + down) * exp(in->relaunch / M) * expm1((work + in->save) / M);
}

/* Compares the simulated goodput with that of the expected wall-clock time. */
static void check_expected(const char *name, const GoodputInput *in, int64_t interval, double down) {
    Goodput g = simulate_goodput(in, 0, interval);
    double want = (double)in->steps * in->step / expected_wall(in, interval, down);
    double bound = fmax(4 * g.standard_error, 1e-9); // chance of a false alarm: 1 in 16,000
    CHECK(name, fabs(goodput_of(&g) - want) < bound && bound < 0.01 && !g.unfinished,
          "%.4f %% and %.4f %%, bound %.4f %%; %d runs, %.1f interruptions each", 100 * goodput_of(&g), 100 * want,
          100 * bound, g.runs, g.failures / g.runs);
}

static void test_expected_goodput(void) {
    GoodputInput in = goodput_input(INFINITY);
    in.steps = 3610;
    Goodput g = simulate_goodput(&in, 0, 100);
    double want = 3610 * 2 / (3610 * 2 + 37 * 20.0);
    CHECK("without failures, goodput is steps / (steps + saves), and the last step is saved too",
          off_by(goodput_of(&g), want) < 1e-12 && g.failures == 0, "%.12g and %.12g", goodput_of(&g), want);
    in = goodput_input(1200);
    in.relaunch = 120;
    check_expected("sync saves: the wall-clock time is Daly's", &in, 100, 0);
    check_expected("the same if a failure is likely in each interval", &in, 900, 0);
    in.detect = 300;
    check_expected("detection adds to each failure, and is not itself interrupted", &in, 100, 300);
    in.hosts = 1;
    in.host_mtbf = 1200;
    in.repair = 1000;
    check_expected("without a spare, a run on one host waits until that host is repaired", &in, 100, 1000);
    in.spares = 40;
    check_expected("with spares it does not wait", &in, 100, 300);
}

static void test_intervals(void) {
    static const double mtbfs[] = {600, 3600, 36000};
    for (int i = 0; i < 3; i++) {
        GoodputInput in = goodput_input(mtbfs[i]);
        in.relaunch = 60;
        in.steps = 36000;
        char name[160];
        int64_t formula = steps_of_seconds(&in, young_daly_seconds(&in, 0)), best = best_interval(&in, 0);
        Goodput at = simulate_goodput(&in, 0, formula), most = simulate_goodput(&in, 0, best);
        Goodput shorter = simulate_goodput(&in, 0, formula / 4), longer = simulate_goodput(&in, 0, formula * 4);
        double gain = goodput_of(&most) - goodput_of(&at), tolerance = 0.01;
        snprintf(name, sizeof name, "MTBF %g s: Young and Daly's interval is about the best one", mtbfs[i]);
        CHECK(name,
              gain > -4 * at.standard_error && gain < tolerance && goodput_of(&shorter) < goodput_of(&at) &&
                  goodput_of(&longer) < goodput_of(&at),
              "%" PRId64 " steps: %.3f %%; best %" PRId64
              ": %.3f %% (bound 1 %% more); a quarter: %.3f %%; four times: "
              "%.3f %%",
              formula, 100 * goodput_of(&at), best, 100 * goodput_of(&most), 100 * goodput_of(&shorter),
              100 * goodput_of(&longer));
    }
}

static void test_async_and_spares(void) {
    GoodputInput in = goodput_input(1200);
    int worse = 0, differ = 0;
    double least_gain = 1;
    in.relaunch = 60;
    for (int64_t interval = 1; interval <= in.steps; interval *= 3) {
        in.pause = in.save;
        Goodput sync = simulate_goodput(&in, 0, interval), same = simulate_goodput(&in, 1, interval);
        in.pause = in.save / 10;
        Goodput async = simulate_goodput(&in, 1, interval);
        differ += goodput_of(&sync) != goodput_of(&same);
        double gain = goodput_of(&async) - goodput_of(&sync);
        worse += gain < -4 * (sync.standard_error + async.standard_error);
        least_gain = fmin(least_gain, gain);
    }
    CHECK("async saves that stop training for all of a save are sync saves; shorter pauses are never worse",
          !differ && !worse, "%d intervals differ, %d are worse; least gain %.4f %%", differ, worse, 100 * least_gain);

    Goodput at_once = simulate_goodput(&in, 0, 100), last = ZERO;
    in.repair = 3600;
    worse = 0;
    for (in.spares = 0; in.spares <= 16; in.spares++) {
        Goodput g = simulate_goodput(&in, 0, 100);
        if (in.spares) worse += goodput_of(&g) < goodput_of(&last) - 4 * (g.standard_error + last.standard_error);
        last = g;
    }
    CHECK("more spares are never worse, and enough of them are as good as hosts that are back at once",
          !worse && goodput_of(&last) == goodput_of(&at_once), "%d are worse; 16 spares %.4f %%, back at once %.4f %%",
          worse, 100 * goodput_of(&last), 100 * goodput_of(&at_once));
    Goodput first = simulate_goodput(&in, 0, 100), again = simulate_goodput(&in, 0, 100);
    in.seed = 2;
    Goodput other = simulate_goodput(&in, 0, 100);
    in.host_mtbf = 16;
    Goodput hopeless = simulate_goodput(&in, 0, 100);
    CHECK("a seed gives the same figures each time; runs that hardly advance are given up",
          goodput_of(&first) == goodput_of(&again) && goodput_of(&first) != goodput_of(&other) &&
              hopeless.unfinished == hopeless.runs,
          "seed 1 %.6f %%, seed 2 %.6f %%; %d of %d runs with an MTBF of 1 s are given up", 100 * goodput_of(&again),
          100 * goodput_of(&other), hopeless.unfinished, hopeless.runs);
}

/* The printed rows: three per save mode and, at the end, one for each number of spares. */
static void check_rows(const GoodputPlan *p, const Planning *of) {
    FILE *f = fopen("/dev/null", "w");
    cJSON *json = print_goodput(f, p, &of->job.run), *rows = cJSON_GetObjectItemCaseSensitive(json, "rows"), *row,
          *part;
    int async = 0, with_given_spares = 0, count = cJSON_GetArraySize(rows);
    double apart = 0;
    cJSON_ArrayForEach(row, rows) {
        double sum = cJSON_GetNumberValue(cJSON_GetObjectItemCaseSensitive(row, "goodput"));
        cJSON_ArrayForEach(part, cJSON_GetObjectItemCaseSensitive(row, "lost")) sum += cJSON_GetNumberValue(part);
        apart = fmax(apart, fabs(sum - 1));
        async += !strcmp(cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(row, "save_mode")), "async");
        with_given_spares +=
            cJSON_GetNumberValue(cJSON_GetObjectItemCaseSensitive(row, "spares")) == (double)of->opt.spares;
    }
    CHECK("in each row goodput and the lost parts add up to 1; both save modes and the given spares have rows",
          apart < 1e-12 && async == 3 && with_given_spares == 7 && count > 8,
          "%d rows, %d async, %d with the given spares, at most %g apart from 1", count, async, with_given_spares,
          apart);
    cJSON_Delete(json);
    fclose(f);
}

/* What the planner takes from its options and from a cluster file. */
static void test_goodput_plan(void) {
    const char *path = make_cluster_file(
        "goodput.json", 1e9, 1e9, 0, 1e8,
        "\"storage_bytes_per_s\":1e7,\"links\":{\"within_host\":{\"latency_s\":0,\"bytes_per_s\":1e8},"
        "\"between_hosts\":{\"latency_s\":0,\"bytes_per_s\":1e8}},");
    char arguments[512];
    snprintf(arguments, sizeof arguments,
             "--plan --model tiny --tp 2 --cluster %s --mtbf 10 --spares 3 --repair 2 --timeout 50 --relaunch 7 "
             "--save-every 10 --steps 100000",
             path);
    Job *j = make_job(arguments, 8, &transport_threads);
    Cluster cluster;
    cluster_open(&cluster, path, &j->mesh, 0, "auto", 0);
    GoodputPlan p = goodput_plan((Planning *)j, j, &cluster, 0.25);
    double bytes = 12.0 * (double)j->table.num_parameters;
    double gather = bytes / 2 * 3 / 4 / cluster.collectives[AXIS_FSDP][ALL_GATHER].bandwidth + bytes / 2 / 1e8;
    CHECK(
        "estimated saves: 12 bytes per parameter at the storage's rate, and a pause until all ranks have gathered them",
        off_by(p.in.save, bytes / 1e7) < 1e-9 && off_by(p.in.pause, gather) < 1e-9 && p.in.hosts == 4 &&
            p.in.spares == 3 && p.in.host_mtbf == 36000 && p.in.repair == 7200 && p.in.detect == 50 &&
            p.in.relaunch == 7 && p.in.step == 0.25,
        "save %.6g s and %.6g s, pause %.6g s and %.6g s, %d hosts", p.in.save, bytes / 1e7, p.in.pause, gather,
        p.in.hosts);
    check_rows(&p, (Planning *)j);
    cluster_close(&cluster);
    end_job(j);
}

static void test_goodput(void) {
    test_stretches();
    test_expected_goodput();
    test_intervals();
    test_async_and_spares();
    test_goodput_plan();
}
