"""reference.py: Llama 3 as plain PyTorch, the model that the C program is compared with.

Only the mathematics: eager, explicit matmuls, no fused ops, no cache, no dropout. A caller may rely on: parameters have
Hugging Face's names, so `state_dict()` is a model.safetensors; `make_fixtures.py` compares logits, loss and every
gradient with transformers' LlamaForCausalLM.

Shapes: B batch, T positions, C hidden size, V vocabulary, NH query heads, NKV key/value heads, HD head dim,
FF inner width of the MLP. Weights are stored (out, in), as in torch.nn.Linear: y = x W^T.
"""
import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import load_file

IGNORE = -100  # not a target; F.cross_entropy's own default


@dataclass
class Config:
    vocab_size: int            # V
    hidden_size: int           # C
    intermediate_size: int     # FF
    num_hidden_layers: int     # L
    num_attention_heads: int   # NH
    num_key_value_heads: int   # NKV; query head h reads key/value head h // (NH / NKV)
    head_dim: int              # HD, even; NH * HD need not be C
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict | None  # Llama 3.1's frequency scaling, None for plain RoPE
    tie_word_embeddings: bool
    document_end: int | None = None  # document mask: attention stays within documents that end with this token
    z_loss: float = 0.0              # weight of the z-loss, which is no part of the loss that is reported

    @staticmethod
    def from_json(path):
        """Reads both spellings: `rope_theta` + `rope_scaling` (files on the Hub, transformers 4) and
        `rope_parameters`, which holds the two together (what transformers 5 saves)."""
        c = json.loads(Path(path).read_text())
        rope = c.get("rope_parameters") or dict(c.get("rope_scaling") or {}, rope_theta=c.get("rope_theta", 10000.0))
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ("default", "llama3"):
            raise ValueError(f"{path}: rope_type is {kind}, expected default or llama3")
        heads = c["num_attention_heads"]
        return Config(
            vocab_size=c["vocab_size"], hidden_size=c["hidden_size"], intermediate_size=c["intermediate_size"],
            num_hidden_layers=c["num_hidden_layers"], num_attention_heads=heads,
            num_key_value_heads=c.get("num_key_value_heads") or heads,
            head_dim=c.get("head_dim") or c["hidden_size"] // heads,
            rms_norm_eps=c["rms_norm_eps"], rope_theta=rope["rope_theta"],
            rope_scaling=rope if kind == "llama3" else None,
            tie_word_embeddings=c.get("tie_word_embeddings", False))


def wide(x):
    """The dtype in which norms, RoPE, softmax and loss are computed: fp32 for bf16, otherwise x's own."""
    return x.float() if x.dtype == torch.bfloat16 else x


# ---------------------------------------------------------------------------
# RoPE (arXiv 2104.09864), with Llama 3.1's scaling (arXiv 2407.21783; transformers, _compute_llama3_parameters)

def rope_frequencies(config, dtype):
    """Radians per position of each pair: (HD/2,)."""
    HD, s = config.head_dim, config.rope_scaling
    freq = 1.0 / config.rope_theta ** (torch.arange(0, HD, 2, dtype=torch.int64).to(dtype) / HD)
    if s is None:
        return freq
    turns = s["original_max_position_embeddings"] * freq / (2 * math.pi)  # full turns within the old context
    # many turns: keep the frequency; few: divide it by the factor; between: blend
    keep = (turns - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])
    keep = keep.clamp(0.0, 1.0)
    return keep * freq + (1.0 - keep) * freq / s["factor"]


def rope_table(config, T, dtype):
    """cos and sin of position times frequency, each (T, HD/2)."""
    angle = torch.outer(torch.arange(T, dtype=dtype), rope_frequencies(config, dtype))
    return angle.cos(), angle.sin()


def rotate(x, table):
    """x: (B, N, T, HD). Hugging Face's half-split convention: pair i is (x[i], x[i + HD/2]), not (x[2i], x[2i+1])
    as in Meta's own files. Rotated in fp32 and rounded once."""
    cos, sin = table                                    # (T, HD/2), the same for all heads
    a, b = wide(x).chunk(2, dim=-1)                     # (B, N, T, HD/2) each
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


# ---------------------------------------------------------------------------
# the parts of a block

class RMSNorm(nn.Module):
    """y = w * round(x / sqrt(mean(x^2) + eps)): normalised in fp32, rounded, then scaled (as LlamaRMSNorm does)."""
    def __init__(self, C, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(C))       # (C,)
        self.eps = eps

    def forward(self, x):                               # (B, T, C) -> (B, T, C)
        h = wide(x)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * h.to(x.dtype)


def hidden_keys(ids, document_end):
    """True where a query must not see a key, because the key is later or of another document: (B, 1, T, T)."""
    T = ids.shape[1]
    hidden = torch.ones(T, T, dtype=torch.bool).triu(diagonal=1)           # (T, T), true where key > query
    if document_end is None:
        return hidden
    ends = ids == document_end
    document = ends.cumsum(1) - ends.long()             # (B, T): how many documents ended before this token
    return (hidden | (document[:, :, None] != document[:, None, :]))[:, None]


class Attention(nn.Module):
    """Causal attention in which NH / NKV query heads share one key/value head (GQA, arXiv 2305.13245)."""
    def __init__(self, c):
        super().__init__()
        self.NH, self.NKV, self.HD = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, self.NH * self.HD, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, self.NKV * self.HD, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, self.NKV * self.HD, bias=False)
        self.o_proj = nn.Linear(self.NH * self.HD, c.hidden_size, bias=False)

    def forward(self, x, table, hidden):                # (B, T, C) -> (B, T, C)
        B, T, _ = x.shape
        q = self.q_proj(x).view(B, T, self.NH, self.HD).transpose(1, 2)    # (B, NH, T, HD)
        k = self.k_proj(x).view(B, T, self.NKV, self.HD).transpose(1, 2)   # (B, NKV, T, HD)
        v = self.v_proj(x).view(B, T, self.NKV, self.HD).transpose(1, 2)   # (B, NKV, T, HD)
        q, k = rotate(q, table), rotate(k, table)
        k = k.repeat_interleave(self.NH // self.NKV, dim=1)                # (B, NH, T, HD)
        v = v.repeat_interleave(self.NH // self.NKV, dim=1)                # (B, NH, T, HD)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.HD)              # (B, NH, T, T)
        p = wide(scores).masked_fill(hidden, -math.inf).softmax(-1).to(v.dtype)
        y = (p @ v).transpose(1, 2).reshape(B, T, self.NH * self.HD)
        return self.o_proj(y)


class MLP(nn.Module):
    """SwiGLU (arXiv 2002.05202): down(silu(gate(x)) * up(x))."""
    def __init__(self, c):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x):                               # (B, T, C) -> (B, T, C)
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c)

    def forward(self, x, table, hidden):                # (B, T, C) -> (B, T, C)
        x = x + self.self_attn(self.input_layernorm(x), table, hidden)
        return x + self.mlp(self.post_attention_layernorm(x))


# ---------------------------------------------------------------------------
# the whole

class Llama(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.config = c
        self.model = nn.Module()                        # only a prefix, as in Hugging Face's names
        self.model.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.model.layers = nn.ModuleList(Block(c) for _ in range(c.num_hidden_layers))
        self.model.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        if not c.tie_word_embeddings:
            self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)

    def forward(self, input_ids):                       # (B, T) -> logits (B, T, V)
        x = self.model.embed_tokens(input_ids)          # (B, T, C)
        table = rope_table(self.config, input_ids.shape[1], wide(x).dtype)
        hidden = hidden_keys(input_ids, self.config.document_end)
        for block in self.model.layers:
            x = block(x, table, hidden)
        x = self.model.norm(x)
        head = self.model.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        return F.linear(x, head.weight)


def loss_sum(logits, targets):
    """The SUM of the token losses and the number of targets. targets: (B, T), already the next token, IGNORE = none.
    Sums can be added over micro-batches and ranks and divided once; averages cannot."""
    total = F.cross_entropy(wide(logits).flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")
    return total, (targets != IGNORE).sum()


def z_loss_sum(logits, targets):
    """The sum of log^2 Z over all targets, Z the denominator of the softmax (PaLM, arXiv 2204.02311, section 5)."""
    return torch.logsumexp(wide(logits), -1).square()[targets != IGNORE].sum()


def load(directory, dtype=torch.float32):
    """A Hugging Face directory: config.json and one model.safetensors."""
    model = Llama(Config.from_json(Path(directory) / "config.json"))
    model.load_state_dict(load_file(Path(directory) / "model.safetensors"))
    return model.to(dtype)


def adamw(model, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1):
    """Weight decay on all weights except those of the norms, which are the vectors."""
    decay = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    return torch.optim.AdamW([{"params": decay, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}],
                             lr=lr, betas=betas, eps=eps, foreach=False)
