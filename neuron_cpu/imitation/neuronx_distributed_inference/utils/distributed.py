"""Which group the layers of a model belong to."""

from typing import Any, Optional

from neuronx_distributed.parallel_layers import parallel_state

from neuron_cpu.runtime.ranks import Group


def get_tp_group(config: Any) -> Optional[Group]:
    """None (the default group) unless the model is a draft with ranks of its own."""
    if getattr(config.neuron_config, "use_draft_group", False):
        return parallel_state.get_speculative_draft_group(as_list=False)
    return None
