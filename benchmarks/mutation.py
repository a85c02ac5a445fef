"""Do the tests notice a wrong character? Seeded mutants of the simulator and the submission.

    python benchmarks/mutation.py [--sample N] [--seed S] [--only TEXT] [--write]

Cosmic Ray lists every place of ``neuron_cpu/core`` and ``llama.py`` that one of ``OPERATORS`` can
change; a seeded sample of places gets one change each. Every mutant is written into a copy of the
tree or into a running process, and tests run until one fails. Mutants that no test kills are
printed with their difference. What is done is kept in mutation.jsonl, one line each, and a further
run continues there; ``--again`` runs survivors anew, after tests were added. ``--write`` records
the sample in benchmarks/mutation.json, for docs/mutation.md; survivors keep their reasons there.

Cosmic Ray instead of mutmut: it changes the source file itself, where mutmut wraps every function;
kernels are read as source (the lint, annotations) and messages name the caller's frame.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import difflib
import gc
import inspect
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
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

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
SLOW = ("test_text", "test_shapes")  # whole models: they say whether all is well, not what is not
KEPT = ROOT / "mutation.jsonl"
RECORD = ROOT / "benchmarks" / "mutation.json"
LIMIT_S = 600  # processor time of one mutant's tests; one that takes longer loops: killed
DEADLOCK_S = 3600.0  # and the same by the clock


@dataclass(frozen=True)
class Mutant:
    """One change: the ``occurrence``-th place in ``path`` where ``operator`` applies."""

    path: str
    operator: str
    occurrence: int
    line: int


Changes = list[tuple[CodeType, CodeType]]


@dataclass
class Result:
    """What became of a mutant: the function it stands in, and a unified diff without context."""

    mutant: Mutant
    outcome: str  # killed, survived
    function: str
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
class Mutants:
    """A pytest plugin: instead of the tests, it runs mutants, each in a fork of this process.

    The fork finds everything imported and collected. A change inside a function takes the place of
    that function's code there, and only tests that execute it run, the shortest first. A change at
    the top of a module, or in a function that importing executes, is written to the file, and a
    fresh pytest runs: the tests named for the file, then the rest of its part.
    """

    def __init__(self, mutants: list[Mutant], results: dict[Mutant, Result], tree: Path) -> None:
        self.mutants, self.results, self.tree = mutants, results, tree
        self.early: set[str] = set()
        self.tests: dict[str, list[int]] = {}
        sys.setprofile(self._note_import)

    def _note_import(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self.early.add(key_of(frame.f_code))

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Take the place of pytest's own loop."""
        sys.setprofile(None)
        chosen = self.tree / "tests.json"
        in_fork(self.tree, lambda: write_tests(session, chosen))
        self.tests = json.loads(chosen.read_text(encoding="utf-8"))
        for number, mutant in enumerate(self.mutants, 1):
            if mutant not in self.results:
                self.results[mutant] = self._run(mutant, session)
                with KEPT.open("a", encoding="utf-8") as log:
                    log.write(json.dumps(asdict(self.results[mutant])) + "\n")
            show(self.results[mutant], f"{number}/{len(self.mutants)}")
        return True

    def _run(self, mutant: Mutant, session: pytest.Session) -> Result:
        path = self.tree / mutant.path
        before = path.read_text(encoding="utf-8")
        after = mutate_code(before, get_operator(mutant.operator)(), mutant.occurrence)
        assert after is not None and after != before, mutant
        lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0)
        changed = changes(compiled(before, path), compiled(after, path))
        if changed is None or self.early & {key_of(old) for old, _ in changed}:
            survived = self._in_file(mutant.path, before, after)
        else:
            survived = self._in_memory(changed, session)
        outcome = "survived" if survived else "killed"
        return Result(mutant, outcome, function_at(before, mutant.line), "\n".join(list(lines)[3:]))

    def _in_memory(self, changed: Changes, session: pytest.Session) -> bool:
        """Replace the code of the live functions; run the tests that execute the innermost one."""
        numbers = self.tests.get(key_of(changed[-1][0]), ())
        items = [session.items[number] for number in numbers]

        def work() -> bool:
            functions = [f for f in gc.get_objects() if isinstance(f, FunctionType)]
            for old, new in changed:
                for function in functions:
                    code = function.__code__
                    if code.co_filename == old.co_filename and code == old:
                        function.__code__ = new
            return run_items(items, session)

        return in_fork(self.tree, work)

    def _in_file(self, name: str, before: str, after: str) -> bool:
        """Write the mutant to its file, run a fresh pytest, and restore the file."""
        path = self.tree / name
        path.write_text(after, encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        try:
            return all(
                in_fork(self.tree, lambda tests=tests: os.execv(sys.executable, [*command, *tests]))
                for tests in tests_of(name)
                if tests
            )
        finally:
            path.write_text(before, encoding="utf-8")


def tests_of(path: str) -> tuple[list[str], list[str]]:
    """Test files for a mutated file: those named for it, then the rest of its part."""
    part = next(tests for start, tests in PARTS.items() if path.startswith(start))
    first = next((names for start, names in FIRST.items() if path.startswith(start)), [])
    named = [f"{part}/{name}.py" for name in first]
    rest = sorted(p for p in (ROOT / part).glob("test_*.py") if p.stem not in (*first, *SLOW))
    return named, [str(p.relative_to(ROOT)) for p in rest]


def in_fork(tree: Path, work: Callable[[], bool]) -> bool:
    """Whether ``work`` is true in a fork, within the limits; what it prints goes to a file."""
    child = os.fork()
    if not child:
        passed = False
        try:
            os.setsid()
            with open(tree / "out.log", "wb") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))
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


def run_items(items: list[pytest.Item], session: pytest.Session) -> bool:
    """Run tests until one fails."""
    for item, following in zip(items, [*items[1:], None]):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.testsfailed:
            return False
    return True


def write_tests(session: pytest.Session, path: Path) -> bool:
    """Run all tests, and write which of them call each function, by number, fast ones first.

    Traces of kernels are dropped before each test: whoever uses a kernel traces it.
    """
    from neuron_cpu.core.language.kernel import Kernel  # of the tree, imported by the tests

    kernels = [o for o in gc.get_objects() if isinstance(o, Kernel)]
    called: dict[str, list[tuple[float, int]]] = {}
    codes: set[CodeType] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            codes.add(frame.f_code)

    for number, item in enumerate(session.items):
        if item.path.stem in SLOW:
            continue
        for kernel in kernels:
            kernel.programs.clear()
        codes.clear()
        started = time.process_time()
        sys.setprofile(note)
        run_items([item], session)
        sys.setprofile(None)
        for code in codes:
            called.setdefault(key_of(code), []).append((time.process_time() - started, number))
    chosen = {key: [number for _, number in sorted(found)] for key, found in called.items()}
    path.write_text(json.dumps(chosen), encoding="utf-8")
    return True


# --- code -----------------------------------------------------------------------------------------
def key_of(code: CodeType) -> str:
    return f"{code.co_filename}:{code.co_firstlineno}:{code.co_name}"


def compiled(text: str, path: Path) -> CodeType:
    return compile(text, str(path), "exec", dont_inherit=True)


def changes(old: CodeType, new: CodeType) -> Changes | None:
    """Functions that differ, inner ones last; None where a module's or class's own code does."""
    if not old.co_flags & inspect.CO_OPTIMIZED:
        if (old.co_code, own_constants(old)) != (new.co_code, own_constants(new)):
            return None
        found: Changes = []
    elif old == new:
        return []
    else:
        found = [(old, new)]
    inner = [[c for c in code.co_consts if isinstance(c, CodeType)] for code in (old, new)]
    for one, other in zip(*inner):
        below = changes(one, other)
        if below is None:
            return None
        found += below
    return found


def own_constants(code: CodeType) -> list[str]:
    return [repr(c) for c in code.co_consts if not isinstance(c, CodeType)]


def function_at(text: str, line: int) -> str:
    """Name of the innermost function or class around a line, with those around it."""
    names = []
    for node in ast.walk(ast.parse(text)):  # outer definitions come before inner ones
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            continue
        if node.lineno <= line <= (node.end_lineno or 0):
            names.append(node.name)
    return ".".join(names)


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
    parser.add_argument("--again", action="store_true", help="run survivors of an earlier run anew")
    parser.add_argument("--write", action="store_true", help="record the sample")
    args = parser.parse_args()
    torch.set_num_threads(1)
    mutants = sample(ROOT, args.sample, args.seed, args.only)
    results = kept(mutants, args.again)
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_of_tree(Path(folder))
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        os.chdir(tree)
        sys.path[0] = str(tree)
        options = ["-x", "-q", "-s", "-p", "no:cacheprovider", f"--basetemp={tree}/temporary"]
        parts = [p for start, p in PARTS.items() if any(m.path.startswith(start) for m in mutants)]
        pytest.main([*options, *parts], plugins=[Mutants(mutants, results, tree)])
    found = [results[mutant] for mutant in mutants]
    print(f"{sum(r.outcome == 'killed' for r in found)} of {len(found)} mutants killed")
    if args.write:
        record(found, args.seed)
    return 0


def show(result: Result, number: str) -> None:
    mutant = result.mutant
    print(f"{number} {result.outcome} {mutant.path}:{mutant.line} {result.function}", flush=True)
    if result.outcome == "survived":
        print(result.difference, flush=True)


def kept(mutants: list[Mutant], again: bool) -> dict[Mutant, Result]:
    """Results of earlier runs, the last of each mutant; without survivors if they run ``again``."""
    found: dict[Mutant, Result] = {}
    for line in KEPT.read_text(encoding="utf-8").splitlines() if KEPT.exists() else ():
        fields = json.loads(line)
        mutant = Mutant(**fields.pop("mutant"))
        if mutant in mutants:
            found[mutant] = Result(mutant, **fields)
    return {m: r for m, r in found.items() if r.outcome == "killed" or not again}


def record(results: list[Result], seed: int) -> None:
    """Write the sample's figures by part, and its survivors with the reasons known before.

    ``first`` stays what it was: mutants killed before tests were added for the others.
    """
    before = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    reasons = {(s["path"], s["change"]): s["reason"] for s in before.get("survivors", ())}
    parts: dict[str, list[int]] = {}
    survivors = []
    for result in results:
        path = result.mutant.path
        counts = parts.setdefault("/".join(path.split("/")[:3]), [0, 0])
        counts[0] += 1
        counts[1] += result.outcome == "killed"
        if result.outcome == "survived":
            reason = reasons.get((path, result.difference), "")
            survivors.append(
                {"path": path, "function": result.function, "change": result.difference,
                 "reason": reason}
            )  # fmt: skip
    survivors.sort(key=lambda s: (s["path"], s["function"]))
    first = sum(killed for _, killed in parts.values())
    if before.get("seed") == seed:
        first = before["first"]
    found = {
        "seed": seed, "first": first, "parts": dict(sorted(parts.items())), "survivors": survivors,
    }  # fmt: skip
    RECORD.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
