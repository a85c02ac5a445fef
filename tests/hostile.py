"""Hostile submissions and answers of the grammar where a stranger may meet them.

    python tests/hostile.py [HOW] PYTEST'S ARGUMENTS...

HOW, by commas: `nobody` (an ordinary user), `landlock` (without it), `namespaces` (without those of
users, as in many containers), or `here`. Then pytest runs; without arguments all seeds.
"""

import os
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY)]

from tests.harness.processes import acts  # noqa: E402

FILES = "tests/judge/test_hostile.py", "tests/harness/processes/test_hostile_submissions.py"


def main(how="here", *arguments):
    os.chdir(REPOSITORY)
    place = tempfile.mkdtemp()
    os.chmod(place, 0o777)
    os.environ |= {"XDG_CACHE_HOME": f"{place}/cache", "TMPDIR": place, "HOME": place}
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    acts.elsewhere(how)
    chosen = list(arguments or ("-m", "full or not full"))
    pytest = ["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *chosen, *FILES]
    os.execv(sys.executable, [sys.executable, *pytest])


if __name__ == "__main__":
    main(*sys.argv[1:])
