"""Reads torchrun's environment variables without PyTorch."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Optional

from ..errors import UsageError

# The default of torch.distributed for gloo.
TIMEOUT_SECONDS = 1800.0


@dataclass(frozen=True)
class Place:
    """One process among the ranks.

    Attributes:
        address, port: of torchrun's store, where ranks find each other.
        group: under which name they meet there; groups of other names are strangers.
        timeout_seconds: how long a rank waits for the others in one collective.
        interface: this machine's address that the others connect to; None: as its name resolves.
    """

    rank: int
    size: int
    address: str
    port: int
    group: str = "ranks"
    timeout_seconds: float = TIMEOUT_SECONDS
    interface: Optional[str] = None


def place(environment: Mapping[str, str] = os.environ) -> Optional[Place]:
    """This process's place; None where torchrun did not start it, or started it alone.

    A UsageError where its variables are there in part, or are no numbers.
    """
    if "TORCHELASTIC_RUN_ID" not in environment or environment.get("WORLD_SIZE") == "1":
        return None
    try:
        rank, size, port = (int(environment[n]) for n in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        return Place(rank, size, environment["MASTER_ADDR"], port)
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"torchrun's variables are not whole ({error}), expected RANK, WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT beside TORCHELASTIC_RUN_ID; start with torchrun, or "
            "unset TORCHELASTIC_RUN_ID."
        ) from error
