"""Whether a private member of a library is what it was when this package was written: its source is compared."""

import hashlib
import inspect
import logging
from collections.abc import Callable
from functools import lru_cache
from types import FunctionType
from typing import Any

logger = logging.getLogger(__name__)


@lru_cache(maxsize=128)
def is_own(method: Any, digest: str, library: str = "semantic_kernel") -> bool:
    """Whether a method is the library's, unwrapped, and its source has this digest."""
    own = isinstance(method, FunctionType) and method.__globals__[
        "__name__"
    ].startswith(f"{library}.")
    if own and source_digest(method) == digest:
        return True
    logger.info(
        "Requests go a slower way: %r is not what it was when this package was written.",
        method,
    )
    return False


def source_digest(method: Callable[..., Any]) -> str:
    """Digest a function's source: 16 hexadecimal digits, "" if it cannot be read."""
    try:
        source = inspect.getsource(method)
    except (OSError, TypeError):
        return ""
    return hashlib.sha256(source.encode()).hexdigest()[:16]
