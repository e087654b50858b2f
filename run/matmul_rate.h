/* matmul_rate.h: the speed of a plain matmul on this rank, next to which the progress line shows a step's speed. */
#ifndef MATMUL_RATE_H
#define MATMUL_RATE_H
#include "../lib/ops.h" // defines: linear_forward, scratch, RATE_ROWS, RATE_COLS, RATE_COUNTS

/* FLOP/s of a plain matmul y (N, C) = x (N, C) · w (C, C), the fastest of several, in the compute dtype; 0 where such a
 * rate means nothing (CUDA emulated on a CPU). The measurement leaves no trace in the device's counts and timeline. */
static double matmul_rate(Device *dev) {
    const int N = RATE_ROWS, C = RATE_COLS, repetitions = 4;
    OpStat ops[OP_COUNT];
    double clock = dev->clock, seconds = INFINITY;
    int64_t events = dev->num_events;
    size_t mark = arena_mark(dev, MEM_WORKSPACE);
    device_phase(dev, "measuring the matmul rate", NULL);
    memcpy(ops, dev->ops, sizeof ops);
    floatX *x = (floatX *)scratch(dev, "matmul rate", sizeof(floatX) * N * C);
    floatX *w = (floatX *)scratch(dev, "matmul rate", sizeof(floatX) * C * C);
    floatX *y = (floatX *)scratch(dev, "matmul rate", sizeof(floatX) * N * C);
    int count = dev->dry_run ? 0 : (int)max_i64(N, C) * C;
    floatX *numbers = new_array(floatX, count);
    for (int i = 0; i < count; i++) numbers[i] = from_float((float)(i % 17) - 8);
    device_write(dev, x, numbers, sizeof(floatX) * N * C);
    device_write(dev, w, numbers, sizeof(floatX) * C * C);
    free(numbers);
    for (int i = 0; i < repetitions; i++) {
        device_synchronize(dev);
        double start = seconds_now();
        linear_forward(dev, y, x, w, N, C, C);
        device_synchronize(dev);
        seconds = fmin(seconds, seconds_now() - start);
    }
    memcpy(dev->ops, ops, sizeof ops);
    device_phase(dev, NULL, NULL);
    dev->clock = clock;
    timeline_truncate(dev, events);
    arena_release(dev, MEM_WORKSPACE, mark);
    return RATE_COUNTS ? 2.0 * N * C * C / seconds : 0;
}

#endif
