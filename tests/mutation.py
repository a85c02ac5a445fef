"""Do the tests notice a wrong character? Seeded mutants of all that is imported (``PARTS``).

    python tests/mutation.py [--sample N] [--seed S] [--only TEXT ...] [--limit S] [--write]

Cosmic Ray lists every place of the sources that one of ``OPERATORS`` can change; a seeded sample of
places gets one change each. For each mutant the tests of its part run, those that bear its file's
name first, then those that name it, until one fails or ``--limit`` seconds of processor time are
over: then it counts as survived. What is done is kept in mutation.jsonl, one line each, and a
further run continues there; ``--again`` runs survivors anew, after tests were added.
``--write`` records the sample in lab/data/mutation.json, for docs/mutation.md; survivors keep
their reasons there, and parts that ``--only`` leaves out keep their figures.

A mutant is written to its file, and a fork of a process that has the libraries loaded runs the
tests.

Cosmic Ray instead of mutmut: it changes the source file itself, where mutmut wraps every function;
kernels are read as source (the lint, annotations) and messages name the caller's frame.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import difflib
import functools
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import hypothesis
import pytest
import torch
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator

ROOT = Path(__file__).resolve().parents[1]
# One plausible slip for each construct. Replacements that mostly end in a TypeError are left out:
# any test kills those, and they would only flatter the figure.
OPERATORS = tuple(
    f"core/{name}"
    for name in (
        "AddNot", "NumberReplacer", "ReplaceAndWithOr", "ReplaceOrWithAnd", "ReplaceTrueWithFalse",
        "ReplaceFalseWithTrue", "ReplaceBreakWithContinue", "ReplaceContinueWithBreak",
        "ZeroIterationForLoop", "ReplaceUnaryOperator_Delete_Not",
        "ReplaceUnaryOperator_Delete_USub", "ReplaceUnaryOperator_Delete_Invert",
        *(f"ReplaceBinaryOperator_{pair}" for pair in (
            "Add_Sub", "Sub_Add", "Mul_FloorDiv", "FloorDiv_Mul", "Div_Mul", "Mod_FloorDiv",
            "Pow_Mul", "LShift_RShift", "RShift_LShift", "BitAnd_BitOr", "BitOr_BitAnd")),
        *(f"ReplaceComparisonOperator_{pair}" for pair in (
            "Eq_NotEq", "NotEq_Eq", "Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt", "Lt_GtE", "Gt_LtE",
            "Is_IsNot", "IsNot_Is")),
    )
)  # fmt: skip

CORE = "neuron_cpu/core/"
DRIVER = "harness/"
# Sources by their path's beginning, and the tests of each part.
PARTS = {
    CORE: ["tests/core", "tests/nki"],
    "llama.py": ["tests/llama", "tests/sdk/test_submission.py"],
    "models/": ["tests/llama", "tests/sdk", "tests/nki"],
    "neuron_cpu/sdk/": ["tests/sdk"],
    "neuron_cpu/imitation/": ["tests/sdk"],
    "neuron_cpu/runtime/": ["tests/sdk", "tests/runtime"],
    "neuron_cpu/sandbox/": ["tests/sandbox", "tests/judge"],
    "neuron_cpu/judge/": ["tests/judge"],
    "neuron_cpu/suite/": ["tests/judge"],
    DRIVER: [
        *("tests/harness", "tests/serving", "tests/swap", "tests/test_chat.py"),
        *("tests/test_evaluate.py", "tests/test_diff_and_preflight.py", "tests/test_quantised.py"),
        *("tests/test_main.py", "tests/test_sweep.py"),
    ],
}
SLOW = ("test_text", "test_shapes")  # whole models: they say whether all is well, not what is not
KEPT = ROOT / "mutation.jsonl"
RECORD = ROOT / "lab" / "data" / "mutation.json"
LIMIT_S = 30.0  # processor time of one mutant's tests, and of the programs that they start
STARTED_S = 90  # processor time of any process: whatever loops ends, and counts as killed
DEADLOCK_S = 900.0  # by the clock
IMPORTING = "importing"  # what stands for a test until one begins


@dataclass(frozen=True)
class Mutant:
    """One change: the ``occurrence``-th place in ``path`` where ``operator`` applies."""

    path: str
    operator: str
    occurrence: int
    line: int


@dataclass
class Result:
    """What became of a mutant: the function it stands in, and a unified diff without context."""

    mutant: Mutant
    outcome: str  # killed, survived
    function: str
    difference: str
    test: str = ""  # the last one that ran: the one that noticed, if one did


# --- mutants --------------------------------------------------------------------------------------
def sources(root):
    """Every file of the parts; a part is a folder or a file."""
    found: list[Path] = []
    for start in PARTS:
        found += sorted((root / start).rglob("*.py")) if start[-1] == "/" else [root / start]
    return found


def places(root, only):
    """All mutants of files whose path contains one of ``only``, by the place that they change."""
    found: dict[tuple[str, int, int], list[Mutant]] = {}
    for path in sources(root):
        name = str(path.relative_to(root))
        if not any(part in name for part in only):
            continue
        text = path.read_text(encoding="utf-8")
        unread = list(_annotations(ast.parse(text)))
        nodes = list(ast_nodes(get_ast(text)))
        for operator in OPERATORS:
            made = get_operator(operator)()
            spans = (span for node in nodes for span in made.mutation_positions(node))
            for occurrence, (start, end) in enumerate(spans):
                if not any(first <= start and end <= last for first, last in unread):
                    mutant = Mutant(name, operator, occurrence, start[0])
                    found.setdefault((name, *start), []).append(mutant)
    return found


def _annotations(tree):
    """Spans that nothing evaluates: annotations, and imports for the type checker only."""
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            parts.append(node.returns)
        elif isinstance(node, (ast.arg, ast.AnnAssign)):
            parts.append(node.annotation)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            parts.append(node)
        for part in filter(None, parts):
            yield (part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset)


def sample(root, count, seed, only):
    """One mutant at each of ``count`` places, chosen by ``seed`` from files that match ``only``."""
    chosen = list(places(root, only).values())
    generator = random.Random(seed)
    generator.shuffle(chosen)
    found: list[Mutant] = []
    for mutants in chosen:
        mutant = generator.choice(mutants)
        if len(found) < count and _compiles(root, mutant):
            found.append(mutant)
    return found


def _compiles(root, mutant):
    """Whether the change is Python at all: the star of keyword-only parameters is no product."""
    try:
        ast.parse(mutated((root / mutant.path).read_text(encoding="utf-8"), mutant))
    except SyntaxError:
        return False
    return True


@functools.cache  # parsing a large file takes a second, and three phases ask
def mutated(text, mutant):
    after = mutate_code(text, get_operator(mutant.operator)(), mutant.occurrence)
    assert after is not None and after != text, mutant
    return after


# --- running --------------------------------------------------------------------------------------
def nearest(tree, mutant):
    """Test files of a mutant's part: those that bear its file's name, those that name its function
    or class, those that name the file, others; of equals the short ones first."""
    part = next(tests for start, tests in PARTS.items() if mutant.path.startswith(start))
    files = [file for name in part for file in (tree / name).rglob("test_*.py")]
    files += [tree / name for name in part if name.endswith(".py")]
    word = re.compile(rf"\b{Path(mutant.path).stem}\b")
    around = function_at((tree / mutant.path).read_text(encoding="utf-8"), mutant.line).split(".")
    names = re.compile("|".join(rf"\b{name}\b" for name in around if name[:2] != "__") or "$.")

    def distance(file):
        text = file.read_text(encoding="utf-8")
        named = (word.search(file.stem.replace("_", " ")), names.search(text), word.search(text))
        return [*map(bool, named)].index(True) if any(named) else len(named), len(text), file

    return sorted((file for file in files if file.stem not in SLOW), key=distance)


class Limited:
    """A pytest plugin that runs tests until one fails or ``spent`` is ``ends``."""

    def __init__(self, ends):
        self.ends = ends

    def pytest_runtestloop(self, session):
        """Take the place of pytest's own loop."""
        session.items[:] = [item for item in session.items if sound.get(item.nodeid, True)]
        for item, following in zip(session.items, [*session.items[1:], None]):
            if spent() > self.ends or session.testsfailed:
                break
            Path("test").write_text(item.nodeid, encoding="utf-8")
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        return True


def passes(tree, files, limit):
    """Whether the tests of all files pass, or those that ran when the limit came."""
    ends = spent() + limit
    fine = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    return all(
        spent() > ends or pytest.main([*options(tree), str(file)], [Limited(ends)]) in fine
        for file in files
    )


def run(tree, mutant, limit):
    """Write the mutant to its file, run its tests in a fork that imports it, restore the file."""
    path, files = tree / mutant.path, nearest(tree, mutant)
    text = path.read_text(encoding="utf-8")
    while True:
        path.write_text(mutated(text, mutant), encoding="utf-8")
        try:
            survived = in_fork(tree, lambda: passes(tree, files, limit))
        finally:
            path.write_text(text, encoding="utf-8")
        result = result_of(mutant, text, (survived, last_test(tree)))
        if survived or result.test == IMPORTING or is_sound(tree, result.test):
            return result
        print(f"left out, as it fails without a mutant: {result.test}", flush=True)


sound: dict[str, bool] = {}  # of tests that have failed with a mutant, whether they pass without


def is_sound(tree, test):
    """Whether a test passes without a mutant."""
    if test not in sound:
        sound[test] = in_fork(tree, lambda: pytest.main([*options(tree), test]) == 0)
    return sound[test]


def in_fork(tree, work):
    """Whether ``work`` is true in a fork, within the limits; what it prints goes to a file."""
    child = os.fork()
    if not child:
        passed = False
        try:
            os.setsid()
            # what a test starts may loop, too
            resource.setrlimit(resource.RLIMIT_CPU, (STARTED_S, STARTED_S))
            with open(tree / "out.log", "wb") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            (tree / "test").write_text(IMPORTING, encoding="utf-8")
            passed = work()
        finally:
            os._exit(not passed)
    deadline = time.monotonic() + DEADLOCK_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def spent():
    """Processor time of this process and of those that it started and that ended."""
    below = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + below.ru_utime + below.ru_stime


def last_test(tree):
    return (tree / "test").read_text(encoding="utf-8")


def result_of(mutant, text, found):
    survived, test = found
    lines = difflib.unified_diff(
        text.splitlines(), mutated(text, mutant).splitlines(), lineterm="", n=0
    )
    outcome, difference = "survived" if survived else "killed", "\n".join(list(lines)[3:])
    return Result(mutant, outcome, function_at(text, mutant.line), difference, test)


def keep(result):
    """Note what became of a mutant, where a further run finds it."""
    with KEPT.open("a", encoding="utf-8") as log:
        log.write(json.dumps(asdict(result)) + "\n")
    show(result)


def options(tree):
    basetemp = f"--basetemp={tree}/temporary"
    calm = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of what is imported already
    return ["-x", "-q", "-s", "--tb=no", "-p", "no:cacheprovider", basetemp, *calm]


# --- code -----------------------------------------------------------------------------------------
def function_at(text, line):
    """Name of the innermost function or class around a line, with those around it."""
    names = []
    for node in ast.walk(ast.parse(text)):  # outer definitions come before inner ones
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            continue
        if node.lineno <= line <= (node.end_lineno or 0):
            names.append(node.name)
    return ".".join(names)


def copy_of_tree(folder, tests):
    """Tracked and new files of the repository, without git, so that nothing is written there;
    ``tests`` are compiled."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    for name in listed:
        if (ROOT / name).is_file():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
    # Compiled once, tests by pytest. A mutant's file is newer than its compiled form, which nothing
    # writes again.
    compileall.compile_dir(folder, quiet=1)
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-q", *tests]
    subprocess.run(collect, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return folder


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, default=300, help="number of mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", nargs="+", default=[""], help="only paths that contain one of these"
    )
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of a mutant's tests")
    parser.add_argument("--again", action="store_true", help="run survivors of an earlier run anew")
    parser.add_argument("--write", action="store_true", help="record the sample")
    args = parser.parse_args()
    torch.set_num_threads(1)
    # A failing example is not made smaller, and the same examples come every time.
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile(
        "mutants", phases=phases, derandomize=True, database=None, deadline=None
    )
    hypothesis.settings.load_profile("mutants")
    mutants = sample(ROOT, args.sample, args.seed, args.only)
    done = kept(mutants, args.again)
    pending = [mutant for mutant in mutants if mutant not in done]
    parts = [PARTS[start] for start in PARTS if any(m.path.startswith(start) for m in pending)]
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_of_tree(Path(folder), sorted(set(sum(parts, []))))
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        os.chdir(tree)
        sys.path[0] = str(tree)
        for mutant in pending:
            keep(run(tree, mutant, args.limit))
    results = kept(mutants)
    found = [results[mutant] for mutant in mutants]
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{len(mutants) - len(done)} mutants took {used.ru_utime + used.ru_stime:.0f} s")
    print(f"{sum(r.outcome == 'killed' for r in found)} of {len(found)} mutants killed")
    if args.write:
        record(found, args.seed)
    return 0


def show(result):
    mutant = result.mutant
    print(f"{result.outcome} {mutant.path}:{mutant.line} {result.function}", flush=True)
    if result.outcome == "survived":
        print(result.difference, flush=True)


def kept(mutants, again=False):
    """Results of earlier runs, the last of each mutant; without survivors if they run ``again``."""
    found = {result.mutant: result for result in log() if result.mutant in mutants}
    return {m: r for m, r in found.items() if r.outcome == "killed" or not again}


def log():
    """All results of earlier runs, the first ones first."""
    for line in KEPT.read_text(encoding="utf-8").splitlines() if KEPT.exists() else ():
        fields = json.loads(line)
        yield Result(Mutant(**fields.pop("mutant")), **fields)


def record(results, seed):
    """Write the sample of each part that it has: its figures and its survivors.

    Survivors keep the reasons that the record gives them, and parts that are not sampled stay.
    """
    samples = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    reasons = {
        (one["path"], one["change"]): one["reason"]
        for sample in samples.values()
        for one in sample["survivors"]
    }
    commit = ["git", "rev-parse", "--short", "HEAD"]
    place = subprocess.run(commit, cwd=ROOT, check=True, capture_output=True, text=True)
    earlier: dict[Mutant, bool] = {}  # whether the tests killed it before any were added for it
    for result in log():
        earlier.setdefault(result.mutant, result.outcome == "killed")
    for start in PARTS:
        mine = [result for result in results if result.mutant.path.startswith(start)]
        if mine:
            found = {"commit": place.stdout.strip(), "seed": seed}
            found["first"] = sum(earlier[result.mutant] for result in mine)
            samples[start.rstrip("/")] = found | figures(mine, reasons)
    text = json.dumps(samples, indent=2, ensure_ascii=False)
    RECORD.write_text(f"{text}\n", encoding="utf-8")


def figures(results, reasons):
    """Mutants and killed ones by room, and who survived for which reason."""
    rooms: dict[str, list[int]] = {}
    survivors = []
    for result in results:
        path, change = result.mutant.path, result.difference
        counts = rooms.setdefault("/".join(path.split("/")[:3]), [0, 0])
        counts[0] += 1
        counts[1] += result.outcome == "killed"
        if result.outcome == "survived":
            one = {"path": path, "function": result.function, "change": change}
            survivors.append(one | {"reason": reasons.get((path, change), "")})
    survivors.sort(key=lambda one: (one["path"], one["function"]))
    return {"rooms": dict(sorted(rooms.items())), "survivors": survivors}


if __name__ == "__main__":
    sys.exit(main())
