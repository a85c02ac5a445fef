"""The one private name that NxDI 0.1 model files import."""


def vnc(cores: int) -> int:
    """Cores per logical core, as a kernel grid dimension; here simply their number."""
    return int(cores)
