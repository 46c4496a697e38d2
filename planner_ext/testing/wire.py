"""A scripted reply in the formats of OpenAI's chat completion API: the token counts, the pieces of a stream, the JSON.

Pure and deterministic: the same reply to the same request always gives the same bytes. Knows no HTTP.
Shapes: https://platform.openai.com/docs/api-reference/chat
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Required, TypedDict

from planner_ext.testing.script import ScriptedReply

__all__ = [
    "CREATED",
    "SYSTEM_FINGERPRINT",
    "Delta",
    "Tokens",
    "checked_chunk_size",
    "completion_body",
    "completion_chunks",
    "completion_id",
    "count_tokens",
    "deltas",
    "error_body",
]

CREATED = 1_700_000_000
"""``created`` of every reply: a fixed moment, so that a recorded run can be compared byte for byte."""

SYSTEM_FINGERPRINT = "fp_scripted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Tokens of one request and its reply."""

    prompt: int
    completion: int


class FunctionDelta(TypedDict, total=False):
    """The name of a streamed call's function, or a piece of its arguments."""

    name: str
    arguments: str


class CallDelta(TypedDict, total=False):
    """A piece of a streamed function call: id and name in the first one, the arguments in those after it."""

    index: Required[int]
    id: str | None
    type: str
    function: Required[FunctionDelta]


class Delta(TypedDict, total=False):
    """A piece of a streamed reply, as OpenAI's JSON."""

    role: str
    content: str | None
    refusal: str | None
    tool_calls: list[CallDelta]


def checked_chunk_size(chunk_size: int) -> int:
    """Refuse a chunk size below 1.

    Args:
        chunk_size: Characters, at least 1.

    Raises:
        ValueError: If it is less than 1.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size is the number of characters per streamed piece, at least 1, not {chunk_size!r}.")
    return chunk_size


def completion_id(index: int) -> str:
    """Make the ``id`` of the reply to the request with this 0-based index."""
    return f"chatcmpl-{index}"


def count_tokens(
    reply: ScriptedReply, *, messages: Sequence[Mapping[str, object]], tools: Sequence[object] | None
) -> Tokens:
    """Count the tokens that a reply reports: its own figures, or the estimate that ``ScriptedReply`` describes.

    Args:
        reply: The reply.
        messages: The request's messages as OpenAI's JSON.
        tools: The request's tools as OpenAI's JSON, None when none are offered.
    """
    prompt, completion = reply.prompt_tokens, reply.completion_tokens
    if prompt is None:
        asked = json.dumps([*messages, *(tools or ())], separators=(",", ":"), ensure_ascii=False, default=str)
        prompt = _estimate(asked)
    if completion is None:
        said = [reply.text or "", reply.refusal or ""]
        completion = _estimate("".join(said + [item.name + item.arguments_text for item in reply.calls]))
    return Tokens(prompt=prompt, completion=completion)


def deltas(reply: ScriptedReply, *, chunk_size: int) -> Iterator[tuple[Delta, str | None]]:
    """Cut a reply as OpenAI streams it: role, text, refusal, then each call, then the finish reason.

    Args:
        reply: The reply.
        chunk_size: Characters per piece of text, refusal or arguments.

    Yields:
        Each piece, and the finish reason, which only the last piece has.
    """
    yield {"role": "assistant", "content": None if reply.text is None else "", "refusal": None}, None
    for piece in _pieces(reply.text, chunk_size):
        yield {"content": piece}, None
    for piece in _pieces(reply.refusal, chunk_size):
        yield {"refusal": piece}, None
    for index, item in enumerate(reply.calls):
        function = FunctionDelta(name=item.name, arguments="")
        yield {"tool_calls": [{"index": index, "id": item.id, "type": "function", "function": function}]}, None
        for piece in _pieces(item.arguments_text, chunk_size):
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}, None
    yield {}, reply.ended_by


def completion_body(reply: ScriptedReply, *, index: int, model: str, tokens: Tokens) -> dict[str, object]:
    """Build the JSON of a plain answer."""
    message: dict[str, object] = {"role": "assistant", "content": reply.text, "refusal": reply.refusal}
    if reply.calls:
        message["tool_calls"] = [
            {"id": item.id, "type": "function", "function": {"name": item.name, "arguments": item.arguments_text}}
            for item in reply.calls
        ]
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reply.ended_by}
    return {
        **_head("chat.completion", index=index, model=model),
        "choices": [choice],
        "usage": _usage_json(tokens),
    }


def completion_chunks(
    reply: ScriptedReply, *, index: int, model: str, usage: Tokens | None, chunk_size: int
) -> Iterator[dict[str, object]]:
    """Build the JSON of each event of a streamed answer, without the closing ``[DONE]``.

    Args:
        reply: The reply.
        index: 0-based index of the request.
        model: The model's name.
        usage: Sent in a last chunk without choices; None if the request did not ask for it.
        chunk_size: Characters per piece.
    """
    head = _head("chat.completion.chunk", index=index, model=model)
    # OpenAI sends a null usage in every other chunk of a stream that asked for it.
    pending: dict[str, object] = {} if usage is None else {"usage": None}
    for delta, finish_reason in deltas(reply, chunk_size=chunk_size):
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        yield {**head, "choices": [choice], **pending}
    if usage is not None:
        yield {**head, "choices": [], "usage": _usage_json(usage)}


def error_body(message: str, *, type: str, param: str | None = None, code: str | None = None) -> dict[str, object]:
    """Build the JSON of an OpenAI error."""
    return {"error": {"message": message, "type": type, "param": param, "code": code}}


def _estimate(text: str) -> int:
    return max(1, len(text) // 4)


def _pieces(text: str | None, size: int) -> Iterator[str]:
    whole = text or ""
    return (whole[start : start + size] for start in range(0, len(whole), size))


def _head(kind: str, *, index: int, model: str) -> dict[str, object]:
    return {
        "id": completion_id(index),
        "object": kind,
        "created": CREATED,
        "model": model,
        "system_fingerprint": SYSTEM_FINGERPRINT,
    }


def _usage_json(tokens: Tokens) -> dict[str, object]:
    return {
        "prompt_tokens": tokens.prompt,
        "completion_tokens": tokens.completion,
        "total_tokens": tokens.prompt + tokens.completion,
    }
