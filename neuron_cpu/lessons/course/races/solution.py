"""Races: a state of its own for every tile, and steps in their order.

Tiles of rows have nothing to do with each other once each makes its own state.
Steps have: no place of a tensor makes them independent, so their loop keeps
the order. (VectorE has an instruction for exactly this recurrence,
nisa.tensor_tensor_scan, which needs no loop over steps at all.)
"""

import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl

P_MAX = 128  # partitions of a tile
DECAY = 0.5


@nki.jit
def races(x_hbm):
    """States of all steps, [R, T] fp32 @ HBM, R a multiple of 128 -> [R, T]."""
    rows, steps = x_hbm.shape
    out_hbm = nl.ndarray(x_hbm.shape, x_hbm.dtype, buffer=nl.shared_hbm)
    for tile in nl.affine_range(rows // P_MAX):
        own_rows = nl.ds(tile * P_MAX, P_MAX)
        x_sb = nl.load(x_hbm[own_rows, :])
        out_sb = nl.ndarray((P_MAX, steps), x_hbm.dtype, buffer=nl.sbuf)
        state_sb = nl.zeros((P_MAX, 1), nl.float32, buffer=nl.sbuf)
        for step in nl.sequential_range(steps):
            now = nl.ds(step, 1)
            state_sb[...] = nisa.scalar_tensor_tensor(
                data=state_sb,
                op0=nl.multiply,
                operand0=DECAY,
                op1=nl.add,
                operand1=x_sb[:, now],
            )
            out_sb[:, now] = nisa.tensor_copy(state_sb)
        nl.store(out_hbm[own_rows, :], out_sb)
    return out_hbm
