"""LSTM and GRU cells: PyTorch asks an accelerator for them as one operator each.

The formulas are those of torch.nn.LSTMCell and torch.nn.GRUCell. They stand above autograd, which
differentiates the operators that they consist of.
"""

from __future__ import annotations

from typing import Any

import torch

from .tensor import aten, own

Tensor = torch.Tensor
_KEPT = torch.library.Library("aten", "IMPL", "AutogradPrivateUse1")


def _lstm(
    inputs: Tensor, hidden: Tensor, c: Tensor, bias: Any = None, hidden_bias: Any = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gates [B, 4 H] of input and hidden state, c [B, H] -> h, c, and the activated gates."""
    i, f, g, o = (_biased(inputs, bias) + _biased(hidden, hidden_bias)).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    c = f * c + i * g
    return o * c.tanh(), c, torch.cat((i, f, g, o), 1)


def _gru(
    inputs: Tensor, hidden: Tensor, h: Tensor, bias: Any = None, hidden_bias: Any = None
) -> tuple[Tensor, Tensor]:
    """Gates [B, 3 H] of input and hidden state, h [B, H] -> h, and the activated gates."""
    (r, z, n), (hidden_r, hidden_z, hidden_n) = (
        one.chunk(3, 1) for one in (_biased(inputs, bias), _biased(hidden, hidden_bias))
    )
    r, z = (r + hidden_r).sigmoid(), (z + hidden_z).sigmoid()
    n = (n + r * hidden_n).tanh()
    return n + z * (h - n), torch.cat((r, z, n, h, hidden_n), 1)


def _biased(gates: Tensor, bias: Any) -> Tensor:
    return gates if bias is None else gates + bias


for _operator, _cell in ((aten._thnn_fused_lstm_cell, _lstm), (aten._thnn_fused_gru_cell, _gru)):
    _KEPT.impl(_operator.default, _cell)
    own(_operator.default, _cell)  # in inference mode, which has no autograd
