"""A stand-in for the AWS Neuron SDK and for a NeuronCore-v2, for machines that have neither.

`ensure_sdk()` makes the SDK's import names (`neuronxcc`, `torch_neuronx`, `neuronx_distributed`,
`neuronx_distributed_inference`, `torch_xla`) importable: from the real SDK where it is installed,
from `neuron_cpu/sdk` elsewhere, and from `neuron_cpu/imitation` where the two public libraries are
not there (`libraries`). `install()` asks for the stand-in in any case, for a notebook or a script
that is written for it, and gives PyTorch its device `neuron` (`announce`, `torch_device`).
Everything else of the project imports those names only.
"""

import os
import sys

if (
    sys.argv[:1] == ["-m"]
    and sys.argv[1:2] != ["run"]  # whose script may have modules there
    and sys.orig_argv[-len(sys.argv)].endswith("neuron_cpu")
):
    # `python -m` looks in the working folder first. Before anything is imported that might be a
    # stranger's module there, the path does without; where this package stands there, it is last.
    _here, _root = os.getcwd(), os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    sys.path[:] = [place for place in sys.path if place not in ("", _here)]
    sys.path += [_root] if os.path.realpath(_here) == _root else []

import importlib.util
import re
from glob import glob
from pathlib import Path
from types import TracebackType
from typing import Any

from . import libraries
from .errors import UsageError, nearest

__version__ = "0.2.0"

# Two tiers: names of what is closed (neuronxcc, nki, torch_neuronx, torch_xla), and an imitation of
# what is public (NxD and NxD Inference).
SDK_ROOT = Path(__file__).resolve().parent / "sdk"
IMITATION_ROOT = SDK_ROOT.parent / "imitation"
ROOTS = (str(SDK_ROOT), str(IMITATION_ROOT))
# What PyTorch reads of installed packages when it is imported: the entry point of its device.
ANNOUNCED = str(SDK_ROOT.parent / "announced")


SWITCHES = "NKI_CPU_STRICT", "NKI_CPU_EAGER", "NKI_CPU_MERGE", "NKI_CPU_RANGES", "NEURON_CPU"
VARIABLES = (
    *SWITCHES,
    *("NKI_CPU_SILENCE", "NKI_CPU_PACKED_MIB", "NEURON_CPU_DEBUG", "NEURON_CPU_SDK"),
    *("NEURON_CPU_NXDI", "NEURON_CPU_NKI", "NEURON_PLATFORM_TARGET_OVERRIDE", libraries.VARIABLE),
)


PREFIXES = "NKI_CPU_", "NEURON_CPU", "NEURON_PLATFORM_TARGET"


def _check_variables() -> None:
    """Refuse a variable of these names that nothing reads, and a switch that is neither 0 nor 1."""
    for name, value in os.environ.items():
        if name.startswith(PREFIXES) and name not in VARIABLES:
            mend = nearest(name, VARIABLES, "unset it")
            raise UsageError(
                f"nothing reads {name}, expected one of {', '.join(VARIABLES)}; {mend}."
            )
        if name in SWITCHES and value not in ("", "0", "1"):
            meant = int(value.lower() not in ("off", "no", "false", "none"))
            raise UsageError(f"{name} is {value!r}, expected 0 or 1; write {name}={meant}.")
        if name == "NKI_CPU_PACKED_MIB" and not value.isdecimal():
            raise UsageError(f"{name} is {value!r}, expected a whole number; write {name}=4096.")
        if name == "NKI_CPU_SILENCE":
            lessons = (SDK_ROOT.parent / "lessons" / "lessons.json").read_text("utf-8")
            known = re.findall(r'"((?:err|sim)_\w+)"', lessons)  # of all messages
            for one in value.split(","):
                if one not in ("", *known):
                    raise UsageError(
                        f"{name} names {one!r}, expected identifiers of warnings, with commas "
                        f"between them; {nearest(one, known, 'take it out')}."
                    )


class _NotInstalled:
    """The last to be asked for a module: says what puts the SDK's names in place."""

    @staticmethod
    def find_spec(name: str, *_: Any) -> None:
        imports = sys._getframe(2).f_code.co_name == "_find_and_load_unlocked"  # else it is a probe
        if imports and any(Path(root, name).is_dir() for root in ROOTS):
            raise ModuleNotFoundError(
                f"No module named {name!r}, which neuron_cpu puts in place when it is asked; write "
                "neuron_cpu.install() below import neuron_cpu, before this import.",
                name=name,
            )


sys.meta_path.append(_NotInstalled)  # type: ignore[arg-type]


def __getattr__(name: str) -> Any:
    if name == "assert_kernel":
        return importlib.import_module("neuron_cpu.judge").assert_kernel
    if (SDK_ROOT / name).is_dir():
        raise ImportError(
            f"{name} is no part of neuron_cpu, expected its own name; write neuron_cpu.install(), "
            f"and then import {name}."
        )
    raise AttributeError(f"module 'neuron_cpu' has no attribute {name!r}")


def _hinted(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Python's traceback, and a line on what ends a script for want of the device."""
    sys.__excepthook__(kind, error, trace)
    for line in importlib.import_module("neuron_cpu.sandbox.run_script").missing(error):
        print(line, file=sys.stderr)


def _real_sdk_present() -> bool:
    """Whether a Neuron compiler with a kernel language stands on `sys.path`.

    A placeholder distribution of the same name has no `nki` below it, hence the deeper look; it
    imports the package itself, which is forgotten again where it is not the real one.
    """
    try:
        spec = importlib.util.find_spec("neuronxcc.nki")
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        sys.modules.pop("neuronxcc", None)
    # later SDKs have `nki` alone, whose wheel is found on machines without a device, too
    return spec is not None or bool(glob("/dev/neuron*") and importlib.util.find_spec("nki"))


def install() -> str:
    """Make the stand-in's SDK names importable here and in Python processes started from here.

    The first statement of a notebook or script, before any import of an SDK name; calling it again
    changes nothing. Returns the line that says which SDK is in use.

    Raises:
        ImportError: the installed SDK has been imported already.
    """
    place = getattr(sys.modules.get("neuronxcc"), "__file__", None)
    if place is not None and SDK_ROOT not in Path(place).resolve().parents:
        raise ImportError(
            f"neuron_cpu.install() came after neuronxcc was imported from {place}, expected before "
            "the first import of an SDK name; call it at the top."
        )
    os.environ["NEURON_CPU"] = "1"
    line = ensure_sdk()
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _hinted
    # The SDK's names first, this package last: what a process finds itself goes before it.
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [*_folders(libraries.find(ROOTS)), *filter(None, inherited)]
    paths += [str(SDK_ROOT.parent.parent), ANNOUNCED]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    if ANNOUNCED not in sys.path:
        sys.path.append(ANNOUNCED)
        if "torch" in sys.modules:  # it has looked for devices already
            from . import announce

            announce.neuron()
    return line


def _folders(found: libraries.Libraries | None) -> list[str]:
    """The folders that go in front of `sys.path`."""
    return list(ROOTS) if found is None else [*found.places, str(SDK_ROOT)]


def ensure_sdk() -> str:
    """Make the SDK importable and say in one line which one is in use.

    The stand-in is put in front of `sys.path` where `neuronxcc.nki` cannot be imported, or where
    the environment variable `NEURON_CPU=1` asks for it. Call it before the first import of an SDK
    name; calling it again changes nothing.

    Raises:
        UsageError: a variable of the environment is misspelt, or a switch is neither 0 nor 1.
    """
    _check_variables()
    forced = os.environ.get("NEURON_CPU", "") not in ("", "0")
    if str(SDK_ROOT) not in sys.path and not forced and _real_sdk_present():
        return "Neuron SDK: the installed one (neuronxcc); times are measured on the device."
    found = libraries.find(ROOTS)
    wanted = _folders(found)
    if not {*wanted} <= {*sys.path} or ({*ROOTS} - {*wanted}) & {*sys.path}:
        sys.path[:] = [*wanted, *(place for place in sys.path if place not in {*ROOTS, *wanted})]
    # Spinning OpenMP threads and rank threads take the cores from each other: on a busy 2-core
    # machine a decode step took up to 2.8 s spinning, 0.07 s sleeping. To wake one takes 40 us, so
    # GNU's spin for 0.16 ms, where a core has no more than one. Read when torch is loaded.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    # accelerate takes whoever has the names of torch_xla for a device.
    os.environ.setdefault("USE_TORCH_XLA", "0")
    if found is not None:
        # On trn1 NxD asks torchrun's variable for groups of four ranks, which one process has here.
        os.environ.setdefault("LOCAL_WORLD_SIZE", "4")
    reason = "NEURON_CPU asks for it" if forced else "no neuronxcc is installed"
    libraries_used = "" if found is None else f"; libraries: {found.words}"
    return (
        f"Neuron SDK: the CPU stand-in neuron_cpu ({reason}); "
        f"results are computed on the CPU and device times are estimates{libraries_used}."
    )
