"""Journals as JSON: the facts, and the one document that checkpoints, exported runs and cassettes are.

A document is a JSON object: ``schema``, ``kind``, what its kind holds, and a
``signature`` if written with a key. It is untrusted: read up to a size, without
unknown, missing or duplicate keys, and no name in it is imported.

A default value of a fact is not written, so a changed default needs a new `SCHEMA`.
"""

import hashlib
import hmac
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, cast

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from planner_ext.core import facts
from planner_ext.core.errors import (
    InvalidJournalError,
    InvalidLimitError,
    NewerSchemaError,
    reading,
    shown,
)
from planner_ext.core.facts import HappenedInside, unwrapped, wrapped
from planner_ext.core.values import NOTHING, EditedReply, Message

SCHEMA = 1
"""The schema number of facts and documents; a newer one is refused. 1: the first."""

MOST_BYTES = 256 * 2**20
"""The most bytes of a document's file."""

Kind: TypeAlias = Literal["checkpoint", "run", "cassette"]

_LAST_TIME = 1e11
"""Seconds since 1970; a time that any calendar, and a database, can hold."""

_NAMES: Mapping[Kind, str] = {
    "checkpoint": "a checkpoint",
    "run": "an exported run",
    "cassette": "a cassette",
}

_CHECKPOINT = "checkpoint"
"""The key of a run in the metadata of the message that ended it; not written."""


# The document.


def document_of(
    kind: Kind, key: bytes | None = None, **content: object
) -> dict[str, object]:
    """Build a document of JSON values; a key signs it (HMAC-SHA256)."""
    document: dict[str, object] = {"schema": SCHEMA, "kind": kind, **content}
    if key is not None:
        document["signature"] = _signature_of(document, key)
    return document


def read_file(path: Path, kind: Kind) -> str:
    """Read the text of a document's file, up to a size.

    Raises:
        InvalidJournalError: If it is too large, or not text.
        OSError: If it cannot be read.
    """
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise InvalidJournalError(
            f"{path} is too large for {_NAMES[kind]}: it has more than {MOST_BYTES:,} bytes."
        )
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InvalidJournalError(
            f"{path} is not {_NAMES[kind]}: it is not text."
        ) from error


def read_document(
    text: str, kind: Kind, keys: Collection[str], *, key: bytes | None = None
) -> dict[str, Any]:
    """Read the text of a document, and check all of it but what its kind holds.

    A key refuses a document that is unsigned, altered or signed with another one; None
    checks no signature.

    Raises:
        InvalidJournalError: If it is not JSON, not such a document, or refused by its
            signature.
        NewerSchemaError: If a newer version of this package wrote it.
    """
    expected = _NAMES[kind]
    with reading(
        f"Expected {expected} as JSON text; this is not JSON, or", InvalidJournalError
    ):
        parsed: object = json.loads(text, object_pairs_hook=_without_duplicates)
    check_depth(parsed)
    document = cast("dict[str, Any]", parsed if isinstance(parsed, dict) else {})
    _check_kind(document, kind)
    check_schema(document.get("schema"))
    content = document.keys() - {"signature"}
    if content != {"schema", "kind", *keys}:
        wrong = sorted(content.symmetric_difference({"schema", "kind", *keys}))
        raise InvalidJournalError(
            f"Expected {expected} with the keys schema, kind, {', '.join(keys)}; unknown or missing: {shown(wrong)}. "
            "The text was altered."
        )
    if key is not None:
        check_signature(document, kind, key)
    return document


def check_signature(document: Mapping[str, object], kind: Kind, key: bytes) -> None:
    """Check that a document was signed with a key.

    Raises:
        InvalidJournalError: If it is unsigned, altered or signed with another key.
    """
    given = document.get("signature")
    expected = _signature_of(
        {name: value for name, value in document.items() if name != "signature"}, key
    )
    # in constant time, whatever stands in its place
    if not isinstance(given, str) or not hmac.compare_digest(
        expected.encode(), given.encode(errors="replace")
    ):
        raise InvalidJournalError(
            f"Expected {_NAMES[kind]} signed with this key; it is unsigned, altered or signed with another one. Read "
            "it with the key that it was written with."
        )


def _check_kind(document: Mapping[str, object], kind: Kind) -> None:
    expected = _NAMES[kind]
    given = document.get("kind")
    if given == kind:
        return
    if given is None and "schema" in document:
        raise InvalidJournalError(
            f"Expected {expected}; this document has no kind: a development version from before 0.1.0 wrote it, which "
            "no release reads. End its run with the version that wrote it, or begin again."
        )
    seen = (
        f"of the kind {shown(given)}"
        if given is not None
        else "without schema and kind"
    )
    raise InvalidJournalError(
        f"Expected {expected}, a JSON object of the kind {kind!r}; got one {seen}."
    )


def _signature_of(document: Mapping[str, object], key: bytes) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hmac.new(key, text.encode("ascii"), hashlib.sha256).hexdigest()


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Build an object; with a key twice, two readers may read two different runs."""
    data = dict(pairs)
    if len(data) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidJournalError(
            f"The key {twice[:80]!r} stands twice in one JSON object. The text was altered."
        )
    return data


def check_schema(schema: object) -> None:
    """Refuse a schema number that this version cannot read."""
    if type(schema) is not int or schema < 1:
        raise InvalidJournalError(
            f"Expected a schema number from 1 to {SCHEMA}; got {shown(schema)}."
        )
    if schema > SCHEMA:
        raise NewerSchemaError(
            f"This journal has schema {shown(schema)}; this version of planner_ext reads up to {SCHEMA}. "
            "Read it with the version that wrote it, or a newer one."
        )


def check_depth(values: object) -> None:
    """Refuse JSON values that are nested too deeply to be written again.

    Raises:
        InvalidJournalError: If they have more than about 250 levels.
    """
    try:
        # Counts the levels as `dump_facts` does, with two to spare.
        to_jsonable_python([[values]])
    except ValueError as error:
        raise InvalidJournalError(
            "The journal is damaged: its values have more than 250 levels."
        ) from error


# Its facts.


@cache
def _facts() -> TypeAdapter[list[facts.PlainFact]]:
    """Build the serializer of plain facts, later than the import, which it would slow by a tenth."""
    return TypeAdapter(
        list[Annotated[facts.PlainFact, Field(discriminator="type")]],
        config=ConfigDict(extra="forbid", allow_inf_nan=False),
    )


def dump_facts(facts: Sequence[facts.Fact]) -> list[Any]:
    """Turn facts into JSON values, without default values."""
    plain = [_with_json_messages(unwrapped(fact)) for fact in facts]
    written: list[dict[str, Any]] = _facts().dump_python(
        plain, mode="json", exclude_defaults=True
    )
    return [_placed(fact, values) for fact, values in zip(facts, written, strict=True)]


def _placed(fact: facts.Fact, values: dict[str, Any]) -> dict[str, Any]:
    """Write the calls in whose runs a fact happened around its values."""
    if not isinstance(fact, HappenedInside):
        return {"type": fact.type, **values}
    place = {"iteration": fact.iteration, "index": fact.index, "run": fact.run}
    return {"type": fact.type, **place, "fact": _placed(fact.fact, values)}


def load_facts(data: object) -> tuple[facts.Fact, ...]:
    """Turn JSON values back into facts.

    Raises:
        InvalidJournalError: Naming the first place that is not as expected.
    """
    with reading("The journal is", InvalidJournalError):
        loaded = _validated(data)
        check_depth(
            [
                (messages_of(fact), getattr(unwrapped(fact), "parameters", None))
                for fact in loaded
            ]
        )
        for place, fact in enumerate(loaded):
            _check_numbers(place, unwrapped(fact))
        return loaded


def _validated(data: object) -> tuple[facts.Fact, ...]:
    places: list[facts.Place] = []
    plain: object = data
    if isinstance(data, list):
        plain = [_taken_out(values, places) for values in cast("list[Any]", data)]
    try:
        loaded = _facts().validate_python(plain, strict=False)
        return tuple(map(wrapped, loaded, places))
    except InvalidLimitError as error:
        raise InvalidJournalError(
            f"The journal is damaged in its limits: {error}"
        ) from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise InvalidJournalError(
            f"The journal is damaged at {place or 'its top'}: {first['msg']}."
        ) from error


def _taken_out(values: Any, places: list[facts.Place]) -> Any:
    """Return the values of what happened, and note in which run inside that was."""
    place = len(places)
    places.append(())
    while isinstance(values, dict):
        inside = cast("dict[str, Any]", values)
        if inside.get("type") != "HappenedInside":
            return inside
        numbers = [inside.get(name) for name in ("iteration", "index", "run")]
        if len(inside) != 5 or any(
            type(number) is not int or number < 0 for number in numbers
        ):
            raise InvalidJournalError(
                f"The journal is damaged at {place}: expected iteration, index, run and fact of what "
                "happened inside."
            )
        iteration, index, run = cast("list[int]", numbers)
        places[place] = (*places[place], (iteration, index, run))
        values = inside.get("fact")
    return values


def _check_numbers(place: int, fact: facts.PlainFact) -> None:
    """Refuse times of no calendar, and amounts that would give back what was spent or that no store can hold."""
    times = [getattr(fact, name, None) or 0.0 for name in ("at", "expires_at")]
    if not (min(times) >= 0 and max(times) < _LAST_TIME):
        raise InvalidJournalError(
            f"The journal is damaged at {place}.{fact.type}: a time is before 1970, or after the year 5000."
        )
    amounts: list[float] = [getattr(fact, "seconds", 0.0)]
    for usage in (
        getattr(fact, "usage", NOTHING),
        getattr(fact, "spent", None) or NOTHING,
    ):
        amounts += usage.calls_by_function.values()
        amounts += (
            value for value in vars(usage).values() if isinstance(value, int | float)
        )
    if not (min(amounts) >= 0 and max(amounts) < 2**63):
        raise InvalidJournalError(
            f"The journal is damaged at {place}.{fact.type}: an amount is negative, or too large."
        )


def messages_of(fact: facts.Fact) -> tuple[Message, ...]:
    """List the messages in a fact."""
    match unwrapped(fact):
        case facts.ModelReplied(message=message) | facts.MessageAdded(message=message):
            return (message,)
        case (
            facts.RunStarted(messages=messages)
            | facts.Planned(messages=messages)
            | facts.IterationCompleted(messages=messages)
        ):
            return messages or ()
        case _:
            return ()


def _with_json_messages(fact: facts.PlainFact) -> facts.PlainFact:
    match fact:
        case facts.ModelReplied() | facts.MessageAdded():
            return replace(fact, message=dump_message(fact.message))
        case facts.RunStarted() | facts.Planned() | facts.IterationCompleted() if (
            fact.messages
        ):
            return replace(fact, messages=tuple(map(dump_message, fact.messages)))
        case _:
            return fact


def dump_message(message: Message) -> Any:
    """Write a message as JSON values: bytes as base64, what else JSON does not have as text.

    JSON values, which loaded messages are, stay. Metadata that cannot be written are
    omitted: a server may put anything there.
    """
    assert not isinstance(message, EditedReply), "only a fold makes these"
    if not isinstance(message, BaseModel):
        return message
    try:
        return _as_values(message, {"metadata": {_CHECKPOINT}})
    except (TypeError, ValueError):
        return _as_values(
            message, {"metadata": True, "items": {"__all__": {"metadata"}}}
        )


def _as_values(message: BaseModel, exclude: dict[str, Any]) -> Any:
    values = message.model_dump(exclude_none=True, exclude=exclude)
    return to_jsonable_python(values, bytes_mode="base64", fallback=str)
