"""`--mode validate`: the submission's logits against the SDK's own Llama, prompt by prompt."""

from harness import console
from harness.figures import accuracy
from harness.figures.accuracy import RowResult
from harness.inputs.prompts import shorten
from harness.modes.generate import report_speed
from harness.processes.worker import Role
from harness.session.building import Loaded, build
from harness.session.generation import new_token_limit
from harness.session.opening import open_session
from harness.settings import Settings
from neuron_cpu.console import terminal

# Every position is compared behind the baseline's own tokens, so more of them test the same kernels
# again at other lengths: 32 see a wrong one, and take a laptop less than half a minute.
CHECKED_TOKENS = 32


def run(settings: Settings) -> int:
    """Exit status 0 where every prompt passes, 1 where one fails."""
    accuracy.check_settings(settings)
    session = open_session(settings)
    baseline, candidate = build(session, Role.BASELINE), build(session)
    results = [
        check_prompt(baseline, candidate, prompt, ids)
        for prompt, ids in zip(session.prompts, session.prompt_ids)
    ]
    if settings.benchmark:
        report_speed(candidate, session.prompt_ids)
    passed = all(result.passed for result in results)
    terminal.printed(f"Validation {'passed' if passed else 'failed'}.")
    return 0 if passed else 1


def check_prompt(baseline: Loaded, candidate: Loaded, prompt: str, ids: list[int]) -> RowResult:
    """Check one prompt with progress, and print its result."""
    settings = candidate.session.settings
    total = new_token_limit(settings, [ids])
    unasked = total if settings.max_new_tokens else CHECKED_TOKENS
    total = min(total, settings.num_tokens_to_check or unasked)
    with console.step(f"Comparing logits for {shorten(prompt)}", total=2 * total) as step:
        result = accuracy.check_row(baseline, candidate, ids, total, lambda *_: step.advance())
    terminal.printed(f"{shorten(prompt)}: " + "\n".join(result.lines()))
    return result
