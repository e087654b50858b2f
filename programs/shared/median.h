/* median.h: the median of measurements. */
#ifndef MEDIAN_H
#define MEDIAN_H
#include <stdlib.h>

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The median of `count` numbers, which it sorts. */
static double median_of(double *x, int count) {
    qsort(x, (size_t)count, sizeof *x, compare_doubles);
    return count ? x[count / 2] : 0;
}

#endif
