"""An interceptor, approver or callback whose answer is not a decision: a named error, and nothing runs."""

from pathlib import Path
from typing import Any

import pytest
from semantic_kernel.exceptions import KernelException

from planner_ext import ApprovalFilter, ApprovalPolicy, Approve
from planner_ext.durable import Runs
from planner_ext.errors import PlannerExtError, PlannerInvalidConfigurationError
from planner_ext.hitl_manager import Defer
from planner_ext.session import ToolUseSession
from planner_ext.testing import calls
from support.approval import (
    DONE,
    LOOK,
    REFUND,
    Door,
    asked,
    check_sendable,
    every_door,
    one_door,
    planner_with,
    two_doors,
    world,
)
from support.approval_filter import chat
from support.stock import add_filter
from support.values import each_of

ANSWERS: dict[str, Any] = {
    "true": True,
    "false": False,
    "text": "approve",
    "empty": "",
    "number": 1,
    "mapping": {"approve": True},
    "class": Approve,
}
each_answer = each_of("kind", ANSWERS)


def asks(call: Any) -> Any:
    """Ask about the refunds."""
    return Defer() if call.function_name == "refund" else None


def given(option: str, answer: Any, here: Any) -> dict[str, Any]:
    """Give an answer in one of the places where one is expected, named ``answers`` in errors."""

    def answers(call: Any) -> Any:
        return answer if call.function_name == "refund" else None

    match option:
        case "interceptor":
            return {"interceptors": [answers]}
        case "approver":
            return {"interceptors": [asks], "approver": answers}
        case "filter":
            add_filter(here.kernel, "auto_function_invocation", ApprovalFilter(answers))
        case _:
            add_filter(
                here.kernel,
                "auto_function_invocation",
                ApprovalFilter(asks, approver=answers),
            )
    return {}


OPTIONS = ("interceptor", "approver", "filter", "filter-approver")


@each_answer
@each_of("option", OPTIONS)
@one_door
async def test_an_answer_other_than_a_decision_is_a_named_error(
    door: Door, option: str, kind: str
) -> None:
    """Names the function and what it answered; nothing of the batch ran, and no further request is made."""
    here, history = world([calls(LOOK, REFUND), DONE]), asked()
    with pytest.raises(
        PlannerInvalidConfigurationError, match=r"answers; got .* Return Approve, Deny"
    ) as raised:
        await door.ask(here, history=history, **given(option, ANSWERS[kind], here))
    assert isinstance(raised.value, PlannerExtError)
    assert isinstance(raised.value, KernelException)
    assert (here.ran, here.requests) == ([], 1)
    check_sendable(history)


@every_door
async def test_every_door_raises_for_an_invalid_answer(door: Door) -> None:
    """At its first call, plain and streamed; the history can be sent."""
    here, history = world([calls(LOOK, REFUND), DONE]), asked()
    with pytest.raises(
        PlannerInvalidConfigurationError, match="Expected a decision from"
    ):
        await door.ask(here, history=history, interceptors=[lambda call: True])
    assert here.ran == []
    check_sendable(history)


async def test_a_session_raises_it() -> None:
    """Its history stays one that can be sent."""
    here = world([REFUND, DONE])
    given: dict[str, Any] = {"interceptors": [lambda call: True]}
    session = ToolUseSession(here.kernel, **given)
    with pytest.raises(
        PlannerInvalidConfigurationError, match="Expected a decision from"
    ):
        await session.prompt("Refund.")
    assert here.ran == []


@each_of("answer", ["yes", 1, None, Approve()], ids=str)
@one_door
async def test_pre_invoke_answers_true_or_false(door: Door, answer: Any) -> None:
    """Of this one, True and False are the answers, and no other."""
    here = world([REFUND, DONE])
    with pytest.raises(
        PlannerInvalidConfigurationError,
        match=r"Expected True or False from .*Return True or False\.",
    ):
        await door.ask(here, pre_invoke=lambda *_: answer)
    assert here.ran == []


@each_of("answer", ["yes", 1, ()], ids=str)
@two_doors
async def test_a_check_answers_true_or_false(door: Door, answer: Any) -> None:
    """So does check_for_intervention; a decision and None are understood, too."""
    here = world([REFUND, DONE])
    with pytest.raises(
        PlannerInvalidConfigurationError, match="Expected True or False from"
    ):
        await door.ask(here, check_for_intervention=lambda call: answer)
    assert here.ran == []


async def test_a_worker_does_not_try_again(tmp_path: Path) -> None:
    """A kept run fails at once, by that name: no retry makes the answer a decision."""
    here = world([REFUND, DONE])
    async with Runs.sqlite(tmp_path / "runs.db") as runs:
        planner = planner_with(interceptors=[lambda _: True])
        handle = await runs.start(planner, here.kernel, "Refund.", run_id="a")
        with pytest.raises(PlannerInvalidConfigurationError):
            await handle.result()
        record = (await runs.load("a")).record
    assert record.status == "failed"
    assert here.ran == []
    assert here.requests == 1
    assert "Expected a decision from" in (record.problem or "")


@pytest.mark.parametrize("option", ["filter", "filter-approver"])
@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
async def test_the_stock_loop_raises_for_an_invalid_answer(
    option: str, streamed: bool
) -> None:
    """`ApprovalFilter` on a stock kernel, by its policy or its approver."""
    here = world([REFUND, DONE])
    given(option, True, here)
    with pytest.raises(KernelException, match="Expected a decision from"):
        await chat(here, asked(), streamed=streamed)
    assert here.ran == []


POLICY = ApprovalPolicy.from_dict({"default": "ask"})


@each_of(
    ("value", "way_out"),
    [
        (POLICY, r"Put it into a list: interceptors=\[\.\.\.\]\."),
        (asks, r"Put it into a list: interceptors=\[\.\.\.\]\."),
        (["policy.yaml"], r"interceptors=\[ApprovalPolicy\.from_yaml\(path\)\]\."),
        ("policy.yaml", r"interceptors=\[ApprovalPolicy\.from_yaml\(path\)\]\."),
        (
            [Path("policy.yaml")],
            r"interceptors=\[ApprovalPolicy\.from_yaml\(path\)\]\.",
        ),
        ([{"default": "ask"}], r"interceptors=\[ApprovalPolicy\.from_dict\(data\)\]\."),
    ],
    ids=["policy", "function", "file", "bare-file", "path", "data"],
)
@every_door
async def test_invalid_interceptors_get_the_way_out(
    door: Door, value: Any, way_out: str
) -> None:
    """A sentence that can be copied, at every door."""
    with pytest.raises(
        PlannerInvalidConfigurationError,
        match=rf"interceptors must be a sequence .*{way_out}",
    ):
        await door.ask(world([DONE]), interceptors=value)


def test_a_filter_s_policy_gets_the_way_out() -> None:
    """`ApprovalFilter` takes one policy, not its file."""
    with pytest.raises(
        PlannerInvalidConfigurationError, match=r"ApprovalPolicy\.from_yaml\(path\)\."
    ):
        ApprovalFilter("policy.yaml")  # pyright: ignore[reportArgumentType]  # a mistake, on purpose
