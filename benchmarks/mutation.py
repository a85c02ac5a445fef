"""Do the tests notice a wrong character? Seeded mutants of the simulator and the submission.

    python benchmarks/mutation.py [--sample N] [--seed S] [--only TEXT] [--results FILE]

Cosmic Ray lists every place of ``neuron_cpu/core`` and ``llama.py`` that one of ``OPERATORS`` can
change; a seeded sample of places gets one change each. Every mutant is written into a copy of the
tree, and the tests of its part run until one fails: those named for its file first. Mutants that no
test kills are printed with their difference. ``--results`` keeps what is done, one JSON line each,
and continues there. Costs about 5 s a killed mutant and 30 s a survivor.

Cosmic Ray instead of mutmut: it changes the source file itself, where mutmut wraps every function;
kernels are read as source (the lint, annotations) and messages name the caller's frame.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import difflib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

# Imported once, by the parent: every mutant runs in a fork that finds them loaded.
import hypothesis  # noqa: F401
import matplotlib.pyplot  # noqa: F401
import pytest
import torch
import transformers  # noqa: F401
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
# Tests to run first, by the beginning of the mutated file's path; the rest of the part follows.
FIRST = {
    f"{CORE}check/lint": ["test_lint"],
    f"{CORE}check": ["test_verify", "test_refusals"],
    f"{CORE}device/dtypes": ["test_dtypes"],
    f"{CORE}instructions": ["test_isa", "test_refusals", "test_cost"],
    f"{CORE}language/allocation": ["test_allocation"],
    f"{CORE}language/runners": ["test_runners"],
    f"{CORE}language": ["test_language", "test_kernel", "test_index", "test_refusals"],
    f"{CORE}program": ["test_index", "test_assignment", "test_verify", "test_refusals"],
    f"{CORE}report": ["test_report"],
    f"{CORE}run/merge": ["test_merge", "test_merge_nests"],
    f"{CORE}run/compare": ["test_compare"],
    f"{CORE}run": ["test_execute", "test_merge", "test_eager"],
    f"{CORE}time": ["test_schedule", "test_cost", "test_report"],
    "llama.py": ["test_kernels", "test_weights", "test_references", "test_shapes"],
}
PARTS = {CORE: "tests/core", "llama.py": "tests/llama"}
SLOW = ("test_text",)  # the embedded model's text says whether all is well, not what is wrong
LIMIT_S = 600  # processor time of one mutant's tests; one that takes longer loops: killed
DEADLOCK_S = 3600.0  # and the same by the clock


@dataclass(frozen=True)
class Mutant:
    """One change: the ``occurrence``-th place in ``path`` where ``operator`` applies."""

    path: str
    operator: str
    occurrence: int
    line: int


@dataclass
class Result:
    """What became of a mutant; ``difference`` is a unified diff without context."""

    mutant: Mutant
    outcome: str  # killed, survived
    seconds: float
    difference: str


# --- mutants --------------------------------------------------------------------------------------
def sources(root: Path) -> list[Path]:
    return [*sorted((root / CORE).rglob("*.py")), root / "llama.py"]


def places(root: Path) -> dict[tuple[str, int, int], list[Mutant]]:
    """All mutants, by the place that they change."""
    found: dict[tuple[str, int, int], list[Mutant]] = {}
    for path in sources(root):
        text = path.read_text(encoding="utf-8")
        name = str(path.relative_to(root))
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


def _annotations(tree: ast.Module) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
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


def sample(root: Path, count: int, seed: int, only: str) -> list[Mutant]:
    """One mutant at each of ``count`` places, chosen by ``seed`` from files that match ``only``."""
    chosen = [mutants for place, mutants in places(root).items() if only in place[0]]
    generator = random.Random(seed)
    generator.shuffle(chosen)
    return [generator.choice(mutants) for mutants in chosen[:count]]


# --- running --------------------------------------------------------------------------------------
def tests_of(path: str) -> tuple[list[str], list[str]]:
    """Test files for a mutated file: those named for it, then the rest of its part."""
    part = next(tests for start, tests in PARTS.items() if path.startswith(start))
    first = next((names for start, names in FIRST.items() if path.startswith(start)), [])
    named = [f"{part}/{name}.py" for name in first]
    rest = sorted(p for p in (ROOT / part).glob("test_*.py") if p.stem not in (*first, *SLOW))
    return named, [str(p.relative_to(ROOT)) for p in rest]


def run(mutant: Mutant, tree: Path) -> Result:
    """Write the mutant into ``tree``, run its tests there in a fork, and restore the file."""
    path = tree / mutant.path
    before = path.read_text(encoding="utf-8")
    after = mutate_code(before, get_operator(mutant.operator)(), mutant.occurrence)
    assert after is not None and after != before, mutant
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0)
    difference = "\n".join(list(lines)[3:])
    started = time.monotonic()
    path.write_text(after, encoding="utf-8")
    try:
        survived = all(tests_pass(tests, tree) for tests in tests_of(mutant.path) if tests)
    finally:
        path.write_text(before, encoding="utf-8")
    outcome = "survived" if survived else "killed"
    return Result(mutant, outcome, time.monotonic() - started, difference)


def tests_pass(tests: list[str], tree: Path) -> bool:
    """True where all tests pass within the limit."""
    child = os.fork()
    if not child:
        os.setsid()
        _child(tests, tree)
    deadline = time.monotonic() + DEADLOCK_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def _child(tests: list[str], tree: Path) -> None:
    """Run pytest in the tree and leave with its status; never returns."""
    status = 1
    try:
        with open(tree / "out.log", "wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))
        os.chdir(tree)
        sys.path[:] = [str(tree), *(p for p in sys.path if not p.startswith(str(ROOT / "bench")))]
        status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests])
    finally:
        os._exit(int(status))


def copy_of_tree(folder: Path) -> Path:
    """Tracked and new files of the repository, without git, so that nothing is written there."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.splitlines()  # fmt: skip
    for name in listed:
        if (ROOT / name).is_file():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
    # Compiled once, tests by pytest. A mutant's file is newer than its compiled form, which nothing
    # writes again.
    compileall.compile_dir(folder, quiet=1)
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-q", *PARTS.values()]
    subprocess.run(collect, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, default=300, help="number of mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="only files whose path contains this")
    parser.add_argument("--results", type=Path, help="JSON lines to continue")
    parser.add_argument("--new", type=int, help="stop after so many that had no result yet")
    args = parser.parse_args()
    torch.set_num_threads(1)
    mutants = sample(ROOT, args.sample, args.seed, args.only)
    results = _kept(args.results, mutants)
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_of_tree(Path(folder))
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        for number, mutant in enumerate(mutants, 1):
            result = results.get(mutant)
            if result is None:
                if args.new is not None and not args.new:
                    return 0
                args.new = args.new and args.new - 1
                result = results[mutant] = run(mutant, tree)
                if args.results:
                    with args.results.open("a", encoding="utf-8") as log:
                        log.write(json.dumps(asdict(result)) + "\n")
            print(
                f"{number}/{len(mutants)} {result.outcome} {mutant.path}:{mutant.line}", flush=True
            )
            if result.outcome == "survived":
                print(f"{mutant.operator} #{mutant.occurrence}\n{result.difference}", flush=True)
    killed = sum(results[m].outcome == "killed" for m in mutants)
    print(f"{killed} of {len(mutants)} mutants killed (seed {args.seed})")
    return 0


def _kept(path: Path | None, mutants: list[Mutant]) -> dict[Mutant, Result]:
    """Results of an earlier run of the same sample."""
    kept: dict[Mutant, Result] = {}
    if path is not None and path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            fields = json.loads(line)
            mutant = Mutant(**fields.pop("mutant"))
            if mutant in mutants:
                kept[mutant] = Result(mutant, **fields)
    return kept


if __name__ == "__main__":
    sys.exit(main())
