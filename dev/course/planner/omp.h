/* omp.h: OpenMP for one thread. WebAssembly's compiler ignores the pragmas, and these are the functions that the
 * program calls. */
#ifndef OMP_H
#define OMP_H
static inline int omp_get_thread_num(void) { return 0; }
static inline int omp_get_max_threads(void) { return 1; }
static inline void omp_set_num_threads(int threads) { (void)threads; }
#endif
