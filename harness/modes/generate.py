"""`--mode generate`: answer the prompts, streamed to standard output."""

from collections.abc import Sequence

from harness import console, sdk
from harness.figures import benchmark
from harness.modes.compile import report_outside_nki
from harness.output import report
from harness.session.building import Loaded, build
from harness.session.generation import generate_tokens, new_token_limit, reading
from harness.session.opening import Session, open_session
from harness.settings import Settings
from harness.streaming import Stream, decoded
from neuron_cpu.console import terminal


def run(settings: Settings) -> int:
    """Build the model and generate; several prompts run as batches of `--batch-size`."""
    session = open_session(settings)
    loaded = build(session)
    if settings.enable_nki:
        report_outside_nki(loaded.folder)
    for start in range(0, len(session.prompt_ids), settings.batch_size):
        ids = session.prompt_ids[start : start + settings.batch_size]
        generate_batch(loaded, ids, start)
        if settings.benchmark:
            report_speed(loaded, ids)
    return 0


def report_speed(loaded: Loaded, prompt_ids: Sequence[Sequence[int]]) -> None:
    """Print the measured report of one batch, which `--benchmark` adds."""
    settings = loaded.session.settings
    runs = benchmark.runs_asked(settings.runs)
    tokens = new_token_limit(settings, prompt_ids)
    with console.step("Measuring", total=runs + 1) as step:
        measured = benchmark.measure(
            loaded, prompt_ids, tokens, runs, lambda _: step.advance(1 / tokens)
        )
    report.print_speed("measured", measured)


def generate_batch(loaded: Loaded, prompt_ids: Sequence[Sequence[int]], first_index: int) -> Stream:
    """Generate for one batch, writing each row under its heading; returns the times."""
    session, settings = loaded.session, loaded.session.settings
    headings = [heading(session, first_index + row, ids) for row, ids in enumerate(prompt_ids)]
    buffer: list[str] = []
    out = terminal.Running()
    stream = Stream(
        session.tokenizer,
        session.stop_tokens,
        headings,
        out.write if settings.stream else buffer.append,
    )
    tokens_to_come = new_token_limit(settings, prompt_ids)
    if settings.stream:
        with reading(stream.step) as on_step:
            generate_tokens(loaded, prompt_ids, tokens_to_come, on_step)
    else:
        with console.step("Generating", total=tokens_to_come) as step:

            def advance(tokens: list[int], seconds: float) -> None:
                stream.step(tokens, seconds)
                step.advance()

            generate_tokens(loaded, prompt_ids, tokens_to_come, advance)
    stream.finish()
    out.write("".join(buffer))
    out.finish()
    say_speed(stream)
    return stream


def heading(session: Session, number: int, ids: Sequence[int]) -> str:
    """The heading of an answer: its number, and the prompt that the answer continues."""
    return f"Output {number}: " + (
        decoded(session.tokenizer, ids) if session.continues_prompts else ""
    )


def say_speed(stream: Stream) -> None:
    """One status line: how many tokens came, and how fast."""
    speed = stream.tokens_per_second
    rate = "" if speed is None else f", then {speed:.2f} tokens/s per prompt"
    console.say(
        f"{sum(stream.token_counts)} tokens, the first after {stream.first_seconds:.2f} s{rate} "
        f"({sdk.platform().times.label})"
    )
