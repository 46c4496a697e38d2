"""Checkpoints that an attacker had in hand: forged, altered, cut or wrongly signed. None causes a side effect."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner_ext import Approve, Deny
from planner_ext.approval.decisions import digest_of, fingerprint_of
from planner_ext.errors import InvalidCheckpointError, PlannerExtError
from planner_ext.hitl_manager import Checkpoint
from planner_ext.testing import calls
from support.approval import (
    ASKING_REFUND,
    DONE,
    LOOK,
    REFUND,
    Door,
    one_door,
    planner_with,
    three_doors,
    two_doors,
    world,
)
from support.examples import tried
from support.values import each_of

ASK: dict[str, Any] = {"interceptors": [ASKING_REFUND]}
ROBBED = {"order": "7", "amount": 9999}
KEY = b"a shared secret"


async def paused() -> str:
    """Give the checkpoint of a run whose ``call_2``, a refund of 50, waits beside a look that was let go."""
    result = await planner_with(**ASK).invoke(
        world([calls(LOOK, REFUND)]).kernel, "Refund order 7."
    )
    return result.checkpoint.to_json()


def fingerprint_in(text: str) -> str:
    return json.loads(text)["facts"][3]["fingerprint"]


def altered(text: str, change: Callable[[list[Any]], object]) -> str:
    """Change the facts of a checkpoint: RunStarted, ModelReplied, CallDecided of look and of refund, Paused."""
    data = json.loads(text)
    change(data["facts"])
    return json.dumps(data)


def rename_call(facts: list[Any]) -> None:
    facts[1]["calls"][1]["name"] = "shop-wipe"
    facts[1]["calls"][1]["arguments"] = "{}"


def rob(facts: list[Any]) -> None:
    """Put other arguments in, with the digest that goes with them."""
    facts[1]["calls"][1]["arguments"] = json.dumps(ROBBED)
    facts[3]["digest"] = digest_of("shop-refund", ROBBED)


def belittle(facts: list[Any]) -> None:
    """Have the message, which the model and the audit read, say less than the call that waits."""
    (item,) = [one for one in facts[1]["message"]["items"] if one.get("id") == "call_2"]
    item["arguments"] = json.dumps({"order": "7", "amount": 1})


def rob_thoroughly(facts: list[Any]) -> None:
    """And with the fingerprint that goes with them."""
    rob(facts)
    facts[3]["fingerprint"] = fingerprint_of(
        facts[0]["run_id"], 0, "call_2", facts[3]["digest"]
    )


def redirect(facts: list[Any]) -> None:
    """Have another function run, with the digest that goes with it; the decision still says refund."""
    rename_call(facts)
    facts[3]["digest"] = digest_of("shop-wipe", {})


ALTERED: dict[str, Callable[[list[Any]], object]] = {
    "function-shown": lambda facts: facts[3].update(function="shop-look"),
    "function-called": rename_call,
    "function-called-and-digest": redirect,
    "arguments": lambda facts: facts[1]["calls"][1].update(
        arguments=json.dumps(ROBBED)
    ),
    "arguments-and-digest": rob,
    "message": belittle,
    "digest": lambda facts: facts[3].update(digest="0" * 64),
    "fingerprint": lambda facts: facts[3].update(fingerprint="0" * 64),
    "run": lambda facts: facts[0].update(run_id="another"),
    "iteration": lambda facts: facts[3].update(iteration=5),
    "call-id": lambda facts: facts[3].update(call_id="call_1"),
    "call-id-called": lambda facts: facts[1]["calls"][1].update(id="call_7"),
    "arguments-digest-and-external": lambda facts: (
        rob(facts),
        facts[3].update(kind="external"),
    ),
    "arguments-digest-and-unknown": lambda facts: (
        rob(facts),
        facts[3].update(kind="unknown"),
    ),
    "function-digest-and-final-answer": lambda facts: (
        redirect(facts),
        facts[3].update(kind="final_answer"),
    ),
    "index": lambda facts: facts[3].update(index=0),
    "index-negative": lambda facts: facts[3].update(index=-1),
    "index-beyond": lambda facts: facts[3].update(index=2),
    "calls-swapped": lambda facts: facts[1]["calls"].reverse(),
}


def decisions_on(call_id: str, fingerprint: str, *, pinned: bool) -> dict[str, Approve]:
    return {call_id: Approve(fingerprint=fingerprint if pinned else None)}


@each_of("pinned", [False, True], ids=["approve", "approve-by-fingerprint"])
@each_of("what", ALTERED)
@two_doors
async def test_an_altered_pending_call_is_refused(
    door: Door, what: str, pinned: bool
) -> None:
    """Facts of a pending call that do not agree with each other are refused by name, and nothing runs."""
    text = await paused()
    forged, here = altered(text, ALTERED[what]), world([DONE])
    ids = [call["id"] for call in json.loads(forged)["facts"][1]["calls"]]
    decisions = decisions_on(
        ids[0] if what == "calls-swapped" else ids[1],
        fingerprint_in(text),
        pinned=pinned,
    )
    with pytest.raises(PlannerExtError):
        await door.resume(here, forged, decisions, **ASK)
    assert (here.ran, here.requests) == ([], 0)


@one_door
async def test_a_fingerprint_binds_even_where_all_facts_agree(door: Door) -> None:
    """Arguments, digest and fingerprint altered together: an approval of what was shown runs nothing else."""
    text, here = await paused(), world([DONE])
    decisions = {"call_2": Approve(fingerprint=fingerprint_in(text))}
    with pytest.raises(PlannerExtError, match="call_2"):
        await door.resume(here, altered(text, rob_thoroughly), decisions, **ASK)
    assert (here.ran, here.requests) == ([], 0)


def flip(facts: list[Any]) -> None:
    facts[2]["verdict"] = "run"


def approve_by_hand(facts: list[Any]) -> None:
    facts += [
        {"type": "Resumed", "at": 1.0},
        facts[2] | {"verdict": "run", "person": True, "by": "ann"},
        facts[4],
    ]


FORGERIES = {"flipped": flip, "approved-by-hand": approve_by_hand}


@each_of("what", FORGERIES)
@three_doors
async def test_a_forged_verdict_runs_nothing(door: Door, what: str) -> None:
    """Of two refunds that wait, one is forged as approved: a door with a key refuses the text by name."""
    options = {**ASK, "checkpoint_key": KEY}
    paused = await door.ask(world([calls(REFUND, REFUND)]), **options)
    here, text = world([DONE]), altered(paused.checkpoint, FORGERIES[what])
    with pytest.raises(InvalidCheckpointError, match="signed with this key"):
        await door.resume(here, text, {"call_2": Deny("No.")}, **options)
    assert (here.ran, here.requests) == ([], 0)


@one_door
async def test_a_verdict_that_no_person_gave_is_refused_without_a_key(
    door: Door,
) -> None:
    """A call that a person was asked about, and that runs although none decided, contradicts itself."""
    result = await planner_with(**ASK).invoke(
        world([calls(REFUND, REFUND)]).kernel, "Refund order 7."
    )
    here = world([DONE])
    with pytest.raises(InvalidCheckpointError, match="contradicts itself"):
        await door.resume(
            here,
            altered(result.checkpoint.to_json(), flip),
            {"call_2": Deny("No.")},
            **ASK,
        )
    assert (here.ran, here.requests) == ([], 0)


@one_door
async def test_facts_after_the_pause_are_refused(door: Door) -> None:
    """A text that continues after its pause, without a new one, is the record of no paused run: nothing runs."""
    text, here = await paused(), world([DONE])
    forged = altered(
        text,
        lambda facts: facts.extend(
            [{"type": "Resumed", "at": 1.0}, facts[3] | {"verdict": "run"}]
        ),
    )
    with pytest.raises(PlannerExtError):
        await door.resume(here, forged, {}, **ASK)
    assert (here.ran, here.requests) == ([], 0)


@one_door
async def test_a_run_that_pauses_for_nothing_is_refused(door: Door) -> None:
    """A pause without a waiting call is an invalid record, and nothing of it runs."""
    text, here = (
        altered(await paused(), lambda facts: facts[3].update(verdict="run")),
        world([DONE]),
    )
    with pytest.raises(PlannerExtError):
        await door.resume(here, text, {}, **ASK)
    assert here.ran == []


@one_door
async def test_an_expiry_beyond_all_dates_gets_a_named_error(door: Door) -> None:
    """A time that no calendar has is refused, whether it was altered or not."""
    text, here = (
        altered(await paused(), lambda facts: facts[3].update(expires_at=1e300)),
        world([]),
    )
    with pytest.raises(PlannerExtError):
        await door.resume(here, text, {}, **ASK)
    assert (here.ran, here.requests) == ([], 0)


@each_of("kept", range(5))
@one_door
async def test_a_record_cut_between_facts_runs_nothing(door: Door, kept: int) -> None:
    """With any number of its last facts missing, a decision is refused by name, and nothing runs."""
    text, here = await paused(), world([])
    with pytest.raises(PlannerExtError):
        await door.resume(
            here,
            altered(text, lambda facts: facts.__delitem__(slice(kept, None))),
            {"call_2": Approve()},
        )
    assert (here.ran, here.requests) == ([], 0)


@each_of("kept", [2, 3, 4])
@one_door
async def test_a_record_that_ends_inside_a_batch_is_refused_by_name(
    door: Door, kept: int
) -> None:
    """Cut where calls are open, it cannot continue, and the error is that of an unusable checkpoint."""
    here = world([])
    text = altered(await paused(), lambda facts: facts.__delitem__(slice(kept, None)))
    with pytest.raises(InvalidCheckpointError):
        await door.resume(here, text, {}, **ASK)
    assert (here.ran, here.requests) == ([], 0)


JUNK: dict[str, Callable[[list[Any]], object]] = {
    "message-empty": lambda facts: facts[1].update(message={}),
    "message-text": lambda facts: facts[1].update(message="refund it"),
    "message-role": lambda facts: facts[1]["message"].update(role="wizard"),
    "messages": lambda facts: facts[0].update(messages=[5]),
    "limit": lambda facts: facts[0]["rules"]["limits"].update(max_iterations=-1),
    "deadline": lambda facts: facts[0]["rules"]["limits"].update(deadline="tomorrow"),
    "type": lambda facts: facts[3].update(type="CallForged"),
    "verdict": lambda facts: facts[3].update(verdict="maybe"),
    "missing": lambda facts: facts[3].pop("call_id"),
    "expiry": lambda facts: facts[3].update(expires_at="never"),
    "none": lambda facts: facts.clear(),
    "pending-arguments": lambda facts: facts[1]["calls"][1].update(arguments="{"),
    "twice-started": lambda facts: facts.insert(0, facts[0]),
    "calls": lambda facts: facts[1].update(calls=[]),
    "number": lambda facts: facts[1].update(seconds="long"),
}


@each_of("what", JUNK)
@two_doors
async def test_junk_in_a_checkpoint_gets_a_named_error(door: Door, what: str) -> None:
    """Junk in any place of a record is refused by an error of the package, and nothing runs."""
    here = world([])
    with pytest.raises(PlannerExtError):
        await door.resume(
            here, altered(await paused(), JUNK[what]), {"call_2": Approve()}, **ASK
        )
    assert (here.ran, here.requests) == ([], 0)


TEXTS: dict[str, str] = {
    "empty": "",
    "word": "approve",
    "null": "null",
    "list": "[]",
    "object": "{}",
    "no-facts": '{"kind": "checkpoint", "schema": 1}',
    "no-schema": '{"facts": []}',
    "facts-null": '{"kind": "checkpoint", "schema": 1, "facts": null}',
    "facts-object": '{"kind": "checkpoint", "schema": 1, "facts": {}}',
    "schema-true": '{"kind": "checkpoint", "schema": true, "facts": []}',
    "schema-text": '{"kind": "checkpoint", "schema": "1", "facts": []}',
    "schema-float": '{"kind": "checkpoint", "schema": 1.0, "facts": []}',
    "schema-zero": '{"kind": "checkpoint", "schema": 0, "facts": []}',
    "deep": '{"kind": "checkpoint", "schema": 1, "facts": ' + "[" * 100_000,
    "deep-closed": '{"kind": "checkpoint", "schema": 1, "facts": '
    + "[" * 900
    + "]" * 900
    + "}",
    "nan": '{"kind": "checkpoint", "schema": NaN, "facts": []}',
    "long-number": '{"kind": "checkpoint", "schema": ' + "9" * 5000 + ', "facts": []}',
}


@each_of("key", [None, KEY], ids=["without-key", "with-key"])
@each_of("what", TEXTS)
def test_a_text_other_than_a_checkpoint_is_refused(
    what: str, key: bytes | None
) -> None:
    """Not JSON, not ours, or endless: one error, whether a key is given or not."""
    with pytest.raises(InvalidCheckpointError):
        Checkpoint.from_json(TEXTS[what], key=key)


async def test_a_text_cut_anywhere_is_refused() -> None:
    """A truncated text cannot be read as a checkpoint, wherever it was cut."""
    text = await paused()
    for length in range(0, len(text), 7):
        with pytest.raises(InvalidCheckpointError):
            Checkpoint.from_json(text[:length])


async def test_a_newer_schema_is_refused() -> None:
    """A text of a newer version says so, and which one is needed, also where it is signed."""
    data = json.loads(await paused()) | {"schema": 2}
    with pytest.raises(InvalidCheckpointError, match=r"schema 2.*up to 1"):
        Checkpoint.from_json(json.dumps(data))


async def test_signed_text_is_read_with_its_key_only() -> None:
    """With a key, unsigned text, text signed with another key, and a signature of another run are refused."""
    checkpoint, other = (
        Checkpoint.from_json(await paused()),
        Checkpoint.from_json(await paused()),
    )
    signed = checkpoint.to_json(key=KEY)
    assert Checkpoint.from_json(signed, key=KEY) == checkpoint
    stolen = json.loads(checkpoint.to_json()) | {
        "signature": json.loads(other.to_json(key=KEY))["signature"]
    }
    for text in (
        checkpoint.to_json(),
        checkpoint.to_json(key=b"another"),
        json.dumps(stolen),
    ):
        with pytest.raises(InvalidCheckpointError, match="key"):
            Checkpoint.from_json(text, key=KEY)


@each_of("signature", [None, "", 5, True, [], "é", "\ud800", "0" * 64], ids=ascii)
async def test_any_other_signature_is_refused(signature: Any) -> None:
    """A signature that is missing, of another type, or of any other text is a wrong one."""
    data = json.loads(Checkpoint.from_json(await paused()).to_json(key=KEY)) | {
        "signature": signature
    }
    with pytest.raises(InvalidCheckpointError):
        Checkpoint.from_json(json.dumps(data), key=KEY)


@each_of("what", [*ALTERED, "flipped", "approved-by-hand", "robbed"])
async def test_every_alteration_breaks_the_signature(what: str) -> None:
    """No forgery survives a key, however consistent it is in itself."""
    forge = ALTERED | {
        "flipped": lambda facts: facts[3].update(verdict="run"),
        "approved-by-hand": approve_by_hand,
        "robbed": rob_thoroughly,
    }
    signed = Checkpoint.from_json(await paused()).to_json(key=KEY)
    with pytest.raises(InvalidCheckpointError):
        Checkpoint.from_json(altered(signed, forge[what]), key=KEY)


@pytest.fixture(scope="module")
def signed_text() -> str:
    return Checkpoint.from_json(asyncio.run(paused())).to_json(key=KEY)


@tried(60)
@given(data=st.data())
def test_one_changed_character_breaks_the_signature(
    signed_text: str, data: st.DataObject
) -> None:
    """Any single character of a signed text that is changed makes it unreadable with the key."""
    place = data.draw(st.integers(0, len(signed_text) - 1))
    other = data.draw(
        st.characters(min_codepoint=32, max_codepoint=126).filter(
            lambda c: c != signed_text[place]
        )
    )
    forged = signed_text[:place] + other + signed_text[place + 1 :]
    with pytest.raises(InvalidCheckpointError):
        Checkpoint.from_json(forged, key=KEY)


@each_of("key", ["a text", 5, b""], ids=repr)
async def test_a_key_that_protects_nothing_is_refused(key: Any) -> None:
    """A key is bytes, and not empty: anything else is refused before a text is signed or read with it."""
    checkpoint = Checkpoint.from_json(await paused())
    with pytest.raises(PlannerExtError, match="key"):
        checkpoint.to_json(key=key)
    with pytest.raises(PlannerExtError, match="key"):
        Checkpoint.from_json(checkpoint.to_json(key=KEY), key=key)
