"""What a front end sends: answers, tools, and the conversation."""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeAlias, TypeVar, cast

from ag_ui.core import (
    AssistantMessage,
    ContentPart,
    Message,
    ResumeEntry,
    RunAgentInput,
    TextPart,
    Tool,
    ToolMessage,
    UserMessage,
)
from semantic_kernel import Kernel
from semantic_kernel.contents import (
    AuthorRole,
    ChatMessageContent,
    FunctionCallContent,
    FunctionResultContent,
    TextContent,
)
from semantic_kernel.functions import (
    KernelFunctionFromMethod,
    KernelParameterMetadata,
    KernelPlugin,
    kernel_function,
)

from planner_ext.approval.decisions import (
    Approve,
    Decision,
    Defer,
    Deny,
    Supply,
    ToolCall,
)
from planner_ext.sk.errors import (
    DecisionRefusedError,
    InvalidHistoryError,
    PlannerInvalidConfigurationError,
)

logger = logging.getLogger(__name__)

PLUGIN = "ag_ui"
"""The plugin of the front end's tools."""

C = TypeVar("C", bound=ToolCall)


# Answers.


Answer: TypeAlias = ResumeEntry | ToolMessage
"""An answer to an interrupt, or the result of a tool of the front end."""


def answers_of(
    run_input: RunAgentInput, pending: Iterable[C], id_of: Callable[[ToolCall], str]
) -> tuple[list[tuple[C, Answer]], bool]:
    """Match the answers in an input with the calls that wait.

    Returns:
        The answered calls, and whether the input also answers a call that does not
        wait.
    """
    entries = {entry.interrupt_id: entry for entry in run_input.resume or ()}
    results = {
        one.tool_call_id: one
        for one in run_input.messages
        if isinstance(one, ToolMessage)
    }
    answered: list[tuple[C, Answer]] = []
    for call in pending:
        answer = (
            results.get(id_of(call))
            if is_tool(call)
            else entries.pop(call.fingerprint, None)
        )
        if answer is not None:
            answered.append((call, answer))
    for unknown in entries:
        logger.warning(
            "Thread %r has no interrupt %r; the answer is ignored.",
            run_input.thread_id,
            unknown,
        )
    return answered, bool(entries)


def decision_of(answer: Answer, call: ToolCall, by: str | None) -> Decision | None:
    """Read one answer; None if it abandons an expired question.

    Raises:
        DecisionRefusedError: If it does not fit the interrupt.
    """
    if isinstance(answer, ToolMessage):
        result = answer.error or text_of(answer.content)
        return Supply(result, by=by)
    if answer.status == "cancelled":
        expired = call.expires_at is not None and datetime.now(UTC) >= call.expires_at
        return None if expired else Deny("the user gave no decision", by=by)
    payload: object = answer.payload
    given = cast("dict[object, object]", payload) if isinstance(payload, dict) else {}
    match given:
        case {"answer": str() as text} if call.kind == "question":
            return Supply(text, by=by)
        case {"approved": False} if call.kind == "function":
            reason = given.get("reason") or ""
            return Deny(str(reason), by=by)
        case {"approved": True} if call.kind == "function":
            edited = given.get("editedArgs")
            if edited is None or isinstance(edited, dict):
                arguments = None if edited is None else cast("dict[str, Any]", edited)
                return Approve(arguments=arguments, by=by, fingerprint=call.fingerprint)
        case _:
            pass
    raise DecisionRefusedError(
        f"The answer to {call.fully_qualified_name} does not have the form of its responseSchema. Nothing ran."
    )


# The tools of the front end.


def is_tool(call: ToolCall) -> bool:
    """Whether a call is one of the front end's tools."""
    return call.fully_qualified_name.startswith(f"{PLUGIN}-")


async def defer_front_end_tools(call: ToolCall) -> Defer | None:
    """Let each call of a tool of the front end wait for its result; an interceptor."""
    return Defer() if is_tool(call) else None


def named_tools(tools: Iterable[Tool]) -> dict[str, Tool]:
    """Name each tool for the model; the last of two with one name counts."""
    named: dict[str, Tool] = {}
    last_of_name = {tool.name: tool for tool in tools}
    for tool in last_of_name.values():
        name = plain = f"{PLUGIN}-{re.sub(r'[^0-9A-Za-z_]', '_', tool.name)}"
        number = 1
        while name in named:
            number += 1
            name = f"{plain}_{number}"
        named[name] = tool
    return named


def check_plugins(kernel: Kernel) -> None:
    """Raise `PlannerInvalidConfigurationError` if the kernel has the plugin of the front end's tools."""
    if PLUGIN in kernel.plugins:
        raise PlannerInvalidConfigurationError(
            f"The plugin name {PLUGIN!r} is reserved for the tools of the front end; the kernel has a plugin of this "
            "name. Rename it."
        )


def with_tools(kernel: Kernel, tools: Mapping[str, Tool]) -> Kernel:
    """Copy a kernel, with functions for the tools."""
    functions = [
        _function(name.removeprefix(f"{PLUGIN}-"), tool) for name, tool in tools.items()
    ]
    return kernel.model_copy(
        update={
            "plugins": {
                **kernel.plugins,
                PLUGIN: KernelPlugin(PLUGIN, functions=functions),
            }
        }
    )


def _function(name: str, tool: Tool) -> KernelFunctionFromMethod:
    @kernel_function(name=name, description=tool.description)
    async def not_here() -> str:
        raise PlannerInvalidConfigurationError(
            f"{tool.name} runs at the front end, which answers its calls."
        )

    schema = _object(tool.parameters)
    listed: object = schema.get("required")
    required = cast("list[object]", listed) if isinstance(listed, list) else []
    parameters = [
        KernelParameterMetadata(
            name=parameter,
            is_required=parameter in required,
            type=None,
            schema_data=_object(data),
        )
        for parameter, data in _object(schema.get("properties")).items()
    ]
    return KernelFunctionFromMethod(not_here, PLUGIN, parameters=parameters)


def _object(schema: object) -> dict[str, Any]:
    if isinstance(schema, dict):
        return cast("dict[str, Any]", schema)
    return {}


# Messages.


def goal_of(run_input: RunAgentInput) -> str:
    """Return the goal of a new run.

    Raises:
        DecisionRefusedError: If the input answers an interrupt, and no run waits.
        InvalidHistoryError: If the last message is not a user's.
    """
    messages = run_input.messages
    if run_input.resume:
        raise DecisionRefusedError(
            f"Nothing waits on the thread {run_input.thread_id!r}: it was answered before, or the server has no "
            "record of it. Nothing ran."
        )
    if not messages or not isinstance(messages[-1], UserMessage):
        raise InvalidHistoryError(
            "Expected a message of the user as the last one; send one to begin a run."
        )
    return text_of(messages[-1].content)


def context_of(run_input: RunAgentInput) -> Iterator[ChatMessageContent]:
    """Convert what the application shows for the model."""
    context = "\n".join(
        f"{each.description}: {each.value}" for each in run_input.context or ()
    )
    if context:
        yield ChatMessageContent(
            role=AuthorRole.USER, content=f"The application shows:\n{context}"
        )


def history_of(
    messages: Sequence[Message], tools: Mapping[str, Tool]
) -> Iterator[ChatMessageContent]:
    """Convert the conversation for the model, each result directly after its call.

    Calls without a result, and other messages, are dropped. Of two results for one call
    the newer one counts.
    """
    sent = {tool.name: name for name, tool in tools.items()}
    results = {
        one.tool_call_id: one.error or text_of(one.content)
        for one in messages
        if isinstance(one, ToolMessage)
    }
    for message in messages:
        match message:
            case UserMessage():
                yield ChatMessageContent(
                    role=AuthorRole.USER, content=text_of(message.content)
                )
            case AssistantMessage():
                calls = [
                    FunctionCallContent(
                        id=made.id,
                        name=sent.get(made.function.name, made.function.name),
                        arguments=made.function.arguments,
                    )
                    for made in message.tool_calls or ()
                    if made.id in results
                ]
                items: list[Any] = (
                    [TextContent(text=message.content)] if message.content else []
                )
                if items or calls:
                    yield ChatMessageContent(
                        role=AuthorRole.ASSISTANT, items=[*items, *calls]
                    )
                for call in calls:
                    result = FunctionResultContent(
                        id=call.id, name=call.name, result=results[call.id or ""]
                    )
                    yield ChatMessageContent(role=AuthorRole.TOOL, items=[result])
            case _:
                pass


def text_of(content: str | list[ContentPart]) -> str:
    """Join the texts of a message."""
    return (
        content
        if isinstance(content, str)
        else "".join(one.text for one in content if isinstance(one, TextPart))
    )
