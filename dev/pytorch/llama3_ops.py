"""llama3_ops.py: the program's ops as PyTorch ops: torch.ops.llama3.rmsnorm(x, weight, eps) and so on.

    make ops                                            # builds build/libllama3_ops.so
    python dev/pytorch/llama3_ops.py list               # every op with its contract, from lib/ops/ops.h
    python dev/pytorch/llama3_ops.py check rmsnorm      # our kernel against a definition in float64
    python dev/pytorch/llama3_ops.py check rmsnorm my.py:my_rmsnorm     # your function against both
    python dev/pytorch/llama3_ops.py check rmsnorm_forward my.so        # a library that has your C or CUDA function

In Python: `import llama3_ops`, with dev/pytorch in the path, then torch.ops.llama3.NAME and llama3_ops.check.

Names are those of lib/ops/ops.h without `_forward`, except that rmsnorm_forward, rmsnorm_add_forward and
attention_forward are there, too: they also return what their backward needs (rstd, lse). An op that changes its
arguments in the program does so here: adamw, scale, linear_add, …; if there are both forms, the one that changes an
argument ends in `_`, as in PyTorch. linear, embedding, rmsnorm, residual_add, rope, attention, swiglu, cross_entropy
and cast_to_bf16 have autograd formulas, which call the program's backward ops.

Tensors are used where they are. A tensor's dtype, float32 or bfloat16, chooses the precision of the library, its device
the CPU's or the GPU's. Every op has a fake implementation: it is the same function, which then stops before the call.
Values of indices are checked on a CPU only, since a GPU would have to be waited for.
"""

import ctypes
import sys
import threading
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Optional

import op_contracts

op_contracts.limit_spinning()
try:
    import torch
    from torch import Tensor
except ImportError:
    if __name__ == "__main__" and sys.argv[1:] == ["list"]:
        print("note: without PyTorch, only the C contracts are listed", file=sys.stderr)
        op_contracts.print_contracts()
        sys.exit()
    sys.exit(
        "error: this Python has no PyTorch: run make ops-deps and use build/python/bin/python, or install it "
        "(pip install torch)"
    )

PRECISION = {torch.float32: "fp32", torch.bfloat16: "bf16"}
FLOAT32, INT32 = torch.float32, torch.int32


def check_precision(what, dtype):
    if dtype not in PRECISION:
        raise TypeError(f"{what} is {dtype}, expected torch.float32 or torch.bfloat16")

# ---------------------------------------------------------------- calls of the shared library

libraries = {}  # opened so far, by (path, precision, threads, GPU)
lock = threading.RLock()  # a handle is for one call at a time, and autograd's threads call, too
state = threading.local()  # .fake: shapes only; .path: the library of use_library; .last: the library called last


@contextmanager
def use_library(path):
    """Within this context, ops are called in another shared library, which has the functions of build/libllama3_ops.so.
    dev/kernels/mine builds such libraries."""
    before = getattr(state, "path", None)
    state.path = Path(path).resolve()
    try:
        yield
    finally:
        state.path = before


def library(device, dtype):
    path = getattr(state, "path", None) or op_contracts.library_path(device.type)
    key = (path, PRECISION[dtype], torch.get_num_threads(), device.index or 0)
    if key not in libraries:
        libraries[key] = op_contracts.Library(*key)
    return libraries[key]


def address(argument):
    return argument.data_ptr() if isinstance(argument, Tensor) else argument


def call(contract, tensor, dtype, *arguments):
    """Calls the op of this name where `tensor` is, in the precision of `dtype`. Does nothing for fake tensors."""
    if getattr(state, "fake", False) or tensor.numel() == 0:
        return
    with lock:
        lib = library(tensor.device, dtype)
        if tensor.device.type == "cuda":
            lib.use_stream(torch.cuda.current_stream(tensor.device).cuda_stream)
        lib(contract, *map(address, arguments))
        state.last = lib


# ---------------------------------------------------------------- what arguments must be


class Arguments:
    """Checks the arguments of one call. Errors name the op, the argument, what was given and what was expected."""

    def __init__(self, op, name, first, dtypes=tuple(PRECISION)):
        self.op, self.name, self.first = op.removesuffix("_forward"), name, first
        if first.dtype not in dtypes:
            raise TypeError(f"{self.of(name)} is {first.dtype}, expected {' or '.join(map(str, dtypes))}")
        if first.device.type not in ("cpu", "cuda", "meta"):
            raise ValueError(f"{self.of(name)} is on {first.device}, expected cpu or cuda")
        self.dtype = first.dtype

    def of(self, name):
        return f"llama3.{self.op}: {name}"

    def wrong(self, name, given, expected):
        return ValueError(f"{self.of(name)} {given}, expected {expected}")

    def is_like(self, name, tensor, dtype):
        """Device and dtype (None: that of the first argument)."""
        if tensor.dtype != (dtype or self.dtype):
            reason = "" if dtype else f", as {self.name} is"
            raise TypeError(f"{self.of(name)} is {tensor.dtype}, expected {dtype or self.dtype}{reason}")
        if tensor.device != self.first.device:
            raise self.wrong(name, f"is on {tensor.device}", f"{self.first.device}, where {self.name} is")

    def contiguous(self, name, tensor):
        if not tensor.is_contiguous():
            given = f"of shape {tuple(tensor.shape)} has strides {tensor.stride()}"
            raise self.wrong(name, given, f"a contiguous tensor: give {name}.contiguous()")

    def tensor(self, name, tensor, shape, dtype=None):
        """A contiguous tensor of this shape, or None."""
        if tensor is None:
            return
        self.is_like(name, tensor, dtype)
        if tuple(tensor.shape) != tuple(shape):
            reason = f"{tuple(shape)}, since {self.name} has shape {tuple(self.first.shape)}"
            raise self.wrong(name, f"has shape {tuple(tensor.shape)}", reason)
        self.contiguous(name, tensor)

    def matrix(self, name, tensor, rows=None, columns=None, dtype=None):
        """A contiguous matrix. rows, columns: what they must be; None: any."""
        self.is_like(name, tensor, dtype)
        is_wrong = tensor.dim() != 2 or (rows is not None and tensor.shape[0] != rows)
        if is_wrong or (columns is not None and tensor.shape[1] != columns):
            expected = f"({'any' if rows is None else rows}, {'any' if columns is None else columns})"
            if tensor is not self.first:
                expected += f", since {self.name} has shape {tuple(self.first.shape)}"
            raise self.wrong(name, f"has shape {tuple(tensor.shape)}", expected)
        self.contiguous(name, tensor)
        return tuple(tensor.shape)

    def dims(self, name, tensor, least, what):
        if tensor.dim() < least:
            raise self.wrong(name, f"has shape {tuple(tensor.shape)}", f"at least {least} dimensions: {what}")

    def rows(self, name, tensor, dtype=None):
        """The rows and columns of a contiguous tensor (…, columns)."""
        self.is_like(name, tensor, dtype)
        self.dims(name, tensor, 1, "(…, columns)")
        self.contiguous(name, tensor)
        return count(tensor.shape[:-1]), tensor.shape[-1]

    def row_stride(self, name, tensor, inner=1):
        """Elements from a row to the next. A row is the last `inner` dimensions, which are contiguous; all rows are the
        same distance apart, as those of a slice of columns are."""
        size = stride = 1
        given = f"of shape {tuple(tensor.shape)} has strides {tensor.stride()}"
        if not tensor.numel():  # it may have any strides
            return count(tensor.shape[-inner:])
        for i in range(tensor.dim() - 1, tensor.dim() - inner - 1, -1):
            if tensor.shape[i] != 1 and tensor.stride(i) != size:
                raise self.wrong(name, given, f"contiguous rows: give {name}.contiguous()")
            size *= tensor.shape[i]
        stride, rows = size, 1
        for i in range(tensor.dim() - inner - 1, -1, -1):
            if tensor.shape[i] == 1:
                continue
            if rows == 1:
                stride = tensor.stride(i)
            if tensor.stride(i) != stride * rows or stride < size:
                raise self.wrong(name, given, f"rows that are all the same distance apart: give {name}.contiguous()")
            rows *= tensor.shape[i]
        return stride

    def within(self, name, tensor, least, limit, what):
        """Indices on a CPU must be from `least` (None: any) to below `limit`."""
        if getattr(state, "fake", False) or tensor.device.type != "cpu" or not tensor.numel():
            return
        smallest, largest = int(tensor.min()), int(tensor.max())
        if largest >= limit:
            raise self.wrong(name, f"has the value {largest}", f"less than {limit}, {what}")
        if least is not None and smallest < least:
            raise self.wrong(name, f"has the value {smallest}", f"{least} or more")

    def require(self, ok, name, given, expected):
        if not ok:
            raise self.wrong(name, given, expected)


def count(shape):
    product = 1
    for n in shape:
        product *= n
    return product


# ---------------------------------------------------------------- registration

OPS = {}  # name: the op's OpOverload
CALLS = {}  # name: the contract of lib/ops/ops.h that it calls
composites = torch.library.Library("llama3", "FRAGMENT")


def op(contract, changes=()):
    """Registers a function as torch.ops.llama3.NAME. It calls the op `contract` of lib/ops/ops.h and changes the
    arguments named in `changes`. The same function is the fake implementation."""

    def register(function):
        @wraps(function)
        def fake(*arguments, **named):
            state.fake = True
            try:
                return function(*arguments, **named)
            finally:
                state.fake = False

        name = function.__name__
        made = torch.library.custom_op(f"llama3::{name}", function, mutates_args=changes)
        made.register_fake(fake)
        OPS[name] = getattr(torch.ops.llama3, name).default
        CALLS[name] = contract
        return made

    return register


def composite(schema, contract, function):
    """Registers an op that is made of others, and inherits their autograd formulas."""
    name = schema.split("(")[0]
    composites.define(schema)
    composites.impl(name, function, "CompositeImplicitAutograd")
    OPS[name] = getattr(torch.ops.llama3, name).default
    CALLS[name] = contract


def first_of(name):
    return lambda *arguments, **named: getattr(torch.ops.llama3, name)(*arguments, **named)[0]


# ---------------------------------------------------------------- linear layers


def logits_of(logits, stride):
    """The struct that calls receive."""
    if getattr(state, "fake", False):
        return None
    is_bf16 = int(logits.dtype == torch.bfloat16)  # Dtype in lib/device/base.h
    return op_contracts.Logits(logits.data_ptr(), stride, is_bf16)


def linear_of(contract, x, weight, dtype):
    a = Arguments(contract, "x", x)
    N, IC = a.rows("x", x)
    OC, _ = a.matrix("weight", weight, columns=IC)
    y = x.new_empty((*x.shape[:-1], OC), dtype=dtype)
    if not IC:  # a sum of nothing
        return y.zero_()
    out = logits_of(y, OC) if contract == "linear_forward_logits" else y
    call(contract, y, x.dtype, out, x, weight, N, IC, OC)
    return y


@op("linear_forward")
def linear(x: Tensor, weight: Tensor) -> Tensor:
    return linear_of("linear_forward", x, weight, x.dtype)


@op("linear_forward_logits")
def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    return linear_of("linear_forward_logits", x, weight, FLOAT32)


@op("linear_backward_input")
def linear_backward_input(dy: Tensor, weight: Tensor) -> Tensor:
    a = Arguments("linear_backward_input", "dy", dy)
    a.dims("dy", dy, 1, "(…, OC)")
    N, OC, stride = count(dy.shape[:-1]), dy.shape[-1], a.row_stride("dy", dy)
    _, IC = a.matrix("weight", weight, rows=OC)
    dx = dy.new_empty((*dy.shape[:-1], IC))
    if not OC:
        return dx.zero_()
    call("linear_backward_input", dx, dy.dtype, dx, dy, stride, weight, N, IC, OC)
    return dx


def weight_gradient(op_name, dw, dy, x, accumulate):
    a = Arguments(op_name, "dy", dy)
    a.dims("dy", dy, 1, "(…, OC)")
    N, OC, stride = count(dy.shape[:-1]), dy.shape[-1], a.row_stride("dy", dy)
    rows, IC = a.rows("x", x)
    a.require(rows == N, "x", f"has {rows} rows", f"{N}, as many as dy has")
    if dw is None:
        dw = dy.new_empty((OC, IC), dtype=FLOAT32)
    a.tensor("dw", dw, (OC, IC), FLOAT32)
    if not N:
        return dw if accumulate else dw.zero_()
    call("linear_backward_weight", dw, dy.dtype, dw, dy, stride, x, N, IC, OC, accumulate)
    return dw


@op("linear_backward_weight")
def linear_backward_weight(dy: Tensor, x: Tensor) -> Tensor:
    return weight_gradient("linear_backward_weight", None, dy, x, 0)


@op("linear_backward_weight", changes=("dw",))
def linear_backward_weight_(dw: Tensor, dy: Tensor, x: Tensor) -> None:
    weight_gradient("linear_backward_weight_", dw, dy, x, 1)


@op("linear_forward_add", changes=("y",))
def linear_add(y: Tensor, x: Tensor, weight: Tensor) -> None:
    a = Arguments("linear_add", "x", x)
    N, IC = a.rows("x", x)
    OC, _ = a.matrix("weight", weight, columns=IC)
    a.is_like("y", y, None)
    expected = (*x.shape[:-1], OC)
    a.require(tuple(y.shape) == expected, "y", f"has shape {tuple(y.shape)}", f"{expected}")
    if not IC:
        return
    call("linear_forward_add", y, x.dtype, y, a.row_stride("y", y), x, weight, N, IC, OC)


@op("linear_backward_input_add", changes=("dx",))
def linear_backward_input_add(dx: Tensor, dy: Tensor, weight: Tensor) -> None:
    a = Arguments("linear_backward_input_add", "dy", dy)
    N, OC = a.rows("dy", dy)
    _, IC = a.matrix("weight", weight, rows=OC)
    a.tensor("dx", dx, (*dy.shape[:-1], IC))
    if not OC:
        return
    call("linear_backward_input_add", dx, dy.dtype, dx, dy, weight, N, IC, OC)


def save_inputs(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2])


def linear_gradients(ctx, dy):
    x, weight = ctx.saved_tensors
    ops, dy = torch.ops.llama3, dy.to(x.dtype).contiguous()
    dx = ops.linear_backward_input(dy, weight) if ctx.needs_input_grad[0] else None
    dw = ops.linear_backward_weight(dy, x).to(weight.dtype) if ctx.needs_input_grad[1] else None
    return dx, dw


linear.register_autograd(linear_gradients, setup_context=save_inputs)
linear_fp32.register_autograd(linear_gradients, setup_context=save_inputs)

# ---------------------------------------------------------------- LoRA and int8


@op("scale", changes=("x",))
def scale(x: Tensor, by: float) -> None:
    Arguments("scale", "x", x).contiguous("x", x)
    call("scale", x, x.dtype, x, by, x.numel())


@op("adapter_merge", changes=("w",))
def adapter_merge(w: Tensor, a: Tensor, b: Tensor, by: float) -> None:
    check = Arguments("adapter_merge", "w", w, (FLOAT32,))
    OC, IC = check.matrix("w", w)
    R, _ = check.matrix("a", a, columns=IC)
    check.tensor("b", b, (OC, R))
    call("adapter_merge", w, FLOAT32, w, a, b, by, R, IC, OC)


@op("dequantize")
def dequantize(quantized: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    a = Arguments("dequantize", "quantized", quantized, (torch.int8,))
    check_precision("llama3.dequantize: dtype", dtype)
    a.contiguous("quantized", quantized)
    blocks = (quantized.numel() + op_contracts.INT8_BLOCK - 1) // op_contracts.INT8_BLOCK
    a.tensor("scales", scales, (blocks,), FLOAT32)
    out = torch.empty_like(quantized, dtype=dtype)
    call("dequantize", out, dtype, out, quantized, scales, out.numel())
    return out


# ---------------------------------------------------------------- embedding


@op("embedding_forward")
def embedding(weight: Tensor, ids: Tensor, first: int = 0) -> Tensor:
    a = Arguments("embedding", "weight", weight)
    V, C = a.matrix("weight", weight)
    a.tensor("ids", ids, ids.shape, INT32)
    x = weight.new_empty((*ids.shape, C))
    call("embedding_forward", x, weight.dtype, x, weight, ids, first, ids.numel(), C, V)
    return x


def embedding_gradient(op_name, dembed, dx, ids, first):
    a = Arguments(op_name, "dx", dx)
    N, C = a.rows("dx", dx)
    a.tensor("ids", ids, dx.shape[:-1], INT32)
    V, _ = a.matrix("dembed", dembed, columns=C, dtype=FLOAT32)
    if N:
        call("embedding_backward", dembed, dx.dtype, dembed, dx, ids, first, N, C, V)
    return dembed


@op("embedding_backward")
def embedding_backward(dx: Tensor, ids: Tensor, V: int, first: int = 0) -> Tensor:
    Arguments("embedding_backward", "dx", dx).dims("dx", dx, 1, "(…, C)")
    return embedding_gradient("embedding_backward", dx.new_zeros((V, dx.shape[-1]), dtype=FLOAT32), dx, ids, first)


@op("embedding_backward", changes=("dembed",))
def embedding_backward_(dembed: Tensor, dx: Tensor, ids: Tensor, first: int = 0) -> None:
    embedding_gradient("embedding_backward_", dembed, dx, ids, first)


def save_embedding(ctx, inputs, output):
    weight, ids, ctx.first = inputs
    ctx.save_for_backward(ids)
    ctx.rows, ctx.dtype = weight.shape[0], weight.dtype


def embedding_gradients(ctx, dx):
    dw = torch.ops.llama3.embedding_backward(dx.contiguous(), ctx.saved_tensors[0], ctx.rows, ctx.first)
    return dw.to(ctx.dtype), None, None


embedding.register_autograd(embedding_gradients, setup_context=save_embedding)

# ---------------------------------------------------------------- RMSNorm and the residual stream


@op("rmsnorm_forward")
def rmsnorm_forward(x: Tensor, weight: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    a = Arguments("rmsnorm_forward", "x", x)
    N, C = a.rows("x", x)
    a.tensor("weight", weight, (C,))
    out, rstd = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=FLOAT32)
    call("rmsnorm_forward", out, x.dtype, out, rstd, None, x, None, weight, eps, N, C)
    return out, rstd


@op("rmsnorm_forward")
def rmsnorm_add_forward(x: Tensor, delta: Tensor, weight: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor, Tensor]:
    a = Arguments("rmsnorm_add_forward", "x", x)
    N, C = a.rows("x", x)
    a.tensor("delta", delta, x.shape)
    a.tensor("weight", weight, (C,))
    out, total, rstd = torch.empty_like(x), torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=FLOAT32)
    call("rmsnorm_forward", out, x.dtype, out, rstd, total, x, delta, weight, eps, N, C)
    return out, rstd, total


def rmsnorm_gradient(op_name, dx, dw, dout, x, rstd, weight, dresidual):
    a = Arguments(op_name, "x", x)
    N, C = a.rows("x", x)
    a.tensor("dout", dout, x.shape)
    a.tensor("rstd", rstd, x.shape[:-1], FLOAT32)
    a.tensor("weight", weight, (C,))
    a.tensor("dresidual", dresidual, x.shape)
    a.tensor("dx", dx, x.shape)
    a.tensor("dw", dw, (C,), FLOAT32)
    call("rmsnorm_backward", dx, x.dtype, dx, dw, dout, dresidual, x, rstd, weight, N, C)
    return dx, dw


@op("rmsnorm_backward")
def rmsnorm_backward(
    dout: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, dresidual: Optional[Tensor] = None
) -> tuple[Tensor, Tensor]:
    dw = torch.zeros_like(weight, dtype=FLOAT32)
    return rmsnorm_gradient("rmsnorm_backward", torch.empty_like(x), dw, dout, x, rstd, weight, dresidual)


@op("rmsnorm_backward", changes=("dx", "dw"))
def rmsnorm_backward_(dx: Tensor, dw: Optional[Tensor], dout: Tensor, x: Tensor, rstd: Tensor, weight: Tensor) -> None:
    """dx holds the gradient of the residual connection before, as in the program's training step."""
    rmsnorm_gradient("rmsnorm_backward_", dx, dw, dout, x, rstd, weight, dx)


def save_rmsnorm(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], output[1], inputs[1])
    ctx.mark_non_differentiable(output[1])


def save_rmsnorm_add(ctx, inputs, output):
    ctx.save_for_backward(output[2], output[1], inputs[2])
    ctx.mark_non_differentiable(output[1])


def rmsnorm_gradients(ctx, dout, drstd):
    x, rstd, weight = ctx.saved_tensors
    dx, dw = torch.ops.llama3.rmsnorm_backward(dout.contiguous(), x, rstd, weight)
    return dx, dw.to(weight.dtype), None


def rmsnorm_add_gradients(ctx, dout, drstd, dtotal):
    total, rstd, weight = ctx.saved_tensors
    d, dw = torch.ops.llama3.rmsnorm_backward(dout.contiguous(), total, rstd, weight, dtotal.contiguous())
    return d, d.clone(), dw.to(weight.dtype), None


def rmsnorm_add(x, delta, weight, eps=1e-5):
    out, _, total = torch.ops.llama3.rmsnorm_add_forward(x, delta, weight, eps)
    return out, total


rmsnorm_forward.register_autograd(rmsnorm_gradients, setup_context=save_rmsnorm)
rmsnorm_add_forward.register_autograd(rmsnorm_add_gradients, setup_context=save_rmsnorm_add)
composite("rmsnorm(Tensor x, Tensor weight, float eps=1e-5) -> Tensor", "rmsnorm_forward", first_of("rmsnorm_forward"))
composite(
    "rmsnorm_add(Tensor x, Tensor delta, Tensor weight, float eps=1e-5) -> (Tensor, Tensor)",
    "rmsnorm_forward",
    rmsnorm_add,
)


@op("residual_add")
def residual_add(x: Tensor, delta: Tensor) -> Tensor:
    a = Arguments("residual_add", "x", x)
    a.contiguous("x", x)
    a.tensor("delta", delta, x.shape)
    out = torch.empty_like(x)
    call("residual_add", out, x.dtype, out, x, delta, x.numel())
    return out


residual_add.register_autograd(lambda ctx, d: (d, d))

# ---------------------------------------------------------------- rotary position embedding


def rope_table(positions, head_size, theta=500000.0, device="cpu"):
    """cos_sin (positions, 2, head_size / 2) for rope, without scaling."""
    frequency = theta ** (-torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * frequency
    return torch.stack((angles.cos(), angles.sin()), 1).float().to(device)


def rotate(contract, op_name, x, cos_sin, positions):
    """Rotates x (…, T, heads, HD) in place."""
    a = Arguments(op_name, "x", x)
    a.dims("x", x, 3, "(…, T, heads, HD)")
    T, heads, HD = x.shape[-3:]
    a.require(HD % 2 == 0, "x", f"has heads of {HD} elements", "an even number")
    a.is_like("cos_sin", cos_sin, FLOAT32)
    shape = tuple(cos_sin.shape)
    ok = len(shape) == 3 and shape[1:] == (2, HD // 2)
    a.require(ok, "cos_sin", f"has shape {shape}", f"(positions, 2, {HD // 2}), since x has heads of {HD} elements")
    a.contiguous("cos_sin", cos_sin)
    a.tensor("positions", positions, (T,), INT32)
    a.within("positions", positions, 0, shape[0], "the number of positions that cos_sin has")
    call(contract, x, x.dtype, x, a.row_stride("x", x, 2), cos_sin, positions, count(x.shape[:-2]), T, heads, HD)


def rope_copy(contract, op_name, x, cos_sin, positions):
    out = x.clone(memory_format=torch.contiguous_format)
    rotate(contract, op_name, out, cos_sin, positions)
    return out


@op("rope_forward")
def rope(x: Tensor, cos_sin: Tensor, positions: Tensor) -> Tensor:
    return rope_copy("rope_forward", "rope", x, cos_sin, positions)


@op("rope_backward")
def rope_backward(d: Tensor, cos_sin: Tensor, positions: Tensor) -> Tensor:
    return rope_copy("rope_backward", "rope_backward", d, cos_sin, positions)


@op("rope_forward", changes=("x",))
def rope_(x: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
    rotate("rope_forward", "rope_", x, cos_sin, positions)


@op("rope_backward", changes=("d",))
def rope_backward_(d: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
    rotate("rope_backward", "rope_backward_", d, cos_sin, positions)


def save_rope(ctx, inputs, output):
    ctx.save_for_backward(*inputs[1:])


def rope_gradients(ctx, d):
    return torch.ops.llama3.rope_backward(d, *ctx.saved_tensors), None, None


rope.register_autograd(rope_gradients, setup_context=save_rope)

# ---------------------------------------------------------------- attention


def attention_shape(op_name, q, k, v, q_offset, q_split, q_gap, q_doc, k_doc):
    """Checks q (B, Tq, NH, HD), k and v (B, Tk, NKV, HD), and returns the checker and the AttentionShape."""
    a = Arguments(op_name, "q", q)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        a.is_like(name, tensor, None)
        a.require(tensor.dim() == 4, name, f"has shape {tuple(tensor.shape)}", "4 dimensions: (B, T, heads, HD)")
    (B, Tq, NH, HD), (_, Tk, NKV, _) = q.shape, k.shape
    for name, tensor in (("k", k), ("v", v)):
        shape = (B, Tk, NKV, HD)
        given, expected = f"has shape {tuple(tensor.shape)}", f"{shape}, since q has shape {tuple(q.shape)}"
        a.require(tuple(tensor.shape) == shape, name, given, expected)
    a.require(NKV > 0 and NH % NKV == 0, "k", f"has {NKV} heads", f"a number that divides q's {NH} heads")
    a.require(q.device.type != "cuda" or HD <= 256, "q", f"has heads of {HD} elements", "at most 256 on a GPU")
    a.require(q_gap >= 0, "q_gap", f"is {q_gap}", "0 or more")
    a.require(0 <= q_split <= Tq, "q_split", f"is {q_split}", f"0 to {Tq}, the number of queries")
    a.require(
        (q_doc is None) == (k_doc is None), "q_doc", "is given without k_doc, or k_doc without it", "both or none"
    )
    a.tensor("q_doc", q_doc, (B, Tq), INT32)
    a.tensor("k_doc", k_doc, (B, Tk), INT32)
    strides = [a.row_stride(name, t, 2) for name, t in (("q", q), ("k", k), ("v", v))]
    if getattr(state, "fake", False):
        return a, None
    docs = [d.data_ptr() if d is not None else None for d in (q_doc, k_doc)]
    shape = op_contracts.AttentionShape(B, Tq, Tk, NH, NKV, HD, q_offset, q_split, q_gap, *docs, *strides, NH * HD)
    return a, ctypes.byref(shape)


@op("attention_forward")
def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offset: int = 0,
    q_split: int = 0,
    q_gap: int = 0,
    q_doc: Optional[Tensor] = None,
    k_doc: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor]:
    _, shape = attention_shape("attention_forward", q, k, v, q_offset, q_split, q_gap, q_doc, k_doc)
    B, Tq, NH, HD = q.shape
    out, lse = q.new_empty((B, Tq, NH, HD)), q.new_empty((B, NH, Tq), dtype=FLOAT32)
    call("attention_forward", out, q.dtype, out, lse, q, k, v, shape)
    return out, lse


@op("attention_backward")
def attention_backward(
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offset: int = 0,
    q_split: int = 0,
    q_gap: int = 0,
    q_doc: Optional[Tensor] = None,
    k_doc: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor, Tensor]:
    a, shape = attention_shape("attention_backward", q, k, v, q_offset, q_split, q_gap, q_doc, k_doc)
    a.tensor("dout", dout, q.shape)
    a.tensor("out", out, q.shape)
    a.tensor("lse", lse, (q.shape[0], q.shape[2], q.shape[1]), FLOAT32)
    # laid out as q, k and v are, also if these are slices of one tensor; the memory between slices is not written
    dq, dk, dv = (torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in (q, k, v))
    if q.numel() == 0:
        return dq, dk.zero_(), dv.zero_()
    call("attention_backward", dq, q.dtype, dq, dk, dv, dout, out, lse, q, k, v, shape)
    return dq, dk, dv


def save_attention(ctx, inputs, output):
    q, k, v, *ctx.positions, q_doc, k_doc = inputs
    ctx.save_for_backward(q, k, v, *output, q_doc, k_doc)
    ctx.mark_non_differentiable(output[1])


def attention_gradients(ctx, dout, dlse):
    q, k, v, out, lse, *docs = ctx.saved_tensors
    d = torch.ops.llama3.attention_backward(dout.contiguous(), out, lse, q, k, v, *ctx.positions, *docs)
    return (*d, None, None, None, None, None)


attention_forward.register_autograd(attention_gradients, setup_context=save_attention)
composite(
    "attention(Tensor q, Tensor k, Tensor v, SymInt q_offset=0, SymInt q_split=0, SymInt q_gap=0, Tensor? q_doc=None, "
    "Tensor? k_doc=None) -> Tensor",
    "attention_forward",
    first_of("attention_forward"),
)

# ---------------------------------------------------------------- SwiGLU


@op("swiglu_forward")
def swiglu(gate_up: Tensor) -> Tensor:
    a = Arguments("swiglu", "gate_up", gate_up)
    N, width = a.rows("gate_up", gate_up)
    a.require(width % 2 == 0, "gate_up", f"has rows of {width} elements", "an even number: the gate's F, then up's F")
    h = gate_up.new_empty((*gate_up.shape[:-1], width // 2))
    call("swiglu_forward", h, h.dtype, h, gate_up, N, width // 2)
    return h


@op("swiglu_backward")
def swiglu_backward(dh: Tensor, gate_up: Tensor) -> Tensor:
    a = Arguments("swiglu_backward", "dh", dh)
    N, F = a.rows("dh", dh)
    a.tensor("gate_up", gate_up, (*dh.shape[:-1], 2 * F))
    d = torch.empty_like(gate_up)
    call("swiglu_backward", d, dh.dtype, d, dh, gate_up, N, F)
    return d


def save_first(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])


def swiglu_gradients(ctx, dh):
    return torch.ops.llama3.swiglu_backward(dh.contiguous(), *ctx.saved_tensors)


swiglu.register_autograd(swiglu_gradients, setup_context=save_first)

# ---------------------------------------------------------------- cross-entropy


def loss_arguments(op_name, logits, targets):
    """The checks, N, V, and the struct that describes the logits: fp32 or bf16, with a stride between rows."""
    a = Arguments(op_name, "logits", logits)
    a.dims("logits", logits, 1, "(…, V)")
    N, V = count(logits.shape[:-1]), logits.shape[-1]
    a.tensor("targets", targets, logits.shape[:-1], INT32)
    return a, N, V, logits_of(logits, a.row_stride("logits", logits))


def z_loss_of(weight, z_losses):
    """The struct that calls receive."""
    if getattr(state, "fake", False):
        return None
    return op_contracts.ZLoss(weight, z_losses.data_ptr() if weight else None)


def losses_of(op_name, logits, targets, z_loss, want_grad):
    a, N, V, rows = loss_arguments(op_name, logits, targets)
    a.within("targets", targets, None, V, "the size of the vocabulary")
    losses = logits.new_empty(logits.shape[:-1], dtype=FLOAT32)
    z_losses = torch.zeros_like(losses)
    z = z_loss_of(z_loss, z_losses)
    call("cross_entropy", losses, logits.dtype, losses, rows, targets, z, N, V, int(want_grad))
    return losses, z_losses


@op("cross_entropy")
def cross_entropy(logits: Tensor, targets: Tensor, z_loss: float = 0.0) -> Tensor:
    """The loss of each row in fp32, z-loss included: 0 where the target is negative."""
    losses, z_losses = losses_of("cross_entropy", logits, targets, z_loss, False)
    return losses + z_losses if z_loss else losses


@op("cross_entropy", changes=("logits",))
def cross_entropy_(logits: Tensor, targets: Tensor, z_loss: float, want_grad: bool) -> tuple[Tensor, Tensor]:
    """Losses and z-losses of each row. With want_grad the logits become their gradient."""
    return losses_of("cross_entropy_", logits, targets, z_loss, want_grad)


def save_loss(ctx, inputs, output):
    logits, targets, ctx.z_loss = inputs
    ctx.save_for_backward(logits, targets)


def loss_gradients(ctx, dlosses):
    logits, targets = ctx.saved_tensors
    d = logits.clone()
    torch.ops.llama3.cross_entropy_(d, targets, ctx.z_loss, True)
    return (d * dlosses[..., None]).to(d.dtype), None, None


cross_entropy.register_autograd(loss_gradients, setup_context=save_loss)


@op("cross_entropy_part")
def cross_entropy_part(logits: Tensor, targets: Tensor, first: int = 0) -> Tensor:
    _, N, V, rows = loss_arguments("cross_entropy_part", logits, targets)
    parts = logits.new_empty((*logits.shape[:-1], 3), dtype=FLOAT32)
    call("cross_entropy_part", parts, logits.dtype, parts, rows, targets, first, N, V)
    return parts


@op("cross_entropy_join", changes=("logits",))
def cross_entropy_join(
    logits: Tensor, parts: Tensor, targets: Tensor, first: int, z_loss: float, want_grad: bool
) -> tuple[Tensor, Tensor]:
    a, N, V, rows = loss_arguments("cross_entropy_join", logits, targets)
    a.dims("parts", parts, 2, "(ranks, …, 3)")
    a.tensor("parts", parts, (parts.shape[0], *logits.shape[:-1], 3), FLOAT32)
    losses = logits.new_empty(logits.shape[:-1], dtype=FLOAT32)
    z_losses = torch.zeros_like(losses)
    arguments = (losses, rows, parts, targets, z_loss_of(z_loss, z_losses), parts.shape[0], first, N, V)
    call("cross_entropy_join", losses, logits.dtype, *arguments, int(want_grad))
    return losses, z_losses


# ---------------------------------------------------------------- sums, norms, AdamW


def pieces_of(op_name, pieces):
    a = Arguments(op_name, "pieces", pieces)
    a.dims("pieces", pieces, 1, "(pieces, …)")
    a.require(pieces.shape[0] > 0, "pieces", f"has shape {tuple(pieces.shape)}", "at least one piece")
    a.contiguous("pieces", pieces)
    return a, pieces.shape[0], count(pieces.shape[1:])


def tree_sum_into(op_name, out, pieces, accumulate):
    a, n, elements = pieces_of(op_name, pieces)
    if out is None:
        out = pieces.new_empty(pieces.shape[1:], dtype=FLOAT32)
    a.tensor("out", out, pieces.shape[1:], FLOAT32)
    is_bf16 = int(pieces.dtype == torch.bfloat16)  # Dtype in lib/device/base.h
    call("tree_sum", out, pieces.dtype, out, pieces, is_bf16, n, elements, accumulate)
    return out


@op("tree_sum")
def tree_sum(pieces: Tensor) -> Tensor:
    return tree_sum_into("tree_sum", None, pieces, 0)


@op("tree_sum", changes=("out",))
def tree_sum_(out: Tensor, pieces: Tensor) -> None:
    tree_sum_into("tree_sum_", out, pieces, 1)


@op("sum_pieces")
def sum_pieces(pieces: Tensor) -> Tensor:
    _, n, elements = pieces_of("sum_pieces", pieces)
    out = pieces.new_empty(pieces.shape[1:])
    call("sum_pieces", out, pieces.dtype, out, pieces, n, elements)
    return out


def exact_value(total):
    """The value, in float64, of an ExactSum (lib/device/base.h): int64 (11), of which ten are digits."""
    digits = torch.arange(op_contracts.EXACT_WORDS - 1, dtype=torch.float64, device=total.device)
    value = (total[:-1].double() * torch.exp2(32 * digits - 149)).sum()
    return torch.where(total[-1] > 0, torch.nan, value)


def add_exactly(contract, op_name, total, x):
    a = Arguments(op_name, "x", x, (FLOAT32,))
    a.contiguous("x", x)
    if total is None:
        total = x.new_zeros(op_contracts.EXACT_WORDS, dtype=torch.int64)
    a.is_like("total", total, torch.int64)
    shape = tuple(total.shape)
    a.require(shape == (op_contracts.EXACT_WORDS,), "total", f"has shape {shape}", f"({op_contracts.EXACT_WORDS},)")
    a.contiguous("total", total)
    if x.numel():
        call(contract, total, FLOAT32, total, x, x.numel())
    return total


@op("exact_total", changes=("total",))
def exact_total_(total: Tensor, x: Tensor) -> None:
    add_exactly("exact_total", "exact_total_", total, x)


@op("exact_total")
def exact_total(x: Tensor) -> Tensor:
    return exact_value(add_exactly("exact_total", "exact_total", None, x))


@op("squared_norm", changes=("total",))
def squared_norm_(total: Tensor, x: Tensor) -> None:
    add_exactly("squared_norm", "squared_norm_", total, x)


@op("squared_norm")
def squared_norm(x: Tensor) -> Tensor:
    return exact_value(add_exactly("squared_norm", "squared_norm", None, x))


def copy_dtype(a, name, copy, shape):
    """The precision of a call with an optional copy in floatX."""
    if copy is None:
        return FLOAT32
    check_precision(a.of(name), copy.dtype)
    a.tensor(name, copy, shape, copy.dtype)
    return copy.dtype


@op("adamw", changes=("p", "m", "v", "copy"))
def adamw(
    p: Tensor,
    m: Tensor,
    v: Tensor,
    g: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    grad_scale: float,
    step: int,
    copy: Optional[Tensor] = None,
) -> None:
    a = Arguments("adamw", "p", p, (FLOAT32,))
    for name, tensor in (("p", p), ("m", m), ("v", v), ("g", g)):
        a.tensor(name, tensor, p.shape)
    a.require(step >= 1, "step", f"is {step}", "1 or more: steps are counted from 1")
    dtype = copy_dtype(a, "copy", copy, p.shape)
    call("adamw", p, dtype, p, m, v, g, copy, p.numel(), lr, beta1, beta2, eps, weight_decay, grad_scale, step)


# ---------------------------------------------------------------- Muon


@op("muon_momentum", changes=("m",))
def muon_momentum(m: Tensor, g: Tensor, momentum: float, grad_scale: float, dtype: torch.dtype) -> Tensor:
    a = Arguments("muon_momentum", "m", m, (FLOAT32,))
    check_precision("llama3.muon_momentum: dtype", dtype)
    a.contiguous("m", m)
    a.tensor("g", g, m.shape)
    update = torch.empty_like(m, dtype=dtype)
    call("muon_momentum", m, dtype, update, m, g, m.numel(), momentum, grad_scale)
    return update


@op("normalize_matrix", changes=("x",))
def normalize_matrix(x: Tensor) -> None:
    Arguments("normalize_matrix", "x", x).contiguous("x", x)
    call("normalize_matrix", x, x.dtype, x, x.numel())


@op("gram_matrix")
def gram_matrix(x: Tensor) -> Tensor:
    rows, columns = Arguments("gram_matrix", "x", x).matrix("x", x)
    g = x.new_empty((min(rows, columns),) * 2)
    call("gram_matrix", g, x.dtype, g, x, rows, columns)
    return g


@op("symmetric_matmul")
def symmetric_matmul(s: Tensor, x: Tensor) -> Tensor:
    a = Arguments("symmetric_matmul", "x", x)
    rows, columns = a.matrix("x", x)
    a.tensor("s", s, (min(rows, columns),) * 2)
    y = torch.empty_like(x, dtype=FLOAT32)
    call("symmetric_matmul", y, x.dtype, y, s, x, rows, columns)
    return y


@op("weighted_sum", changes=("x",))
def weighted_sum(x: Tensor, a: float, y: Tensor, b: float) -> None:
    check = Arguments("weighted_sum", "x", x)
    check.contiguous("x", x)
    check.tensor("y", y, x.shape, FLOAT32)
    call("weighted_sum", x, x.dtype, x, a, y, b, x.numel())


@op("muon_update", changes=("p", "copy"))
def muon_update(
    p: Tensor, direction: Tensor, lr: float, adjust: float, weight_decay: float, copy: Optional[Tensor] = None
) -> None:
    a = Arguments("muon_update", "direction", direction)
    a.contiguous("direction", direction)
    a.tensor("p", p, direction.shape, FLOAT32)
    a.tensor("copy", copy, direction.shape)
    call("muon_update", p, direction.dtype, p, copy, direction, p.numel(), lr, adjust, weight_decay)


# ---------------------------------------------------------------- casts and hashes


@op("cast_to_bf16")
def cast_to_bf16(x: Tensor) -> Tensor:
    Arguments("cast_to_bf16", "x", x, (FLOAT32,)).contiguous("x", x)
    out = torch.empty_like(x, dtype=torch.bfloat16)
    call("cast_to_bf16", out, torch.bfloat16, out, x, x.numel())
    return out


cast_to_bf16.register_autograd(lambda ctx, d: d.float())


@op("fingerprint")
def fingerprint(x: Tensor) -> Tensor:
    a = Arguments("fingerprint", "x", x, (x.dtype,))
    a.contiguous("x", x)
    size = x.numel() * x.element_size()
    a.require(size % 8 == 0, "x", f"has {size} bytes", "a multiple of 8")
    total = x.new_zeros((), dtype=torch.int64)
    if size:
        call("fingerprint", total, FLOAT32, total, x, size)
    return total


# ---------------------------------------------------------------- the command line


def check(function, op_name, *tensors, **options):
    """Compares a function with the op's definition in float64 and with our kernel; see op_check.check."""
    import op_check  # here, since it imports this module

    return op_check.check(function, op_name, *tensors, **options)


def print_list():
    """Every op: its C contract, and the PyTorch ops that call it."""
    callers = {}
    for name, contract in CALLS.items():
        callers.setdefault(contract, []).append(f"torch.ops.{OPS[name]._schema}".replace("::", ".", 1))
    op_contracts.print_contracts(callers)


def main():
    arguments = sys.argv[1:]
    if arguments == ["list"]:
        return print_list()
    if len(arguments) in (2, 3) and arguments[0] == "check":
        import op_check

        return op_check.main(*arguments[1:])
    sys.exit("error: expected list, check OP, check OP FILE.py:FUNCTION or check OP LIBRARY.so")


if __name__ == "__main__":
    sys.modules["llama3_ops"] = sys.modules["__main__"]  # the ops are registered once, also if another file imports it
    sys.exit(main())
