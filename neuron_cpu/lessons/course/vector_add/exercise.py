"""Vector add: from HBM to SBUF, through an engine, and back.

Arguments and results of a kernel lie in HBM, the large memory of the device.
Its engines reach SBUF and PSUM only, small memories of 128 partitions on the
chip. So every kernel has three parts: nl.load brings a tile from HBM to SBUF,
engines compute on tiles, nl.store takes a tile back to HBM.

This kernel adds two tensors where no engine can read them.

Task: load both arguments, add the tiles, store the sum.
"""

import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl


@nki.jit
def vector_add(a_hbm, b_hbm):
    """a + b, both [P, F] @ HBM with at most 128 rows P -> the same @ HBM."""
    out_hbm = nl.ndarray(a_hbm.shape, a_hbm.dtype, buffer=nl.shared_hbm)
    sum_sb = nl.add(a_hbm, b_hbm)
    nl.store(out_hbm, sum_sb)
    return out_hbm


# --- The check: what is right, and on which shapes ---------------------------
CASES = "96x64:bf16 96x64:bf16", "128x512:f32 128x512:f32"


def reference(a, b):
    return a + b
