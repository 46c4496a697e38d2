"""Questions of the model in kept runs: rows like the calls that wait, answered from anywhere, closed once taken."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from planner_ext import Approve, Deny, FunctionCallingStepwisePlannerResult
from planner_ext.core.state import ASK_USER
from planner_ext.durable import ApprovalRefusedError, Approvals, PendingApproval
from planner_ext.durable.store import open_database
from planner_ext.events import Clarified
from planner_ext.hitl_manager import Question, Supply
from planner_ext.testing import ScriptedReply, call, calls, say
from support.durable import (
    GOAL,
    check_history,
    effects_in,
    open_runs,
    store_neutral,
    world,
)

WHERE = "Which order, and for whom?"
FINAL = call("UserInteraction-SendFinalAnswer", {"answer": "Settled."}, id="final")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asks:
    """A model that asks in one way, and what comes of it.

    Attributes:
        id: Of the row that waits.
        ids: Of the calls in the finished history.
        role: Of the message that the answer becomes.
        effects: What the functions did.
    """

    first: ScriptedReply
    id: str
    ids: tuple[str, ...]
    role: str
    effects: tuple[str, ...]


BESIDE = Asks(
    first=calls(
        call(ASK_USER, {"question": WHERE}, id="ask"),
        call("shop-label", {"order": 2}, id="label"),
    ),
    id="order-7/0/ask",
    ids=("ask", "label", "final"),
    role="tool",
    effects=("label 2",),
)
PLAIN = Asks(
    first=say(WHERE), id="order-7/0/question_0", ids=("final",), role="user", effects=()
)
both_ways_to_ask = store_neutral("asks", [BESIDE, PLAIN], ids=["beside-calls", "plain"])


async def drive(store: str, effects: Path, *script: ScriptedReply, **options: Any):
    """Let a worker live for one activation of the run."""
    planner, kernel = world(
        effects, script, require_final_answer_function=True, **options
    )
    async with open_runs(store) as runs:
        return await (
            await runs.start(planner, kernel, GOAL, run_id="order-7")
        ).result()


async def decide(store: str, id: str, decision: Any) -> bool:
    async with Approvals.connect(store) as approvals:
        return await approvals.decide(id, decision)


async def waiting(store: str) -> list[PendingApproval]:
    async with Approvals.connect(store) as approvals:
        return await approvals.pending()


async def shown(store: str, id: str) -> PendingApproval:
    async with Approvals.connect(store) as approvals:
        return await approvals.show(id)


def said(result: FunctionCallingStepwisePlannerResult, role: str) -> list[str]:
    """List what the messages of a role say."""
    assert result.chat_history is not None
    return [
        str(one.to_dict()["content"])
        for one in result.chat_history.messages
        if one.role == role
    ]


@both_ways_to_ask
async def test_a_question_waits_and_is_answered_while_no_worker_lives(
    asks: Asks, store: str, tmp_path: Path
) -> None:
    """It ends ``asked``, is listed as a question elsewhere, and a later worker takes the answer and closes the row."""
    effects = tmp_path / "effects"
    asked = await drive(store, effects, asks.first)
    assert (asked.status, len(asked.pending), effects_in(effects)) == ("asked", 1, [])

    (item,) = await waiting(store)
    assert (item.id, item.kind, item.fully_qualified_name) == (
        asks.id,
        "question",
        ASK_USER,
    )
    assert (dict(item.arguments), item.prompt, item.goal) == (
        {"question": WHERE},
        WHERE,
        GOAL,
    )
    assert item.fingerprint == asked.pending[0].fingerprint
    assert (await drive(store, effects)).status == "asked"
    assert await decide(store, item.id, Supply("The first, for Ann.", by="ann"))
    assert not await decide(store, item.id, Supply("The second.", by="bob"))

    done = await drive(store, effects, FINAL)

    assert (done.status, done.final_answer, effects_in(effects)) == (
        "answered",
        "Settled.",
        list(asks.effects),
    )
    assert "The first, for Ann." in said(done, asks.role)
    assert [
        (fact.question, fact.by) for fact in done.facts if isinstance(fact, Clarified)
    ] == [(WHERE, "ann")]
    check_history(done, asks.ids)
    assert (await waiting(store), (await shown(store, asks.id)).status) == (
        [],
        "closed",
    )


@both_ways_to_ask
async def test_waiting_for_an_answer_changes_no_count(
    asks: Asks, store: str, tmp_path: Path
) -> None:
    """The usage of a run that waited in a store is that of one that was answered at once."""

    async def answers(_: Question) -> str:
        return "The first."

    planner, kernel = world(
        tmp_path / "one",
        [asks.first, FINAL],
        require_final_answer_function=True,
        clarifier=answers,
    )
    through = await planner.invoke(kernel, GOAL)
    await drive(store, tmp_path / "two", asks.first)
    await decide(store, asks.id, Supply("The first."))
    waited = await drive(store, tmp_path / "two", FINAL)

    assert (waited.iterations, waited.tool_calls) == (
        through.iterations,
        through.tool_calls,
    )
    assert replace(waited.usage, active_seconds=0) == replace(
        through.usage, active_seconds=0
    )


@both_ways_to_ask
async def test_a_denied_question_is_an_answer(
    asks: Asks, store: str, tmp_path: Path
) -> None:
    """Deny lets the model know why, and the run continues."""
    await drive(store, tmp_path / "effects", asks.first)
    assert await decide(store, asks.id, Deny("Guess.", by="ann"))
    done = await drive(store, tmp_path / "effects", FINAL)
    assert done.status == "answered"
    assert "Nobody answers this. Guess. Go on with what you know." in said(
        done, asks.role
    )
    assert await waiting(store) == []


@store_neutral(
    ("asks", "decision", "problem"),
    [
        (asks, decision, problem)
        for asks in (BESIDE, PLAIN)
        for decision, problem in (
            (Approve(by="ann"), "nothing in it to approve"),
            (Supply("  "), "is blank"),
        )
    ],
)
async def test_an_invalid_answer_has_the_question_wait_again(
    asks: Asks, decision: Any, problem: str, store: str, tmp_path: Path
) -> None:
    """A worker refuses it and sends no request; the question is listed with the problem, and then answered."""
    await drive(store, tmp_path / "effects", asks.first)
    assert await decide(store, asks.id, decision)
    assert (await drive(store, tmp_path / "effects")).status == "asked"

    (item,) = await waiting(store)
    assert problem in item.problem
    assert await decide(store, item.id, Supply("The first."))
    assert (await drive(store, tmp_path / "effects", FINAL)).status == "answered"
    assert (await shown(store, asks.id)).status == "closed"


@both_ways_to_ask
async def test_a_run_that_asks_is_cancelled(
    asks: Asks, store: str, tmp_path: Path
) -> None:
    """The row is closed with the run, an answer comes too late by name, and the stopped run's history can be sent."""
    await drive(store, tmp_path / "effects", asks.first)
    async with open_runs(store) as runs:
        assert await runs.cancel("order-7", by="ann")
    stopped = await drive(store, tmp_path / "effects")
    assert (stopped.status, stopped.reason, effects_in(tmp_path / "effects")) == (
        "stopped",
        "Cancelled by ann.",
        [],
    )
    check_history(stopped, [id for id in asks.ids if id != "final"])
    assert (await waiting(store), (await shown(store, asks.id)).status) == (
        [],
        "closed",
    )
    with pytest.raises(ApprovalRefusedError, match="does not wait any more"):
        await decide(store, asks.id, Supply("The first."))


@both_ways_to_ask
async def test_an_answer_may_come_with_the_resume(
    asks: Asks, store: str, tmp_path: Path
) -> None:
    """By the call's id, as to a planner; the row is closed with it."""
    await drive(store, tmp_path / "effects", asks.first)
    planner, kernel = world(
        tmp_path / "effects", [FINAL], require_final_answer_function=True
    )
    async with open_runs(store) as runs:
        decisions = {asks.id.rpartition("/")[2]: Supply("The first.")}
        done = await (
            await runs.resume("order-7", planner, kernel, decisions=decisions)
        ).result()
    assert done.status == "answered"
    assert (await waiting(store), (await shown(store, asks.id)).status) == (
        [],
        "closed",
    )


async def test_each_question_has_a_row_of_its_own(store: str, tmp_path: Path) -> None:
    """Two plain questions in one run, and a call that waits beside a third; each run's are listed by its name."""
    refund = calls(
        call(ASK_USER, {"question": WHERE}, id="ask"),
        call("shop-pay", {"amount": 5}, id="pay"),
    )
    effects = tmp_path / "effects"
    await drive(store, effects, say(WHERE))
    await decide(store, "order-7/0/question_0", Supply("The first."))
    assert (await drive(store, effects, say("And for whom?"))).status == "asked"
    await decide(store, "order-7/1/question_1", Supply("Ann."))
    assert (await drive(store, effects, refund)).status == "paused"
    async with Approvals.connect(store) as approvals:
        found = await approvals.pending("order-7")
        assert {item.id: item.kind for item in found} == {
            "order-7/2/ask": "question",
            "order-7/2/pay": "function",
        }
        assert await approvals.pending("order-8") == []
        assert [item.id for item in await approvals.pending("order-7", limit=1)] == [
            found[0].id
        ]
        assert await approvals.decide("order-7/2/ask", Supply("The third."))
        assert [item.id for item in await approvals.pending()] == ["order-7/2/pay"]
        assert await approvals.decide("order-7/2/pay", Approve())
    assert (await drive(store, effects, FINAL)).status == "answered"
    assert effects_in(effects) == ["pay 5"]


@store_neutral("forged", ['"kind":"question",', ""])
async def test_a_call_is_not_passed_off_as_a_question(
    forged: str, store: str, tmp_path: Path
) -> None:
    """Altering the table cannot have a call shown as a question; a row that does not say is a call, too."""
    await drive(store, tmp_path / "effects", call("shop-pay", {"amount": 5}, id="pay"))
    database = await open_database(store)
    forge = "UPDATE planner_approvals SET call = replace(call, :kind, :forged)"
    await database.transact((forge, {"kind": '"kind":"function",', "forged": forged}))
    await database.close()
    (item,) = await waiting(store)
    assert (item.kind, item.fully_qualified_name) == ("function", "shop-pay")
