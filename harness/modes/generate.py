"""`--mode generate`: answer the prompts, streamed to standard output."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, Optional

from harness import console, sdk
from harness.modes import compile as compile_mode
from harness.session.building import (
    Loaded,
    Session,
    build,
    open_session,
    told_as_the_submission,
)
from harness.session.streaming import Stream


def run(args: argparse.Namespace) -> int:
    """Build the model and generate; several prompts run as batches of `--batch-size`."""
    session = open_session(args)
    loaded = build(session)
    if args.enable_nki:
        compile_mode.report_outside_nki(loaded.folder)
    for start in range(0, len(session.prompt_ids), args.batch_size):
        ids = session.prompt_ids[start : start + args.batch_size]
        generate_batch(loaded, ids, start)
        if args.benchmark:
            report_speed(loaded, ids)
    return 0


def report_speed(loaded: Loaded, prompt_ids: Sequence[Sequence[int]]) -> None:
    """What `--benchmark` adds: the measured report of one batch, in the terminal."""
    from harness.figures import benchmark
    from harness.output import report

    args = loaded.session.args
    runs = args.runs or benchmark.default_runs()
    tokens = new_token_limit(args, prompt_ids)
    with console.step("Measuring", total=runs + 1) as step:
        measured = benchmark.measure(loaded, prompt_ids, tokens, runs, lambda _: step.advance(
            1 / tokens
        ))  # fmt: skip
    report.print_speed("measured", measured)


def generate_batch(loaded: Loaded, prompt_ids: Sequence[Sequence[int]], first_index: int) -> Stream:
    """Generate for one batch, writing each row under its heading; returns the times."""
    session, args = loaded.session, loaded.session.args
    headings = [
        f"Output {first_index + row}: "
        + (_prompt_text(session, ids) if session.continues_prompts else "")
        for row, ids in enumerate(prompt_ids)
    ]
    buffer: list[str] = []
    stream = Stream(
        session.tokenizer,
        stop_tokens(loaded.generation_config),
        headings,
        _write if args.stream else buffer.append,
    )
    tokens_to_come = new_token_limit(args, prompt_ids)
    if args.stream:
        generate_tokens(loaded, prompt_ids, tokens_to_come, stream.step)
    else:
        with console.step("Generating", total=tokens_to_come) as step:

            def advance(tokens: list[int]) -> None:
                stream.step(tokens)
                step.advance()

            generate_tokens(loaded, prompt_ids, tokens_to_come, advance)
    stream.finish()
    _write("".join(buffer))
    _say_speed(stream)
    return stream


def new_token_limit(args: argparse.Namespace, prompt_ids: Sequence[Sequence[int]]) -> int:
    """How many tokens fit behind the longest prompt of a batch, or fewer where asked."""
    room = args.seq_len - max(len(ids) for ids in prompt_ids)
    return min(room, args.max_new_tokens or room)


def stop_tokens(generation_config: Any) -> list[int]:
    """The end tokens as a list, whatever form the configuration has them in."""
    ends = generation_config.eos_token_id
    if ends is None:
        return []
    return [ends] if isinstance(ends, int) else list(ends)


def pad_batch(session: Session, prompt_ids: Sequence[Sequence[int]]) -> tuple[Any, Any]:
    """Token ids and attention mask, both [batch, longest prompt] int64, padded on the set side."""
    import torch

    width = max(len(ids) for ids in prompt_ids)
    tokens = torch.full((len(prompt_ids), width), session.pad_token_id, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for row, ids in enumerate(prompt_ids):
        where = (
            slice(0, len(ids)) if session.args.padding_side == "right" else slice(-len(ids), None)
        )
        tokens[row, where] = torch.tensor(list(ids))
        mask[row, where] = 1
    return tokens, mask


def generate_tokens(
    loaded: Loaded,
    prompt_ids: Sequence[Sequence[int]],
    max_new_tokens: int,
    on_step: Optional[Callable[[list[int]], Any]] = None,
    **settings: Any,
) -> Any:
    """One call of the SDK's Hugging Face adapter; returns what its `generate` returns.

    `on_step` gets the newest token of every row after each step. `settings` go to `generate`.
    """
    import torch
    from neuronx_distributed_inference.utils.hf_adapter import HuggingFaceGenerationAdapter
    from transformers import StoppingCriteriaList

    args = loaded.session.args
    tokens, mask = pad_batch(loaded.session, prompt_ids)
    if on_step is not None:
        settings["stopping_criteria"] = StoppingCriteriaList([_observer(on_step)])
    if args.on_device_sampling:
        settings["sampling_params"] = _sampling_params(args, len(prompt_ids))
    torch.manual_seed(args.seed)
    failed = "The model fails while it generates"
    with told_as_the_submission(loaded.session, failed), torch.inference_mode():
        result = HuggingFaceGenerationAdapter(loaded.model).generate(
            input_ids=tokens,
            attention_mask=mask,
            generation_config=loaded.generation_config,
            max_new_tokens=max_new_tokens,
            **settings,
        )
    loaded.model.reset()
    return result


def _observer(on_step: Callable[[list[int]], Any]) -> Any:
    import torch
    from transformers import StoppingCriteria

    class Observer(StoppingCriteria):
        """Never stops a row; tells which token each row has got."""

        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            on_step(input_ids[:, -1].tolist())
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    return Observer()


def _sampling_params(args: argparse.Namespace, batch: int) -> Any:
    from neuronx_distributed_inference.modules.generation.sampling import prepare_sampling_params

    return prepare_sampling_params(batch, [args.top_k], [args.top_p], [args.temperature])


def _prompt_text(session: Session, ids: Sequence[int]) -> str:
    return session.tokenizer.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _say_speed(stream: Stream) -> None:
    speed = stream.tokens_per_second
    rate = "" if speed is None else f", then {speed:.2f} tokens/s per prompt"
    console.say(
        f"{sum(stream.token_counts)} tokens, the first after {stream.first_seconds:.2f} s{rate} "
        f"({sdk.time_label()})"
    )
