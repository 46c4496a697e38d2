"""The error for a name that the root of the package does not have."""

import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path


def missing_name(root: str, name: str, modules: Sequence[str]) -> Exception:
    """Return the error for a name that the root does not have; it says which module has it.

    An ImportError in ``from root import name``, which drops the text of an
    AttributeError.
    """
    problem = f"module {root!r} has no attribute {name!r}"
    module = (
        None
        if name.startswith("_") or name in modules
        else _module_of(root, name, modules)
    )
    if module is None:
        return AttributeError(problem)
    is_import = sys._getframe(2).f_code.co_name == "_handle_fromlist"  # pyright: ignore[reportPrivateUsage]
    return (ImportError if is_import else AttributeError)(
        f"{problem}; import it from its module: from {module} import {name}"
    )


def _module_of(root: str, name: str, modules: Sequence[str]) -> str | None:
    """Find the module by its text: to import it may need an extra that is missing."""
    for module in modules:
        spec = find_spec(f"{root}.{module}")
        code = (
            None
            if spec is None or spec.origin is None
            else Path(spec.origin).read_text("utf-8")
        )
        exported = re.search(r"^__all__ = \[[^]]*\]", code or "", re.MULTILINE)
        if exported is not None and f'"{name}"' in exported.group():
            return f"{root}.{module}"
    return None
