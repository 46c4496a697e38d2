"""The kernel as a function of a run gets it: the same functions and filters, and services that are charged to the run.

A prompt function, and a function that takes ``kernel`` or ``service``, may make requests to a model, and call other
functions. On its view of the kernel it does both in the name of its call:

- Each request to a chat or text completion service is charged to the run before it is sent, tokens and cost
  after it; functions that are called for it stand under the run's gate. With nothing left of the budget, less the
  request that is kept for the run's answer, it is refused with `LimitReachedError`.
- Each function that it calls (``kernel.invoke``, ``{{plugin.function}}`` in a template) is put before the run's
  interceptors, policies and ``@requires_approval``, and counted in ``max_tool_calls``. What is denied, or would wait
  for a person, raises `NestedRunRefusedError`.
- Once the call has ended, both are refused.

Embeddings, images and audio are not round trips, and are not counted. A run that a function keeps in a store
(`planner_ext.durable.Runs`) may outlive the call: it has its own budget and policies. What cannot be seen, because it
does not pass this kernel: an SDK called by hand, and the application's own kernel where a function holds it (in a
closure, or as ``self._kernel``). The way out: take ``kernel: Kernel`` as a parameter, or register
`FunctionInvokingChatCompletion` as the service of the kernel that is held; it finds the call by a context variable,
and charges it.
"""

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator, MutableMapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Any, cast

from pydantic import PrivateAttr
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.prompt_execution_settings import PromptExecutionSettings
from semantic_kernel.connectors.ai.text_completion_client_base import TextCompletionClientBase
from semantic_kernel.contents import AuthorRole, ChatMessageContent, StreamingTextContent, TextContent
from semantic_kernel.filters.functions.function_invocation_context import FunctionInvocationContext
from semantic_kernel.functions import FunctionResult, KernelFunction
from semantic_kernel.functions.kernel_function_from_method import KernelFunctionFromMethod
from semantic_kernel.services.ai_service_client_base import AIServiceClientBase

from planner_ext.approval.decisions import Approve, Deny, Supply, ToolCall, approval_required, digest_of, fingerprint_of
from planner_ext.core.accounts import Tab
from planner_ext.core.limits import Consumption
from planner_ext.core.values import Usage
from planner_ext.sk.arguments import INJECTED, InvalidArguments, parameters_of, parse_arguments
from planner_ext.sk.budget import Price
from planner_ext.sk.errors import NestedRunRefusedError
from planner_ext.sk.filtered_gate import FilteredGate, approval_filters
from planner_ext.sk.nested import Around, NestedGate, NobodyWaits, around_of, nothing_left
from planner_ext.sk.prices import PromptSize, checked_price, price_of
from planner_ext.sk.usage import merge_reported, read_iterations, usage_in

__all__ = ["Charge", "ChargedTextCompletion", "Wrap", "charged", "may_ask", "tab_in", "view_of", "whole"]

# Single requests that a function of a run makes: charged to its call before they are sent, tokens and cost after.

Charge = Callable[[ChatMessageContent | None], None]
"""Called with the reply to a request, or with None where there was no reply."""


@contextmanager
def charged(
    around: Around | None,
    service: AIServiceClientBase,
    settings: PromptExecutionSettings,
    price: Price | None,
    sent: Sequence[ChatMessageContent],
) -> Generator[Charge]:
    """Charge one request to the call that makes it; outside of every run nothing is charged.

    Args:
        around: The call, and its run.
        service: Which is asked.
        settings: Of the request.
        price: How the service counts cost; None is as the run around does.
        sent: The messages of the request, without its functions. Where tokens or cost are limited, what the reply does
            not report of its tokens is estimated from them; and so are those of a request that nobody waits for.

    Yields:
        What has to be called with the reply.

    Raises:
        LimitReachedError: If nothing is left for the request.
        NestedRunRefusedError: If the call has ended, or its run is to stop.
    """
    if around is None:
        yield lambda _: None
        return
    around.check()
    left = around.tab.left()
    counted = price_of(service, settings, price or around.price, left.cost)
    model: str = getattr(settings, "ai_model_id", None) or service.ai_model_id
    counted = None if counted is None else checked_price(counted, model)

    def spent(reply: ChatMessageContent) -> Usage:
        usage = usage_in(reply)
        if counted is not None or left.tokens is not None:
            usage = PromptSize(service, settings, 0).completed(usage, sent, None, reply)
        return usage if counted is None else replace(usage, cost=counted(reply.ai_model_id or model, usage))

    request, expected = object(), spent(ChatMessageContent(role=AuthorRole.ASSISTANT, content=""))
    if (limit := around.tab.take_request()) is not None:
        raise nothing_left(limit)
    around.tab.expect(request, expected)

    def charge(reply: ChatMessageContent | None) -> None:
        if reply is not None:
            more = Consumption(iterations=read_iterations(reply.metadata) - 1, usage=spent(reply))
            around.tab.charge(more, instead_of=request)

    try:
        yield charge
    except Exception:
        around.tab.charge(Consumption(), instead_of=request)
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
        """Name the inner service's settings class."""
        return self._inner.get_prompt_execution_settings_class()

    def service_url(self) -> str | None:
        """Give the inner service's URL."""
        return self._inner.service_url()

    async def get_text_contents(self, prompt: str, settings: PromptExecutionSettings) -> list[TextContent]:
        """Ask the inner service.

        Raises:
            LimitReachedError: If nothing is left of the run's budget for the request.
            NestedRunRefusedError: If the call has ended, or its run is to stop.
        """
        with charged(around_of(self._tab), self._inner, settings, None, [_said(prompt)]) as charge:
            texts = await self._inner.get_text_contents(prompt, settings)
            charge(_said("".join(text.text for text in texts), texts[0]) if texts else None)
            return texts

    async def get_streaming_text_contents(
        self, prompt: str, settings: PromptExecutionSettings
    ) -> AsyncGenerator[list[StreamingTextContent], Any]:
        """Ask the inner service for a stream; raises as `get_text_contents` does."""
        last: StreamingTextContent | None = None
        usage: Any = None
        said = ""
        with charged(around_of(self._tab), self._inner, settings, None, [_said(prompt)]) as charge:
            try:
                async with aclosing(self._inner.get_streaming_text_contents(prompt, settings)) as stream:
                    async for chunks in stream:
                        for chunk in chunks:
                            last, said = chunk, said + (chunk.text or "")
                            usage = merge_reported(usage, chunk.metadata.get("usage"))
                        yield chunks
            finally:  # of a stream that is left early, what came
                if last is not None:
                    charge(_said(said, last.model_copy(update={"metadata": {**last.metadata, "usage": usage}})))


def _said(text: str, content: TextContent | None = None) -> ChatMessageContent:
    """Write a text as a message, with what came with it."""
    message = ChatMessageContent(role=AuthorRole.ASSISTANT, content=text)
    if content is None:
        return message
    return message.model_copy(update={"metadata": content.metadata, "inner_content": content.inner_content})


Wrap = Callable[[AIServiceClientBase, Tab], AIServiceClientBase]
"""Wraps a service so that its requests are charged to a call; others are returned as they are."""

_Next = Callable[[FunctionInvocationContext], Awaitable[None]]


def whole(kernel: Kernel) -> Kernel:
    """Give the kernel that a view is of; another kernel as it is."""
    services = kernel.services
    return services.kernel if isinstance(services, _Services) else kernel


def tab_in(kernel: Kernel) -> Tab | None:
    """Find the call that a view belongs to; None for another kernel, and for what is not one."""
    services: object = getattr(kernel, "services", None)
    return services.tab if isinstance(services, _Services) else None


def may_ask(function: KernelFunction) -> bool:
    """Whether a function may make requests to a model with what it is given: a prompt, or one that takes the kernel."""
    if not isinstance(function, KernelFunctionFromMethod):
        return True
    return any(parameter.name in ("kernel", "service") for parameter in function.parameters)


def view_of(kernel: Kernel, tab: Tab, wrap: Wrap) -> Kernel:
    """Make the view of a kernel for one invocation of a function, in the name of its call.

    What the function adds to its plugins, the kernel itself has, too; services that it adds stay in the view.
    """
    mark, gate = _filters(tab)
    filters: list[Any] = kernel.function_invocation_filters  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return Kernel.model_construct(
        plugins=kernel.plugins,
        services=_Services(kernel, tab, wrap),
        ai_service_selector=kernel.ai_service_selector,
        function_invocation_filters=[(id(gate), gate), *filters, (id(mark), mark)],  # the last is the outermost
        prompt_rendering_filters=kernel.prompt_rendering_filters,  # pyright: ignore[reportUnknownMemberType]
        auto_function_invocation_filters=kernel.auto_function_invocation_filters,  # pyright: ignore[reportUnknownMemberType]
    )


class _Services(MutableMapping[str, AIServiceClientBase]):
    """The services of a view, each wrapped when it is first looked at.

    Attributes:
        kernel: That the view is of.
        tab: Of the call that the view belongs to.
    """

    def __init__(self, kernel: Kernel, tab: Tab, wrap: Wrap) -> None:
        self.kernel = kernel
        self.tab = tab
        self._services = dict(kernel.services)
        self._wrapped: dict[str, AIServiceClientBase] = {}
        self._wrap = wrap

    def __getitem__(self, key: str) -> AIServiceClientBase:
        if key not in self._wrapped:
            self._wrapped[key] = self._wrap(self._services[key], self.tab)
        return self._wrapped[key]

    def __setitem__(self, key: str, value: AIServiceClientBase) -> None:
        self._services[key] = value
        self._wrapped.pop(key, None)

    def __delitem__(self, key: str) -> None:
        del self._services[key]
        self._wrapped.pop(key, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._services)

    def __len__(self) -> int:
        return len(self._services)


def _filters(tab: Tab) -> tuple[Callable[..., Awaitable[None]], Callable[..., Awaitable[None]]]:
    """Make the outermost filter of a view, which knows the run's own invocation, and the innermost, its gate."""
    own: list[FunctionInvocationContext] = []

    async def mark(context: FunctionInvocationContext, next: _Next) -> None:
        if not own:
            own.append(context)
        await next(context)

    async def gate(context: FunctionInvocationContext, next: _Next) -> None:
        around = around_of(tab)
        if (own and context is own[0]) or around is None or _is_inline(context):
            return await next(context)
        return await _gated(context, next, around)

    return mark, gate


def _is_inline(context: FunctionInvocationContext) -> bool:
    """Whether a prompt runs that is not a function of the kernel, as of ``invoke_prompt``: a request, not a call."""
    function = context.function
    plugin = context.kernel.plugins.get(function.plugin_name)
    return function.is_prompt and (plugin is None or function.name not in plugin.functions)


async def _gated(context: FunctionInvocationContext, next: _Next, around: Around) -> None:
    """Decide on a function that a function of the run calls by itself, and count it."""
    around.check()
    function = context.function
    name = function.fully_qualified_name
    kernel: Any = context.kernel  # its lists of filters are typed in part only
    filters = approval_filters(kernel)
    mark = None if filters else approval_required(getattr(function, "method", None))
    gate = NobodyWaits(
        FilteredGate(
            NestedGate(around.gates, None, marked=lambda _: mark),
            [one for one in filters if all(one is not other for _, other in kernel.function_invocation_filters)],
            offered=lambda: {name: function},
            expires_in=None,
        )
    )
    if gate.watches(name):
        (decision,) = await gate.review([_described(context, around.tab)], around.tab.account.state)
        if isinstance(decision, Deny):
            raise NestedRunRefusedError(f"{name} was refused and did not run: {decision.reason}")
        if isinstance(decision, Supply):
            context.result = FunctionResult(function=function.metadata, value=decision.result)
            return
        if isinstance(decision, Approve) and decision.arguments is not None:
            _edit(context, decision.arguments)
    around.check()
    if (limit := around.tab.take_call(name)) is not None:
        raise nothing_left(limit)
    await next(context)


def _described(context: FunctionInvocationContext, tab: Tab) -> ToolCall:
    """Show a function that is called by another one as interceptors see a model's call."""
    function, state = context.function, tab.account.state
    values = cast("dict[str, Any]", context.arguments)
    taken = [one for one in function.parameters if one.name not in INJECTED and one.name in values]
    given: dict[str, Any] = {str(one.name): values[str(one.name)] for one in taken if one.include_in_function_choices}
    try:
        text = json.dumps(given, allow_nan=False)
    except (TypeError, ValueError, RecursionError):  # objects of the application, passed as they are
        text, parsed = json.dumps(given, default=str), given
    else:
        parsed = parse_arguments(text, parameters_of(function))
    if not isinstance(parsed, InvalidArguments):  # what is decided on is what runs
        values.update(parsed)
    given = {str(one.name): values[str(one.name)] for one in taken}
    batch = state.batch
    assert batch is not None, "a function runs while its batch is open"
    call = batch.calls[tab.index].request
    digest = digest_of(function.fully_qualified_name, json.loads(json.dumps(given, default=str)))
    call_id = f"{call.id}/{function.fully_qualified_name}"
    return ToolCall(
        id=call_id,
        plugin_name=function.plugin_name,
        function_name=function.name,
        fully_qualified_name=function.fully_qualified_name,
        arguments=given,
        raw_arguments=text,
        iteration=batch.iteration,
        index=tab.index,
        batch_size=len(batch.calls),
        fingerprint=fingerprint_of(state.run_id, batch.iteration, call_id, digest),
    )


def _edit(context: FunctionInvocationContext, arguments: Any) -> None:
    """Put a decision's arguments in place of the given ones; what does not pass is refused."""
    checked = parse_arguments(json.dumps(dict(arguments), default=str), parameters_of(context.function))
    if isinstance(checked, InvalidArguments):
        raise NestedRunRefusedError(f"{context.function.fully_qualified_name} did not run: {checked.message}")
    cast("dict[str, Any]", context.arguments).update(checked)
