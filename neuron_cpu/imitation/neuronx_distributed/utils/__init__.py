"""Environment queries of NxD."""

import os


def cpu_mode() -> bool:
    """Whether the environment asks for NxD's own CPU mode (NXD_CPU_MODE above 0).

    The default is False: in that mode code like NxDI's leaves its device path, which is the path
    that the stand-in runs.
    """
    return int(os.environ.get("NXD_CPU_MODE", "0")) > 0
