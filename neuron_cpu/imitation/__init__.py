"""The imitation of the public libraries. It is on `sys.path` where these are absent."""

import importlib
import importlib.machinery
import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Dict, Mapping, Optional

# Module -> where its names come from: "module:name", or "module" for one of the same name.
Names = Mapping[str, Mapping[str, str]]


NAMED: Dict[str, Mapping[str, str]] = {}


class _Named(MetaPathFinder, Loader):
    """Finds modules of the libraries that only hand out names which stand elsewhere here."""

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> Optional[importlib.machinery.ModuleSpec]:
        """The module, or a package above one; None for a name outside of the table."""
        above = any(other.startswith(f"{name}.") for other in NAMED)
        if name not in NAMED and not above:
            return None
        return importlib.util.spec_from_loader(name, self, is_package=above)

    def exec_module(self, module: ModuleType) -> None:
        for name, place in NAMED.get(module.__name__, {}).items():
            source, _, other = place.partition(":")
            setattr(module, name, getattr(importlib.import_module(source), other or name))


_FINDER = _Named()


def name_modules(package: str, modules: Names) -> None:
    """Make modules below `package` importable that have no file of their own."""
    NAMED.update({f"{package}.{module}": names for module, names in modules.items()})
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)
