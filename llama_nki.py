"""Kernels of llama.py in the current kernel language (`nki`, SDK 2.29 and later).

A file of its own: the submission is SDK 2.21's and imports nothing else, and one text for both
languages would have to hide every instruction behind a helper. What is plain arithmetic on sizes
(which tiles are loaded at once, which tokens fill a PSUM bank) is llama.py's own, so that both
files cut their work alike; layouts are those of its table. Results equal those of llama.py, and so
do estimated times on trn1 (tests/nki/test_llama_nki.py).

Linear layers of up to 128 tokens are here, one block of llama.py's: decode steps and short prompts
through the RMSNorm, the LM head and the SwiGLU MLP. Attention is not yet.
"""

import nki
import nki.isa as nisa
import nki.language as nl

from llama import (
    P_MAX,
    feature_tiles,
    psum_parts,
    stored_together,
    weight_pieces,
)

FP32 = nl.float32


def one_block(tokens):
    """Refuse more tokens than a block of the hidden states' layout has here."""
    assert tokens <= P_MAX, "expected at most 128 tokens"


# --- Tile helpers ---------------------------------------------------------------------------------


def tile_of(shape, dtype):
    """An uninitialised tile @ SBUF."""
    return nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)


def filled(shape, value, dtype):
    """A tile of one value @ SBUF."""
    made_sb = tile_of(shape, dtype)
    nisa.memset(dst=made_sb, value=value)
    return made_sb


def load_weight(weight_hbm, first, tiles, k_tiles):
    """Tiles of a kernel weight -> [128, tiles, k_tiles, 128] @ SBUF, one contiguous row each."""
    tiled_hbm = weight_hbm.reshape((P_MAX, feature_tiles(weight_hbm, k_tiles), k_tiles, P_MAX))
    weight_sb = tile_of((P_MAX, tiles, k_tiles, P_MAX), weight_hbm.dtype)
    nisa.dma_copy(dst=weight_sb, src=tiled_hbm[:, nl.ds(first, tiles)])
    return weight_sb


def products(weight_sb, first, tiles, x_sb, start, tokens):
    """``tiles`` tiles of features of ``W @ x`` for a span of tokens -> [128, tiles, tokens] @ PSUM.

    The first product of a tile overwrites, the others add.
    """
    acc_psum = nl.ndarray((P_MAX, tiles, tokens), dtype=FP32, buffer=nl.psum)
    for tile in range(tiles):
        for k in range(x_sb.shape[1]):
            nisa.nc_matmul(
                dst=acc_psum[:, tile, :],
                stationary=weight_sb[:, first + tile, k, :],
                moving=x_sb[:, k, nl.ds(start, tokens)],
                accumulate=k > 0,
            )
    return acc_psum


def store_product(weight_hbm, x_sb, out_hbm):
    """``W @ x`` of [128, k_tiles, T] @ SBUF into out [N, T]: its features lie in runs, so that each
    partition stores contiguous rows."""
    k_tiles, count = x_sb.shape[1], x_sb.shape[2]
    tiles = feature_tiles(weight_hbm, k_tiles)
    lanes_hbm = out_hbm.reshape((P_MAX, tiles, out_hbm.shape[1]))
    for group in stored_together(weight_pieces(tiles, k_tiles, count, last=True), count):
        begin, end = group[0][0], group[-1][0] + group[-1][1]
        out_sb = tile_of((P_MAX, end - begin, count), out_hbm.dtype)
        for piece in group:
            weight_sb = load_weight(weight_hbm, piece[0], piece[1], k_tiles)
            for part in psum_parts(piece[1], count):
                tile, beside, at, tokens = part
                out_psum = products(weight_sb, tile, beside, x_sb, at, tokens)
                rows = nl.ds(piece[0] - begin + tile, beside)
                nisa.tensor_copy(dst=out_sb[:, rows, nl.ds(at, tokens)], src=out_psum)
        nisa.dma_copy(dst=lanes_hbm[:, nl.ds(begin, end - begin), :], src=out_sb)


# --- Residual stream and norm ---------------------------------------------------------------------


def residual_sum(x_hbm, delta_hbm, sum_hbm):
    """x + delta, [H, T] @ HBM -> [128, H/128, T] @ SBUF, and stored; without delta just x."""
    k_tiles, tokens = x_hbm.shape[0] // P_MAX, x_hbm.shape[1]
    lanes = (P_MAX, k_tiles, tokens)
    x_sb = tile_of(lanes, x_hbm.dtype)
    nisa.dma_copy(dst=x_sb, src=x_hbm.reshape(lanes))
    if delta_hbm is not None:
        delta_sb = tile_of(lanes, delta_hbm.dtype)
        nisa.dma_copy(dst=delta_sb, src=delta_hbm.reshape(lanes))
        nisa.tensor_tensor(dst=x_sb, data1=x_sb, data2=delta_sb, op=nl.add)
        nisa.dma_copy(dst=sum_hbm.reshape(lanes), src=x_sb)
    return x_sb


def squared_lengths(x_sb, start, tokens):
    """Sums of squares of up to 128 tokens -> [T, T] fp32 @ SBUF, on the diagonal of zeros.

    Other tokens' products are selected away rather than multiplied by zero: they may overflow.
    """
    own = nl.ds(start, tokens)
    gram_psum = nl.ndarray((tokens, tokens), dtype=FP32, buffer=nl.psum)
    for k in range(x_sb.shape[1]):
        own_sb = x_sb[:, k, own]
        nisa.nc_matmul(dst=gram_psum, stationary=own_sb, moving=own_sb, accumulate=k > 0)
    lengths_sb = tile_of((tokens, tokens), FP32)
    nisa.tensor_copy(dst=lengths_sb, src=gram_psum)
    if tokens == 1:
        return lengths_sb
    for side in (nl.greater_equal, nl.less_equal):  # row - column against 0
        kept_sb = tile_of((tokens, tokens), FP32)
        nisa.affine_select(
            dst=kept_sb,
            pattern=[[-1, tokens]],
            channel_multiplier=1,
            on_true_tile=lengths_sb,
            on_false_value=0.0,
            cmp_op=side,
        )
        lengths_sb = kept_sb
    return lengths_sb


def norm_scales(x_sb, norm, parts):
    """1 / sqrt(mean(x^2) + eps) of [128, H/128, T] @ SBUF along the free axis, [128, T] fp32 with
    all rows equal; ones where ``norm`` is None.

    A norm's scale is one number per token, so it may wait until behind the product that reads the
    norm (Zhang and Sennrich 2019): TensorE need not wait for it, and the gain is in the weights.
    """
    shape = (P_MAX, x_sb.shape[2])
    if norm is None:
        return filled(shape, 1.0, FP32)
    along_sb, scale = tile_of(shape, FP32), 1.0 / norm.features
    ones_sb, eps_sb = filled((P_MAX, P_MAX), 1.0, FP32), filled((P_MAX, 1), norm.eps, FP32)
    for part in parts:
        start, size = part
        lengths_sb = squared_lengths(x_sb, start, size)
        # a product with ones adds the columns up, on every partition
        total_psum = nl.ndarray((P_MAX, size), dtype=FP32, buffer=nl.psum)
        nisa.nc_matmul(dst=total_psum, stationary=ones_sb[0:size, :], moving=lengths_sb)
        along = along_sb[:, nl.ds(start, size)]
        nisa.activation(dst=along, op=nl.rsqrt, data=total_psum, bias=eps_sb, scale=scale)
    return along_sb


def times_scale(x_psum, along_sb, start, dtype):
    """Products [128, tiles, T] @ PSUM times the scale of their tokens -> the same @ SBUF.

    One instruction over all tiles, the scale's row read again for each: SDK 2.21's compiler joins
    the loop of llama.py; nothing says that the current one does.
    """
    out_sb = tile_of(x_psum.shape, dtype)
    row_sb = along_sb[:, nl.ds(start, x_psum.shape[2])]
    scale_sb = row_sb.expand_dim(1).broadcast(1, x_psum.shape[1])
    nisa.tensor_tensor(dst=out_sb, data1=x_psum, data2=scale_sb, op=nl.multiply)
    return out_sb


# --- Kernels --------------------------------------------------------------------------------------


@nki.jit
def linear_kernel(x_hbm, weight_hbm, norm=None):
    """Linear layer, after RMSNorm where ``norm`` is given: x [H, T] -> [T, N], type of x.

    The LM head: tokens are few and leave the device, so they come out in rows. N is whole tiles.
    """
    k_tiles, tokens = x_hbm.shape[0] // P_MAX, x_hbm.shape[1]
    tiles = feature_tiles(weight_hbm, k_tiles)
    out_hbm = nl.ndarray((tokens, tiles * P_MAX), dtype=x_hbm.dtype, buffer=nl.shared_hbm)
    rows_hbm = out_hbm.reshape((tokens, P_MAX, tiles))
    one_block(tokens)
    x_sb = residual_sum(x_hbm, None, None)
    along_sb = norm_scales(x_sb, norm, [(0, tokens)])
    # a piece of the weights after another at DMA's pace; VectorE takes its products out scaled,
    # tokens outermost, so that each has a row of its own
    out_sb = tile_of((P_MAX, tokens, tiles), x_hbm.dtype)
    for piece in weight_pieces(tiles, k_tiles, tokens, last=True):
        weight_sb = load_weight(weight_hbm, piece[0], piece[1], k_tiles)
        for part in psum_parts(piece[1], tokens):
            out_psum = products(weight_sb, part[0], part[1], x_sb, 0, tokens)
            scale_sb = along_sb.expand_dim(2).broadcast(2, part[1])
            nisa.tensor_tensor(
                dst=out_sb[:, :, nl.ds(piece[0] + part[0], part[1])],
                data1=out_psum.permute((0, 2, 1)),
                data2=scale_sb,
                op=nl.multiply,
            )
    nisa.dma_copy(dst=rows_hbm.permute((1, 0, 2)), src=out_sb)
    return out_hbm


@nki.jit
def swiglu_mlp_kernel(x_hbm, delta_hbm, norm, gate_hbm, up_hbm, down_hbm):
    """Residual sum, norm and SwiGLU MLP (Shazeer 2020): down(silu(gate(x)) * up(x)).

    x and delta [H, T] (delta or norm may be None), kernel weights of gate and up [F, H] and of down
    [H, F] -> partial output [H, T], and x + delta where there is a delta.
    """
    tokens, k_tiles, dtype = x_hbm.shape[1], x_hbm.shape[0] // P_MAX, x_hbm.dtype
    tiles = feature_tiles(gate_hbm, k_tiles)
    out_hbm = nl.ndarray(x_hbm.shape, dtype=dtype, buffer=nl.shared_hbm)
    stream_hbm = x_hbm
    if delta_hbm is not None:
        stream_hbm = nl.ndarray(x_hbm.shape, dtype=dtype, buffer=nl.shared_hbm)
    zero_sb = filled((P_MAX, 1), 0.0, FP32)
    one_block(tokens)
    # the first weights go before the hidden states, whose first features then are multiplied
    # while the others arrive
    pieces = weight_pieces(tiles, k_tiles, tokens)
    gate_w_sb = load_weight(gate_hbm, pieces[0][0], pieces[0][1], k_tiles)
    up_w_sb = load_weight(up_hbm, pieces[0][0], pieces[0][1], k_tiles)
    x_sb = residual_sum(x_hbm, delta_hbm, stream_hbm)
    along_sb = norm_scales(x_sb, norm, [(0, tokens)])
    inner_sb = tile_of((P_MAX, tiles, tokens), dtype)
    for piece in pieces:
        if piece[0]:
            gate_w_sb = load_weight(gate_hbm, piece[0], piece[1], k_tiles)
            up_w_sb = load_weight(up_hbm, piece[0], piece[1], k_tiles)
        for part in psum_parts(piece[1], tokens):
            tile, beside, at, columns = part
            gate_psum = products(gate_w_sb, tile, beside, x_sb, at, columns)
            gate_sb = times_scale(gate_psum, along_sb, at, dtype)
            silu_sb = tile_of((P_MAX, beside, columns), dtype)
            nisa.activation(dst=silu_sb, op=nl.silu, data=gate_sb, bias=zero_sb)
            up_psum = products(up_w_sb, tile, beside, x_sb, at, columns)
            up_sb = times_scale(up_psum, along_sb, at, dtype)
            places = nl.ds(piece[0] + tile, beside)
            inner = inner_sb[:, places, nl.ds(at, columns)]
            nisa.tensor_tensor(dst=inner, data1=silu_sb, data2=up_sb, op=nl.multiply)
    store_product(down_hbm, inner_sb, out_hbm)
    return out_hbm if delta_hbm is None else (out_hbm, stream_hbm)
