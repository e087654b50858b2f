"""make_kernel_fixtures.py: what PyTorch computes on small inputs, op by op, for the pages of dev/kernels.

    python make_kernel_fixtures.py                all ops into ../kernels/fixtures
    python make_kernel_fixtures.py swiglu         those of one function below

Everything is float64, with gradients by autograd. Inputs are rounded to bf16 first, so that both precisions read the
same numbers. dev/kernels/page_fixtures.h reads OP.N.bin: a line `size …` with the case's sizes in the page's
order, lines `NAME ROWS COLS`, an empty line, the values. A tensor that the op updates is there twice: before as NAME,
after as NAME.out.
"""

import argparse
import sys
from pathlib import Path

import torch

SIZE_LIMIT = 320_000  # bytes, all fixtures together: they are committed
EPS = 1e-5


def eps32(x=EPS):
    """A constant as the C program has it: rounded to fp32."""
    return torch.tensor(x, dtype=torch.float32).double().item()


def draw(*shape, scale=1.0):
    return (torch.randn(*shape) * scale).bfloat16().double()


def grads(out, dout, *inputs):
    return torch.autograd.grad(out, inputs, dout)


# each function yields (op, size, tensors): op and names as in its page; sizes that nothing divides


def rmsnorm():
    for N, C in (5, 77), (3, 16), (1, 1):
        x, delta, w = draw(N, C), draw(N, C), draw(1, C)
        total = (x + delta).requires_grad_()
        weight = w.clone().requires_grad_()
        out = torch.nn.functional.rms_norm(total, (C,), weight[0], eps32())
        rstd = torch.rsqrt(total.square().mean(1, keepdim=True) + eps32())
        yield "rmsnorm_forward", (N, C), {"x": x, "delta": delta, "w": w, "sum": total, "out": out, "rstd": rstd}

        dout, residual, dw_before = draw(N, C), draw(N, C), draw(1, C)
        x = x.clone().requires_grad_()
        out = torch.nn.functional.rms_norm(x, (C,), weight[0], eps32())
        rstd = torch.rsqrt(x.square().mean(1, keepdim=True) + eps32())
        dx, dw = grads(out, dout, x, weight)
        if C > 1:  # C = 1: dx is a difference of equals
            yield (
                "rmsnorm_backward",
                (N, C),
                {
                    "dout": dout,
                    "x": x,
                    "rstd": rstd,
                    "w": w,
                    "dx": residual,
                    "dx.out": residual + dx,
                    "dw": dw_before,
                    "dw.out": dw_before + dw,
                },
            )


def swiglu():
    for N, F in (5, 77), (3, 16), (1, 1):
        gate_up, dh = draw(N, 2 * F, scale=4).requires_grad_(), draw(N, F)
        h = torch.nn.functional.silu(gate_up[:, :F]) * gate_up[:, F:]
        yield "swiglu_forward", (N, F), {"gate_up": gate_up, "h": h}
        (d,) = grads(h, dh, gate_up)
        yield "swiglu_backward", (N, F), {"gate_up": gate_up, "dh": dh, "gate_up.out": d}


def embedding():
    # ids, C, V, the table's first token; the page has two more sizes before that
    for ids, C, V, *first in (
        ([2, 0, 2, -1, 4, 2, -7, 1], 13, 5),
        ([0], 1, 1),
        ([3] * 20 + [-1, 7] + [3] * 9, 17, 9),
        ([3, 9, 4, 8, -4, 5, 4, 0], 7, 5, 4),
    ):
        ids, N, low = torch.tensor(ids), len(ids), sum(first)
        embed, dx, dembed = draw(V, C).requires_grad_(), draw(N, C), draw(V, C)
        here = ((ids >= low) & (ids < low + V))[:, None].double()
        x = torch.nn.functional.embedding((ids - low).clamp(0, V - 1), embed) * here
        (d,) = grads(x, dx, embed)
        columns = {"ids": ids[:, None].double()}
        size = (N, C, V, 0, 0, low) if first else (N, C, V)
        yield "embedding_forward", size, {"embed": embed, "x": x, **columns}
        yield "embedding_backward", size, {"dx": dx, "dembed": dembed, "dembed.out": dembed + d, **columns}


def rope():
    # N, T, heads, HD, elements after the heads, direction; as transformers' apply_rotary_pos_emb
    for N, T, heads, HD, spare, direction in (
        (6, 3, 2, 18, 5, 1),
        (6, 3, 2, 18, 5, -1),
        (7, 7, 1, 2, 0, 1),
        (5, 4, 3, 34, 1, -1),
    ):
        frequency = 500000.0 ** (-torch.arange(0, HD, 2, dtype=torch.float64) / HD)
        angles = torch.arange(T, dtype=torch.float64)[:, None] * frequency
        positions = torch.randperm(T)
        cos, sin = [f(angles).repeat(1, 2)[positions[torch.arange(N) % T]][:, None] for f in (torch.cos, torch.sin)]
        rows = draw(N, heads * HD + spare)
        x = (
            torch.zeros(N, heads, HD, dtype=torch.float64)
            if direction < 0
            else rows[:, : heads * HD].reshape(N, heads, HD)
        )
        x.requires_grad_()
        out = x * cos + torch.cat((-x[..., HD // 2 :], x[..., : HD // 2]), -1) * sin
        if direction < 0:
            (out,) = grads(out, rows[:, : heads * HD].reshape(N, heads, HD), x)
        yield (
            "rope",
            (N, T, heads, HD, heads * HD + spare, direction),
            {
                "x": rows,
                "x.out": torch.cat((out.reshape(N, -1), rows[:, heads * HD :]), 1),
                "cos_sin": torch.cat((torch.cos(angles), torch.sin(angles)), 1),
                "positions": positions[None].double(),
            },
        )


def squared_norm():
    for count in 1, 300, 1029:
        x = draw(count, 1)
        yield "squared_norm", (count,), {"x": x, "total": torch.linalg.vector_norm(x).square().reshape(1, 1)}


def adamw():
    for count, steps in (77, 3), (1, 1):
        p = draw(count, 1).requires_grad_()
        optimizer = torch.optim.AdamW(
            [p], lr=eps32(3e-4), betas=(eps32(0.9), eps32(0.95)), eps=eps32(1e-8), weight_decay=eps32(0.1)
        )
        m, v = torch.zeros(2, count, 1, dtype=torch.float64)
        for step in range(1, steps + 1):
            before, g = p.detach().clone(), draw(count, 1)
            p.grad = g * eps32(0.37)
            optimizer.step()
            state = optimizer.state[p]
            yield (
                "adamw",
                (count, step),
                {
                    "p": before,
                    "p.out": p,
                    "m": m,
                    "m.out": state["exp_avg"],
                    "v": v,
                    "v.out": state["exp_avg_sq"],
                    "g": g,
                    "copy": p,
                },
            )
            m, v = state["exp_avg"].clone(), state["exp_avg_sq"].clone()


def muon():
    def lerp(a, b, weight):
        return a + weight * (b - a)

    mu, lr, adjust, decay, scale = map(eps32, (0.95, 3e-4, 5.5, 0.1, 0.37))
    for count in 33, 1:
        m, g = draw(count, 1), draw(count, 1)
        after = lerp(m, g * scale, 1 - mu)
        update = lerp(g * scale, after, mu)
        yield "muon_momentum", (count,), {"update": update, "m": m, "m.out": after, "g": g}

        x, y = draw(1, count), draw(1, count)
        yield "normalize_matrix", (count,), {"x": x, "x.out": x / x.norm().clamp(min=1e-7)}
        total = torch.add(eps32(3.4445) * x, y, alpha=eps32(-1.25))
        yield "weighted_sum", (count,), {"x": x, "x.out": total, "y": y}

        p, direction = draw(count, 1), draw(count, 1)
        after = (p * (1 - lr * decay)).add(direction, alpha=-lr * adjust)
        yield "muon_update", (count,), {"p": p, "p.out": after, "copy": after, "direction": direction}


def tree_sum():
    for n, count, accumulate in (1, 5, 1), (2, 33, 0), (7, 33, 1), (12, 17, 0):
        pieces, out = draw(n, count), draw(count, 1)
        total = pieces.sum(0)[:, None] + accumulate * out
        yield (
            "tree_sum",
            (n, count, accumulate),
            {"pieces": pieces, "out": out, "out.out": total} if accumulate else {"pieces": pieces, "out": total},
        )
    for n, count in (3, 33), (8, 17), (1, 5):
        pieces = draw(n, count)
        yield "sum_pieces", (n, count), {"pieces": pieces, "out": pieces.sum(0)[:, None]}


def cast():
    ties = torch.tensor(
        [1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 2**-100 * (1 + 2**-8), 1 + 2**-8 + 2**-23, 1 + 2**-8 - 2**-23]
    )
    for bits, x in (
        (8, torch.cat((ties, torch.randn(200)))),
        (8, torch.tensor([3.4e38, -3.4e38, float("inf"), 0, -0.0])),
        (24, torch.randn(100).double()),
    ):
        out = x.bfloat16() if bits == 8 else x.float()
        yield "cast", (len(x), bits), {"in": x[:, None], "out": out[:, None]}


def fp8():
    for dtype, mantissa in (torch.float8_e4m3fn, 3), (torch.float8_e5m2, 2):
        largest = torch.finfo(dtype).max
        grid = torch.arange(256, dtype=torch.uint8).view(dtype).float()
        grid = grid[grid.isfinite()].sort().values
        ties = ((grid[1:] + grid[:-1]) / 2)[::3]  # below values with an even and with an odd last bit
        around = torch.cat([ties.nextafter(torch.tensor(to)) for to in (float("inf"), float("-inf"))])
        drawn = torch.randn(100) * 2 ** (torch.rand(100) * 40 - 22)
        ends = torch.tensor([largest * 1.04, -largest * 2, 3e38, float("inf"), float("-inf"), 0.0, 1e-40])
        x = torch.cat((ties, around, drawn, ends))
        amax = torch.cat((torch.rand(30) * 2 ** (torch.rand(30) * 60 - 30), torch.tensor([448.0, 449.0, 57344.0])))
        scale = torch.exp2(torch.floor(torch.log2(largest / amax.double())))
        out = x.clamp(-largest, largest).to(dtype)  # PyTorch's cast alone does not saturate
        yield (
            "fp8",
            (len(x), mantissa),
            {"in": x[:, None], "out": out.double()[:, None], "amax": amax[:, None], "scale": scale[:, None]},
        )


def dequantize():
    for count in (200, 64, 1):
        scales = torch.rand((count + 63) // 64).double() + 2**-10
        bytes = torch.randint(-127, 128, (len(scales) * 64,), dtype=torch.int8)
        out = bytes.double() * scales.repeat_interleave(64)
        yield (
            "dequantize",
            (count,),
            {"in": bytes[:count, None].double(), "scales": scales[:, None], "out": out[:count, None]},
        )


def scale():
    for count in 33, 16, 1:
        x = draw(count, 1)
        yield "scale", (count,), {"x": x, "x.out": x * eps32(1.6)}


def adapter_merge():
    for OC, IC, R in (5, 7, 3), (3, 16, 1), (1, 1, 2):
        a, b, w = draw(R, IC), draw(OC, R), draw(OC, IC)
        yield "adapter_merge", (OC, IC, R), {"a": a, "b": b, "w": w, "w.out": w + eps32(1.6) * (b @ a)}


def linear():
    # N, IC, OC, elements after each row of dy
    for N, IC, OC, spare in (5, 33, 7, 0), (3, 9, 19, 4), (1, 1, 1, 2):
        x, w, dy, dw_before = (
            draw(N, IC).requires_grad_(),
            draw(OC, IC).requires_grad_(),
            draw(N, OC + spare),
            draw(OC, IC),
        )
        y = torch.nn.functional.linear(x, w)
        dx, dw = grads(y, dy[:, :OC], x, w)
        yield "linear_forward", (N, IC, OC, int(spare > 0)), {"x": x, "w": w, "y": y}
        yield "linear_backward_input", (N, IC, OC, spare), {"dy": dy, "w": w, "dx": dx}
        weight = {"dw": dw_before, "dw.out": dw_before + dw} if spare else {"dw": dw}
        yield "linear_backward_weight", (N, IC, OC, spare, int(spare > 0)), {"dy": dy, "x": x, **weight}


def attention():
    # B, Tq, Tk, NH, NKV, HD, q_offset: query t sees keys 0 ... q_offset + t; in the third case some queries see none.
    # q_split, q_gap: queries from q_split on have positions q_gap later.
    for B, Tq, Tk, NH, NKV, HD, offset, *chunks in (
        (2, 7, 7, 4, 2, 10, 0),
        (1, 5, 23, 3, 1, 18, 18),
        (1, 7, 4, 2, 2, 6, -2),
        (2, 6, 12, 4, 2, 10, 0, 3, 6),
    ):
        split, gap = chunks or (0, 0)
        position = offset + torch.arange(Tq) + gap * (torch.arange(Tq) >= split)
        q, dout = draw(B, Tq, NH * HD).requires_grad_(), draw(B, Tq, NH * HD)
        k, v = draw(B, Tk, NKV * HD).requires_grad_(), draw(B, Tk, NKV * HD).requires_grad_()
        qs = q.reshape(B, Tq, NH, HD).transpose(1, 2)
        ks, vs = (x.reshape(B, Tk, NKV, HD).transpose(1, 2).repeat_interleave(NH // NKV, 1) for x in (k, v))
        mask = torch.arange(Tk)[None] <= position[:, None]
        sees = mask.any(1)[:, None]  # where a query sees nothing, PyTorch has NaN: let it see all, and take no part
        out = torch.nn.functional.scaled_dot_product_attention(qs, ks, vs, attn_mask=mask | ~sees) * sees
        out = out.transpose(1, 2).reshape(B, Tq, NH * HD)
        lse = torch.logsumexp((qs @ ks.transpose(2, 3) / HD**0.5).masked_fill(~mask, -torch.inf), 3)
        tensors = {n: t.reshape(-1, t.shape[-1]) for n, t in zip("q k v out dout".split(), (q, k, v, out, dout))}
        dq, dk, dv = (g.reshape(-1, g.shape[-1]) for g in grads(out, dout, q, k, v))
        size, tensors["lse"] = (B, Tq, Tk, NH, NKV, HD, offset, *chunks), lse.reshape(-1, 1)
        yield "attention_forward", size, {n: t for n, t in tensors.items() if n != "dout"}
        yield "attention_backward", size, {**tensors, "dq": dq, "dk": dk, "dv": dv}


def cross_entropy():
    for N, V in (4, 77), (1, 1), (3, 16):
        logits, targets = draw(N, V, scale=4).requires_grad_(), torch.randint(V, (N,))
        targets[1:2] = -100  # what PyTorch ignores; the op ignores all that is negative
        losses = torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="none")
        (d,) = grads(losses.sum(), None, logits)
        yield (
            "cross_entropy",
            (N, V),
            {"logits": logits, "logits.out": d, "targets": targets[:, None].double(), "losses": losses[:, None]},
        )


def z_loss():
    weight = 1 / 128
    for N, V in (3, 37), (1, 1), (2, 16):
        logits, targets = draw(N, V, scale=4).requires_grad_(), torch.randint(V, (N,))
        targets[1:2] = -100
        losses = torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="none")
        z_losses = weight * torch.logsumexp(logits, 1).square() * (targets >= 0)
        (d,) = grads(losses.sum() + z_losses.sum(), None, logits)
        yield (
            "z_loss",
            (N, V),
            {
                "logits": logits,
                "logits.out": d,
                "targets": targets[:, None].double(),
                "losses": losses[:, None],
                "z_losses": z_losses[:, None],
            },
        )


MAKERS = {
    f.__name__: f
    for f in (
        rmsnorm,
        swiglu,
        embedding,
        rope,
        squared_norm,
        adamw,
        muon,
        tree_sum,
        cast,
        fp8,
        dequantize,
        scale,
        adapter_merge,
        linear,
        attention,
        cross_entropy,
        z_loss,
    )
}


def write(path, size, tensors):
    lines = ["size " + " ".join(map(str, size))]
    lines += [f"{name} {t.shape[0]} {t.shape[1]}" for name, t in tensors.items()]
    for name, t in tensors.items():
        assert t.dim() == 2 and not torch.isnan(t).any(), f"{path.name}: {name} is no matrix of numbers"
    values = b"".join(t.detach().double().contiguous().numpy().astype("<f8").tobytes() for t in tensors.values())
    path.write_bytes("\n".join(lines).encode() + b"\n\n" + values)


def main():
    out = Path(__file__).resolve().parent.parent / "kernels" / "fixtures"
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("ops", nargs="*", help=f"of {' '.join(MAKERS)}; default all")
    args = args.parse_args()
    unknown = set(args.ops) - set(MAKERS)
    if unknown:
        sys.exit(f"error: no op {' '.join(sorted(unknown))}, expected some of {' '.join(MAKERS)}")
    torch.set_num_threads(1)
    out.mkdir(exist_ok=True)
    for name in args.ops or MAKERS:
        torch.manual_seed(sum(name.encode()))  # an op's inputs do not change when another op is added
        count = {}
        for op, size, tensors in MAKERS[name]():
            count[op] = count.get(op, 0) + 1
            write(out / f"{op}.{count[op]}.bin", size, tensors)
        print(f"{name}: " + ", ".join(f"{n} of {op}" for op, n in count.items()))
    total = sum(f.stat().st_size for f in out.iterdir())
    print(f"{out.name}: {total:,d} bytes in all, limit {SIZE_LIMIT:,d}")
    if total > SIZE_LIMIT:
        sys.exit("error: the fixtures are over their limit: shrink a case")


if __name__ == "__main__":
    main()
