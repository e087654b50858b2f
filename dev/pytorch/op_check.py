"""op_check.py: compares a function with the definition of an op in float64 and with our kernel, and measures all three.

    import llama3_ops
    llama3_ops.check(my_rmsnorm_backward, "rmsnorm_backward")                  # on random tensors
    llama3_ops.check(my_rmsnorm_backward, "rmsnorm_backward", dout, x, rstd, weight)

The function takes the op's arguments. It returns the op's results, or changes the arguments that the op changes. Three
contestants are compared with op_definitions.py in float64: yours, ours (the op in use), and PyTorch (the same
definition in the op's own dtypes). For each result:

    largest error      |error| of one element, and where
    error / definition ‖error‖ / ‖definition‖ over the whole result
    worst row          the same of the row (all dimensions but the last) where it is largest

A contestant agrees if the three are within bounds, which follow from the rounding of the op's dtype and are those of
dev/kernels. Times are medians; the contestants take turns. The roofline is the time that the op needs at least: its
bytes at the rate of a copy of as many bytes, so that small tensors are compared with the caches, or its FLOPs at the
rate of the fastest matmul of this dtype, whichever is longer. Bytes and FLOPs are those that lib/ops/ops.h counts; both
rates are the fastest that were measured on this device in the same run. On a GPU, times are the GPU's own (events), and
operands may be in its L2 cache.
"""

import importlib.util
import inspect
import math
import resource
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import llama3_ops
import op_contracts
import op_definitions
import torch

# sizes of random tensors: none that a vector or a tile divides, and those of the model bench-125m
ODD = dict(N=37, C=301, F=93, OC=71, V=333, B=2, T=53, NH=4, NKV=2, HD=18, R=3, n=5)
BENCH = dict(N=1024, C=768, F=2048, OC=2048, V=8192, B=2, T=512, NH=12, NKV=4, HD=64, R=16, n=4)
ROUNDS, TURN_SECONDS = 9, 2e-3
ATTENTION = {"attention", "attention_forward", "attention_backward"}

# ---------------------------------------------------------------- random arguments


class Random:
    """Makes the random arguments of an op: x(…) in the op's dtype, f(…) in float32, i(limit, …) in int32."""

    def __init__(self, dtype, device, size, seed=1):
        self.dtype, self.device, self.size = dtype, device, SimpleNamespace(**size)
        self.generator = torch.Generator().manual_seed(seed)

    def f(self, *shape, scale=1.0):
        return (torch.randn(shape, generator=self.generator) * scale).to(self.device)

    def x(self, *shape, scale=1.0):
        return self.f(*shape, scale=scale).to(self.dtype)

    def i(self, limit, *shape, least=0, dtype=torch.int32):
        return torch.randint(least, limit, shape, generator=self.generator, dtype=dtype).to(self.device)

    def targets(self, limit, *shape):
        return torch.where(self.i(8, *shape) == 0, -100, self.i(limit, *shape)).to(torch.int32)


def norm_backward(r, s):
    x = r.x(s.N, s.C)
    rstd = torch.rsqrt(x.float().square().mean(1) + 1e-5)
    return r.x(s.N, s.C), x, rstd, r.x(s.C)


def residual(r, s):
    """Rows of very different sizes: in the smallest ones, RMSNorm's eps is as large as the mean square."""
    sizes = 10.0 ** -(torch.arange(s.N) % 4)[:, None]
    return (r.f(s.N, s.C) * sizes.to(r.device)).to(r.dtype)


def rotation(r, s):
    table = llama3_ops.rope_table(2 * s.T, s.HD, device=r.device)
    return r.x(s.B, s.T, s.NH, s.HD), table, r.i(2 * s.T, s.T)


def queries(r, s):
    """q, k and v are slices of one tensor, as in the program."""
    qkv = r.x(s.B, s.T, s.NH + 2 * s.NKV, s.HD)
    return qkv.split((s.NH, s.NKV, s.NKV), 2)


def attention_gradient(r, s):
    q, k, v = queries(r, s)
    out, lse = torch.ops.llama3.attention_forward(q, k, v)
    return r.x(*out.shape), out, lse, q, k, v


def padded_logits(r, s):
    """Rows that begin at multiples of 8 elements, as the program's do in bf16."""
    return r.x(s.N, (s.V + 7) // 8 * 8, scale=4)[:, : s.V]


def joined_loss(r, s):
    whole, targets = r.x(s.N, 3 * s.V, scale=4), r.targets(3 * s.V, s.N)
    slices = [part.contiguous() for part in whole.split(s.V, 1)]
    parts = [torch.ops.llama3.cross_entropy_part(part, targets, i * s.V) for i, part in enumerate(slices)]
    return slices[1], torch.stack(parts), targets, s.V, 0.01, True


def moments(r, s):
    shape = (s.N, s.C)
    return r.f(*shape), r.f(*shape, scale=0.1), r.f(*shape).square(), r.f(*shape)


def exact_sum(r):
    total = torch.zeros(op_contracts.EXACT_WORDS, dtype=torch.int64)
    total[5] = 1
    return total.to(r.device)


INPUTS = {
    "linear": lambda r, s: (r.x(s.N, s.C), r.x(s.OC, s.C)),
    "linear_fp32": lambda r, s: (r.x(s.N, s.C), r.x(s.OC, s.C)),
    "linear_backward_input": lambda r, s: (r.x(s.N, s.OC + 5)[:, : s.OC], r.x(s.OC, s.C)),
    "linear_backward_weight": lambda r, s: (r.x(s.N, s.OC + 5)[:, : s.OC], r.x(s.N, s.C)),
    "linear_backward_weight_": lambda r, s: (r.f(s.OC, s.C), r.x(s.N, s.OC), r.x(s.N, s.C)),
    "linear_add": lambda r, s: (r.x(s.N, s.OC + 5)[:, : s.OC], r.x(s.N, s.R), r.x(s.OC, s.R)),
    "linear_backward_input_add": lambda r, s: (r.x(s.N, s.C), r.x(s.N, s.R), r.x(s.R, s.C)),
    "scale": lambda r, s: (r.x(s.N, s.C), 1.6),
    "adapter_merge": lambda r, s: (r.f(s.OC, s.C), r.f(s.R, s.C), r.f(s.OC, s.R), 1.6),
    "dequantize": lambda r, s: (
        r.i(128, s.N, s.C, least=-127, dtype=torch.int8),
        r.f(-(-s.N * s.C // op_contracts.INT8_BLOCK)).abs() + 0.01,
        r.dtype,
    ),
    "embedding": lambda r, s: (r.x(s.V, s.C), r.i(2 * s.V, s.N), s.V // 2),
    "embedding_backward": lambda r, s: (r.x(s.N, s.C), r.i(2 * s.V, s.N), s.V, s.V // 2),
    "embedding_backward_": lambda r, s: (r.f(s.V, s.C), r.x(s.N, s.C), r.i(2 * s.V, s.N), s.V // 2),
    "rmsnorm_forward": lambda r, s: (residual(r, s), r.x(s.C), 1e-5),
    "rmsnorm": lambda r, s: (residual(r, s), r.x(s.C), 1e-5),
    "rmsnorm_add_forward": lambda r, s: (residual(r, s), residual(r, s), r.x(s.C), 1e-5),
    "rmsnorm_add": lambda r, s: (residual(r, s), residual(r, s), r.x(s.C), 1e-5),
    "rmsnorm_backward": lambda r, s: (*norm_backward(r, s), r.x(s.N, s.C)),
    "rmsnorm_backward_": lambda r, s: (r.x(s.N, s.C), r.f(s.C), *norm_backward(r, s)),
    "residual_add": lambda r, s: (r.x(s.N, s.C), r.x(s.N, s.C)),
    "rope": rotation,
    "rope_": rotation,
    "rope_backward": rotation,
    "rope_backward_": rotation,
    "attention_forward": queries,
    "attention": queries,
    "attention_backward": attention_gradient,
    "swiglu": lambda r, s: (r.x(s.N, 2 * s.F, scale=2),),
    "swiglu_backward": lambda r, s: (r.x(s.N, s.F), r.x(s.N, 2 * s.F, scale=2)),
    "cross_entropy": lambda r, s: (r.x(s.N, s.V, scale=4), r.targets(s.V, s.N), 0.01),
    "cross_entropy_": lambda r, s: (padded_logits(r, s), r.targets(s.V, s.N), 0.01, True),
    "cross_entropy_part": lambda r, s: (padded_logits(r, s), r.targets(2 * s.V, s.N), s.V // 2),
    "cross_entropy_join": joined_loss,
    "tree_sum": lambda r, s: (r.x(s.n, s.N, s.C),),
    "tree_sum_": lambda r, s: (r.f(s.N, s.C), r.x(s.n, s.N, s.C)),
    "sum_pieces": lambda r, s: (r.x(s.n, s.N, s.C),),
    "exact_total": lambda r, s: (r.f(s.N, s.C).abs(),),
    "exact_total_": lambda r, s: (exact_sum(r), r.f(s.N, s.C).abs()),
    "squared_norm": lambda r, s: (r.f(s.N, s.C),),
    "squared_norm_": lambda r, s: (exact_sum(r), r.f(s.N, s.C)),
    "adamw": lambda r, s: (*moments(r, s), 3e-4, 0.9, 0.95, 1e-8, 0.1, 0.37, 3, r.x(s.N, s.C)),
    "muon_momentum": lambda r, s: (r.f(s.N, s.C), r.f(s.N, s.C), 0.95, 0.37, r.dtype),
    "normalize_matrix": lambda r, s: (r.x(s.N, s.C),),
    "gram_matrix": lambda r, s: (r.x(s.N, s.C),),
    "symmetric_matmul": lambda r, s: (r.x(min(s.N, s.C), min(s.N, s.C)), r.x(s.N, s.C)),
    "weighted_sum": lambda r, s: (r.x(s.N, s.C), 3.4445, r.f(s.N, s.C), -1.25),
    "muon_update": lambda r, s: (r.f(s.N, s.C), r.x(s.N, s.C), 3e-4, 5.5, 0.1, r.x(s.N, s.C)),
    "cast_to_bf16": lambda r, s: (r.f(s.N, s.C),),
    "fingerprint": lambda r, s: (r.f(s.N, 2 * s.C),),
}


def random_arguments(op_name, dtype=torch.float32, device="cpu", size=BENCH, seed=1):
    r = Random(dtype, device, size, seed)
    return tuple(INPUTS[op_name](r, r.size))


# ---------------------------------------------------------------- results and their errors


def changed_arguments(op_name):
    """Positions and names of the arguments that the op changes."""
    schema = llama3_ops.OPS[op_name]._schema
    return [(i, a.name) for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write]


def as_tuple(results):
    if results is None:
        return ()
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def copies(arguments):
    """A copy of each tensor, with the same strides, so that a function can change it."""
    made = []
    for a in arguments:
        if isinstance(a, torch.Tensor):
            copy = torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=a.device)
            a = copy.copy_(a)
        made.append(a)
    return made


def results_of(op_name, function, arguments):
    """Calls the function on copies. Returns its results, then the arguments that the op changes, unless the function
    returns their new values, too; and the names of arguments that it changed and should not have."""
    given = copies(arguments)
    results = as_tuple(function(*given))
    changes = [i for i, _ in changed_arguments(op_name) if given[i] is not None]
    names = [a.name for a in llama3_ops.OPS[op_name]._schema.arguments]
    if len(results) < len(llama3_ops.OPS[op_name]._schema.returns) + len(changes):
        results += tuple(readable(names[i], given[i]) for i in changes)
    touched = [
        names[i]
        for i, (before, after) in enumerate(zip(arguments, given))
        if isinstance(before, torch.Tensor) and i not in changes and not torch.equal(before, after)
    ]
    return results, touched


def readable(name, result):
    """A changed argument: those whose new values have a layout of their own, as ordinary tensors."""
    if name == "total":
        return llama3_ops.exact_value(result)
    return result


def for_definition(op_name, arguments):
    """The arguments in double precision. A number is rounded to fp32 first, as it is for the C function."""
    converted = []
    names = [a.name for a in llama3_ops.OPS[op_name]._schema.arguments]
    for name, a in zip(names, arguments):
        if isinstance(a, torch.Tensor) and name == "total":
            a = llama3_ops.exact_value(a)
        elif isinstance(a, torch.Tensor) and a.is_floating_point() and op_name != "fingerprint":
            a = a.double()
        elif isinstance(a, float):
            a = torch.tensor(a, dtype=torch.float32).double().item()
        converted.append(a)
    return converted


def define(op_name, arguments):
    """The definition's results in float64, and their names."""
    definition = op_definitions.DEFINITIONS[op_name]
    named = {}
    if "stored" in inspect.signature(definition).parameters:
        named["stored"] = lambda x: x.to(arguments[0].dtype).double()
    results = as_tuple(definition(*for_definition(op_name, arguments), **named))
    return results, definition.results[: len(results)]


@dataclass
class Errors:
    """How far one result is from its definition."""

    result: str
    shape: tuple
    strides: tuple
    largest: float = 0.0  # |error| of an element
    at: tuple = ()  # its indices
    got: float = 0.0
    expected: float = 0.0
    relative: float = 0.0  # ‖error‖ / ‖definition‖
    row: tuple = ()  # indices of the row whose relative error is largest
    row_relative: float = 0.0
    share: float = 0.0  # largest share of a bound; above 1 the result is wrong
    bound: float = 0.0  # of `relative`


def indices(shape, flat):
    found = []
    for n in reversed(shape):
        flat, i = divmod(flat, n)
        found.append(i)
    return tuple(reversed(found))


def ratio(a, b):
    return torch.where(a == 0, 0, a / b)


def bounds(op_name, dtype):
    """The bounds of ‖error‖ / ‖definition‖, first over the whole result, then of one row or element; they are those of
    dev/kernels/page.h. In bf16, attention also rounds the probabilities, as operands of its matmuls."""
    if op_name in ("exact_total", "exact_total_", "cast_to_bf16"):
        return 1e-12, 1e-12  # these ops are exact; only the definition's float64 sum is rounded
    if dtype == torch.bfloat16:
        return (6e-3, 16e-3) if op_name in ATTENTION else (3e-3, 8e-3)
    return 5e-6, 5e-5


def errors_of(op_name, name, got, exact):
    """An element's error is compared with itself plus the size of its row, where a row counts as at least a tenth of an
    average one. Infinities may agree; NaN never does."""
    e = Errors(name, tuple(got.shape), tuple(got.stride()))
    if not got.is_floating_point():
        wrong = got != exact
        e.share = e.largest = e.relative = math.inf if wrong.any() else 0.0
        return e
    e.bound, loose = bounds(op_name, got.dtype)
    if got.numel() == 0:
        return e
    value, exact = got.double().reshape(1, -1), exact.double().reshape(1, -1)
    columns = got.shape[-1] if got.dim() else 1
    same = (value == exact).reshape(-1, columns)
    error = torch.where(same, 0, (value - exact).abs().reshape(-1, columns)).nan_to_num(nan=math.inf)
    size = torch.where(exact.isinf(), 0, exact).abs().reshape(-1, columns)
    e.largest, at = error.max().item(), int(error.argmax())
    e.at, e.got, e.expected = indices(got.shape, at), value[0, at].item(), exact[0, at].item()
    e.relative = ratio(error.norm(), size.norm()).item()
    of_row = torch.sqrt(size.square().mean(1) + 0.01 * size.square().mean())
    in_rows = ratio(error.square().mean(1).sqrt(), of_row)
    e.row_relative, row = in_rows.max().item(), int(in_rows.argmax())
    e.row = indices(got.shape[:-1], row)
    element = ratio(error, size + of_row[:, None]).max().item()
    e.share = max(e.relative / e.bound, e.row_relative / loose, element / loose)
    return e


@dataclass
class Contestant:
    name: str
    errors: list = field(default_factory=list)  # of Errors, one per result
    problem: str = ""  # why there is nothing to compare, or what else is wrong
    seconds: float = math.nan
    roofline: float = math.nan  # share of the roofline

    @property
    def ok(self):
        return not self.problem and bool(self.errors) and all(e.share <= 1 for e in self.errors)

    @property
    def worst(self):
        return max(self.errors, key=lambda e: e.share, default=None)


def type_of(dtype):
    return str(dtype).removeprefix("torch.")


def compare(op_name, name, function, arguments, exact, names, expected):
    """expected: shapes and dtypes of the results, or None if any dtype will do."""
    c = Contestant(name)
    try:
        results, touched = results_of(op_name, function, arguments)
    except Exception as error:  # whatever the reader's function raises is a figure of the report
        c.problem = f"it raised {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return c
    if len(results) != len(exact):
        c.problem = f"it has {len(results)} results, expected {len(exact)}: {', '.join(names)}"
        return c
    for i, (result, of_name) in enumerate(zip(results, names)):
        if not isinstance(result, torch.Tensor):
            c.problem = f"{of_name} is {type(result).__name__}, expected a tensor"
            return c
        if expected and result.dtype != expected[i]:
            c.problem = f"{of_name} is {type_of(result.dtype)}, expected {type_of(expected[i])}"
            return c
        if tuple(result.shape) != tuple(exact[i].shape):
            c.problem = f"{of_name} has shape {tuple(result.shape)}, expected {tuple(exact[i].shape)}"
            return c
        c.errors.append(errors_of(op_name, of_name, result, exact[i]))
    if touched:
        c.problem = f"it changed {', '.join(touched)}, which it should only read"
    return c


# ---------------------------------------------------------------- times


def timed(function, device, before=None):
    """Seconds of one call."""
    if before:
        before()
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        return 1e-3 * start.elapsed_time(end)
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def turn(function, device, before=None):
    """Seconds of a call: the mean of as many calls as fit into one turn."""
    spent, calls = 0.0, 0
    while calls == 0 or (spent < TURN_SECONDS and calls < 32):
        spent += timed(function, device, before)
        calls += 1
    return spent / calls


def times_of(functions, device, rounds=ROUNDS):
    """functions: (function, before) pairs. They take turns, so that whatever slows one slows all. Returns the seconds
    of each round of each function."""
    for function, before in functions:
        timed(function, device, before)
    times = [[turn(function, device, before) for function, before in functions] for _ in range(rounds)]
    return list(zip(*times))


def bound_call(op_name, function, arguments):
    """The call to be timed, and what restores the arguments that it changes."""
    given = copies(arguments)
    pairs = [(given[i], arguments[i]) for i, _ in changed_arguments(op_name) if arguments[i] is not None]

    def restore():
        for to, source in pairs:
            to.copy_(source)

    return lambda: function(*given), restore if pairs else None


def copy_call(size, device):
    """A copy that reads and writes as many bytes together as the op."""
    elements = max(1, int(size) // 8)
    source, to = torch.zeros(elements, device=device), torch.zeros(elements, device=device)
    return lambda: to.copy_(source), None


matmul_rates = {}  # by device and dtype: FLOP/s


def matmul_rate(device, dtype):
    """FLOP/s of the fastest matmul among some shapes of Llama's layers, PyTorch's and ours."""
    key = (str(device), dtype)
    if key not in matmul_rates:
        N = 8192 if device.type == "cuda" else 1024
        best = 0.0
        for IC, OC in ((2048, 8192), (8192, 2048)) if device.type == "cuda" else ((768, 768), (768, 2048), (2048, 768)):
            x = torch.randn(N, IC, device=device).to(dtype)
            w = torch.randn(OC, IC, device=device).to(dtype)
            calls = [
                (lambda f=f, x=x, w=w: f(x, w), None) for f in (torch.nn.functional.linear, torch.ops.llama3.linear)
            ]
            best = max(best, 2 * N * IC * OC / min(map(min, times_of(calls, device, rounds=5))))
        matmul_rates[key] = best
    return matmul_rates[key]


# ---------------------------------------------------------------- the comparison


@dataclass
class Check:
    op: str
    ok: bool  # whether yours, or without a function of yours ours, agrees with the definition
    yours: Contestant
    ours: Contestant
    pytorch: Contestant
    inputs: str
    flops: float
    bytes: float
    memory_rate: float  # bytes/s, read and written
    matmul_rate: float  # FLOP/s
    roofline_seconds: float
    preemptions_per_second: float  # how often per second a thread lost its core while times were measured

    def __str__(self):
        return "\n".join(report(self))


def describe(op_name, arguments):
    shown = []
    for a, value in zip(llama3_ops.OPS[op_name]._schema.arguments, arguments):
        if isinstance(value, torch.Tensor):
            layout = "" if value.is_contiguous() else f" strides {tuple(value.stride())}"
            shown.append(f"{a.name} {type_of(value.dtype)} {tuple(value.shape)}{layout}")
        elif value is not None:
            shown.append(f"{a.name} {value}")
    return ", ".join(shown)


def place(name, at):
    return f"{name}[{', '.join(map(str, at))}]" if at else name


def report(c):
    yield f"{c.op}: {c.inputs}"
    columns = f"{'largest error':>14} {'error/definition':>17} {'worst row':>10} {'of bound':>9}"
    yield f"{'':8} {columns} {'ms':>9} {'of roofline':>12}"
    contestants = [x for x in (c.yours, c.ours, c.pytorch) if x]
    for x in contestants:
        if not x.errors:
            yield f"{x.name:8} {x.problem}"
            continue
        largest, relative, row = (max(getattr(e, f) for e in x.errors) for f in ("largest", "relative", "row_relative"))
        times = f"{1e3 * x.seconds:9.4f} {100 * x.roofline:10.0f} %" if x.seconds == x.seconds else ""
        yield f"{x.name:8} {largest:14.3e} {relative:17.2e} {row:10.2e} {x.worst.share:9.2f} {times}"
    if c.memory_rate == c.memory_rate:
        limit = "memory" if c.bytes / c.memory_rate > c.flops / c.matmul_rate else "arithmetic"
        yield (
            f"roofline ({limit}): {1e3 * c.roofline_seconds:.4f} ms for {c.bytes / 1e6:.2f} MB at "
            f"{c.memory_rate / 1e9:.1f} GB/s and {c.flops / 1e6:.2f} MFLOP at {c.matmul_rate / 1e9:.0f} GFLOP/s"
        )
    if c.preemptions_per_second > 25:
        yield (
            "note: other programs were running (each thread was preempted "
            f"{c.preemptions_per_second:.0f} times a second), so do not publish these times"
        )
    for x in contestants[:-1]:
        yield from verdict(x)


def verdict(x):
    if not x.errors:
        yield f"{x.name}: WRONG: {x.problem}"
        return
    e = x.worst
    yield (
        f"{x.name}: worst is {e.result}, shape {e.shape}, strides {e.strides}: {place(e.result, e.at)} is {e.got:.9g}, "
        f"expected {e.expected:.9g}; worst row {place(e.result, e.row)}"
    )
    if x.ok:
        yield f"{x.name}: agrees with the definition ({e.share:.2f} of the bound)"
    else:
        share = f"{e.share:.3g} times the bound; error / definition may be {e.bound:.0e}"
        yield f"{x.name}: WRONG: {x.problem or share}"


def in_own_dtypes(op_name, definition):
    """The definition as a contestant. It takes the value of an ExactSum."""
    if "total" not in (name for _, name in changed_arguments(op_name)):
        return definition
    return lambda total, x: definition(llama3_ops.exact_value(total), x)


def check(function, op_name, *tensors, dtype=torch.float32, device="cpu", size=BENCH, time_it=True, quiet=False):
    """Compares `function` (None: our kernel alone) with the op's definition, prints the report, and returns a Check.
    Without tensors, random ones are made of this dtype, device and size (ODD, BENCH or a dict like these)."""
    if op_name not in llama3_ops.OPS:
        raise ValueError(f"check: there is no op {op_name}, expected one of {', '.join(sorted(llama3_ops.OPS))}")
    arguments = tensors or random_arguments(op_name, dtype, device, size)
    op = llama3_ops.OPS[op_name]
    with torch.no_grad():
        own, _ = results_of(op_name, op, arguments)  # refuses arguments that the op does not take
        cost = llama3_ops.state.last.cost()
        exact, names = define(op_name, arguments)
        dtypes = [r.dtype for r in own]
        definition = op_definitions.DEFINITIONS[op_name]
        contestants = [("ours", op, dtypes), ("PyTorch", in_own_dtypes(op_name, definition), None)]
        if function:
            contestants.insert(0, ("yours", function, dtypes))
        compared = [compare(op_name, n, f, arguments, exact, names, d) for n, f, d in contestants]
        first = next(a for a in arguments if isinstance(a, torch.Tensor))
        result = measured(op_name, contestants, compared, arguments, first, cost, time_it)
    if not quiet:
        print(result)
    return result


def measured(op_name, contestants, compared, arguments, first, cost, time_it):
    """The Check, with times."""
    flops, size = cost
    is_bf16 = any(isinstance(a, torch.Tensor) and a.dtype == torch.bfloat16 for a in arguments)
    dtype = torch.bfloat16 if is_bf16 else torch.float32
    memory, preemptions_per_second, roofline = math.nan, 0.0, math.nan
    rate = matmul_rate(first.device, dtype) if time_it else math.nan
    if time_it:
        running = [(c, f) for c, (_, f, _) in zip(compared, contestants) if c.errors]
        calls = [bound_call(op_name, f, arguments) for _, f in running] + [copy_call(size, first.device)]
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw, time.perf_counter()
        *times, copy_times = times_of(calls, first.device)
        lost = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - before
        preemptions_per_second = lost / (time.perf_counter() - start) / torch.get_num_threads()
        memory = size / min(copy_times)
        roofline = max(size / memory, flops / rate)
        for (c, _), of_one in zip(running, times):
            c.seconds = statistics.median(of_one)
            c.roofline = roofline / c.seconds
    yours = compared[0] if len(compared) == 3 else None
    ours, pytorch = compared[-2:]
    ok = (yours or ours).ok
    described = describe(op_name, arguments)
    figures = (flops, size, memory, rate, roofline, preemptions_per_second)
    return Check(op_name, ok, yours, ours, pytorch, described, *figures)


# ---------------------------------------------------------------- the command line


def function_of(place_of, op_name):
    """The reader's function: FILE.py:FUNCTION, or the op in a shared library."""
    if place_of.endswith(".so"):
        if not Path(place_of).exists():
            sys.exit(f"error: {place_of} does not exist: build it first, for example with make mine")

        def in_library(*arguments):
            with llama3_ops.use_library(place_of):
                return llama3_ops.OPS[op_name](*arguments)

        return in_library
    path, _, name = place_of.partition(":")
    if not path.endswith(".py") or not name:
        sys.exit(f"error: {place_of} was given, expected FILE.py:FUNCTION or LIBRARY.so")
    if not Path(path).exists():
        sys.exit(f"error: {path} does not exist")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(Path(path).resolve().parent))
    spec.loader.exec_module(module)
    if not callable(getattr(module, name, None)):
        sys.exit(f"error: {path} has no function {name}")
    return getattr(module, name)


def device_of(place_of):
    """A GPU, if PyTorch and our library can use one, except for a shared library that was compiled for the CPU."""
    has_gpu = torch.cuda.is_available() and llama3_ops.op_contracts.library_path("cuda").exists()
    return "cuda" if has_gpu and (not place_of.endswith(".so") or place_of.endswith("-cuda.so")) else "cpu"


def main(op_name, place_of=None):
    """check OP [FUNCTION]: both precisions, on odd sizes without times and on those of bench-125m with times."""
    if op_name not in llama3_ops.OPS:
        sys.exit(f"error: there is no op {op_name}, expected one of {', '.join(sorted(llama3_ops.OPS))}")
    function = function_of(place_of, op_name) if place_of else None
    device = device_of(place_of or "")
    passed = failed = 0
    for dtype in llama3_ops.PRECISION:
        for label, size in (("odd sizes", ODD), ("bench-125m", BENCH)):
            result = check(function, op_name, dtype=dtype, device=device, size=size, time_it=size is BENCH, quiet=True)
            print("\n".join(report(result)) + "\n")
            for x in (result.yours, result.ours):
                if not x:
                    continue
                share = f"{x.worst.share:.2f} of its bound" if x.errors else x.problem
                print(f"{'pass' if x.ok else 'FAIL'} {op_name}, {type_of(dtype)}, {label}, {x.name}: {share}\n")
                passed, failed = passed + x.ok, failed + (not x.ok)
    print(f"{passed} passed, {failed} failed")
    return failed > 0
