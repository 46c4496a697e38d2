"""Functions whose parameters changed between a pause and its decision: what was asked about is asked again."""

from collections.abc import Callable
from dataclasses import replace
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
from planner_ext.sk.run.resume import Deciding, recovery_facts
from planner_ext.testing import ScriptedChatCompletion, call, calls, say
from support.durable import open_runs
from support.stock import first_result

NOT_RUN = (
    "Not executed: the function or its parameters changed after the call was decided."
)


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


class Spelled:
    """The plugin as it was before: its parameters were texts, taken as the model spells them."""

    @kernel_function(description="Looks.")
    async def look(self, account: str) -> str:
        raise AssertionError("nothing runs before the pause")

    @kernel_function(description="Pays.")
    async def pay(self, account: str, amount: str) -> str:
        raise AssertionError("nothing runs before the pause")


CALLS = calls(
    call("bank-look", {"account": "7"}, id="look"),
    call("bank-pay", {"account": "7", "amount": "50"}, id="pay"),
)


def application(
    bank: Any, script: Any = None
) -> tuple[FunctionCallingStepwisePlanner, Kernel, ScriptedChatCompletion]:
    kernel = Kernel()
    service = ScriptedChatCompletion(script or [say("Done.")])
    kernel.add_plugin(bank, "bank")
    kernel.add_service(service)
    policy = ApprovalPolicy.from_dict(
        {"default": "allow", "rules": [{"function": "pay", "action": "ask"}]}
    )
    options = FunctionCallingStepwisePlannerOptions(plan=False, interceptors=[policy])
    return FunctionCallingStepwisePlanner(options=options), kernel, service


def results(result: FunctionCallingStepwisePlannerResult) -> list[str]:
    assert result.chat_history is not None
    return [
        str(first_result(m).result)
        for m in result.chat_history.messages
        if m.role == "tool"
    ]


async def spelled() -> Checkpoint:
    """Pause a run in which ``bank-look`` may run once a person has decided on ``bank-pay``; both take texts."""
    planner, kernel, _ = application(Spelled(), [CALLS])
    paused = await planner.invoke(kernel, "Pay.")
    return Checkpoint.from_json(paused.checkpoint.to_json())


async def test_a_checkpoint_asks_again_where_its_values_changed() -> None:
    """A decision on what was asked is refused by name and runs nothing; then the call waits as what it would run."""
    checkpoint = await spelled()
    bank = Bank()
    planner, kernel, service = application(bank)
    with pytest.raises(
        DecisionRefusedError,
        match=r'"account": 7, "amount": 50.*Resume without a decision',
    ) as refused:
        await planner.resume(kernel, checkpoint, {"pay": Approve(by="ann")})
    assert (refused.value.call_id, bank.ran, len(service.requests)) == ("pay", [], 0)

    waits = await planner.resume(kernel, checkpoint, {})
    assert waits.status == "paused"
    (pending,) = waits.pending
    assert (pending.id, pending.arguments) == ("pay", {"account": 7, "amount": 50})
    assert (bank.ran, len(service.requests)) == ([], 0)

    kept = Checkpoint.from_json(waits.checkpoint.to_json())
    result = await planner.resume(
        kernel, kept, {"pay": Approve(by="ann", fingerprint=pending.fingerprint)}
    )
    assert (result.status, bank.ran) == ("answered", [("pay", 7, 50.0)])
    assert results(result) == [NOT_RUN, "paid"]


class Resolved:
    """Functions that make of every call one with these arguments."""

    def __init__(self, account: Any) -> None:
        self._account = account

    def check(self, call: RequestedCall, edited: str | None = None) -> ResolvedCall:
        return ResolvedCall(
            kind="function", function=call.name, arguments={"account": self._account}
        )


@pytest.mark.parametrize("in_doubt", ["person", "model"])
async def test_a_call_that_had_started_is_in_doubt_where_its_value_changed(
    in_doubt: Any,
) -> None:
    """An idempotent function runs again with the same value alone; with another one, it is unknown whether it ran."""
    started, replied, look, pay, _ = (await spelled()).facts
    assert isinstance(look, CallDecided)
    assert isinstance(pay, CallDecided)
    running = CallStarted(
        iteration=0, index=0, call_id="look", function="bank-look", at=2.0
    )
    state = fold((started, replied, look, replace(pay, verdict="run"), running))

    async def recovered(account: Any) -> Any:
        effect = Effect(kind="idempotent")
        functions: Any = Resolved(account)
        return await recovery_facts(
            state,
            deciding=lambda _: Deciding(
                functions=functions,
                authorize=None,
                review_edit=functions,
                effect_of=lambda _: effect,
            ),
            in_doubt=in_doubt,
            at=3.0,
        )

    assert [type(fact) for fact in await recovered("7")] == [CallDecided]
    changed = await recovered(7)
    assert [fact.result for fact in changed] == (
        [] if in_doubt == "person" else [IN_DOUBT]
    )


async def drive(
    store: str, bank: Any, run_id: str
) -> FunctionCallingStepwisePlannerResult:
    planner, kernel, _ = application(bank)
    async with open_runs(store) as runs:
        return await (await runs.start(planner, kernel, "Pay.", run_id=run_id)).result()


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
    kernel.add_service(
        ScriptedChatCompletion([calls(call("bank-pay", {"account": 7}, id="pay"))])
    )
    async with open_runs(store) as runs:
        assert (
            await (await runs.start(planner, kernel, "Pay.", run_id="new")).result()
        ).status == "paused"


async def test_a_parameter_of_another_type_asks_again_on_every_store(
    store: str,
) -> None:
    """A function whose parameter became a number is asked about again, also if a person decides in between."""
    await begun(store)
    bank, ran = bank_taking(int)
    async with Approvals.connect(store) as approvals:
        (asked,) = await approvals.pending()
        assert asked.arguments == {"account": "7"}
        for _ in range(
            2
        ):  # the second time, the decision is on what the row shows by then
            (row,) = await approvals.pending()
            assert await approvals.decide(row.id, Approve(by="ann"))
            result = await drive(store, bank, "new")
    assert (result.status, ran) == ("answered", [7])


@pytest.mark.parametrize(
    "decide", [lambda: Approve(arguments={"account": "8", "amount": "5"}), Approve]
)
async def test_an_edit_of_what_changed_is_refused_too(
    decide: Callable[[], Approve],
) -> None:
    """The approval, edited or not, was given on what the call no longer is."""
    checkpoint = await spelled()
    bank = Bank()
    planner, kernel, _ = application(bank)
    with pytest.raises(DecisionRefusedError, match="no longer what was asked about"):
        await planner.resume(kernel, checkpoint, {"pay": decide()})
    assert bank.ran == []
