"""Fill the generated blocks of the documentation: functions, identifiers, rooms, examples.

    python docs/generate.py [--check]

A block stands between ``<!-- generated: NAME -->`` and ``<!-- end -->``. ``--check`` writes nothing
and exits with 1 where the file is out of date.
"""

import argparse
import inspect
import json
import re
import sys
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import grimp  # noqa: E402 - after the path
import networkx  # noqa: E402
import torch  # noqa: E402

import neuron_cpu  # noqa: E402

neuron_cpu.ensure_sdk()
import nki.collectives  # noqa: E402 - its functions are listed
from examples import EXAMPLES  # noqa: E402
from identifiers import rules  # noqa: E402
from neuronxcc import nki  # noqa: E402
from neuronxcc.nki import isa as nisa  # noqa: E402
from neuronxcc.nki import language as nl  # noqa: E402

from models import kinds  # noqa: E402
from neuron_cpu.core import NkiError, silence  # noqa: E402
from neuron_cpu.core.current import releases  # noqa: E402
from neuron_cpu.core.device import refusals  # noqa: E402
from neuron_cpu.core.instructions.entry import FORMS, TABLE  # noqa: E402

PAGES = [
    *(ROOT / "docs" / f"{name}.md" for name in ("architecture", "functions", "messages")),
    ROOT / "lab" / "docs" / "mutation.md",
]
ROOMS = ("nki.language", "nki.isa", "nki.collectives")
COLUMNS = 120  # of a line of documentation
BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def item(text: str) -> str:
    """An item of a list, on as many lines as it needs."""
    return _filled(text, "- ", "  ")


def _filled(text: str, first: str, others: str) -> str:
    wrap = textwrap.TextWrapper(COLUMNS, initial_indent=first, subsequent_indent=others)
    wrap.break_on_hyphens = wrap.break_long_words = False
    return wrap.fill(text) + "\n"


# --- instructions ---------------------------------------------------------------------------------
def memories(names: tuple[str, ...]) -> str:
    shown = {"sbuf": "SBUF", "psum": "PSUM", "hbm": "HBM", "shared_hbm": "HBM"}
    return ", ".join(dict.fromkeys(shown[n] for n in names)) or "none"


def instruction_list() -> str:
    """Every entry of the instruction table: engine, memories read and written, what it does."""
    parts = []
    for name, entry in sorted(TABLE.items()):
        names = ", ".join(f"`{n}`" for n in {name: 0} | {one.name: 0 for one in entry.forms})
        moves = f"{memories(entry.reads)} → {memories(entry.writes)}"
        parts.append(item(f"{names} ({entry.engine.value}; {moves}): {entry.note}"))
    return "".join(parts)


# --- functions ------------------------------------------------------------------------------------
def summary(function: Callable) -> str:
    """The first sentence of a docstring, on one line."""
    text = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())
    return text.replace("``", "`")


CALLS: dict[str, Callable] = {
    "broadcast_to": lambda x: nl.broadcast_to(x, shape=(8, 8)),
    "copy": nl.copy,
    "dropout": lambda x: nl.dropout(x, 0.5),
    "expand_dims": lambda x: nl.expand_dims(x, 2),
    "gather_flattened": lambda x: nl.gather_flattened(x, x),
    "matmul": lambda x: nl.matmul(x, x),
    "rand": lambda x: nl.rand((8, 8)),
    "rms_norm": lambda x: nl.rms_norm(x, x, 1, 8),
    "softmax": lambda x: nl.softmax(x, axis=1),
    "where": lambda x: nl.where(x, x, 0.0),
    "zeros_like": nl.zeros_like,
    "empty_like": nl.empty_like,
    "ndarray": lambda x: nl.ndarray((8, 8), nl.float32),
    "zeros": lambda x: nl.zeros((8, 8), nl.float32),
    "ones": lambda x: nl.ones((8, 8), nl.float32),
    "full": lambda x: nl.full((8, 8), 2, nl.float32),
    **{name: (lambda x, name=name: getattr(nl, name)(x, 1)) for name in (
        "sum", "max", "min", "prod", "mean", "var", "all")},
}  # fmt: skip
TYPES = dict.fromkeys(
    ("bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift", "invert"), torch.int32
) | {"gather_flattened": torch.uint32}


# functions whose operands are no tiles, or whose instruction depends on an assignment
DIRECT = {
    "load": "dma_copy", "store": "dma_copy", "atomic_rmw": "dma_copy",
    "load_transpose2d": "dma_transpose", "loop_reduce": "tensor_tensor",
}  # fmt: skip


def lowering(name: str) -> str:
    """Instructions that ``nl.<name>`` becomes for one 8 x 8 tile, or '' for none."""
    if name in DIRECT:
        return f"`{DIRECT[name]}` ({TABLE[DIRECT[name]].engine.value})"
    call = CALLS.get(name)
    function = getattr(nl, name)
    if call is None:
        wanted = [
            p
            for p in inspect.signature(function).parameters.values()
            if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
        ]
        if [p.name for p in wanted] not in (["x"], ["x", "y"]):
            return ""
        call = function if len(wanted) == 1 else lambda x: function(x, x)
    dtype = TYPES.get(name, torch.float32)

    @nki.jit
    def kernel(x):
        out = nl.ndarray((8, 8), x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.load(x))
        call(nl.load(x))
        return out

    with silence("sim_newer_api"):
        program = kernel.trace(torch.empty(8, 8, device="meta", dtype=dtype))
    own = [i.op for i in program.instructions[3:]]
    return ", ".join(dict.fromkeys(f"`{op.name}` ({op.engine.value})" for op in own))


def language_list() -> str:
    """Every function of nki.language that records instructions, and what it records."""
    parts = []
    for name in sorted(nl.__all__):
        if inspect.isfunction(function := getattr(nl, name)):
            recorded = lowering(name)
            parts.append(
                item(f"`nl.{name}`: {summary(function)}" + f" → {recorded}" * bool(recorded))
            )
    return "".join(parts)


def isa_list() -> str:
    """Every function of nki.isa."""
    parts = []
    for name, form in sorted(FORMS[nisa.__name__].items()):
        engine = f" ({form.entry.engine.value})" if form.entry is not None else ""
        parts.append(item(f"`nisa.{name}`{engine}: {summary(form.function)}"))
    return "".join(parts)


# --- examples -------------------------------------------------------------------------------------
def message_of(kernel: Any, shapes: list[tuple[int, ...]]) -> str:
    """What the kernel is told: the refusal, or its first warning."""
    inputs = [torch.empty(s, device="meta") for s in shapes]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            kernel.trace(*inputs)
        except NkiError as error:
            return str(error)
    if not caught:
        raise AssertionError(f"example {kernel.__name__} is told nothing")
    return str(caught[0].message)


def examples() -> str:
    """Source and message of every example."""
    parts = []
    for kernel, shapes in EXAMPLES:
        title = inspect.getdoc(kernel.function)
        source = inspect.getsource(kernel.function)
        source = re.sub(r'    """.*?"""\n', "", source, count=1, flags=re.DOTALL)
        told = _filled(message_of(kernel, shapes).replace(f"{ROOT}/", ""), "> ", "> ")
        parts.append(f"### {title}\n\n```python\n{source.rstrip()}\n```\n\n{told}")
    return "\n".join(parts)


# --- identifiers ----------------------------------------------------------------------------------
def identifier_list() -> str:
    """The SDK's identifiers by name; every other one with its first message, warnings marked."""
    found = rules(ROOT / "neuron_cpu")
    documented = ", ".join(f"`{r.identifier}`" for r in found if r.identifier.startswith("err_"))
    own = [rule for rule in found if not rule.identifier.startswith("err_")]
    return item(documented) + "".join(
        item(
            f"`{rule.identifier}`{' (warning)' * (rule.kinds == {'warning'})}: "
            f"{_fault(rule.message)}"
        )
        for rule in own
    )


def _fault(message: str) -> str:
    """A message without its last part, which says how to mend a kernel; what is long, briefly."""
    fault = message.rpartition("; ")[0] or message
    return fault if len(fault.split()) < 19 else fault.partition(", expected")[0]


# --- refusals -------------------------------------------------------------------------------------
def refusal_list() -> str:
    """What public compilers and devices refuse, kernels first, and where it is recognised.

    Rules of one code that one check knows stand together, and all that graphs are refused for.
    """
    joined: dict[tuple[bool, str, str], list[str]] = {}
    for one in sorted(refusals.refusals(), key=lambda one: (one.language == "graph", one.code)):
        graph, told = one.language == "graph", _told(one)
        key = graph, "" if graph and one.by else f"{one.code}: ", told
        joined.setdefault(key, []).append(one.rule if key[1] else f"{one.code} {one.rule}")
    return "".join(
        item(f"{code}{'; '.join(rules)}{told}") for (_, code, told), rules in joined.items()
    )


def defect_list() -> str:
    """Known defects of compilers and devices, with their workarounds."""
    return "".join(
        item(f"{one.issue}, SDK {one.releases}: {one.what}{_told(one)}; {one.workaround}")
        for one in refusals.defects()
    )


def _told(one: refusals.Refusal | refusals.Defect) -> str:
    """The chips, unless it is all of them, and the check or why there is none."""
    chips = "" if len(one.chips.split()) > 2 else f" ({one.chips.replace(' ', ', ')})"
    return f"{chips}: `{one.by}`" if one.by else f"{chips}: *{one.why}*"


# --- releases -------------------------------------------------------------------------------------
def family_table() -> str:
    """What families of models do otherwise than Llama, and which."""
    some, norms = kinds.FAMILIES, "norms over {} of queries and keys"
    every = {
        "biases of queries, keys and values": lambda family: family.qkv_bias,
        norms.format("each head"): lambda family: family.head_norms == "each",
        norms.format("all heads"): lambda family: family.head_norms == "all",
        "norms behind attention and MLP, too": lambda family: family.norms[0] and family.norms[1],
        "norms behind attention and MLP alone": lambda family: family.norms[0] is None,
        "gains less one": lambda family: family.less_one,
        "factors of embeddings, scores, residual or logits": lambda family: (
            family.scales is not kinds.no_scales
        ),
        "fused weights": lambda family: family.fused,
        "a window, in some layers or all": lambda family: (family.windows is not kinds.no_windows),
    }
    found = {word: [kind for kind in some if holds(some[kind])] for word, holds in every.items()}
    for kind, family in some.items():
        for name in family.reads:
            found.setdefault(f"`{name}`", []).append(kind)
    rows = ["| otherwise than `llama` | `model_type` |", "|---|---|"]
    rows += [f"| {word} | {', '.join(f'`{k}`' for k in own)} |" for word, own in found.items()]
    return "\n".join(rows) + "\n"


def release_table() -> str:
    """What each release of `nki` changed."""
    changed: dict[str, list[str]] = {}
    forms = [form for module in ROOMS for form in FORMS[module].values()]
    for form in forms:
        if form.came:
            changed.setdefault(form.came, []).append(f"`{form.name}`")
    for form in forms:
        for word, came in form.keywords.items():
            changed.setdefault(came, []).append(f"`{form.name}({word}=)`")
    gone = [f"`{form.name}({word}=)`" for form in forms for word in form.former]
    orders = [f"`{form.name}`" for form in forms if form.order]
    told = f"spellings that go: {', '.join(gone)}; another order of arguments: {', '.join(orders)}"
    changed["2.29"].append(told)
    for came, what in releases.OTHERS:
        changed.setdefault(came, []).append(what)
    return "".join(
        item(f"{came}: {', '.join(dict.fromkeys(changed[came]))}") for came in sorted(changed)
    )


# --- mutants --------------------------------------------------------------------------------------
def samples() -> dict[str, dict]:
    """The recorded samples of mutants, by part of the project."""
    return json.loads((ROOT / "lab" / "data" / "mutation.json").read_text(encoding="utf-8"))


def mutant_table() -> str:
    """Mutants of the recorded samples and how many were killed, by room."""
    lines = ["| Part | Mutants | Killed | |", "|---|--:|--:|--:|"]
    rooms = {name: n for sample in samples().values() for name, n in sample["rooms"].items()}
    rooms["all"] = [sum(counts[k] for counts in rooms.values()) for k in (0, 1)]
    for name, (count, killed) in rooms.items():
        lines.append(f"| {name} | {count} | {killed} | {killed / count:.0%} |")
    lines.append("")
    for part, sample in samples().items():
        count, killed = (sum(counts[k] for counts in sample["rooms"].values()) for k in (0, 1))
        later = killed - sample["first"]
        told = (
            f"`{part}` at commit {sample['commit']}, seed {sample['seed']}: {killed} of {count} "
            f"killed, {later} of them by tests that were added when they had survived."
        )
        lines.append(item(told).rstrip())
    return "\n".join(lines) + "\n"


def survivor_list() -> str:
    """Mutants that no test killed, file by file, and why that is."""
    parts: dict[str, str] = {}
    for one in [survivor for sample in samples().values() for survivor in sample["survivors"]]:
        before, after = (line[1:].partition("  #")[0].strip() for line in one["change"].split("\n"))
        told = f"`{one['function'] or 'module'}`: {one['reason']} `{before}` → `{after}`"
        file = item(f"`{one['path']}`")
        parts[file] = parts.get(file, file) + _filled(told, "  - ", "    ")
    return "".join(parts.values())


# --- architecture ---------------------------------------------------------------------------------
def room_of(module: str) -> str:
    """The package that is one box of the picture: one of core's, one beside core, the driver."""
    names = module.split(".")
    if names[0] != "neuron_cpu" or len(names) == 1:
        return names[0]
    return ".".join(names[1 : 3 if names[1] == "core" else 2])


def room_picture() -> str:
    """Rooms and who imports whom, as Mermaid; an arrow that others imply is left out."""
    graph = grimp.build_graph(
        "neuron_cpu", "harness", "lab", cache_dir=None, exclude_type_checking_imports=True
    )
    files = Counter(room_of(module) for module in graph.modules)
    several = {room for room in files if files[room] > 1} - {"neuron_cpu", "core"}
    arrows = {
        (room_of(module), room_of(other))
        for module in graph.modules
        for other in graph.find_modules_directly_imported_by(module)
    }
    rooms = networkx.DiGraph((a, b) for a, b in arrows if {a, b} <= several and a != b)
    found = networkx.transitive_reduction(rooms).adjacency()
    lines = [f"    {room} --> {' & '.join(sorted(to))}" for room, to in sorted(found) if to]
    return "\n".join(["```mermaid", "flowchart TD", *lines, "```", ""])


BLOCKS: dict[str, Callable[[], str]] = {
    "instructions": instruction_list, "language": language_list, "isa": isa_list,
    "examples": examples, "identifiers": identifier_list,
    "refusals": refusal_list, "defects": defect_list, "releases": release_table,
    "families": family_table,
    "mutants": mutant_table, "survivors": survivor_list, "rooms": room_picture,
}  # fmt: skip


def filled(text: str) -> str:
    """The page with all its blocks generated anew."""
    return BLOCK.sub(lambda m: f"{m[1]}{BLOCKS[m[2]]()}{m[3]}", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    args = parser.parse_args()
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        after = filled(before)
        if args.check and before != after:
            print(f"{page} is out of date; run python docs/generate.py")
            return 1
        if before != after:
            page.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
