"""Facts to JSON and back: nothing is lost, and nothing damaged, foreign or newer is read."""

import json
from collections.abc import Callable
from dataclasses import fields, replace
from datetime import UTC
from typing import Any, get_args

import pytest
from pydantic import BaseModel
from semantic_kernel.contents import AuthorRole, ChatMessageContent, TextContent

from planner_ext.core.errors import InvalidJournalError, NewerSchemaError
from planner_ext.core.facts import (
    CallDecided,
    CallFinished,
    Ended,
    Fact,
    MessageAdded,
    ModelReplied,
    Paused,
    Resumed,
    Rules,
    RunStarted,
)
from planner_ext.core.fold import fold
from planner_ext.core.limits import Budget
from planner_ext.core.values import EditedReply, Usage
from planner_ext.engine.document import (
    SCHEMA,
    check_schema,
    dump_facts,
    dump_message,
    load_facts,
    messages_of,
)
from support.journal import (
    CALL,
    FACTS,
    LIMITS,
    RULES,
    altered,
    read,
    refusal,
    text_of,
    through_json,
)
from support.values import each_of


def test_the_sample_has_every_fact_and_every_field() -> None:
    """The journal of these tests speaks of everything that can be written."""
    assert {type(fact) for fact in FACTS} == set(get_args(Fact))
    assert all(
        getattr(LIMITS, item.name) != getattr(Budget(), item.name)
        for item in fields(Budget)
    )
    assert all(
        getattr(RULES, item.name) != getattr(Rules(), item.name)
        for item in fields(Rules)
    )
    defaults = {
        f"{fact.type}.{item.name}"
        for fact in FACTS
        for item in fields(fact)
        if item.name != "type" and item.default == getattr(fact, item.name)
    }
    assert defaults == {
        "IterationCompleted.terminate",
        "IterationCompleted.reason",
        "IterationCompleted.messages",
    } | {"Resumed.limits"}


@each_of("fact", FACTS, ids=lambda fact: fact.type)
def test_a_fact_survives_json(fact: Fact) -> None:
    """Written and read, a fact is equal to what it was, field by field and type by type."""
    (again,) = through_json([fact])
    assert again == fact
    assert {item.name: type(getattr(again, item.name)) for item in fields(again)} == {
        item.name: type(getattr(fact, item.name)) for item in fields(fact)
    }


def test_a_journal_survives_json_and_writes_the_same_text_again() -> None:
    """All facts, in order; a second round changes not a byte."""
    text = text_of()
    assert read(text) == FACTS
    assert text_of(*read(text)) == text


def test_facts_as_values_are_what_the_text_holds() -> None:
    """Facts can be written into, and read from, a document of another kind."""
    assert dump_facts(FACTS) == json.loads(text_of())["facts"]
    assert load_facts(dump_facts(FACTS)) == FACTS
    assert load_facts(dump_facts(())) == ()


def test_a_read_journal_folds() -> None:
    """What was read is facts like any others."""
    facts = (
        RunStarted(run_id="r", rules=Rules(), messages=(), at=0.0),
        Ended(status="stopped", at=1.0, seconds=1.0),
    )
    assert fold(through_json(facts)) == fold(facts)


@each_of(
    ("text", "fact"),
    [
        (
            "goal",
            RunStarted(run_id="r", rules=Rules(), messages=(), goal="a\ud83d", at=0.0),
        ),
        ("message", MessageAdded(message={"text": "\udc00b"}, purpose="step", at=0.0)),
        ("result", replace(FACTS[7], result="\udfff")),
        ("arguments", replace(FACTS[3], calls=(replace(CALL, arguments='"\ud800"'),))),
    ],
)
def test_lone_surrogates_survive(text: str, fact: Fact) -> None:
    """Half of a character, as models and cut streams do send it, is written and read like any other text."""
    assert through_json([fact]) == (fact,)


class Opaque(BaseModel):
    """A message of some library, which says itself how it is written."""

    name: str
    left_out: str | None = None


def test_messages_are_written_as_their_own_model_does() -> None:
    """Each message is written as JSON, wherever a fact holds one; the facts stay as they are."""
    a, b, c = Opaque(name="a"), Opaque(name="b"), Opaque(name="c")
    facts: list[Fact] = [
        replace(FACTS[0], messages=(a, b)),
        replace(FACTS[1], messages=(c,)),
        replace(FACTS[2], message=a),
        replace(FACTS[3], message=b),
        replace(FACTS[8], messages=(c, a)),
        FACTS[9],
        FACTS[-1],
    ]
    before = list(facts)
    again = through_json(facts)
    assert facts == before
    assert [messages_of(fact) for fact in again] == [
        tuple({"name": message.name} for message in messages_of(fact))
        for fact in facts[:5]
    ] + [(), ()]
    assert again[5:] == (FACTS[9], FACTS[-1])


def test_the_messages_of_a_fact_are_those_that_are_written() -> None:
    """What `messages_of` lists of each fact is all that is opaque in it."""
    assert sum(len(messages_of(fact)) for fact in FACTS) == 8


def test_an_entry_of_the_transcript_is_refused_as_a_message() -> None:
    """What only a fold may make is never written as if it had been received."""
    entry = EditedReply(message=None, kept=())
    with pytest.raises(AssertionError):
        dump_message(entry)
    with pytest.raises(AssertionError):
        dump_facts([MessageAdded(message=entry, purpose="step", at=0.0)])


@pytest.mark.parametrize("schema", [SCHEMA + 1, 10**30])
def test_a_newer_schema_is_refused(schema: int) -> None:
    """What a newer version wrote is not guessed at: the message says both numbers and the way out."""
    with pytest.raises(NewerSchemaError) as caught:
        check_schema(schema)
    assert str(schema) in str(caught.value)
    assert f"up to {SCHEMA}" in str(caught.value)
    assert isinstance(caught.value, InvalidJournalError)


@each_of("schema", [0, -1, True, False, None, "1", 1.0, [1], {}])
def test_a_schema_is_a_number_from_one_on(schema: object) -> None:
    """Anything else is refused, and shown."""
    with pytest.raises(InvalidJournalError, match="schema") as caught:
        check_schema(schema)
    assert repr(schema) in str(caught.value)


def test_this_versions_schema_is_read() -> None:
    """The number that this version writes."""
    check_schema(SCHEMA)


@each_of("facts", ["null", "{}", '"text"', "3"])
def test_facts_are_a_list(facts: str) -> None:
    """Anything but a list is damaged at its top."""
    assert "damaged at its top" in refusal(f'{{"schema":1,"facts":{facts}}}')


@each_of(
    ("change", "place"),
    [
        (lambda facts: facts[0].pop("run_id"), "0.RunStarted.run_id"),
        (lambda facts: facts[0].update(run_id=7), "0.RunStarted.run_id"),
        (
            lambda facts: facts[0]["rules"].update(on_denial="ask"),
            "0.RunStarted.rules.on_denial",
        ),
        (
            lambda facts: facts[0]["rules"]["limits"].update(deadline="noon"),
            "0.RunStarted.rules.limits.deadline",
        ),
        (
            lambda facts: facts[0]["rules"]["limits"].update(max_cost="much"),
            "0.RunStarted.rules.limits.max_cost",
        ),
        (lambda facts: facts[3].update(iteration="first"), "3.ModelReplied.iteration"),
        (lambda facts: facts[3]["calls"][1].pop("name"), "3.ModelReplied.calls.1.name"),
        (lambda facts: facts[3].update(calls={}), "3.ModelReplied.calls"),
        (lambda facts: facts[4].update(verdict="allow"), "4.CallDecided.verdict"),
        (lambda facts: facts[3].update(at=float("nan")), "3.ModelReplied.at"),
        (lambda facts: facts[5].update(indexes=[0, "x"]), "5.CallsWithheld.indexes.1"),
        (lambda facts: facts[7].update(result=None), "7.CallFinished.result"),
        (lambda facts: facts[10].update(type="Stopped"), "10"),
        (lambda facts: facts[10].pop("type"), "10"),
        (lambda facts: facts.insert(2, None), "2"),
        (lambda facts: facts.insert(2, []), "2"),
    ],
)
def test_a_damaged_fact_is_refused_by_its_place(
    change: Callable[[list[Any]], object], place: str
) -> None:
    """What is missing, of another type or unheard of is refused; the message says in which fact and field."""
    assert f"damaged at {place}:" in refusal(altered(change))


@each_of(
    ("change", "place"),
    [
        (
            lambda facts: facts[0]["rules"]["limits"].update(max_iterations=0),
            "max_iterations",
        ),
        (
            lambda facts: facts[0]["rules"]["limits"].update(
                deadline="2030-01-01T00:00:00"
            ),
            "deadline",
        ),
        (
            lambda facts: facts[12]["limits"].update(max_calls_per_function={"f": -1}),
            "max_calls_per_function",
        ),
    ],
)
def test_a_limit_that_means_nothing_is_a_damaged_journal(
    change: Callable[[list[Any]], object], place: str
) -> None:
    """A limit that could not have been set is refused as damage of the journal, by its name."""
    assert place in refusal(altered(change))


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda facts: facts[4].update(edit=facts[4].pop("edited")), "4.CallDecided"),
        (
            lambda facts: facts[0]["rules"]["limits"].update(max_tool_cals=1),
            "0.RunStarted.rules.limits",
        ),
    ],
)
def test_an_unknown_key_is_refused(
    change: Callable[[list[Any]], object], place: str
) -> None:
    """An unknown key is not dropped: what it meant would be lost without a word."""
    assert place in refusal(altered(change))


@each_of("number", ["NaN", "Infinity", "-Infinity"])
def test_a_time_of_nan_is_refused(number: str) -> None:
    """NaN is in no JSON that this package writes; a time of NaN would let every deadline pass unseen."""
    text = text_of(Paused(at=10.0, seconds=0.5)).replace("10.0", number)
    assert "Paused.at" in refusal(text)


def test_a_deadline_is_the_same_moment_after_reading() -> None:
    """The time zone is kept as an offset, and the moment to the microsecond."""
    (again,) = through_json([Resumed(limits=LIMITS, at=0.0)])
    assert isinstance(again, Resumed)
    assert again.limits is not None
    assert again.limits.deadline == LIMITS.deadline
    assert again.limits.deadline is not None
    assert (
        again.limits.deadline.astimezone(UTC).isoformat()
        == "2030-01-01T06:45:15.123456+00:00"
    )


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def test_what_could_not_be_written_again_is_not_read() -> None:
    """A message that is nested too deeply is a damaged journal; what was read is written as it was."""
    read = load_facts(dump_facts([replace(FACTS[2], message={"a": deep(200)})]))
    assert load_facts(dump_facts(read)) == read
    for message in ({"a": deep(260)}, deep(900)):
        with pytest.raises(InvalidJournalError, match="more than 250 levels"):
            load_facts(
                [
                    *dump_facts(FACTS[:1]),
                    {
                        "type": "MessageAdded",
                        "message": message,
                        "purpose": "insist",
                        "at": 1,
                    },
                ]
            )


class Unbuilt(BaseModel, defer_build=True):
    """What an SDK makes of a response without validation: it has no serializer yet."""

    part: int = 1


@pytest.mark.parametrize(
    "odd", [Unbuilt.model_construct(), deep(400)], ids=["unbuilt", "deep"]
)
def test_metadata_that_cannot_be_written_are_omitted(odd: object) -> None:
    """A server may put anything into a reply's metadata: the journal has the message without them."""
    item = TextContent(text="Hi.", metadata={"odd": odd})
    message = ChatMessageContent(
        role=AuthorRole.ASSISTANT, items=[item], metadata={"odd": odd, "usage": None}
    )
    written = dump_message(message)
    assert [one["text"] for one in written["items"]] == ["Hi."] and not written.get(
        "metadata"
    )
    assert load_facts(dump_facts([replace(FACTS[2], message=message)])) == (
        replace(FACTS[2], message=written),
    )


@pytest.mark.parametrize("amount", [-1, 2**63])
@each_of(
    "name",
    [
        "iterations",
        "seconds",
        "prompt_tokens",
        "cached_tokens",
        "cost",
        "active_seconds",
    ],
)
def test_an_amount_that_gives_back_what_was_spent_is_refused(
    name: str, amount: int
) -> None:
    """A journal with a negative amount, or one that no store holds, is damaged: it would lift every limit."""
    (fact,) = dump_facts([next(one for one in FACTS if isinstance(one, ModelReplied))])
    (fact if name in fact else fact["usage"])[name] = amount
    with pytest.raises(
        InvalidJournalError,
        match=r"0\.ModelReplied: an amount is negative, or too large",
    ):
        load_facts([fact])


@pytest.mark.parametrize("at", [-1.0, 1e11, 1e300])
@pytest.mark.parametrize("name", ["at", "expires_at"])
def test_a_time_of_no_calendar_is_refused(name: str, at: float) -> None:
    """A page or a store that writes the time as a date would fail."""
    decided = next(one for one in FACTS if isinstance(one, CallDecided))
    (fact,) = dump_facts([decided])
    fact[name] = at
    with pytest.raises(
        InvalidJournalError, match=r"0\.CallDecided: a time is before 1970, or after"
    ):
        load_facts([fact])


@pytest.mark.parametrize("spent", [Usage(iterations=-1), Usage(tool_calls=-1)])
def test_a_call_gives_nothing_back(spent: Usage) -> None:
    """What the runs inside a function spent is not negative either."""
    finished = next(one for one in FACTS if isinstance(one, CallFinished))
    (fact,) = dump_facts([replace(finished, spent=spent)])
    with pytest.raises(InvalidJournalError, match="an amount is negative"):
        load_facts([fact])
