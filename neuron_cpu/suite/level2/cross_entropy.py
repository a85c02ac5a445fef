"""Cross entropy of logits and target tokens: log(sum(exp(logits))) - logits[target].

logits [N, V] @ HBM, target [N, 1] @ HBM, from 0 to V - 1; result [N, 1] in fp32.
"""

import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import torch

CASES = ("77x333:f32 77x1:i32:0..332", "256x4096:bf16 256x1:i32:0..4095")


def reference(logits, target):
    chosen = logits.gather(1, target.to(torch.int64))
    return torch.logsumexp(logits, -1, keepdim=True) - chosen


@nki.jit
def kernel(logits_hbm, target_hbm):
    rows, width = logits_hbm.shape
    out_hbm = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.shared_hbm)
    for row in nl.static_range(0, rows, 128):
        end = min(row + 128, rows)
        logits_sb = nl.load(logits_hbm[row:end, :], dtype=nl.float32)
        target_sb = nl.load(target_hbm[row:end, :], dtype=nl.float32)
        largest_sb = nl.max(logits_sb, axis=1, keepdims=True)
        sum_sb = nl.sum(nl.exp(nl.subtract(logits_sb, largest_sb)), axis=1, keepdims=True)
        numbers_sb = nl.broadcast_to(
            nisa.iota(nl.arange(width)[None, :], dtype=nl.float32), shape=(end - row, width)
        )
        is_target_sb = nl.equal(numbers_sb, target_sb, dtype=nl.float32)
        chosen_sb = nl.sum(nl.multiply(is_target_sb, logits_sb), axis=1, keepdims=True)
        loss_sb = nl.subtract(nl.add(nl.log(sum_sb), largest_sb), chosen_sb)
        nl.store(out_hbm[row:end, :], loss_sb)
    return out_hbm
