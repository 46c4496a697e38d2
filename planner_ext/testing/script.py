"""A script: replies, calls and faults of a model as values, and replies as OpenAI's JSON.

It is deterministic. The shapes are those of
https://platform.openai.com/docs/api-reference/chat.

    script = [call("math-add", {"a": 1, "b": 2}), say("The sum is 3.")]     # two requests, then exhausted
    script = lambda request: call("math-add", {"a": 1, "b": 2})             # a model that never stops calling
    script = [lambda request: say(f"{len(request.tools)} tools")]           # an item decides when it is asked
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field, replace
from typing import Any, TypeAlias, cast

from semantic_kernel.contents import ChatMessageContent

from planner_ext.core.errors import PlannerExtError, shown
from planner_ext.core.values import Usage, frozen


class ScriptExhaustedError(PlannerExtError):
    """The script has no reply left for a request; the message names both."""


@frozen
class ScriptedCall:
    """One function call in a reply.

    Attributes:
        name: The fully qualified name, ``"plugin-function"``, sent as it is, valid or
            not.
        arguments: A mapping is sent as compact JSON, a string as it is. Default:
            ``{}``.
        id: None (the default) becomes ``"call_{n}"``, the n-th call of the script, from
            1. ``""`` is sent empty, as some servers do.
    """

    name: str
    arguments: Mapping[str, object] | str = field(default_factory=dict[str, object])
    id: str | None = None

    @property
    def arguments_text(self) -> str:
        """@private As they are sent."""
        if isinstance(self.arguments, str):
            return self.arguments
        return json.dumps(self.arguments, separators=(",", ":"), ensure_ascii=False)


@frozen
class ScriptedReply:
    """One answer of the model, always with one choice.

    Attributes:
        text: None sends no content.
        calls: In order; a reply may have both text and calls.
        finish_reason: None (the default) becomes ``"tool_calls"`` with calls and
            ``"stop"`` without.
        prompt_tokens: None estimates a quarter of the characters of the request's
            messages and tools as JSON, at least 1.
        completion_tokens: None estimates a quarter of the characters of text, refusal,
            function names and arguments, at least 1.
        refusal: OpenAI's refusal text, with which a run ends ``incomplete``. As with
            Semantic Kernel's connector, a service's plain reply has it as text, a
            streamed one loses it.
    """

    text: str | None = None
    calls: tuple[ScriptedCall, ...] = ()
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    refusal: str | None = None

    @property
    def ended_by(self) -> str:
        """@private As it is sent."""
        return self.finish_reason or ("tool_calls" if self.calls else "stop")


@frozen
class ScriptedFault:
    """An HTTP error of ``ScriptedOpenAIServer``; a service's script has exceptions.

    It answers one request: OpenAI's client repeats a request after 408, 409, 429, 5xx
    and a lost connection (twice by default), which takes the next item.

    Attributes:
        status: None (the default) sends 500, or 200 with ``drop``.
        body: A mapping is sent as JSON. None sends an OpenAI error, or, with ``drop``,
            the beginning of an answer.
        content_type: None sends ``application/json``, or ``text/event-stream`` for the
            default body of a dropped stream.
        headers: Further headers, such as ``{"retry-after-ms": "1"}``.
        drop: Announce more than ``body``, send it, and close the connection.
    """

    status: int | None = None
    body: str | Mapping[str, object] | None = None
    content_type: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    drop: bool = False


@frozen
class ScriptedRequest:
    """A request to the model.

    Attributes:
        index: 0-based number of the request at this service or server.
        messages: As OpenAI's JSON.
        tools: Fully qualified names of the functions offered.
        tool_choice: ``"auto"``, ``"required"``, ``"none"``, the object that names a
            function, or None.
        stream: Whether a streamed answer was requested.
        body: The whole parsed body; empty for a service.
        history: The messages at the request (a new list, the same objects); empty for a
            server.
    """

    index: int
    messages: list[dict[str, object]]
    tools: tuple[str, ...] = ()
    tool_choice: str | dict[str, object] | None = None
    stream: bool = False
    body: dict[str, object] = field(default_factory=dict[str, object])
    history: list[ChatMessageContent] = field(default_factory=list[ChatMessageContent])


def results_of(request: ScriptedRequest) -> dict[str, str]:
    """Read the last result of each function from the messages, by its name."""
    names: dict[str, str] = {}
    results: dict[str, str] = {}
    for message in cast("list[dict[str, Any]]", request.messages):
        for made in message.get("tool_calls") or ():
            names[made["id"]] = made["function"]["name"]
        if message["role"] == "tool":
            results[names[message["tool_call_id"]]] = str(message["content"])
    return results


ScriptedAnswer: TypeAlias = ScriptedReply | ScriptedFault | Exception
"""What one request gets. Faults are for servers, exceptions (raised) for services."""

Script: TypeAlias = (
    Iterable[ScriptedAnswer | Callable[[ScriptedRequest], ScriptedAnswer]]
    | Callable[[ScriptedRequest], ScriptedAnswer]
)
"""Answers in order, any a function of the request; or one function that answers all."""


def say(text: str) -> ScriptedReply:
    """Make a reply of text alone."""
    return ScriptedReply(text=text)


def call(
    name: str,
    arguments: Mapping[str, object] | str | None = None,
    *,
    id: str | None = None,
) -> ScriptedReply:
    """Make a reply of one function call; for the parameters see ``ScriptedCall``."""
    return ScriptedReply(
        calls=(
            ScriptedCall(
                name=name, arguments={} if arguments is None else arguments, id=id
            ),
        )
    )


def calls(*replies: ScriptedReply, text: str | None = None) -> ScriptedReply:
    """Make a reply with the calls of several, in order: ``calls(call("a-f"), call("a-g"))``."""
    return ScriptedReply(
        text=text, calls=tuple(item for reply in replies for item in reply.calls)
    )


class ScriptReader:
    """Returns the answers of a script in order; lazy, and not thread-safe."""

    def __init__(self, script: Script, chunk_size: int = 8) -> None:
        if chunk_size < 1:
            raise ValueError(
                f"chunk_size is the number of characters per streamed piece, at least 1, not {chunk_size!r}."
            )
        if isinstance(script, ScriptedReply):
            raise TypeError(
                f"A script is a list of replies, or a function of the request; got {shown(script)}."
            )
        self.chunk_size = chunk_size
        self._steps: Iterator[object] = (
            iter(lambda: script, None) if callable(script) else iter(script)
        )
        self._answers_given = 0
        self._calls_given = 0

    def answer(self, request: ScriptedRequest) -> ScriptedAnswer:
        """Return the next answer, or raise `ScriptExhaustedError`; calls get their default ids."""
        try:
            step = next(self._steps)
        except StopIteration:
            raise ScriptExhaustedError(
                f"The script has {self._answers_given} replies and request {request.index} asked for one more. "
                "Add a reply, or give a function of the request, which never ends."
            ) from None
        self._answers_given += 1
        answer = step(request) if callable(step) else step
        if isinstance(answer, ScriptedReply):
            return self._with_ids(answer)
        if isinstance(answer, ScriptedFault | Exception):
            return answer
        raise TypeError(
            "A script's item is a ScriptedReply, a ScriptedFault, an exception, or a function that returns one; "
            f"request {request.index} met {answer!r}. say(...) and call(...) make replies."
        )

    def _with_ids(self, reply: ScriptedReply) -> ScriptedReply:
        named = (
            item if item.id is not None else replace(item, id=f"call_{number}")
            for number, item in enumerate(reply.calls, self._calls_given + 1)
        )
        self._calls_given += len(reply.calls)
        return replace(reply, calls=tuple(named))


def reply_metadata(index: int) -> dict[str, object]:
    """Return a reply's id and backend, and a fixed time, so that runs can be compared."""
    return {
        "id": f"chatcmpl-{index}",
        "created": 1_700_000_000,
        "system_fingerprint": "fp_scripted",
    }


def count_tokens(
    reply: ScriptedReply, *, messages: Iterable[object], tools: Iterable[object] | None
) -> Usage:
    """Count a reply's tokens: its own figures, or their estimate."""
    prompt = reply.prompt_tokens
    completion = reply.completion_tokens
    if prompt is None:
        sent = json.dumps(
            [*messages, *(tools or ())],
            separators=(",", ":"),
            ensure_ascii=False,
            default=str,
        )
        prompt = max(1, len(sent) // 4)
    if completion is None:
        calls = "".join(item.name + item.arguments_text for item in reply.calls)
        completion = max(1, len(f"{reply.text or ''}{reply.refusal or ''}{calls}") // 4)
    return Usage(prompt_tokens=prompt, completion_tokens=completion)


def deltas(
    reply: ScriptedReply, *, chunk_size: int
) -> Iterator[tuple[dict[str, Any], str | None]]:
    """Cut a reply as OpenAI streams it; the last piece has the finish reason."""

    def pieces(text: str) -> list[str]:
        return [
            text[start : start + chunk_size]
            for start in range(0, len(text), chunk_size)
        ]

    yield (
        {
            "role": "assistant",
            "content": None if reply.text is None else "",
            "refusal": None,
        },
        None,
    )
    for key, text in (("content", reply.text), ("refusal", reply.refusal)):
        for piece in pieces(text or ""):
            yield {key: piece}, None
    for index, item in enumerate(reply.calls):
        function = {"name": item.name, "arguments": ""}
        yield (
            {
                "tool_calls": [
                    {
                        "index": index,
                        "id": item.id,
                        "type": "function",
                        "function": function,
                    }
                ]
            },
            None,
        )
        for piece in pieces(item.arguments_text):
            yield (
                {"tool_calls": [{"index": index, "function": {"arguments": piece}}]},
                None,
            )
    yield {}, reply.ended_by


def completion_body(
    reply: ScriptedReply, *, index: int, model: str, usage: Usage
) -> dict[str, object]:
    """Build the JSON of a plain answer."""
    message: dict[str, object] = {
        "role": "assistant",
        "content": reply.text,
        "refusal": reply.refusal,
    }
    if reply.calls:
        message["tool_calls"] = [
            {
                "id": item.id,
                "type": "function",
                "function": {"name": item.name, "arguments": item.arguments_text},
            }
            for item in reply.calls
        ]
    choice = {
        "index": 0,
        "message": message,
        "logprobs": None,
        "finish_reason": reply.ended_by,
    }
    head = {**reply_metadata(index), "object": "chat.completion", "model": model}
    return {**head, "choices": [choice], "usage": _usage_json(usage)}


def completion_chunks(
    reply: ScriptedReply,
    *,
    index: int,
    model: str,
    usage: Usage | None,
    chunk_size: int,
) -> Iterator[dict[str, object]]:
    """Build the events of a streamed answer, without the closing ``[DONE]``.

    The last has the usage, if the request asked for it.
    """
    head = {**reply_metadata(index), "object": "chat.completion.chunk", "model": model}
    # OpenAI sends a null usage in every other chunk of a stream that asked for it.
    pending: dict[str, object] = {} if usage is None else {"usage": None}
    for delta, finish_reason in deltas(reply, chunk_size=chunk_size):
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": None,
            "finish_reason": finish_reason,
        }
        yield {**head, "choices": [choice], **pending}
    if usage is not None:
        yield {**head, "choices": [], "usage": _usage_json(usage)}


def error_body(
    message: str, *, type: str, param: str | None = None, code: str | None = None
) -> dict[str, object]:
    """Build the JSON of an OpenAI error."""
    return {"error": {"message": message, "type": type, "param": param, "code": code}}


def _usage_json(usage: Usage) -> dict[str, int]:
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    return {name: getattr(usage, name) for name in names}
