"""Kernels with published device times, written anew after their descriptions.

The workloads are those of the tutorials of aws-neuron-sdk v2.21.1 (general/nki/tutorials:
matrix_multiplication.rst, fused_mamba.rst, layernorm.rst); the code is our own. Where the vendor's
compiler moves loop-invariant work out of a loop, these kernels do it themselves, because the
simulator runs what is written.
"""

import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl

P = 128  # partitions, contraction rows of one matmul
N = 512  # columns of one moving tile, fp32 values of one PSUM bank


# --- matrix multiplication: lhs_t [K, M] x rhs [K, N] -> [M, N] -----------------------------------
def _store(out, row, column, psum):
    """Cast one finished [128, 512] tile and store it."""
    tile = nisa.tensor_copy(psum, dtype=out.dtype)
    nl.store(out[nl.ds(row * P, P), nl.ds(column * N, N)], value=tile)


@nki.jit
def matmul_tiled(lhs_t, rhs):
    """No reuse: both operands of every nc_matmul are loaded for it."""
    out = nl.ndarray((lhs_t.shape[1], rhs.shape[1]), dtype=lhs_t.dtype, buffer=nl.shared_hbm)
    for m in nl.affine_range(lhs_t.shape[1] // P):
        for n in nl.affine_range(rhs.shape[1] // N):
            acc = nl.zeros((P, N), dtype=nl.float32, buffer=nl.psum)
            for k in nl.affine_range(rhs.shape[0] // P):
                left = nl.load(lhs_t[nl.ds(k * P, P), nl.ds(m * P, P)])
                right = nl.load(rhs[nl.ds(k * P, P), nl.ds(n * N, N)])
                acc[...] += nisa.nc_matmul(left, right)
            _store(out, m, n, acc)
    return out


@nki.jit
def matmul_hoisted(lhs_t, rhs):
    """One column block of the left operand stays in SBUF for all columns of the right one."""
    out = nl.ndarray((lhs_t.shape[1], rhs.shape[1]), dtype=lhs_t.dtype, buffer=nl.shared_hbm)
    _blocked_free(out, lhs_t, rhs, 1, 1)
    return out


@nki.jit
def matmul_blocked_2x2(lhs_t, rhs):
    """2 x 2 tiles of the result share their loads."""
    out = nl.ndarray((lhs_t.shape[1], rhs.shape[1]), dtype=lhs_t.dtype, buffer=nl.shared_hbm)
    _blocked_free(out, lhs_t, rhs, 2, 2)
    return out


def _blocked_free(out, lhs_t, rhs, rows, columns):
    """Blocks of ``rows`` x ``columns`` result tiles; every load is one 128-row tile."""
    depth = rhs.shape[0] // P
    for m in nl.affine_range(lhs_t.shape[1] // (rows * P)):
        left = nl.ndarray((P, rows * depth, P), dtype=lhs_t.dtype)  # @ SBUF
        for i in nl.affine_range(rows):
            for k in nl.affine_range(depth):
                left[:, i * depth + k, :] = nl.load(
                    lhs_t[nl.ds(k * P, P), nl.ds((m * rows + i) * P, P)]
                )
        for n in nl.affine_range(rhs.shape[1] // (columns * N)):
            right = nl.ndarray((P, columns * depth, N), dtype=rhs.dtype)  # @ SBUF
            for j in nl.affine_range(columns):
                for k in nl.affine_range(depth):
                    right[:, j * depth + k, :] = nl.load(
                        rhs[nl.ds(k * P, P), nl.ds((n * columns + j) * N, N)]
                    )
            for i in nl.affine_range(rows):
                for j in nl.affine_range(columns):
                    acc = nl.zeros((P, N), dtype=nl.float32, buffer=nl.psum)
                    for k in nl.affine_range(depth):
                        acc[...] += nisa.nc_matmul(
                            left[:, i * depth + k, :], right[:, j * depth + k, :]
                        )
                    _store(out, m * rows + i, n * columns + j, acc)


@nki.jit
def matmul_blocked_3d(lhs_t, rhs):
    """Blocks of 2048 x 1024 x 1024: rows of 4 KiB and 2 KiB, sums of blocks kept in SBUF."""
    rows, columns, depth = 16, 2, 8
    out = nl.ndarray((lhs_t.shape[1], rhs.shape[1]), dtype=lhs_t.dtype, buffer=nl.shared_hbm)
    blocks_m = lhs_t.shape[1] // (rows * P)
    for n in nl.affine_range(rhs.shape[1] // (columns * N)):
        total = nl.ndarray((P, blocks_m * rows, columns * N), dtype=lhs_t.dtype)  # @ SBUF
        for k in nl.sequential_range(rhs.shape[0] // (depth * P)):
            right = nl.ndarray((P, depth, columns * N), dtype=rhs.dtype)  # @ SBUF
            for d in nl.affine_range(depth):
                right[:, d, :] = nl.load(
                    rhs[nl.ds((k * depth + d) * P, P), nl.ds(n * columns * N, columns * N)]
                )
            for m in nl.affine_range(blocks_m):
                left = nl.ndarray((P, depth, rows * P), dtype=lhs_t.dtype)  # @ SBUF
                for d in nl.affine_range(depth):
                    left[:, d, :] = nl.load(
                        lhs_t[nl.ds((k * depth + d) * P, P), nl.ds(m * rows * P, rows * P)]
                    )
                sums = total[:, nl.ds(m * rows, rows), :]
                _block_products(sums, left, right, columns, first=k == 0)
        for i in nl.affine_range(blocks_m * rows):  # rows of 2 KiB
            nl.store(
                out[nl.ds(i * P, P), nl.ds(n * columns * N, columns * N)], value=total[:, i, :]
            )
    return out


def _block_products(total, left, right, columns, first):
    """total[:, i, j-th columns] (+)= sum over d of left[:, d, i-th rows].T @ right[:, d, j-th]."""
    for j in nl.affine_range(columns):
        for i in nl.affine_range(total.shape[1]):
            acc = nl.zeros((P, N), dtype=nl.float32, buffer=nl.psum)
            for d in nl.affine_range(left.shape[1]):
                acc[...] += nisa.nc_matmul(
                    left[:, d, nl.ds(i * P, P)], right[:, d, nl.ds(j * N, N)]
                )
            done = total[:, i, nl.ds(j * N, N)]
            if first:
                done[...] = nisa.tensor_copy(acc, dtype=total.dtype, engine=nisa.vector_engine)
            else:
                done[...] = nisa.tensor_tensor(done, acc, op=nl.add, dtype=total.dtype)


# --- selective scan of Mamba, fp32 ----------------------------------------------------------------
# delta, u [channels, seq], a [channels, states], b, c [states, seq] -> [channels, seq]
def _broadcast_row(ones, row):
    """[1, n] to [128, n]: a product with ones [1, 128]; left in PSUM where one bank holds it."""
    length = row.shape[1]
    if length <= N:
        bank = nl.ndarray((P, length), dtype=nl.float32, buffer=nl.psum)
        bank[...] = nisa.nc_matmul(ones, row)
        return bank
    wide = nl.ndarray((P, length), dtype=nl.float32)
    for k in nl.affine_range(length // N):
        wide[:, nl.ds(k * N, N)] = nisa.tensor_copy(
            nisa.nc_matmul(ones, row[:, nl.ds(k * N, N)]), engine=nisa.scalar_engine
        )
    return wide


def _state(ones, delta, delta_u, a, b, c, initial):
    """One state of one tile: the scanned states and their part of the output."""
    decay = nisa.activation(nl.exp, delta, scale=a)
    gain = nisa.tensor_tensor(delta_u, _broadcast_row(ones, b), op=nl.multiply)
    states = nisa.tensor_tensor_scan(decay, gain, initial, op0=nl.multiply, op1=nl.add)
    return states, nisa.tensor_tensor(states, _broadcast_row(ones, c), op=nl.multiply)


@nki.jit
def mamba_states_outside(delta, u, a, b, c):
    """First version: states outside, so delta and u travel again for every state."""
    channels, length = delta.shape
    out = nl.ndarray((channels, length), dtype=delta.dtype, buffer=nl.shared_hbm)
    tiles, states = channels // P, a.shape[1]
    ones = nisa.memset((1, P), 1.0, nl.float32)
    total = nl.ndarray((P, tiles, length), dtype=nl.float32)  # @ SBUF
    for s in nl.static_range(states):
        for t in nl.affine_range(tiles):
            rows = nl.ds(t * P, P)
            d, x = nl.load(delta[rows, :]), nl.load(u[rows, :])
            decay = nl.load(a[rows, nl.ds(s, 1)])
            gain, read = nl.load(b[nl.ds(s, 1), :]), nl.load(c[nl.ds(s, 1), :])
            delta_u = nisa.tensor_tensor(d, x, op=nl.multiply)
            _, part = _state(ones, d, delta_u, decay, gain, read, 0.0)
            done = total[:, t, :]
            done[...] = (
                nisa.tensor_copy(part) if s == 0 else nisa.tensor_tensor(done, part, op=nl.add)
            )
    for t in nl.affine_range(tiles):
        nl.store(out[nl.ds(t * P, P), :], value=total[:, t, :])
    return out


@nki.jit
def mamba_channels_outside(delta, u, a, b, c):
    """Second version: channels outside, delta and u loaded once."""
    out = nl.ndarray(delta.shape, dtype=delta.dtype, buffer=nl.shared_hbm)
    _mamba_tiled(out, delta, u, a, b, c, delta.shape[1])
    return out


@nki.jit
def mamba_tiled(delta, u, a, b, c):
    """Third version: the sequence in tiles of 512, the scan carried from tile to tile."""
    out = nl.ndarray(delta.shape, dtype=delta.dtype, buffer=nl.shared_hbm)
    _mamba_tiled(out, delta, u, a, b, c, N)
    return out


def _mamba_tiled(out, delta, u, a, b, c, piece):
    channels, length = delta.shape
    ones = nisa.memset((1, P), 1.0, nl.float32)
    for t in nl.affine_range(channels // P):
        rows = nl.ds(t * P, P)
        d, x = nl.load(delta[rows, :]), nl.load(u[rows, :])
        delta_u = nisa.tensor_tensor(d, x, op=nl.multiply)
        total = nl.ndarray((P, length), dtype=nl.float32)
        for s in nl.static_range(a.shape[1]):
            decay = nl.load(a[rows, nl.ds(s, 1)])
            carry = 0.0
            for k in nl.static_range(length // piece):
                part = nl.ds(k * piece, piece)
                gain, read = nl.load(b[nl.ds(s, 1), part]), nl.load(c[nl.ds(s, 1), part])
                states, y = _state(ones, d[:, part], delta_u[:, part], decay, gain, read, carry)
                carry = nisa.tensor_copy(states[:, nl.ds(piece - 1, 1)])
                if s == 0:
                    total[:, part] = nisa.tensor_copy(y)
                else:
                    total[:, part] = nisa.tensor_tensor(total[:, part], y, op=nl.add)
        nl.store(out[rows, :], value=total)


# --- LayerNorm over rows: x [rows, columns], gamma, beta [1, columns] -----------------------------
def _row_parameters(gamma, beta):
    shape = (P, gamma.shape[1])
    return nl.load(gamma).broadcast_to(shape), nl.load(beta).broadcast_to(shape)


@nki.jit
def layernorm_language(x, gamma, beta):
    """Mean, square and scaling as separate nl operations."""
    rows, columns = x.shape
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    gain, shift = _row_parameters(gamma, beta)
    for t in nl.static_range(-(-rows // P)):
        count = min(P, rows - t * P)
        tile = nl.load(x[nl.ds(t * P, count), :])
        mean = nl.mean(tile, axis=1, keepdims=True)
        squares = nl.mean(nl.square(tile), axis=1, keepdims=True)
        variance = nl.subtract(squares, nl.multiply(mean, mean))
        scale = nl.rsqrt(nl.add(variance, 1e-5))
        normal = nl.multiply(nl.subtract(tile, mean), scale)
        scaled = nl.add(nl.multiply(normal, gain[0:count, :]), shift[0:count, :])
        nl.store(out[nl.ds(t * P, count), :], value=scaled)
    return out


@nki.jit
def layernorm_statistics(x, gamma, beta):
    """bn_stats for mean and variance, shift and scale in one tensor_scalar."""
    rows, columns = x.shape
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    gain, shift = _row_parameters(gamma, beta)
    pieces = -(-columns // N)
    for t in nl.static_range(-(-rows // P)):
        count = min(P, rows - t * P)
        tile = nl.load(x[nl.ds(t * P, count), :])
        parts = nl.ndarray((count, 6 * pieces), dtype=nl.float32)
        for k in nl.static_range(pieces):
            width = min(N, columns - k * N)
            parts[:, nl.ds(6 * k, 6)] = nisa.bn_stats(tile[:, nl.ds(k * N, width)])
        mean_variance = nisa.bn_aggr(parts)
        scale = nl.rsqrt(nl.add(mean_variance[:, 1:2], 1e-5))
        normal = nisa.tensor_scalar(
            tile, op0=nl.subtract, operand0=mean_variance[:, 0:1], op1=nl.multiply, operand1=scale
        )
        scaled = nl.add(nl.multiply(normal, gain[0:count, :]), shift[0:count, :])
        nl.store(out[nl.ds(t * P, count), :], value=scaled)
    return out
