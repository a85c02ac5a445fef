"""One kernel for each kind of mistake; docs/generate.py runs them and quotes what they are told.

Every function is a kernel over inputs of the shapes in ``EXAMPLES``. Its first docstring line is
the heading in docs/messages.md.
"""

from neuronxcc import nki
from neuronxcc.nki import compiler as ncc
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
def too_large(x):
    """A size beyond the hardware's"""
    out = nl.ndarray((128, 1024), nl.float32, buffer=nl.shared_hbm)
    tile = nl.load(x)
    nl.store(out, nisa.nc_matmul(tile[:, 0:128], tile))
    return out


@nki.jit
def out_of_bounds(x):
    """An index outside of its tensor"""
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    i, j = nl.mgrid[0:128, 0:64]
    for m in nl.affine_range(2):
        nl.store(out[m * 128 + i, j], nl.load(x[m * 128 + i, j]))
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
def too_much(x):
    """More live data than SBUF holds"""
    out = nl.ndarray((128, 64), x.dtype, buffer=nl.shared_hbm)
    weights = nl.ndarray((128, 40, 1024), nl.float32)
    values = nl.ndarray((128, 10, 1024), nl.float32)
    weights[...] = nl.load(x)
    values[...] = nl.copy(weights[:, 0:10, :])
    nl.store(out, nl.add(weights[:, 0, 0:64], values[:, 0, 0:64]))
    return out


@nki.jit
def out_of_scope(x):
    """A tensor used outside of the loop that made it"""
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    for k in nl.affine_range(2):
        tile = nl.load(x[:, 32 * k : 32 * k + 32])
    nl.store(out[:, 0:32], tile)
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


@nki.jit
def once_traced(x):
    """Python state that the device compiler sees once (a warning)"""
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x)
    factors = []
    for k in nl.sequential_range(4):
        factors.append(k + 1)
        tile[...] = nl.multiply(tile, len(factors))
    nl.store(out, tile)
    return out


@nki.jit
def shared_addresses(x):
    """Tiles placed over each other"""
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    one = nl.ndarray(x.shape, x.dtype, buffer=ncc.sbuf.mod_alloc(base_addr=0))
    two = nl.ndarray(x.shape, x.dtype, buffer=ncc.sbuf.mod_alloc(base_addr=128))
    one[...] = nl.load(x)
    two[...] = nisa.tensor_copy(one)
    nl.store(out, one)
    return out


# kernel, shapes of its fp32 inputs
EXAMPLES = [
    (wrong_memory, [(128, 128)]),
    (too_large, [(128, 1024)]),
    (out_of_bounds, [(200, 64)]),
    (undefined_data, [(128, 64)]),
    (race, [(128, 64)]),
    (too_much, [(128, 40, 1024)]),
    (out_of_scope, [(128, 64)]),
    (control_flow, [(128, 64)]),
    (once_traced, [(128, 64)]),
    (shared_addresses, [(128, 64)]),
]
