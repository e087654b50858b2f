"""test_llama3_ops.py: the ops of llama3_ops.py, and op_check.py itself.

    make ops-test                     # or PYTHON=… make ops-test; builds build/libllama3_ops.so first
    python dev/pytorch/test_llama3_ops.py [WORD]        # only the tests whose names contain WORD

What is checked:
  definitions  every op in both precisions on odd sizes and on one-element sizes against op_definitions.py in float64
  opcheck      torch.library.opcheck of every op in both precisions: schema, autograd registration, fake implementation,
               tracing with dynamic shapes
  gradients    of each autograd formula: (1) against autograd in float64 through the op's definition, on the same
               inputs, with random output gradients; (2) one directional derivative of that definition by
               central differences in float64, so that the reference does not rest on PyTorch's autograd alone.
               torch.autograd.gradcheck itself is not used: it would perturb fp32 kernels, whose rounding is as large as
               the differences that it takes.
               Bounds are twice those of one op; of attention in bf16, 1.5 times the error of PyTorch's.
  strides      slices, with the same results as contiguous copies
  errors       wrong dtypes, shapes, strides, devices and values: the type of the exception and its sentence
  check        functions with planted faults are found, and named by the result that is wrong
The last line is `N passed, N failed`.
"""

import contextlib
import io
import re
import subprocess
import sys
import traceback
from pathlib import Path

import llama3_ops
import op_check
import op_contracts
import op_definitions
import torch

ops = torch.ops.llama3
HERE = Path(__file__).resolve().parent
PRECISIONS = (torch.float32, torch.bfloat16)
ONE = dict(N=1, C=2, F=1, OC=1, V=3, B=1, T=1, NH=1, NKV=1, HD=2, R=1, n=1)
DIFFERENTIABLE = (
    "linear linear_fp32 embedding rmsnorm_forward rmsnorm rmsnorm_add_forward rmsnorm_add residual_add rope "
    "attention_forward attention swiglu cross_entropy cast_to_bf16"
).split()
results = {"passed": 0, "failed": 0}
wanted = sys.argv[1] if len(sys.argv) > 1 else ""


def check(ok, name, what):
    results["passed" if ok else "failed"] += 1
    print(f"{'pass' if ok else 'FAIL'} {name}: {what}", flush=True)


# ---------------------------------------------------------------- definitions


def test_definitions():
    for name in llama3_ops.OPS:
        for dtype in PRECISIONS:
            ours = []
            for size in (op_check.ODD, ONE):
                c = op_check.check(None, name, dtype=dtype, size=size, time_it=False, quiet=True)
                ours.append(c.ours)
            shares = [o.worst.share for o in ours]
            text = f"{shares[0]:.2f} and {shares[1]:.2f} of the bound <= 1 (odd sizes, sizes of one)"
            text += "".join(f"; {o.problem}" for o in ours if o.problem)
            good = max(shares) <= 1 and not any(o.problem for o in ours)
            check(good, f"definition of {name}, {op_check.type_of(dtype)}", text)


def test_contracts():
    called = set(llama3_ops.CALLS.values())
    missing = set(op_contracts.CONTRACTS) - called
    check(
        not missing,
        "every contract of lib/ops/ops.h has an op",
        f"{len(called)} contracts, missing: {missing or 'none'}",
    )
    undefined = set(llama3_ops.OPS) ^ set(op_definitions.DEFINITIONS)
    check(not undefined, "every op has a definition", f"{len(llama3_ops.OPS)} ops, differences: {undefined or 'none'}")
    said = subprocess.run([sys.executable, HERE / "llama3_ops.py", "list"], capture_output=True, text=True).stdout
    shown = sum(f"\n{name}(" in "\n" + said for name in op_contracts.CONTRACTS)
    check(
        shown == len(op_contracts.CONTRACTS), "list shows every contract", f"{shown} of {len(op_contracts.CONTRACTS)}"
    )
    schemas = len(re.findall(r"^    torch\.ops\.llama3\.", said, re.M))
    check(schemas == len(llama3_ops.OPS), "list shows every op", f"{schemas} of {len(llama3_ops.OPS)}")


def test_precisions_together():
    x = torch.randn(5, 77)
    both = [ops.swiglu(torch.cat((x, x), 1).to(dtype)) for dtype in PRECISIONS]
    share = ((both[0] - both[1].float()).abs() / (3e-2 + 1e-2 * both[0].abs())).max()
    ok = [y.dtype for y in both] == list(PRECISIONS) and share <= 1
    check(ok, "both precisions in one process", f"{share:.2f} of the bound <= 1 (3e-2, and 1e-2 of the value)")
    grown = [ops.attention(*(torch.randn(1, t, 2, 64) for _ in range(3))).isfinite().all() for t in (8, 700, 16)]
    check(all(grown), "workspace grows between calls", "attention over 8, 700 and 16 tokens")


# ---------------------------------------------------------------- torch.library.opcheck


def small(name, dtype):
    size = {**op_check.ODD, "N": 6, "C": 10, "F": 7, "OC": 5, "V": 9, "T": 6, "HD": 4}
    return list(op_check.random_arguments(name, dtype, size=size))


def test_opcheck():
    for name in llama3_ops.OPS:
        for dtype in PRECISIONS:
            arguments = small(name, dtype)
            if name in DIFFERENTIABLE:
                arguments = [leaf(a) for a in arguments]
                for i in differentiable(name, arguments):
                    arguments[i].requires_grad_()
            try:
                with contextlib.redirect_stderr(io.StringIO()):
                    said = torch.library.opcheck(llama3_ops.OPS[name], tuple(arguments))
                bad = [f"{k}: {v}" for k, v in said.items() if v != "SUCCESS"]
            except Exception as error:
                said, bad = {}, [str(error).strip().splitlines()[0]]
            check(not bad, f"opcheck of {name}, {op_check.type_of(dtype)}", bad[0] if bad else ", ".join(said))


def leaf(a):
    return a.detach().contiguous() if isinstance(a, torch.Tensor) else a


# ---------------------------------------------------------------- gradients


def gradients(function, arguments, which, douts):
    """Gradients of sum(dout * output) with respect to the arguments numbered in `which`."""
    given = list(arguments)
    for i in which:
        given[i] = given[i].detach().clone().requires_grad_()
    outputs = [o for o in op_check.as_tuple(function(*given)) if o.requires_grad]
    total = sum((o.double() * d).sum() for o, d in zip(outputs, douts))
    return torch.autograd.grad(total, [given[i] for i in which])


def differentiable(name, arguments):
    """Numbers of the arguments that have a gradient: not the table of angles."""
    skipped = (1,) if name == "rope" else ()
    return [
        i for i, a in enumerate(arguments) if isinstance(a, torch.Tensor) and a.is_floating_point() and i not in skipped
    ]


def definition_of(name):
    """The definition without outputs that have no gradient here (rstd, lse)."""
    keep = {"rmsnorm_forward": (0,), "rmsnorm_add_forward": (0, 2), "attention_forward": (0,)}.get(name)
    definition = op_definitions.DEFINITIONS[name]
    if name == "cast_to_bf16":
        return lambda x: x  # the gradient of rounding is that of the identity
    return definition if keep is None else lambda *a: tuple(definition(*a)[i] for i in keep)


def test_gradients():
    for name in DIFFERENTIABLE:
        for dtype in PRECISIONS:
            arguments = [leaf(a) for a in op_check.random_arguments(name, dtype, size=op_check.ODD)]
            which = differentiable(name, arguments)
            exact_arguments = op_check.for_definition(name, arguments)
            definition = definition_of(name)
            torch.manual_seed(1)
            outputs = op_check.as_tuple(definition(*exact_arguments))
            stored = torch.bfloat16 if name == "cast_to_bf16" else dtype
            douts = [torch.randn(o.shape).to(stored).double() for o in outputs]
            got = gradients(llama3_ops.OPS[name], arguments, which, douts)
            exact = gradients(definition, exact_arguments, which, douts)
            # gradients are computed from stored, rounded outputs (rstd, out, sum): twice the bound of one op
            worst = max(op_check.errors_of(name, "", g, e).share for g, e in zip(got, exact))
            names = [llama3_ops.OPS[name]._schema.arguments[i].name for i in which]
            limit = 2.0
            if name in op_check.ATTENTION and dtype == torch.bfloat16:
                # Where a query sees few keys, dq is a difference of nearly equal numbers, in PyTorch as here.
                theirs = gradients(op_definitions.attention, arguments, which, douts)
                limit = 1.5 * max(op_check.errors_of(name, "", g, e).share for g, e in zip(theirs, exact))
            text = f"{worst:.2f} of the bound <= {limit:.2f} ({', '.join(names)})"
            check(worst <= limit, f"gradient of {name}, {op_check.type_of(dtype)}", text)
            if dtype == torch.float32:
                finite_difference(name, definition, exact_arguments, which, douts, got)


def finite_difference(name, definition, arguments, which, douts, got):
    """The derivative along a random direction: central differences of the definition next to our gradient."""
    directions = [torch.randn(arguments[i].shape, dtype=torch.float64) for i in which]

    def along(step):
        moved = list(arguments)
        for i, d in zip(which, directions):
            moved[i] = moved[i] + step * d
        return sum((o * d).sum() for o, d in zip(op_check.as_tuple(definition(*moved)), douts)).item()

    step = 1e-5
    expected = (along(step) - along(-step)) / (2 * step)
    ours = sum((g.double() * d).sum().item() for g, d in zip(got, directions))
    size = sum(g.double().norm().item() for g in got)
    error = abs(ours - expected) / size
    check(error <= 1e-5, f"derivative of {name} by central differences", f"error {error:.1e} of the gradient <= 1e-5")


# ---------------------------------------------------------------- strides


def test_strides():
    wide = torch.randn(37, 100)
    dy, w, x = wide[:, 3:74], torch.randn(71, 19), torch.randn(37, 19)
    same(
        "linear_backward_input of a slice of columns",
        ops.linear_backward_input(dy, w),
        ops.linear_backward_input(dy.contiguous(), w),
    )
    same(
        "linear_backward_weight of a slice of columns",
        ops.linear_backward_weight(dy, x),
        ops.linear_backward_weight(dy.contiguous(), x),
    )
    y, narrow = wide.clone(), wide[:, 3:74].contiguous()
    ops.linear_add(y[:, 3:74], x, w)
    ops.linear_add(narrow, x, w)
    same("linear_add into a slice of columns", y[:, 3:74].contiguous(), narrow)
    same("linear_add leaves the other columns", y[:, 74:].contiguous(), wide[:, 74:].contiguous())
    qkv = torch.randn(2, 53, 8, 18)
    q, k, v = qkv.split((4, 2, 2), 2)
    same(
        "attention of slices of one tensor", ops.attention(q, k, v), ops.attention(*(t.contiguous() for t in (q, k, v)))
    )
    out, lse = ops.attention_forward(q, k, v)
    dout = torch.randn_like(out)
    d = ops.attention_backward(dout, out, lse, q, k, v)
    plain = ops.attention_backward(dout, out, lse, *(t.contiguous() for t in (q, k, v)))
    same("attention_backward of slices of one tensor", torch.cat(d, 2), torch.cat(plain, 2))
    table, positions = llama3_ops.rope_table(60, 18), torch.arange(53, dtype=torch.int32)
    before, rotated = qkv.clone(), ops.rope(q.contiguous(), table, positions)
    ops.rope_(qkv[:, :, :4], table, positions)
    same("rope_ of the first heads of each row", qkv[:, :, :4].contiguous(), rotated)
    same("rope_ leaves the other heads", qkv[:, :, 4:].contiguous(), before[:, :, 4:].contiguous())
    halves = dict(q_offset=0, q_split=13, q_gap=27)
    split = [ops.attention(torch.cat((q[:, :13], q[:, 40:]), 1).contiguous(), k, v, **halves)]
    whole = ops.attention(q, k, v)
    same("attention of two halves of a context-parallel rank", split[0], torch.cat((whole[:, :13], whole[:, 40:]), 1))
    docs = torch.arange(53, dtype=torch.int32)[None].repeat(2, 1) // 20
    c = op_check.check(None, "attention_forward", q, k, v, 0, 0, 0, docs, docs, time_it=False, quiet=True)
    check(c.ok, "attention within documents", f"{c.ours.worst.share:.2f} of the bound")


def same(name, got, expected):
    difference = (got.double() - expected.double()).abs().max().item()
    check(difference == 0, name, f"largest difference {difference:.1e}, expected 0")


# ---------------------------------------------------------------- errors


def refused(name, expected, pattern, function):
    """The call raises `expected` with one sentence that matches."""
    try:
        function()
    except Exception as error:
        text = str(error)
        ok = type(error) is expected and re.search(pattern, text) and "\n" not in text
        check(bool(ok), f"error: {name}", f"{type(error).__name__}: {text}")
    else:
        check(False, f"error: {name}", f"nothing was raised, expected {expected.__name__}: …{pattern}")


def test_errors():
    x, w = torch.randn(4, 6), torch.randn(6)
    ids = torch.zeros(4, dtype=torch.int32)
    table, positions = llama3_ops.rope_table(8, 4), torch.arange(4, dtype=torch.int32)
    head = torch.randn(1, 4, 2, 4)
    refused(
        "a weight of another size",
        ValueError,
        r"llama3.rmsnorm: weight has shape \(5,\), expected \(6,\)",
        lambda: ops.rmsnorm(x, torch.randn(5)),
    )
    refused(
        "a weight of another dtype",
        TypeError,
        r"rmsnorm: weight is torch.bfloat16, expected torch.float32, as x is",
        lambda: ops.rmsnorm(x, w.bfloat16()),
    )
    refused(
        "float64",
        TypeError,
        r"rmsnorm: x is torch.float64, expected torch.float32 or torch.bfloat16",
        lambda: ops.rmsnorm(x.double(), w.double()),
    )
    refused(
        "a transposed tensor",
        ValueError,
        r"swiglu: gate_up of shape \(6, 4\) has strides \(1, 6\), expected a contig",
        lambda: ops.swiglu(x.T),
    )
    refused(
        "rows whose elements are apart",
        ValueError,
        r"linear_backward_input: dy .* expected contiguous rows",
        lambda: ops.linear_backward_input(x.T, torch.randn(4, 3)),
    )
    short = torch.randn(2, 6, 2, 4)[:, :4]
    refused(
        "rows at different distances",
        ValueError,
        r"attention: k .* expected rows that are all the same distance",
        lambda: ops.attention(short.contiguous(), short, short.contiguous()),
    )
    refused(
        "overlapping rows",
        ValueError,
        r"linear_backward_weight: dy .* expected rows that are all the same distance",
        lambda: ops.linear_backward_weight(torch.randn(1, 6).expand(4, 6), x),
    )
    refused(
        "a tensor without data",
        ValueError,
        r"rmsnorm: weight is on meta, expected cpu, where x is",
        lambda: ops.rmsnorm(x, w.to("meta")),
    )
    refused(
        "ids of int64",
        TypeError,
        r"embedding: ids is torch.int64, expected torch.int32",
        lambda: ops.embedding(torch.randn(9, 6), ids.long()),
    )
    refused(
        "a matrix of three dimensions",
        ValueError,
        r"embedding: weight has shape \(1, 4, 6\), expected \(any, any\)",
        lambda: ops.embedding(x[None], ids),
    )
    refused(
        "a weight of other columns",
        ValueError,
        r"linear: weight has shape \(3, 5\), expected \(any, 6\)",
        lambda: ops.linear(x, torch.randn(3, 5)),
    )
    refused(
        "another number of rows",
        ValueError,
        r"linear_backward_weight: x has 3 rows, expected 4, as many as dy has",
        lambda: ops.linear_backward_weight(x, torch.randn(3, 2)),
    )
    refused(
        "an odd width",
        ValueError,
        r"swiglu: gate_up has rows of 5 elements, expected an even number",
        lambda: ops.swiglu(torch.randn(4, 5)),
    )
    refused(
        "a target beyond the vocabulary",
        ValueError,
        r"cross_entropy: targets has the value 6, expected less than 6",
        lambda: ops.cross_entropy(x, ids + 6),
    )
    refused(
        "logits in fp16",
        TypeError,
        r"cross_entropy: logits is torch.float16, expected torch.float32 or torch.bfloat16",
        lambda: ops.cross_entropy(x.half(), ids),
    )
    refused(
        "a position beyond the table",
        ValueError,
        r"rope: positions has the value 11, expected less than 8",
        lambda: ops.rope(head, table, positions + 8),
    )
    refused(
        "a negative position",
        ValueError,
        r"rope: positions has the value -1, expected 0 or more",
        lambda: ops.rope(head, table, positions - 1),
    )
    refused(
        "a table of other heads",
        ValueError,
        r"rope: cos_sin has shape \(8, 2, 3\), expected \(positions, 2, 2\)",
        lambda: ops.rope(head, llama3_ops.rope_table(8, 6), positions),
    )
    refused(
        "heads that do not divide",
        ValueError,
        r"attention: k has 2 heads, expected a number that divides q's 3",
        lambda: ops.attention(torch.randn(1, 4, 3, 4), head, head),
    )
    refused(
        "documents of queries alone",
        ValueError,
        r"attention: q_doc is given without k_doc",
        lambda: ops.attention(head, head, head, 0, 0, 0, positions[None]),
    )
    refused(
        "step 0",
        ValueError,
        r"adamw: step is 0, expected 1 or more",
        lambda: ops.adamw(*(w.clone() for _ in range(4)), 0.1, 0.9, 0.9, 1e-8, 0.0, 1.0, 0),
    )
    refused(
        "a copy in float16",
        TypeError,
        r"adamw: copy is torch.float16, expected torch.float32 or torch.bfloat16",
        lambda: ops.adamw(*(w.clone() for _ in range(4)), 0.1, 0.9, 0.9, 1e-8, 0.0, 1.0, 1, w.half()),
    )
    refused(
        "scales for other blocks",
        ValueError,
        r"dequantize: scales has shape \(2,\), expected \(1,\)",
        lambda: ops.dequantize(torch.zeros(64, dtype=torch.int8), torch.ones(2), torch.float32),
    )
    refused(
        "no pieces",
        ValueError,
        r"tree_sum: pieces has shape \(0, 3\), expected at least one piece",
        lambda: ops.tree_sum(torch.empty(0, 3)),
    )
    refused(
        "bytes that are no words",
        ValueError,
        r"fingerprint: x has 12 bytes, expected a multiple of 8",
        lambda: ops.fingerprint(torch.zeros(3)),
    )
    refused("an unknown op", ValueError, r"check: there is no op softmax", lambda: op_check.check(None, "softmax"))
    said = subprocess.run(
        [sys.executable, HERE / "llama3_ops.py", "check", "rmsnorm", "nowhere.py:f"], capture_output=True, text=True
    )
    ok = said.returncode == 1 and said.stderr == "error: nowhere.py does not exist\n"
    check(ok, "error: a file that does not exist", said.stderr.strip())
    empty = ops.rmsnorm(torch.empty(0, 6), w), ops.linear_backward_weight(torch.empty(0, 3), torch.empty(0, 6))
    check(
        empty[0].shape == (0, 6) and not empty[1].any(),
        "no rows are no error",
        f"shapes {[tuple(e.shape) for e in empty]}",
    )
    x, weight = torch.empty(0, 64), torch.ones(40, 64, requires_grad=True)
    ops.linear(x, weight).sum().backward()
    check(not weight.grad.any(), "an empty batch trains, with a gradient of zero", float(weight.grad.abs().sum()))
    sums = ops.linear(torch.empty(40, 0), torch.empty(64, 0)), ops.linear_fp32(torch.empty(3, 0), torch.empty(5, 0))
    sums += (ops.linear_backward_input(torch.empty(4, 0), torch.empty(0, 6)),)
    check(not any(y.any() for y in sums), "sums of nothing are zero", [tuple(y.shape) for y in sums])


# ---------------------------------------------------------------- check itself


def scaled_row(dout, x, rstd, weight, dresidual):
    dx, dw = ops.rmsnorm_backward(dout, x, rstd, weight, dresidual)
    dx[17] *= 1.01
    return dx, dw


def without_residual(dout, x, rstd, weight, dresidual):
    return ops.rmsnorm_backward(dout, x, rstd, weight)


def writes_input(dout, x, rstd, weight, dresidual):
    result = ops.rmsnorm_backward(dout, x, rstd, weight, dresidual)
    dout.zero_()
    return result


def nan_in_one(dout, x, rstd, weight, dresidual):
    dx, dw = ops.rmsnorm_backward(dout, x, rstd, weight, dresidual)
    dw[3] = torch.nan
    return dx, dw


def as_if_contiguous(dy, weight):
    """Reads dy by its address, as a kernel that ignores strides does."""
    flat = torch.as_strided(dy, dy.shape, (dy.shape[1], 1))
    return flat @ weight


def test_check():
    given = op_check.random_arguments("rmsnorm_backward", size=op_check.ODD)

    def checked(function, name="rmsnorm_backward", arguments=given):
        return op_check.check(function, name, *arguments, time_it=False, quiet=True)

    right = checked(op_definitions.rmsnorm_backward)
    check(
        right.ok and right.yours.ok,
        "check accepts the formula in PyTorch",
        f"{right.yours.worst.share:.2f} of the bound",
    )
    wrong = checked(scaled_row)
    worst = wrong.yours.worst
    ok = not wrong.ok and wrong.ours.ok and worst.result == "dx" and worst.row == (17,)
    check(
        ok, "check finds a row that is 1 % off", f"{worst.result}, row {worst.row}, {worst.share:.0f} times the bound"
    )
    c = checked(without_residual)
    check(
        not c.ok and c.yours.worst.result == "dx",
        "check finds a missing term",
        f"{c.yours.worst.share:.0f} times the bound",
    )
    c = checked(writes_input)
    check(not c.ok and "changed dout" in c.yours.problem, "check finds a changed input", c.yours.problem)
    c = checked(nan_in_one)
    check(not c.ok and c.yours.worst.at == (3,), "check finds a NaN", f"{c.yours.worst.result}{list(c.yours.worst.at)}")
    c = checked(lambda *a: 1 / 0)
    check(not c.ok and "ZeroDivisionError" in c.yours.problem, "a function that raises is reported", c.yours.problem)
    c = checked(lambda *a: given[0])
    check(
        not c.ok and "1 results, expected 2: dx, dw" in c.yours.problem, "a missing result is reported", c.yours.problem
    )
    c = checked(lambda *a: (given[0][:3], given[3]))
    check(not c.ok and "dx has shape (3, 301)" in c.yours.problem, "a wrong shape is reported", c.yours.problem)
    c = checked(lambda *a: (given[0].double(), given[3]))
    check(
        not c.ok and "dx is float64, expected float32" in c.yours.problem, "a wrong dtype is reported", c.yours.problem
    )
    slices = op_check.random_arguments("linear_backward_input", size=op_check.ODD)
    c = checked(as_if_contiguous, "linear_backward_input", slices)
    check(not c.ok, "check finds ignored strides", f"{c.yours.worst.share:.0f} times the bound")
    moved = checked(lambda x, by: None, "scale", op_check.random_arguments("scale", size=op_check.ODD))
    check(not moved.ok, "check finds an argument that is not changed", f"{moved.yours.worst.share:.0f} times the bound")
    with contextlib.redirect_stdout(io.StringIO()) as said:
        c = op_check.check(op_definitions.residual_add, "residual_add", size=op_check.ODD)
    text = said.getvalue()
    ok = (
        all(word in text for word in ("yours", "ours", "PyTorch", "roofline", "strides", "worst row"))
        and c.ours.seconds > 0
    )
    check(ok and 0 < c.ours.roofline, "check prints errors, times and the roofline", text.splitlines()[2].strip())


def test_threads():
    """Calls from several threads at once, as autograd's may be."""
    from concurrent.futures import ThreadPoolExecutor

    x, w = torch.randn(64, 301), torch.randn(301)
    expected = ops.rmsnorm(x, w)
    with ThreadPoolExecutor(4) as pool:
        equal = [torch.equal(y, expected) for y in pool.map(lambda _: ops.rmsnorm(x, w), range(200))]
    check(all(equal), "calls from four threads", f"{sum(equal)} of 200 have the same bits")


def test_compile():
    x, w = torch.randn(5, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    compiled = torch.compile(lambda x, w: ops.rmsnorm(x, w).square().sum(), backend="aot_eager", fullgraph=True)
    got = torch.autograd.grad(compiled(x, w), (x, w))
    expected = torch.autograd.grad(ops.rmsnorm(x, w).square().sum(), (x, w))
    ok = all(torch.equal(a, b) for a, b in zip(got, expected))
    check(ok, "torch.compile (aot_eager) traces rmsnorm and its backward", "the same bits as eager")


def main():
    torch.manual_seed(0)
    for name, test in list(globals().items()):
        if name.startswith("test_") and wanted in name:
            try:
                test()
            except Exception:
                check(False, name, traceback.format_exc(limit=-3).replace("\n", " | "))
    if not sum(results.values()):
        sys.exit(f"error: no test has '{wanted}' in its name")
    print(f"{results['passed']} passed, {results['failed']} failed")
    return results["failed"] > 0


if __name__ == "__main__":
    sys.exit(main())
