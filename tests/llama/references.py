"""A PyTorch reference beside each kernel of llama.py, called with its signature.

``EXACT`` computes in float64; ``TORCH`` in bf16 as PyTorch does, rounding after every operator,
with norm and softmax in fp32 inside: what the kernels have to be as good as. Both read the same
arguments, kernel-layout weights and transposed hidden states included, and share no code with the
kernels but the order of tokens in HBM, which has tests of its own. Work is cut into pieces, so that
full-size shapes fit into memory.
"""

import functools
import inspect
import math
from types import SimpleNamespace

import torch

from tests.llama.every import llama

QUERIES = 512  # rows of scores at a time


def from_runs(rows):
    """Features on axis 0 in the order of tiles -> as they were: partition p has the p-th run."""
    return rows.unflatten(0, (-1, 128)).transpose(0, 1).flatten(0, 1)


def plain_weight(weight_hbm, k):
    """Kernel weight -> [N, k], both sides in the order of tiles, k whole tiles of 128."""
    tiles = weight_hbm.reshape(128, -1, k // 128, 128)
    return tiles.permute(1, 3, 2, 0).reshape(-1, k)


def of_runs(columns):
    """Scales [128, tiles] of features in runs -> one a feature."""
    return columns.reshape(-1)


def of_tiles(columns):
    """The same in the order of tiles."""
    return columns.t().reshape(-1)


def lanes_of(heads):
    """(tiles of 128 lanes that a head takes, heads a tile holds, lanes of each: whole quadrants of
    32)."""
    depth = math.ceil(heads.head_dim / 32) * 32
    return math.ceil(depth / 128), max(1, 128 // depth), depth


def in_tiles(rows, heads, group):
    """Heads [T, n, D], ``group`` a KV head -> [tiles, 128, T], zeros where there is none."""
    (slots, stack, depth), d = lanes_of(heads), heads.head_dim
    stacks = math.ceil(heads.kv_heads / stack)
    padded = rows.new_zeros(len(rows), stacks * stack * group, depth)
    padded[:, : rows.shape[1], :d] = rows
    tiles = padded.reshape(-1, stacks, stack, group, depth).transpose(2, 3).flatten(3)
    whole = torch.nn.functional.pad(tiles, (0, 128 * slots - stack * depth))
    halves = whole.unflatten(3, (slots, 128)).permute(3, 1, 2, 4, 0)
    return halves.flatten(0, 2)


def from_tiles(tiles, heads, group):
    """The inverse, of [128, tiles, T]."""
    slots, stack, depth = lanes_of(heads)
    rows = tiles.permute(2, 1, 0).unflatten(1, (slots, -1, group))  # [T, slots, stacks, group, 128]
    rows = rows.permute(0, 2, 3, 1, 4).flatten(3)[..., : stack * depth]
    rows = rows.unflatten(3, (stack, depth))[..., : heads.head_dim]
    return rows.transpose(2, 3).flatten(1, 3)[:, : group * heads.kv_heads]


def root_in_queries(heads):
    """What queries between two kernels are divided by: sqrt(D) where that rounds nothing."""
    root = math.sqrt(heads.head_dim)
    return root if math.frexp(root)[0] == 0.5 else 1.0


def in_positions(bias, lanes):
    """A bias [.., keys] in the order of at most so many lanes, which have a run of keys each."""
    length = bias.shape[-1]
    runs = next(n for n in range(math.ceil(length / lanes), length + 1) if length % n == 0)
    return bias.unflatten(-1, (runs, -1)).transpose(-2, -1).flatten(-2)


ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu_pytorch_tanh": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
}


class Reference:
    """The kernels' operators in ``dtype``; normalisation and softmax in ``wide``."""

    def __init__(self, dtype):
        self.dtype = dtype
        self.wide = torch.float64 if dtype is torch.float64 else torch.float32

    def __getattr__(self, name):
        """The reference of a kernel, that is ``of_`` its name: it gets the arguments by name."""
        if not name.endswith("_kernel"):
            raise AttributeError(name)
        signature, own = inspect.signature(getattr(llama, name).function), f"of_{name}"

        def called(*args, **given):
            bound = signature.bind(*args, **given)
            bound.apply_defaults()
            return getattr(type(self), own)(self, SimpleNamespace(**bound.arguments))

        called.__signature__ = signature
        return called

    def normed(self, x, norm, gain=None):
        """RMSNorm of rows [T, H], or the rows as they are, times columns of a gain if any."""
        wide = x.to(self.wide)
        if norm is not None:
            wide = wide / (wide.pow(2).sum(-1, keepdim=True) / norm.features + norm.eps).sqrt()
        return (wide if gain is None else wide * of_runs(gain)).to(self.dtype)

    def sum_of(self, x_hbm, delta_hbm, length):
        """The residual sum in rows [T, H], rounded as the kernels store it."""
        return llama.from_blocks(x_hbm if delta_hbm is None else x_hbm + delta_hbm, length)

    def product(self, x, weight_hbm, runs_in, runs_out, scale=None):
        """rows @ W.T, times one scale a feature if any, of a product that is rounded before;
        ``runs``: features in and out as they are, not in the order of tiles."""
        out = []
        k = x.shape[1]
        for piece in weight_hbm.split(8 * k, 1):
            weight = plain_weight(piece, k)
            if runs_in:
                weight = from_runs(weight.t()).t()
            out.append(x.to(self.dtype) @ weight.to(self.dtype).t())
        joined = torch.cat(out, 1)
        joined = from_runs(joined.t()).t() if runs_out else joined
        return joined if scale is None else (joined.to(self.wide) * scale).to(self.dtype)

    def adapted(self, rows, sizes, adapters):
        """B A x of each projection, side by side in the columns of B; ``rows`` and ``sizes`` say
        for each: x [T, K], whether features in and out are in runs, and the columns."""
        a_hbm, b_hbm, chosen_hbm = adapters
        ranks, found, start = len(b_hbm), [], 0
        for x, (runs_in, runs_out, width) in zip(rows, sizes):
            k = x.shape[1]
            a = a_hbm[:, start * ranks : (start + k // 128) * ranks].reshape(128, -1, ranks)
            a = (a if runs_in else a.transpose(0, 1)).reshape(k, ranks).to(self.dtype)
            b, b_hbm = b_hbm[:, :width].t(), b_hbm[:, width:]
            b = from_runs(b) if runs_out else b
            low = (x.to(self.dtype) @ a) * chosen_hbm.t().to(self.dtype)
            found.append(low @ b.t().to(self.dtype))
            start += k // 128
        return torch.cat(found, 1)

    def of_linear_kernel(self, g):
        scale = gain = None
        if g.scales_hbm is not None:
            gain = g.scales_hbm[:, -len(g.x_hbm) // 128 :]
            scale = of_runs(g.scales_hbm[:, : -len(g.x_hbm) // 128])
        x = self.normed(llama.from_blocks(g.x_hbm, 1).to(self.dtype), g.norm, gain)
        return self.product(x, g.weight_hbm, True, True, scale)

    def scales(self, x_hbm, scales_hbm, heads):
        """Of an attention kernel: one a feature of Q, K and V, the gain, one a feature out."""
        if scales_hbm is None:
            return None, None, None
        turned, hidden = heads.stacks * (heads.group + 1), len(x_hbm) // 128
        width = heads.kv_heads * heads.head_dim
        qk, v, gain, out = scales_hbm.split([turned, width, hidden, hidden], 1)
        spare = torch.ones(-width % 128)  # features that no value has
        return torch.cat((of_tiles(qk), v[0], spare)), gain, of_runs(out)

    def rotate(self, x, cos_hbm, sin_hbm):
        """[T, heads, D] with the tables' first head of lanes [128, T]."""
        half = x.shape[-1] // 2
        cos, sin = (table[:half].t()[:, None].to(self.dtype) for table in (cos_hbm, sin_hbm))
        low, high = x[..., :half], x[..., half:]
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

    def qkv(self, g, length):
        """The residual sum in rows; rotated q [T, q_heads, D] and k [T, kv_heads, D], and v, from
        tiles of heads; and one scale a feature of the output."""
        stream = self.sum_of(g.x_hbm, g.delta_hbm, length)
        scale, gain, out_scale = self.scales(g.x_hbm, g.scales_hbm, g.heads)
        x, heads = self.normed(stream.to(self.dtype), g.norm, gain), g.heads
        rows = self.product(x, g.qkv_w_hbm, True, False, scale)
        if g.a_hbm is not None:
            turned = heads.stacks * heads.group * 128, heads.stacks * 128
            columns = *turned, rows.shape[1] - sum(turned)
            sizes = [(True, False, width) for width in columns]
            rows = rows + self.adapted([x] * 3, sizes, (g.a_hbm, g.b_hbm, g.chosen_hbm))
        if g.qkv_b_hbm is not None:
            rows = rows + g.qkv_b_hbm.to(self.dtype)
        d, group = heads.head_dim, heads.group
        q_end = heads.stacks * group * 128
        k_end = q_end + heads.stacks * 128
        tiles = rows[:, :k_end].unflatten(1, (-1, 128)).permute(2, 1, 0)  # [128, tiles, T]
        q = from_tiles(tiles[:, : heads.stacks * group], heads, group)
        k = from_tiles(tiles[:, heads.stacks * group :], heads, 1)
        v = rows[:, k_end : k_end + heads.kv_heads * d].reshape(-1, heads.kv_heads, d)
        if g.gains_hbm is not None:
            norm = g.norm._replace(features=d)
            q, k = (
                self.normed(rows, norm) * g.gains_hbm[:d, side].to(self.dtype)
                for side, rows in enumerate((q, k))
            )
        q, k = (self.rotate(rows, g.cos_hbm, g.sin_hbm) for rows in (q, k))
        return stream, q, k, v, out_scale

    def results(self, g, length, stream, k, v, *first):
        """A kernel's first results, then keys, values and, behind a delta, the residual sum."""
        results = *first, k.flatten(1), v.flatten(1)
        return results if g.delta_hbm is None else (*results, llama.in_blocks(stream, length))

    def output(self, g, context, length, scale):
        """Contexts [T, q_heads, D] -> partial output [H, T]."""
        x = in_tiles(context, g.heads, g.heads.group).flatten(0, 1).t()
        rows = self.product(x, g.out_w_hbm, False, True, scale)
        if g.a_hbm is not None:  # A and B of the output are the last ones
            ranks = len(g.b_hbm)
            own = g.a_hbm[:, -x.shape[1] // 128 * ranks :], g.b_hbm[:, -rows.shape[1] :]
            sizes = [(False, True, rows.shape[1])]
            rows = rows + self.adapted([x], sizes, (*own, g.chosen_hbm))
        return llama.in_blocks(rows, length)

    def weights(self, parts, hidden):
        """Softmax over the concatenated scores -> weights in ``dtype``; True hides a key."""
        scores = torch.cat(parts, -1).to(self.wide).masked_fill(hidden, -math.inf)
        return torch.softmax(scores, -1).to(self.dtype)

    def of_attention_prefill_kernel(self, g):
        heads, length = g.heads, g.x_hbm.shape[1] // g.batch
        stream, q, k, v, out_scale = self.qkv(g, length)
        root = math.sqrt(heads.head_dim)
        context = torch.zeros_like(q)
        for b, head in ((b, h) for b in range(g.batch) for h in range(heads.q_heads)):
            kv_head, first = head // heads.group, b * length
            keys, values = (t[first : first + length, kv_head] for t in (k, v))
            for start in range(0, length, QUERIES):
                end = min(length, start + QUERIES)
                query, key = torch.arange(start, end)[:, None], torch.arange(end)[None]
                hidden = (key > query) | (query - key >= (g.window or length))
                if g.bias_hbm is not None:
                    hidden = hidden | (g.bias_hbm[b, :end] != 0)
                scores = q[first + start : first + end, head] @ keys[:end].t() / root
                weights = self.weights([scores], hidden)
                context[first + start : first + end, head] = weights @ values[:end]
        return self.results(g, length, stream, k, v, self.output(g, context, length, out_scale))

    def named(self, keys_hbm, values_hbm, bias_hbm, rows_hbm, heads, batch):
        """A sequence's keys and values [B, heads, L, D] from the rows that it has, one after the
        other, and the bias in their order."""
        lanes, run = len(rows_hbm), keys_hbm.shape[1]
        bias = bias_hbm.unflatten(-1, (-1, run, lanes)).transpose(-2, -1).flatten(-3)
        apart = keys_hbm.dim() == 3  # a head's rows: [B, heads, rows] instead of [B, 1, rows]
        named = rows_hbm.long().view(lanes, batch, -1, heads.kv_heads if apart else 1)
        named = named.permute(1, 3, 2, 0).flatten(2)
        shape = batch, -1, heads.kv_heads, heads.head_dim
        caches = [
            t[named].flatten(2, 3) if apart else t[named].reshape(shape).transpose(1, 2)
            for t in (keys_hbm, values_hbm)
        ]
        return *caches, bias

    def of_attention_decode_kernel(self, g):
        g.active_hbm = g.owners_hbm = g.rows_hbm = g.window = None
        g.qkv_b_hbm = g.gains_hbm = g.scales_hbm = g.a_hbm = None
        return self.over_cache(g, 128 // g.heads.kv_heads)

    def of_attention_chunk_kernel(self, g):
        return self.over_cache(g, 128)

    def over_cache(self, g, lanes):
        """New tokens over a cache that lies on so many ``lanes``, and over themselves."""
        heads, past = g.heads, g.bias_hbm.shape[-1]
        n = g.x_hbm.shape[1] // (len(g.bias_hbm) if g.owners_hbm is None else 1)
        stream, q, k, v, out_scale = self.qkv(g, n)
        batch, root = g.x_hbm.shape[1] // n, math.sqrt(heads.head_dim)
        caches = g.keys_hbm, g.values_hbm
        if g.rows_hbm is None:
            bias = in_positions(g.bias_hbm, lanes)
        else:
            *caches, bias = self.named(*caches, g.bias_hbm, g.rows_hbm, heads, batch)
        context = torch.zeros_like(q)
        for b, head in ((b, h) for b in range(batch) for h in range(heads.q_heads)):
            kv_head, own = head // heads.group, slice(b * n, (b + 1) * n)
            later = torch.ones(n, n, dtype=torch.bool).triu(1)
            later |= torch.ones(n, n, dtype=torch.bool).tril(-(g.window or n))
            unseen = later if g.active_hbm is None else g.active_hbm[b] != 0
            cached = (bias[b] != 0).expand(n, past)
            if g.owners_hbm is not None:  # each token sees what its sequence does
                owner = g.owners_hbm.argmax(0)
                cached, unseen = bias[owner] != 0, unseen | (owner[:, None] != owner)
            hidden = torch.cat((cached, unseen), 1)
            cached = (t[b, kv_head].to(self.dtype) for t in caches)
            keys, values = (torch.cat((t, new[own, kv_head])) for t, new in zip(cached, (k, v)))
            weights = self.weights([q[own, head] @ keys.t() / root], hidden)
            seen = weights[:, :past] @ values[:past]
            context[own, head] = seen + weights[:, past:] @ values[past:]
        return self.results(g, n, stream, k, v, self.output(g, context, n, out_scale))

    def of_attention_projection_kernel(self, g):
        stream, q, k, v, _ = self.qkv(g, g.length)
        heads, q = g.heads, q / root_in_queries(g.heads)
        tiles = torch.cat((in_tiles(q, heads, heads.group), in_tiles(k, heads, 1)))
        return self.results(g, g.length, stream, k, v, tiles.transpose(0, 1))

    def of_attention_share_kernel(self, g):
        heads, batch, past = g.heads, g.batch, g.bias_hbm.shape[1]
        q, k = from_tiles(g.q_hbm, heads, heads.group), from_tiles(g.k_hbm, heads, 1)
        v, n, bias = g.v_hbm.unflatten(1, (heads.kv_heads, -1)), len(q) // batch, g.bias_hbm
        bias = in_positions(bias, 128)
        context = torch.zeros_like(q, dtype=self.dtype)
        found = torch.zeros(batch, heads.kv_heads, heads.group * n, 2, dtype=self.wide)
        for b, head in ((b, h) for b in range(batch) for h in range(heads.q_heads)):
            kv_head, own = head // heads.group, slice(b * n, (b + 1) * n)
            hidden = torch.cat((bias[b].expand(n, past), g.active_hbm[b]), 1) != 0
            both = ((g.keys_hbm, k), (g.values_hbm, v))
            keys, values = (
                torch.cat((t[b, kv_head], new[own, kv_head])).to(self.dtype) for t, new in both
            )
            scores = q[own, head].to(self.dtype) @ keys.t() * root_in_queries(heads)
            scores = scores / math.sqrt(heads.head_dim)
            context[own, head] = self.weights([scores], hidden) @ values
            scores = scores.to(self.wide).masked_fill(hidden, -math.inf)
            first = head % heads.group * n
            found[b, kv_head, first : first + n] = torch.stack(
                (-scores.amax(1), (scores - scores.amax(1, keepdim=True)).exp().sum(1)), 1
            )
        return in_tiles(context, heads, heads.group).transpose(0, 1), found

    def of_attention_output_kernel(self, g):
        rows = from_tiles(g.context_hbm, g.heads, g.heads.group).to(self.dtype)
        scale = None if g.scales_hbm is None else of_runs(g.scales_hbm[:, -g.features // 128 :])
        return self.output(g, rows, g.length, scale)

    def of_norm_kernel(self, g):
        rows = llama.from_blocks(g.x_hbm, g.length)
        return llama.in_blocks(self.normed(rows, g.norm, g.gain_hbm), g.length)

    def of_swiglu_mlp_kernel(self, g):
        length, hidden = g.length or g.x_hbm.shape[1], len(g.x_hbm) // 128
        rows, gain, scales = self.sum_of(g.x_hbm, g.delta_hbm, length), None, [None] * 3
        if g.scales_hbm is not None:
            tiles = g.gate_hbm.shape[1] // len(g.x_hbm)
            *both, gain, down = g.scales_hbm.split([tiles, tiles, hidden, hidden], 1)
            scales = [*map(of_tiles, both), of_runs(down)]
        x, both = self.normed(rows.to(self.dtype), g.norm, gain), (g.gate_hbm, g.up_hbm)
        gate, up = (self.product(x, w, True, False, s) for w, s in zip(both, scales))
        more, f = (g.a_hbm, g.b_hbm, g.chosen_hbm), gate.shape[1]
        if g.a_hbm is not None:
            both = self.adapted([x, x], [(True, False, f)] * 2, more)
            gate, up = gate + both[:, :f], up + both[:, f:]
        inner = ACTIVATIONS[g.act](gate) * up
        out = self.product(inner, g.down_hbm, False, True, scales[2])
        if g.a_hbm is not None:
            own = g.a_hbm[:, -f // 128 * len(g.b_hbm) :], g.b_hbm[:, 2 * f :], g.chosen_hbm
            out = out + self.adapted([inner], [(False, True, out.shape[1])], own)
        partial = llama.in_blocks(out, length)
        return partial if g.delta_hbm is None else (partial, llama.in_blocks(rows, length))


# The largest error of one sample over that of another, of equally many roundings each: of a new
# key behind norm, product and rotation 0.31 to 1.47 over 13 draws, whose root mean squares were
# 0.91 of PyTorch's.
LARGEST_BY_CHANCE = 1.5


def assert_close(got, exact, bound):
    """Assert that all results are finite, and differ by at most ``bound`` times the largest."""
    for ours, theirs in zip(got, exact, strict=True):
        assert torch.isfinite(ours).all()
        assert (ours.double() - theirs.double()).abs().max() <= bound * theirs.abs().max()


def check_error(got, torch_bf16, exact, steps=0, times=1.1):
    """Assert that errors against float64 are at most ``times`` those of PyTorch in bf16.

    That is their root mean square; of fewer than 2000 results two samples of equally many roundings
    may differ by chance by 2 / sqrt(n). The largest error is one number, whose ratio went from 0.83
    to 1.23 over 24 seeds of a product behind a norm, while the root mean square of all seeds had
    1.00 and the mean of the largest errors 1.01: so it may be what chance has been seen to make of
    it, and half a bf16 step of its result, the final rounding, is left out. ``steps`` bf16 steps of
    the largest result are allowed beyond.
    """
    assert got.shape == exact.shape
    assert torch.isfinite(got).all()
    step = steps * 2.0**-8 * exact.abs().max().item()
    ours, theirs = (value.double() - exact for value in (got, torch_bf16))
    chance = 1 + 2 / math.sqrt(got.numel())
    strict = times if got.numel() >= 2000 else times * chance
    assert ours.pow(2).mean().sqrt() <= strict * theirs.pow(2).mean().sqrt() + step / 16
    half_step = torch.exp2(torch.floor(torch.log2(exact.abs() + 1e-300)) - 8)
    largest = max(times * chance, LARGEST_BY_CHANCE)
    assert (ours.abs() - half_step).max() <= largest * theirs.abs().max() + step


EXACT, TORCH = Reference(torch.float64), Reference(torch.bfloat16)
