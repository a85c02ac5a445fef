"""A linear recurrence along the free dimension: h[t] = decay[t] * h[t - 1] + x[t], h[-1] = 0.

decay, x [C, T] @ HBM, decay from 0 to 1; result h [C, T] in the type of x, computed in fp32.
"""

import neuronxcc.nki as nki
import neuronxcc.nki.language as nl
import torch

CASES = ("77x50:f32:0..1 77x50:f32", "256x256:bf16:0..1 256x256:bf16")


def reference(decay, x):
    state, states = torch.zeros_like(x[:, 0], dtype=torch.promote_types(x.dtype, torch.float32)), []
    for t in range(x.shape[1]):
        state = decay[:, t] * state + x[:, t]
        states.append(state)
    return torch.stack(states, 1).to(x.dtype)


@nki.jit
def kernel(decay_hbm, x_hbm):
    channels, length = x_hbm.shape
    out_hbm = nl.ndarray((channels, length), dtype=x_hbm.dtype, buffer=nl.shared_hbm)
    for channel in nl.static_range(0, channels, 128):
        end = min(channel + 128, channels)
        decay_sb = nl.load(decay_hbm[channel:end, :], dtype=nl.float32)
        x_sb = nl.load(x_hbm[channel:end, :], dtype=nl.float32)
        states_sb = nl.ndarray((end - channel, length), dtype=nl.float32, buffer=nl.sbuf)
        states_sb[:, 0:1] = nl.copy(x_sb[:, 0:1])
        for t in nl.static_range(1, length):
            kept_sb = nl.multiply(decay_sb[:, t : t + 1], states_sb[:, t - 1 : t])
            states_sb[:, t : t + 1] = nl.add(kept_sb, x_sb[:, t : t + 1])
        nl.store(out_hbm[channel:end, :], states_sb)
    return out_hbm
