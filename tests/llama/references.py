"""A PyTorch reference beside each kernel of llama.py, with the same signature.

``EXACT`` computes in float64; ``TORCH`` in bf16 as PyTorch does, rounding after every operator,
with norm and softmax in fp32 inside: what the kernels have to be as good as. Both read the same
arguments, kernel-layout weights included, and share no code with the kernels. Shapes as in the
kernels' docstrings; work is cut into pieces, so that full-size shapes fit into memory.
"""

from __future__ import annotations

import math

import torch

import llama

QUERIES = 512  # rows of scores at a time


class Reference:
    """The kernels' operators in ``dtype``; normalisation and softmax in ``wide``."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.wide = torch.float64 if dtype is torch.float64 else torch.float32

    def rmsnorm_kernel(self, x_hbm, gain_hbm, eps):
        x = x_hbm.to(self.wide)
        rms = (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()
        return (x / rms * gain_hbm.to(self.wide)).to(self.dtype)

    def linear_kernel(self, x_hbm, weight_hbm, n, gain_hbm=None, eps=0.0):
        x = x_hbm if gain_hbm is None else self.rmsnorm_kernel(x_hbm, gain_hbm, eps)
        x, k = x.to(self.dtype), x.shape[1]
        layout = llama.BlockLayout.of(n, k)
        out = x.new_empty(x.shape[0], n)
        for block, columns in zip(weight_hbm, out.split(layout.nb, dim=1)):
            tiles = block.reshape(128, layout.k_tiles, layout.nb).transpose(0, 1)
            weight = tiles.reshape(-1, layout.nb)[:k, : columns.shape[1]]
            columns[:] = x @ weight.to(self.dtype)
        return out

    def rope_tables_kernel(self, position_hbm, inv_freq_hbm, dtype):
        angles = (position_hbm * inv_freq_hbm[:1]).double()  # the angle itself is an fp32 product
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    def rope_kernel(self, x_hbm, cos_hbm, sin_hbm):
        tokens, width = x_hbm.shape
        x = x_hbm.to(self.dtype).reshape(tokens, -1, 2, cos_hbm.shape[1])
        cos, sin = (table.to(self.dtype)[:, None] for table in (cos_hbm, sin_hbm))
        low, high = x[:, :, 0], x[:, :, 1]
        rotated = torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
        return rotated.reshape(tokens, width)

    def heads(self, qkv_hbm, cos_hbm, sin_hbm, batch, q_heads, kv_heads):
        """Projected rows -> q [B, kv_heads, group, S, D] and k [B, kv_heads, S, D], rotated; v."""
        d = 2 * cos_hbm.shape[1]
        q, k, v = torch.split(qkv_hbm, [q_heads * d, kv_heads * d, kv_heads * d], 1)
        q, k = (self.rope_kernel(t, cos_hbm, sin_hbm) for t in (q, k))
        q, k, v = (
            t.to(self.dtype).reshape(batch, -1, t.shape[1] // d, d).transpose(1, 2)
            for t in (q, k, v)
        )
        return q.unflatten(1, (kv_heads, q_heads // kv_heads)), k, v

    def weights(self, parts, hidden):
        """Softmax over the concatenated scores -> weights in ``dtype``; True hides a key."""
        scores = torch.cat(parts, -1).to(self.wide).masked_fill(hidden, -math.inf)
        return torch.softmax(scores, -1).to(self.dtype)

    def attention_prefill_kernel(
        self, qkv_hbm, cos_hbm, sin_hbm, batch, q_heads, kv_heads, bias_hbm=None
    ):
        q, k, v = self.heads(qkv_hbm, cos_hbm, sin_hbm, batch, q_heads, kv_heads)
        length, out = q.shape[3], torch.zeros_like(q)
        for b, head in ((b, h) for b in range(batch) for h in range(kv_heads)):
            for start in range(0, length, QUERIES):
                end = min(length, start + QUERIES)
                hidden = torch.arange(end)[None] > torch.arange(start, end)[:, None]
                if bias_hbm is not None:
                    hidden = hidden | (bias_hbm[b, :end] != 0)
                scores = q[b, head, :, start:end] @ k[b, head, :end].t() / math.sqrt(q.shape[-1])
                weights = self.weights([scores], hidden)
                out[b, head, :, start:end] = weights @ v[b, head, :end]
        context = out.permute(0, 3, 1, 2, 4).reshape(qkv_hbm.shape[0], -1)
        return context, k.transpose(1, 2).reshape(qkv_hbm.shape[0], -1)

    def attention_decode_kernel(
        self, qkv_hbm, cos_hbm, sin_hbm, keys_hbm, values_hbm, bias_hbm, q_heads, kv_heads
    ):
        batch, past = bias_hbm.shape
        q, k, v = self.heads(qkv_hbm, cos_hbm, sin_hbm, batch, q_heads, kv_heads)
        q, root = q.flatten(2, 3), math.sqrt(q.shape[-1])  # [B, kv_heads, group, D]
        parts = [q @ keys.to(self.dtype).transpose(2, 3) / root for keys in (keys_hbm, k)]
        hidden = torch.cat((bias_hbm != 0, torch.zeros(batch, 1, dtype=torch.bool)), 1)
        weights = self.weights(parts, hidden[:, None, None])
        context = weights[..., :past] @ values_hbm.to(self.dtype) + weights[..., past:] @ v
        return context.flatten(1, 2), k.flatten(1), v.flatten(1)

    def attention_prefill_block_kernel(
        self, x_hbm, gain_hbm, eps, qkv_w_hbm, out_w_hbm, cos_hbm, sin_hbm, batch, q_heads,
        kv_heads, bias_hbm=None,
    ):  # fmt: skip
        n, values = (q_heads + 2 * kv_heads) * 2 * cos_hbm.shape[1], kv_heads * 2 * cos_hbm.shape[1]
        qkv = self.linear_kernel(x_hbm, qkv_w_hbm, n, gain_hbm, eps)
        context, k = self.attention_prefill_kernel(
            qkv, cos_hbm, sin_hbm, batch, q_heads, kv_heads, bias_hbm
        )
        return self.linear_kernel(context, out_w_hbm, x_hbm.shape[1]), k, qkv[:, n - values :]

    def attention_decode_block_kernel(
        self, x_hbm, gain_hbm, eps, qkv_w_hbm, out_w_hbm, cos_hbm, sin_hbm, keys_hbm, values_hbm,
        bias_hbm, q_heads, kv_heads,
    ):  # fmt: skip
        n = (q_heads + 2 * kv_heads) * keys_hbm.shape[3]
        qkv = self.linear_kernel(x_hbm, qkv_w_hbm, n, gain_hbm, eps)
        context, k, v = self.attention_decode_kernel(
            qkv, cos_hbm, sin_hbm, keys_hbm, values_hbm, bias_hbm, q_heads, kv_heads
        )
        return self.linear_kernel(context.flatten(1), out_w_hbm, x_hbm.shape[1]), k, v

    def swiglu_mlp_kernel(self, x_hbm, gate_hbm, up_hbm, down_hbm, f, gain_hbm=None, eps=0.0):
        gate = self.linear_kernel(x_hbm, gate_hbm, f, gain_hbm, eps)
        up = self.linear_kernel(x_hbm, up_hbm, f, gain_hbm, eps)
        return self.linear_kernel(torch.nn.functional.silu(gate) * up, down_hbm, x_hbm.shape[1])


EXACT, TORCH = Reference(torch.float64), Reference(torch.bfloat16)
