"""What a function of a run learns of that run, how its own requests are paid, and under whose gate its own calls stand.

The call of a function is found through a context variable, which holds for whatever the call awaits or starts. A prompt
function, and a function that takes ``kernel`` or ``service``, also gets a view of the kernel: the same functions and
filters, and services that are charged to the run.

- Each request to a chat or text completion service is charged to the run before it is sent, tokens and cost after it;
  functions that are called for it stand under the run's gate. When nothing is left of the budget, less the request that
  is kept for the run's answer, it is refused with `LimitReachedError`.
- Each function that it calls (``kernel.invoke``, ``{{plugin.function}}`` in a template) is put before the run's
  interceptors, policies and ``@requires_approval``, and counted in ``max_tool_calls``. A call that is denied, or would
  wait for a person, raises `NestedRunRefusedError`.
- Once the call has ended, both are refused.

Embeddings, images and audio are not round trips, and are not counted. A run that a function keeps in a store
(`planner_ext.durable.Runs`) may outlive the call: it has its own budget and policies. Requests that do not pass this
kernel are not seen: those of an SDK called by hand, and those of the application's own kernel where a function holds it
(in a closure, or as ``self._kernel``). The way out: take ``kernel: Kernel`` as a parameter, or register
`FunctionInvokingChatCompletion` as the service of the kernel that is held; it finds the call by the context variable,
and charges it. Must not know the planner, nor how a budget is counted: that is `planner_ext.core.accounts`.
"""

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, cast

from pydantic import PrivateAttr
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.prompt_execution_settings import PromptExecutionSettings
from semantic_kernel.connectors.ai.text_completion_client_base import TextCompletionClientBase
from semantic_kernel.contents import AuthorRole, ChatMessageContent, StreamingTextContent, TextContent
from semantic_kernel.filters.functions.function_invocation_context import FunctionInvocationContext
from semantic_kernel.functions import FunctionResult, KernelFunction
from semantic_kernel.services.ai_service_client_base import AIServiceClientBase

from planner_ext.approval.decisions import Approve, Deny, Supply, ToolCall, digest_of, fingerprint_of
from planner_ext.core.accounts import Account, Tab, current_tab
from planner_ext.core.limits import Consumption, Price, tightest
from planner_ext.core.values import Usage
from planner_ext.engine.engine import StopHandle
from planner_ext.engine.gate import InterceptorChain
from planner_ext.sk.approval_filter import RunGate, approval_filters
from planner_ext.sk.arguments import INJECTED, InvalidArguments, parse_arguments, tool_of
from planner_ext.sk.errors import LimitReachedError, NestedRunRefusedError
from planner_ext.sk.messages import merge_reported, read_iterations, usage_in
from planner_ext.sk.options import RunSettings
from planner_ext.sk.prices import RequestMeter

__all__ = [
    "Charge",
    "ChargedTextCompletion",
    "ParentRun",
    "Wrap",
    "charged",
    "current_parent_run",
    "mark_planner",
    "nothing_left",
    "planner_of",
    "refusal_in",
    "tab_in",
    "view_of",
    "whole",
]

_PLANNER: Final = "__planner_ext_planner__"


def mark_planner(function: Callable[..., Any], planner: object) -> None:
    """Declare that a function is this planner: its call is given a share of the budget of the run around it."""
    setattr(function, _PLANNER, planner)


def planner_of(function: KernelFunction | None) -> object | None:
    """Read the planner mark of a kernel's function; None if it is not a planner."""
    return getattr(getattr(function, "method", None), _PLANNER, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParentRun:
    """The run in which a function is called, and the call.

    Attributes:
        planners: Those whose runs are around the function, the outermost first.
        gates: The interceptors of each of the runs around, the outermost first, and that run's account.
        price: How the run around counts cost, if its application says so.
        stop: Stops the run around, and with it the runs inside it.
        tab: Of the call.
    """

    planners: tuple[object, ...]
    gates: tuple[tuple[InterceptorChain, Account], ...]
    price: Price | None = None
    stop: StopHandle | None = None
    tab: Tab

    def check(self) -> None:
        """Check that the call may still make requests and start functions.

        Raises:
            NestedRunRefusedError: If it has ended, or its run is to stop.
        """
        if self.tab.closed:
            raise NestedRunRefusedError(
                "The function that was given this kernel has returned, and its call is charged: nothing more can be "
                "done in its name. Await what the function starts, or start it with a context and a kernel of its own."
            )
        if self.stop is not None and self.stop.reason is not None:
            raise NestedRunRefusedError(f"The run was asked to stop: {self.stop.reason}")

    def within(self, options: RunSettings) -> RunSettings:
        """Keep a nested run to what is left: of each limit the tighter holds.

        Raises:
            NestedRunRefusedError: If the call has ended, or its run is to stop.
            LimitReachedError: If nothing is left for a request.
        """
        self.check()
        left = self.tab.left()
        if (limit := left.used_up()) is not None:
            raise nothing_left(limit)
        calls = None if left.tool_calls is None else max(left.tool_calls, 0)
        deadline = self.tab.account.state.rules.limits.deadline
        limits = replace(left, tool_calls=calls).limits(deadline, self.price)
        return replace(options, budget=tightest(options.budget, limits))


def current_parent_run(tab: Tab | None = None) -> ParentRun | None:
    """Find the run in which this code is called as a function, or as a part of one; None outside of every run.

    Args:
        tab: Of the call that the code belongs to where it runs in another context, as threads do.
    """
    tab = current_tab() or tab
    return None if tab is None or tab.around is None else tab.around(tab)


def nothing_left(limit: str) -> LimitReachedError:
    """Make the error for a request inside a function for which the budget of the run around has nothing left."""
    error = LimitReachedError(
        f"The limit {limit} of the run leaves nothing for a request or a call inside a function, but for the request "
        "that is kept for the run's answer. It was not made."
    )
    error.status, error.limit = "limit_reached", limit
    return error


def refusal_in(error: BaseException) -> str | None:
    """Find what a function was refused inside of a run, behind whatever its error became on the way; None otherwise."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, NestedRunRefusedError | LimitReachedError):
            return str(cause)
        cause = cause.__cause__
    return None


Charge = Callable[[ChatMessageContent | None], None]
"""Called with the reply to a request, or with None where there was no reply."""


@contextmanager
def charged(
    tab: Tab | None,
    service: AIServiceClientBase,
    settings: PromptExecutionSettings,
    sent: Sequence[ChatMessageContent],
    price: Price | None = None,
) -> Generator[Charge]:
    """Charge one request to the call that makes it; outside of every run nothing is charged.

    Args:
        tab: See `current_parent_run`.
        service: The service that is asked.
        settings: Of the request.
        sent: The messages of the request, without its functions. Where tokens or cost are limited, tokens that the
            reply does not report are estimated from them; and so are those of a request that is abandoned.
        price: How the service counts cost; None is as the run around does.

    Yields:
        A function to be called with the reply.

    Raises:
        LimitReachedError: If nothing is left for the request.
        NestedRunRefusedError: If the call has ended, or its run is to stop.
    """
    parent = current_parent_run(tab)
    if parent is None:
        yield lambda _: None
        return
    parent.check()
    tab = parent.tab
    left = tab.left()
    price = price or parent.price
    meter = RequestMeter(service, settings, price=price, max_cost=left.cost, estimates=left.tokens is not None)
    request, expected = object(), meter.used(Usage(), sent, None, None)
    if (limit := tab.take_request()) is not None:
        raise nothing_left(limit)
    tab.expect(request, expected)

    def charge(reply: ChatMessageContent | None) -> None:
        if reply is not None:
            usage = meter.used(usage_in(reply), sent, None, reply)
            more = Consumption(iterations=read_iterations(reply.metadata) - 1, usage=usage)
            tab.charge(more, instead_of=request)

    try:
        yield charge
    except Exception:
        tab.charge(Consumption(), instead_of=request)
        raise


class ChargedTextCompletion(TextCompletionClientBase):
    """A text completion service whose requests are charged to the call of a run that makes them."""

    _inner: TextCompletionClientBase = PrivateAttr()
    _tab: Tab = PrivateAttr()

    def __init__(self, inner: TextCompletionClientBase, tab: Tab) -> None:
        super().__init__(ai_model_id=inner.ai_model_id, service_id=inner.service_id)
        self._inner = inner
        self._tab = tab

    def get_prompt_execution_settings_class(self) -> type[PromptExecutionSettings]:
        """Return the inner service's settings class."""
        return self._inner.get_prompt_execution_settings_class()

    def service_url(self) -> str | None:
        """Return the inner service's URL."""
        return self._inner.service_url()

    async def get_text_contents(self, prompt: str, settings: PromptExecutionSettings) -> list[TextContent]:
        """Ask the inner service.

        Raises:
            LimitReachedError: If nothing is left of the run's budget for the request.
            NestedRunRefusedError: If the call has ended, or its run is to stop.
        """
        with charged(self._tab, self._inner, settings, [_message(prompt)]) as charge:
            texts = await self._inner.get_text_contents(prompt, settings)
            charge(_message("".join(text.text for text in texts), texts[0]) if texts else None)
            return texts

    async def get_streaming_text_contents(
        self, prompt: str, settings: PromptExecutionSettings
    ) -> AsyncGenerator[list[StreamingTextContent], Any]:
        """Ask the inner service for a stream; raises as `get_text_contents` does."""
        last: StreamingTextContent | None = None
        usage: Any = None
        text = ""
        with charged(self._tab, self._inner, settings, [_message(prompt)]) as charge:
            try:
                async with aclosing(self._inner.get_streaming_text_contents(prompt, settings)) as stream:
                    async for chunks in stream:
                        for chunk in chunks:
                            last, text = chunk, text + (chunk.text or "")
                            usage = merge_reported(usage, chunk.metadata.get("usage"))
                        yield chunks
            finally:  # of a stream that is left early, the chunks that came
                if last is not None:
                    charge(_message(text, last.model_copy(update={"metadata": {**last.metadata, "usage": usage}})))


def _message(text: str, content: TextContent | None = None) -> ChatMessageContent:
    """Write a text as a message, with the metadata that came with it."""
    message = ChatMessageContent(role=AuthorRole.ASSISTANT, content=text)
    if content is None:
        return message
    return message.model_copy(update={"metadata": content.metadata, "inner_content": content.inner_content})


Wrap = Callable[[AIServiceClientBase, Tab], AIServiceClientBase]
"""Wraps a service so that its requests are charged to a call; others are returned as they are."""

_Next = Callable[[FunctionInvocationContext], Awaitable[None]]


def whole(kernel: Kernel) -> Kernel:
    """Return the kernel that a view is of; another kernel as it is."""
    services = kernel.services
    return services.kernel if isinstance(services, _Services) else kernel


def tab_in(kernel: Kernel) -> Tab | None:
    """Find the call that a view belongs to; None for another kernel, and for a value that is not a kernel."""
    services: object = getattr(kernel, "services", None)
    return services.tab if isinstance(services, _Services) else None


def view_of(kernel: Kernel, tab: Tab, wrap: Wrap) -> Kernel:
    """Make the view of a kernel for one invocation of a function, in the name of its call.

    What the function adds to its plugins, the kernel itself has, too; services that it adds stay in the view.
    """
    own: FunctionInvocationContext | None = None

    async def mark(context: FunctionInvocationContext, next: _Next) -> None:
        """Remember the run's own invocation of the function, which its gate has decided."""
        nonlocal own
        own = context if own is None else own
        await next(context)

    async def gate(context: FunctionInvocationContext, next: _Next) -> None:
        parent = current_parent_run(tab)
        if context is own or parent is None or _is_inline(context):
            await next(context)
        else:
            await _gated(context, next, parent)

    listed: Any = kernel  # its lists of filters are typed in part only
    return Kernel.model_construct(
        plugins=kernel.plugins,
        services=_Services(kernel, tab, wrap),
        ai_service_selector=kernel.ai_service_selector,
        # The last one is the outermost.
        function_invocation_filters=[(id(gate), gate), *listed.function_invocation_filters, (id(mark), mark)],
        prompt_rendering_filters=listed.prompt_rendering_filters,
        auto_function_invocation_filters=listed.auto_function_invocation_filters,
    )


class _Services(dict[str, AIServiceClientBase]):
    """The services of a view, each wrapped.

    Attributes:
        kernel: The kernel that the view is of.
        tab: The call that the view belongs to.
    """

    def __init__(self, kernel: Kernel, tab: Tab, wrap: Wrap) -> None:
        super().__init__({name: wrap(service, tab) for name, service in kernel.services.items()})
        self.kernel = kernel
        self.tab = tab
        self._wrap = wrap

    def __setitem__(self, name: str, service: AIServiceClientBase) -> None:
        super().__setitem__(name, self._wrap(service, self.tab))


def _is_inline(context: FunctionInvocationContext) -> bool:
    """Whether a prompt runs that is not a function of the kernel, as of ``invoke_prompt``: a request, not a call."""
    function = context.function
    plugin = context.kernel.plugins.get(function.plugin_name)
    return function.is_prompt and (plugin is None or function.name not in plugin.functions)


async def _gated(context: FunctionInvocationContext, next: _Next, parent: ParentRun) -> None:
    """Decide on a function that a function of the run calls itself, and count it."""
    parent.check()
    function = context.function
    name = function.fully_qualified_name
    filters = approval_filters(context.kernel)
    kernel: Any = context.kernel  # its lists of filters are typed in part only
    later = [one for _, one in kernel.function_invocation_filters]
    gate = RunGate(
        parent.gates,
        [one for one in filters if all(one is not other for other in later)],
        functions=lambda: {name: function},
        marked=not filters,
        can_wait=False,
    )
    if gate.watches(name):
        (decision,) = await gate.review([_described(context, parent.tab)], parent.tab.account.state)
        match decision:
            case Deny(reason=reason):
                raise NestedRunRefusedError(f"{name} was refused and did not run: {reason}")
            case Supply(result=result):
                context.result = FunctionResult(function=function.metadata, value=result)
                return
            case Approve(arguments=edited) if edited is not None:
                checked = parse_arguments(json.dumps(dict(edited), default=str), tool_of(function))
                if isinstance(checked, InvalidArguments):
                    raise NestedRunRefusedError(f"{name} did not run: {checked.message}")
                cast("dict[str, Any]", context.arguments).update(checked)
            case _:
                pass
    parent.check()
    if (limit := parent.tab.take_call(name)) is not None:
        raise nothing_left(limit)
    await next(context)


def _described(context: FunctionInvocationContext, tab: Tab) -> ToolCall:
    """Describe a function that is called by another one as interceptors see a model's call."""
    function, state = context.function, tab.account.state
    batch, name = state.batch, function.fully_qualified_name
    assert batch is not None, "a function runs while its batch is open"
    values = cast("dict[str, Any]", context.arguments)
    taken = [one for one in function.parameters if one.name not in INJECTED and one.name in values]
    shown: dict[str, Any] = {str(one.name): values[str(one.name)] for one in taken if one.include_in_function_choices}
    try:
        text = json.dumps(shown, allow_nan=False)
    except (TypeError, ValueError, RecursionError):  # objects of the application, passed as they are
        text = json.dumps(shown, default=str)
    else:
        parsed = parse_arguments(text, tool_of(function))
        if not isinstance(parsed, InvalidArguments):  # what is decided on is what runs
            values.update(parsed)
    arguments: dict[str, Any] = {str(one.name): values[str(one.name)] for one in taken}
    call_id = f"{batch.calls[tab.index].request.id}/{name}"
    digest = digest_of(name, json.loads(json.dumps(arguments, default=str)))
    return ToolCall(
        id=call_id,
        plugin_name=function.plugin_name,
        function_name=function.name,
        fully_qualified_name=name,
        arguments=arguments,
        raw_arguments=text,
        iteration=batch.iteration,
        index=tab.index,
        batch_size=len(batch.calls),
        fingerprint=fingerprint_of(state.run_id, batch.iteration, call_id, digest),
    )
