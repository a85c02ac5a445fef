"""nki-library's own tests on the simulator: its cases, its references, its tolerances.

    python tests/library.py DIR [--target trn2] [-k WORDS] [--sample N] [--large N] [--jobs N]

DIR holds a checkout of aws-neuron/nki-library, at any depth. Every case runs in a process of its
own. The library's harness sends kernels to hosts with accelerators. Here `Orchestrator.execute`
calls the kernel on the simulator instead, and compares with the library's own validator. What the
harness imports to reach those hosts, and the closed package neuron_dtypes, stand in below.
"""

from __future__ import annotations

import argparse
import builtins
import collections
import contextlib
import importlib.abc
import importlib.machinery
import itertools
import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import textwrap
import time
import types
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # not this folder, which has a package of the name nki

import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

import neuron_cpu  # noqa: E402
from neuron_cpu import cluster  # noqa: E402
from neuron_cpu.core.device import dtypes  # noqa: E402
from neuron_cpu.core.run import execute as plans  # noqa: E402
from neuron_cpu.errors import UsageError  # noqa: E402
from tests import repeated  # noqa: E402

LARGE = re.compile("4096|5120|8192|16384|32768|36864")  # what its simulation mode calls large
HOSTS = (
    "aws_embedded_metrics", "boto3", "botocore", "fabric2", "paramiko", "plotext", "pytest_html",
    "perf_analysis_private", "scripts",
)  # fmt: skip
PAGE = ROOT / "lab" / "docs" / "library_results.md"
RELEASE = "2.29"  # the one that its newest commit is written for
GIGABYTES = 10  # of one case
SHIPPED = ("neuron_cpu", "tests/__init__.py", "tests/library.py", "tests/repeated.py")
PIECE = 8  # cases of a file that a worker of a cluster does at once, as it collects them first


# --- what stands in for closed packages and for the way to hosts ----------------------------------
class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules that only the way to hosts needs: every name in them is an empty class."""

    def find_spec(self, name, path=None, target=None):
        wanted = any(part in HOSTS for part in name.split("."))
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if wanted else None

    def create_module(self, spec):
        made = types.ModuleType(spec.name)
        made.__path__ = []  # type: ignore[attr-defined]

        def missing(name):
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (Exception,), {})

        made.__getattr__ = missing  # type: ignore[attr-defined]
        return made

    def exec_module(self, module): ...


def neuron_dtypes():
    """numpy types of the compiler's package of that name, and its casts."""
    from neuron_cpu.core.instructions import tensor_engine

    made: Any = types.ModuleType("neuron_dtypes")
    for one in (*dtypes.ALL, *dtypes.LATER):
        setattr(made, one.name, one.numpy)

    def static_cast(values, dtype):
        to, of = np.dtype(dtype), np.asarray(values)
        packed = {one.numpy: one for one in dtypes.PACKED}
        if of.dtype == to:
            return of
        if of.dtype in packed:
            raw = torch.from_numpy(of.view(np.dtype(f"i{of.itemsize}")))
            wide = tensor_engine.unpacked(raw, packed[of.dtype])
            return wide.reshape(*of.shape[:-1], -1).numpy().astype(to)
        if to in packed:
            wide = torch.from_numpy(of.astype(np.float32)).reshape(*of.shape[:-1], -1, 4)
            return tensor_engine.packed(wide, packed[to]).numpy().view(to)
        return of.astype(to)

    def is_float_type(dtype):
        return dtypes.to_dtype(dtype).is_float if np.dtype(dtype).itemsize < 8 else True

    made.static_cast, made.is_float_type = static_cast, is_float_type
    made.finfo = lambda dtype: ml_dtypes.finfo(np.dtype(dtype))
    made.sizeinbytes = lambda dtype: np.dtype(dtype).itemsize
    return made


class Mended(importlib.machinery.SourceFileLoader):
    """Source files; of one that does not parse, the repeated end of a docstring is left out.

    mlp.py of d2ad3a5 has the last lines of its docstring twice.
    """

    def source_to_code(self, data, path, **options):  # type: ignore[override]
        try:
            return super().source_to_code(data, path, **options)
        except IndentationError as error:
            lines = bytes(data).decode().splitlines(keepends=True)
            first = (error.lineno or 1) - 1
            last = next(k for k in range(first, len(lines)) if lines[k].strip() == '"""')
            text = "".join(lines[:first] + lines[last + 1 :])
            return super().source_to_code(text.encode(), path, **options)


# --- the library's harness ------------------------------------------------------------------------
class Aliased(dict):
    """Inputs by name; test_gen_mask_tkg.py names an updated one without its suffix."""

    def __missing__(self, name):
        return self[f"{name}.must_alias_input"] if "." not in name else dict.__getitem__(self, name)


class Unreferenced(Exception):
    """A kernel ran, and its test compares nothing."""


compared: list[str] = []  # kernels of this process that were held against a reference


def execute(harness, args):
    """What ``Orchestrator.execute`` does, on the simulator."""
    import nki
    from test.utils.common_dataclasses import PerRankLazyInputGenerator, normalize_golden_output
    from test.utils.output_validator import OutputValidator

    target = args.compiler_input.platform_target.get_compile_target()
    os.environ["NEURON_PLATFORM_TARGET_OVERRIDE"] = target
    cores = args.compiler_input.logical_nc_config
    given, checked = args.kernel_input or {}, args.validation_args
    ranks = args.inference_args.collective_ranks

    def call(rank):
        values = given.for_rank(rank) if isinstance(given, PerRankLazyInputGenerator) else given
        values = {k.removesuffix(".must_alias_input"): v for k, v in values.items()}
        result = nki.simulate(args.kernel_func)[cores](**values)
        return list(result) if isinstance(result, (list, tuple)) else [result]

    if ranks > 1:
        results = neuron_cpu.core.on_ranks(call, [(rank,) for rank in range(ranks)])
    else:
        results = [call(0)]
    args.emitter = harness.emitter
    if checked is None:
        raise Unreferenced
    validator = OutputValidator(args, [])
    collector = harness.emitter.get_collector()
    lazy = hasattr(checked.golden_output, "lazy_golden_generator")
    if lazy and checked.golden_output.golden is None:
        raise Unreferenced
    for rank, outputs in enumerate(results):
        if rank and not hasattr(checked.golden_output, "for_rank"):
            break
        named = normalize_golden_output(checked.golden_output, rank)
        golden, _ = validator._get_golden_for_rank_and_dtype_source(checked, rank, collector)
        if len(named) != len(outputs):
            raise RuntimeError(f"{len(outputs)} results, expected {', '.join(named)}")
        found = {
            n: as_golden(o, golden[n], named[n]) for n, o in zip(named, outputs) if n in golden
        }
        wrong = validator._compare_outputs(found, golden, checked, collector, None, False)
        assert not wrong, f"Validation failed for {', '.join(wrong)}"
    compared.append(args.kernel_func.__name__)


def unpacked(values):
    """Packed microscaled elements as numbers; anything else as it is."""
    if "x4" not in str(getattr(values, "dtype", "")):
        return values
    return sys.modules["neuron_dtypes"].static_cast(values, np.float32)


def zeros(size, dtype, whole=False):
    """Memory of an output before a kernel, in the place of `execute.allocate`."""
    return torch.zeros(size * dtype.itemsize, dtype=torch.uint8).view(dtype.torch)


def as_golden(found, want, like):
    """A result in the form that the validator reads: flat bytes, or the type of the reference."""
    host = np.ascontiguousarray(found)
    if not isinstance(want, np.ndarray):
        return host.reshape(-1).view(np.uint8)
    if host.dtype.itemsize == like.dtype.itemsize and "x4" in str(host.dtype) + str(like.dtype):
        host = host.view(like.dtype)
    return host.astype(like.dtype).reshape(want.shape)


# --- cases ----------------------------------------------------------------------------------------
class Cases:
    """A plugin of pytest: which cases run, each in a process, and what became of them."""

    def __init__(self, chosen, folder, workers):
        self.chosen, self.folder, self.began = chosen, folder, time.time()
        self.workers = workers
        self.known: tuple[set[str], set[str]] = (set(), set())  # small and large cases
        kept = chosen.json
        self.outcomes: dict[str, dict] = (
            json.loads(kept.read_text()) if kept and kept.exists() else {}
        )

    @pytest.hookimpl(tryfirst=True)
    def pytest_generate_tests(self, metafunc):
        """Sweeps without the mark are not drawn: that alone takes a minute of processor time."""
        test = metafunc.definition
        if self.chosen.marks == "fast" and not test.get_closest_marker("fast"):
            test.own_markers[:] = [m for m in test.own_markers if m.name != "coverage_parametrize"]

    @pytest.hookimpl(trylast=True)  # behind the marks
    def pytest_collection_modifyitems(self, items):
        words, chosen = self.chosen.k, random.Random(0)
        kept = [i for i in items if not words or any(w in i.nodeid for w in words)]
        small = sorted((i for i in kept if not large(i)), key=lambda i: i.nodeid)
        big = sorted((i for i in kept if large(i)), key=lambda i: i.nodeid)
        self.known = {i.nodeid for i in small}, {i.nodeid for i in big}
        if self.chosen.cases:
            items[:] = [item for item in items if item.nodeid in self.chosen.cases]
            return
        picked = chosen.sample(big, min(self.chosen.large, len(big)))
        by_test = collections.defaultdict(list)
        for item in chosen.sample(small, len(small)) + picked:
            by_test[item.nodeid.partition("[")[0], item in picked].append(item)
        rounds = [(k, i) for v in by_test.values() for k, i in enumerate(v)]
        each = self.chosen.each or len(rounds)
        found, again = self.outcomes, self.chosen.again
        items[:] = [  # one of every test, then another of each
            item
            for turn, item in sorted(rounds, key=lambda one: one[0])
            if turn < each or item in picked
            if item.nodeid not in found or found[item.nodeid]["kind"] in again
        ]
        print(f"{len(items)} cases of {len(small)} and {len(big)} large ones", flush=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        if session.config.option.collectonly:
            return False
        if self.workers is not None:
            self.run_elsewhere(self.workers, [item.nodeid for item in session.items])
            return True
        running: dict[int, Any] = {}
        for item in session.items:
            if time.time() - self.began > 60 * self.chosen.minutes:
                break
            if len(running) >= self.chosen.jobs:
                self.await_one(running)
            file = tempfile.TemporaryFile("w+")  # noqa: SIM115 - of a child
            child = os.fork()
            if not child:
                try:
                    found = run_case(item, self.folder, self.chosen.seconds)
                except BaseException as error:  # of this file: the case says what
                    found = {
                        "kind": "runner",
                        "what": f"{type(error).__name__}: {error}",
                        "rule": "",
                    }
                file.write(json.dumps(found))
                file.flush()
                os._exit(0)
            running[child] = (item, file)
        while running:
            self.await_one(running)
        return True

    def run_elsewhere(self, workers, cases):
        """Some cases of a file are a piece: this script as a command of a worker."""
        pieces = [
            found[first : first + PIECE]
            for _, group in itertools.groupby(sorted(cases), file_of)
            for found in [list(group)]
            for first in range(0, len(found), PIECE)
        ]

        def piece(names):
            chosen = self.chosen
            words = [f"{cluster.PROJECT}/tests/library.py", str(chosen.folder.resolve())]
            words += ["--files", file_of(names[0]).rpartition("/")[2], "--cases", *names]
            words += ["--target", chosen.target, "--marks", chosen.marks, "--jobs", "1"]
            words += ["--seconds", str(chosen.seconds), "--commit", chosen.commit]
            words += ["--json", f"{cluster.RESULTS}/outcomes.json", *["--forms"] * chosen.forms]
            try:
                told = workers.call(cluster.command, words=words, cwd=os.getcwd())
            except cluster.WorkersLostError as error:
                told = {"said": str(error), "results": {}}
            lost = {"kind": "runner", "what": told["said"], "rule": "", "seconds": 0.0}
            found = told["results"].get("outcomes.json", {})
            return {name: found.get(name, lost) for name in names}

        with ThreadPoolExecutor(cluster.jobs(None, workers)) as pool, contextlib.closing(workers):
            for found in pool.map(piece, pieces):
                for name, one in found.items():
                    self.keep(name, one)

    def await_one(self, running):
        child, status, used = os.wait4(-1, 0)
        item, file = running.pop(child)
        file.seek(0)
        said = file.read()
        seconds = round(used.ru_utime + used.ru_stime, 1)
        found = json.loads(said) if said else {"kind": "limit", "what": f"status {status}"}
        self.keep(item.nodeid, {**found, "seconds": seconds})

    def keep(self, case, found):
        self.outcomes[case] = found
        if self.chosen.json:
            self.chosen.json.write_text(json.dumps(self.outcomes, indent=1))
        name, place = case.rsplit("/", 1)[-1], f"{len(self.outcomes)}"
        print(
            f"{place:4} {found['kind']:12} {found['seconds']:6} {name[:150]}  "
            f"{found['what'][:200]}",
            flush=True,
        )


def file_of(case):
    return case.partition("::")[0]


def large(item):
    return bool(item.get_closest_marker("slow_simulation") or LARGE.search(item.name))


class Watcher:
    """A plugin of pytest that keeps the exceptions of a case."""

    def __init__(self):
        self.caught: list[Any] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item, call):
        self.caught.append(call.excinfo)


def run_case(item, folder, seconds):
    """What becomes of the case in this process, which ends with it."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    resource.setrlimit(resource.RLIMIT_DATA, (GIGABYTES << 30, GIGABYTES << 30))
    quiet = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(quiet, 1), os.dup2(quiet, 2)
    watcher = Watcher()
    from _pytest.runner import runtestprotocol

    item.config.pluginmanager.register(watcher)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        runtestprotocol(item, log=False, nextitem=None)
    caught = watcher.caught
    error = next((one.value for one in caught if one is not None), None)
    trace = next((one for one in caught if one is not None), None)
    warned: dict[str, str] = {}  # of each rule the first one
    for one in told:
        if one.category.__name__ == "NkiWarning":
            text = " ".join(str(one.message).split())
            place = f"{Path(one.filename).name}:{one.lineno}: {text[:400]}"
            warned.setdefault(text.rpartition("[")[2].rstrip("]"), place)
    return {**outcome(item, error, trace), "warned": warned, "compared": repeated.compared}


def outcome(item, error, trace):
    what = "" if error is None else " ".join(str(error).split())
    rule = getattr(error, "identifier", None)
    if isinstance(error, Unreferenced):
        kind = "unreferenced"
    elif error is None:
        kind = "right" if compared else "negative"  # the test expects an exception, and had one
    elif isinstance(error, pytest.skip.Exception):
        kind = "skipped"
    elif what.startswith("Validation failed"):
        kind = "wrong"
    elif isinstance(error, AssertionError) and "nkilib" in str(trace.traceback[-1].path):
        kind = "assertion"
    elif rule:
        kind = "refused"
    elif isinstance(error, MemoryError):
        kind = "limit"
    else:
        kind, what = "exception", f"{type(error).__name__}: {what}"
        what += f" ({Path(str(trace.traceback[-1].path)).name}:{trace.traceback[-1].lineno + 1})"
    return {"kind": kind, "what": what[:600], "rule": rule or ""}


def unknown(path):
    raise ImportError(path)


# --- the table ------------------------------------------------------------------------------------
KINDS = (
    "right", "negative", "unreferenced", "skipped", "assertion", "refused", "wrong", "exception",
    "limit",
)  # fmt: skip


def table(outcomes, commit, target, known):
    """What became of the cases of each test, why those that are not right are not, and warnings."""
    by_test: dict[str, collections.Counter] = {}
    others: collections.Counter = collections.Counter()
    for name, one in sorted(outcomes.items()):  # processes end in any order
        path = name.partition("::")[0].removesuffix(".py").rpartition("/")[2]
        kind = one["kind"]
        by_test.setdefault(path.removeprefix("test_"), collections.Counter())[kind] += 1
        if kind in ("refused", "wrong", "exception", "limit"):
            what = re.sub(r"/\S*/(\w+\.py)", r"\1", one["what"])
            others[f"{path}: {kind} {one.get('rule', '')}: {what[:160]}".replace("|", "/")] += 1
    total = sum(by_test.values(), collections.Counter())
    apart = ("assertion", "skipped", "unreferenced", "limit")
    allowed = sum(count for kind, count in total.items() if kind not in apart)
    good = total["right"] + total["negative"]
    told = (
        f"Commit {commit}, {target}, release {os.environ['NEURON_CPU_NKI']}: "
        f"{len(outcomes.keys() & known[0])} of {len(known[0])} small cases and "
        f"{len(outcomes.keys() & known[1])} of {len(known[1])} large ones were run. "
        f"{good} of {allowed} cases that have a reference, pass the library's own assertions and "
        f"stay inside of the limits are right ({good / max(1, allowed):.1%}). {total['limit']} end "
        f"at a limit of processor time or memory, {total['unreferenced']} run without a reference."
    )
    lines = textwrap.wrap(told, 118)
    lines += ["", f"| Test | {' | '.join(KINDS)} |", "|---|" + "--:|" * len(KINDS)]
    for name, counts in [*sorted(by_test.items()), ("all", total)]:
        lines.append(f"| {name} | {' | '.join(str(counts[k] or '') for k in KINDS)} |")
    lines.append("")
    for what, count in others.most_common():
        lines += textwrap.wrap(f"- {count} x {what}", 118, subsequent_indent="  ")
    rules = [rule for one in outcomes.values() for rule in one.get("warned", {})]
    if rules:
        lines += ["", "Cases with a warning of the simulator, by its rule:", ""]
    lines += [f"- {count} x `{rule}`" for rule, count in collections.Counter(rules).most_common()]
    return "\n".join(lines) + "\n"


def commit_of(library):
    """The commit of a checkout; of a plain folder its name."""
    said = subprocess.run(
        ["git", "-C", str(library), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    inside = (library / ".git").exists()
    return said.stdout.strip() if inside and not said.returncode else library.name


# --- all of it ------------------------------------------------------------------------------------
def checkout(folder):
    """The checkout below a folder."""
    found = sorted(folder.glob("**/src/nkilib_src/nkilib/__init__.py"), key=lambda p: len(p.parts))
    if not found:
        raise SystemExit(f"no checkout of aws-neuron/nki-library below {folder}, expected one")
    return found[0].parents[3]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", default="trn2")
    parser.add_argument("--files", nargs="*", default=[], help="only tests in these files")
    parser.add_argument("-k", nargs="*", default=[], help="only cases with one of these words")
    parser.add_argument("--marks", default="fast")
    parser.add_argument("--each", type=int, default=8, help="of a test, drawn; 0 for all")
    parser.add_argument("--large", type=int, default=0, help="of all larger shapes, drawn")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=int, default=240, help="of processor time for a case")
    parser.add_argument("--minutes", type=float, default=1e6, help="after them no case begins")
    parser.add_argument("--json", type=Path, help="keeps the outcomes; cases in it do not run")
    parser.add_argument("--again", nargs="*", default=[], help="but those of these kinds")
    parser.add_argument("--write", action="store_true", help=f"the table into {PAGE.name}")
    parser.add_argument("--forms", action="store_true", help="each kernel merged and one by one")
    parser.add_argument("--scheduler", metavar="ADDRESS", help=cluster.HELP)
    parser.add_argument("--cases", nargs="*", default=[], help="these alone, by their whole names")
    parser.add_argument("--commit", default="", help="that the checkout has to have")
    chosen = parser.parse_args()
    try:
        with cluster.joined(chosen.scheduler, SHIPPED) as workers:
            return run(chosen, workers)
    except UsageError as error:
        print(f"library.py: {error}", file=sys.stderr)
        return 2


def run(chosen, workers):
    """The cases that are chosen, here or on the workers."""
    library = checkout(chosen.folder.resolve())
    if chosen.commit not in ("", commit_of(library)):
        raise UsageError(
            f"{library} is at {commit_of(library)}, expected {chosen.commit}; check that out."
        )
    chosen.commit = commit_of(library)
    torch.set_num_threads(1)
    os.environ.setdefault("NEURON_CPU_NKI", RELEASE)
    os.environ.setdefault("NEURON_PYTHONHASHSEED", "0")  # the cases that its harness draws
    neuron_cpu.ensure_sdk()
    sys.meta_path.append(Absent())
    finder = importlib.machinery.FileFinder.path_hook((Mended, [".py"]))
    sys.path_hooks.insert(0, lambda path: finder(path) if str(library) in path else unknown(path))
    sys.path_importer_cache.clear()
    sys.modules["neuron_dtypes"] = neuron_dtypes()
    sys.path[:0] = [str(library), str(library / "src")]
    from test.utils.common_dataclasses import Platforms
    from test.utils.test_orchestrator import Orchestrator
    from test.utils.unit_test_framework import UnitTestFramework

    Orchestrator.execute = execute
    plans.allocate = zeros  # on its hosts what a kernel leaves of an output is zero
    if chosen.forms:
        repeated.run_all_forms(pytest.MonkeyPatch(), repeated.LARGE)
    made = UnitTestFramework.__init__

    def framed(self, *args, **named):
        made(self, *args, **named)
        inputs = self.kernel_input_generator
        self.kernel_input_generator = lambda config: Aliased(inputs(config))

    UnitTestFramework.__init__ = framed
    # test_qkv_tkg.py does not import it
    builtins.Platforms = Platforms  # type: ignore[attr-defined]
    from nkilib_src.nkilib.core.utils import mx_torch_common

    quantize, names = mx_torch_common.quantize_to_mx, {d.numpy: d.name for d in dtypes.PACKED}
    mx_torch_common.quantize_to_mx = lambda data, to: quantize(data, names.get(to, to))
    for name in ("", ".topk_reduce", ".topk_reduce_torch"):  # its test names their former place
        place = f"nkilib_src.nkilib.experimental.{{}}{name}"
        sys.modules[place.format("subkernels")] = importlib.import_module(
            place.format("collectives")
        )
    began = time.time()
    with tempfile.TemporaryDirectory() as scratch:
        cases = Cases(chosen, Path(scratch), workers)
        tests = library / "test/integration"
        paths = [str(p) for n in chosen.files for p in tests.glob(f"**/{n}")] or [str(tests)]
        options = [*paths, "-p", "no:cacheprovider", "-q", "-s"]
        options += ["-m", chosen.marks, f"--platform-target={chosen.target}"]
        options += [f"--output-directory={scratch}", "-o", f"artifacts_dir={scratch}"]
        options += ["-c", str(library / "test/pytest.ini"), f"--rootdir={library}"]
        pytest.main(options, plugins=[cases])
    told = table(cases.outcomes, chosen.commit, chosen.target, cases.known)
    calls = [name for one in cases.outcomes.values() for name in one.get("compared", ())]
    print(told, f"{time.time() - began:.0f} s")
    if chosen.forms:
        print(f"{len(calls)} calls of {len(set(calls))} kernels were compared in all forms.")
    if chosen.write:
        before, mark, _ = PAGE.read_text(encoding="utf-8").partition(f"<!-- {chosen.target} -->\n")
        rest = _.partition("<!-- end -->")[2]
        PAGE.write_text(f"{before}{mark}{told}<!-- end -->{rest}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
