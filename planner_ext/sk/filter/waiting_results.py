"""Calls of a stock kernel that wait for a person: their results in the history, and the decisions on them.

The fingerprint in a placeholder result's metadata binds it to its conversation, its
place there, the function and the arguments.
"""

import hashlib
import json
import uuid
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, cast

from semantic_kernel import Kernel
from semantic_kernel.contents import (
    AuthorRole,
    ChatHistory,
    ChatMessageContent,
    FunctionCallContent,
    FunctionResultContent,
)
from semantic_kernel.exceptions import KernelException
from semantic_kernel.filters import AutoFunctionInvocationContext
from semantic_kernel.functions import KernelFunction

from planner_ext.approval.decisions import (
    Approve,
    Decision,
    Defer,
    Deny,
    MadeDecision,
    Supply,
    ToolCall,
    digest_of,
    json_object,
    problem_of,
    takes_no_more,
)
from planner_ext.core.errors import shown, way_out
from planner_ext.core.state import path_of
from planner_ext.engine.ports import Reviewed
from planner_ext.sk.errors import DecisionRefusedError
from planner_ext.sk.functions.conversion import InvalidArguments, parse_object
from planner_ext.sk.functions.execution import result_text
from planner_ext.sk.functions.toolset import parse_edited, tool_of
from planner_ext.sk.messages import calls_of, text_of

_WAITING: Final = "This call waits for a person's approval and has not run: "
"""The model reads this of a call that waits; its function, fingerprint and question follow."""

_MARK: Final = "planner_ext.waiting"
"""The key of the metadata of a waiting call's result; no function's text gets there."""


_ASKED: Final = "planner_ext.asked"
"""The key of an edited call's metadata: the arguments that the model asked for, as JSON text."""


@dataclass(frozen=True, slots=True)
class WaitingResult:
    """A call that waits, found by its result.

    Attributes:
        item: The result in the history.
        place: The call's place in the conversation.
    """

    item: FunctionResultContent
    pending: ToolCall
    call: FunctionCallContent
    place: str
    question: Defer

    @property
    def is_late(self) -> bool:
        """Whether the question has expired."""
        expires_at = self.pending.expires_at
        return expires_at is not None and datetime.now(UTC) >= expires_at


@dataclass(frozen=True, slots=True)
class DecidedCall:
    """A decision that can be taken; with function and arguments where it approves."""

    waiting: WaitingResult
    decision: Decision
    function: KernelFunction | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])


def decided_calls(
    kernel: Kernel,
    history: ChatHistory,
    decisions: Mapping[str, MadeDecision],
    taken: Container[str],
) -> list[DecidedCall]:
    """Find the waiting call of each decision, by id or fingerprint; refuse all if one cannot be taken."""
    decided: list[DecidedCall] = []
    waiting = waiting_results(history)
    for name, made in decisions.items():
        decision = made.decision
        found = _named(waiting, name)
        if (
            len(found) > 1
            and isinstance(decision, Approve)
            and decision.fingerprint is not None
        ):
            found = [
                one for one in found if one.pending.fingerprint == decision.fingerprint
            ]
        one = _checked(kernel, name, decision, found)
        if one.waiting.pending.fingerprint in taken:
            raise DecisionRefusedError(
                f"The call {name!r} was decided before, in another copy of this history."
            )
        if any(one.waiting is other.waiting for other in decided):
            raise DecisionRefusedError(
                f"Two decisions were given for the call {name!r}; give one."
            )
        decided.append(one)
    return decided


def _named(waiting: Sequence[WaitingResult], name: str) -> list[WaitingResult]:
    """Find calls by fingerprint, which no model can choose; else by id or path."""
    by_fingerprint = [one for one in waiting if one.pending.fingerprint == name]
    return by_fingerprint or [
        one for one in waiting if name in (one.pending.id, one.pending.path)
    ]


def _checked(
    kernel: Kernel, name: str, decision: Decision, found: Sequence[WaitingResult]
) -> DecidedCall:
    if not found:
        raise DecisionRefusedError(
            f"A decision was given for the call {name!r}, which does not wait for one."
        )
    if len(found) > 1:
        fingerprints = ", ".join(one.pending.fingerprint for one in found)
        raise DecisionRefusedError(
            f"The id {name!r} waits {len(found)} times in this history. Decide by the fingerprint: {fingerprints}."
        )
    if not isinstance(decision, Approve | Deny | Supply):
        raise DecisionRefusedError(
            f"The call {name!r} was answered {shown(decision)}; expected Approve, Deny or Supply."
            f"{way_out('decision', decision)}"
        )
    if found[0].is_late:
        raise DecisionRefusedError(
            f"The decision on {name!r} came too late: the question expired. Resume without it to let the model know."
        )
    problem = problem_of(decision)
    if problem is not None:
        raise DecisionRefusedError(
            f"The decision on {name!r} cannot be taken: {problem}. The call still waits."
        )
    if isinstance(decision, Approve):
        return _approved(kernel, name, decision, found[0])
    return DecidedCall(found[0], decision)


def _approved(
    kernel: Kernel, name: str, decision: Approve, waiting: WaitingResult
) -> DecidedCall:
    pending = waiting.pending
    called = waiting.pending.fully_qualified_name
    if decision.fingerprint not in (None, pending.fingerprint):
        raise DecisionRefusedError(
            f"The approval of {name!r} was given for another call or other arguments."
        )
    try:
        function = kernel.get_function_from_fully_qualified_function_name(called)
    except KernelException as error:
        raise DecisionRefusedError(
            f"{called} was to run, and this kernel has no such function. Resume with the kernel it was asked for."
        ) from error
    if not takes_no_more(pending.signature, tool_of(function).signature):
        raise DecisionRefusedError(
            f"The call {name!r} is no longer what was asked about: the parameters of {called} changed. "
            "Deny it, or resume with the kernel it was asked for."
        )
    if decision.arguments is None:
        return DecidedCall(waiting, decision, function, pending.arguments)
    edited = parse_edited(decision.arguments, tool_of(function))
    if isinstance(edited, InvalidArguments):
        raise DecisionRefusedError(
            f"The arguments of {name!r} cannot be used: {edited.message}"
        )
    return DecidedCall(waiting, decision, function, edited)


def waiting_result(
    context: AutoFunctionInvocationContext, call: ToolCall, question: Defer
) -> tuple[str, dict[str, Any]] | None:
    """Write a waiting call's result; None if a filter replaced its function."""
    history = context.chat_history
    content = context.function_call_content
    if content is None or not _names(content, call.fully_qualified_name):
        return None
    places = [] if history is None else list(_placed_calls(history))
    named = [place for one, place in places if one.id == call.id]
    exact = [place for one, place in places if one is content]
    place = ["", *named, *exact][-1]  # a filter may have replaced the call itself
    return _marked(context.function, call.id, call.arguments, question, place)


def asked_again(
    waiting: WaitingResult, function: KernelFunction, reviewed: Reviewed
) -> FunctionResultContent:
    """Write the result of a call that waits again, with a person's arguments."""
    question = reviewed.question
    edited = reviewed.arguments
    assert question is not None, "something else is asked"
    arguments = waiting.pending.arguments if edited is None else edited
    text, metadata = _marked(
        function, waiting.pending.id, arguments, question, waiting.place
    )
    return FunctionResultContent(
        id=waiting.item.id, name=waiting.item.name, result=text, metadata=metadata
    )


def _marked(
    function: KernelFunction,
    call_id: str,
    arguments: Mapping[str, Any],
    question: Defer,
    place: str,
) -> tuple[str, dict[str, Any]]:
    expires_at = ""
    if question.expires_in is not None:
        moment = datetime.now(UTC) + timedelta(seconds=question.expires_in)
        expires_at = moment.isoformat()
    mark: dict[str, Any] = {
        "function": function.fully_qualified_name,
        "prompt": question.prompt or "",
        "summary": question.summary,
        "asked_by": question.asked_by,
        "expires_at": expires_at,
        "arguments": arguments_text(arguments),
        "signature": tool_of(function).signature,
        "parameters": tool_of(function).schema,
        "source": question.source,
        "nonce": uuid.uuid4().hex,
        **({"roles": list(question.roles)} if question.roles else {}),
    }
    fingerprint = _fingerprint(mark, call_id, place)
    text = f"{_WAITING}{mark['function']} {fingerprint}\n{mark['prompt']}".rstrip()
    return text, {_MARK: {**mark, "fingerprint": fingerprint}}


def waiting_results(history: ChatHistory) -> list[WaitingResult]:
    """Find the results of waiting calls; skip those that fit no call before them."""
    placed = list(_placed_calls(history))
    found: list[WaitingResult] = []
    for item in (item for message in history.messages for item in message.items):
        if isinstance(item, FunctionResultContent) and str(item.result).startswith(
            _WAITING
        ):
            waits = [
                _waiting_result(item, content, place)
                for content, place in placed
                if content.id == item.id
            ]
            found += [one for one in waits if one is not None][-1:]
    return found


def _waiting_result(
    item: FunctionResultContent, content: FunctionCallContent, place: str
) -> WaitingResult | None:
    match item.metadata.get(_MARK):
        case {
            "function": str(function),
            "fingerprint": str(fingerprint),
            "prompt": str(prompt),
            "arguments": str(text),
            "signature": str(signature),
            "parameters": str(parameters),
            "summary": str(summary),
            "asked_by": str(asked_by),
            "expires_at": str(expires_at),
            "nonce": str(),
        } as mark:
            own = cast(
                "dict[str, Any]",
                {key: value for key, value in mark.items() if key != "fingerprint"},
            )
            arguments = parse_object(text)
            call_id = content.id or ""
            fits = _names(content, function) and fingerprint == _fingerprint(
                own, call_id, place
            )
            if not fits or isinstance(arguments, InvalidArguments):
                return None
            *plugin, name = function.split("-", maxsplit=1)
            pending = ToolCall(
                id=call_id,
                path=path_of(call_id),
                plugin_name="".join(plugin),
                function_name=name,
                fully_qualified_name=function,
                arguments=arguments,
                fingerprint=fingerprint,
                signature=signature,
                prompt=prompt,
                summary=summary,
                asked_by=asked_by,
                roles=tuple(cast("list[str]", mark.get("roles", ()))),
                expires_at=datetime.fromisoformat(expires_at) if expires_at else None,
                parameters=json_object(parameters),
            )
            question = Defer(
                prompt, roles=pending.roles, source=str(mark.get("source", ""))
            )
            return WaitingResult(item, pending, content, place, question)
        case _:
            return None


def _names(call: FunctionCallContent, function: str) -> bool:
    """Whether a call names a function; a bare name fits one of any plugin."""
    plugin, _, name = function.partition("-")
    return name == call.function_name and call.plugin_name in (plugin, None)


def _placed_calls(history: ChatHistory) -> Iterator[tuple[FunctionCallContent, str]]:
    """List a history's calls, each with its place: what user and assistant said before, and its number.

    It is without system messages, of which an agent adds its own, results, which are
    replaced, and ids, which a call of the same batch may get later. An edited call has
    the arguments that it had before.
    """
    conversation = hashlib.sha256()
    for message in history.messages:
        if message.role not in (AuthorRole.USER, AuthorRole.ASSISTANT):
            continue
        calls = calls_of(message)
        listed = [
            [
                one.plugin_name,
                one.function_name,
                one.metadata.get(_ASKED, arguments_text(one.arguments)),
            ]
            for one in calls
        ]
        conversation.update(
            json.dumps([str(message.role), text_of(message), listed]).encode()
        )
        for number, one in enumerate(calls):
            yield one, f"{conversation.hexdigest()}/{number}"


def show_edit(call: FunctionCallContent, arguments: Mapping[str, Any]) -> None:
    """Put a person's arguments into the history's call."""
    asked = arguments_text(call.arguments)
    call.metadata = {_ASKED: asked, **call.metadata}
    call.arguments = arguments_text(arguments)


def arguments_text(arguments: str | Mapping[str, Any] | None) -> str:
    """Write a call's arguments as JSON text; a text is JSON already."""
    return (
        arguments if isinstance(arguments, str) else result_text(dict(arguments or {}))
    )


def _fingerprint(mark: Mapping[str, Any], call_id: str, place: str) -> str:
    return digest_of(mark["function"], {**mark, "id": call_id, "place": place})


def replace_result(
    history: ChatHistory,
    before: FunctionResultContent,
    after: FunctionResultContent | str,
) -> FunctionResultContent:
    """Replace a result that is found by identity; raises KeyError if it is gone."""
    if isinstance(after, str):
        after = FunctionResultContent(id=before.id, name=before.name, result=after)
    for place, message in enumerate(history.messages):
        if any(item is before for item in message.items):
            items: list[Any] = [
                after if item is before else item for item in message.items
            ]
            history.messages[place] = ChatMessageContent(
                role=AuthorRole.TOOL, items=items, name=message.name
            )
            return after
    raise KeyError(before.id)
