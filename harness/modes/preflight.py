"""`--mode preflight`: a checklist for a submission before its upload. The file has to stand alone
and to compile for every bucket that the prompts need; warnings of the kernel checks count as
errors. It has to be accurate on a sample of the prompts. The list ends with its NKI share.
"""

import ast
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from harness import console, sdk
from harness.errors import UserError, words_of
from harness.figures import accuracy, graphs, reference
from harness.inputs.chunks import with_chunks
from harness.inputs.prompts import encode, read_prompt_file
from harness.inputs.submission import REPOSITORY
from harness.modes import evaluate_all
from harness.processes.worker import Role
from harness.session.building import Loaded, build
from harness.session.generation import new_token_limit
from harness.session.opening import Session, open_session
from harness.settings import Settings
from neuron_cpu.console import terminal

SAMPLE = 3  # prompts whose logits are compared: the shortest, the middle one, the longest
SAMPLE_TOKENS = 8
STRICT_VARIABLE = "NKI_CPU_STRICT"
# What a submission may import besides the standard library: all of it is in the SDK's environment.
ALLOWED_ROOTS = {
    "torch", "numpy", "transformers", "neuronxcc", "nki", "neuronx_distributed",
    "neuronx_distributed_inference", "torch_neuronx", "torch_xla",
}  # fmt: skip
ACCURATE = "accurate on a sample of prompts"
LEAST_SHARE = 0.5  # of the MACs in kernels, below which the item is no "ok": the score counts it
_OWN_NAMES = ("neuron_cpu", "harness")


@dataclass(frozen=True)
class Item:
    """One line of the checklist."""

    name: str
    passed: bool
    detail: str
    mark: str = "ok"  # of one that passes


def run(settings: Settings) -> int:
    """Exit status 0 where every item passes, 1 where one fails."""
    accuracy.check_settings(settings)
    session = _open(replace(settings, enable_nki=True, recompile=True, batch_size=1))
    items = []
    for item in _check(session):
        terminal.printed(f"[{item.mark if item.passed else 'FAILED'}] {item.name}: {item.detail}")
        items.append(item)
    note = _guard("provenance", lambda: _constructs(session.submission))
    terminal.printed(f"[--] {note.name}: {note.detail}")
    failed = sum(not item.passed for item in items)
    terminal.printed(
        "Ready for the upload." if not failed else f"Not ready: {failed} of {len(items)} failed."
    )
    if any(item.name == ACCURATE and not item.passed for item in items):
        terminal.printed(accuracy.cause(settings))
    return 1 if failed else 0


def _open(settings: Settings) -> Session:
    """A session as long as the prompts need, with a sample of them that fits."""
    texts = settings.prompts or read_prompt_file(reference.PROMPTS_FILE)
    session = open_session(settings, [])
    ids = encode(session.tokenizer, texts, settings.raw)
    if settings.asked_seq_len is None:
        session = evaluate_all.sized(
            session, max(evaluate_all.length_for(len(row)) for row in ids), ids
        )
    seq_len = session.settings.seq_len
    fitting = sorted((row for row in ids if 2 < len(row) < seq_len), key=len)
    if not fitting:
        raise UserError(f"No prompt fits --seq-len {seq_len}; raise it.")
    if settings.asked_seq_len is not None:
        in_chunks = with_chunks(session.settings, session.model.config, fitting)
        session = replace(session, settings=in_chunks)
    chosen = sorted({0, len(fitting) // 2, len(fitting) - 1})[:SAMPLE]
    return replace(session, prompt_ids=tuple(fitting[index] for index in chosen))


def _check(session: Session) -> Iterator[Item]:
    """Yield the items of the checklist; a failed compile ends it."""
    yield _guard("stands alone", lambda: stands_alone(session.submission))
    os.environ[STRICT_VARIABLE] = "1"
    built: list[Loaded] = []

    def compile_all() -> str:
        built.append(build(session, Role.NKI))
        names = [f"{g.submodel} {g.bucket}" for g in graphs.read(built[0].folder)]
        return f"{len(names)} graphs ({', '.join(names)})"

    compiled = _guard("compiles for every bucket, checks strict", compile_all)
    yield compiled
    if not compiled.passed:
        return
    yield _guard(ACCURATE, lambda: _accurate(session, built[0]))
    share = _guard("NKI share", lambda: _share(session, built[0]))
    low = share.passed and float(share.detail.split("%")[0]) < 100 * LEAST_SHARE
    yield replace(share, mark="LOW") if low else share


class CheckFailed(Exception):
    """An item that does not hold; the message is its detail."""


def _guard(name: str, check: Callable[[], str]) -> Item:
    """Run one check; whatever it raises is its failure."""
    try:
        return Item(name, True, check())
    except Exception as error:  # a submission may raise anything
        return Item(name, False, words_of(error))


def stands_alone(path: Path) -> str:
    """Imports of the standard library and the SDK only, and no path or name of this repository."""
    text = path.read_text(encoding="utf-8")
    roots: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            roots.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise CheckFailed(
                    f"line {node.lineno} imports relatively; the file is uploaded alone"
                )
            roots.add((node.module or "").split(".")[0])
    foreign = sorted(roots - ALLOWED_ROOTS - set(sys.stdlib_module_names))
    if foreign:
        raise CheckFailed(f"it imports {', '.join(foreign)}, which the device may not have")
    for name in (str(REPOSITORY), *_OWN_NAMES):
        for number, line in enumerate(text.splitlines(), start=1):
            if name in line:
                raise CheckFailed(f"line {number} names {name}, which is not uploaded")
    return f"imports {', '.join(sorted(roots & ALLOWED_ROOTS))} only"


def _constructs(path: Path) -> str:
    """A note on the file's constructs: how many of them public sources show."""
    from harness.simulator import provenance  # takes PyTorch's time, which other modes do not need

    return provenance.summary(provenance.judge(provenance.in_source(path.read_text("utf-8"))))


def _accurate(session: Session, candidate: Loaded) -> str:
    baseline = build(session, Role.BASELINE)
    lengths, summaries = [], []
    for ids in session.prompt_ids:
        count = min(SAMPLE_TOKENS, new_token_limit(session.settings, [ids]))
        with console.step(f"Comparing logits behind {len(ids)} tokens", total=2 * count) as step:
            result = accuracy.check_row(baseline, candidate, ids, count, lambda *_: step.advance())
        if not result.passed:
            raise CheckFailed(f"prompt of {len(ids)} tokens: {result.summary()}")
        lengths.append(str(len(ids)))
        summaries.append(result.max_abs_error or 0.0)
    return f"prompts of {', '.join(lengths)} tokens, largest logit error {max(summaries):.3g}"


def _share(session: Session, candidate: Loaded) -> str:
    prompt = len(session.prompt_ids[0])
    tokens = session.settings.seq_len - prompt
    found = graphs.read(candidate.folder)
    graphs.check_macs(session, found)
    share = graphs.nki_share(
        found, prompt, tokens, session.settings.prefill_chunk, session.settings.speculation
    )
    outside = f"; outside: {', '.join(share.outside)}" if share.outside else ""
    detail = f"{share.contest:.1%} of the MACs by the contest's count, {share.weighted:.1%} by use"
    if share.warnings:
        raise CheckFailed(" ".join(share.warnings))
    if share.contest == 0:
        raise CheckFailed("no matrix product runs in a kernel")
    return f"{detail}{outside} ({sdk.platform().name} graphs)"
