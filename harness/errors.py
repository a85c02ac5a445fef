"""The one exception that the harness raises for bad input."""

from __future__ import annotations


class UserError(Exception):
    """Bad input: `str(error)` is one sentence for the user; the driver exits with status 2."""
