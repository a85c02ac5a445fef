"""Llama's whole decode step as one kernel of the current language (`nki`, SDK 2.29 and later).

``decode_step_kernel`` runs all layers, the final norm and the head for one new token of each
sequence, or for a few (speculation). Nothing stops the stream of weights: collectives between ranks
are part of the kernel, and while one runs DMA brings the next weights as far as SBUF holds them.
Hidden states never leave the chip. It is built from the tile helpers of models/today.py, with the
axis letters, layouts and names; docs/decode_step.md draws one layer. The modules behind it call the
kernel once a step and models/today.py's kernels for prompts (`main.py --llama models/step.py`).

Of the two physical cores of a logical one each makes half of the inner features and of the logits,
and contracts half of the context and of the inner features: behind each collective they exchange
and add what they have. Python is what the compiler's parser takes, but for the modules.
"""

import functools
import inspect
import linecache
import math
import os

import nki
import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl
import torch
from torch import nn

import llama
from llama import (
    P_MAX,
    NeuronConfigNKI,  # noqa: F401  (the driver asks this file for it)
    cache_runs,
    spans,
    weight_pieces,
    whole_tiles,
)
from models.today import (
    FP32,
    HeadShape,
    InnerTokens,
    Linear,
    Norm,
    Piece,
    Projection,
    attend_cached,
    attention_prefill_kernel,
    bytes_of,
    cached_sequences,
    filled,
    key_rows,
    linear_kernel,
    linear_of,
    norm_scales,
    project_qkv,
    psum_parts,
    sequences_at_once,
    swapped_halves,
    swiglu_mlp_kernel,
    tile_of,
    times_scales,
)

SBUF_BYTES = 176 * 1024  # of a partition, for a compiler on gen2, the least of all
STEP_CACHE_BYTES = 88 * 1024  # the cache of a tile of sequences: eight with 640 keys
STEP_PIECE_BYTES = 16384  # of a partition, in one load: larger ones leave SBUF unused
LOGITS_BYTES = 64 * 1024  # the logits that ranks exchange at once
STREAM_BYTES = 64 * 1024  # of these for weights: DMA brings them while a collective takes 60 us
MOST_INSTRUCTIONS = 5_000_000  # in a graph (the compiler's message XTP002, aws-neuron-sdk #819)


class LayerStep(nl.NKIObject):
    """What all layers share: heads, the norm (or None), ranks (a ReplicaGroup or None), tables cos
    and sin [128, T], constants, the positions of the sequences' first new tokens [1, B]. (first,
    count) of the ``sequences`` that share a tile of scores, and of their tokens, the ``parts``;
    ``each`` new tokens of a sequence."""

    heads: HeadShape
    norm: Norm
    ranks: ncc.ReplicaGroup
    cos_sb: nl.NkiTensor
    sin_sb: nl.NkiTensor
    identity_sb: nl.NkiTensor
    swap_sb: nl.NkiTensor
    zero_sb: nl.NkiTensor
    starts_sb: nl.NkiTensor
    sequences: list
    parts: list
    each: int

    def projection(self, x_sb):
        """The Projection of hidden states [128, H/128, T] behind their norm."""
        scales = norm_scales(x_sb, self.norm, self.parts)
        cos_sb, sin_sb = times_scales(self.cos_sb, scales), times_scales(self.sin_sb, scales)
        return Projection(self, x_sb, scales, cos_sb, sin_sb, self.parts)


# --- Two physical cores ---------------------------------------------------------------------------


def own_tiles(tiles):
    """(first, count) of the tiles that are this physical core's: of a single tile one has none."""
    return (spans(tiles, math.ceil(tiles / nl.num_programs())) + [(tiles, 0)])[nl.program_id(0)]


def received(x_sb):
    """The other core's tile of the same shape @ SBUF."""
    other, theirs_sb = 1 - nl.program_id(0), tile_of(x_sb.shape, x_sb.dtype)
    nisa.sendrecv(src=x_sb, dst=theirs_sb, send_to_rank=other, recv_from_rank=other, pipe_id=0)
    return theirs_sb


def reduced(x_sb, ranks):
    """Parts of a result [128, tiles, T] @ SBUF, summed over ranks and cores."""
    if ranks is not None:
        partial_sb, x_sb = x_sb, tile_of(x_sb.shape, x_sb.dtype)
        flat = P_MAX, x_sb.shape[1] * x_sb.shape[2]
        sources, results = partial_sb.reshape(flat), x_sb.reshape(flat)
        ncc.all_reduce(srcs=[sources], dsts=[results], replica_group=ranks, op=nl.add)
    return x_sb if nl.num_programs() == 1 else added(x_sb, received(x_sb))


# --- Products that stay on chip -------------------------------------------------------------------


def pieces_of(tiles, k_tiles):
    """(first, count) of the pieces in which DMA brings some of a weight's tiles, (first, count)."""
    return spans(tiles[1], max(1, STEP_PIECE_BYTES // (2 * k_tiles * P_MAX)), tiles[0])


def product_of(weight_hbm, x_sb, k_tiles):
    """``W @ x`` -> [128, N/128, T] @ SBUF for x_sb [128, K/128, T], of which ``k_tiles`` (first,
    count) are this core's: its part of the sum, zeros where it has none."""
    linear, tokens = Linear(weight_hbm, x_sb.shape[1]), x_sb.shape[2]
    own = nl.ds(k_tiles[0], k_tiles[1])
    tiled_hbm = weight_hbm.reshape((P_MAX, linear.tiles, linear.k_tiles, P_MAX))
    if k_tiles[1] == 0:
        return filled((P_MAX, linear.tiles, tokens), 0.0, x_sb.dtype)
    out_sb, own_sb = tile_of((P_MAX, linear.tiles, tokens), x_sb.dtype), x_sb[:, own]
    for span in pieces_of((0, linear.tiles), k_tiles[1]):
        piece = Piece(span[0], nl.load(tiled_hbm[:, nl.ds(span[0], span[1]), own]))
        for part in psum_parts(span[1], tokens):
            part_sb = out_sb[:, span[0] + part[0], nl.ds(part[1], part[2])]
            nisa.tensor_copy(dst=part_sb, src=piece.product(part, own_sb))
    return out_sb


# --- A layer --------------------------------------------------------------------------------------


def keep(step, n, rows_sb, cache_hbm):
    """New keys or values of part n, rows [tokens, kv_heads * D], to their places in the cache: a
    transfer for each sequence, whose address is data."""
    (_, kv_heads, room, d), each, (first, count) = cache_hbm.shape, step.each, step.sequences[n]
    pattern = [[d, each], [room * d, kv_heads], [1, d]]
    for b in range(count):
        at_sb, begin = step.starts_sb[:, nl.ds(first + b, 1)], (first + b) * kv_heads * room * d
        place_hbm = cache_hbm.ap(pattern, offset=begin, scalar_offset=at_sb, indirect_dim=2)
        rows_of_step_sb = rows_sb[nl.ds(b * each, each), :]
        nisa.dma_copy(dst=place_hbm, src=rows_of_step_sb.reshape((each, kv_heads, d)))


def load_cache(step, n, keys_hbm, values_hbm, bias_hbm):
    """CachedSequences of part n."""
    first, count = step.sequences[n]
    return cached_sequences(keys_hbm, values_hbm, bias_hbm, first, count, step.heads, step.each)


def attention(step, x_sb, qkv_hbm, out_hbm, keys_hbm, values_hbm, bias_hbm, cache):
    """Norm, QKV, RoPE, attention over the cache and its update, output projection of hidden states
    [128, H/128, T], summed over the ranks; ``cache`` is that of part 0."""
    heads, dtype, caches = step.heads, x_sb.dtype, [cache]
    qkv, qk = Linear(qkv_hbm, x_sb.shape[1]), heads.qk_tiles
    pieces = pieces_of((0, qk), qkv.k_tiles) + pieces_of((qk, qkv.tiles - qk), qkv.k_tiles)
    qk_sb, v_sb = project_qkv(step.projection(x_sb), qkv, pieces)
    context_sb = tile_of((P_MAX, heads.q_tiles, x_sb.shape[2]), dtype)
    if heads.leaves_lanes():
        nisa.memset(dst=context_sb, value=0.0)
    for n in range(len(step.parts)):
        if n + 1 < len(step.parts):
            caches.append(load_cache(step, n + 1, keys_hbm, values_hbm, bias_hbm))
        attend_cached(qk_sb, v_sb[n], caches[n], heads, context_sb)
    delta_sb = reduced(product_of(out_hbm, context_sb, own_tiles(heads.q_tiles)), step.ranks)
    for n in range(len(step.parts)):  # after an exchange both cores have read the caches
        if nl.program_id(0) == 0:
            start, tokens = step.parts[n]
            keep(step, n, key_rows(qk_sb, start, tokens, heads), keys_hbm)
        if nl.program_id(0) == nl.num_programs() - 1:
            keep(step, n, v_sb[n], values_hbm)
    return delta_sb


def mlp(step, x_sb, gate_hbm, up_hbm, down_hbm):
    """Norm and SwiGLU MLP of hidden states [128, H/128, T]: a core's part of the sum."""
    k_tiles, tokens = x_sb.shape[1], x_sb.shape[2]
    gate, up = Linear(gate_hbm, k_tiles), Linear(up_hbm, k_tiles)
    inner_sb = tile_of((P_MAX, gate.tiles, tokens), x_sb.dtype)
    tiles = own_tiles(gate.tiles)
    along_sb = norm_scales(x_sb, step.norm, [(0, tokens)]).along_sb
    passed = InnerTokens(None, x_sb, along_sb, inner_sb)
    for span in pieces_of(tiles, k_tiles):
        gate_piece, up_piece = gate.load(span[0], span[1]), up.load(span[0], span[1])
        for part in psum_parts(span[1], tokens):
            passed.gate(gate_piece, up_piece, part, step.zero_sb)
    return product_of(down_hbm, inner_sb, tiles)


def added(x_sb, delta_sb):
    """The residual stream behind a block."""
    sum_sb = tile_of(x_sb.shape, x_sb.dtype)
    nisa.tensor_tensor(dst=sum_sb, data1=x_sb, data2=delta_sb, op=nl.add)
    return sum_sb


# --- The head -------------------------------------------------------------------------------------


def head_rows(head, x_sb, along_sb, tiles):
    """Logits of hidden states behind their norm, whose scales are ``along_sb``: those of the
    ``tiles`` (first, count), [128, T, count] @ SBUF. Partition p has a run of features."""
    tokens = x_sb.shape[2]
    rows_sb = tile_of((P_MAX, tokens, tiles[1]), x_sb.dtype)
    # small pieces end the step
    for span in weight_pieces(tiles[1], 2 * head.k_tiles * P_MAX, tokens, last=True):
        piece = head.load(tiles[0] + span[0], span[1])
        for part in psum_parts(span[1], tokens):
            out_psum = piece.product((part[0], 0, tokens), x_sb)
            out_sb = rows_sb[:, :, span[0] + part[0]]
            nisa.tensor_tensor(dst=out_sb, data1=out_psum, data2=along_sb, op=nl.multiply)
    return rows_sb


def gathered_logits(rows_sb, ranks):
    """``head_rows`` of all ranks, [128, ranks, T, count] @ SBUF."""
    tokens, count = rows_sb.shape[1], rows_sb.shape[2]
    if ranks is None:
        return rows_sb.expand_dim(1)
    all_sb = tile_of((P_MAX, ranks.size * tokens * count), rows_sb.dtype)
    own_sb = rows_sb.reshape((P_MAX, tokens * count))
    ncc.all_gather(srcs=[own_sb], dsts=[all_sb], replica_group=ranks, collective_dim=1)
    return all_sb.reshape((P_MAX, ranks.size, tokens, count))


def store_logits(logits_hbm, all_sb, first, tiles):
    """Store what ``gathered_logits`` made, from tile ``first`` of every rank's ``tiles`` on, in
    logits [T, ranks, V] fp32 @ HBM."""
    size, tokens, count = all_sb.shape[1], all_sb.shape[2], all_sb.shape[3]
    wide_sb, vocabulary = tile_of(all_sb.shape, FP32), logits_hbm.shape[2]
    nisa.tensor_copy(dst=wide_sb, src=all_sb)
    whole, rest = vocabulary // tiles, vocabulary % tiles  # behind the vocabulary are zeros
    for run in ((0, whole, count), (whole, 1, min(count, rest - first))):
        if run[1] > 0 and run[2] > 0:
            pattern = [[tiles, run[1]], [vocabulary, size], [size * vocabulary, tokens]]
            place_hbm = logits_hbm.ap(pattern + [[1, run[2]]], offset=run[0] * tiles + first)
            part_sb = wide_sb[nl.ds(run[0], run[1]), :, :, nl.ds(0, run[2])]
            nisa.dma_copy(dst=place_hbm, src=part_sb)


def run_head(head, x_sb, norm, ranks, vocabulary):
    """Logits of all ranks [T, ranks, vocabulary] fp32 @ HBM. A group of them is gathered while the
    next weights arrive, and stored while the next group is."""
    tokens, size, item = x_sb.shape[2], 1 if ranks is None else ranks.size, bytes_of(x_sb.dtype)
    along_sb, found = norm_scales(x_sb, norm, [(0, tokens)]).along_sb, []
    most = max(1, LOGITS_BYTES // (tokens * (item + (item + bytes_of(FP32)) * size)))
    start, count = own_tiles(head.tiles)
    last = count // 8
    groups = spans(count - last, most, start) + spans(last, most, start + count - last)
    logits_hbm = nl.ndarray((tokens, size, vocabulary), dtype=FP32, buffer=nl.shared_hbm)
    for n in range(len(groups) + 1):
        if n < len(groups):
            found.append(gathered_logits(head_rows(head, x_sb, along_sb, groups[n]), ranks))
        if n > 0:
            store_logits(logits_hbm, found[n - 1], groups[n - 1][0], head.tiles)
    return logits_hbm


# --- The kernel -----------------------------------------------------------------------------------


def hidden_of_ranks(x_hbm, features, ranks):
    """Hidden states [features / 128, 128, T] of which x [H, T] @ HBM are all or a rank's: [128,
    features / 128, T] @ SBUF. The first weights arrive meanwhile."""
    tokens, k_tiles = x_hbm.shape[1], features // P_MAX
    x_sb = nl.load(x_hbm.reshape((x_hbm.shape[0] // k_tiles, k_tiles * tokens)))
    if x_hbm.shape[0] < features:
        own_sb, x_sb = x_sb, tile_of((P_MAX, k_tiles * tokens), x_hbm.dtype)
        ncc.all_gather(srcs=[own_sb], dsts=[x_sb], replica_group=ranks, collective_dim=0)
    return x_sb.reshape((P_MAX, k_tiles, tokens))


def check_step(x_hbm, features, weights, caches, heads, tables, batch):
    """Refuse sizes that one program does not hold, and tensors that do not belong together."""
    tokens, layers = x_hbm.shape[1], len(caches[0])
    k_tiles, room, length = features // P_MAX, caches[0][0].shape[2], tables[2].shape[1]
    rows = heads.q_heads * tokens // batch
    assert tokens % batch == 0, f"{tokens} new tokens are no {batch} sequences of one length"
    assert rows <= P_MAX, f"{rows} rows of scores of a sequence do not fit {P_MAX} partitions"
    assert tokens <= P_MAX, f"{tokens} new tokens do not fit {P_MAX} partitions"
    assert length <= room, f"the bias has {length} keys, the caches have {room}"
    lanes, runs = cache_runs(length, P_MAX // heads.kv_heads)
    assert lanes * heads.kv_heads >= P_MAX // 4 or length < P_MAX, (
        f"{length} keys lie in runs of {runs} on {lanes * heads.kv_heads} partitions, expected "
        f"{P_MAX // 4} or more: take a multiple of {P_MAX} keys"
    )
    itemsize = bytes_of(x_hbm.dtype)
    kept = itemsize * (length + tokens) * (heads.stacks + 1) + itemsize * tokens * 4 * k_tiles
    kept += 2 * itemsize * runs * (heads.head_dim + 1) + STREAM_BYTES
    assert kept <= SBUF_BYTES, (
        f"{length} keys and weights take {kept} bytes of a partition, expected at most {SBUF_BYTES}"
    )
    columns, contexts = heads.qk_tiles * P_MAX + heads.kv_features, heads.q_tiles * P_MAX
    inner, passes = Linear(weights[2][0], k_tiles).tiles * P_MAX, 0
    wide, sizes = (inner, features), ((columns, features), (features, contexts))
    sizes, names = sizes + (wide, wide, (features, inner)), ("qkv", "out", "gate", "up", "down")
    for n in range(len(sizes)):
        linear_of(weights[n][0], sizes[n][0], sizes[n][1], names[n])
        passes += layers * weights[n][0].shape[1] // P_MAX
    assert passes <= MOST_INSTRUCTIONS, (
        f"the step takes {passes} products, more than the {MOST_INSTRUCTIONS} instructions of a "
        "graph; take a larger degree"
    )


def decode_step_kernel(
    x_hbm,
    norm,
    qkv_hbm,
    out_hbm,
    gate_hbm,
    up_hbm,
    down_hbm,
    head_hbm,
    cos_hbm,
    sin_hbm,
    keys,
    values,
    starts_hbm,
    bias_hbm,
    heads,
    batch,
    vocabulary,
    groups=None,
):
    """A decode step of all layers: ``T = batch * each`` new tokens over caches of the sequences.

    x [H, T] embedded tokens, a sequence's next to each other, or a rank's share of their features
    [H / ranks, T]; ``norm`` of all norms. Weights of a rank in the kernels' layout with their
    norms' gains: of QKV, output, gate, up and down a tuple of the layers' [128, columns]; of the
    head [128, columns]. cos and sin [128, T]. ``keys`` and ``values`` are tuples of the layers'
    caches [B, kv_heads, L, D], updated in place: new tokens of a sequence follow each other from
    its position of starts [1, B] int32 on. bias [B, up to L] is 0 for cached keys that count, else
    ``masked``, in the order of ``cache_runs``. ``vocabulary`` is a rank's share; ``groups`` lists
    the ranks that work together (None: one rank).

    -> logits [T, ranks, vocabulary] fp32 of all ranks, then keys and values layer by layer. Two
    cores share the work of a rank. A kernel is what ``kernel_of`` makes of it.
    """
    tokens, dtype, k_tiles = x_hbm.shape[1], x_hbm.dtype, whole_tiles(norm.features)
    weights, features = (qkv_hbm, out_hbm, gate_hbm, up_hbm, down_hbm), k_tiles * P_MAX
    check_step(x_hbm, features, weights, (keys, values), heads, (cos_hbm, sin_hbm, bias_hbm), batch)
    head, cores = Linear(head_hbm, k_tiles), nl.num_programs()
    fits, each, ranks = head.tiles >= cores, tokens // batch, None
    assert fits, f"a head of {head.tiles} tiles of 128, expected one for each of {cores} cores"
    if groups is not None:
        ranks = ncc.ReplicaGroup(groups)
    x_sb, parts = hidden_of_ranks(x_hbm, features, ranks), []
    at_once = sequences_at_once(bias_hbm.shape[1], heads, dtype, each, STEP_CACHE_BYTES)
    sequences = spans(batch, at_once)
    for part in sequences:
        parts.append((part[0] * each, part[1] * each))
    step = LayerStep(
        heads,
        norm,
        ranks,
        nl.load(cos_hbm),
        nl.load(sin_hbm),
        nl.shared_identity_matrix(P_MAX, dtype=dtype),
        swapped_halves(heads.head_dim, dtype),
        filled((P_MAX, 1), 0.0, FP32),
        nl.load(starts_hbm),
        sequences,
        parts,
        each,
    )
    updated, cache = (), load_cache(step, 0, keys[0], values[0], bias_hbm)
    for n in range(len(keys)):
        updated, caches = updated + (keys[n], values[n]), (keys[n], values[n], bias_hbm, cache)
        x_sb = added(x_sb, attention(step, x_sb, qkv_hbm[n], out_hbm[n], *caches))
        part_sb = mlp(step, x_sb, gate_hbm[n], up_hbm[n], down_hbm[n])
        if n + 1 < len(keys):  # before its weights: engines read the cache while ranks add up
            cache = load_cache(step, 0, keys[n + 1], values[n + 1], bias_hbm)
        x_sb = added(x_sb, reduced(part_sb, ranks))
    return (run_head(head, x_sb, norm, ranks, vocabulary),) + updated


OF_LAYERS = "qkv_hbm", "out_hbm", "gate_hbm", "up_hbm", "down_hbm", "keys", "values"


@functools.cache
def kernel_of(layers):
    """``decode_step_kernel`` of so many layers, whose tensors are arguments of their own.

    A device's frontend gives tensors within tuples no place in HBM; the kernel of a whole step that
    ran on one is generated, too (KevGomes1403/nki-moe-megakernel 621932e, transformer_qwen.py).
    """
    names, passed = [], []
    for name in inspect.signature(decode_step_kernel).parameters:
        own = [f"{name}_{n}" for n in range(layers)] if name in OF_LAYERS else [name]
        names += own
        passed.append(f"({', '.join(own)},)" if name in OF_LAYERS else name)
    name = f"{decode_step_kernel.__name__}_{layers}"
    text = f"def {name}({', '.join(names)}):\n    return body({', '.join(passed)})\n"
    linecache.cache[f"<{name}>"] = len(text), None, text.splitlines(keepends=True), f"<{name}>"
    scope = {"__name__": __name__, "body": decode_step_kernel}
    exec(compile(text, f"<{name}>", "exec"), scope)
    return nki.jit(scope[name])


def __getattr__(name):
    """Generated kernels by their names, as the device report and saved graphs ask for them."""
    body, _, layers = name.rpartition("_")
    if body != decode_step_kernel.__name__ or not layers.isdigit():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return kernel_of(int(layers))


# --- Modules of NxDI ------------------------------------------------------------------------------


class LlamaInferenceConfig(llama.LlamaInferenceConfig):
    """llama.py's, but for what a step of this file leaves out."""

    beyond = tuple(
        name for name in llama.LlamaInferenceConfig.beyond if name != "speculation_length"
    )

    def add_derived_config(self):
        """A step of this file takes the guesses that it is asked for, and makes none."""
        self.num_cores_per_group = 1

    def holds_caches(self, rank):
        """Sequences pass in parts here; ``check_step`` says which do not fit."""
        return True

    def lacking(self):
        """What llama.py's kernels do not cover either, and what a step of this file leaves out."""
        given, sampling = self.neuron_config, self.neuron_config.on_device_sampling_config
        drawn = sampling is not None and (
            sampling.dynamic or bool(getattr(sampling, "do_sample", True)) and sampling.top_k != 1
        )
        found = {
            "continuous batching": llama.option(self, "is_continuous_batching"),
            "output_logits": llama.option(self, "output_logits"),
            "vocab_parallel": given.vocab_parallel,
            "sampling on the device": drawn,
        }
        return [*super().lacking(), *(what for what, wrong in found.items() if wrong)]


class StepAttention(llama.NeuronLlamaAttention):
    """Prompts by the kernel of models/today.py."""

    def kernel_results(self, hidden, norm, tables, given):
        weights, heads = (self.qkv_proj.weight, self.o_proj.weight), HeadShape(*self.sizes.of_rank)
        inputs = hidden.stream, hidden.delta, Norm(norm.features, norm.eps), *weights, *tables
        return attention_prefill_kernel(*inputs, heads, hidden.shape[0])


class StepMLP(llama.NeuronLlamaMLP):
    """The same."""

    def kernel_results(self, hidden, norm):
        weights = self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight
        inputs = hidden.stream, hidden.delta, Norm(norm.features, norm.eps), *weights
        results = swiglu_mlp_kernel(*inputs, hidden.shape[1])
        return (results,) if hidden.delta is None else results


class StepLayer(llama.NeuronLlamaDecoderLayer):
    attention_cls, mlp_cls = StepAttention, StepMLP


class StepHead(llama.NeuronLlamaHead):
    """The head of a prompt."""

    def multiply(self, columns):
        return linear_kernel(columns, self.weight, Norm(self.norm.features, self.norm.eps))


class NeuronStepModel(llama.NeuronLlamaModel):
    """llama.py's model; a decode step is one kernel, which updates the caches in place."""

    layer_cls, head_cls = StepLayer, StepHead

    def forward(self, input_ids, attention_mask, position_ids, *more, **later):
        """[logits [B, S, V] or tokens [B], then every cache]."""
        several = input_ids.shape[-1] not in (1, self.neuron_config.speculation_length)
        if several or not llama.is_nki_enabled(self.config):
            return super().forward(input_ids, attention_mask, position_ids, *more, **later)
        result, *caches = self.step(input_ids, attention_mask, position_ids)
        logits = result.reshape(*input_ids.shape, -1)
        if self.on_device_sampling:  # the greedy token; a kernel's own took as long
            return [logits.argmax(-1).squeeze(1).to(torch.int32), *caches]
        return [logits, *caches]

    def embedded(self, input_ids):
        """New tokens [B, S] -> hidden states [H, B * S], or this rank's features of them where they
        are whole partitions: the kernel gathers them while weights arrive."""
        tp, features = self.config.neuron_config.tp_degree, self.config.hidden_size
        if tp > 1 and features % P_MAX == P_MAX % tp == 0:
            rows = nn.functional.embedding(input_ids.long(), self.embed_tokens.weight)
        else:
            rows = llama.pad_tiles(self.embed_tokens(input_ids), -1)
        return rows.flatten(0, 1).t().contiguous()

    def step(self, input_ids, attention_mask, position_ids):
        """The kernel's results for new tokens [B, S] behind cached ones, which the mask [B, L]
        shows."""
        config, caches = self.config, list(self.kv_mgr.past_key_values)
        sizes, attentions = llama.Sizes.of(config), [layer.self_attn for layer in self.layers]
        hidden, mlps = self.embedded(input_ids), [layer.mlp for layer in self.layers]
        dtype, heads = hidden.dtype, HeadShape(*sizes.of_rank)
        mask = attention_mask.to(torch.bool)
        whole = whole_tiles(mask.shape[1]) * P_MAX
        if P_MAX < mask.shape[1] < whole <= caches[0].shape[2]:  # odd lengths make bad runs
            mask = nn.functional.pad(mask, (0, whole - mask.shape[1]))
        runs = cache_runs(mask.shape[1], P_MAX // heads.kv_heads)
        bias = llama._mask_bias(mask, dtype).unflatten(1, runs).transpose(1, 2).reshape(mask.shape)
        logical = llama.option(config, "logical_nc_config", 1)
        cores = int(os.environ.get("NEURON_LOGICAL_NC_CONFIG", 0)) or logical
        weights = (
            *(attention.qkv_proj.weight for attention in attentions),
            *(attention.o_proj.weight for attention in attentions),
            *(getattr(mlp, name).weight for name in llama.MLP_TARGETS for mlp in mlps),
        )
        return kernel_of(len(mlps))[cores](
            hidden,
            Norm(config.hidden_size, config.rms_norm_eps),
            *weights,
            self.lm_head.weight,
            *attentions[0].rotary_emb(position_ids, dtype),
            *caches[::2],
            *caches[1::2],
            position_ids[:, :1].reshape(1, -1).to(torch.int32),
            bias,
            heads,
            input_ids.shape[0],
            self.lm_head.vocabulary,
            (tuple(range(sizes.tp)),) if sizes.tp > 1 else None,
        )


class NeuronLlamaForCausalLM(llama.NeuronLlamaForCausalLM):
    """The class with which the driver compiles, loads and generates."""

    _model_cls = NeuronStepModel

    @classmethod
    def get_config_cls(cls):
        return LlamaInferenceConfig
