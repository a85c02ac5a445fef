"""The command line's arguments for a kernel in a model of transformers."""

import argparse
from pathlib import Path
from typing import Any, Optional

from harness.errors import UserError, refuse_any
from harness.settings import Settings, Swap

ATTENTION, NORM, MLP = "attention", "rmsnorm", "mlp"
PLACES = {
    ATTENTION: "of every layer, between its projections",
    NORM: "every module whose class ends in RMSNorm",
    MLP: "every module whose class ends in MLP",
}
LONGEST_EAGER = 4096  # tokens whose scores in fp32 PyTorch keeps as a whole
LEAST_COSINE = 0.999  # of the token that is farthest off, in bf16


def asked(args: argparse.Namespace) -> Optional[Swap]:
    """The swap of the arguments; None in other modes."""
    if args.mode != "swap":
        return None
    if args.kernel is None or args.at is None:
        raise UserError(
            "--mode swap needs --kernel FILE:NAME and --at, what it replaces: "
            f"{', '.join(PLACES)}; give both."
        )
    path, colon, name = args.kernel.rpartition(":")
    if not colon or not name.isidentifier():
        raise UserError(f"--kernel must be FILE:NAME, got {args.kernel!r}; add ':' and its name.")
    if not path.endswith(".py") or not Path(path).is_file():
        raise UserError(
            f"The kernel's file {path} does not exist, expected a .py file; correct it."
        )
    return Swap(Path(path).resolve(), name, args.at, args.layers, args.least_cosine)


def check(settings: Settings) -> None:
    """Refuse with a UserError options that the mode would ignore."""
    if settings.swap is None:
        return
    if not -1 <= settings.swap.least_cosine <= 1:
        raise UserError(
            f"--least-cosine must be between -1 and 1, got {settings.swap.least_cosine:g}."
        )
    others: dict[str, Any] = {
        "--enable-nki": settings.enable_nki,
        "--tp-degree": settings.tp_degree not in (None, 1),
        "--padding-side left": settings.padding_side == "left",
        "--compiled-model-path": settings.compiled_model_path is not None,
    }
    refuse_any(
        others,
        "--mode swap runs one module on one core, its rows padded on the right, got {}; leave it "
        "out.",
    )
