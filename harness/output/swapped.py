"""How a swapped kernel did, as a table."""

from collections.abc import Sequence

from harness.figures.agreement import Agreement, Speed
from harness.sources import Source
from neuron_cpu.console import terminal

PIPED_WIDTH = 160
# What a narrow terminal does without, first named first.
EXPENDABLE = ("compile s", "band ms", "MSE")


def print_table(
    title: str, rows: Sequence[tuple[str, Agreement, Speed]], prompts: int, times: Source
) -> None:
    """Accuracy and speed of each variant of the model."""
    table = terminal.table_of(
        "attention, norms, MLP by|>MSE|>cosine|>least|>argmax|>compile s|>ms|>prompts/s|"
        ">estimated ms|>band ms|>est. prompts/s",
        title,
    )
    for name, close, speed in rows:
        estimate, band, rate = "-", "-", "-"
        if speed.estimate_ms:
            first, low, high = speed.estimate_ms
            estimate, band = f"{first:.3f}", f"{low:.3f} to {high:.3f}"
            rate = f"{1000 * prompts / first:.2f}"
        table.add_row(
            name,
            f"{close.mse:.3g}",
            f"{close.cosine:.6f}",
            f"{close.least_cosine:.6f}",
            "-" if close.argmax is None else f"{close.argmax:.2%}",
            f"{speed.compile_s:.1f}",
            f"{speed.latency_ms:.0f}",
            f"{1000 * prompts / speed.latency_ms:.3g}",
            estimate,
            band,
            rate,
        )
    terminal.print_table(terminal.output(PIPED_WIDTH), table, EXPENDABLE)
    terminal.printed(f"ms and prompts/s: {times.label}; estimated ms: {Source.COST_MODEL}.")


def print_ratios(eager: Speed, kernel: Speed, times: Source) -> None:
    """Print how many times faster than eager PyTorch it is, or why there is no estimate."""
    told = [f"{eager.latency_ms / kernel.latency_ms:.3g} ({times})"]
    if eager.estimate_ms and kernel.estimate_ms:
        ratio = eager.estimate_ms[0] / kernel.estimate_ms[0]
        told.append(f"{ratio:.3g} ({Source.COST_MODEL})")
    terminal.printed(f"Times as fast as eager: {', '.join(told)}.")
    for name, speed in (("eager", eager), ("the kernel", kernel)):
        if speed.why_not:
            terminal.printed(f"No estimate for {name}: {speed.why_not}")
