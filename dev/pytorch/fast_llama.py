"""fast_llama.py: Llama 3 in PyTorch, written to be fast on a GPU; reference.py is the version written to be read.

A caller may rely on: QKV is one matmul and so are gate and up; norms are F.rms_norm's fused kernel; attention is
scaled_dot_product_attention with GQA. Under bf16 autocast, or with parameters in bf16, the residual stream is bf16 and
RoPE and the loss are fp32. torch.compile compiles all of it as one graph.

Shapes: B batch, T positions, C hidden size, V vocabulary, NH query heads, NKV key/value heads, HD head dim, FF inner
width of the MLP.
"""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Norm(nn.Module):
    def __init__(self, C):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(C))

    def forward(self, x):  # (B, T, C), without autocast: bf16 in, bf16 out
        with torch.autocast(x.device.type, enabled=False):
            return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), 1e-5)


class Block(nn.Module):
    def __init__(self, C, NH, NKV, HD, FF, **_):
        super().__init__()
        self.NH, self.NKV, self.HD = NH, NKV, HD
        self.norm1, self.norm2 = Norm(C), Norm(C)
        self.qkv, self.o = nn.Linear(C, (NH + 2 * NKV) * HD, bias=False), nn.Linear(NH * HD, C, bias=False)
        self.gate_up, self.down = nn.Linear(C, 2 * FF, bias=False), nn.Linear(FF, C, bias=False)

    def rotate(self, x, cos, sin):                                       # (B, T, N, HD), in fp32
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)

    def forward(self, x, cos, sin):                                      # (B, T, C)
        B, T, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, -1, self.HD).split((self.NH, self.NKV, self.NKV), dim=2)
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(B, T, self.NH * self.HD))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    def __init__(self, m):
        super().__init__()
        self.embed, self.norm = nn.Embedding(m["V"], m["C"]), Norm(m["C"])
        self.blocks = nn.ModuleList(Block(**m) for _ in range(m["L"]))
        self.head = nn.Linear(m["C"], m["V"], bias=False)
        if m["tied"]:
            self.head.weight = self.embed.weight
        angle = torch.outer(torch.arange(m["T"]).float(), 500000.0 ** (-torch.arange(0, m["HD"], 2).float() / m["HD"]))
        self.register_buffer("cos", angle.cos()[:, None])                # (T, 1, HD/2), fp32
        self.register_buffer("sin", angle.sin()[:, None])
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids, targets):                                     # (B, T) each -> mean loss
        x = self.embed(ids).to(torch.bfloat16)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())
