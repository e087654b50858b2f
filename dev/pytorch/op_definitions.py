"""op_definitions.py: what each op of llama3_ops.py computes, in plain PyTorch.

Each function has the name and the arguments of its op in torch.ops.llama3, and returns the op's results, then the new
values of the arguments that the op changes. Given float64 tensors they are the definitions that op_check.py compares
with; given the op's own dtypes they are what a user of PyTorch would write, and op_check.py measures their time. A call
is made by PyTorch's own function where there is one.

`stored` rounds a value that the op stores in its own dtype and reads again. `@returns` names the results.
"""

import math

import op_contracts
import torch
from torch.nn import functional as F

DEFINITIONS = {}  # name of the op: its definition, which has the attribute `results`


def returns(*results):
    def register(function):
        function.results = results
        DEFINITIONS[function.__name__] = function
        return function

    return register


def unchanged(x):
    return x


def rows(x):
    """As a matrix, whose rows are those of the last dimension."""
    return x.reshape(-1, x.shape[-1])


# ---------------------------------------------------------------- linear layers


@returns("y")
def linear(x, weight):
    return F.linear(x, weight)


@returns("y")
def linear_fp32(x, weight):
    return F.linear(x, weight)


@returns("dx")
def linear_backward_input(dy, weight):
    return dy @ weight


@returns("dw")
def linear_backward_weight(dy, x):
    return rows(dy).T @ rows(x)


@returns("dw")
def linear_backward_weight_(dw, dy, x):
    return dw + rows(dy).T @ rows(x)


@returns("y")
def linear_add(y, x, weight):
    return y + F.linear(x, weight)


@returns("dx")
def linear_backward_input_add(dx, dy, weight):
    return dx + dy @ weight


# ---------------------------------------------------------------- LoRA and int8


@returns("x")
def scale(x, by):
    return x * by


@returns("w")
def adapter_merge(w, a, b, by):
    return w + by * (b @ a)


@returns("out")
def dequantize(quantized, scales, dtype):
    of_element = scales.repeat_interleave(op_contracts.INT8_BLOCK)[: quantized.numel()]
    return quantized * of_element.reshape(quantized.shape)


# ---------------------------------------------------------------- embedding


@returns("x")
def embedding(weight, ids, first=0):
    here = (ids >= first) & (ids < first + weight.shape[0])
    return F.embedding((ids - first) * here, weight) * here[..., None]


@returns("dembed")
def embedding_backward(dx, ids, V, first=0):
    return embedding_backward_(dx.new_zeros(V, dx.shape[-1]), dx, ids, first)


@returns("dembed")
def embedding_backward_(dembed, dx, ids, first=0):
    here = (ids >= first) & (ids < first + dembed.shape[0])
    return dembed.index_add(0, (ids - first)[here], dx[here].to(dembed.dtype))


# ---------------------------------------------------------------- RMSNorm and the residual stream


def rstd_of(x, eps):
    return torch.rsqrt(x.square().mean(-1) + eps)


@returns("out", "rstd")
def rmsnorm_forward(x, weight, eps=1e-5):
    return F.rms_norm(x, weight.shape, weight, eps), rstd_of(x, eps)


@returns("out")
def rmsnorm(x, weight, eps=1e-5):
    return F.rms_norm(x, weight.shape, weight, eps)


@returns("out", "rstd", "sum")
def rmsnorm_add_forward(x, delta, weight, eps=1e-5, stored=unchanged):
    total = stored(x + delta)
    return F.rms_norm(total, weight.shape, weight, eps), rstd_of(total, eps), total


@returns("out", "sum")
def rmsnorm_add(x, delta, weight, eps=1e-5, stored=unchanged):
    total = stored(x + delta)
    return F.rms_norm(total, weight.shape, weight, eps), total


@returns("dx", "dw")
def rmsnorm_backward(dout, x, rstd, weight, dresidual=None):
    y, g = x * rstd[..., None], dout * weight
    dx = rstd[..., None] * (g - y * (g * y).mean(-1, keepdim=True))
    return dx if dresidual is None else dx + dresidual, rows(dout * y).sum(0)


@returns("dx", "dw")
def rmsnorm_backward_(dx, dw, dout, x, rstd, weight):
    d, of_weight = rmsnorm_backward(dout, x, rstd, weight, dx)
    return (d,) if dw is None else (d, dw + of_weight)


@returns("out")
def residual_add(x, delta):
    return x + delta


# ---------------------------------------------------------------- rotary position embedding


def rotate(x, cos_sin, positions, direction):
    """Element i of each head rotates with element i + HD/2, as in transformers. x (…, T, heads, HD)"""
    cos, sin = (cos_sin[positions.long(), i][:, None, :] for i in (0, 1))  # (T, 1, HD/2)
    first, second = x.chunk(2, -1)
    sin = direction * sin
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


@returns("x")
def rope(x, cos_sin, positions):
    return rotate(x, cos_sin, positions, 1)


@returns("x")
def rope_(x, cos_sin, positions):
    return rotate(x, cos_sin, positions, 1)


@returns("d")
def rope_backward(d, cos_sin, positions):
    return rotate(d, cos_sin, positions, -1)


@returns("d")
def rope_backward_(d, cos_sin, positions):
    return rotate(d, cos_sin, positions, -1)


# ---------------------------------------------------------------- attention


def visible(q, k, q_offset, q_split, q_gap, q_doc, k_doc):
    """Which keys a query sees: (B or 1, 1, Tq, Tk)."""
    t = torch.arange(q.shape[1], device=q.device)
    position = q_offset + t + q_gap * (t >= q_split)
    sees = (torch.arange(k.shape[1], device=q.device)[None] <= position[:, None])[None, None]
    return sees if q_doc is None else sees & (q_doc[:, None, :, None] == k_doc[:, None, None, :])


def heads_first(q, k, v):
    """(B, NH, T, HD) of each; a key/value head is repeated for the query heads that attend to it."""
    groups = q.shape[2] // k.shape[2]
    return q.transpose(1, 2), *(x.transpose(1, 2).repeat_interleave(groups, 1) for x in (k, v))


@returns("out", "lse")
def attention_forward(q, k, v, q_offset=0, q_split=0, q_gap=0, q_doc=None, k_doc=None):
    qs, ks, vs = heads_first(q, k, v)
    scores = qs @ ks.transpose(2, 3) / math.sqrt(q.shape[3])
    scores = scores.masked_fill(~visible(q, k, q_offset, q_split, q_gap, q_doc, k_doc), -torch.inf)
    lse = torch.logsumexp(scores, 3)
    probabilities = torch.softmax(scores, 3).nan_to_num(0)  # a query that sees no key
    return (probabilities @ vs).transpose(1, 2), lse


@returns("out")
def attention(q, k, v, q_offset=0, q_split=0, q_gap=0, q_doc=None, k_doc=None):
    if (q_offset, q_split, q_gap, q_doc) == (0, 0, 0, None) and q.shape[1] == k.shape[1]:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    return attention_forward(q, k, v, q_offset, q_split, q_gap, q_doc, k_doc)[0]


@returns("dq", "dk", "dv")
def attention_backward(dout, out, lse, q, k, v, q_offset=0, q_split=0, q_gap=0, q_doc=None, k_doc=None):
    (qs, ks, vs), size = heads_first(q, k, v), math.sqrt(q.shape[3])
    dout, out = dout.transpose(1, 2), out.transpose(1, 2)
    sees = visible(q, k, q_offset, q_split, q_gap, q_doc, k_doc)
    p = torch.exp(qs @ ks.transpose(2, 3) / size - lse[..., None]).masked_fill(~sees, 0).to(q.dtype)
    ds = p * (dout @ vs.transpose(2, 3) - (dout * out).sum(3, keepdim=True))
    dq, dk, dv = ds @ ks / size, ds.transpose(2, 3) @ qs / size, p.transpose(2, 3) @ dout
    of_groups = [x.unflatten(1, (k.shape[2], -1)).sum(2).transpose(1, 2) for x in (dk, dv)]
    return dq.transpose(1, 2), *of_groups


# ---------------------------------------------------------------- SwiGLU


@returns("h")
def swiglu(gate_up):
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


@returns("dgate_up")
def swiglu_backward(dh, gate_up):
    gate, up = gate_up.chunk(2, -1)
    s = torch.sigmoid(gate)
    return torch.cat((dh * up * s * (1 + gate * (1 - s)), dh * gate * s), -1)


# ---------------------------------------------------------------- cross-entropy


def losses_of(logits, targets, z_loss):
    losses = F.cross_entropy(rows(logits), targets.reshape(-1).long().clamp(min=-1), ignore_index=-1, reduction="none")
    z_losses = z_loss * torch.logsumexp(logits, -1).square() * (targets >= 0)
    return losses.reshape(targets.shape), z_losses


@returns("losses")
def cross_entropy(logits, targets, z_loss=0.0):
    losses, z_losses = losses_of(logits, targets, z_loss)
    return losses + z_losses if z_loss else losses


@returns("losses", "z_losses", "logits")
def cross_entropy_(logits, targets, z_loss, want_grad):
    losses, z_losses = losses_of(logits, targets, z_loss)
    if not want_grad:
        return losses, z_losses, logits
    log_z = torch.logsumexp(logits, -1, keepdim=True)
    d = torch.softmax(logits, -1) * (1 + 2 * z_loss * log_z)
    d = d.scatter_add(-1, targets.long().clamp(min=0)[..., None], torch.full_like(log_z, -1))
    return losses, z_losses, d * (targets >= 0)[..., None]


@returns("parts")
def cross_entropy_part(logits, targets, first=0):
    """The largest logit, the sum of exp(logit - largest), the target's logit or -infinity. In a row without a target:
    -infinity, 0, -infinity."""
    here = (targets >= first) & (targets < first + logits.shape[-1])
    at = ((targets - first) * here).long()[..., None]
    target = logits.gather(-1, at)[..., 0].masked_fill(~here, -torch.inf)
    largest = logits.amax(-1)
    parts = torch.stack((largest, torch.exp(logits - largest[..., None]).sum(-1), target), -1)
    none = parts.new_tensor([-torch.inf, 0, -torch.inf])
    return torch.where((targets >= 0)[..., None], parts, none)


@returns("losses", "z_losses", "logits")
def cross_entropy_join(logits, parts, targets, first, z_loss, want_grad):
    largest, target = parts[..., 0].amax(0), parts[..., 2].amax(0)
    log_z = largest + torch.log((parts[..., 1] * torch.exp(parts[..., 0] - largest)).sum(0))
    has_target = targets >= 0
    losses = torch.where(has_target, log_z - target, 0)
    z_losses = torch.where(has_target, z_loss * log_z.square(), 0)
    if not want_grad:
        return losses, z_losses, logits
    columns = first + torch.arange(logits.shape[-1], device=logits.device)
    d = torch.exp(logits - log_z[..., None]) * (1 + 2 * z_loss * log_z[..., None])
    d = d - (columns == targets[..., None]).to(d.dtype)
    return losses, z_losses, torch.where(has_target[..., None], d, 0)


# ---------------------------------------------------------------- sums, norms, AdamW


@returns("out")
def tree_sum(pieces):
    return pieces.sum(0)


@returns("out")
def tree_sum_(out, pieces):
    return out + pieces.sum(0)


@returns("out")
def sum_pieces(pieces):
    return pieces.sum(0)


@returns("total")
def exact_total(x):
    return x.sum()


@returns("total")
def exact_total_(total, x):
    """total: the value of the ExactSum."""
    return total + x.sum()


@returns("total")
def squared_norm(x):
    return x.square().sum()


@returns("total")
def squared_norm_(total, x):
    return total + x.square().sum()


@returns("p", "m", "v", "copy")
def adamw(p, m, v, g, lr, beta1, beta2, eps, weight_decay, grad_scale, step, copy=None):
    s = g * grad_scale
    m, v = m + (1 - beta1) * (s - m), beta2 * v + (1 - beta2) * s * s
    p = p * (1 - lr * weight_decay)
    p = p - lr / (1 - beta1**step) * m / (torch.sqrt(v / (1 - beta2**step)) + eps)
    return (p, m, v) if copy is None else (p, m, v, p)


# ---------------------------------------------------------------- Muon


@returns("update", "m")
def muon_momentum(m, g, momentum, grad_scale, dtype):
    s = g * grad_scale
    m = m + (1 - momentum) * (s - m)
    return s + momentum * (m - s), m


@returns("x")
def normalize_matrix(x):
    return x / x.norm().clamp(min=1e-7)


@returns("g")
def gram_matrix(x):
    return x.T @ x if x.shape[0] > x.shape[1] else x @ x.T


@returns("y")
def symmetric_matmul(s, x):
    return x @ s if x.shape[0] > x.shape[1] else s @ x


@returns("x")
def weighted_sum(x, a, y, b):
    return a * x + b * y


@returns("p", "copy")
def muon_update(p, direction, lr, adjust, weight_decay, copy=None):
    p = (1 - lr * weight_decay) * p - lr * adjust * direction
    return (p,) if copy is None else (p, p)


# ---------------------------------------------------------------- casts and hashes


@returns("out")
def cast_to_bf16(x):
    return x.to(torch.bfloat16).double()  # rounding to nearest, ties to even, is the definition


def mix64(x):
    """Random bits from 64-bit words (lib/device/base.h). int64 tensors: shifts are of unsigned words, products wrap."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> shift & (1 << 64 - shift) - 1)) * (factor - (1 << 64))
    return x ^ (x >> 31 & (1 << 33) - 1)


@returns("hash")
def fingerprint(x):
    words = x.reshape(-1).view(torch.uint8).view(torch.int64)
    index = torch.arange(words.numel(), device=x.device)
    return mix64(words + index * (0x9E3779B97F4A7C15 - (1 << 64))).sum()
