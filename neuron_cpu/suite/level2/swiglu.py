"""The gate of a SwiGLU MLP: silu(gate) * up, silu(x) = x * sigmoid(x).

gate, up [N, D] @ HBM; result [N, D] in their type.
"""

import neuronxcc.nki as nki
import neuronxcc.nki.language as nl
import torch

CASES = ("77x333:f32 77x333:f32", "512x2048:bf16 512x2048:bf16")


def reference(gate, up):
    return torch.nn.functional.silu(gate) * up


@nki.jit
def kernel(gate_hbm, up_hbm):
    rows, width = gate_hbm.shape
    out_hbm = nl.ndarray((rows, width), dtype=gate_hbm.dtype, buffer=nl.shared_hbm)
    for row in nl.static_range(0, rows, 128):
        end = min(row + 128, rows)
        gate_sb = nl.load(gate_hbm[row:end, :], dtype=nl.float32)
        up_sb = nl.load(up_hbm[row:end, :], dtype=nl.float32)
        opened_sb = nl.multiply(gate_sb, nl.sigmoid(gate_sb))
        nl.store(out_hbm[row:end, :], nl.multiply(opened_sb, up_sb))
    return out_hbm
