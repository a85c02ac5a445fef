"""What tests run in a submission's process."""

import os


def children(host):
    """The process itself and its children."""
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [os.getpid(), *map(int, file.read().split())]
