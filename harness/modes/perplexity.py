"""`--mode perplexity`: how well the text is predicted, by float weights and by quantised ones."""

from dataclasses import replace

from harness import console
from harness.errors import UserError
from harness.figures import perplexity
from harness.figures.perplexity import Perplexity
from harness.session.building import build
from harness.session.opening import open_session
from harness.settings import QUANTISED_AS, Settings
from neuron_cpu.console import terminal

WIDTH = 120  # columns of a table that goes to a file


def run(settings: Settings) -> int:
    """Print the perplexity of the float model and of quantised models. By default these are int8
    and fp8, with a scale for each channel."""
    if settings.on_device_sampling:
        raise UserError("--mode perplexity reads logits; leave --on-device-sampling out.")
    results = [_measured(variant) for variant in variants(settings)]
    _print(results)
    return 0


def variants(settings: Settings) -> list[Settings]:
    """The settings of the float model first, then of the models compared with it."""
    plain = settings.in_float()
    if settings.quantised_words:
        return [plain, settings]
    weights = replace(plain, quantized=True, quantization_type="per_channel_symmetric")
    return [plain, *(replace(weights, quantization_dtype=d) for d in QUANTISED_AS.values())]


def _measured(settings: Settings) -> Perplexity:
    """One model, opened, compiled where it changed, and closed again."""
    length = settings.seq_len
    session = open_session(replace(settings, batch_size=1), [])
    try:
        ids = session.tokenizer(perplexity.TEXT.read_text(encoding="utf-8"))["input_ids"]
        runs = perplexity.runs_of(ids, length)
        loaded = build(session.changed(batch_size=len(runs)))
        title = f"Reading {len(runs)} runs of {length} tokens"
        with console.step(title, total=length - perplexity.GIVEN) as step:
            return perplexity.measure(loaded, runs, lambda _: step.advance())
    finally:
        session.workers.close()


def _print(results: list[Perplexity]) -> None:
    title = f"Perplexity of {perplexity.TEXT.name}"
    table = terminal.table_of("model|>perplexity|>above the first|>tokens", title)
    for found in results:
        above = "-" if found is results[0] else f"{found.relative(results[0]):+.2%}"
        table.add_row(found.words, f"{found.value:.3f}", above, str(found.tokens))
    terminal.print_table(terminal.output(WIDTH), table)
    terminal.printed(
        f"Another text of this length would move each by some {results[0].error:.0%}, all of them "
        "together: the differences are of the weights."
    )
