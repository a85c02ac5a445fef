"""A PyTorch reference beside each kernel of llama.py, with the same signature.

They compute in float64 from the same arguments, kernel-layout weights included, and share no code
with the kernels. Shapes as in the kernels' docstrings.
"""

from __future__ import annotations

import math

import torch

import llama


def unblocked(weight_hbm, n, k):
    """Kernel weight [blocks, 128 * k_tiles * nb] -> [n, k] float64."""
    layout = llama.BlockLayout.of(n, k)
    tiles = weight_hbm.double().reshape(layout.blocks, 128, layout.k_tiles, layout.nb)
    return tiles.permute(0, 3, 2, 1).reshape(layout.blocks * layout.nb, -1)[:n, :k]


def rmsnorm_kernel(x_hbm, gain_hbm, eps):
    x = x_hbm.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * gain_hbm.double()


def linear_kernel(x_hbm, weight_hbm, n, gain_hbm=None, eps=0.0):
    x = x_hbm.double() if gain_hbm is None else rmsnorm_kernel(x_hbm, gain_hbm, eps)
    return x @ unblocked(weight_hbm, n, x.shape[1]).t()


def rope_tables_kernel(position_hbm, inv_freq_hbm, dtype):
    angles = (position_hbm * inv_freq_hbm[:1]).double()  # the angle itself is an fp32 product
    return angles.cos(), angles.sin()


def rope_kernel(x_hbm, cos_hbm, sin_hbm):
    tokens, width = x_hbm.shape
    x = x_hbm.double().reshape(tokens, -1, 2, cos_hbm.shape[1])
    cos, sin = cos_hbm.double()[:, None], sin_hbm.double()[:, None]
    low, high = x[:, :, 0], x[:, :, 1]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1).reshape(tokens, width)


def attend(q, k, v, allowed):
    """q [B, heads, S, D] over k, v [B, kv_heads, L, D] where ``allowed`` (broadcastable bool)."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
    weights = torch.softmax(scores.masked_fill(~allowed, -1e300), -1)
    return (weights @ v).transpose(1, 2)


def rotated_heads(qkv, cos_hbm, sin_hbm, batch, q_heads, kv_heads):
    """Projected rows [B * S, ...] -> q, k (rotated) and v, [B, heads, S, D] each."""
    d = 2 * cos_hbm.shape[1]
    q, k, v = torch.split(qkv.double(), [q_heads * d, kv_heads * d, kv_heads * d], 1)
    q, k = rope_kernel(q, cos_hbm, sin_hbm), rope_kernel(k, cos_hbm, sin_hbm)
    return [t.reshape(batch, -1, t.shape[1] // d, d).transpose(1, 2) for t in (q, k, v)]


def rows(heads):
    """[B, heads, S, D] -> [B * S, heads * D]."""
    return heads.transpose(1, 2).reshape(heads.shape[0] * heads.shape[2], -1)


def attention_prefill_kernel(qkv_hbm, cos_hbm, sin_hbm, batch, q_heads, kv_heads, bias_hbm=None):
    q, k, v = rotated_heads(qkv_hbm, cos_hbm, sin_hbm, batch, q_heads, kv_heads)
    allowed = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()[None, None]
    if bias_hbm is not None:
        allowed = allowed & (bias_hbm == 0)[:, None, None]
    return attend(q, k, v, allowed).reshape(qkv_hbm.shape[0], -1), rows(k)


def attention_decode_kernel(
    qkv_hbm, cos_hbm, sin_hbm, keys_hbm, values_hbm, bias_hbm, q_heads, kv_heads
):
    batch = qkv_hbm.shape[0]
    q, k, v = rotated_heads(qkv_hbm, cos_hbm, sin_hbm, batch, q_heads, kv_heads)
    live = torch.cat((bias_hbm == 0, torch.ones(batch, 1, dtype=torch.bool)), 1)
    every_k = torch.cat((keys_hbm.double(), k), 2)
    every_v = torch.cat((values_hbm.double(), v), 2)
    context = attend(q, every_k, every_v, live[:, None, None])
    return context.reshape(batch, q_heads, -1), rows(k), rows(v)


def attention_prefill_block_kernel(
    x_hbm, gain_hbm, eps, qkv_w_hbm, out_w_hbm, cos_hbm, sin_hbm, batch, q_heads, kv_heads,
    bias_hbm=None,
):  # fmt: skip
    d = 2 * cos_hbm.shape[1]
    qkv = linear_kernel(x_hbm, qkv_w_hbm, (q_heads + 2 * kv_heads) * d, gain_hbm, eps)
    tables = cos_hbm, sin_hbm
    context, k = attention_prefill_kernel(qkv, *tables, batch, q_heads, kv_heads, bias_hbm)
    return linear_kernel(context, out_w_hbm, x_hbm.shape[1]), k, qkv[:, (q_heads + kv_heads) * d :]


def attention_decode_block_kernel(
    x_hbm, gain_hbm, eps, qkv_w_hbm, out_w_hbm, cos_hbm, sin_hbm, keys_hbm, values_hbm, bias_hbm,
    q_heads, kv_heads,
):  # fmt: skip
    d = keys_hbm.shape[3]
    qkv = linear_kernel(x_hbm, qkv_w_hbm, (q_heads + 2 * kv_heads) * d, gain_hbm, eps)
    context, k, v = attention_decode_kernel(
        qkv, cos_hbm, sin_hbm, keys_hbm, values_hbm, bias_hbm, q_heads, kv_heads
    )
    return linear_kernel(context.flatten(1), out_w_hbm, x_hbm.shape[1]), k, v


def swiglu_mlp_kernel(x_hbm, gate_hbm, up_hbm, down_hbm, f, gain_hbm=None, eps=0.0):
    gate = linear_kernel(x_hbm, gate_hbm, f, gain_hbm, eps)
    up = linear_kernel(x_hbm, up_hbm, f, gain_hbm, eps)
    return linear_kernel(gate / (1 + torch.exp(-gate)) * up, down_hbm, x_hbm.shape[1])
