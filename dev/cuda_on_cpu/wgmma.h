/* wgmma.h: matmuls of a warpgroup: d (64, N) = or += a (64, 16) b (16, N), and stmatrix.
 *
 * Operands in shared memory are found as the bits of their descriptors say (PTX ISA, "Matrix Descriptor Format" and
 * "Canonical Layouts"), in all four swizzle modes. Until a wgmma has ended, d holds signalling NaNs; its operands,
 * those in registers too, are read when it happens (async.h). Products are added in fp32 one after the other, as in
 * ptx.h, or as arithmetic.h says.
 */
#ifndef CUDA_ON_CPU_WGMMA_H
#define CUDA_ON_CPU_WGMMA_H

namespace emu {

enum { WGMMA_M = 64, WGMMA_K = 16, MAX_WGMMA_N = 128 };
enum : uint32_t { IN_FLIGHT = 0x7FA5A5A5 }; // a signalling NaN: d while a wgmma works on it

// ---------------------------------------------------------------------------
// operands in shared memory

struct MatrixDescriptor {
    uint32_t start, leading, stride; // bytes
    int base_offset, swizzle;        // swizzle: bytes; 0: none
};

inline MatrixDescriptor decode_descriptor(uint64_t bits) {
    static const int widths[] = {0, 128, 64, 32};
    MatrixDescriptor d;
    d.start = (uint32_t)(bits & 0x3FFF) << 4;
    d.leading = (uint32_t)(bits >> 16 & 0x3FFF) << 4;
    d.stride = (uint32_t)(bits >> 32 & 0x3FFF) << 4;
    d.base_offset = (int)(bits >> 49 & 7);
    d.swizzle = widths[bits >> 62];
    return d;
}

/* The address in shared memory of element (row of a or column of b, k). The canonical layouts in elements of 16 bits,
 * so T = 8. `k_major`: k is contiguous. */
inline uint32_t element_address(const MatrixDescriptor &d, bool k_major, int mn, int k) {
    const uint32_t i = (uint32_t)mn, j = (uint32_t)k, width = d.swizzle ? (uint32_t)d.swizzle : 16;
    uint32_t at = d.start;
    if (k_major) {
        at += i % 8 * width + i / 8 * d.stride;
        at += d.swizzle ? j * 2 : j % 8 * 2 + j / 8 * d.leading;
    } else {
        const uint32_t contiguous = width / 2;
        at += i % contiguous * 2 + i / contiguous * (d.swizzle ? d.leading : d.stride);
        at += j % 8 * width + j / 8 * (d.swizzle ? d.stride : d.leading);
    }
    return swizzled(at, d.swizzle);
}

inline void check_descriptor(uint64_t bits, const char *operand, Place at) {
    const MatrixDescriptor d = decode_descriptor(bits);
    const uint32_t pattern = (uint32_t)d.swizzle * 8;
    if (bits & ~(0x3FFFull | 0x3FFFull << 16 | 0x3FFFull << 32 | 7ull << 49 | 3ull << 62))
        fail(&at, "ptx_wgmma: the descriptor of %s, 0x%016llx, has bits that must be 0", operand,
             (unsigned long long)bits);
    if (d.base_offset || (pattern && d.start % pattern >= (uint32_t)d.swizzle))
        fail(&at,
             "ptx_wgmma: %s begins at address %u with base offset %d: the pattern of a %d-byte swizzle begins at a "
             "multiple of %u bytes, and other base offsets are not emulated",
             operand, d.start, d.base_offset, d.swizzle, pattern);
}

/* An operand's 16-byte pieces, as fp32: along k of (rows, 16), or across it of (16, columns). */
struct Operand {
    uint64_t descriptor;
    bool k_major;
    int count; // rows of a, columns of b
    const char *name;
};

CUDA_ON_CPU_UNSEEN inline void load_piece(const Operand &o, const MatrixDescriptor &d, int mn, int k, float *to,
                                          int step, Place at) {
    const char *p = shared_arena + element_address(d, o.k_major, mn, k);
    uint16_t piece[8];
    if (!shared_region(p, sizeof piece))
        fail(&at, "ptx_wgmma: element (%d, %d) of %s is at address %u, outside the block's shared memory", mn, k,
             o.name, (unsigned)(p - shared_arena));
    read_async(piece, p, sizeof piece, at, "ptx_wgmma");
    for (int i = 0; i < 8; i++) to[i * step] = __uint_as_float((unsigned)piece[i] << 16);
}

/* As x[mn * mn_step + k * k_step]. */
inline void load_operand(const Operand &o, float *x, int mn_step, int k_step, Place at) {
    const MatrixDescriptor d = decode_descriptor(o.descriptor);
    if (o.k_major)
        for (int mn = 0; mn < o.count; mn++)
            for (int k = 0; k < WGMMA_K; k += 8) load_piece(o, d, mn, k, x + mn * mn_step + k * k_step, k_step, at);
    else
        for (int k = 0; k < WGMMA_K; k++)
            for (int mn = 0; mn < o.count; mn += 8) load_piece(o, d, mn, k, x + mn * mn_step + k * k_step, mn_step, at);
}

/* When it is started, for races.h. */
inline void touch_operand(const Operand &o, int group, const void *code) {
    const MatrixDescriptor d = decode_descriptor(o.descriptor);
    for (int mn = 0; mn < o.count; mn += o.k_major ? 1 : 8)
        for (int k = 0; k < WGMMA_K; k += o.k_major ? 8 : 1) {
            const char *p = shared_arena + element_address(d, o.k_major, mn, k);
            if (shared_region(p, 16)) races_wgmma_reads(group, p, 16, code);
        }
}

// ---------------------------------------------------------------------------
// operands in registers

/* Registers of the threads of a warpgroup that wgmma have used, and their values at the last ptx_wgmma_fence, or when
 * the last wgmma on them had ended. */
struct Fragment {
    float *of[WARPGROUP];
    int count;                    // registers of a thread
    int in_flight;                // wgmma that write them
    std::vector<uint32_t> values; // (128, count)
};

enum { REMEMBERED = 24 };
struct Warpgroup {
    std::deque<std::shared_ptr<Fragment>> d, a;
    bool fenced[WARPGROUP];
    int open;                                  // wgmma that have not been committed
    int committed[4], groups[4];               // groups of each warp: committed; waited for
    std::deque<std::pair<int, uint32_t>> ends; // of groups: number, time for races.h
};
inline Warpgroup warpgroups[MAX_WARPGROUPS];

CUDA_ON_CPU_UNSEEN __attribute__((no_sanitize("address"))) inline void copy_registers(uint32_t *to, const float *from,
                                                                                      int count) {
    for (int i = 0; i < count; i++) to[i] = ((const uint32_t *)from)[i];
}

inline std::shared_ptr<Fragment> find_fragment(std::deque<std::shared_ptr<Fragment>> &known, float *const *of,
                                               int count) {
    for (auto &f : known)
        if (f->count == count && !memcmp(f->of, of, sizeof f->of)) return f;
    while (known.size() >= REMEMBERED) known.pop_front();
    auto f = std::make_shared<Fragment>();
    memcpy(f->of, of, sizeof f->of);
    f->count = count;
    f->in_flight = 0;
    known.push_back(f);
    return f;
}

/* A thread's registers have not been written since the last fence. */
inline void check_fenced(const Fragment &f, const char *name, Place at) {
    std::vector<uint32_t> now((size_t)f.count);
    for (int t = 0; t < WARPGROUP && !f.values.empty() && !f.in_flight; t++) {
        copy_registers(now.data(), f.of[t], f.count);
        const uint32_t *before = f.values.data() + t * f.count;
        for (int i = 0; i < f.count; i++)
            if (now[(size_t)i] != before[i])
                fail(&at,
                     "ptx_wgmma: register %d of %s of thread %d of the warpgroup has been written since the last "
                     "ptx_wgmma_fence: execute one after the program has touched them",
                     i, name, t);
    }
}

inline void wgmma_fence(Place at) {
    const char *what = "ptx_wgmma_fence";
    Thread *me = on_hopper(at, what);
    Warpgroup &g = warpgroups[warpgroup_of(me)];
    const int t = me->number % WARPGROUP;
    g.fenced[t] = true;
    for (auto *known : {&g.d, &g.a})
        for (auto &f : *known) {
            if (f->in_flight) continue;
            f->values.resize((size_t)(WARPGROUP * f->count));
            copy_registers(f->values.data() + t * f->count, f->of[t], f->count);
        }
    warp_meet(0xFFFFFFFFu, at, what, nullptr, [](void *const *, uint32_t) {});
}

// ---------------------------------------------------------------------------
// the product

/* Sums of d (64, columns) that several wgmma work on, one after the other. */
struct Sums {
    std::shared_ptr<Fragment> d;
    float x[WGMMA_M][MAX_WGMMA_N];
};

/* Element i of thread t of a warpgroup in d. */
inline float *fragment_element(Sums &s, int t, int i) {
    return &s.x[t / 32 * 16 + t % 32 / 4 + i % 4 / 2 * 8][i / 4 * 8 + t % 4 * 2 + i % 2];
}

CUDA_ON_CPU_UNSEEN inline void multiply_add(Sums &s, const float (*a)[WGMMA_K], const float (*b)[MAX_WGMMA_N],
                                            int columns) {
    for (int i = 0; i < WGMMA_M && cuda_on_cpu.rough; i++)
        for (int j = 0; j < columns; j += SUMS)
            tensor_core_sums(&s.x[i][j], a[i], 1, &b[0][j], MAX_WGMMA_N, WGMMA_K);
    for (int i = 0; i < WGMMA_M && !cuda_on_cpu.rough; i += 4)
        for (int j = 0; j < columns; j += LANES) {
            FloatV sum[4], row;
            for (int r = 0; r < 4; r++) memcpy(&sum[r], &s.x[i + r][j], sizeof row);
            for (int k = 0; k < WGMMA_K; k++) {
                memcpy(&row, &b[k][j], sizeof row);
                sum[0] += a[i][k] * row;
                sum[1] += a[i + 1][k] * row;
                sum[2] += a[i + 2][k] * row;
                sum[3] += a[i + 3][k] * row;
            }
            for (int r = 0; r < 4; r++) memcpy(&s.x[i + r][j], &sum[r], sizeof row);
        }
}

struct Wgmma : AsyncOp {
    Operand a, b;
    bool a_in_registers;
    const uint32_t *a_of[WARPGROUP]; // (4), and what they held at the start
    uint32_t a_at_start[WARPGROUP][4];
    bool accumulate;
    int number; // of its group
    std::shared_ptr<Sums> sums;

    void load_a(float (*x)[WGMMA_K]) {
        if (!a_in_registers) {
            load_operand(a, x[0], WGMMA_K, 1, at);
            return;
        }
        for (int t = 0; t < WARPGROUP; t++) {
            uint32_t r[4];
            copy_registers(r, (const float *)a_of[t], 4);
            if (memcmp(r, a_at_start[t], sizeof r))
                fail(&at,
                     "ptx_wgmma: a's registers of thread %d of the warpgroup have changed before it has ended: keep "
                     "them until ptx_wgmma_wait has returned",
                     t);
            const int row = t / 32 * 16 + t % 32 / 4, column = t % 4 * 2;
            put_pair(&x[row][column], &x[row][column + 1], r[0]);
            put_pair(&x[row + 8][column], &x[row + 8][column + 1], r[1]);
            put_pair(&x[row][column + 8], &x[row][column + 9], r[2]);
            put_pair(&x[row + 8][column + 8], &x[row + 8][column + 9], r[3]);
        }
    }

    void run() override {
        alignas(64) static float x[WGMMA_M][WGMMA_K], y[WGMMA_K][MAX_WGMMA_N];
        load_a(x);
        load_operand(b, y[0], 1, MAX_WGMMA_N, at);
        if (!accumulate) memset(sums->x, 0, sizeof sums->x);
        multiply_add(*sums, x, y, b.count);
        if (!--sums->d->in_flight) write_back();
    }

    /* d is what the last wgmma on it leaves. */
    void write_back() {
        Fragment &d = *sums->d;
        d.values.resize((size_t)(WARPGROUP * d.count));
        for (int t = 0; t < WARPGROUP; t++) {
            uint32_t *values = d.values.data() + t * d.count;
            copy_registers(values, d.of[t], d.count);
            for (int i = 0; i < d.count; i++) {
                if (values[i] != IN_FLIGHT)
                    fail(&at,
                         "ptx_wgmma: register %d of d of thread %d of the warpgroup has been written before it has "
                         "ended: wait with ptx_wgmma_wait first",
                         i, t);
                d.of[t][i] = *fragment_element(*sums, t, i);
            }
            copy_registers(values, d.of[t], d.count);
        }
    }
};

// ---------------------------------------------------------------------------
// one instruction, and groups of them

struct WgmmaCall { // of one thread
    float *d;
    int count;         // registers of d
    const uint32_t *a; // registers; NULL: in shared memory
    uint64_t a_descriptor, b_descriptor;
    bool a_k_major, b_k_major, accumulate;
    Place at;
    const void *code;
};

inline std::shared_ptr<Sums> sums_in_flight(int group, const std::shared_ptr<Fragment> &d) {
    for (auto op = async_ops.rbegin(); op != async_ops.rend(); ++op)
        if ((*op)->queue == group && ((Wgmma *)op->get())->sums->d == d) return ((Wgmma *)op->get())->sums;
    return nullptr;
}

inline std::shared_ptr<Sums> start_sums(int group, float *const *d, int count, bool accumulate, Place at) {
    auto fragment = find_fragment(warpgroups[group].d, d, count);
    if (fragment->in_flight) return sums_in_flight(group, fragment);
    if (accumulate) check_fenced(*fragment, "d", at);
    auto sums = std::make_shared<Sums>();
    sums->d = fragment;
    for (int t = 0; t < WARPGROUP; t++)
        for (int i = 0; i < count; i++) {
            *fragment_element(*sums, t, i) = d[t][i];
            ((uint32_t *)d[t])[i] = IN_FLIGHT;
        }
    return sums;
}

inline void check_same_calls(void *const *of) {
    const WgmmaCall &first = *(const WgmmaCall *)of[0];
    for (int t = 1; t < WARPGROUP; t++) {
        const WgmmaCall &c = *(const WgmmaCall *)of[t];
        if (c.a_descriptor != first.a_descriptor || c.b_descriptor != first.b_descriptor ||
            c.accumulate != first.accumulate)
            fail(&c.at,
                 "ptx_wgmma: threads 0 and %d of the warpgroup give different descriptors, or one of them does "
                 "not accumulate",
                 t);
    }
}

inline void start_wgmma(int group, void *const *of) {
    const WgmmaCall &c = *(const WgmmaCall *)of[0];
    Warpgroup &g = warpgroups[group];
    float *d[WARPGROUP];
    check_same_calls(of);
    for (int t = 0; t < WARPGROUP; t++) {
        if (!g.fenced[t]) fail(&c.at, "ptx_wgmma: ptx_wgmma_fence must come before the first one, on every thread");
        d[t] = ((const WgmmaCall *)of[t])->d;
    }
    auto op = std::make_unique<Wgmma>();
    op->a_in_registers = c.a != nullptr;
    op->accumulate = c.accumulate;
    op->a = Operand{c.a_descriptor, c.a_k_major, WGMMA_M, "a"};
    op->b = Operand{c.b_descriptor, c.b_k_major, c.count * 2, "b"};
    races_wgmma_starts(group);
    if (c.a) {
        float *a[WARPGROUP];
        for (int t = 0; t < WARPGROUP; t++) {
            op->a_of[t] = ((const WgmmaCall *)of[t])->a;
            a[t] = (float *)op->a_of[t];
            copy_registers(op->a_at_start[t], a[t], 4);
        }
        auto fragment = find_fragment(g.a, a, 4);
        check_fenced(*fragment, "a", c.at);
        fragment->values.assign(op->a_at_start[0], op->a_at_start[0] + WARPGROUP * 4);
    } else {
        check_descriptor(c.a_descriptor, "a", c.at);
        if (CUDA_ON_CPU_RACES) touch_operand(op->a, group, c.code);
    }
    check_descriptor(c.b_descriptor, "b", c.at);
    if (CUDA_ON_CPU_RACES) touch_operand(op->b, group, c.code);
    op->sums = start_sums(group, d, c.count, c.accumulate, c.at);
    op->sums->d->in_flight++;
    op->number = g.committed[0];
    g.open++;
    start_async(std::move(op), c.at, group);
}

inline void wgmma(const WgmmaCall &call) {
    use_async();
    warpgroup_meet(call.at, "ptx_wgmma", (void *)&call, start_wgmma);
}

/* The wgmma since the last commit are a group. All four warps come here; the first of them closes it. */
inline void wgmma_commit(Place at) {
    const char *what = "ptx_wgmma_commit";
    Thread *me = on_hopper(at, what);
    if (block.threads < (warpgroup_of(me) + 1) * WARPGROUP) fail(&at, "%s is for warpgroups of four warps", what);
    warp_meet(0xFFFFFFFFu, at, what, nullptr, [](void *const *, uint32_t) {
        const int group = warpgroup_of(current), warp = current->warp % 4;
        Warpgroup &g = warpgroups[group];
        const int number = g.committed[warp]++;
        if (!g.ends.empty() && g.ends.back().first >= number) return;
        g.ends.push_back({number, races_wgmma_time(group)});
        g.open = 0;
    });
}

inline void wgmma_wait(int keep, Place at) {
    const char *what = "ptx_wgmma_wait";
    Thread *me = on_hopper(at, what);
    warp_meet(0xFFFFFFFFu, at, what, nullptr, [](void *const *, uint32_t) {});
    const int group = warpgroup_of(me), last = warpgroups[group].committed[me->warp % 4] - keep; // exclusive
    run_queue(group, [group, last] {
        for (auto &op : async_ops)
            if (op->queue == group) return ((Wgmma *)op.get())->number >= last;
        return true;
    });
    for (auto &end : warpgroups[group].ends)
        if (end.first < last) races_wgmma_ended(group, end.second);
    while (warpgroups[group].ends.size() > 64) warpgroups[group].ends.pop_front();
}

inline void begin_wgmma() {
    for (Warpgroup &g : warpgroups) g = Warpgroup();
}

// ---------------------------------------------------------------------------
// stmatrix: `count` 8x8 matrices of 16-bit elements, from a warp's registers

struct StoreMatrix {
    uint16_t *row;
    const uint32_t *registers;
};

CUDA_ON_CPU_UNSEEN inline void store_matrices(void *const *lane, uint32_t) {
    const StoreMatrix *const *s = (const StoreMatrix *const *)lane;
    for (int i = 0; i < 4; i++)
        for (int t = 0; t < WARP; t++) memcpy(s[8 * i + t / 4]->row + t % 4 * 2, &s[t]->registers[i], 4);
    for (int t = 0; t < WARP; t++) remember_stored(s[t]->row, current->warp);
}

} // namespace emu

inline void ptx_wgmma_fence(emu::Place at = emu::Place::here()) { emu::wgmma_fence(at); }
inline void ptx_wgmma_commit(emu::Place at = emu::Place::here()) { emu::wgmma_commit(at); }
template <int N> inline void ptx_wgmma_wait(emu::Place at = emu::Place::here()) { emu::wgmma_wait(N, at); }
template <int R> inline void ptx_wgmma_settle(float (&)[R]) {}
template <int R> inline void ptx_wgmma_settle(uint32_t (&)[R]) {}

template <int TRANSPOSED_A, int TRANSPOSED_B, int R>
CUDA_ON_CPU_UNSEEN inline void ptx_wgmma(float (&d)[R], uint64_t a, uint64_t b, int accumulate,
                                         emu::Place at = emu::Place::here()) {
    static_assert(R == 32 || R == 64, "wgmma is written out for N = 64 and 128");
    emu::wgmma({d, R, nullptr, a, b, !TRANSPOSED_A, !TRANSPOSED_B, accumulate != 0, at, __builtin_return_address(0)});
}
template <int TRANSPOSED_B, int R>
CUDA_ON_CPU_UNSEEN inline void ptx_wgmma(float (&d)[R], const uint32_t (&a)[4], uint64_t b, int accumulate,
                                         emu::Place at = emu::Place::here()) {
    static_assert(R == 32 || R == 64, "wgmma is written out for N = 64 and 128");
    emu::wgmma({d, R, a, 0, b, true, !TRANSPOSED_B, accumulate != 0, at, __builtin_return_address(0)});
}

CUDA_ON_CPU_UNSEEN inline void ptx_stmatrix_x4(void *shared_row, const uint32_t (&r)[4],
                                               emu::Place at = emu::Place::here()) {
    const char *what = "stmatrix.x4";
    emu::on_hopper(at, what);
    emu::use_async();
    if ((uintptr_t)shared_row % 16) emu::fail(&at, "%s: row address %p is not aligned to 16 bytes", what, shared_row);
    if (!emu::shared_region(shared_row, 16))
        emu::fail(&at, "%s: row address %p is not in the block's shared memory", what, shared_row);
    emu::races_touch(shared_row, 16, true, __builtin_return_address(0));
    emu::StoreMatrix mine = {(uint16_t *)shared_row, r};
    emu::warp_meet(0xFFFFFFFFu, at, what, &mine, emu::store_matrices);
}
#endif
