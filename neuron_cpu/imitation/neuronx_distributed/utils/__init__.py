"""Environment queries of NxD."""

import os


def cpu_mode() -> bool:
    """Whether NxD's own CPU mode is asked for (environment variable NXD_CPU_MODE above 0).

    False by default although this is a CPU: the mode makes NxDI-style code leave its device path,
    and the stand-in exists to run exactly that path.
    """
    return int(os.environ.get("NXD_CPU_MODE", "0")) > 0
