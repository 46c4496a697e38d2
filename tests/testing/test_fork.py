"""``fork``: a recorded, kept or paused run goes on from an iteration in another way, and nothing before runs again."""

from pathlib import Path
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function

from planner_ext import (
    Approve,
    Budget,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    FunctionInvokingChatCompletion,
    requires_approval,
)
from planner_ext.errors import (
    DecisionRefusedError,
    InvalidCheckpointError,
    InvalidForkError,
)
from planner_ext.sk.messages import text_of
from planner_ext.testing import Script, ScriptedChatCompletion, call, fork, record, say


class Shop:
    """Finds, packs and refunds; the last only if a person approves."""

    def __init__(self) -> None:
        self.called: list[str] = []

    @kernel_function
    def find(self, order: str) -> str:
        self.called.append("find")
        return f"{order}: one lamp"

    @kernel_function
    def pack(self, order: str) -> str:
        self.called.append("pack")
        return f"{order} packed"

    @kernel_function
    @requires_approval()
    def refund(self, order: str) -> str:
        self.called.append("refund")
        return f"{order} refunded"


ORDER = {"order": "A-7"}
SCRIPT = [
    call("shop-find", ORDER),
    call("shop-pack", ORDER),
    call("shop-refund", ORDER),
    say("Packed and refunded."),
]


def world(script: Script = SCRIPT) -> tuple[Kernel, Shop]:
    kernel, shop = Kernel(), Shop()
    kernel.add_plugin(shop, "shop")
    kernel.add_service(ScriptedChatCompletion(script))
    return kernel, shop


def planner(**options: Any) -> FunctionCallingStepwisePlanner:
    return FunctionCallingStepwisePlanner(
        options=FunctionCallingStepwisePlannerOptions(**{"plan": False, **options})
    )


async def approved(
    kernel: Kernel,
    result: Any,
    with_planner: FunctionCallingStepwisePlanner | None = None,
) -> Any:
    decisions = {one.id: Approve(by="ann", always="function") for one in result.pending}
    return await (with_planner or planner()).resume(
        kernel, result.checkpoint, decisions
    )


async def test_a_cassette_is_forked_with_another_model_instruction_and_budget(
    tmp_path: Path,
) -> None:
    """The fork of a cassette continues after iteration 0: what was spent counts, and its function is not called."""
    path = tmp_path / "c.json"
    with record(path) as tape:
        kernel = tape.kernel(world()[0])
        await approved(kernel, await planner().invoke(kernel, "Settle A-7."))
    kernel, shop = world([say("Nothing was packed.")])
    checkpoint = fork(path, at=0, instruction="Do not pack it.")
    result = await planner().resume(kernel, checkpoint, budget=Budget(max_iterations=2))
    assert (result.status, result.final_answer, result.iterations) == (
        "limit_reached",
        "Nothing was packed.",
        2,
    )
    assert (shop.called, result.tool_calls) == ([], 1)
    service: Any = kernel.get_service("scripted")
    (request,) = service.requests
    assert [message["role"] for message in request.messages] == [
        "user",
        "assistant",
        "tool",
        "user",
    ]
    assert request.messages[-1]["content"] == "Do not pack it."


async def test_calls_after_the_cut_are_made_again() -> None:
    """Functions of later iterations run again: their effects are those of the fork, too."""
    kernel, shop = world()
    paused = await planner().invoke(kernel, "Settle A-7.")
    again, other = world(SCRIPT[1:])
    forked = await planner().resume(again, fork(paused.checkpoint, at=0))
    assert (shop.called, other.called, forked.status) == (
        ["find", "pack"],
        ["pack"],
        "paused",
    )


async def test_a_fork_does_not_bypass_approvals() -> None:
    """No call of a fork runs by a later decision, one for the rest of the run, or one on the other run's call."""
    kernel, shop = world(
        [*SCRIPT[:3], call("shop-refund", {"order": "A-8"}), say("Done.")]
    )
    paused = await planner().invoke(kernel, "Settle A-7.")
    done = await approved(kernel, paused)
    assert shop.called == ["find", "pack", "refund", "refund"]
    for at, order in ((1, "A-7"), (2, "A-8")):  # before the approval, and after it
        kernel, shop = world(
            [
                call("shop-refund", {"order": order}, id=paused.pending[0].id),
                say("Done."),
            ]
        )
        taking = planner()
        forked = await taking.resume(kernel, fork(done.checkpoint, at=at))
        assert (forked.status, shop.called) == ("paused", [])
        assert forked.pending[0].fingerprint != paused.pending[0].fingerprint
        old = {paused.pending[0].id: Approve(fingerprint=paused.pending[0].fingerprint)}
        with pytest.raises(DecisionRefusedError, match="fingerprint"):
            await taking.resume(kernel, forked.checkpoint, old)


async def test_a_signed_checkpoint_is_forked_with_its_key() -> None:
    """Without the key, or with another one, a signed run is not forked; the fork is signed with it again."""
    kernel, _ = world()
    signing = planner(checkpoint_key=b"right")
    paused = await signing.invoke(kernel, "Settle A-7.")
    for key in (None, b"wrong"):
        with pytest.raises(InvalidCheckpointError, match="key"):
            fork(paused.checkpoint, at=0, key=key)
    with pytest.raises(InvalidCheckpointError, match="unsigned"):
        await signing.resume(kernel, fork(paused.facts, at=0))
    resumed = await signing.resume(
        world(SCRIPT[1:])[0], fork(paused.checkpoint, at=0, key=b"right")
    )
    assert resumed.status == "paused"


async def test_a_fork_is_resumed_by_a_service() -> None:
    """Any door resumes a fork; the service fills an empty history."""
    kernel, _ = world()
    paused = await planner().invoke(kernel, "Settle A-7.")
    service = FunctionInvokingChatCompletion(
        ScriptedChatCompletion([say("Stopped there.")])
    )
    settings = service.get_prompt_execution_settings_class()()
    history = ChatHistory()
    message = await service.resume(
        history, fork(paused.checkpoint, at=0), {}, settings, kernel=kernel
    )
    assert text_of(message) == "Stopped there."
    assert [one.role.value for one in history.messages] == ["user", "assistant", "tool"]


async def test_a_fork_that_cannot_be_is_refused() -> None:
    """After the last iteration there is nothing to continue from: the error names the others."""
    kernel, _ = world()
    paused = await planner().invoke(kernel, "Settle A-7.")
    with pytest.raises(
        InvalidForkError, match="after iteration 2; possible iterations: -1, 0, 1"
    ):
        fork(paused.checkpoint, at=2)
