"""The closed kernel of running sums, which NxDI draws tokens with."""

import pytest
import torch
from neuronxcc.nki._private_kernels.cumsum import COLUMNS, cumsum
from torch_neuronx.xla_impl.ops import nki_jit


@pytest.mark.parametrize("shape", [(1, 1), (3, 64), (130, 20), (2, COLUMNS + 5)])
def test_running_sums_of_rows(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    sums = torch.zeros_like(x)
    assert nki_jit()(cumsum)(x, sums, axis=1) is sums
    torch.testing.assert_close(sums, x.cumsum(1), rtol=1e-5, atol=1e-4)


def test_another_axis_is_refused():
    x = torch.ones(2, 3)
    with pytest.raises(Exception, match="got axis 0, expected the last one, 1"):
        nki_jit()(cumsum)(x, torch.zeros_like(x), axis=0)
