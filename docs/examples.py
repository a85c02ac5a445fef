"""One kernel for each kind of mistake; docs/generate.py runs them and quotes what they are told.

Every function is a kernel over inputs of the shapes in ``EXAMPLES``. Its first docstring line is
the heading in docs/messages.md.
"""

from neuronxcc import nki
from neuronxcc.nki import isa as nisa
from neuronxcc.nki import language as nl


@nki.jit
def wrong_memory(x):
    """An operand in the wrong memory"""
    out = nl.ndarray((128, 128), nl.float32, buffer=nl.shared_hbm)
    scores = nisa.nc_matmul(nl.load(x), nl.load(x))
    nl.store(out, nisa.nc_matmul(scores, scores))
    return out


@nki.jit
def undefined_data(x):
    """Data that nobody wrote"""
    out = nl.ndarray((128, 64), x.dtype, buffer=nl.shared_hbm)
    tile = nl.ndarray((128, 64), x.dtype)
    tile[0:100, :] = nl.load(x[0:100, :])
    nl.store(out, nl.exp(tile))
    return out


@nki.jit
def race(x):
    """Iterations that touch each other's elements"""
    out = nl.ndarray((128, 64), x.dtype, buffer=nl.shared_hbm)
    tile = nl.ndarray((128, 65), x.dtype)
    tile[:, 0:1] = nl.load(x[:, 0:1])
    for k in nl.affine_range(64):
        tile[:, k + 1 : k + 2] = nl.exp(tile[:, k : k + 1])
    nl.store(out, tile[:, 1:65])
    return out


@nki.jit
def control_flow(x):
    """Control flow on data"""
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x)
    if tile[0:1, 0:1] > 0:
        tile = nl.negative(tile)
    nl.store(out, tile)
    return out


# kernel, shapes of its fp32 inputs
EXAMPLES = [
    (wrong_memory, [(128, 128)]),
    (undefined_data, [(128, 64)]),
    (race, [(128, 64)]),
    (control_flow, [(128, 64)]),
]
