"""Preloaded by the fork server, so that each worker of a search begins with everything imported."""

from .. import ensure_sdk
from ..judge import verdict  # noqa: F401
from . import search  # noqa: F401

ensure_sdk()
