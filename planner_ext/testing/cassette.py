"""Cassettes: a run's requests to its model, the replies, and its journal, as one readable JSON file.

A request is kept without headers, the connector's classes and the ids of calls; one
that continues an earlier request is written as its new messages. Texts are scrubbed; in
a replay a scrubbed part matches any text. A file is untrusted: all of it is validated.
"""

import builtins
import hmac
import json
import os
import platform
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from secrets import token_bytes
from typing import Annotated, Any, cast

import semantic_kernel.exceptions as kernel_errors
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic_core import to_jsonable_python
from semantic_kernel.connectors.ai import PromptExecutionSettings
from semantic_kernel.contents import ChatHistory

from planner_ext.core.errors import InvalidJournalError, PlannerExtError, described
from planner_ext.core.facts import Fact
from planner_ext.core.values import frozen
from planner_ext.engine.document import (
    MOST_BYTES,
    document_of,
    dump_facts,
    load_facts,
    read_document,
    read_file,
)
from planner_ext.sk.checkpoint import Checkpoint
from planner_ext.sk.errors import PlannerException
from planner_ext.sk.messages import load_message, part_of
from planner_ext.testing.scrub import SCRUBBED, Scrubber

_MOST_MESSAGES = 10_000_000
"""In all requests of a file, each with those that it continues."""
_LOOK_BACK = 20
"""Earlier requests of which a request may continue one."""


class CassetteError(PlannerExtError):
    """A cassette is missing, damaged, too large, or newer than this package."""


class ReplayDifferenceError(PlannerException):
    """A replayed run's requests or results differ from the recorded ones.

    Attributes:
        differences: As they were found.
        notes: What else is not as it was: the versions, and the options of a run.
    """

    def __init__(
        self, differences: Sequence["Difference"], notes: Sequence[str] = ()
    ) -> None:
        self.differences = tuple(differences)
        self.notes = tuple(notes)
        listed = "\n".join([f"- {one}" for one in self.differences] + [*self.notes])
        super().__init__(
            f"The run differs from the recorded one:\n{listed}\nIf that is intended, record the cassette again."
        )


@frozen
class Difference:
    """One place in which a replayed run differs from the recorded one.

    Attributes:
        request: The recorded request, 0-based.
        function: Whose result or schema differs; "" for anything else.
    """

    request: int
    what: str
    function: str = ""
    expected: str
    got: str

    def __str__(self) -> str:
        pairs = enumerate(zip(self.expected, self.got, strict=False))
        same = next(
            (place for place, (one, other) in pairs if one != other),
            min(len(self.expected), len(self.got)),
        )
        expected, got = (_around(same, text) for text in (self.expected, self.got))
        return (
            f"request {self.request}, {self.what}: expected {expected!r}, got {got!r}"
        )


_CONTEXT = 60


def _around(place: int, text: str) -> str:
    start = max(place - _CONTEXT, 0)
    end = place + _CONTEXT
    return f"{'…' if start else ''}{text[start:end]}{'…' if end < len(text) else ''}"


# The normal form of a request.

_NOT_COMPARED = frozenset(
    {
        "ai_model_id",
        "extension_data",
        "extra_headers",
        "extra_query",
        "function_choice_behavior",
        "messages",
        "service_id",
        "stream",
    }
    | {"stream_options", "tools"}
)


@frozen
class Asked:
    """A request in its normal form, as JSON values.

    Attributes:
        function: The function of a run that makes the request, if any.
        messages: As OpenAI's API has them, with the ids of calls numbered.
        tools: As the connector writes them.
        settings: The others that are set, and the tool choice.
    """

    service: str
    function: str
    messages: list[dict[str, Any]]
    tools: list[Any]
    settings: dict[str, Any]

    def equals(self, other: "Asked") -> bool:
        """Whether a replayed request equals this recorded one."""
        return all(
            same(getattr(self, one.name), getattr(other, one.name))
            for one in fields(self)
        )

    @classmethod
    def of(
        cls,
        service: str,
        function: str,
        history: ChatHistory,
        settings: PromptExecutionSettings,
    ) -> "Asked":
        """Write a connector's request in normal form."""
        given = {
            **settings.extension_data,
            **settings.model_dump(exclude_none=True, exclude_defaults=True),
        }
        kept = {
            name: value for name, value in given.items() if name not in _NOT_COMPARED
        }
        tools: Any = getattr(settings, "tools", None) or []
        parts = [message.to_dict() for message in history.messages], tools, kept
        messages, tools, kept = to_jsonable_python(
            parts, bytes_mode="base64", fallback=_shown
        )
        return cls(
            service=service,
            function=function,
            messages=_numbered(messages),
            tools=tools,
            settings=kept,
        )


def _shown(value: object) -> str:
    """Write an object without its address."""
    return re.sub(r" at 0x[0-9A-Fa-f]+", "", str(value))


def same(recorded: Any, value: Any) -> bool:
    """Compare JSON values with recorded ones, whose scrubbed parts match any text."""
    if isinstance(recorded, dict) and isinstance(value, dict):
        old, new = cast("tuple[dict[str, Any], dict[str, Any]]", (recorded, value))
        return len(old) == len(new) and all(
            same(one, new[key])
            if key in new
            else any(same([key, one], [*item]) for item in new.items())
            for key, one in old.items()
        )
    if isinstance(recorded, list) and isinstance(value, list):
        before, now = cast("tuple[list[Any], list[Any]]", (recorded, value))
        return len(before) == len(now) and all(map(same, before, now))
    if not (
        isinstance(recorded, str) and isinstance(value, str) and SCRUBBED in recorded
    ):
        return recorded == value
    first, *parts, last = recorded.split(SCRUBBED)
    if not (value.startswith(first) and value.endswith(last)):
        return False
    place = len(first)
    end = len(value) - len(last)
    for part in parts:
        found = value.find(part, place, end)
        if found < 0:
            return False
        place = found + len(part)
    return place <= end


def _numbered(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    ids: dict[object, str] = {}
    for message in messages:
        for call in message.get("tool_calls") or ():
            call["id"] = ids.setdefault(call.get("id"), f"call {len(ids) + 1}")
        if "tool_call_id" in message:
            message["tool_call_id"] = ids.get(
                message["tool_call_id"], message["tool_call_id"]
            )
    return messages


def differences(number: int, expected: Asked, got: Asked) -> Iterator[Difference]:
    """List the differences between a recorded request and the one at its position."""

    def one(what: str, before: Any, now: Any, function: str = "") -> Difference:
        return Difference(
            request=number,
            what=what,
            function=function,
            expected=_text(before),
            got=_text(now),
        )

    if expected.service != got.service:
        yield one("the service", expected.service, got.service)
    for name, old, new in _changed(
        *({_tool_name(tool): tool for tool in asked.tools} for asked in (expected, got))
    ):
        yield one(f"the schema of {name}", old, new, name)
    for name, old, new in _changed(expected.settings, got.settings):
        yield one(f"the setting {name}", old, new)
    functions = _functions(expected.messages)
    for place, old, new in _changed(
        *(dict(enumerate(asked.messages)) for asked in (expected, got))
    ):
        function = None
        if old and new:
            function = functions.get(old.get("tool_call_id"))
        if function is not None:
            yield one(
                f"the result of {function}",
                old.get("content"),
                new.get("content"),
                function,
            )
        else:
            yield one(
                f"message {place} ({(old or new).get('role')})",
                _essence(old),
                _essence(new),
            )


def _changed(
    before: dict[Any, Any], now: dict[Any, Any]
) -> Iterator[tuple[Any, Any, Any]]:
    """List the keys whose values differ, with both values."""
    for key in dict.fromkeys([*before, *now]):
        if not same(before.get(key), now.get(key)):
            yield key, before.get(key), now.get(key)


def _functions(messages: Sequence[Mapping[str, Any]]) -> dict[Any, str]:
    """Name each call's function, by the call's id."""
    names: dict[Any, str] = {}
    for message in messages:
        for call in message.get("tool_calls") or ():
            names[call.get("id")] = str(call["function"]["name"])
    return names


def _tool_name(tool: Any) -> str:
    """Read a name in the formats of most connectors."""
    for place in (part_of(tool, "function"), tool):
        name = part_of(place, "name")
        if name is not None:
            return str(name)
    return _text(tool)


def _essence(message: Mapping[str, Any] | None) -> Any:
    """Reduce a message of only a role and text to its text."""
    return (
        message["content"]
        if message is not None and {*message} == {"role", "content"}
        else message
    )


def _text(value: Any) -> str:
    return (
        value
        if isinstance(value, str)
        else "nothing"
        if value is None
        else json.dumps(value, ensure_ascii=False)
    )


# The file.


def versions() -> dict[str, str]:
    """Return the versions that a cassette names."""
    packages = {name: version(name) for name in ("planner-ext", "semantic-kernel")}
    return {**packages, "python": platform.python_version()}


def options_of(run: Sequence[Fact]) -> dict[str, Any]:
    """Return the options with which a run began, as JSON values, without defaults."""
    first, *_ = dump_facts(run[:1]) or [{}]
    return first.get("rules", {})


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Raised(_Strict):
    """An exception of a service, or a cause of one."""

    type: str = Field(pattern=r"^[A-Za-z_]\w{0,99}$")
    text: str

    @classmethod
    def chain(cls, error: BaseException | None) -> "list[Raised]":
        """List an exception and its causes."""
        found: list[Raised] = []
        while error is not None and len(found) < _LOOK_BACK:
            name = re.sub(r"^(?![A-Za-z_])|\W", "_", type(error).__name__)[:100]
            found.append(cls(type=name, text=str(error)))
            error = error.__cause__
        return found

    @staticmethod
    def again(chain: "Sequence[Raised]") -> Exception:
        """Build an exception again, with its causes."""
        first, *causes = [raised._error() for raised in chain]
        for error, cause in zip([first, *causes], causes, strict=False):
            error.__cause__ = cause
        return first

    def _error(self) -> Exception:
        """Build one of a known class, or of a new class of that name."""
        kind: Any = getattr(kernel_errors, self.type, None) or getattr(
            builtins, self.type, None
        )
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            kind = type(self.type, (Exception,), {})
        try:
            return kind(self.text)
        except TypeError:  # some take more than a text
            return type(self.type, (Exception,), {})(self.text)


class Exchange(_Strict):
    """A request as written, with its replies or the exception that it raised.

    Attributes:
        continues: The earlier request whose messages come before these.
        tools: None for those of that request.
        within: The functions around ``function``, the innermost first.
        replies: None while under way, or if it raised; of a stream, what arrived.
        abandoned: Whether it was cancelled, or its stream was left.
    """

    service: str
    function: str = ""
    within: list[str] = []
    continues: int | None = None
    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    settings: dict[str, Any] = {}
    replies: list[dict[str, Any]] | None = None
    error: list[Raised] = []
    abandoned: bool = False


class _Content(_Strict):
    versions: dict[str, str]
    options: list[dict[str, Any]] = Field(max_length=100_000)
    services: dict[
        str, Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
    ]
    requests: list[Exchange] = Field(max_length=100_000)
    runs: list[list[Any]] = Field(max_length=100_000)


@dataclass(frozen=True, slots=True)
class Cassette:
    """Recorded runs, with the requests to their models.

    Attributes:
        services: The model of each service, by its id.
        exchanges: The requests, in order.
        runs: The journals, nested ones included, in the order in which they began.
        versions: Those with which they were recorded.
    """

    services: Mapping[str, str]
    exchanges: Sequence[tuple[Asked, Exchange]]
    runs: Sequence[tuple[Fact, ...]]
    versions: Mapping[str, str] = field(default_factory=versions)

    def write(self, path: Path, scrub: Scrubber) -> None:
        """Write the file atomically.

        Raises:
            CassetteError: If it cannot be written, or could not be read.
        """
        every = range(len(self.exchanges))
        salt = token_bytes(32)
        written: dict[str, Any] = {
            "versions": dict(self.versions),
            "options": scrub.values([options_of(facts) for facts in self.runs]),
            "services": dict(self.services),
            "requests": scrub.values(
                [self._packed(n).model_dump(exclude_defaults=True) for n in every]
            ),
            "runs": [_scrubbed(dump_facts(facts), scrub, salt) for facts in self.runs],
        }
        try:
            text = (
                json.dumps(
                    document_of("cassette", **written), indent=1, ensure_ascii=False
                )
                + "\n"
            )
            self._of(_Content.model_validate(written))
        except (ValidationError, InvalidJournalError, _DamagedError) as error:
            raise CassetteError(
                f"The cassette {path} could not be read, and is not written: scrub patterns must not match what is no "
                f"secret, such as roles and the names of functions. {error}"
            ) from None
        except ValueError as error:
            raise CassetteError(
                f"The cassette {path} cannot be written: {error}."
            ) from None
        content = text.encode("utf-8", "backslashreplace")
        if len(content) > MOST_BYTES:
            raise CassetteError(
                f"The cassette {path} has {len(content):,} bytes, and could not be read: at most {MOST_BYTES:,}. "
                "Record fewer requests in one."
            )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(
                dir=path.parent, prefix=f".{path.name}."
            )
            try:
                with open(descriptor, "wb") as file:
                    file.write(content)
                os.replace(name, path)
            except BaseException:
                os.unlink(name)
                raise
        except OSError as error:
            raise CassetteError(
                f"The cassette {path} cannot be written: {error.strerror}."
            ) from None

    def _packed(self, number: int) -> Exchange:
        asked, exchange = self.exchanges[number]
        for earlier in range(number - 1, max(number - _LOOK_BACK, -1), -1):
            before = self.exchanges[earlier][0]
            known = len(before.messages)
            if known and asked.messages[:known] == before.messages:
                tools = None
                if asked.tools != before.tools:
                    tools = asked.tools
                own = {
                    "continues": earlier,
                    "messages": asked.messages[known:],
                    "tools": tools,
                }
                return exchange.model_copy(update=own)
        return exchange

    @classmethod
    def read(cls, path: Path) -> "Cassette":
        """Read and validate a file.

        Raises:
            CassetteError: If it is not a valid cassette; names the place.
        """
        try:
            document = read_document(
                read_file(path, "cassette"), "cassette", [*_Content.model_fields]
            )
            content = {name: document[name] for name in _Content.model_fields}
            return cls._of(_Content.model_validate(content))
        except OSError as error:
            raise CassetteError(
                f"The cassette {path} cannot be read: {error.strerror}."
            ) from None
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "its top"
            raise CassetteError(
                f"The cassette {path} is damaged at {place}: {first['msg']}."
            ) from None
        except (InvalidJournalError, _DamagedError) as error:
            raise CassetteError(
                f"The cassette {path} cannot be used. {error}"
            ) from None
        except Exception as error:  # a file may hold anything
            raise CassetteError(
                f"The cassette {path} cannot be used: {described(error)}."
            ) from None

    @classmethod
    def _of(cls, file: _Content) -> "Cassette":
        exchanges: list[tuple[Asked, Exchange]] = []
        messages = 0
        for number, one in enumerate(file.requests):
            exchanges.append((_whole(one, number, exchanges), one))
            messages += len(exchanges[-1][0].messages)
            if messages > _MOST_MESSAGES:
                raise _DamagedError(
                    f"Up to requests.{number} it has more than {_MOST_MESSAGES:,} messages."
                )
        runs: list[tuple[Fact, ...]] = []
        for number, facts in enumerate(file.runs):
            try:
                checkpoint = Checkpoint(load_facts(facts))
                runs.append(checkpoint.checked().facts)
            except InvalidJournalError as error:
                raise _DamagedError(
                    f"Its run {number} (runs.{number}) is damaged: {error}"
                ) from error
        return cls(file.services, exchanges, runs, file.versions)


class _DamagedError(Exception):
    """A part of a file is damaged."""


def _scrubbed(facts: list[Any], scrub: Scrubber, salt: bytes) -> list[Any]:
    """Scrub a journal, and key its digests: a short secret could be guessed from them."""
    clean: list[Any] = scrub.values(facts)
    for fact in clean if clean != facts else ():
        for name in ("digest", "fingerprint"):
            if fact.get(name):
                digest = hmac.new(salt, fact[name].encode(), "sha256")
                fact[name] = digest.hexdigest()
    return clean


def _whole(
    one: Exchange, number: int, before: Sequence[tuple[Asked, Exchange]]
) -> Asked:
    """Complete a request by the one that it continues."""
    messages = one.messages
    tools = one.tools
    if one.continues is not None:
        if not 0 <= one.continues < number:
            raise _DamagedError(
                f"requests.{number}.continues is {one.continues}, which is no earlier request."
            )
        earlier = before[one.continues][0]
        messages = [*earlier.messages, *messages]
        tools = earlier.tools if tools is None else tools
    try:
        for reply in one.replies or ():
            load_message(reply)
        _functions(messages)
    except Exception as error:  # Semantic Kernel's contents raise errors of many kinds
        raise _DamagedError(
            f"requests.{number} is damaged: {str(error)[:300]}"
        ) from None
    return Asked(
        service=one.service,
        function=one.function,
        messages=messages,
        tools=tools or [],
        settings=one.settings,
    )
