"""What a stranger's code reaches from inside of the sandbox: each act by name, as root and not."""

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from neuron_cpu.sandbox import limits
from tests.harness.processes import acts

ROOT = Path(__file__).resolve().parents[3]
DENIED = ("EPERM", "EACCES", "EXDEV", "ENOSYS", "ENOENT")
pytestmark = pytest.mark.skipif(
    bool(limits.missing()), reason="this system confines nothing, or not all of it"
)
WHO = [["root"], ["nobody"], ["without capabilities"]] if os.getuid() == 0 else [["this user"]]
WHO += [["without user namespaces", *WHO[-1]]]


@pytest.fixture
def place():
    """A folder that every user reaches."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    for made in (folder, folder / "scratch", folder / "precious"):
        made.mkdir(exist_ok=True)
        made.chmod(0o777)
    (folder / "precious" / "file").write_text("precious")
    (folder / "precious" / "file").chmod(0o666)
    yield folder
    shutil.rmtree(folder)


def tried(place, *how):
    """How every act ended, and nothing of others was hurt."""
    as_nobody = "import os; os.setgroups([]); os.setgid(65534); os.setuid(65534); "
    sleep = "import time; time.sleep(300)"
    source = (as_nobody if "nobody" in how else "") + sleep
    victim = subprocess.Popen([sys.executable, "-c", source], start_new_session=True)
    command = [sys.executable, "-m", "tests.harness.processes.acts"]
    if "without capabilities" in how:
        command = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs", *command]
    places = [str(place / "scratch"), str(place / "precious"), str(victim.pid)]
    before = os.stat(place / "precious" / "file")
    try:
        done = subprocess.run(
            [*command, *places, *how], cwd=ROOT, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()
    after = os.stat(place / "precious" / "file")
    if "without Landlock" not in how:
        assert (place / "precious" / "file").read_text() == "precious"
        assert os.listdir(place / "precious") == ["file"]
        assert (before.st_mode, before.st_mtime) == (after.st_mode, after.st_mtime)
    return json.loads(done.stdout)


@pytest.mark.parametrize("who", WHO, ids=lambda who: who[0])
def test_nothing_but_files_of_its_own_memory_and_time(who, place):
    found = tried(place, *who)
    assert {name: found[name] for name in acts.ALLOWED if found[name] != "done"} == {}
    closed = {**acts.CALLS, **acts.FILES}
    assert {name: found[name] for name in closed if found[name] not in DENIED} == {}
    assert found["too much memory"] == "MemoryError"


def test_without_landlock_files_are_open_and_nothing_else(place):
    found = tried(place, *WHO[-2], "without Landlock")
    assert {name: found[name] for name in acts.CALLS if found[name] not in DENIED} == {}
    assert found["append"] == "done"


def test_without_the_filter_files_are_closed(place):
    found = tried(place, *WHO[0], "without the filter")
    closed = set(acts.FILES) - {"shared memory"}
    assert {name: found[name] for name in closed if found[name] not in DENIED} == {}
    assert found["UDP"] == "done"


FOREIGN = """
import ctypes, mmap, sys
from neuron_cpu.sandbox import limits
limits.apply(limits.Limits(1 << 30, 60, 60))
limits.confine([limits.Path(sys.argv[1])])
code = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=7)
code.write(bytes.fromhex(sys.argv[2]))
print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))())
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="its machine code")
@pytest.mark.parametrize("code", ["b814000000cd80c3", "b8270000400f05c3"], ids=["i386", "x32"])
def test_a_call_by_numbers_of_another_processor_ends_it(code, place):
    """getpid() there is writev() or setpgid() here, so the filter lets no such number in."""
    command = [sys.executable, "-c", FOREIGN, str(place / "scratch"), code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGSYS, (done.stdout, done.stderr)
