"""Preloaded by the fork server, so that each stranger's process begins with everything imported."""

import warnings

from .. import ensure_sdk, limits
from . import child  # noqa: F401

# Adopted orphans end, too, which the fork server remarks on.
warnings.filterwarnings("ignore", message="forkserver: waitpid returned unexpected pid")
limits.adopt_orphans()  # what a stranger's process leaves behind stays findable when it ends
ensure_sdk()
