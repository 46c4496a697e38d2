"""What drives the runs of a worker: a planner, a kernel, and the arguments that no store keeps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from semantic_kernel import Kernel

from planner_ext import FunctionCallingStepwisePlanner
from planner_ext.cli.kernels import awaited
from planner_ext.errors import PlannerInvalidConfigurationError

__all__ = ["Application", "application_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Application:
    """What ``--app`` made.

    Attributes:
        arguments_for: Gives a run's arguments by its name; None: runs have none.
    """

    planner: FunctionCallingStepwisePlanner
    kernel: Kernel
    arguments_for: Callable[[str], Any] | None = None


async def application_of(made: object, path: str) -> Application:
    """Read what a factory returned, awaiting it where it is to be awaited.

    Raises:
        PlannerInvalidConfigurationError: If the factory fails, or gives something else.
    """
    made = await awaited(made, path, option="--app")
    parts = cast("tuple[object, ...]", made) if isinstance(made, tuple) else (made,)
    match parts:
        case (Kernel() as kernel,):
            return Application(planner=FunctionCallingStepwisePlanner(), kernel=kernel)
        case (FunctionCallingStepwisePlanner() as planner, Kernel() as kernel):
            return Application(planner=planner, kernel=kernel)
        case (FunctionCallingStepwisePlanner() as planner, Kernel() as kernel, arguments_for) if callable(
            arguments_for
        ):
            return Application(planner=planner, kernel=kernel, arguments_for=arguments_for)
        case _:
            names = ", ".join(type(part).__name__ for part in parts) or "an empty tuple"
            raise PlannerInvalidConfigurationError(
                f"--app {path} must give (planner, kernel), (planner, kernel, arguments_for) or a kernel; got {names}."
            )
