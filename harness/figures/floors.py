"""Lower bounds of a graph's MACs and time, against which the driver checks a submission's process.

A kernel's Python body has to run for its instructions to be counted, so the counts come from a
process that has imported the submission. Two parts are known without it: the products that every
Llama or Qwen3-MoE of these sizes computes, and the weights that every execution reads. Attention is
left out (it may skip what is masked), experts that a token has not chosen, and what only the last
token of a prompt needs of the last layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from harness.figures.graphs import CHUNK, PREFILL, Graph
from harness.processes.workers import SubmissionFailed
from harness.session.opening import Session

# A submission may keep its weights in fewer bytes than the checkpoint; one is the least that
# TensorE takes.
WEIGHT_BYTES = 1


@dataclass(frozen=True)
class Floor:
    """Least MACs, and least weights read, of one execution of a graph on one rank."""

    macs: int
    weights: int


def floor(session: Session, submodel: str, bucket: int) -> Floor:
    """The bounds of one graph; work that ranks share is divided by their number."""
    config, settings, model = session.model.config, session.settings, session.model
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    queries, keys = (heads * model.head_dim for heads in model.heads)
    caches = 2 * hidden * keys  # projections to what the caches keep
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    experts = config.get("num_experts_per_tok", 1) * 3 * hidden * inner
    layer = caches + 2 * hidden * queries + experts + hidden * config.get("num_experts", 0)
    head = hidden * config["vocab_size"]
    rows = settings.batch_size
    several = settings.speculation.length if settings.speculation else settings.prefill_chunk
    step = settings.speculation.submodel if settings.speculation else CHUNK
    tokens = rows * {PREFILL: bucket, step: several or 1}.get(submodel, 1)
    # All of every layer but the last, of that its caches; the last token of each row goes through
    # the rest of it and the head.
    macs = tokens * ((layers - 1) * layer + caches) + rows * (layer - caches + head)
    ranks = settings.tp_degree or 1
    return Floor(macs // ranks, (layers * layer + head) // ranks)


def check_macs(session: Session, graphs: Sequence[Graph]) -> None:
    """Refuse counts below what each graph has to compute."""
    for graph in graphs:
        if graph.uncounted_kernels:  # their work is missing, and a warning says so
            continue
        least = floor(session, graph.submodel, graph.bucket).macs
        if graph.macs < least:
            raise SubmissionFailed(
                f"{graph.submodel}, bucket {graph.bucket}: its process counts {graph.macs:,} MACs, "
                f"expected at least {least:,}, which the model's own sizes take; leave the "
                "counting unchanged, and compute every product of the model."
            )


def check_time(session: Session, submodel: str, bucket: int, milliseconds: float) -> None:
    """Refuse an estimate below what TensorE and HBM alone need, and the launch."""
    from harness.simulator import cost, spec  # PyTorch's time, which most modes do without

    least, core, launch = floor(session, submodel, bucket), spec.GEN2, cost.Overheads()
    computing = least.macs / core.peak_macs_per_ns
    reading = WEIGHT_BYTES * least.weights / core.hbm_bytes_per_ns
    needed = (launch.step_ns(rows=0) + max(computing, reading)) / 1e6
    if milliseconds < needed:
        raise SubmissionFailed(
            f"{submodel}, bucket {bucket}: its process estimates {milliseconds:.4g} ms, expected "
            f"at least {needed:.4g} ms, which its products and weights alone take; leave the cost "
            "model unchanged."
        )
