"""Asynchronous execution: a decode step runs while the caller still looks at the one before it.

Follows NxDI 0.2 (`modules/async_execution.py`): prefill waits for its result; behind a decode step
the next one is submitted with the tokens that the device has chosen, positions and masks grown by
one. On the device that hides the host's work between two graphs; here a thread beside the caller's
does it, so that host and ranks overlap, too. NxDI takes the step that was submitted whenever the
sequence ids are the same; here all inputs have to be, and otherwise the step is run anew.
"""

import contextlib
from typing import Any, List, Optional

import torch

from neuron_cpu.runtime.ranks import Companion

from .kvcache.cache_lines import CacheLines

_END = 2  # positions in front of the cache's end at which NxDI stops: twice the tokens of a step


class AsyncDecode:
    """Decode steps of one application, one ahead; `ready` counts those that were."""

    def __init__(self, neuron_config: Any, cache_lines: CacheLines) -> None:
        self._end = neuron_config.max_length - _END
        self._grows_in_front = neuron_config.padding_side == "right"
        self._lines = cache_lines
        self._thread: Optional[Companion] = None
        self._expected: Optional[List[torch.Tensor]] = None  # inputs of the step ahead
        self._before: Any = None
        self.ready = 0

    def __call__(self, wrapper: Any, inputs: List[torch.Tensor]) -> Any:
        """The outputs of a decode step on its inputs; the next one is under way then."""
        outputs = self._outputs_ahead(inputs)
        if outputs is None:
            outputs = _call(wrapper, inputs)
        self._go_ahead(wrapper, inputs, outputs)
        return outputs

    def settle(self) -> None:
        """Wait for the step ahead and forget it: its tokens lie behind all that is read."""
        if self._expected is None or self._thread is None:
            return
        self._expected = None
        with contextlib.suppress(Exception):  # nobody has asked for it
            self._thread.result()
        lines, random = self._before
        self._lines.restore(lines)
        torch.set_rng_state(random)

    def _outputs_ahead(self, inputs: List[torch.Tensor]) -> Any:
        """The result of the step ahead, None where it is that of other inputs."""
        expected = self._expected
        if expected is None or self._thread is None:
            return None
        if not all(torch.equal(one, other) for one, other in zip(expected, inputs, strict=True)):
            self.settle()
            return None
        self._expected = None
        self.ready += 1
        return self._thread.result()

    def _go_ahead(self, wrapper: Any, inputs: List[torch.Tensor], outputs: Any) -> None:
        """Submit the step behind `inputs`, whose tokens are the first of `outputs`."""
        _, mask, positions, *unchanged = inputs  # lines, sampling, adapters
        if int(positions.max()) >= self._end:
            return
        tokens = outputs[0] if isinstance(outputs, list) else outputs
        one = mask.new_ones((len(mask), 1))
        grown = torch.cat([one, mask] if self._grows_in_front else [mask, one], 1)
        ids = tokens.reshape(-1, 1).to(torch.int32)
        self._expected = [ids, grown, positions + 1, *unchanged]
        self._before = self._lines.state(), torch.get_rng_state()
        if self._thread is None:
            self._thread = Companion("decode-ahead")
        expected = self._expected
        # copies made there: a tensor of the caller's inference mode may not be written elsewhere
        self._thread.submit(lambda: _call(wrapper, [tensor.clone() for tensor in expected]))


def _call(wrapper: Any, inputs: List[torch.Tensor]) -> Any:
    """The five inputs, no hidden state, and adapter ids where there are some."""
    return wrapper(*inputs[:5], None, *inputs[5:])
