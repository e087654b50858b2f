#!/usr/bin/env bash
# ops_library.sh [all]: the shared library of `make ops` without PyTorch, through Python's ctypes: it exports exactly
# the ops of lib/ops/ops.h, with their parameters, in both precisions; and calls compute what they should in the
# precision that their name says. With `all` also the library of the CUDA ops, in the emulator, next to the CPU's.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. dev/test/checks.sh
work=$(mktemp -d)
said=$work/said
trap 'rm -rf "$work"' EXIT
make -s ops-cpu >/dev/null 2>"$said" || {
    cat "$said"
    echo "FAIL make ops: it does not build"
    echo "0 passed, 1 failed"
    exit 1
}

# the symbols, as the linker sees them
python3 dev/pytorch/op_contracts.py names >build/ops_library.expected
nm -D --defined-only build/libllama3_ops.so | sed -n 's/.* T //p' | sort >build/ops_library.exported
if cmp -s build/ops_library.expected build/ops_library.exported; then
    pass "the library exports the ops of lib/ops/ops.h in both precisions, and nothing else" \
        "$(wc -l <build/ops_library.exported) functions"
else
    fail "the library exports the ops of lib/ops/ops.h in both precisions, and nothing else" \
        "$(diff build/ops_library.expected build/ops_library.exported | tr '\n' ' ')"
fi

# what calls compute
OMP_NUM_THREADS=2 python3 - >"$said" 2>&1 <<'PYTHON'
import ctypes, math, re, struct, sys
sys.path.insert(0, "dev/pytorch")
import op_contracts as oc

def report(ok, name, what):
    print("pass" if ok else "FAIL", f"{name}: {what}")

source = open("dev/pytorch/ops_library.cu").read()
pattern = r"^EXPORT\((\w+)\)\s*\(Library \*l, ([^)]*)\) \{\s*CALL\(l, ([^)]*)\);\s*\}"
exports = re.findall(pattern, source, re.M)
wrong = []
for name, parameters, arguments in exports:
    given = tuple(oc.parse_parameter(p) for p in parameters.split(","))
    names = [a.strip() for a in arguments.split(",")]
    if given != oc.CONTRACTS[name].parameters or names != [name] + [p.name for p in given]:
        wrong.append(name)
report(not wrong and len(exports) == len(oc.CONTRACTS), "parameters are those of lib/ops/ops.h, in order",
       f"{len(exports)} of {len(oc.CONTRACTS)} ops, different: {', '.join(wrong) or 'none'}")

class Values:
    """An array in floatX."""
    def __init__(self, precision, values):
        self.bf16 = precision == "bf16"
        self.data = ((ctypes.c_uint16 if self.bf16 else ctypes.c_float) * len(values))()
        for i, x in enumerate(values):
            self.data[i] = self.round(x) if self.bf16 else x
    def round(self, x):
        bits = struct.unpack("I", struct.pack("f", x))[0]
        return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    def list(self):
        return [struct.unpack("f", struct.pack("I", v << 16))[0] for v in self.data] if self.bf16 else list(self.data)

def floats(values):
    return (ctypes.c_float * len(values))(*values)

def worst(got, expected):
    return max(abs(a - b) for a, b in zip(got, expected))

for precision, bound in ("fp32", 1e-6), ("bf16", 1e-2):
    lib = oc.Library(oc.library_path("cpu"), precision, 2)
    N, C, OC = 3, 37, 5
    x = Values(precision, [math.sin(i) for i in range(N * C)])
    w = Values(precision, [math.cos(3 * i) for i in range(OC * C)])
    y = Values(precision, [0] * (N * OC))
    lib("linear_forward", y.data, x.data, w.data, N, C, OC)
    xs, ws = x.list(), w.list()
    exact = [sum(xs[n * C + i] * ws[o * C + i] for i in range(C)) for n in range(N) for o in range(OC)]
    error = worst(y.list(), exact)
    report(error <= 4 * bound, f"linear_forward in {precision}", f"largest error {error:.1e} <= {4 * bound:.0e}")
    if precision == "bf16":
        report(error > 1e-5, "the bf16 functions round to bf16", f"largest error {error:.1e} > 1e-5")
    flops, size = lib.cost()
    element = len(bytes(x.data)) / (N * C)
    expected = (2.0 * N * C * OC, (N * C + OC * C + N * OC) * element)
    report((flops, size) == expected, f"cost of linear_forward in {precision}", f"{flops:.0f} FLOPs, {size:.0f} bytes")

    out, rstd = Values(precision, [0] * (N * C)), floats([0] * N)
    lib("rmsnorm_forward", out.data, rstd, None, x.data, None, w.data, 1e-5, N, C)
    scales = [1 / math.sqrt(sum(v * v for v in xs[n * C:n * C + C]) / C + 1e-5) for n in range(N)]
    error = worst(out.list(), [xs[i] * scales[i // C] * ws[i % C] for i in range(N * C)])
    report(error <= bound, f"rmsnorm_forward in {precision}", f"largest error {error:.1e} <= {bound:.0e}")

    logits, targets = floats([math.sin(i * i) for i in range(N * C)]), (ctypes.c_int32 * N)(3, -100, 36)
    before, losses, z = list(logits), floats([9] * N), floats([9] * N)
    rows = oc.Logits(ctypes.addressof(logits), C, 0)
    lib("cross_entropy", losses, rows, targets, oc.ZLoss(0.5, ctypes.addressof(z)), N, C, 0)
    log_z = [math.log(sum(map(math.exp, before[n * C:n * C + C]))) for n in range(N)]
    exact = [log_z[0] - before[3], 0, log_z[2] - before[2 * C + 36]]
    error = max(worst(losses, exact), worst(z, [0.5 * log_z[0] ** 2, 0, 0.5 * log_z[2] ** 2]))
    name = f"cross_entropy with a z-loss (structs by value) in {precision}"
    report(error <= 1e-5, name, f"largest error {error:.1e} <= 1e-5")

    T, HD = 4, 6
    q, k, v = (Values(precision, [math.sin(i * s) for i in range(T * HD)]) for s in (1, 2, 3))
    out, lse = Values(precision, [0] * (T * HD)), floats([0] * T)
    shape = oc.AttentionShape(1, T, T, 1, 1, HD, 0, 0, 0, None, None, HD, HD, HD, HD)
    lib("attention_forward", out.data, lse, q.data, k.data, v.data, ctypes.byref(shape))
    qs, ks, vs, exact = q.list(), k.list(), v.list(), []
    for t in range(T):
        p = [math.exp(sum(qs[t * HD + i] * ks[s * HD + i] for i in range(HD)) / math.sqrt(HD)) for s in range(t + 1)]
        exact += [sum(p[s] * vs[s * HD + i] for s in range(t + 1)) / sum(p) for i in range(HD)]
    error = worst(out.list(), exact)
    name = f"attention_forward (a struct by address) in {precision}"
    report(error <= bound, name, f"largest error {error:.1e} <= {bound:.0e}")
    lib.close()

try:
    oc.Library(oc.ROOT / "build" / "nowhere.so", "fp32", 1)
except oc.LibraryError as error:
    report(str(error).endswith("does not exist: build it with `make ops`"), "a missing library is named", error)
else:
    report(False, "a missing library is named", "nothing was raised, expected LibraryError")
PYTHON
code=$?
cuda_in_emulator() {
    OMP_NUM_THREADS=2 python3 - <<'PYTHON'
import ctypes, math, sys
sys.path.insert(0, "dev/pytorch")
import op_contracts as oc

for precision, kind, bound in ("fp32", ctypes.c_float, 1e-5), ("bf16", ctypes.c_uint16, 2e-2):
    path = oc.ROOT / "build" / "libllama3_ops_cuda_on_cpu.so"
    cpu, cuda = oc.Library(oc.library_path("cpu"), precision, 2), oc.Library(path, precision, 2)
    loaded = ctypes.CDLL(str(path))
    memory, copy = loaded[f"llama3_{precision}_device_memory"], loaded[f"llama3_{precision}_copy"]
    memory.restype, memory.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    copy.restype, copy.argtypes = None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

    def value(x):
        return x if kind is ctypes.c_float else ctypes.c_float.from_buffer(ctypes.c_uint32(x << 16)).value

    def of(array):
        return [value(x) if array._type_ is kind else x for x in array]

    def worst(a, gpu):
        """The largest difference of the CPU's array and the emulated GPU's."""
        b = type(a)()
        copy(b, gpu, ctypes.sizeof(b))
        return max(abs(x - y) for x, y in zip(of(a), of(b)))

    def both(kind, count, wave=None):
        """An array of the CPU and the address of one of the emulated GPU, with the same values."""
        array = (kind * count)()
        for i in range(count):
            x = math.sin(wave * (i + 1)) if wave else 0
            if kind is ctypes.c_uint16:
                x = ctypes.c_uint32.from_buffer(ctypes.c_float(x)).value >> 16
            array[i] = x
        gpu = memory(ctypes.sizeof(array))
        copy(gpu, array, ctypes.sizeof(array))
        return array, gpu

    for T in 9, 150, 20: # the second needs more workspace than the device was opened with
        HD, count = 16, T * 16
        q, k, v, dout = (both(kind, count, wave) for wave in (1, 2, 3, 5))
        out, dq, dk, dv = (both(kind, count) for _ in range(4))
        lse = both(ctypes.c_float, T)
        shape = ctypes.byref(oc.AttentionShape(1, T, T, 1, 1, HD, 0, 0, 0, None, None, HD, HD, HD, HD))
        for i, lib in enumerate((cpu, cuda)):
            lib("attention_forward", out[i], lse[i], q[i], k[i], v[i], shape)
            lib("attention_backward", dq[i], dk[i], dv[i], dout[i], out[i], lse[i], q[i], k[i], v[i], shape)
        errors = [worst(*pair) for pair in (out, dq, dk, dv, lse)]
        print("pass" if max(errors) <= 4 * bound else "FAIL", f"CUDA in the emulator: attention of {T} tokens and its "
              f"backward are the CPU's in {precision}: largest difference {max(errors):.1e} <= {4 * bound:.0e}")
    x, w, y, rstd = both(kind, 33 * 40, 1), both(kind, 40 * 40, 2), both(kind, 33 * 40), both(ctypes.c_float, 33)
    for i, lib in enumerate((cpu, cuda)):
        lib("linear_forward", y[i], x[i], w[i], 33, 40, 40)
        lib("rmsnorm_forward", x[i], rstd[i], None, y[i], None, w[i], 1e-5, 33, 40)
    error = max(worst(*y), worst(*x))
    print("pass" if error <= 4 * bound else "FAIL", f"CUDA in the emulator: linear_forward and rmsnorm_forward are the "
          f"CPU's in {precision}: largest difference {error:.1e} <= {4 * bound:.0e}")
PYTHON
}
if [ "${1:-}" = all ]; then
    make -s ops-cuda-on-cpu >>"$said" 2>&1 && cuda_in_emulator >>"$said" 2>&1 || code=1
fi
grep -E '^(pass|FAIL) ' "$said"
passed=$((passed + $(grep -c '^pass ' "$said")))
failed=$((failed + $(grep -c '^FAIL ' "$said")))
[ $code = 0 ] || fail "the calls through ctypes" "$(tail -n 1 "$said")"
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
