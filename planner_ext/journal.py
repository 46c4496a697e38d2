"""Facts to JSON and back. The form is versioned; a newer one than this package knows is refused.

Schema numbers:
    1  the first.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Annotated, Any, cast

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from planner_ext.core.errors import InvalidJournalError, InvalidLimitError, NewerSchemaError
from planner_ext.core.facts import Fact, IterationCompleted, MessageAdded, ModelReplied, Planned, RunStarted
from planner_ext.core.shown import shown
from planner_ext.core.values import Message, ReplyEntry

__all__ = [
    "SCHEMA",
    "check_schema",
    "dump_facts",
    "dump_journal",
    "dump_message",
    "load_facts",
    "load_journal",
    "messages_of",
]

SCHEMA = 1

_CHECKPOINT = "checkpoint"
"""Where the metadata of a message that ended a run holds that run; it is not written with the message."""


@cache
def _facts() -> TypeAdapter[list[Fact]]:
    """Build what reads and writes facts; not at import, which it would make a tenth longer for everybody."""
    return TypeAdapter(
        list[Annotated[Fact, Field(discriminator="type")]], config=ConfigDict(extra="forbid", allow_inf_nan=False)
    )


DumpMessage = Callable[[Message], Any]
"""Turns an opaque message into JSON values. What is JSON already, as after a load, it returns as it is."""


def dump_message(message: Message) -> Any:
    """Write a message as JSON values, as its own model does: bytes as base64, other values that are no JSON as text."""
    if not isinstance(message, BaseModel):
        return message
    values = message.model_dump(exclude_none=True, exclude={"metadata": {_CHECKPOINT}})
    return to_jsonable_python(values, bytes_mode="base64", fallback=str)


def dump_journal(facts: Sequence[Fact], dump_message: DumpMessage) -> str:
    """Write a journal as JSON text."""
    return json.dumps({"schema": SCHEMA, "facts": dump_facts(facts, dump_message)}, separators=(",", ":"))


def load_journal(text: str) -> tuple[Fact, ...]:
    """Read a journal; messages stay the JSON values they were written as.

    Raises:
        NewerSchemaError: If it was written by a newer version of this package.
        InvalidJournalError: If it is no journal, or a damaged one.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidJournalError(f"Expected a journal as JSON text; this is not JSON: {error}.") from error
    if not isinstance(data, dict) or "facts" not in data:
        raise InvalidJournalError("Expected a JSON object with the keys schema and facts.")
    journal = cast("dict[str, object]", data)
    check_schema(journal.get("schema"))
    return load_facts(journal["facts"])


def check_schema(schema: object) -> None:
    """Refuse a schema number that this version cannot read."""
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
        raise InvalidJournalError(f"Expected a schema number from 1 to {SCHEMA}; got {shown(schema)}.")
    if schema > SCHEMA:
        raise NewerSchemaError(
            f"This journal has schema {schema}; this version of planner_ext reads up to {SCHEMA}. "
            "Read it with the version that wrote it, or a newer one."
        )


def dump_facts(facts: Sequence[Fact], dump_message: DumpMessage) -> list[Any]:
    """Turn facts into JSON values."""
    return _facts().dump_python([_with_plain_messages(fact, dump_message) for fact in facts], mode="json")


def load_facts(data: object) -> tuple[Fact, ...]:
    """Turn JSON values back into facts.

    Raises:
        InvalidJournalError: Naming the first place that is not as expected.
    """
    try:
        return tuple(_facts().validate_python(data, strict=False))
    except InvalidLimitError as error:
        raise InvalidJournalError(f"The journal is damaged in its limits: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise InvalidJournalError(f"The journal is damaged at {place or 'its top'}: {first['msg']}.") from error


def messages_of(fact: Fact) -> tuple[Message, ...]:
    """List the messages in a fact."""
    match fact:
        case RunStarted() | Planned():
            return fact.messages
        case ModelReplied() | MessageAdded():
            return (fact.message,)
        case IterationCompleted():
            return fact.messages or ()
        case _:
            return ()


def _with_plain_messages(fact: Fact, dump_message: DumpMessage) -> Fact:
    match fact:
        case RunStarted() | Planned():
            return replace(fact, messages=tuple(_plain(message, dump_message) for message in fact.messages))
        case ModelReplied() | MessageAdded():
            return replace(fact, message=_plain(fact.message, dump_message))
        case IterationCompleted(messages=tuple(messages)):
            return replace(fact, messages=tuple(_plain(message, dump_message) for message in messages))
        case _:
            return fact


def _plain(message: Message, dump_message: DumpMessage) -> Any:
    assert not isinstance(message, ReplyEntry)
    return dump_message(message)
