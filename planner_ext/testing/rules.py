"""Rules of OpenAI's chat completion API that an agent loop can break.

Checked: the model; that each call is answered once, right after it; names, ids and
arguments; tools and tool choice; that a JSON response format is spoken of. Unknown keys
pass. The wording follows OpenAI's.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeGuard, cast

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_SPEAKER = re.compile(r"[^\s<|\\/>]{1,64}")
_MAXIMUM_ID_LENGTH = 40
_ROLES = ("developer", "system", "user", "assistant", "tool", "function")
_CONTENT_SUBSTITUTES = ("tool_calls", "function_call", "refusal", "audio")
_CHOICES = ("none", "auto", "required")


class Violation(NamedTuple):
    """A broken rule.

    Attributes:
        param: The parameter at fault, such as ``messages[3].content``.
        message: Why OpenAI would refuse the request.
    """

    param: str
    message: str


def is_object(value: object) -> TypeGuard[dict[str, Any]]:
    """Whether a parsed JSON value is an object."""
    return isinstance(value, dict)


def object_of(value: object) -> dict[str, Any]:
    """Return a JSON value if it is an object, else an empty one."""
    return value if is_object(value) else {}


def find_violation(body: Mapping[str, Any]) -> Violation | None:
    """Find the first rule that a request's body breaks; None if OpenAI accepts it."""
    return next(_violations(body), None)


def tool_names(body: Mapping[str, Any]) -> tuple[str, ...]:
    """List the functions that a request offers."""
    return tuple(
        name
        for tool in _array(body.get("tools"))
        if isinstance(name := _function_of(tool).get("name"), str)
    )


# Only the first violation is used, so a check may rely on what earlier checks have validated.


def _violations(body: Mapping[str, Any]) -> Iterator[Violation]:
    if not isinstance(body.get("model"), str) or not body["model"]:
        yield Violation("model", "You must provide a model parameter.")
    messages = body.get("messages")
    if not _array(messages):
        yield _invalid("messages", "a non-empty array", messages)
    yield from _in_messages(_array(messages))
    if (
        object_of(body.get("response_format")).get("type") == "json_object"
        and "json" not in str(messages).lower()
    ):
        word = "'messages' must contain the word 'json' in some form, to use 'response_format' of type 'json_object'."
        yield Violation("messages", word)
    yield from _in_tools(body.get("tools"))
    yield from _in_tool_choice(body)


def _in_messages(messages: list[Any]) -> Iterator[Violation]:
    caller = 0
    # Of each call of the message ``caller``: whether its result came right after it.
    answered: dict[str, bool] = {}
    for index, message in enumerate(map(object_of, messages)):
        path = f"messages[{index}]"
        role = message.get("role")
        if role not in _ROLES:
            yield Violation(
                path,
                f"Invalid '{path}': expected a message with role {', '.join(_ROLES)}.",
            )
        yield from _in_content(path, message)
        name = message.get("name") or "_"
        if not _SPEAKER.fullmatch(str(name)):
            yield Violation(
                f"{path}.name",
                f"Invalid '{path}.name': {name!r} does not match ^[^\\s<|\\\\/>]+$.",
            )
        if role == "tool":
            yield from _in_answer(path, message.get("tool_call_id"), answered)
            continue
        calls = message.get("tool_calls") if role == "assistant" else None
        if calls is not None:
            yield from _in_calls(f"{path}.tool_calls", calls)
        yield from _unanswered(caller, answered, f"{path} (role {role!r})")
        ids = [call["id"] for call in _array(calls)]
        answered = dict.fromkeys(ids, False)
        caller = index
    yield from _unanswered(caller, answered, "the end of the messages")


def _in_content(path: str, message: Mapping[str, Any]) -> Iterator[Violation]:
    content = message.get("content")
    has_substitute = message["role"] == "assistant" and any(
        message.get(key) for key in _CONTENT_SUBSTITUTES
    )
    if not (
        isinstance(content, str)
        or _array(content)
        or (content is None and has_substitute)
    ):
        expected = f"expected a string or a non-empty array, got {content!r}"
        yield Violation(
            f"{path}.content", f"Invalid value for '{path}.content': {expected}."
        )


def _in_calls(path: str, calls: object) -> Iterator[Violation]:
    if not _array(calls):
        yield _invalid(path, "a non-empty array", calls)
    seen = list[object]()
    for position, call in enumerate(map(object_of, _array(calls))):
        where = f"{path}[{position}]"
        call_id = call.get("id")
        function = _function_of(call)
        if not isinstance(call_id, str) or not 1 <= len(call_id) <= _MAXIMUM_ID_LENGTH:
            yield _invalid(
                f"{where}.id",
                f"a string of 1 to {_MAXIMUM_ID_LENGTH} characters",
                call_id,
            )
        yield from _in_name(f"{where}.function.name", function.get("name"))
        if not isinstance(arguments := function.get("arguments"), str):
            yield _invalid(f"{where}.function.arguments", "a string", arguments)
        if call_id in seen:
            yield Violation(
                f"{where}.id", f"Duplicate '{where}.id': {call_id!r} names two calls."
            )
        seen.append(call_id)


def _in_name(path: str, name: object) -> Iterator[Violation]:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        yield Violation(
            path,
            f"Invalid '{path}': {name!r} does not match the pattern ^[a-zA-Z0-9_-]{{1,64}}$.",
        )


def _in_answer(
    path: str, call_id: object, answered: dict[str, bool]
) -> Iterator[Violation]:
    where = f"{path}.tool_call_id"
    if not isinstance(call_id, str) or call_id not in answered:
        rule = "messages with role 'tool' must be a response to a preceding message with 'tool_calls', and no call"
        yield Violation(where, f"{path}: {rule} {call_id!r} is waiting.")
    elif answered[call_id]:
        yield Violation(where, f"{path}: tool_call_id {call_id!r} is already answered.")
    else:
        answered[call_id] = True


def _unanswered(
    caller: int, answered: Mapping[str, bool], before: str
) -> Iterator[Violation]:
    waiting = [call for call, is_answered in answered.items() if not is_answered]
    if waiting:
        yield Violation(
            f"messages[{caller}].tool_calls",
            f"messages[{caller}]: an assistant message with 'tool_calls' must be followed by tool messages responding "
            "to each 'tool_call_id'. The following tool_call_ids did not have response messages before "
            f"{before}: {', '.join(waiting)}.",
        )


def _in_tools(tools: object) -> Iterator[Violation]:
    if tools is not None and not _array(tools):
        yield _invalid("tools", "a non-empty array", tools)
    for index, tool in enumerate(_array(tools)):
        yield from _in_name(
            f"tools[{index}].function.name", _function_of(tool).get("name")
        )


def _in_tool_choice(body: Mapping[str, Any]) -> Iterator[Violation]:
    for key in ("tool_choice", "parallel_tool_calls"):
        if body.get("tools") is None and body.get(key) is not None:
            yield Violation(
                key,
                f"Invalid value for '{key}': '{key}' is only allowed when 'tools' are specified.",
            )
    choice = body.get("tool_choice")
    if (
        choice is not None
        and choice not in _CHOICES
        and _function_of(choice).get("name") not in tool_names(body)
    ):
        expected = ", ".join(_CHOICES)
        message = f"Invalid value for 'tool_choice': {choice!r} is none of {expected} and names no tool."
        yield Violation("tool_choice", message)


def _invalid(path: str, expected: str, seen: object) -> Violation:
    return Violation(path, f"Invalid '{path}': expected {expected}, got {seen!r}.")


def _array(value: object) -> list[Any]:
    if isinstance(value, list):
        return cast("list[Any]", value)
    return []


def _function_of(item: object) -> dict[str, Any]:
    return object_of(object_of(item).get("function"))
