"""Races: iterations that are promised to be independent, and are not.

nl.affine_range promises that no iteration needs another one's results: the
compiler may run them in any order, or at the same time. nl.sequential_range
promises nothing and keeps the order. A tile that is made before a loop is one
for all of its iterations, a tile that is made inside is each iteration's own.

This kernel runs a recurrence along every row, as state-space models do:

    state[t] = 0.5 * state[t - 1] + x[t],  state[-1] = 0

Both of its loops break their promise, and for different reasons.

Task: keep affine_range where iterations are independent, or can be made so.
"""

import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import torch

P_MAX = 128  # partitions of a tile
DECAY = 0.5


@nki.jit
def races(x_hbm):
    """States of all steps, [R, T] fp32 @ HBM, R a multiple of 128 -> [R, T]."""
    rows, steps = x_hbm.shape
    out_hbm = nl.ndarray(x_hbm.shape, x_hbm.dtype, buffer=nl.shared_hbm)
    state_sb = nl.zeros((P_MAX, 1), nl.float32, buffer=nl.sbuf)
    for tile in nl.affine_range(rows // P_MAX):
        own_rows = nl.ds(tile * P_MAX, P_MAX)
        x_sb = nl.load(x_hbm[own_rows, :])
        out_sb = nl.ndarray((P_MAX, steps), x_hbm.dtype, buffer=nl.sbuf)
        for step in nl.affine_range(steps):
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


# --- The check: what is right, and on which shapes ---------------------------
CASES = "256x12:f32", "128x5:f32"


def reference(x):
    state, states = torch.zeros_like(x[:, 0]), []
    for column in x.unbind(dim=1):
        state = DECAY * state + column
        states.append(state)
    return torch.stack(states, dim=1)
