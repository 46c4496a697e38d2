"""Rules of OpenAI's chat completion API that an agent loop can break.

Checked: the model; the messages, with each call answered once, right after it, and no answer without a call; the names,
ids and arguments of calls; the tools and the tool choice. Unknown keys pass. The wording follows OpenAI's, with the
index of the message and the ids in it. Pure; knows neither HTTP nor scripts.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Generic, Literal, NamedTuple, TypeGuard, TypeVar

__all__ = ["CallPairing", "Violation", "find_violation", "is_array", "is_object", "tool_names"]

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_MAXIMUM_ID_LENGTH = 40
_ROLES = ("developer", "system", "user", "assistant", "tool", "function")
_CONTENT_SUBSTITUTES = ("tool_calls", "function_call", "refusal", "audio")
_CHOICES = ("none", "auto", "required")


class Violation(NamedTuple):
    """A broken rule.

    Attributes:
        param: The parameter at fault, as a path such as ``messages[3].content``.
        message: Why OpenAI would refuse the request.
    """

    param: str
    message: str


def is_object(value: object) -> TypeGuard[dict[str, object]]:
    """Whether a parsed JSON value is an object."""
    return isinstance(value, dict)


def is_array(value: object) -> TypeGuard[list[object]]:
    """Whether a parsed JSON value is an array."""
    return isinstance(value, list)


def find_violation(body: Mapping[str, object]) -> Violation | None:
    """Find the first rule that a request breaks.

    Args:
        body: The parsed JSON of a request to ``/v1/chat/completions``.

    Returns:
        The violation, or None if OpenAI would accept the request.
    """
    return next(_violations(body), None)


def tool_names(body: Mapping[str, object]) -> tuple[str, ...]:
    """List the functions that a request offers, in order; tools of another shape are skipped."""
    return tuple(name for tool in _array(body.get("tools")) if isinstance(name := _function_of(tool).get("name"), str))


_Call = TypeVar("_Call")


class CallPairing(Generic[_Call]):
    """Pairs the calls and results of a history, whatever the type of its messages.

    OpenAI's rule: each call has one result, right after the message that makes the call.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, _Call] = {}
        self._answered: set[str] = set()

    def begin(self, calls: Mapping[str, _Call]) -> list[_Call]:
        """Take the calls, by id, of a message that is not a result; return the earlier calls that have no result."""
        unanswered = list(self._waiting.values())
        self._waiting, self._answered = dict(calls), set()
        return unanswered

    def answer(self, call_id: str) -> Literal["answered", "uncalled", "repeated"]:
        """Match a result to its call; the call may be unknown, or already have a result."""
        if call_id in self._answered:
            return "repeated"
        if call_id not in self._waiting:
            return "uncalled"
        del self._waiting[call_id]
        self._answered.add(call_id)
        return "answered"


# Each check below yields violations in the order of the request. Only the first violation is used, so a check may rely
# on everything that earlier checks have validated.


def _violations(body: Mapping[str, object]) -> Iterator[Violation]:
    if not isinstance(body.get("model"), str) or not body["model"]:
        yield Violation("model", "You must provide a model parameter.")
    messages = body.get("messages")
    if not is_array(messages) or not messages:
        yield Violation("messages", f"Invalid 'messages': expected a non-empty array, got {messages!r}.")
    yield from _in_messages(_array(messages))
    yield from _in_tools(body.get("tools"))
    yield from _in_tool_choice(body)


def _in_messages(messages: list[object]) -> Iterator[Violation]:
    caller, pairing = 0, CallPairing[str]()
    for index, item in enumerate(messages):
        path, message = f"messages[{index}]", _object(item)
        role = message.get("role")
        if role not in _ROLES:
            yield Violation(path, f"Invalid '{path}': expected a message with role {', '.join(_ROLES)}.")
        yield from _in_content(path, message)
        yield from _in_calls(path, message)
        if role == "tool":
            yield from _in_answer(path, message.get("tool_call_id"), pairing)
        else:
            calls = _array(message.get("tool_calls")) if role == "assistant" else []
            ids = [str(_object(call).get("id")) for call in calls]
            yield from _unanswered(
                caller, pairing.begin({call_id: call_id for call_id in ids}), f"{path} (role {role!r})"
            )
            caller = index
    yield from _unanswered(caller, pairing.begin({}), "the end of the messages")


def _in_content(path: str, message: Mapping[str, object]) -> Iterator[Violation]:
    content = message.get("content")
    has_substitute = message["role"] == "assistant" and any(message.get(key) for key in _CONTENT_SUBSTITUTES)
    if not (isinstance(content, str) or (is_array(content) and content) or (content is None and has_substitute)):
        expected = f"expected a string or a non-empty array, got {content!r}"
        yield Violation(f"{path}.content", f"Invalid value for '{path}.content': {expected}.")


def _in_calls(path: str, message: Mapping[str, object]) -> Iterator[Violation]:
    calls, path = message.get("tool_calls"), f"{path}.tool_calls"
    if message["role"] != "assistant" or calls is None:
        return
    if not is_array(calls) or not calls:
        yield Violation(path, f"Invalid '{path}': expected a non-empty array, got {calls!r}.")
    seen = list[object]()
    for position, call in enumerate(map(_object, _array(calls))):
        where, call_id, function = f"{path}[{position}]", call.get("id"), _function_of(call)
        if not isinstance(call_id, str) or not 1 <= len(call_id) <= _MAXIMUM_ID_LENGTH:
            expected = f"a string of 1 to {_MAXIMUM_ID_LENGTH} characters"
            yield Violation(f"{where}.id", f"Invalid '{where}.id': expected {expected}, got {call_id!r}.")
        yield from _in_name(f"{where}.function.name", function.get("name"))
        if not isinstance(arguments := function.get("arguments"), str):
            where = f"{where}.function.arguments"
            yield Violation(where, f"Invalid '{where}': expected a string, got {arguments!r}.")
        if call_id in seen:
            yield Violation(f"{where}.id", f"Duplicate '{where}.id': {call_id!r} names two calls.")
        seen.append(call_id)


def _in_name(path: str, name: object) -> Iterator[Violation]:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        yield Violation(path, f"Invalid '{path}': {name!r} does not match the pattern ^[a-zA-Z0-9_-]{{1,64}}$.")


def _in_answer(path: str, call_id: object, pairing: CallPairing[str]) -> Iterator[Violation]:
    param = f"{path}.tool_call_id"
    match pairing.answer(call_id) if isinstance(call_id, str) else "uncalled":
        case "answered":
            pass
        case "repeated":
            yield Violation(param, f"{path}: tool_call_id {call_id!r} is already answered.")
        case "uncalled":
            rule = "messages with role 'tool' must be a response to a preceding message with 'tool_calls', and no call"
            yield Violation(param, f"{path}: {rule} {call_id!r} is waiting.")


def _unanswered(caller: int, waiting: list[str], before: str) -> Iterator[Violation]:
    if waiting:
        yield Violation(
            f"messages[{caller}].tool_calls",
            f"messages[{caller}]: an assistant message with 'tool_calls' must be followed by tool messages responding "
            "to each 'tool_call_id'. The following tool_call_ids did not have response messages before "
            f"{before}: {', '.join(waiting)}.",
        )


def _in_tools(tools: object) -> Iterator[Violation]:
    if tools is not None and (not is_array(tools) or not tools):
        yield Violation("tools", f"Invalid 'tools': expected a non-empty array, got {tools!r}.")
    for index, tool in enumerate(_array(tools)):
        yield from _in_name(f"tools[{index}].function.name", _function_of(tool).get("name"))


def _in_tool_choice(body: Mapping[str, object]) -> Iterator[Violation]:
    for key in ("tool_choice", "parallel_tool_calls"):
        if body.get("tools") is None and body.get(key) is not None:
            yield Violation(key, f"Invalid value for '{key}': '{key}' is only allowed when 'tools' are specified.")
    choice = body.get("tool_choice")
    if choice is not None and choice not in _CHOICES and _function_of(choice).get("name") not in tool_names(body):
        expected = ", ".join(_CHOICES)
        message = f"Invalid value for 'tool_choice': {choice!r} is none of {expected} and names no tool."
        yield Violation("tool_choice", message)


def _object(value: object) -> dict[str, object]:
    return value if is_object(value) else {}


def _array(value: object) -> list[object]:
    return value if is_array(value) else []


def _function_of(item: object) -> dict[str, object]:
    return _object(_object(item).get("function"))
