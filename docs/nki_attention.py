"""An attention kernel for models of transformers on `neuron` (docs/torch_device.md)."""

import nki
import nki.isa as nisa
import nki.language as nl
import torch
from torch_neuronx import nki_op


@nki.jit
def attention(q, k, v, mask, scale):
    """q, k [H, D, S], v [H, S, D], mask [S, S] @ HBM, S and D up to 128 -> [H, S, D]."""
    heads, d, s = q.shape
    out = nl.ndarray((heads, s, d), dtype=q.dtype, buffer=nl.shared_hbm)
    mask_sb = nl.ndarray((s, s), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=mask_sb, src=mask)
    for h in nl.affine_range(heads):
        q_sb, k_sb = (nl.ndarray((d, s), dtype=q.dtype, buffer=nl.sbuf) for _ in range(2))
        v_sb, out_sb = (nl.ndarray((s, d), dtype=q.dtype, buffer=nl.sbuf) for _ in range(2))
        scores_sb, turned_sb = (nl.ndarray((s, s), dtype=nl.float32, buffer=nl.sbuf) for _ in "ab")
        highest_sb, total_sb = (nl.ndarray((s, 1), dtype=nl.float32, buffer=nl.sbuf) for _ in "ab")
        scores_psum, turned_psum = (nl.ndarray((s, s), nl.float32, buffer=nl.psum) for _ in "ab")
        out_psum = nl.ndarray((s, d), dtype=nl.float32, buffer=nl.psum)
        for tile_sb, source in ((q_sb, q), (k_sb, k), (v_sb, v)):
            nisa.dma_copy(dst=tile_sb, src=source[h])
        nisa.nc_matmul(dst=scores_psum, stationary=q_sb, moving=k_sb)
        nisa.tensor_scalar(dst=scores_sb, data=scores_psum, op0=nl.multiply, operand0=scale)
        nisa.tensor_tensor(dst=scores_sb, data1=scores_sb, data2=mask_sb, op=nl.add)
        nisa.tensor_reduce(dst=highest_sb, data=scores_sb, op=nl.maximum, axis=1, negate=True)
        nisa.activation(dst=scores_sb, op=nl.exp, data=scores_sb, bias=highest_sb)
        nisa.tensor_reduce(dst=total_sb, data=scores_sb, op=nl.add, axis=1)
        nisa.reciprocal(dst=total_sb, data=total_sb)
        nisa.nc_transpose(dst=turned_psum, data=scores_sb)
        nisa.tensor_copy(dst=turned_sb, src=turned_psum)
        v32_sb = nl.ndarray((s, d), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=v32_sb, src=v_sb)
        nisa.nc_matmul(dst=out_psum, stationary=turned_sb, moving=v32_sb)
        nisa.tensor_scalar(dst=out_sb, data=out_psum, op0=nl.multiply, operand0=total_sb)
        nisa.dma_copy(dst=out[h], src=out_sb)
    return out


@nki_op("talk::attention", mutates_args={})
def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    return attention(q.transpose(1, 2), k.transpose(1, 2), v, mask, scale)


def by_kernel(module, query, key, value, mask, scaling, **_):
    """transformers' call: query [B, H, S, D], key and value [B, Hkv, S, D] -> [B, S, H, D]."""
    b, h, s, d = query.shape
    key, value = (x.repeat_interleave(h // x.shape[1], 1) for x in (key, value))
    mask = torch.full((s, s), -1e9, device=query.device).triu(1)
    out = attend(*(x.reshape(b * h, s, d) for x in (query, key, value)), mask, scaling)
    return out.reshape(b, h, s, d).transpose(1, 2), None
