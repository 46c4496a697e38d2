"""Copies of a kernel: the caller's own is never changed."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, cast

from semantic_kernel import Kernel
from semantic_kernel.functions import KernelPlugin
from semantic_kernel.services.ai_service_client_base import AIServiceClientBase

__all__ = ["copy_of"]

_FILTERS = ("function_invocation_filters", "prompt_rendering_filters", "auto_function_invocation_filters")


def copy_of(
    kernel: Kernel,
    *,
    plugins: Mapping[str, KernelPlugin] | None = None,
    services: Mapping[str, AIServiceClientBase] | None = None,
    function_filters: Sequence[Callable[..., Awaitable[None]]] = (),
) -> Kernel:
    """Copy a kernel, with more plugins, services and, inside its own, function invocation filters.

    ``Kernel.clone`` would copy filters deeply, ``copy`` would share the dictionaries: neither leaves the caller's.
    """
    given = cast("Mapping[str, AIServiceClientBase]", kernel.services)
    parts: dict[str, Any] = {
        "plugins": {**kernel.plugins, **(plugins or {})},
        "services": {**given, **(services or {})},
        "ai_service_selector": kernel.ai_service_selector,
        **{name: list(getattr(kernel, name)) for name in _FILTERS},
    }
    # Semantic Kernel keeps the innermost filter first.
    parts["function_invocation_filters"][:0] = [(id(one), one) for one in function_filters]
    return Kernel(**parts)
