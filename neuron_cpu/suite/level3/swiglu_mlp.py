"""The MLP of a Llama layer: (silu(x @ gate) * (x @ up)) @ down.

x [M, H] @ HBM, gate and up [H, I] @ HBM, down [I, H] @ HBM, M at most 128; result [M, H] in the
type of x.
"""

import neuronxcc.nki as nki
import neuronxcc.nki.language as nl
import torch

CASES = (
    "77x96:f32 96x200:f32 96x200:f32 200x96:f32",
    "128x256:bf16 256x1024:bf16 256x1024:bf16 1024x256:bf16",
)


def reference(x, gate, up, down):
    return (torch.nn.functional.silu(x @ gate) * (x @ up)) @ down


@nki.jit
def kernel(x_hbm, gate_hbm, up_hbm, down_hbm):
    rows, hidden = x_hbm.shape
    width = gate_hbm.shape[1]
    out_hbm = nl.ndarray((rows, hidden), dtype=x_hbm.dtype, buffer=nl.shared_hbm)
    active_sb = nl.ndarray((rows, width), dtype=x_hbm.dtype, buffer=nl.sbuf)
    for column in nl.static_range(0, width, 128):
        stop = min(column + 128, width)
        gate_psum = nl.zeros((rows, stop - column), dtype=nl.float32, buffer=nl.psum)
        up_psum = nl.zeros((rows, stop - column), dtype=nl.float32, buffer=nl.psum)
        for inner in nl.static_range(0, hidden, 128):
            last = min(inner + 128, hidden)
            x_sb = nl.load(x_hbm[:, inner:last])
            gate_psum += nl.matmul(x_sb, nl.load(gate_hbm[inner:last, column:stop]))
            up_psum += nl.matmul(x_sb, nl.load(up_hbm[inner:last, column:stop]))
        gate_sb = nl.copy(gate_psum)
        opened_sb = nl.multiply(gate_sb, nl.sigmoid(gate_sb))
        active_sb[:, column:stop] = nl.multiply(opened_sb, nl.copy(up_psum))
    for column in nl.static_range(0, hidden, 128):
        stop = min(column + 128, hidden)
        sum_psum = nl.zeros((rows, stop - column), dtype=nl.float32, buffer=nl.psum)
        for inner in nl.static_range(0, width, 128):
            last = min(inner + 128, width)
            down_sb = nl.load(down_hbm[inner:last, column:stop])
            sum_psum += nl.matmul(active_sb[:, inner:last], down_sb)
        nl.store(out_hbm[:, column:stop], nl.copy(sum_psum))
    return out_hbm
