/* ptx.h: the tensor core's instructions and asynchronous copies, lane by lane as the PTX ISA lays them out.
 *
 * In a CUDA build the same functions are inline assembly.
 */
#ifndef CUDA_ON_CPU_PTX_H
#define CUDA_ON_CPU_PTX_H

namespace emu {

// ---------------------------------------------------------------------------
// ldmatrix: `count` 8x8 matrices of 16-bit elements; lane 8 i + j gives the address of row j of matrix i

struct LoadMatrix {
    const uint16_t *row;
    uint32_t *registers;
    int count;
    bool transposed;
};

CUDA_ON_CPU_UNSEEN inline void load_matrices(void *const *lane, uint32_t) {
    const LoadMatrix *l = (const LoadMatrix *)lane[0];
    for (int i = 0; i < l->count; i++)
        for (int t = 0; t < WARP; t++) {
            const int row = t / 4, column = t % 4 * 2;
            const LoadMatrix *const *rows = (const LoadMatrix *const *)lane + 8 * i;
            uint32_t low = l->transposed ? rows[column]->row[row] : rows[row]->row[column];
            uint32_t high = l->transposed ? rows[column + 1]->row[row] : rows[row]->row[column + 1];
            ((LoadMatrix *)lane[t])->registers[i] = low | high << 16;
        }
}

inline void load_matrix(uint32_t *registers, const void *row, int count, bool transposed, Place at, const char *what) {
    if (current && current->lane < 8 * count) {
        if ((uintptr_t)row % 16) fail(&at, "%s: row address %p is not aligned to 16 bytes", what, row);
        if (!in_shared(row, 16)) fail(&at, "%s: row address %p is not in the block's shared memory", what, row);
        races_touch(row, 16, false, __builtin_return_address(0));
    }
    LoadMatrix mine = {(const uint16_t *)row, registers, count, transposed};
    warp_meet(0xFFFFFFFFu, at, what, &mine, load_matrices);
}

// ---------------------------------------------------------------------------
// mma.m16n8k16: D (16, 8) += A (16, 16) · B (16, 8)

struct Mma {
    float *d;
    const uint32_t *a, *b;
};
#ifdef __AVX__ // as wide as a register: wider ones would live in memory
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
typedef float FloatV __attribute__((vector_size(LANES * 4)));

__forceinline__ void put_pair(float *first, float *second, uint32_t pair) {
    *first = __uint_as_float(pair << 16);
    *second = __uint_as_float(pair & 0xFFFF0000u);
}

inline void multiply(void *const *lane, uint32_t) {
    float a[16][16], b[16][8], d[16][8];
    for (int t = 0; t < WARP; t++) {
        const Mma *m = (const Mma *)lane[t];
        const int row = t / 4, column = t % 4 * 2;
        put_pair(&a[row][column], &a[row][column + 1], m->a[0]);
        put_pair(&a[row + 8][column], &a[row + 8][column + 1], m->a[1]);
        put_pair(&a[row][column + 8], &a[row][column + 9], m->a[2]);
        put_pair(&a[row + 8][column + 8], &a[row + 8][column + 9], m->a[3]);
        put_pair(&b[column][row], &b[column + 1][row], m->b[0]);
        put_pair(&b[column + 8][row], &b[column + 9][row], m->b[1]);
        memcpy(&d[row][column], m->d, 8);
        memcpy(&d[row + 8][column], m->d + 2, 8);
    }
    for (int i = 0; i < 16 && cuda_on_cpu.rough; i++)
        for (int j = 0; j < 8; j += SUMS) tensor_core_sums(&d[i][j], a[i], 1, &b[0][j], 8, 16);
    for (int j = 0; j < 8 && !cuda_on_cpu.rough; j += LANES)
        for (int i = 0; i < 16; i += 4) {
            FloatV sum[4], row;
            memcpy(&sum[0], &d[i][j], sizeof row);
            memcpy(&sum[1], &d[i + 1][j], sizeof row);
            memcpy(&sum[2], &d[i + 2][j], sizeof row);
            memcpy(&sum[3], &d[i + 3][j], sizeof row);
            for (int k = 0; k < 16; k++) {
                memcpy(&row, &b[k][j], sizeof row);
                sum[0] += a[i][k] * row;
                sum[1] += a[i + 1][k] * row;
                sum[2] += a[i + 2][k] * row;
                sum[3] += a[i + 3][k] * row;
            }
            memcpy(&d[i][j], &sum[0], sizeof row);
            memcpy(&d[i + 1][j], &sum[1], sizeof row);
            memcpy(&d[i + 2][j], &sum[2], sizeof row);
            memcpy(&d[i + 3][j], &sum[3], sizeof row);
        }
    for (int t = 0; t < WARP; t++) {
        const Mma *m = (const Mma *)lane[t];
        memcpy(m->d, &d[t / 4][t % 4 * 2], 8);
        memcpy(m->d + 2, &d[t / 4 + 8][t % 4 * 2], 8);
    }
}

// ---------------------------------------------------------------------------
// cp.async: a copy lands when it is issued, at some time, or only when its thread waits for it, by the seed

enum { LANDS_AT_ISSUE, LANDS_AT_WAIT, LANDS_ANY_TIME };
inline int landing() { return (int)(cuda_on_cpu.seed % 3); }

CUDA_ON_CPU_UNSEEN inline void land(const Copy &c) {
    if (c.valid) memcpy(c.to, c.from, 16);
    else memset(c.to, 0, 16);
}

inline void land_groups(Thread *t,
                        unsigned keep) { // all groups but the newest `keep` that are closed, and the open one
    size_t n = 0;
    while (n < t->copies.size() && t->copies[n].group + keep < t->group) land(t->copies[n++]);
    t->copies.erase(t->copies.begin(), t->copies.begin() + (long)n);
}

} // namespace emu

inline uint32_t ptx_shared(const void *p) { return (uint32_t)((const char *)p - emu::shared_arena); }

inline void ptx_ldmatrix_x4(uint32_t (&r)[4], const void *shared_row, emu::Place at = emu::Place::here()) {
    emu::load_matrix(r, shared_row, 4, false, at, "ldmatrix.x4");
}
inline void ptx_ldmatrix_x4_trans(uint32_t (&r)[4], const void *shared_row, emu::Place at = emu::Place::here()) {
    emu::load_matrix(r, shared_row, 4, true, at, "ldmatrix.x4.trans");
}
inline void ptx_ldmatrix_x2(uint32_t (&r)[2], const void *shared_row, emu::Place at = emu::Place::here()) {
    emu::load_matrix(r, shared_row, 2, false, at, "ldmatrix.x2");
}
inline void ptx_ldmatrix_x2_trans(uint32_t (&r)[2], const void *shared_row, emu::Place at = emu::Place::here()) {
    emu::load_matrix(r, shared_row, 2, true, at, "ldmatrix.x2.trans");
}

inline void ptx_mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                         emu::Place at = emu::Place::here()) {
    emu::Mma mine = {d, a, b};
    emu::warp_meet(0xFFFFFFFFu, at, "mma", &mine, emu::multiply);
}

inline void ptx_cp_async(void *shared, const void *global, bool valid, emu::Place at = emu::Place::here()) {
    emu::Thread *t = emu::current;
    if (!t) emu::fail(&at, "cp.async in host code");
    if ((uintptr_t)shared % 16 || (valid && (uintptr_t)global % 16))
        emu::fail(&at, "cp.async from %p to %p: both must be aligned to 16 bytes", global, shared);
    if (!emu::in_shared(shared, 16))
        emu::fail(&at, "cp.async to %p, which is not in the block's shared memory", shared);
    emu::races_touch(shared, 16, true, __builtin_return_address(0));
    emu::Copy c = {shared, global, valid, t->group};
    if (emu::landing() == emu::LANDS_AT_ISSUE || (emu::landing() == emu::LANDS_ANY_TIME && emu::choose(2))) {
        emu::land(c);
        return;
    }
    memset(shared, emu::SHARED_POISON, 16);
    t->copies.push_back(c);
}

inline void ptx_cp_async_commit() { emu::current->group++; }
template <int N> inline void ptx_cp_async_wait() { emu::land_groups(emu::current, N); }

inline float ptx_exp2(float x) { return emu::approximate_exp2(x); }
#endif
