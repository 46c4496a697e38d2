"""What OpenAI refuses of a chat completion request, as far as an agent loop can get it wrong.

Checked: the model; the messages, with each call answered once, right after it, and nothing answered that was not
called; the names, ids and arguments of calls; the tools and the tool choice. Unknown keys pass. The wording follows
OpenAI's, with the index of the message and the ids in it. Pure; knows neither HTTP nor scripts.
"""

import re
from collections.abc import Mapping
from typing import TypeGuard

__all__ = ["Violation", "find_violation", "is_array", "is_object", "tool_names"]

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_MAXIMUM_ID_LENGTH = 40
_ROLES = ("developer", "system", "user", "assistant", "tool", "function")
_CONTENT_SUBSTITUTES = ("tool_calls", "function_call", "refusal", "audio")
_CHOICES = ("none", "auto", "required")


class Violation(Exception):
    """A request that OpenAI would refuse; never leaves this module but as a value.

    Attributes:
        message: Why.
        param: The parameter at fault, as a path such as ``messages[3].content``.
    """

    def __init__(self, *, message: str, param: str) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


def is_object(value: object) -> TypeGuard[dict[str, object]]:
    """Whether a parsed JSON value is an object."""
    return isinstance(value, dict)


def is_array(value: object) -> TypeGuard[list[object]]:
    """Whether a parsed JSON value is an array."""
    return isinstance(value, list)


def find_violation(body: Mapping[str, object]) -> Violation | None:
    """The first rule that a request breaks.

    Args:
        body: The parsed JSON of a request to ``/v1/chat/completions``.

    Returns:
        The violation, or None if OpenAI would take the request.
    """
    try:
        _check(body)
    except Violation as violation:
        return violation
    return None


def tool_names(body: Mapping[str, object]) -> tuple[str, ...]:
    """The names of the functions that a request offers, in order; tools of another shape are left out."""
    return tuple(name for tool in _array(body.get("tools")) if isinstance(name := _function_of(tool).get("name"), str))


def _check(body: Mapping[str, object]) -> None:
    if not isinstance(body.get("model"), str) or not body["model"]:
        raise Violation(message="You must provide a model parameter.", param="model")
    _check_messages(body.get("messages"))
    _check_tools(body)
    _check_tool_choice(body)


def _check_messages(messages: object) -> None:
    if not is_array(messages) or not messages:
        raise Violation(message=f"Invalid 'messages': expected a non-empty array, got {messages!r}.", param="messages")
    transcript = _Transcript()
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        if not is_object(message) or message.get("role") not in _ROLES:
            expected = ", ".join(_ROLES)
            raise Violation(message=f"Invalid '{path}': expected a message with role {expected}.", param=path)
        _check_content(path, message)
        _check_calls(path, message)
        transcript.follow(index, message)
    transcript.unanswered("the end of the messages")


def _check_content(path: str, message: Mapping[str, object]) -> None:
    content = message.get("content")
    has_substitute = message["role"] == "assistant" and any(message.get(key) for key in _CONTENT_SUBSTITUTES)
    if isinstance(content, str) or (is_array(content) and content) or (content is None and has_substitute):
        return
    raise Violation(
        message=f"Invalid value for '{path}.content': expected a string or a non-empty array, got {content!r}.",
        param=f"{path}.content",
    )


def _check_calls(path: str, message: Mapping[str, object]) -> None:
    calls = message.get("tool_calls")
    if message["role"] != "assistant" or calls is None:
        return
    if not is_array(calls) or not calls:
        raise Violation(
            message=f"Invalid '{path}.tool_calls': expected a non-empty array, got {calls!r}.",
            param=f"{path}.tool_calls",
        )
    seen: set[object] = set()
    for position, item in enumerate(calls):
        where = f"{path}.tool_calls[{position}]"
        _check_call(where, item)
        call_id = _object(item).get("id")
        if call_id in seen:
            raise Violation(message=f"Duplicate '{where}.id': {call_id!r} names two calls.", param=f"{where}.id")
        seen.add(call_id)


def _check_call(path: str, item: object) -> None:
    call_id = _object(item).get("id")
    if not isinstance(call_id, str) or not 1 <= len(call_id) <= _MAXIMUM_ID_LENGTH:
        raise Violation(
            message=f"Invalid '{path}.id': expected a string of 1 to {_MAXIMUM_ID_LENGTH} characters, got {call_id!r}.",
            param=f"{path}.id",
        )
    function = _function_of(item)
    _check_name(f"{path}.function.name", function.get("name"))
    if not isinstance(function.get("arguments"), str):
        raise Violation(
            message=f"Invalid '{path}.function.arguments': expected a string, got {function.get('arguments')!r}.",
            param=f"{path}.function.arguments",
        )


def _check_name(path: str, name: object) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise Violation(
            message=f"Invalid '{path}': {name!r} does not match the pattern ^[a-zA-Z0-9_-]{{1,64}}$.", param=path
        )


class _Transcript:
    """Follows the messages and knows which calls wait for their answer."""

    def __init__(self) -> None:
        self._caller = 0
        self._waiting: list[object] = []
        self._answered: list[object] = []

    def follow(self, index: int, message: Mapping[str, object]) -> None:
        role = message["role"]
        if role == "tool":
            self._answer(f"messages[{index}]", message.get("tool_call_id"))
            return
        self.unanswered(f"messages[{index}] (role {role!r})")
        self._caller = index
        self._waiting = [_object(item).get("id") for item in _array(message.get("tool_calls")) if role == "assistant"]
        self._answered = []

    def unanswered(self, before: str) -> None:
        if self._waiting:
            raise Violation(
                message=f"messages[{self._caller}]: an assistant message with 'tool_calls' must be followed by tool "
                "messages responding to each 'tool_call_id'. The following tool_call_ids did not have response "
                f"messages before {before}: {', '.join(map(str, self._waiting))}.",
                param=f"messages[{self._caller}].tool_calls",
            )

    def _answer(self, path: str, call_id: object) -> None:
        param = f"{path}.tool_call_id"
        if call_id in self._answered:
            raise Violation(message=f"{path}: tool_call_id {call_id!r} is already answered.", param=param)
        if call_id not in self._waiting:
            raise Violation(
                message=f"{path}: messages with role 'tool' must be a response to a preceding message with "
                f"'tool_calls', and no call {call_id!r} is waiting.",
                param=param,
            )
        self._waiting.remove(call_id)
        self._answered.append(call_id)


def _check_tools(body: Mapping[str, object]) -> None:
    tools = body.get("tools")
    if tools is None:
        return
    if not is_array(tools) or not tools:
        raise Violation(message=f"Invalid 'tools': expected a non-empty array, got {tools!r}.", param="tools")
    for index, tool in enumerate(tools):
        _check_name(f"tools[{index}].function.name", _function_of(tool).get("name"))


def _check_tool_choice(body: Mapping[str, object]) -> None:
    if body.get("tools") is None:
        for key in ("tool_choice", "parallel_tool_calls"):
            if body.get(key) is not None:
                raise Violation(
                    message=f"Invalid value for '{key}': '{key}' is only allowed when 'tools' are specified.", param=key
                )
    choice = body.get("tool_choice")
    if choice is None or choice in _CHOICES:
        return
    name = _function_of(choice).get("name")
    if name not in tool_names(body):
        raise Violation(
            message=f"Invalid value for 'tool_choice': {choice!r} is none of {', '.join(_CHOICES)} and names no tool.",
            param="tool_choice",
        )


def _object(value: object) -> dict[str, object]:
    return value if is_object(value) else {}


def _array(value: object) -> list[object]:
    return value if is_array(value) else []


def _function_of(item: object) -> dict[str, object]:
    return _object(_object(item).get("function"))
