"""The options that every door takes: planner, service, handler and session.

To add an option:

1. Declare it in `RunOptions`: type, how it is validated and merged, default,
   documentation.
2. Add the field of `CheckedOptions` that runs read. Service, handler and session then
   take it by keyword.
3. Add the field of the planner's options, in ``planner/options.py``: pydantic needs
   one.
4. Use it: ``sk/run/context.py`` hands the options of a run to its parts, in `prepare`
   or, for the engine, in `RunContext.engine`.

``tests/test_options.py`` needs a value of it in ``GIVEN``.
"""

import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypedDict,
    TypeVar,
    Unpack,
    cast,
    get_type_hints,
)

from planner_ext.approval.decisions import ApprovalSettings, Interceptor
from planner_ext.core.accounts import SharedBudgets
from planner_ext.core.errors import nearest, shown, way_out
from planner_ext.core.limits import Budget, Price, least, tightest
from planner_ext.core.values import frozen
from planner_ext.engine.concurrency import SystemClock
from planner_ext.engine.gate import Approver, CheckForIntervention, PreInvoke
from planner_ext.engine.journal import takes_run
from planner_ext.engine.ports import Clock, Observer
from planner_ext.sk.charging.nested import ParentRun, nothing_left
from planner_ext.sk.checkpoint import DecisionsTaken, SigningKey
from planner_ext.sk.checks import (
    callable_with,
    check_returns,
    instance_of,
    non_negative,
    one_of,
)
from planner_ext.sk.errors import InvalidOptionError
from planner_ext.sk.functions.execution import ToolExecution
from planner_ext.sk.functions.questions import Clarifier
from planner_ext.sk.run.iteration import IterationCallback

if TYPE_CHECKING:
    from planner_ext.budgets import SharedBudget
    from planner_ext.sk.run.answers import CheckAnswer
else:
    SharedBudget = CheckAnswer = Any  # only a run that has one loads its module


class CheckedClock:
    """An application's clock, its times validated. Implements `planner_ext.engine.ports.Clock`.

    Where its ``monotonic`` goes back, this one stands still: no run regains time that
    it has spent.
    """

    def __init__(self, clock: Any) -> None:
        self._clock = clock
        self._latest = -math.inf

    def now(self) -> float:
        """Return the seconds since the epoch, a finite number."""
        return _seconds("now", self._clock.now())

    def monotonic(self) -> float:
        """Return seconds that never go back, a finite number."""
        now = _seconds("monotonic", self._clock.monotonic())
        self._latest = max(self._latest, now)
        return self._latest

    async def sleep(self, seconds: float) -> None:
        """Sleep; the clock's ``sleep`` may also be synchronous."""
        waiting = self._clock.sleep(seconds)
        if inspect.isawaitable(waiting):
            await waiting


def _seconds(name: str, given: object) -> float:
    if (
        isinstance(given, int | float)
        and not isinstance(given, bool)
        and math.isfinite(given)
    ):
        return given
    raise InvalidOptionError(
        f"clock.{name}() must give a finite number of seconds; got {shown(given)}. Give it as time.time() and "
        "time.monotonic() do."
    )


_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., None])


def _clock(name: str, value: Any) -> Clock:
    if value is None or isinstance(value, SystemClock | CheckedClock):
        return value or SystemClock()
    if not all(
        callable(getattr(value, name, None)) for name in ("now", "monotonic", "sleep")
    ):
        raise InvalidOptionError(
            f"{name} must have now, monotonic and sleep, or be None; got {shown(value)}."
        )
    return CheckedClock(value)


def _callables(name: str, values: object) -> tuple[Any, ...]:
    if not isinstance(values, list | tuple):
        got = shown(values)
        way = (
            f" Put it into a list: {name}=[...]."
            if callable(values)
            else way_out(name, values)
        )
        raise InvalidOptionError(
            f"{name} must be a sequence of functions; got {got}.{way}"
        )
    for value in cast("Sequence[object]", values):
        if not callable(value):
            got = shown(cast("object", values))
            raise InvalidOptionError(
                f"{name} must be a sequence of functions; got {got}.{way_out(name, value)}"
            )
        check_returns(name, value)
    return tuple(cast("Sequence[Any]", values))


def _observers(name: str, values: object) -> tuple[Any, ...]:
    return tuple(
        callable_with(
            name, one, ("the fact", "the run") if takes_run(one) else ("the fact",)
        )
        for one in _callables(name, values)
    )


def _shared_budgets(name: str, values: object) -> tuple[SharedBudget, ...]:
    given = (
        cast("Sequence[object]", values)
        if isinstance(values, list | tuple)
        else [values]
    )
    if not given:
        return ()
    from planner_ext.budgets.budget import SharedBudget as Shared  # noqa: PLC0415  (only where budgets are shared)

    budgets = tuple(instance_of(name, value, Shared) for value in given)
    if len({(budget.store, budget.name) for budget in budgets}) < len(budgets):
        names = [budget.name for budget in budgets]
        raise InvalidOptionError(
            f"{name} must have different names in one store; got {shown(names)}."
        )
    return budgets


def _all_budgets(
    own: tuple[SharedBudget, ...], inner: tuple[SharedBudget, ...]
) -> tuple[SharedBudget, ...]:
    """Merge two lists; of two with one name in one store the door's counts."""
    return tuple(
        {(budget.store, budget.name): budget for budget in (*inner, *own)}.values()
    )


def _own(own: _T, _: _T) -> _T:
    return own


def _either(first: _T, second: _T) -> _T:
    return second if first is None else first


def _instance_of(kind: type[Any]) -> Callable[[str, Any], Any]:
    return lambda name, value: (
        kind() if value is None else instance_of(name, value, kind)
    )


def _function_of(*given: str) -> Callable[[str, Any], Any]:
    return lambda name, value: callable_with(name, value, given)


def _one_callable(name: str, value: object) -> tuple[Any, ...]:
    if value is None:
        return ()
    return _callables(name, (value,))


def _check_answer(name: str, value: object) -> tuple[Any, ...]:
    checked = callable_with(name, value, ("the answer", "the context"))
    return () if checked is None else (checked,)


def _optional_count(name: str, value: object) -> int | None:
    return None if value is None else non_negative(name, value)


def _limit(name: str, value: object) -> int | None:
    return non_negative(name, value) or None


def _text(name: str, value: object) -> str | None:
    if value is None:
        return None
    return instance_of(name, value, str)


@dataclass(frozen=True, slots=True, repr=False)
class _Option:
    """How an option is read, given name and value, and merged with a wrapped service's."""

    read: Callable[[str, Any], Any]
    merge: Callable[[Any, Any], Any] = _own
    default: object = None

    def __repr__(self) -> str:
        return f"Option(default={self.default!r})"  # what the reference shows


class RunOptions(TypedDict, total=False):
    """The options that planner, service, handler and session take by keyword.

    Attributes:
        budget: What one run may spend, and what happens at a limit. None leaves the
            limits to the function choice behaviour.
        shared_budgets: Budgets shared with other runs, in all processes, those inside
            functions included; see `planner_ext.budgets.SharedBudget`.
        price: Returns the US dollars of one request, a finite number of 0 or more,
            given the model's name and its `Usage`; synchronous. It is tried before the
            first request, for 0 tokens or, if that raises, one sent and one received. A
            later invalid price raises `InvalidPriceError`. None uses the list of
            ``genai-prices`` (extra ``prices``) if there is a ``max_cost``, and else
            counts no cost. Runs inside functions use their own, or the nearest one
            around them. It is never stored: resuming needs it again.
        execution: How functions are run.
        approval: What happens to calls that no interceptor decided, that were denied,
            and that wait.
        interceptors: Asked in order about every call of a batch before any of it runs;
            the first decision wins. An `ApprovalPolicy` is one of them.
        pre_invoke: Asked about each call with the 1-based round trip, the function's
            name and its arguments; False refuses it.
        check_for_intervention: Asked about each call; True defers it to a person.
        approver: Asks a person at once about a deferred call: a function, async or not,
            of the `ToolCall` with the question as its ``prompt``. After the question's
            ``expires_in``, and if it raises, the call is denied; with `Defer` or None
            the run pauses. Runs inside functions use their own, or the nearest one
            around them, and the person's time counts as the function's; they pause the
            runs around them, see `planner_ext.PlannerPlugin`.
        iteration_completed: Called after the results of a batch are stored and before
            the next request.
        clarifier: Answers what the model asks with ``UserInteraction-AskUser``, which
            is then offered, and may answer a question in a plain reply; see
            `Clarifier`. With None a question ends the run ``asked``.
        max_clarifications: Answered questions of a run; then the model is asked to
            continue without an answer, and a plain reply is final. None means no limit;
            0 offers no questions, a number offers them.
        check_answer: Asked about the final answer before the run ends with it: a
            function, async or not, of the text and its
            `planner_ext.iteration.AnswerContext`. A text is the reason of a refusal:
            the model reads it, with all functions, for one round trip of the budget.
            Where none is left, or after ten refusals without a limit on round trips,
            the run ends with the refused answer, ``limit_reached`` or ``incomplete``,
            and the reason; a forced answer is checked, too. The run's time limits
            interrupt it. If it raises, `AnswerCheckError` ends the run. Fixed when a
            run begins; resuming needs it again.
        observers: Called with each fact after it is recorded; one with two parameters
            also gets the run's `planner_ext.events.RunInfo`. Exceptions are logged and
            change nothing.
        clock: The time source, with ``now``, ``monotonic`` and ``sleep``; None uses the
            machine's clock.
        min_iteration_time_ms: Minimum milliseconds between the starts of two round
            trips.
        max_prompt_tokens: Maximum tokens of a request, functions included; counted, or
            estimated. A larger one is not sent, and raises `PromptTooLargeError`. None
            and 0 mean no limit.
        on_invalid_history: Whether to ``refuse`` or ``repair`` a history with an
            unanswered call, an orphan or a second result. Planner and session repair
            their own copy, service and handler the caller's history.
        strict_finish_reason: Whether a finish reason that contradicts the reply's
            content is an error.
        checkpoint_key: Signs every checkpoint in results, metadata and errors
            (HMAC-SHA256); others are then refused. None uses the key of a wrapped
            `FunctionInvokingChatCompletion`. No ``repr``, dump, error, checkpoint or
            pickle holds it. A run in a store is not signed: who can write to the
            database can change it.
        name, agent_id: The agent's name and id in traces and metrics,
            ``gen_ai.agent.name`` and ``gen_ai.agent.id``. Without a name it is that of
            the door's class; without an id none is given.
    """

    budget: Annotated[Budget | None, _Option(_instance_of(Budget), tightest)]
    shared_budgets: Annotated[
        Sequence[SharedBudget], _Option(_shared_budgets, _all_budgets, ())
    ]
    price: Annotated[
        Price | None,
        _Option(_function_of("the model's name", "the tokens used"), _either),
    ]
    execution: Annotated[ToolExecution | None, _Option(_instance_of(ToolExecution))]
    approval: Annotated[
        ApprovalSettings | None,
        _Option(_instance_of(ApprovalSettings), ApprovalSettings.within),
    ]
    interceptors: Annotated[
        Sequence[Interceptor], _Option(_callables, operator.add, ())
    ]
    pre_invoke: Annotated[PreInvoke | None, _Option(_one_callable, operator.add)]
    check_for_intervention: Annotated[
        CheckForIntervention | None, _Option(_one_callable, operator.add)
    ]
    approver: Annotated[Approver | None, _Option(_function_of("the call"), _either)]
    iteration_completed: Annotated[
        IterationCallback | None,
        _Option(_function_of("the context of the iteration"), _either),
    ]
    clarifier: Annotated[
        Clarifier | None, _Option(_function_of("the question"), _either)
    ]
    max_clarifications: Annotated[int | None, _Option(_optional_count, least)]
    check_answer: Annotated[CheckAnswer | None, _Option(_check_answer, operator.add)]
    observers: Annotated[Sequence[Observer], _Option(_observers, operator.add, ())]
    clock: Annotated[Clock | None, _Option(_clock)]
    min_iteration_time_ms: Annotated[int | None, _Option(non_negative, default=0)]
    max_prompt_tokens: Annotated[int | None, _Option(_limit, least)]
    on_invalid_history: Annotated[
        Literal["refuse", "repair"],
        _Option(partial(one_of, allowed=("refuse", "repair")), default="refuse"),
    ]
    strict_finish_reason: Annotated[
        bool, _Option(lambda _, value: value, default=False)
    ]
    checkpoint_key: Annotated[
        bytes | None, _Option(lambda name, key: SigningKey.of(key, name), _either)
    ]
    name: Annotated[str | None, _Option(_text, _either)]
    agent_id: Annotated[str | None, _Option(_text, _either)]


_OPTIONS: Mapping[str, _Option] = {
    name: kind.__metadata__[0]
    for name, kind in get_type_hints(RunOptions, include_extras=True).items()
}

_KINDS = get_type_hints(RunOptions)

DEFAULTS: Mapping[str, object] = {
    name: option.default for name, option in _OPTIONS.items()
}
"""The options by name, in the order of `RunOptions`, with their defaults."""


def takes_run_options(function: _F) -> _F:
    """Spell out `RunOptions` in the signature of a function with ``**options``."""
    signature = inspect.signature(function)
    *own, _ = signature.parameters.values()
    shared = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=DEFAULTS[name],
            annotation=kind,
        )
        for name, kind in _KINDS.items()
        if name not in signature.parameters
    ]
    function.__signature__ = signature.replace(parameters=[*own, *shared])  # pyright: ignore[reportFunctionMemberAccess]  (what inspect reads)
    return function


@frozen
class CheckedOptions:
    """`RunOptions`, validated and with defaults, as a run uses them.

    Attributes:
        outer_budget: That of the wrapped services, or None; bounds a resumed run's new
            budget, too.
        taken: The decisions that the door took, and the wrapped services.
    """

    budget: Budget
    shared_budgets: tuple[SharedBudget, ...]
    price: Price | None
    execution: ToolExecution
    approval: ApprovalSettings
    interceptors: tuple[Interceptor, ...]
    pre_invoke: tuple[PreInvoke, ...]
    check_for_intervention: tuple[CheckForIntervention, ...]
    approver: Approver | None
    iteration_completed: IterationCallback | None
    clarifier: Clarifier | None
    max_clarifications: int | None
    check_answer: tuple[CheckAnswer, ...]
    observers: tuple[Observer, ...]
    clock: Clock
    min_iteration_time_ms: int
    max_prompt_tokens: int | None
    on_invalid_history: Literal["refuse", "repair"]
    strict_finish_reason: bool
    checkpoint_key: SigningKey | None
    name: str | None
    agent_id: str | None
    outer_budget: Budget | None = None
    taken: tuple[DecisionsTaken, ...]

    @classmethod
    def of(
        cls, taken: DecisionsTaken, **options: Unpack[RunOptions]
    ) -> "CheckedOptions":
        """Check options, and fill in the defaults; ``taken`` is the door's memory."""
        unknown = options.keys() - _OPTIONS.keys()
        if unknown:
            name = min(unknown)
            hint = (
                "" if name in Budget.__dataclass_fields__ else nearest(name, _OPTIONS)
            )
            raise TypeError(
                f"unexpected keyword argument {', '.join(sorted(map(repr, unknown)))}; the options are "
                f"{', '.join(sorted(_OPTIONS))}. Limits are fields of the budget: budget=Budget(max_iterations=5)."
                f"{hint}"
            )
        given: Mapping[str, Any] = {**DEFAULTS, **options}
        return cls(
            taken=(taken,),
            **{
                name: option.read(name, given[name])
                for name, option in _OPTIONS.items()
            },
        )

    def within(self, inner: "CheckedOptions") -> "CheckedOptions":
        """Merge with the settings of a wrapped service, each option by its rule in `RunOptions`.

        Of each limit the tighter applies, the service's interceptors come last, and its
        callbacks and key fill in for missing ones. Execution, clock, pacing and the
        treatment of invalid histories and finish reasons are this door's alone.
        """
        merged: dict[str, Any] = {
            name: option.merge(getattr(self, name), getattr(inner, name))
            for name, option in _OPTIONS.items()
        }
        outer_budget = tightest(inner.budget, self.outer_budget)
        taken = (*self.taken, *inner.taken)
        return replace(self, **merged, outer_budget=outer_budget, taken=taken)

    def inside(self, parent: ParentRun, *, continues: bool) -> "CheckedOptions":
        """Add what the run around a nested run sets; refuse a new one once that run is over or has nothing left."""
        if not continues:
            parent.check()
            limit = parent.tab.left().used_up()
            if limit is not None:
                raise nothing_left(limit)
        around = parent.tab.account.state.rules.limits
        limits = Budget(
            max_calls_per_reply=None, max_result_tokens=around.max_result_tokens
        )
        approval = self.approval
        for chain in parent.gates:  # who has a say around has it inside, too
            approval = approval.asking(chain.options.authorize)
        price = self.price or parent.price
        return replace(
            self, budget=tightest(self.budget, limits), price=price, approval=approval
        )

    def bounded(self, budget: Budget) -> Budget:
        """Bound a new budget of a run by that of the wrapped services."""
        return tightest(instance_of("budget", budget, Budget), self.outer_budget)

    def charges(
        self, arguments: Mapping[str, Any], outer: SharedBudgets | None = None
    ) -> SharedBudgets | None:
        """Make what a run takes of its shared budgets, besides what the run around takes from."""
        from planner_ext.budgets.charges import charges_of  # noqa: PLC0415  (SQL, only where budgets are shared)

        return charges_of(self.shared_budgets, arguments, self.clock.now, outer)

    @property
    def takes_questions(self) -> bool:
        """Whether the model is offered the function that asks the user."""
        return self.max_clarifications != 0 and (
            self.clarifier is not None or self.max_clarifications is not None
        )
