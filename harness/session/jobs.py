"""The processes that a session asks for, where they may write, and within which limits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Optional

from harness import sdk
from harness.errors import UserError
from harness.files import cache_folder
from harness.processes.roles import BASELINES, Role
from harness.processes.workers import Job
from harness.settings import Settings
from neuron_cpu.sandbox.limits import Limits

if TYPE_CHECKING:
    from harness.session.opening import Session


def job_of(session: Session, role: Role, source: Optional[Path] = None) -> Job:
    """The process of one of the session's models; ``source`` runs in it, else the session's.

    The baseline gets a process of its own where the platform allows two.
    """
    settings, platform_here = session.settings, sdk.platform()
    own = role in BASELINES and platform_here.simulates
    return Job(
        settings=settings,
        model_path=session.model.path,
        model_type=session.model.config["model_type"],
        pad_token_id=session.pad_token_id,
        eos_token_id=getattr(session.tokenizer, "eos_token_id", None),
        source=None if own else source or session.source,
        scratch=Path(),
        limits=limits_of(settings) if settings.isolate else None,
        confined=platform_here.confines,
    )


def work_folder(settings: Settings) -> Path:
    """Where processes get folders of their own: on the disk where compiled folders go.

    A UserError where there is no cache, as in a home that may not be written.
    """
    cache = cache_folder()
    if settings.compiled_model_path is None:
        existing = next(path for path in (cache, *cache.parents) if path.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            raise UserError(
                f"Cannot write {cache}; set XDG_CACHE_HOME to a folder that may be written, or "
                "name one with --compiled-model-path."
            )
    return (settings.compiled_model_path or cache) / "work"


def limits_of(settings: Settings) -> Limits:
    """The limits of a submission's or a kernel's process."""
    return Limits(
        memory_bytes=int(settings.memory_limit * 2**30),
        cpu_seconds=settings.cpu_limit,
        wall_seconds=settings.time_limit,
    )
