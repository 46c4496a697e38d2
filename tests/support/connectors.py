"""Servers that speak as each provider's API does: the replies of a script, in its words, with its count of tokens."""

import base64
import json
import re
import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

from planner_ext.testing.server import HttpRequest, HttpResponse, LoopbackServer

PROMPT, COMPLETION, CACHED, THOUGHTS = 100, 20, 30, 7
"""What every reply is said to have used, as far as an API says such a thing."""

SIGNATURE = base64.b64encode(b"signed: a thought").decode()
"""What Gemini signs a call with, and wants back with it."""


@dataclass(frozen=True)
class Turn:
    """One reply: calls of functions, or a text; ``cut`` where it ran out of tokens; Gemini's may have a ``thought``."""

    text: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    cut: bool = False
    thought: str = ""


@dataclass
class Api(ABC):
    """A server of one API. It plays the turns in order, the last one for ever, and calls nothing that is not offered.

    Attributes:
        bodies: Of all requests, in order.
        status: Other than 200: that of all responses, which ask to wait for 7 seconds.
        refused: Why a request was refused, as the provider would.
    """

    turns: Sequence[Turn] = ()
    reports: bool = True
    status: int = 200
    bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    refused: list[str] = field(default_factory=list[str])

    def __enter__(self) -> "Api":
        self._server = LoopbackServer(self._respond)
        self.url = f"http://127.0.0.1:{self._server.port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()

    def _respond(self, request: HttpRequest) -> HttpResponse:
        body = json.loads(request.body)
        self.bodies.append(body)
        if self.status != 200:
            return HttpResponse(
                status=self.status,
                content_type="application/json",
                parts=(b'{"message": "busy", "error": {"message": "busy"}}',),
                headers={"retry-after": "7"},
            )
        if problem := self.problem(body):
            self.refused.append(problem)
            error = json.dumps(
                {
                    "message": problem,
                    "error": {"message": problem, "type": "invalid_request_error"},
                }
            )
            return HttpResponse(
                status=400, content_type="application/json", parts=(error.encode(),)
            )
        turn = self.turns[min(len(self.bodies), len(self.turns)) - 1]
        if turn.calls and not self.offered(body):
            turn = Turn(text=turn.text or "That is all.")
        if self.streams(request, body):
            return self.stream(turn)
        return HttpResponse(
            status=200,
            content_type="application/json",
            parts=(json.dumps(self.reply(turn)).encode(),),
        )

    def problem(self, body: dict[str, Any]) -> str:
        """Say what the provider would refuse a request for, "" for nothing."""
        return ""

    def offered(self, body: dict[str, Any]) -> bool:
        """Whether a function may be called."""
        return bool(body.get("tools")) and body.get("tool_choice") != "none"

    def streams(self, request: HttpRequest, body: dict[str, Any]) -> bool:
        return bool(body.get("stream"))

    @abstractmethod
    def reply(self, turn: Turn) -> Any:
        """Write a turn as one JSON value."""

    @abstractmethod
    def stream(self, turn: Turn) -> HttpResponse:
        """Write a turn as a stream."""


def events(*parts: bytes) -> HttpResponse:
    return HttpResponse(
        status=200, content_type="text/event-stream", parts=parts, streamed=True
    )


def event(data: Any, name: str = "") -> bytes:
    return (
        f"event: {name}\n" if name else ""
    ).encode() + f"data: {json.dumps(data)}\n\n".encode()


def pieces(text: str) -> list[str]:
    return [text[: len(text) // 2], text[len(text) // 2 :]] if len(text) > 1 else [text]


class Anthropic(Api):
    """As in https://docs.anthropic.com/en/api/messages written."""

    def problem(self, body: dict[str, Any]) -> str:
        messages, blocks = (
            body["messages"],
            [b for m in body["messages"] for b in blocks_of(m)],
        )
        calls = [b["id"] for b in blocks if b["type"] == "tool_use"]
        if not all(map(blocks_of, messages)):
            return "all messages must have non-empty content except for the optional final assistant message"
        if not all(
            text.strip() for text in [*texts(blocks), body.get("system", "any")]
        ):
            return "text content blocks must contain non-whitespace text"
        if calls and not body.get("tools"):
            return "Requests which include `tool_use` or `tool_result` blocks must define tools"
        return bad_ids(calls, "[a-zA-Z0-9_-]+") or unpaired(
            [
                (
                    m["role"],
                    [b["id"] for b in blocks_of(m) if b["type"] == "tool_use"],
                    [
                        b["tool_use_id"]
                        for b in blocks_of(m)
                        if b["type"] == "tool_result"
                    ],
                )
                for m in messages
            ]
        )

    def offered(self, body: dict[str, Any]) -> bool:
        return any(tool["name"].startswith("t-") for tool in body.get("tools", ()))

    def usage(self) -> dict[str, Any]:
        fresh = PROMPT - CACHED
        return {
            "input_tokens": fresh,
            "output_tokens": COMPLETION,
            "cache_read_input_tokens": CACHED,
        }

    def reply(self, turn: Turn) -> Any:
        content: list[Any] = [{"type": "text", "text": turn.text}] if turn.text else []
        content += [
            {
                "type": "tool_use",
                "id": f"toolu_{len(self.bodies)}_{n}",
                "name": name,
                "input": arguments,
            }
            for n, (name, arguments) in enumerate(turn.calls)
        ]
        return {
            "id": f"msg_{len(self.bodies)}",
            "type": "message",
            "role": "assistant",
            "model": "claude-sonnet-4-5",
            "content": content,
            "stop_reason": "max_tokens"
            if turn.cut
            else "tool_use"
            if turn.calls
            else "end_turn",
            "stop_sequence": None,
            "usage": self.usage(),
        }

    def stream(self, turn: Turn) -> HttpResponse:
        whole = self.reply(turn)
        start: dict[str, Any] = {
            **whole,
            "content": [],
            "stop_reason": None,
            "usage": {**self.usage(), "output_tokens": 1},
        }
        parts = [event({"type": "message_start", "message": start}, "message_start")]
        empty: dict[str, Any]
        blocks: list[dict[str, Any]] = whole["content"]
        for index, block in enumerate(blocks):
            if block["type"] == "text":
                empty, deltas = (
                    {"type": "text", "text": ""},
                    [("text_delta", "text", p) for p in pieces(block["text"])],
                )
            else:
                written = json.dumps(block["input"])
                empty, deltas = (
                    {**block, "input": dict[str, Any]()},
                    [("input_json_delta", "partial_json", p) for p in pieces(written)],
                )
            parts.append(
                event(
                    {
                        "type": "content_block_start",
                        "index": index,
                        "content_block": empty,
                    },
                    "content_block_start",
                )
            )
            for kind, key, piece in deltas:
                delta = {
                    "type": "content_block_delta",
                    "index": index,
                    "delta": {"type": kind, key: piece},
                }
                parts.append(event(delta, "content_block_delta"))
            parts.append(
                event(
                    {"type": "content_block_stop", "index": index}, "content_block_stop"
                )
            )
        ended = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
        parts.append(
            event(
                {"type": "message_delta", "delta": ended, "usage": self.usage()},
                "message_delta",
            )
        )
        parts.append(event({"type": "message_stop"}, "message_stop"))
        return events(*parts)


def blocks_of(message: dict[str, Any]) -> list[dict[str, Any]]:
    content: Any = message["content"]
    return (
        cast("list[dict[str, Any]]", content)
        if isinstance(content, list)
        else [{"type": "text", "text": content}]
    )


def texts(blocks: Sequence[dict[str, Any]]) -> list[str]:
    return [block["text"] for block in blocks if "text" in block]


def bad_ids(ids: Sequence[str], pattern: str) -> str:
    """Find ids that a provider refuses: of another form, or used twice in a conversation."""
    wrong = [call for call in ids if not re.fullmatch(pattern, call)]
    twice = [call for call in ids if ids.count(call) > 1]
    return (
        f"ids of calls must match {pattern} and be unique; got {wrong or twice}"
        if wrong or twice
        else ""
    )


def unpaired(
    messages: Sequence[tuple[str, list[str], list[str]]], *, alternating: bool = False
) -> str:
    """Find calls whose results are not all in the very next message, and turns that do not alternate."""
    for (role, calls, _), (next_role, _, results) in pairwise(messages):
        if alternating and role == next_role:
            return f"A conversation must alternate between user and assistant roles; got two of {role}."
        if sorted(calls) != sorted(results):
            return f"Expected results of {calls} in the next message; got {results}"
    return ""


class Chat(Api):
    """The chat completions that Mistral and Azure AI Inference have, as OpenAI: usage in the last chunk."""

    def problem(self, body: dict[str, Any]) -> str:
        asked = [
            call["id"] for m in body["messages"] for call in m.get("tool_calls") or ()
        ]
        answered = [m["tool_call_id"] for m in body["messages"] if m["role"] == "tool"]
        return (
            ""
            if asked == answered
            else f"calls {asked} and results {answered} do not match"
        )

    def head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"cmpl-{len(self.bodies)}",
            "object": kind,
            "created": 1700000000,
            "model": "scripted",
        }

    def usage(self) -> dict[str, int]:
        if not self.reports:
            return {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        return {
            "prompt_tokens": PROMPT,
            "completion_tokens": COMPLETION,
            "total_tokens": PROMPT + COMPLETION,
        }

    def calls(self, turn: Turn) -> list[dict[str, Any]]:
        return [
            {
                "id": f"call{len(self.bodies)}{n:04}",
                "type": "function",
                "index": n,
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            for n, (name, arguments) in enumerate(turn.calls)
        ]

    def reason(self, turn: Turn) -> str:
        return "length" if turn.cut else "tool_calls" if turn.calls else "stop"

    def reply(self, turn: Turn) -> Any:
        message: dict[str, Any] = {"role": "assistant", "content": turn.text}
        if turn.calls:
            message["tool_calls"] = self.calls(turn)
        choice = {"index": 0, "message": message, "finish_reason": self.reason(turn)}
        return {
            **self.head("chat.completion"),
            "choices": [choice],
            "usage": self.usage(),
        }

    def stream(self, turn: Turn) -> HttpResponse:
        head = self.head("chat.completion.chunk")
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{"content": piece} for piece in pieces(turn.text) if piece]
        deltas += [{"content": "", "tool_calls": [call]} for call in self.calls(turn)]
        parts = [
            event(
                {**head, "choices": [{"index": 0, "delta": d, "finish_reason": None}]}
            )
            for d in deltas
        ]
        last = {
            "index": 0,
            "delta": {"content": ""},
            "finish_reason": self.reason(turn),
        }
        parts.append(event({**head, "choices": [last], "usage": self.usage()}))
        return events(*parts, b"data: [DONE]\n\n")


class Mistral(Chat):
    """The rules of https://github.com/mistralai/mistral-common, ``validator.py``, which the API applies."""

    def problem(self, body: dict[str, Any]) -> str:
        messages = body["messages"]
        for before, after in pairwise(message["role"] for message in messages):
            if after not in FOLLOWS_IN_MISTRAL[before]:
                return f"Unexpected role {after!r} after role {before!r}"
        if messages[-1]["role"] == "assistant":
            return "Expected last role User or Tool (or Assistant with prefix True) for serving but got assistant"
        if any(
            m["role"] == "assistant" and not (m.get("content") or m.get("tool_calls"))
            for m in messages
        ):
            return "Assistant message must have either content or tool_calls"
        ids = [call["id"] for m in messages for call in m.get("tool_calls") or ()]
        return bad_ids(ids, "[a-zA-Z0-9]{9}") or super().problem(body)


FOLLOWS_IN_MISTRAL = {
    "system": ("user", "assistant", "system"),
    "user": ("assistant", "system", "user"),
    "assistant": ("assistant", "user", "tool"),
    "tool": ("assistant", "tool"),
}


@dataclass
class Google(Api):
    """As in https://ai.google.dev/api/generate-content written."""

    usage_last: bool = False
    made: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def problem(self, body: dict[str, Any]) -> str:
        turns: list[Any] = []
        for content in body["contents"]:
            calls = [
                p["functionCall"]["name"]
                for p in content["parts"]
                if "functionCall" in p
            ]
            results = [
                p["functionResponse"]["name"]
                for p in content["parts"]
                if "functionResponse" in p
            ]
            unsigned = [
                p
                for p in content["parts"]
                if "functionCall" in p and p.get("thoughtSignature") != SIGNATURE
            ]
            if any(p["functionCall"] in self.made for p in unsigned):
                return "Thought signature is not valid"
            if not content["parts"] or "" in texts(content["parts"]):
                return "GenerateContentRequest.contents.parts must not be empty"
            if results and len(results) < len(content["parts"]):
                return "Function responses stand alone in their turn"
            if calls and (not turns or turns[-1][0] == "model"):
                return "Function call turn comes immediately after a user turn or after a function response turn"
            turns.append((content["role"], calls, results))
        if not turns or turns[-1][0] == "model":
            return "Requests ending with a model turn are not supported"
        return unpaired(turns)

    def offered(self, body: dict[str, Any]) -> bool:
        mode = body.get("toolConfig", {}).get("functionCallingConfig", {}).get("mode")
        return bool(body.get("tools")) and mode != "NONE"

    def streams(self, request: HttpRequest, body: dict[str, Any]) -> bool:
        return "stream" in request.path

    def usage(self, completion: int = COMPLETION) -> dict[str, int]:
        return {
            "promptTokenCount": PROMPT,
            "candidatesTokenCount": completion - THOUGHTS,
            "thoughtsTokenCount": THOUGHTS,
            "cachedContentTokenCount": CACHED,
            "totalTokenCount": PROMPT + completion,
        }

    def chunk(
        self, parts: list[Any], reason: str | None, completion: int = COMPLETION
    ) -> dict[str, Any]:
        candidate: dict[str, Any] = {
            "index": 0,
            "content": {"role": "model", "parts": parts},
        }
        if reason is not None:
            candidate["finishReason"] = reason
        return {
            "candidates": [candidate],
            "usageMetadata": self.usage(completion),
            "modelVersion": "gemini-2.5-flash",
        }

    def parts(self, turn: Turn) -> list[Any]:
        written: list[Any] = (
            [{"text": turn.thought, "thought": True}] if turn.thought else []
        )
        written += [{"text": piece} for piece in pieces(turn.text) if piece]
        calls = [
            {"name": name.replace("-", "__", 1), "args": arguments}
            for name, arguments in turn.calls
        ]
        self.made += calls
        return [
            *written,
            *({"functionCall": call, "thoughtSignature": SIGNATURE} for call in calls),
        ]

    def reply(self, turn: Turn) -> Any:
        return self.chunk(self.parts(turn), "MAX_TOKENS" if turn.cut else "STOP")

    def stream(self, turn: Turn) -> HttpResponse:
        *first, last = self.parts(turn) or [{"text": ""}]
        parts = [event(self.chunk([part], None, THOUGHTS + 1)) for part in first]
        parts.append(event(self.chunk([last], "MAX_TOKENS" if turn.cut else "STOP")))
        return events(
            *parts,
            *([event({"usageMetadata": self.usage()})] if self.usage_last else []),
        )


class Ollama(Api):
    """https://github.com/ollama/ollama/blob/main/docs/api.md; ``reports`` False: the prompt was in its cache."""

    def part(
        self, message: dict[str, Any], *, done: bool, cut: bool = False
    ) -> dict[str, Any]:
        written: dict[str, Any] = {
            "model": "llama3.2",
            "created_at": "2026-01-01T00:00:00Z",
            "message": {"role": "assistant", "content": "", **message},
            "done": done,
        }
        if done:
            written |= {
                "done_reason": "length" if cut else "stop",
                "eval_count": COMPLETION,
            }
            written |= {"prompt_eval_count": PROMPT} if self.reports else {}
        return written

    def calls(self, turn: Turn) -> list[Any]:
        return [
            {"function": {"name": name, "arguments": arguments}}
            for name, arguments in turn.calls
        ]

    def reply(self, turn: Turn) -> Any:
        return self.part(
            {"content": turn.text, "tool_calls": self.calls(turn)},
            done=True,
            cut=turn.cut,
        )

    def stream(self, turn: Turn) -> HttpResponse:
        parts = [
            self.part({"content": piece}, done=False)
            for piece in pieces(turn.text)
            if piece
        ]
        parts += [
            self.part({"tool_calls": [call]}, done=False) for call in self.calls(turn)
        ]
        lines = [
            json.dumps(part).encode() + b"\n"
            for part in [*parts, self.part({}, done=True, cut=turn.cut)]
        ]
        return HttpResponse(
            status=200,
            content_type="application/x-ndjson",
            parts=tuple(lines),
            streamed=True,
        )


class Bedrock(Api):
    """As in https://docs.aws.amazon.com/bedrock/latest/APIReference/API_runtime_Converse.html written."""

    def problem(self, body: dict[str, Any]) -> str:
        turns = [
            (
                m["role"],
                [b["toolUse"]["toolUseId"] for b in m["content"] if "toolUse" in b],
                [
                    b["toolResult"]["toolUseId"]
                    for b in m["content"]
                    if "toolResult" in b
                ],
            )
            for m in body["messages"]
        ]
        blocks = [b for m in body["messages"] for b in m["content"]]
        results = [
            part
            for b in blocks
            if "toolResult" in b
            for part in b["toolResult"]["content"]
        ]
        if (
            any(calls or results for _, calls, results in turns)
            and "toolConfig" not in body
        ):
            return "The toolConfig field must be defined when using toolUse and toolResult content blocks."
        if not turns or turns[0][0] != "user":
            return "A conversation must start with a user message."
        if not all(m["content"] for m in body["messages"]):
            return "The content field in the Message object is empty."
        if not all(
            text.strip() for text in texts([*blocks, *results, *body.get("system", ())])
        ):
            return "The text field in the ContentBlock object is blank."
        return bad_ids(
            [call for _, calls, _ in turns for call in calls], "[a-zA-Z0-9_-]{1,64}"
        ) or unpaired(turns, alternating=True)

    def offered(self, body: dict[str, Any]) -> bool:
        tools = body.get("toolConfig", {}).get("tools", ())
        return any(tool["toolSpec"]["name"].startswith("t-") for tool in tools)

    def streams(self, request: HttpRequest, body: dict[str, Any]) -> bool:
        return request.path.endswith("converse-stream")

    def usage(self) -> dict[str, int]:
        fresh = PROMPT - CACHED
        return {
            "inputTokens": fresh,
            "outputTokens": COMPLETION,
            "cacheReadInputTokens": CACHED,
            "totalTokens": PROMPT + COMPLETION,
        }

    def reason(self, turn: Turn) -> str:
        return "max_tokens" if turn.cut else "tool_use" if turn.calls else "end_turn"

    def reply(self, turn: Turn) -> Any:
        content: list[Any] = [{"text": turn.text}] if turn.text else []
        content += [
            {
                "toolUse": {
                    "toolUseId": f"tooluse_{len(self.bodies)}_{n}",
                    "name": name,
                    "input": arguments,
                }
            }
            for n, (name, arguments) in enumerate(turn.calls)
        ]
        return {
            "output": {"message": {"role": "assistant", "content": content}},
            "stopReason": self.reason(turn),
            "usage": self.usage(),
            "metrics": {"latencyMs": 1},
        }

    def stream(self, turn: Turn) -> HttpResponse:
        parts = [frame("messageStart", {"role": "assistant"})]
        for index, block in enumerate(self.reply(turn)["output"]["message"]["content"]):
            if "text" in block:
                deltas: list[dict[str, Any]] = [
                    {"text": piece} for piece in pieces(block["text"])
                ]
            else:
                use = block["toolUse"]
                named = {
                    "toolUse": {"toolUseId": use["toolUseId"], "name": use["name"]}
                }
                parts.append(
                    frame(
                        "contentBlockStart",
                        {"contentBlockIndex": index, "start": named},
                    )
                )
                deltas = [
                    {"toolUse": {"input": piece}}
                    for piece in pieces(json.dumps(use["input"]))
                ]
            parts += [
                frame("contentBlockDelta", {"contentBlockIndex": index, "delta": delta})
                for delta in deltas
            ]
            parts.append(frame("contentBlockStop", {"contentBlockIndex": index}))
        parts.append(frame("messageStop", {"stopReason": self.reason(turn)}))
        parts.append(
            frame("metadata", {"usage": self.usage(), "metrics": {"latencyMs": 1}})
        )
        return HttpResponse(
            status=200,
            content_type="application/vnd.amazon.eventstream",
            parts=tuple(parts),
            streamed=True,
        )


def frame(kind: str, payload: dict[str, Any]) -> bytes:
    """Write one message of AWS's binary event stream."""
    headers = {
        ":event-type": kind,
        ":content-type": "application/json",
        ":message-type": "event",
    }
    written = b"".join(
        struct.pack("!B", len(name))
        + name.encode()
        + struct.pack("!BH", 7, len(value))
        + value.encode()
        for name, value in headers.items()
    )
    body = json.dumps(payload).encode()
    prelude = struct.pack("!II", 16 + len(written) + len(body), len(written))
    message = prelude + struct.pack("!I", zlib.crc32(prelude)) + written + body
    return message + struct.pack("!I", zlib.crc32(message))
