"""Results that kernels are held against, kept in the cache: a CPU takes long for them."""

import contextlib
import hashlib
import io
import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

import numpy as np

from harness.files import bytes_of, cache_folder, modified
from neuron_cpu.files import write_bytes_atomically

MOST_BYTES = 4 << 30
_BODY = "body"


def place(identity: Mapping[str, Any]) -> Path:
    """The file for a result that depends on `identity` alone."""
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / "references" / f"{digest}.npz"


def read(path: Path) -> Optional[tuple[Any, list[np.ndarray]]]:
    """Read body and arrays; None where the file is missing or damaged."""
    try:
        with np.load(path, allow_pickle=False) as kept:
            arrays = [kept[name] for name in sorted(kept.files) if name != _BODY]
            os.utime(path)  # when it was used last
            return json.loads(str(kept[_BODY])), arrays
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def write(path: Path, body: Any, arrays: list[np.ndarray]) -> None:
    """Keep a result; those used longest ago go until all fit MOST_BYTES."""
    content = io.BytesIO()
    named = {f"array{index:02}": array for index, array in enumerate(arrays)}
    np.savez(content, **{_BODY: np.array(json.dumps(body))}, **named)  # type: ignore[arg-type]
    write_bytes_atomically(path, content.getvalue())
    room = bytes_of(path.parent) - MOST_BYTES
    for file in sorted(path.parent.glob("*.npz"), key=modified):
        if room <= 0 or file == path:
            return
        with contextlib.suppress(OSError):
            room -= file.stat().st_size
            file.unlink()
