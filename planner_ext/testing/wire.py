"""A scripted reply in the shapes of OpenAI's chat completion API: the token counts, the pieces of a stream, the JSON.

Pure and deterministic: the same reply to the same request is always the same bytes. What is sent where is not known
here. Shapes: https://platform.openai.com/docs/api-reference/chat
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from planner_ext.testing.script import ScriptedCall, ScriptedReply

__all__ = [
    "CREATED",
    "SYSTEM_FINGERPRINT",
    "CallDelta",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDelta:
    """A piece of a streamed function call: id and name in the first one, the arguments in those after it."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """A piece of a streamed reply; a field that is None is not in this piece."""

    role: str | None = None
    text: str | None = None
    refusal: str | None = None
    call: CallDelta | None = None
    finish_reason: str | None = None


def checked_chunk_size(chunk_size: int) -> int:
    """The number of characters per streamed piece.

    Args:
        chunk_size: Characters, at least 1.

    Raises:
        ValueError: It is less than 1.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size is the number of characters per streamed piece, at least 1, not {chunk_size!r}.")
    return chunk_size


def completion_id(index: int) -> str:
    """The ``id`` of the reply to the request with this 0-based index."""
    return f"chatcmpl-{index}"


def count_tokens(
    reply: ScriptedReply, *, messages: Sequence[Mapping[str, object]], tools: Sequence[object] | None
) -> Tokens:
    """The token counts that a reply reports: its own, or the estimate that ``ScriptedReply`` describes.

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


def deltas(reply: ScriptedReply, *, chunk_size: int) -> Iterator[Delta]:
    """A reply cut as OpenAI streams it: role, text, refusal, then each call, then the finish reason.

    Args:
        reply: The reply.
        chunk_size: Characters per piece of text, refusal or arguments.
    """
    yield Delta(role="assistant", text=None if reply.text is None else "")
    for piece in _pieces(reply.text, chunk_size):
        yield Delta(text=piece)
    for piece in _pieces(reply.refusal, chunk_size):
        yield Delta(refusal=piece)
    for index, item in enumerate(reply.calls):
        yield Delta(call=CallDelta(index=index, id=item.id, name=item.name))
        for piece in _pieces(item.arguments_text, chunk_size):
            yield Delta(call=CallDelta(index=index, arguments=piece))
    yield Delta(finish_reason=reply.ended_by)


def completion_body(reply: ScriptedReply, *, index: int, model: str, tokens: Tokens) -> dict[str, object]:
    """The JSON of a plain answer."""
    message: dict[str, object] = {"role": "assistant", "content": reply.text, "refusal": reply.refusal}
    if reply.calls:
        message["tool_calls"] = [_call_json(item) for item in reply.calls]
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reply.ended_by}
    return {
        **_head("chat.completion", index=index, model=model),
        "choices": [choice],
        "usage": _usage_json(tokens),
    }


def completion_chunks(
    reply: ScriptedReply, *, index: int, model: str, usage: Tokens | None, chunk_size: int
) -> Iterator[dict[str, object]]:
    """The JSON of each event of a streamed answer, without the closing ``[DONE]``.

    Args:
        reply: The reply.
        index: 0-based index of the request.
        model: The model's name.
        usage: Sent in a last chunk without choices; None when the request did not ask for it.
        chunk_size: Characters per piece.
    """
    head = _head("chat.completion.chunk", index=index, model=model)
    # OpenAI sends a null usage in every other chunk of a stream that asked for it.
    pending: dict[str, object] = {} if usage is None else {"usage": None}
    for delta in deltas(reply, chunk_size=chunk_size):
        choice = {"index": 0, "delta": _delta_json(delta), "logprobs": None, "finish_reason": delta.finish_reason}
        yield {**head, "choices": [choice], **pending}
    if usage is not None:
        yield {**head, "choices": [], "usage": _usage_json(usage)}


def error_body(message: str, *, type: str, param: str | None = None, code: str | None = None) -> dict[str, object]:
    """The JSON of an OpenAI error."""
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


def _call_json(item: ScriptedCall) -> dict[str, object]:
    return {"id": item.id, "type": "function", "function": {"name": item.name, "arguments": item.arguments_text}}


def _delta_json(delta: Delta) -> dict[str, object]:
    if delta.role is not None:
        return {"role": delta.role, "content": delta.text, "refusal": None}
    if delta.call is not None:
        return {"tool_calls": [_call_delta_json(delta.call)]}
    if delta.refusal is not None:
        return {"refusal": delta.refusal}
    return {} if delta.text is None else {"content": delta.text}


def _call_delta_json(delta: CallDelta) -> dict[str, object]:
    if delta.name is None:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    function = {"name": delta.name, "arguments": delta.arguments}
    return {"index": delta.index, "id": delta.id, "type": "function", "function": function}
