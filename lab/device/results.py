"""The report of a device: one file of JSON, whole after every measurement.

Written beside its place and renamed, so that a kill leaves the last state. A run that finds the
file goes on with it, if it comes from the same machine and versions.
"""

import contextlib
import importlib.metadata
import json
import math
import os
import platform
import re
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import neuron_cpu
from harness import sdk
from harness.errors import UserError
from harness.files import check_writable_folder
from harness.inputs.schema import read_json
from lab.device import page, plan
from lab.device.calls import MICROS, SUBMISSIONS
from lab.device.plan import DEVICE, REHEARSAL
from lab.device.timing import TOOLS
from neuron_cpu.files import write_text_atomically

FORMAT = 1
BEGUN = "%Y-%m-%d %H:%M"
TARGETS = ("inf2", "trn2", "trn3", "trn1")
LANGUAGES = "neuronxcc.nki", "nki"
MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
PRODUCT = Path("/sys/devices/virtual/dmi/id/product_name")  # EC2 writes the instance type there
PACKAGES = ("neuron", "torch", "libneuronxla", "nki", "numpy", "transformers")
DRIVERS = "dpkg-query", "-W", "-f", "${Package} ${Version}\n", "aws-neuronx*"
CORES = re.compile(r'"nc_count":\s*(\d+)')  # of each chip


def machine() -> dict[str, Any]:
    """Instance, chips and versions: what times depend on, and what names nobody."""
    instance = "unknown"
    with contextlib.suppress(OSError):
        instance = PRODUCT.read_text(encoding="utf-8").strip()
    named = os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE", instance)
    target = next((t for t in TARGETS if t in named), "trn2" if sdk.today() else "trn1")
    told = _said("neuron-ls", "--json-output") or _said("neuron-ls", "--output-format", "json")
    cores = CORES.findall(told)  # it names processes and the host
    found = {str(one.metadata["Name"]): one.version for one in importlib.metadata.distributions()}
    packages = {name: found[name] for name in sorted(found) if name.lower().startswith(PACKAGES)}
    packages |= dict(map(str.split, _said(*DRIVERS).splitlines()))
    chips = f"{len(cores)} of {', '.join(sorted(set(cores)))} cores" if cores else "unknown"
    system = f"Python {platform.python_version()}, {platform.platform()}"
    names = {"instance": instance, "chips": chips, "target": target, "system": system}
    names |= {"language": LANGUAGES[sdk.today()], "project": neuron_cpu.__version__}
    return names | {"packages": packages}


def _said(*command: str) -> str:
    """What a command of the system or of Neuron's tools writes; nothing where it is missing."""
    path = {"PATH": f"{os.environ.get('PATH', '')}:{TOOLS}"}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        how: Any = {"capture_output": True, "text": True, "timeout": 30, "env": os.environ | path}
        return subprocess.run(command, **how).stdout
    return ""


def begun(path: Path) -> dict[str, Any]:
    """The report to go on with, or a new one.

    Raises:
        UserError: the file is another machine's, or no report, or where its page goes.
    """
    if path == path.with_suffix(".md"):
        raise UserError(f"{path} is where the page goes, expected a name such as report.json.")
    check_writable_folder(path.parent)
    source = REHEARSAL if sdk.platform().simulates else DEVICE
    new = {"format": FORMAT, "source": source, "machine": machine(), "entries": {}}
    new["begun"] = time.strftime(BEGUN)
    if not path.exists():
        return new
    found = read(path)
    if (found["source"], found["machine"]) != (source, new["machine"]):
        raise UserError(
            f"{path} is the report of another machine or of other versions, expected one of this "
            "one; name another file with --report."
        )
    return found


def read(path: Path) -> dict[str, Any]:
    """A report, which may be a stranger's.

    Raises:
        UserError: it is none.
    """
    found = read_json(path)
    try:
        _check(found)
    except MALFORMED as error:
        raise UserError(
            f"{path} is no report of lab.device_report ({type(error).__name__}: {error}), "
            f"expected one of format {FORMAT}; name another file."
        ) from error
    return found


def _check(found: Mapping[str, Any]) -> None:
    """Whether a page can be made of it, and what it names is of this project and no path."""
    if not page.page(found).translate({10: None, 9: None}).isprintable():
        raise ValueError("it has letters that cannot be printed")
    times = measured(found, plan.CONSTANT, plan.LAUNCH, plan.KERNEL)
    if not all(0 < us < math.inf for us in times.values()):
        raise ValueError("it has times that are none")
    time.strptime(found["begun"], BEGUN)
    graphs = found.get("graphs", {}).values()
    modules = {call["module"] for graph in graphs for call in graph["kernels"]}
    if found["format"] != FORMAT or found["source"] not in (DEVICE, REHEARSAL):
        raise ValueError("of another format")
    if found["machine"]["target"] not in TARGETS or not modules <= {*MICROS, *SUBMISSIONS}:
        raise ValueError("of another target, or with kernels of other modules")
    if found["machine"].get("language", LANGUAGES[0]) not in LANGUAGES:
        raise ValueError("of another language")


def write(path: Path, report: dict[str, Any]) -> None:
    """The file, whole."""
    write_text_atomically(path, json.dumps(report, indent=1) + "\n")


def of_today(report: Mapping[str, Any]) -> bool:
    """Whether its kernels are those of `nki`."""
    return report["machine"].get("language") == LANGUAGES[True]


def measured(report: Mapping[str, Any], *kinds: str) -> dict[str, float]:
    """Median microseconds by name, of entries of these kinds."""
    return {
        name: entry["us"]["p50"]
        for name, entry in report["entries"].items()
        if entry["kind"] in kinds and entry.get("us")
    }
