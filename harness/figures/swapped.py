"""How long a model with a kernel in it would take on a NeuronCore, beside the kernel."""

from collections.abc import Sequence
from typing import Any

from harness.errors import is_refusal
from harness.figures.estimate import Estimator, events_of
from harness.processes.worker import Host
from harness.simulator import cost
from harness.swapping import running as swapping
from harness.swapping.running import Ids
from neuron_cpu.runtime.graph import trace


def estimate(
    host: Host, ids: Ids, lengths: Sequence[int], plan: Sequence[str], swapped: bool
) -> dict[str, Any]:
    """One execution by the cost model, on shapes alone.

    Returns `ms`: the estimate, and the shortest and longest time of a device that fit it. Returns
    `why_not` where no estimate can be made.
    """
    model = swapping.prepared(host, swapped, 1)  # no scores are kept on shapes alone: eager
    try:
        with swapping.changed(host, model, plan, swapped):
            tokens, *mask = swapping.inputs(ids, lengths)
            # some models look at the mask's values: here it is known
            record, _ = trace(swapping.Hidden(model, *mask), (tokens,), "model", len(ids[0]))
    except Exception as error:
        if not is_refusal(error):
            error = RuntimeError(host.where(error))
        return {"ms": [], "why_not": " ".join(str(error).split())[:400]}
    finally:
        swapping.forget_model()  # its parameters are shapes from here on
    estimator = Estimator(cost.DEFAULT_PROFILE, cost.Overheads(), 1)
    found = estimator.graph("model", len(ids[0]), 1, events_of(record))
    return {"ms": [ns / 1e6 for ns in (found.latency_ns, *found.band_ns)], "why_not": ""}
