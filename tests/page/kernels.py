"""Kernels that the page is tested with; the first one's text tries to end the page's script."""

import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl


@nki.jit
def matmul(left_hbm, right_hbm):
    """</script><script>document.title = "broken"</script><!-- <script>"""
    contraction, rows = left_hbm.shape
    columns = right_hbm.shape[1]
    out_hbm = nl.ndarray((rows, columns), left_hbm.dtype, buffer=nl.shared_hbm)
    for n in nl.affine_range(columns // 512):
        sum_psum = nl.zeros((rows, 512), nl.float32, buffer=nl.psum)
        for k in nl.affine_range(contraction // 128):
            left_sb = nl.load(left_hbm[nl.ds(k * 128, 128), :])
            right_sb = nl.load(right_hbm[nl.ds(k * 128, 128), nl.ds(n * 512, 512)])
            sum_psum += nisa.nc_matmul(left_sb, right_sb)
        nl.store(out_hbm[:, nl.ds(n * 512, 512)], nl.exp(sum_psum))
    return out_hbm


@nki.jit
def resident(left_hbm, right_hbm):
    contraction, rows = left_hbm.shape
    columns = right_hbm.shape[1]
    out_hbm = nl.ndarray((rows, columns), left_hbm.dtype, buffer=nl.shared_hbm)
    blocks = contraction // 128
    left_sb = nl.ndarray((blocks, nl.par_dim(128), rows), left_hbm.dtype, buffer=nl.sbuf)
    for k in nl.affine_range(blocks):
        left_sb[k] = nl.load(left_hbm[nl.ds(k * 128, 128), :])
    for n in nl.affine_range(columns // 512):
        sum_psum = nl.zeros((rows, 512), nl.float32, buffer=nl.psum)
        for k in nl.affine_range(blocks):
            right_sb = nl.load(right_hbm[nl.ds(k * 128, 128), nl.ds(n * 512, 512)])
            sum_psum += nisa.nc_matmul(left_sb[k], right_sb)
        nl.store(out_hbm[:, nl.ds(n * 512, 512)], nl.exp(sum_psum))
    return out_hbm


def reference(left, right):
    return (left.T @ right).exp()
