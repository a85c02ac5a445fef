"""Do the suite's values and sizes notice a wrong kernel? Mutants of each operator's own solution.

python -m tests.judge.solution_mutants --each 40 --seed 0 [--only NAME,...] [--jobs N] [--write]

A mutant is one change of the kernel's text, or two where there are too few: a number, an operator,
a function, an argument. It is killed where it is refused, raises, or is wrong in the odd case or a
drawn one. A survivor whose results are those of the solution for OTHER draws of values and sizes,
but for the ORDER of fp32 sums, is no wrong kernel: another tile size, or a constant on which no
result depends. It is counted apart as one without effect. What is done is kept in mutants.jsonl,
one line each, for a run that goes on: remove the file after a change of solutions or judge.
--write puts the table of what is done into lab/docs/mutation.md, after each twenty mutants.
"""

from __future__ import annotations

import argparse
import ast
import functools
import itertools
import json
import multiprocessing
import os
import random
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch

import neuron_cpu

neuron_cpu.ensure_sdk()

from neuron_cpu import suite  # noqa: E402
from neuron_cpu.core import NkiError  # noqa: E402
from neuron_cpu.core.run.execute import Plan  # noqa: E402
from neuron_cpu.judge import verdict  # noqa: E402
from neuron_cpu.judge.references import Reference  # noqa: E402
from neuron_cpu.lessons import pages  # noqa: E402
from neuron_cpu.sandbox import limits  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "mutants.jsonl"
PAGE, HEAD = ROOT / "lab" / "docs" / "mutation.md", "<!-- solutions: begin -->\n"
OTHER = 5  # draws of values and sizes, from a seed that no judgement has
ORDER = 1e-6  # of the largest element: what another order of sums changes (6e-7 was measured)
SECONDS = 60.0  # processor time of a mutant
LANGUAGE = {
    "add": "subtract", "subtract": "add", "multiply": "divide", "divide": "multiply",
    "max": "min", "min": "max", "maximum": "minimum", "minimum": "maximum", "sum": "max",
    "mean": "max", "exp": "tanh", "log": "sqrt", "rsqrt": "sqrt", "sqrt": "rsqrt", "erf": "tanh",
    "sigmoid": "tanh", "silu": "gelu", "gelu": "silu", "square": "abs", "equal": "not_equal",
    "not_equal": "equal", "zeros": "ones", "transpose": "copy", "copy": "negative",
    "gelu_apprx_tanh": "silu", "reciprocal": "sqrt",
}  # fmt: skip
OPERATORS = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Pow: "*", ast.GtE: ">",
    ast.Gt: ">=", ast.LtE: "<", ast.Lt: "<=", ast.Eq: "!=",
}  # fmt: skip


class Mutant(NamedTuple):
    """A change of an operator's text, in words, and the text."""

    change: str
    text: str


def changes(text):
    """Every single change of a kernel's text."""
    (kernel,) = (n for n in ast.walk(ast.parse(text)) if getattr(n, "name", "") == "kernel")
    lines = text.splitlines(keepends=True)
    starts = [0, *itertools.accumulate(map(len, lines))]
    found = {}
    for node in ast.walk(kernel):
        for old, new in _of(node):
            at = starts[old.lineno - 1] + old.col_offset
            end = starts[old.end_lineno - 1] + old.end_col_offset
            said = f"line {old.lineno}:{old.col_offset}: {text[at:end]} -> {new}"
            found[text[:at] + new + text[end:]] = said
    return [Mutant(said, changed) for changed, said in found.items() if changed != text]


def _of(node):
    """Nodes of the text and what stands in their place."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield from ((node, repr(v)) for v in (node.value + 1, node.value - 1, 2 * node.value))
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        yield node, repr(not node.value)
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        sides = ast.unparse(node.left), ast.unparse(node.right)
        yield node, f"({sides[0]} {OPERATORS[type(node.op)]} {sides[1]})"
        yield from ((node, side) for side in sides)
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in OPERATORS:
        left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
        yield node, f"{left} {OPERATORS[type(node.ops[0])]} {right}"
    elif isinstance(node, ast.AugAssign):
        yield node, f"{ast.unparse(node.target)}[...] = {ast.unparse(node.value)}"
    elif isinstance(node, ast.Call):
        yield from _of_call(node)


def _of_call(node):
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    arguments = [*map(ast.unparse, node.args)]
    if name in LANGUAGE and isinstance(node.func, ast.Attribute):
        yield node.func, f"{ast.unparse(node.func.value)}.{LANGUAGE[name]}"
    if len(arguments) == 2 and name not in ("add", "multiply", "min", "max", "ndarray", "store"):
        rest = [ast.unparse(one) for one in node.keywords]
        yield node, f"{ast.unparse(node.func)}({', '.join([*arguments[::-1], *rest])})"
    if name == "min" and isinstance(node.func, ast.Name):
        yield from ((node, argument) for argument in arguments)
    if name in LANGUAGE and len(arguments) == 2:
        yield node, arguments[0]


def sample(name, each, seed):
    """That many mutants, with two changes where there are too few with one."""
    draw, text = random.Random(f"{seed} {name}"), suite.template(name)
    found = changes(text)
    draw.shuffle(found)
    while len(found) < each:
        first = draw.choice(found[:])
        with_two = changes(first.text)
        second = draw.choice(with_two)
        found.append(Mutant(f"{first.change}; {second.change}", second.text))
    return found[:each]


@functools.cache
def _cases(name, seed, wide=False):
    draws = range(seed, seed + (OTHER if wide else 1))
    odd = suite.operator(name).cases[:1]
    return [*odd, *(case for draw in draws for case in suite.drawn(name, draw))]


def word(name, mutant, seed):
    """killed, survived or without effect."""
    operator = suite.operator(name)
    try:
        with limits.bounded(SECONDS, None):
            module = pages.module(f"mutant of {name}", mutant.text, f"{name}, {mutant.change}")
            reference = Reference(operator.reference)
            for kinds in (("random",), operator.values[1:]):
                for case in _cases(name, seed):
                    settings = verdict.Settings(kinds=kinds, seeds=(seed,))
                    if not verdict.judge(module.kernel, reference, case, settings).correct:
                        return "killed"
    except (Exception, SystemExit):
        return "killed"
    same = all(_is_same(name, module.kernel, c) for c in _cases(name, seed + 1000, True))
    return "without effect" if same else "survived"


def _close(mine, theirs):
    """Equal but for the order of sums in fp32."""
    if mine.shape != theirs.shape or not theirs.numel():
        return mine.shape == theirs.shape
    return bool(((mine - theirs).abs() <= ORDER * theirs.abs().max()).all())


def _is_same(name, kernel, case):
    operator = suite.operator(name)
    try:
        programs = [verdict.traced(one, case, ()) for one in (operator.kernel, kernel)]
        for kind in operator.values:
            inputs = verdict.tensors_of(*case.values(kind, 7))
            mine, theirs = (verdict.run(p, Plan(p), inputs) for p in programs)
            pairs = zip(mine, theirs, strict=True)
            if not all(_close(a.nan_to_num(), b.nan_to_num()) for a, b in pairs):
                return False
    except (NkiError, ValueError, IndexError, TypeError):
        return False
    return True


def _judged(given):
    torch.set_num_threads(1)
    name, mutant, seed = given
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return name, word(name, mutant, seed), mutant.change


def table(done, seed):
    """The page's section."""
    rows = ["| Operator | Mutants | Without effect | Killed of the others |", "|---|--:|--:|--:|"]
    for name in [*sorted({own for own, _, _ in done}, key=[*suite.names()].index), "all"]:
        found = Counter(what for own, what, _ in done if name in (own, "all"))
        killed, others = found["killed"], found["killed"] + found["survived"]
        share = f"{killed} of {others}, {killed / max(1, others):.0%}"
        rows.append(f"| {name} | {found.total()} | {found['without effect']} | {share} |")
    survivors = [f"- `{own}`: `{change}`" for own, what, change in done if what == "survived"]
    return "\n".join([*rows, "", f"Seed {seed}. Survivors:", "", *survivors])


def write(found):
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(HEAD)
    after = rest.partition("<!-- solutions: end -->")[2]
    PAGE.write_text(f"{before}{HEAD}{found}\n<!-- solutions: end -->{after}", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--each", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=",".join(suite.names()))
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    samples = {name: sample(name, given.each, given.seed) for name in given.only.split(",")}
    # One of each operator in turn: a run that is broken off has some of all.
    wanted = [(n, own[k], given.seed) for k in range(given.each) for n, own in samples.items()]
    kept = KEPT.read_text(encoding="utf-8").splitlines() if KEPT.exists() else []
    known = {(n, change): [n, what, change] for n, what, change in map(json.loads, kept)}
    done = [known[n, m.change] for n, m, _ in wanted if (n, m.change) in known]
    todo = [one for one in wanted if (one[0], one[1].change) not in known]
    with multiprocessing.Pool(given.jobs) as pool, KEPT.open("a", encoding="utf-8") as file:
        for judged in pool.imap_unordered(_judged, todo):
            done.append([*judged])
            print(json.dumps(judged), file=file, flush=True)
            if len(done) % 20 == 0:
                print(f"{len(done)} of {len(wanted)}", file=sys.stderr, flush=True)
                if given.write:
                    write(table(done, given.seed))
    print(table(done, given.seed))
    if given.write:
        write(table(done, given.seed))


if __name__ == "__main__":
    main()
