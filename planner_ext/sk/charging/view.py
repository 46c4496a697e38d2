"""What a function of a run gets of that run: a view of the kernel, charged to the run and decided by its gate.

A prompt function, and one that takes ``kernel`` or ``service``, gets a view of the kernel
with charged services; an agent runs with a view of its own kernel.

- Each request to a chat or text completion service is charged before it is sent, tokens
  and cost after it; what a failed one is not charged for, `is_free` says. When only the
  request for the answer is left, it raises `LimitReachedError`.
- Each function that it calls passes the run's gate, and counts in ``max_tool_calls``.
  One that is denied, or would wait for a person, raises `NestedRunRefusedError`.
- Once the call has ended, both are refused.

Embeddings, images and audio are not counted, nor a run that a function keeps in a
store. Requests of an SDK, and of a kernel that the function holds itself, are not seen:
take ``kernel: Kernel`` as a parameter, or put a `FunctionInvokingChatCompletion` into
that kernel.
"""

import inspect
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import update_wrapper
from types import CellType, FunctionType, MethodType
from typing import Any, cast

from pydantic import PrivateAttr
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai import PromptExecutionSettings
from semantic_kernel.connectors.ai.text_completion_client_base import (
    TextCompletionClientBase,
)
from semantic_kernel.contents import (
    AuthorRole,
    ChatMessageContent,
    StreamingTextContent,
    TextContent,
)
from semantic_kernel.filters import FunctionInvocationContext
from semantic_kernel.functions import (
    FunctionResult,
    KernelFunction,
    KernelFunctionFromPrompt,
)
from semantic_kernel.services.ai_service_client_base import AIServiceClientBase

from planner_ext.approval.decisions import (
    Deny,
    Supply,
    ToolCall,
    approval_required,
)
from planner_ext.core.accounts import SharedBudgets, Tab
from planner_ext.core.facts import is_free
from planner_ext.core.limits import Price
from planner_ext.core.values import Usage, start_of, updated
from planner_ext.engine.concurrency import contained
from planner_ext.sk.charging.filters import (
    approval_filters,
    converted_values,
    tool_call,
)
from planner_ext.sk.charging.nested import (
    ChargedServices,
    ParentRun,
    RunGate,
    Wrap,
    current_parent_run,
    limit_reached,
    nothing_left,
    request_meter,
)
from planner_ext.sk.errors import NestedRunRefusedError
from planner_ext.sk.functions.conversion import InvalidArguments
from planner_ext.sk.functions.execution import Next, in_place, runnable
from planner_ext.sk.functions.toolset import agent_of, contents_of, tool_of
from planner_ext.sk.messages import (
    merge_reported,
    read_iterations,
    usage_in,
)

Charge = Callable[[ChatMessageContent | None], None]
"""Called with the reply to a request, or with None where there was no reply."""


@asynccontextmanager
async def charged(
    tab: Tab | None,
    service: AIServiceClientBase,
    settings: PromptExecutionSettings,
    sent: Sequence[ChatMessageContent],
    price: Price | None = None,
    *,
    shared_by: Callable[[SharedBudgets | None], SharedBudgets | None] | None = None,
) -> AsyncGenerator[Charge]:
    """Charge one request to the call that makes it, and to shared budgets; yields what is called with the reply.

    Unreported tokens, and those of an abandoned request, are estimated from the
    ``sent`` messages. Without a ``price`` that of the run around applies; ``shared_by``
    adds the service's own budgets.

    Raises:
        LimitReachedError: If nothing is left for the request.
        NestedRunRefusedError: If the call has ended, or its run is to stop.
    """
    parent = current_parent_run(tab)
    around = None
    if parent is not None:
        around = parent.tab.account.shared
    shared = around if shared_by is None else shared_by(around)
    if parent is None and shared is None:
        yield lambda _: None
        return
    payer = _Payer(None if parent is None else parent.tab, shared)
    if parent is not None:
        parent.check()
        parent.tab.bring(sent)
        price = price or parent.price
    meter = request_meter(
        service, settings, price=price, around=payer.tab, shared=shared
    )
    await payer.take_request(expected=meter.used(Usage(), sent, None, None))

    replied = False

    def charge(reply: ChatMessageContent | None) -> None:
        nonlocal replied
        if reply is not None:
            replied = True
            usage = meter.used(usage_in(reply), sent, None, reply)
            payer.charge(replace(usage, iterations=read_iterations(reply.metadata) - 1))

    try:
        yield charge
    except Exception as error:
        payer.charge(Usage() if replied else payer.charged_for(error))
        raise
    finally:
        payer.close()
        if shared is not None and shared is not around:
            await shared.settle(kept=0)


class _Payer:
    """What pays for one request: the call that makes it, the shared budgets, or both."""

    def __init__(self, tab: Tab | None, shared: SharedBudgets | None) -> None:
        self.tab = tab
        self._shared = shared
        self._spent = Usage()
        self._expected = Usage()
        self._is_again = tab is not None and tab.has_failed

    async def take_request(self, *, expected: Usage) -> None:
        """Take one request; if it is abandoned, it has used what is expected."""
        tab = self.tab
        self._expected = expected
        if tab is None:
            await _take_shared(self._shared, Usage(iterations=1))
            return
        limit = tab.take_request()
        if limit is not None:
            raise nothing_left(limit)
        await _take_shared(self._shared, Usage(iterations=1), tab)
        tab.expect(self, expected)
        await tab.record_request()

    def charge(self, spent: Usage) -> None:
        """Replace what was expected by what was spent; add what is charged later."""
        self._spent += spent
        self._expected = Usage()
        if self.tab is not None:
            self.tab.charge(spent, instead_of=self)

    def charged_for(self, error: Exception) -> Usage:
        """Return what a request without a reply is charged, besides the one that was taken."""
        from planner_ext.sk.chat.faults import failure_of  # noqa: PLC0415  (only where a request fails)

        kept = False
        if self.tab is not None:
            kept = self.tab.is_kept
            self.tab.has_failed = True
        free = is_free(failure_of(error), kept=kept, again=self._is_again)
        return _NOT_MADE if free else Usage()

    def close(self) -> None:
        if self._shared is not None:
            self._shared.charge(self._spent + self._expected)


_NOT_MADE = Usage() - Usage(iterations=1)
"""Takes back the request that was taken."""


async def _take_shared(
    shared: SharedBudgets | None, taken: Usage, tab: Tab | None = None
) -> None:
    """Reserve in the shared budgets; what they refuse goes back to the tab."""
    if shared is None:
        return
    refused = await shared.reserve(requests=taken.iterations, calls=taken.tool_calls)
    if refused is not None:
        if tab is not None:
            tab.charge(Usage() - taken)
            raise nothing_left(str(refused.limit))
        raise limit_reached(
            str(refused.limit), f"{refused.reason} The request was not sent."
        )


class ChargedTextCompletion(TextCompletionClientBase):
    """A text completion service that charges its requests to a call."""

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

    async def get_text_contents(
        self, prompt: str, settings: PromptExecutionSettings
    ) -> list[TextContent]:
        """Ask the inner service; raises as `charged` does."""
        async with charged(
            self._tab, self._inner, settings, [_message(prompt)]
        ) as charge:
            texts = await self._inner.get_text_contents(prompt, settings)
            charge(
                _message("".join(text.text for text in texts), texts[0])
                if texts
                else None
            )
            return texts

    async def get_streaming_text_contents(
        self, prompt: str, settings: PromptExecutionSettings
    ) -> AsyncGenerator[list[StreamingTextContent], Any]:
        """Ask the inner service for a stream; raises as `charged` does."""
        last: StreamingTextContent | None = None
        usage: Any = None
        text = ""
        async with charged(
            self._tab, self._inner, settings, [_message(prompt)]
        ) as charge:
            try:
                async with aclosing(
                    self._inner.get_streaming_text_contents(prompt, settings)
                ) as stream:
                    async for chunks in stream:
                        for chunk in chunks:
                            last = chunk
                            text = text + (chunk.text or "")
                            usage = merge_reported(usage, chunk.metadata.get("usage"))
                        yield chunks
            finally:  # of a stream that is left early, the chunks that came
                if last is not None:
                    charge(
                        _message(
                            text,
                            last.model_copy(
                                update={"metadata": {**last.metadata, "usage": usage}}
                            ),
                        )
                    )


def _message(text: str, content: TextContent | None = None) -> ChatMessageContent:
    message = ChatMessageContent(role=AuthorRole.ASSISTANT, content=text)
    if content is None:
        return message
    return message.model_copy(
        update={"metadata": content.metadata, "inner_content": content.inner_content}
    )


def with_own_view(function: KernelFunction, tab: Tab, wrap: Wrap) -> KernelFunction:
    """Copy an agent's function so that a copy of the agent runs, with a view of its kernel.

    Another function is returned itself.
    """
    if isinstance(function, KernelFunctionFromPrompt) and tab.begun() is not None:
        from planner_ext.sk.charging.again import without_rendering  # noqa: PLC0415  (only where it is called again)

        return without_rendering(function, tab)
    method = getattr(function, "method", None)
    agent = None if method is None else agent_of(method)
    if agent is None:
        return function
    copied = agent.model_copy(
        update={"kernel": view_of(agent.kernel, tab, wrap, invokes=False)}
    )
    # What it remembers stays its own.
    object.__setattr__(copied, "__pydantic_private__", agent.__pydantic_private__)
    if tab.begun() is not None:
        from planner_ext.sk.charging.again import not_rendered  # noqa: PLC0415  (only where a function is called again)

        vars(copied)["format_instructions"] = not_rendered(tab)
    return function.model_copy(update={"method": _held_by(method, agent, copied)})


def _held_by(method: Any, agent: object, other: object) -> Any:
    if inspect.ismethod(method):
        return MethodType(method.__func__, other)
    cells = [
        CellType(other) if contents_of(cell) is agent else cell
        for cell in method.__closure__
    ]
    copied = FunctionType(
        method.__code__,
        method.__globals__,
        method.__name__,
        method.__defaults__,
        closure=tuple(cells),
    )
    copied.__kwdefaults__ = method.__kwdefaults__
    return update_wrapper(copied, method)


def view_of(kernel: Kernel, tab: Tab, wrap: Wrap, *, invokes: bool = True) -> Kernel:
    """Make the view of a kernel for one call of a function, which ``invokes`` with it unless it is an agent.

    Plugins are the kernel's own; services that the function adds stay in the view.
    """
    own: FunctionInvocationContext | None = None

    async def mark(context: FunctionInvocationContext, next: Next) -> None:
        """Remember the run's own invocation, which its gate has decided."""
        nonlocal own
        own = context if own is None else own
        # So that the function that called this one reads an error.
        await contained(next(context))

    async def decide(context: FunctionInvocationContext, next: Next) -> None:
        parent = current_parent_run(tab)
        if context is own or parent is None or _is_inline(context):
            await next(context)
        else:
            await _decide_and_run(context, next, parent, wrap)

    marks = [(id(mark), mark)] if invokes else []
    listed: Any = kernel  # its lists of filters are typed in part only
    return Kernel.model_construct(
        plugins=kernel.plugins,
        services=ChargedServices(kernel, tab, wrap),
        ai_service_selector=kernel.ai_service_selector,
        # The last one is the outermost.
        function_invocation_filters=[
            (id(decide), decide),
            *listed.function_invocation_filters,
            *marks,
        ],
        prompt_rendering_filters=listed.prompt_rendering_filters,
        auto_function_invocation_filters=listed.auto_function_invocation_filters,
    )


def _is_inline(context: FunctionInvocationContext) -> bool:
    """Whether a prompt runs that the kernel does not have: a request, not a call."""
    function = context.function
    plugin = context.kernel.plugins.get(function.plugin_name)
    unknown = plugin is None or function.name not in plugin.functions
    return function.is_prompt and unknown and approval_required(function) is None


async def _decide_and_run(
    context: FunctionInvocationContext, next: Next, parent: ParentRun, wrap: Wrap
) -> None:
    parent.check()
    if not await _is_to_run(context, parent):
        return
    parent.check()
    function = context.function
    tool = tool_of(context.function)
    tab = parent.tab
    limit = tab.take_call(tool.name)
    if limit is not None:
        raise nothing_left(limit)
    await _take_shared(tab.account.shared, start_of(tool.name), tab)
    await tab.record_call(tool.name)
    target = with_own_view(function, tab, wrap)
    if tool.unasked or tool.loose:
        target = runnable(target, tool, threads=False)
    if target is not function:
        next = in_place(next, function, target, streaming=context.is_streaming)
    await next(context)


async def _is_to_run(context: FunctionInvocationContext, parent: ParentRun) -> bool:
    """Decide on a call inside a function; False where its result was supplied."""
    function = context.function
    tool = tool_of(context.function)
    if tool.refusal:
        raise NestedRunRefusedError(tool.refusal)
    filters = approval_filters(context.kernel)
    kernel: Any = context.kernel  # its lists of filters are typed in part only
    later = [one for _, one in kernel.function_invocation_filters]
    gate = RunGate(
        parent.gates,
        [one for one in filters if all(one is not other for other in later)],
        functions=lambda: {tool.name: function},
        marked=not filters,
        can_wait=False,
        tab=parent.tab,
    )
    if not gate.watches(tool.name):
        return True
    call = _described(context, parent.tab)
    # Sticky decisions are for calls of the run itself.
    state = updated(parent.tab.account.state, sticky=frozenset())
    (reviewed,) = await gate.review([call], state)
    match reviewed.decision:
        case Deny(reason=reason):
            raise NestedRunRefusedError(
                f"{tool.name} was refused and did not run: {reason}"
            )
        case Supply(result=result):
            context.result = FunctionResult(function=function.metadata, value=result)
            return False
        case _ if reviewed.arguments is not None:
            values = cast("dict[str, Any]", context.arguments)
            for given in tool.parameters.keys() - reviewed.arguments.keys():
                values.pop(given, None)  # what is decided on is what runs
            tool.put(reviewed.arguments, values)
        case _:
            pass
    return True


def _described(context: FunctionInvocationContext, tab: Tab) -> ToolCall:
    """Describe a function that another one calls as interceptors see a model's call."""
    function = context.function
    state = tab.account.state
    tool = tool_of(context.function)
    batch = state.batch
    assert batch is not None, "a function runs while its batch is open"
    values = cast("dict[str, Any]", context.arguments)
    names = [
        str(one.name)
        for one in function.parameters
        if one.name not in tool.hidden and one.name in values
    ]
    shown = {name: values[name] for name in names if name in tool.parameters}
    converted = converted_values(shown, tool)
    if not isinstance(converted, InvalidArguments):
        values.update(converted)  # what is decided on is what runs
    return tool_call(
        function,
        {name: values[name] for name in names},
        run_id=state.run_id,
        call_id=f"{batch.calls[tab.index].request.id}/{tool.name}",
        raw_arguments=json.dumps(shown, default=str),
        iteration=batch.iteration,
        index=tab.index,
        batch_size=len(batch.calls),
    )
