"""Records of a version that digested what the model had spelled: they load, and ask again where that changed."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function

from planner_ext import (
    ApprovalPolicy,
    Approve,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    FunctionCallingStepwisePlannerResult,
)
from planner_ext.core.fold import fold
from planner_ext.core.machine import IN_DOUBT
from planner_ext.core.values import RequestedCall, ResolvedCall
from planner_ext.durable import Approvals
from planner_ext.engine.effects import Effect
from planner_ext.errors import DecisionRefusedError
from planner_ext.events import CallDecided, CallStarted
from planner_ext.hitl_manager import Checkpoint
from planner_ext.planner.kept import recovery_facts
from planner_ext.sk.checkpoint import InvalidCheckpointError
from planner_ext.testing import ScriptedChatCompletion, call, calls, say
from support.durable import open_runs
from support.stock import first_result

OLDER = Path(__file__).parent / "older"
"""A checkpoint and a store of version 0.1.0: of one reply, ``bank-look`` of account "7" may run, once a person has
decided on ``bank-pay`` of "50" from account "7". Both parameters are numbers."""

NOT_RUN = "Not executed: the function or its parameters changed after the call was decided."


class Bank:
    """A plugin that remembers what it was asked to do."""

    def __init__(self) -> None:
        self.ran: list[Any] = []

    @kernel_function(description="Looks.")
    async def look(self, account: int) -> str:
        self.ran.append(("look", account))
        return "open"

    @kernel_function(description="Pays.")
    async def pay(self, account: int, amount: float) -> str:
        self.ran.append(("pay", account, amount))
        return "paid"


def application(bank: Any) -> tuple[FunctionCallingStepwisePlanner, Kernel, ScriptedChatCompletion]:
    kernel, service = Kernel(), ScriptedChatCompletion([say("Done.")])
    kernel.add_plugin(bank, "bank")
    kernel.add_service(service)
    policy = ApprovalPolicy.from_dict({"default": "allow", "rules": [{"function": "pay", "action": "ask"}]})
    options = FunctionCallingStepwisePlannerOptions(plan=False, interceptors=[policy])
    return FunctionCallingStepwisePlanner(options=options), kernel, service


def results(result: FunctionCallingStepwisePlannerResult) -> list[str]:
    assert result.chat_history is not None
    return [str(first_result(m).result) for m in result.chat_history.messages if m.role == "tool"]


async def test_an_older_checkpoint_asks_again_where_its_values_changed() -> None:
    """A decision on what was asked is refused by name and runs nothing; then the call waits as what it would run."""
    checkpoint = Checkpoint.from_json((OLDER / "checkpoint.json").read_text("utf-8"))
    bank = Bank()
    planner, kernel, service = application(bank)
    with pytest.raises(DecisionRefusedError, match=r'"account": 7, "amount": 50.*Resume without a decision') as refused:
        await planner.resume(kernel, checkpoint, {"pay": Approve(by="ann")})
    assert (refused.value.call_id, bank.ran, len(service.requests)) == ("pay", [], 0)

    waits = await planner.resume(kernel, checkpoint, {})
    assert waits.status == "paused"
    (pending,) = waits.pending
    assert (pending.id, pending.arguments) == ("pay", {"account": 7, "amount": 50})
    assert (bank.ran, len(service.requests)) == ([], 0)

    kept = Checkpoint.from_json(waits.checkpoint.to_json())
    result = await planner.resume(kernel, kept, {"pay": Approve(by="ann", fingerprint=pending.fingerprint)})
    assert (result.status, bank.ran) == ("answered", [("pay", 7, 50.0)])
    assert results(result) == [NOT_RUN, "paid"]


@pytest.fixture
def whole_numbers(tmp_path: Path) -> str:
    """A store of version 0.1.0 in which ``bank-pay`` of 50.0 from account 7 waits, digested as 50.0 and not as 50."""
    path = tmp_path / "numbers.db"
    with closing(sqlite3.connect(path)) as database:
        database.executescript((OLDER / "whole_numbers.sql").read_text("utf-8"))
    return str(path)


async def test_an_older_row_whose_value_is_the_same_can_be_decided(whole_numbers: str) -> None:
    """That 7.0 is 7 to a digest makes no record of before look altered: what was asked about runs once approved."""
    bank = Bank()
    async with Approvals.connect(whole_numbers) as approvals:
        (asked,) = await approvals.pending()
        assert asked.arguments == {"account": 7, "amount": 50.0}
        assert await approvals.decide(asked.id, Approve(by="ann", fingerprint=asked.fingerprint))
    result = await drive(whole_numbers, bank)
    assert (result.status, bank.ran, results(result)) == ("answered", [("pay", 7, 50.0)], ["paid"])


@pytest.mark.parametrize("amount", ["51.0", "500", "51"])
async def test_an_older_checkpoint_whose_value_is_the_same_can_be_decided(whole_numbers: str, amount: str) -> None:
    """It resumes with a decision on what was asked about; with another number in it, it is refused as altered."""
    with closing(sqlite3.connect(whole_numbers)) as database:
        rows = [fact for (fact,) in database.execute("SELECT fact FROM planner_journal ORDER BY seq")]
    text = f'{{"schema": 1, "facts": [{", ".join(rows)}]}}'
    bank = Bank()
    planner, kernel, _ = application(bank)
    with pytest.raises(InvalidCheckpointError):
        await planner.resume(kernel, Checkpoint.from_json(text.replace("50.0", amount)), {"pay": Approve(by="ann")})
    assert bank.ran == []
    result = await planner.resume(kernel, Checkpoint.from_json(text), {"pay": Approve(by="ann")})
    assert (result.status, bank.ran, results(result)) == ("answered", [("pay", 7, 50.0)], ["paid"])


class Resolved:
    """Functions that make of every call one with these arguments."""

    def __init__(self, account: Any) -> None:
        self._account = account

    def check(self, call: RequestedCall, edited: str | None = None) -> ResolvedCall:
        return ResolvedCall(kind="function", function=call.name, arguments={"account": self._account})


@pytest.mark.parametrize("in_doubt", ["person", "model"])
async def test_an_older_call_that_had_started_is_in_doubt_where_its_value_changed(in_doubt: Any) -> None:
    """An idempotent function runs again with the same value alone; with another one, nobody says it had not run."""
    started, replied, look, pay, _ = Checkpoint.from_json((OLDER / "checkpoint.json").read_text("utf-8")).facts
    assert isinstance(look, CallDecided)
    assert isinstance(pay, CallDecided)
    running = CallStarted(iteration=0, index=0, call_id="look", function="bank-look", at=2.0)
    state = fold((started, replied, look, replace(pay, verdict="run"), running))

    async def recovered(account: Any) -> Any:
        effect = Effect(kind="idempotent")
        functions: Any = Resolved(account)
        return await recovery_facts(state, effect_of=lambda _: effect, functions=functions, in_doubt=in_doubt, at=3.0)

    assert [type(fact) for fact in await recovered("7")] == [CallDecided]
    changed = await recovered(7)
    assert [fact.result for fact in changed] == ([] if in_doubt == "person" else [IN_DOUBT])


@pytest.fixture
def older_store(tmp_path: Path) -> str:
    path = tmp_path / "runs.db"
    with closing(sqlite3.connect(path)) as database:
        database.executescript((OLDER / "store.sql").read_text("utf-8"))
    return str(path)


async def drive(store: str, bank: Any, run_id: str = "old") -> FunctionCallingStepwisePlannerResult:
    planner, kernel, _ = application(bank)
    async with open_runs(store) as runs:
        return await (await runs.start(planner, kernel, "Pay.", run_id=run_id)).result()


async def test_an_older_store_asks_again_where_its_values_changed(older_store: str) -> None:
    """The row shows what was asked; a decision on it runs nothing, says why, and the row shows what would run."""
    bank = Bank()
    async with Approvals.connect(older_store) as approvals:
        (asked,) = await approvals.pending()
        assert asked.arguments == {"account": "7", "amount": "50"}
        assert await approvals.decide(asked.id, Approve(by="ann"))
        assert (await drive(older_store, bank)).status == "paused"
        (again,) = await approvals.pending()
        assert (again.id, again.arguments, bank.ran) == (asked.id, {"account": 7, "amount": 50}, [])
        assert "no longer what was asked about" in again.problem
        assert again.fingerprint != asked.fingerprint
        assert await approvals.decide(again.id, Approve(by="ann", fingerprint=again.fingerprint))
    result = await drive(older_store, bank)
    assert (result.status, bank.ran, results(result)) == ("answered", [("pay", 7, 50.0)], [NOT_RUN, "paid"])


def bank_taking(kind: type) -> tuple[Any, list[Any]]:
    """Make a bank whose account is of a type."""
    ran: list[Any] = []

    async def pay(account: Any) -> str:
        ran.append(account)
        return "paid"

    pay.__annotations__["account"] = kind
    return {"pay": kernel_function(name="pay")(pay)}, ran


async def begun(store: str) -> None:
    """Begin a run whose call waits with the account as a text."""
    bank, _ = bank_taking(str)
    planner, kernel, _ = application(bank)
    kernel.services.clear()
    kernel.add_service(ScriptedChatCompletion([calls(call("bank-pay", {"account": 7}, id="pay"))]))
    async with open_runs(store) as runs:
        assert (await (await runs.start(planner, kernel, "Pay.", run_id="new")).result()).status == "paused"


async def test_a_parameter_of_another_type_asks_again_on_every_store(store: str) -> None:
    """A function whose parameter became a number is asked about anew, also where somebody decides in between."""
    await begun(store)
    bank, ran = bank_taking(int)
    async with Approvals.connect(store) as approvals:
        (asked,) = await approvals.pending()
        assert asked.arguments == {"account": "7"}
        for _ in range(2):  # the second time, the decision is on what the row shows by then
            (row,) = await approvals.pending()
            assert await approvals.decide(row.id, Approve(by="ann"))
            result = await drive(store, bank, "new")
    assert (result.status, ran) == ("answered", [7])


@pytest.mark.parametrize("decide", [lambda: Approve(arguments={"account": "8", "amount": "5"}), Approve])
async def test_an_edit_of_what_changed_is_refused_likewise(decide: Callable[[], Approve]) -> None:
    """Whatever the approval says, it was given on what the call no longer is."""
    checkpoint = Checkpoint.from_json((OLDER / "checkpoint.json").read_text("utf-8"))
    bank = Bank()
    planner, kernel, _ = application(bank)
    with pytest.raises(DecisionRefusedError, match="no longer what was asked about"):
        await planner.resume(kernel, checkpoint, {"pay": decide()})
    assert bank.ran == []
