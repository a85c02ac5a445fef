"""Compares a submission's logits with the baseline's, token by token.

The verdict is the SDK's `logit_validation` with the contest's tolerances: the submission gets the
baseline's tokens, and its logits must stay close and have the same greedy token at every position.
Each row of a batch is checked in its own place, among rows of other tokens and of its length: NxDI
indexes the cache by position in prefill and by token count in decode, so padded rows of unequal
length cannot be re-run as one batch with tokens appended. One run of the whole batch follows, in
which every row has to begin with the tokens that it has among the others.
"""

import contextlib
import functools
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from harness import files, sdk
from harness.errors import UserError
from harness.inputs import options
from harness.session.building import Loaded, identity
from harness.session.generation import OnStep, greedy_scores
from harness.settings import Settings
from neuron_cpu.errors import UnwritableError

# top-k (None: all) -> (absolute, relative tolerance), as the contest's driver sets them
CONTEST_TOLERANCES: dict[int | None, tuple[float, float]] = {
    None: (1e-5, 0.05),
    1000: (1e-5, 0.03),
    50: (1e-5, 0.03),
    5: (1e-5, 0.03),
}
TIES, CONTEST = "ties", "contest"  # judgements
BF16_MANTISSA_BITS = 7
MOST_KEPT_BYTES = 32 << 20  # of one prompt's logits: 8 tokens of Llama-3.2-1B have 4 MB
MOST_DIVERGENCES = 5  # printed; reports have all of them
FAR = 25  # times the baseline's squared error: no rounding, whatever the greedy tokens say


@dataclass(frozen=True)
class Candidate:
    """One token among the best five: its id, its text and its logit."""

    token: int
    text: str
    logit: float


@dataclass(frozen=True)
class Divergence:
    """A position where the two sides choose another token."""

    position: int
    expected: list[Candidate]
    actual: list[Candidate]
    margin: float  # between the expected and the actual choice, on the expected side
    is_tie: bool  # the margin is within one bf16 spacing of that logit

    def describe(self) -> list[str]:
        """Lines for the terminal."""
        kind = "a tie within one bf16 spacing" if self.is_tie else "not a tie"
        lines = [f"position {self.position}: margin {self.margin:.4g}, {kind}"]
        for side, candidates in (("baseline", self.expected), ("submission", self.actual)):
            best = ", ".join(f"{c.text!r} ({c.token}) {c.logit:.4f}" for c in candidates)
            lines.append(f"  {side}: {best}")
        return lines


@dataclass
class RowResult:
    """The comparison of one prompt; errors are over all finite logits of all positions.

    With `not_finite` there was nothing to compare, and the four errors are None.
    """

    passed: bool  # by the judgement that was asked for
    message: str
    positions: int
    greedy_match: float  # share of positions with the same greedy token
    mse: float | None
    cosine: float | None
    max_abs_error: float | None
    max_abs_logit: float | None
    divergences: list[Divergence] = field(default_factory=list)
    contest_passed: bool | None = None  # by the contest's own; None: the same as `passed`
    not_finite: str | None = None  # which side's logits are NaN or infinite, and where first
    # Mean squared errors against the baseline in fp32, over the positions where its tokens are the
    # baseline's; None where it did not run.
    baseline_error: float | None = None
    own_error: float | None = None

    def lines(self) -> list[str]:
        """Lines for the terminal: the summary, and the first difference of a failed comparison."""
        lines = [self.summary()]
        if self.passed and self.contest_passed is False:
            lines.append(
                f"The contest's own judgement fails it (--judge contest): {len(self.divergences)} "
                "greedy tokens differ, each in a tie within one bf16 spacing."
            )
        if not self.passed and self.not_finite is None:
            lines += self.message.splitlines()
            shown = self.divergences[:MOST_DIVERGENCES]
            lines += [line for divergence in shown for line in divergence.describe()]
            left = len(self.divergences) - len(shown)
            lines += [f"... and at {left} more positions"] if left else []
            far = FAR * (self.baseline_error or math.inf)
            if (self.own_error or 0) < far and all(one.is_tie for one in self.divergences):
                lines.append(
                    "No greedy token differs but in ties: two correct bf16 programs can differ so; "
                    "compare fewer tokens (--max-new-tokens 8), or let --mode diff tell rounding "
                    "from a bug."
                )
        return [*lines, *self.errors_in_words()]

    def errors_in_words(self) -> list[str]:
        """Which side is further from fp32, in one sentence; nothing where fp32 did not run."""
        if self.baseline_error is None or self.own_error is None:
            return []
        errs = "baseline" if self.baseline_error > self.own_error else "submission"
        return [
            f"Against fp32 the baseline's squared error is {self.baseline_error:.3g}, the "
            f"submission's {self.own_error:.3g}: the {errs} errs more."
        ]

    def summary(self) -> str:
        """One line: verdict and the three figures that users ask for."""
        if self.not_finite is not None:
            return f"FAILED: {self.not_finite}"
        verdict = "passed" if self.passed else "FAILED"
        equal = round(self.greedy_match * self.positions)
        return (
            f"{verdict}: {equal} of {self.positions} greedy tokens equal, MSE {self.mse:.3g}, "
            f"cosine similarity {self.cosine:.6f}, largest error {self.max_abs_error:.3g} on "
            f"logits up to {self.max_abs_logit:.3g}"
        )


def check_settings(settings: Settings) -> None:
    """Refuse settings that leave no logits to compare."""
    asked = settings.speculation
    if asked is not None and not asked.gives_logits:
        graph = "Medusa" if asked.tree else "a token tree" if asked.token_tree else "a fused draft"
        raise UserError(
            f"A graph of {graph} returns tokens and no logits, which --mode {settings.mode} "
            "compares; leave it out, or see its text in --mode generate."
        )
    if settings.on_device_sampling:
        raise UserError(
            f"--on-device-sampling returns tokens and no logits, which --mode {settings.mode} "
            "compares; leave it out."
        )


@dataclass(frozen=True)
class Place:
    """The place of a prompt in a batch.

    Attributes:
        row: its number.
        prompts: of all rows.
    """

    row: int
    prompts: Sequence[Sequence[int]]

    def batch(self, ids: Sequence[int]) -> list[list[int]]:
        """Rows as long as `ids`, which is the prompt of this row and perhaps more: the others have
        their own tokens over and over, and none has the same as this one."""
        rows = []
        for number, own in enumerate(self.prompts):
            cycled = [own[k % len(own)] for k in range(len(ids))]
            if number == self.row:
                cycled = list(ids)
            elif cycled == list(ids):
                cycled = [token ^ 1 for token in cycled]
            rows.append(cycled)
        return rows


@dataclass(frozen=True)
class Expected:
    """The logits with which a prompt's logits are compared.

    Attributes:
        baseline: its logits [T, 1, V] fp32.
        precise: the baseline's in fp32 behind its own greedy tokens; None if it does not run.
    """

    baseline: Any
    precise: Any | None = None


def expected_of(
    baseline: Loaded,
    precise: Loaded | None,
    ids: Sequence[int],
    new_tokens: int,
    on_step: OnStep | None = None,
) -> Expected:
    """The logits of the baseline, and of it in fp32, for at most `--num-tokens-to-check` tokens.

    Logits of an earlier run come from the cache.
    """
    total = min(new_tokens, baseline.session.settings.num_tokens_to_check or new_tokens)
    scores = _known_scores(baseline, ids, total, on_step)
    return Expected(scores, precise and _known_scores(precise, ids, total, None))


def check_row(
    baseline: Loaded,
    candidate: Loaded,
    ids: Sequence[int],
    new_tokens: int,
    on_step: OnStep | None = None,
    known: Expected | None = None,
    place: Place | None = None,
) -> RowResult:
    """Compare the two models on the tokens after one prompt, at most `--num-tokens-to-check`, the
    candidate at a place in a batch.

    `on_step` is called after each generated token of either side with the seconds that it took;
    where the baseline's logits are `known`, of the candidate only.
    """
    import torch  # with the SDK's check, seconds that most modes do without
    from torch_neuronx.testing.validation import logit_validation

    settings = candidate.session.settings
    known = known or expected_of(baseline, None, ids, new_tokens, on_step)
    expected, total = known.baseline, len(known.baseline)
    actual = torch.full_like(expected, math.nan)
    if (broken := first_broken(expected[:, 0])) is not None:
        return not_finite(f"the baseline's logits at {broken}; look for NaN in the checkpoint")

    def continue_from(input_ids: Any) -> Any:
        done = input_ids.shape[1] - len(ids)
        scores = _scores(candidate, input_ids[0].tolist(), total - done, on_step, place)
        if (broken := first_broken(scores[:, 0], done)) is not None:
            raise _Broken(f"the submission's logits at {broken}")
        actual[done:] = scores
        return scores

    validated = functools.partial(
        logit_validation,
        input_ids=torch.tensor([list(ids)]),
        expected_logits=expected,
        tol_map=settings.tol_map or dict(CONTEST_TOLERANCES),
    )
    try:
        passed, _, message = validated(
            generate_fn=continue_from, divergence_difference_tol=settings.divergence_difference_tol
        )
    except _Broken as error:
        return not_finite(f"{error}; --mode diff tells which kernel they come from")
    tokenizer = baseline.session.tokenizer
    result = compare(expected[:, 0], actual[:, 0], bool(passed), str(message), tokenizer)
    if known.precise is not None:
        sides = expected[:, 0], actual[:, 0]
        errors = [error_against(known.precise[:, 0], expected[:, 0], side) for side in sides]
        result = replace(result, baseline_error=errors[0], own_error=errors[1])
    if result.passed or settings.judge == CONTEST:
        return result
    # The same logits again, with every choice of a greedy token allowed: what is left are the
    # tolerances. Two correct bf16 programs may choose differently where the logits tie.
    close, *_ = validated(
        generate_fn=lambda input_ids: actual[input_ids.shape[1] - len(ids) :],
        divergence_difference_tol=math.inf,
    )
    excused = bool(close) and all(divergence.is_tie for divergence in result.divergences)
    return replace(result, passed=excused, contest_passed=False)


def cause(settings: Settings) -> str:
    """The command that finds where a submission begins to differ, with the options given."""
    its = options.words_of(settings.given, lambda option: "diff" in (option.modes or ("diff",)))
    words = [word for word in its if word != "--enable-nki"]
    return f"What finds the cause: python main.py --enable-nki --mode diff {shlex.join(words)}"


class _Broken(Exception):
    """The submission's logits are not finite; says where first."""


def first_broken(scores: Any, done: int = 0) -> str | None:
    """Where logits [T, V] are first NaN or +inf, or -inf throughout; None where they are not.

    End tokens are -inf on purpose, so single entries of -inf do not count.
    """
    found = (scores.isnan() | (scores == math.inf) | scores.isinf().all(-1, keepdim=True)).nonzero()
    if not len(found):
        return None
    position, token = found[0].tolist()
    return f"position {done + position}, token {token} are {float(scores[position, token])}"


def not_finite(what: str) -> RowResult:
    """A comparison that cannot be made."""
    nothing = math.nan
    return RowResult(False, what, 0, 0.0, nothing, nothing, nothing, nothing, not_finite=what)


def error_against(precise: Any, expected: Any, logits: Any) -> float:
    """Mean squared error of `logits` [T, V] where `precise` had the tokens of `expected` before it.

    The first position has the same prompt; each further one needs equal greedy tokens so far.
    """
    differing = (precise.argmax(-1) != expected.argmax(-1)).nonzero()[:, 0].tolist()
    count = differing[0] + 1 if differing else len(precise)
    finite = precise[:count].isfinite() & logits[:count].isfinite()
    error = logits[:count][finite].double() - precise[:count][finite].double()
    return float((error * error).mean())


def _known_scores(loaded: Loaded, ids: Sequence[int], count: int, on_step: OnStep | None) -> Any:
    """`_scores`, kept in the cache under a digest of everything that went into them."""
    import torch  # as above

    shape = count, loaded.session.vocabulary
    if not sdk.platform().simulates or 4 * math.prod(shape) > MOST_KEPT_BYTES:
        return _scores(loaded, ids, count, on_step)
    rounding = loaded.session.settings.baseline_rounding
    file = files.reference_file({"ids": list(ids), "model": identity(loaded), "as": rounding})
    _, arrays = files.read_reference(file) or (None, [])
    if [array.shape for array in arrays] == [shape]:
        return torch.from_numpy(arrays[0])[:, None]
    scores = _scores(loaded, ids, count, on_step)
    with contextlib.suppress(UnwritableError):  # the run goes on without
        files.write_reference(file, None, [scores[:, 0].numpy()])
    return scores


def _scores(
    loaded: Loaded,
    ids: Sequence[int],
    count: int,
    on_step: OnStep | None,
    place: Place | None = None,
) -> Any:
    """Logits [count, 1, V] fp32 of `count` greedy tokens; end tokens are masked to -inf."""
    import torch  # as above

    row = 0 if place is None else place.row
    batch = [ids] if place is None else place.batch(ids)

    def step(tokens: list[int], seconds: float) -> None:
        if on_step is not None:
            on_step(tokens[row : row + 1], seconds)

    _, scores = greedy_scores(loaded, batch, count, step)
    return torch.from_numpy(scores[:, row].copy())[:, None]


def check_together(
    candidate: Loaded, prompts: Sequence[Sequence[int]], known: Sequence[Expected]
) -> list[str]:
    """What is wrong with each row of the batch as it is, in a sentence; empty where nothing is.

    Behind each prompt the greedy tokens have to be the baseline's, up to the first that ties.
    """
    count = min(len(one.baseline) for one in known)
    steps, _ = greedy_scores(candidate, prompts, count)
    said = [""] * len(known)
    for row, one in enumerate(known):
        for position, scores in enumerate(one.baseline[:count, 0]):
            token, best = steps[position][row], float(scores.max())
            margin = best - float(scores[token])
            if margin == 0:
                continue
            if margin > bf16_spacing(best):
                said[row] = (
                    f"In a run of the whole batch row {row} has token {token} at position "
                    f"{position}, {margin:.3g} below the baseline's; among rows of its own length "
                    "it passes, so look at how rows of other lengths are padded."
                )
            break  # what follows another token is another text
    return said


def compare(expected: Any, actual: Any, passed: bool, message: str, tokenizer: Any) -> RowResult:
    """Figures of two [T, V] logit tensors; -inf entries of either side are left out."""
    finite = expected.isfinite() & actual.isfinite()
    left, right = expected[finite].double(), actual[finite].double()
    error = (right - left).abs()
    norms = float(left.norm() * right.norm())
    best_left, best_right = expected.argmax(-1), actual.argmax(-1)
    differing = (best_left != best_right).nonzero()[:, 0].tolist()
    return RowResult(
        passed=passed,
        message=message,
        positions=len(expected),
        greedy_match=1 - len(differing) / len(expected),
        mse=float((error * error).mean()),
        cosine=float(left @ right) / norms if norms else 1.0,
        max_abs_error=float(error.max()),
        max_abs_logit=float(left.abs().max()),
        divergences=[_divergence(i, expected[i], actual[i], tokenizer) for i in differing],
    )


def _divergence(position: int, expected: Any, actual: Any, tokenizer: Any) -> Divergence:
    best = float(expected.max())
    margin = best - float(expected[int(actual.argmax())])
    return Divergence(
        position=position,
        expected=_best_five(expected, tokenizer),
        actual=_best_five(actual, tokenizer),
        margin=margin,
        is_tie=margin <= bf16_spacing(best),
    )


def _best_five(logits: Any, tokenizer: Any) -> list[Candidate]:
    values, tokens = logits.topk(min(5, logits.shape[-1]))
    return [
        Candidate(int(token), tokenizer.decode([int(token)]), float(value))
        for token, value in zip(tokens, values)
    ]


def bf16_spacing(value: float) -> float:
    """Distance between neighbouring bf16 numbers at `value`: 2^(exponent - 7)."""
    if value == 0 or not math.isfinite(value):
        return 0.0
    return 2.0 ** (math.frexp(abs(value))[1] - 1 - BF16_MANTISSA_BITS)
