"""What every door lets its caller set, checked and with its defaults filled in."""

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior

from planner_ext.approval.decisions import Interceptor
from planner_ext.core.errors import shown
from planner_ext.core.limits import Limits
from planner_ext.engine.concurrency import SystemClock
from planner_ext.engine.gate import CheckForIntervention, PreInvoke
from planner_ext.engine.ports import Clock, Observer
from planner_ext.sk.approval import ApprovalSettings, DecisionsTaken
from planner_ext.sk.behavior import BoundedFunctionChoiceBehavior
from planner_ext.sk.budget import Budget, Price, tightest
from planner_ext.sk.checkpoint import SigningKey
from planner_ext.sk.errors import PlannerInvalidConfigurationError
from planner_ext.sk.execution import ToolExecution
from planner_ext.sk.iteration import IterationCallback
from planner_ext.sk.questions import Clarifier

__all__ = ["CheckedClock", "LoopOptions", "callable_with", "checked_goal", "instance_of", "non_negative"]

# An application's clock, held to what a run needs of one.


class CheckedClock:
    """Passes on an application's clock, and names what is not a time. Implements `planner_ext.engine.ports.Clock`.

    A ``monotonic`` that goes back stands still instead, so that no run gets back time that it has spent.
    """

    def __init__(self, clock: Any) -> None:
        """Wrap a clock."""
        self._clock = clock
        self._latest = -math.inf

    def now(self) -> float:
        """Seconds since the epoch.

        Raises:
            PlannerInvalidConfigurationError: If the clock gives something else than a finite number.
        """
        return _seconds("now", self._clock.now())

    def monotonic(self) -> float:
        """Seconds that never go back.

        Raises:
            PlannerInvalidConfigurationError: If the clock gives something else than a finite number.
        """
        self._latest = max(self._latest, _seconds("monotonic", self._clock.monotonic()))
        return self._latest

    async def sleep(self, seconds: float) -> None:
        """Wait; a clock that waits without ``await`` will do."""
        waiting = self._clock.sleep(seconds)
        if inspect.isawaitable(waiting):
            await waiting


def _seconds(name: str, given: object) -> float:
    if isinstance(given, int | float) and not isinstance(given, bool) and math.isfinite(given):
        return given
    raise PlannerInvalidConfigurationError(
        f"clock.{name}() must give a finite number of seconds; got {shown(given)}. Give it as time.time() and "
        "time.monotonic() do."
    )


_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """What every door lets its caller set; see the doors for what each means.

    Attributes:
        held: The budget of a service that limits itself, which holds for a resumed run's new budget, too; or None.
        taken: What the object that the caller made remembers of decisions, and what the services inside it do.
    """

    budget: Limits
    execution: ToolExecution
    approval: ApprovalSettings
    clock: Clock
    price: Price | None = None
    min_iteration_time_ms: int = 0
    max_prompt_tokens: int = 0
    strict_finish_reason: bool = False
    observers: Sequence[Observer] = ()
    interceptors: Sequence[Interceptor] = ()
    pre_invoke: Sequence[PreInvoke] = ()
    checks: Sequence[CheckForIntervention] = ()
    iteration_completed: IterationCallback | None = None
    clarifier: Clarifier | None = None
    max_clarifications: int | None = None
    held: Limits | None = None
    checkpoint_key: SigningKey | None = None
    taken: tuple[DecisionsTaken, ...] = ()

    @classmethod
    def of(
        cls,
        *,
        budget: Budget | None = None,
        execution: ToolExecution | None = None,
        clock: Clock | None = None,
        min_iteration_time_ms: int | None = None,
        max_prompt_tokens: int | None = None,
        strict_finish_reason: bool = False,
        observers: Sequence[Observer] = (),
        approval: ApprovalSettings | None = None,
        interceptors: Sequence[Interceptor] = (),
        pre_invoke: PreInvoke | None = None,
        check_for_intervention: CheckForIntervention | None = None,
        iteration_completed: IterationCallback | None = None,
        clarifier: Clarifier | None = None,
        max_clarifications: int | None = None,
        checkpoint_key: bytes | None = None,
        taken: DecisionsTaken | None = None,
    ) -> "LoopOptions":
        """Fill in the defaults and refuse what means nothing.

        Raises:
            PlannerInvalidConfigurationError: Naming the option.
        """
        spendable = _instance("budget", budget, Budget)
        return cls(
            budget=spendable.limits,
            price=spendable.price,
            execution=_instance("execution", execution, ToolExecution),
            clock=_clock(clock),
            min_iteration_time_ms=non_negative("min_iteration_time_ms", min_iteration_time_ms),
            max_prompt_tokens=non_negative("max_prompt_tokens", max_prompt_tokens),
            strict_finish_reason=strict_finish_reason,
            observers=_callables("observers", observers),
            approval=_instance("approval", approval, ApprovalSettings),
            interceptors=_callables("interceptors", interceptors),
            pre_invoke=_callables("pre_invoke", () if pre_invoke is None else (pre_invoke,)),
            checks=_callables(
                "check_for_intervention", () if check_for_intervention is None else (check_for_intervention,)
            ),
            iteration_completed=callable_with(
                "iteration_completed", iteration_completed, "the context of the iteration"
            ),
            clarifier=callable_with("clarifier", clarifier, "the question"),
            max_clarifications=None
            if max_clarifications is None
            else non_negative("max_clarifications", max_clarifications),
            checkpoint_key=SigningKey.of(checkpoint_key),
            taken=(DecisionsTaken() if taken is None else taken,),
        )

    def within(self, inner: "LoopOptions") -> "LoopOptions":
        """Merge with the options of a service that this loop takes the place of.

        Of each limit the tighter holds; the service's interceptors are asked after these, its callbacks and its
        checkpoint key hold where there is none here. A decision that either has taken is taken.
        """
        return replace(
            self,
            budget=tightest(self.budget, inner.budget),
            held=tightest(inner.budget, self.held),
            price=self.price or inner.price,
            max_prompt_tokens=min(filter(None, (self.max_prompt_tokens, inner.max_prompt_tokens)), default=0),
            interceptors=(*self.interceptors, *inner.interceptors),
            pre_invoke=(*self.pre_invoke, *inner.pre_invoke),
            observers=(*self.observers, *inner.observers),
            checks=(*self.checks, *inner.checks),
            approval=self.approval.within(inner.approval),
            iteration_completed=self.iteration_completed or inner.iteration_completed,
            clarifier=self.clarifier or inner.clarifier,
            max_clarifications=_least(self.max_clarifications, inner.max_clarifications),
            checkpoint_key=inner.checkpoint_key if self.checkpoint_key is None else self.checkpoint_key,
            taken=(*self.taken, *inner.taken),
        )

    @property
    def takes_questions(self) -> bool:
        """Whether the model is offered the function that asks the user."""
        return self.max_clarifications != 0 and (self.clarifier is not None or self.max_clarifications is not None)

    def resumed(self, limits: Limits, price: Price | None) -> "LoopOptions":
        """Take the limits that a resumed run has, and the price of the budget that it was resumed with, if any."""
        return replace(self, budget=limits, price=price or self.price)

    def under(self, behavior: FunctionChoiceBehavior) -> "LoopOptions":
        """Add the pre-invoke callback of a function choice behaviour, if it has one."""
        callback = behavior.pre_invoke_callback if isinstance(behavior, BoundedFunctionChoiceBehavior) else None
        return self if callback is None else replace(self, pre_invoke=(*self.pre_invoke, callback))


def _least(first: int | None, second: int | None) -> int | None:
    return min((limit for limit in (first, second) if limit is not None), default=None)


def _instance(name: str, value: object, kind: type[_T]) -> _T:
    """Take an option of a class, or its defaults for None.

    Raises:
        PlannerInvalidConfigurationError: Naming the option.
    """
    return kind() if value is None else instance_of(name, value, kind)


def instance_of(name: str, value: object, kind: type[_T]) -> _T:
    """Read what has to be of a class.

    Raises:
        PlannerInvalidConfigurationError: Naming the option.
    """
    if not isinstance(value, kind):
        raise PlannerInvalidConfigurationError(f"{name} must be of the class {kind.__name__}; got {shown(value)}.")
    return value


def checked_goal(goal: object) -> str:
    """Read a goal.

    Raises:
        PlannerInvalidConfigurationError: If it is no text, or an empty one.
    """
    if not isinstance(goal, str) or not goal.strip():
        raise PlannerInvalidConfigurationError(f"The goal must be a text that is not empty; got {shown(goal)}.")
    return goal


def _clock(value: Clock | None) -> Clock:
    """Take a clock, or the machine's for None.

    Raises:
        PlannerInvalidConfigurationError: If it is none.
    """
    if value is None or isinstance(value, SystemClock | CheckedClock):
        return value or SystemClock()
    if not all(callable(getattr(value, name, None)) for name in ("now", "monotonic", "sleep")):
        raise PlannerInvalidConfigurationError(
            f"clock must have now, monotonic and sleep, or be None; got {shown(value)}."
        )
    return CheckedClock(value)


def callable_with(name: str, value: _T, *given: str) -> _T:
    """Read a function, or None.

    Args:
        name: The option.
        value: What was given for it.
        given: What the function is called with, in words.

    Raises:
        PlannerInvalidConfigurationError: If it is not a function, or does not take these arguments.
    """
    if value is None:
        return value
    if not callable(value):
        raise PlannerInvalidConfigurationError(f"{name} must be a function, or None; got {shown(value)}.")
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return value  # a function written in C may not say what it takes
    try:
        signature.bind(*given)
    except TypeError as error:
        raise PlannerInvalidConfigurationError(
            f"{name} must take {' and '.join(given)}; got a function that takes {signature}: {error}."
        ) from None
    return value


def _callables(name: str, values: object) -> tuple[Any, ...]:
    """Read a sequence of functions.

    Raises:
        PlannerInvalidConfigurationError: Naming the option.
    """
    if not isinstance(values, list | tuple) or not all(callable(value) for value in cast("Sequence[object]", values)):
        raise PlannerInvalidConfigurationError(
            f"{name} must be a sequence of functions; got {shown(cast('object', values))}."
        )
    return tuple(cast("Sequence[Any]", values))


def non_negative(name: str, value: object) -> int:
    """Read a whole number, 0 or more; None is 0.

    Raises:
        PlannerInvalidConfigurationError: Naming the option.
    """
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise PlannerInvalidConfigurationError(f"{name} must be a whole number, 0 or more; got {shown(value)}.")
    return value
