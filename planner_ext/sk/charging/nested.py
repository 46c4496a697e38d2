"""The run in whose function code runs: how it is found, what it leaves to a run inside, and its gate.

A context variable names the call, for everything that the call awaits or starts; in
another thread, the services of the kernel that its function was given do. What a
function gets of the run is in `planner_ext.sk.charging.view`.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from semantic_kernel import Kernel
from semantic_kernel.connectors.ai import PromptExecutionSettings
from semantic_kernel.functions import KernelFunction, KernelFunctionFromPrompt
from semantic_kernel.services.ai_service_client_base import AIServiceClientBase

from planner_ext.approval.decisions import (
    Approve,
    Defer,
    Deny,
    ToolCall,
    approval_required,
)
from planner_ext.core.accounts import SharedBudgets, Tab, current_tab
from planner_ext.core.facts import CallDecided, Fact
from planner_ext.core.limits import Budget, Left, Price
from planner_ext.core.state import State
from planner_ext.core.values import frozen
from planner_ext.engine.concurrency import StopHandle
from planner_ext.engine.gate import InterceptorChain
from planner_ext.engine.ports import Reviewed
from planner_ext.sk.charging.earlier_calls import GivenMessages, before_batch
from planner_ext.sk.charging.filters import (
    CallFilter,
    edited_call,
)
from planner_ext.sk.chat.prices import RequestMeter
from planner_ext.sk.errors import (
    LimitReachedError,
    NestedRunRefusedError,
    TurnPausedError,
)
from planner_ext.sk.functions.toolset import Tool, agent_of

if TYPE_CHECKING:
    from planner_ext.engine.review import Review

_PLANNER: Final = "__planner_ext_planner__"


def mark_planner(
    function: Callable[..., Any], planner: object, kernel: Kernel | None = None
) -> None:
    """Declare that a function is this planner, with its own kernel or the one that it is called on."""
    setattr(function, _PLANNER, (planner, kernel))


def planner_of(function: KernelFunction | None) -> Any:
    """Read the planner mark of a kernel's function: it is not offered inside its own runs. None without one."""
    return _planner_mark(function)[0]


def planner_kernel_of(function: KernelFunction | None) -> Kernel | None:
    """Read the kernel of a function that is a planner; None if it runs on the one that it is called on."""
    return _planner_mark(function)[1]


def _planner_mark(function: KernelFunction | None) -> tuple[Any, Kernel | None]:
    return getattr(getattr(function, "method", None), _PLANNER, (None, None))


def may_be_called_again(function: KernelFunction, tool: Tool) -> bool:
    """Return whether a function may be called again where a run in it waits: it has no code of its own, or says so."""
    return tool.restarts or (
        tool.asks_model
        and (
            planner_of(function) is not None
            or isinstance(function, KernelFunctionFromPrompt)
            or own_agent_of(function) is not None
        )
    )


def own_agent_of(function: KernelFunction) -> Any:
    """Find the agent that a function is, without code of an application around it; None for another function."""
    method = getattr(function, "method", None)
    is_own = getattr(method, "__name__", "") == "_as_kernel_function"
    return agent_of(method) if is_own else None


@frozen
class ParentRun:
    """The run and the call in which a function runs; outermost planner and gate first.

    Attributes:
        run: Which run of the call is made; None if the run around does not record it.
        known: What has happened in it before the function was called again.
        continues: Whether it has begun before.
        left: Lists the facts with which a run that is made again begins, given its
            context: what the outermost run left to it; see
            `planner_ext.sk.run.inside.RunsInside`.
    """

    planners: tuple[object, ...]
    gates: tuple[InterceptorChain, ...]
    price: Price | None = None
    stop: StopHandle | None = None
    tab: Tab
    run: int | None = None
    known: Sequence[Fact] = ()
    continues: bool = False
    left: Callable[[Any], Awaitable[Sequence[Fact]]] | None = None

    def check(self) -> None:
        """Refuse requests and functions after the end of the call, or a stop of its run."""
        if self.tab.closed:
            raise NestedRunRefusedError(
                "The function that was given this kernel has returned, and its call is charged: nothing more can be "
                "done in its name. Await what the function starts, or start it with a context and a kernel of its own."
            )
        if self.stop is not None and self.stop.reason is not None:
            raise NestedRunRefusedError(
                f"The run was asked to stop: {self.stop.reason}"
            )

    def enter(self, is_same: Callable[[Fact], bool]) -> "ParentRun":
        """Number a run that the function makes, and list what has happened in it before; see `Tab.enter`."""
        run = self.tab.enter(is_same)
        known = ()
        if run is not None:
            known = self.tab.facts_of(run)
        return replace(self, run=run, known=known, continues=bool(known))


def current_parent_run(tab: Tab | None = None) -> ParentRun | None:
    """Find the run inside whose function this code runs; None outside of every run.

    In another context, as in a thread, the ``tab`` of the call tells.
    """
    tab = current_tab() or tab
    if tab is None or tab.around is None:
        return None
    return tab.around(tab=tab)


def nothing_left(limit: str) -> LimitReachedError:
    """Make the error for a request inside a function of a run that has nothing left."""
    return limit_reached(
        limit,
        f"The limit {limit} of the run leaves nothing for a request or a call inside a function, but for the request "
        "that is kept for the run's answer. It was not made.",
    )


def limit_reached(limit: str, problem: str) -> LimitReachedError:
    """Make the error for a limit that forbids a request or a start inside a function."""
    error = LimitReachedError(problem)
    error.status = "limit_reached"
    error.limit = limit
    return error


def refusal_in(error: BaseException) -> str | None:
    """Find a run's refusal, or its pause without a way back, among the causes of a function's error; or None."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(
            cause, NestedRunRefusedError | LimitReachedError | TurnPausedError
        ):
            return str(cause)
        cause = cause.__cause__
    return None


def request_meter(
    service: AIServiceClientBase,
    settings: PromptExecutionSettings,
    *,
    price: Price | None,
    limits: Budget | None = None,
    around: Tab | None,
    shared: SharedBudgets | None,
    max_prompt_tokens: int = 0,
) -> RequestMeter:
    """Make the meter that the budgets which pay for requests need."""
    left = Left() if around is None else around.left()
    costs = [left.amounts.get("max_cost")]
    estimates = "max_total_tokens" in left.amounts
    if limits is not None:
        costs.insert(0, limits.max_cost)
        estimates = estimates or limits.max_total_tokens is not None
    if shared is not None:
        costs.append(shared.max_cost)
        estimates = estimates or shared.counts_tokens
    max_cost = next(filter(None, costs), None)
    return RequestMeter(
        service,
        settings,
        price=price,
        max_cost=max_cost,
        max_prompt_tokens=max_prompt_tokens,
        estimates=estimates,
    )


Wrap = Callable[[AIServiceClientBase, Tab], AIServiceClientBase]
"""Wraps a service so that its requests are charged to a call; others are returned."""


def whole(kernel: Kernel) -> Kernel:
    """Return the kernel that a view is of; another kernel as it is."""
    services = kernel.services
    return services.kernel if isinstance(services, ChargedServices) else kernel


def tab_in(kernel: Kernel) -> Tab | None:
    """Find the call that a view belongs to; None for anything but a view."""
    services: object = getattr(kernel, "services", None)
    return services.tab if isinstance(services, ChargedServices) else None


class ChargedServices(dict[str, AIServiceClientBase]):
    """The services of a view of a kernel: each charges its requests to the call."""

    def __init__(self, kernel: Kernel, tab: Tab, wrap: Wrap) -> None:
        super().__init__(
            {name: wrap(service, tab) for name, service in kernel.services.items()}
        )
        self.kernel = kernel
        self.tab = tab
        self._wrap = wrap

    def __setitem__(self, name: str, service: AIServiceClientBase) -> None:
        super().__setitem__(name, self._wrap(service, self.tab))


@dataclass(eq=False, repr=False)
class RunGate:
    """Decides the calls of a run; implements `planner_ext.engine.ports.Gate`.

    1. The chains, the outermost run's first, each about what those before it approved.
       ``@requires_approval`` counts once, in the outermost. What a chain refuses or
       supplies stands; what it asks about waits. Two chains that ask the same, of the
       same persons, put one question.
    2. Each filter, about what the chains let run: its policy, the function's mark, its
       approver. It adds a question to what waits, unless the same approver or persons
       of the same roles were asked before.
    3. The nearest approver, of the run or those around it, about each call that would
       wait.

    An edit is reviewed from the first rule on. What was approved "for the rest of the
    run" is that of the run that makes the call.

    Attributes:
        expires_in: Seconds after which a filter's question expires; None: never.
        marked: Whether ``@requires_approval`` counts here, not in the kernel's filters.
        can_wait: Whether calls may wait for a person; otherwise they are denied.
        tab: The call of another run in which the calls are made, or None.
    """

    chains: Sequence[InterceptorChain]
    filters: Sequence[CallFilter]
    _: KW_ONLY
    functions: Callable[[], Mapping[str, KernelFunction]]
    expires_in: float | None = None
    marked: bool
    can_wait: bool
    tab: Tab | None = None
    _reviewed: set[tuple[int, str]] = field(
        default_factory=set[tuple[int, str]], init=False
    )
    _given: dict[int, GivenMessages] = field(
        default_factory=dict[int, GivenMessages], init=False
    )

    def __post_init__(self) -> None:
        self._decides_all = bool(self.filters) or any(
            chain.watches("") for chain in self.chains
        )
        mark = partial(_mark_in, self.functions)
        if self.marked:
            outermost, *others = self.chains
            self.chains = [replace(outermost, marked=mark), *others]
        self._filters = [one.chain(mark, self.expires_in) for one in self.filters]
        self._approves = next(
            (chain for chain in reversed(self.chains) if chain.approver is not None),
            None,
        )

    def watches(self, function: str) -> bool:
        """Whether a filter or a chain decides a function's calls."""
        return (
            self._decides_all
            or approval_required(self.functions().get(function)) is not None
        )

    async def review(
        self, calls: Sequence[ToolCall], state: State
    ) -> Sequence[Reviewed]:
        """Decide each call, in order, before any of them runs."""
        earlier = before_batch(state, self.tab, self._given)
        calls = [replace(call, after=earlier) for call in calls]
        reviewed = await self._review(state).of(calls, state)
        new = {(call.iteration, call.id) for call in calls if self.filters}
        self._reviewed = new | {
            one for one in self._reviewed if one[0] == state.iteration - 1
        }  # of the open batch
        if self.can_wait:
            return reviewed
        return list(map(_not_waiting, calls, reviewed))

    async def review_edit(
        self, call: ToolCall, approval: Approve, question: Defer, state: State
    ) -> Reviewed:
        """Review a person's edit; see `Review.of_edit`."""
        call = replace(call, after=before_batch(state, self.tab, self._given))
        return await self._review(state).of_edit(call, approval, question, state)

    def decided_by(self, fact: CallDecided | None) -> Sequence[CallFilter]:
        """List the filters that need not decide the call again: this gate asked them, or a person did decide."""
        if fact is not None and (
            fact.person or (fact.iteration, fact.call_id) in self._reviewed
        ):
            return self.filters
        return ()

    def _review(self, state: State) -> "Review":
        from planner_ext.engine.review import Review  # noqa: PLC0415  (only where something decides calls)

        edit = partial(edited_call, self.functions(), state.run_id)
        return Review(
            chains=self.chains,
            filters=self._filters,
            approves=self._approves,
            edit=edit,
        )


def _mark_in(
    functions: Callable[[], Mapping[str, KernelFunction]], name: str
) -> Defer | None:
    return approval_required(functions().get(name))


def _not_waiting(call: ToolCall, reviewed: Reviewed) -> Reviewed:
    if not isinstance(reviewed.decision, Defer):
        return reviewed
    name = call.fully_qualified_name
    logging.getLogger(__name__).warning(
        "%s is denied: no approver, and its run cannot pause in a function.", name
    )
    reason = f"{name} needs a person's decision, and a run inside a function cannot wait for one. Go on without it."
    return Reviewed(decision=Deny(reason), question=reviewed.question)
