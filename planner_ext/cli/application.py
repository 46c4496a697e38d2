"""The application that ``--app`` names: what drives runs, and who may act on them."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from semantic_kernel import Kernel

from planner_ext import FunctionCallingStepwisePlanner
from planner_ext.approval.decisions import Authorize, hooks_of
from planner_ext.cli.kernels import awaited, start_factory
from planner_ext.durable.options import checked_hook
from planner_ext.errors import PlannerInvalidConfigurationError

_NAMES = ("planner", "kernel", "arguments_for", "authorize")


@dataclass(frozen=True, slots=True, kw_only=True)
class Application:
    """What the factory of ``--app`` gives.

    Attributes:
        planner: Drives runs; None where the factory gives a kernel alone.
        kernel: Its functions may be called.
        arguments_for: Returns the application's arguments for a run, by its name.
        authorize: Says who may act on a run.
    """

    planner: FunctionCallingStepwisePlanner | None
    kernel: Kernel
    arguments_for: Callable[[str], Any] | None = None
    authorize: Authorize | tuple[Authorize, ...] | None = None

    @property
    def hooks(self) -> tuple[Authorize, ...]:
        """The application's hook, and that of its planner."""
        return hooks_of((*hooks_of(self.authorize), *hooks_of(self.planner and self.planner.authorize)))


def started_application(path: str) -> Callable[[], Awaitable[Application]]:
    """Start the factory that ``--app`` names, before an event loop runs; the result awaits and reads what it gives.

    Raises:
        PlannerInvalidConfigurationError: If there is no such factory, it fails, or what it gives is of another shape.
    """
    made = start_factory(path, option="--app")

    async def application() -> Application:
        return _application(await awaited(made, path, option="--app"), path)

    return application


def started_hook(path: str) -> Callable[[], Awaitable[tuple[Authorize, ...]]]:
    """Start the factory as `started_application` does; the result gives its hooks alone."""
    application = started_application(path)

    async def hooks() -> tuple[Authorize, ...]:
        return (await application()).hooks

    return hooks


def _application(made: object, path: str) -> Application:
    """Read a kernel, a tuple, or an object or mapping that names the parts.

    Raises:
        PlannerInvalidConfigurationError: If it is of another shape.
    """
    parts: Mapping[str, Any] = {}
    given: tuple[object, ...] = (made,)
    if isinstance(made, Kernel):
        return Application(planner=None, kernel=made)
    if isinstance(made, tuple):
        given = cast("tuple[object, ...]", made)
        if len(given) in (2, 3):
            parts = dict(zip(_NAMES, given, strict=False))
    elif isinstance(made, Mapping):
        parts = cast("Mapping[str, Any]", made)
    else:
        parts = {name: getattr(made, name, None) for name in _NAMES}
    planner, kernel, arguments_for = (parts.get(name) for name in _NAMES[:3])
    is_planner = isinstance(planner, FunctionCallingStepwisePlanner | None)
    if not isinstance(kernel, Kernel) or not is_planner or not (arguments_for is None or callable(arguments_for)):
        names = ", ".join(type(part).__name__ for part in given) or "an empty tuple"
        raise PlannerInvalidConfigurationError(
            f"--app {path} must give (planner, kernel), (planner, kernel, arguments_for) or a kernel; got {names}. An "
            "object that names planner, kernel, arguments_for and authorize will do, too."
        )
    authorize = checked_hook(parts.get("authorize"))
    return Application(planner=planner, kernel=kernel, arguments_for=arguments_for, authorize=authorize)
