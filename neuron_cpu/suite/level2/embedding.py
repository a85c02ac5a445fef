"""Rows of an embedding table: table[token].

token [N, 1] @ HBM, from 0 to V - 1, table [V, D] @ HBM; result [N, D] in the type of the table.
"""

import neuronxcc.nki as nki
import neuronxcc.nki.language as nl
import torch

CASES = ("77x1:i32:0..199 200x96:f32", "256x1:i32:0..8191 8192x512:bf16")


def reference(token, table):
    return table[token[:, 0].to(torch.int64)]


@nki.jit
def kernel(token_hbm, table_hbm):
    count, width = token_hbm.shape[0], table_hbm.shape[1]
    out_hbm = nl.ndarray((count, width), dtype=table_hbm.dtype, buffer=nl.shared_hbm)
    for row in nl.static_range(0, count, 32):
        size = min(32, count - row)
        token_sb = nl.load(token_hbm[row : row + size, :])
        for column in nl.static_range(0, width, 64):
            i_column = column + nl.arange(min(64, width - column))[None, :]
            rows_sb = nl.load(table_hbm[token_sb[nl.arange(size)[:, None], 0], i_column])
            nl.store(out_hbm[row : row + size, column : min(column + 64, width)], rows_sb)
    return out_hbm
