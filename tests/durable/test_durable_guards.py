"""Who has a say travels with a kept run: a process that has less of it is refused by name, and nothing runs."""

import asyncio
import json
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function

from planner_ext import (
    ApprovalFilter,
    ApprovalPolicy,
    Approve,
    Budget,
    Deny,
    FunctionInvokingChatCompletion,
)
from planner_ext.durable import Approvals, RunRefusedError, Runs, worker
from planner_ext.errors import PlannerExtError
from planner_ext.hitl_manager import ApprovalSettings, ToolCall
from planner_ext.iteration import AnswerContext
from planner_ext.planner import FunctionCallingStepwisePlanner
from planner_ext.testing import (
    ScriptedChatCompletion,
    ScriptedFault,
    ScriptedReply,
    ScriptedRequest,
    call,
    say,
)
from support.durable import (
    GOAL,
    Shop,
    decide_all,
    effects_in,
    on_sqlite,
    open_runs,
    planner_of,
    store_neutral,
    turn,
)
from support.stock import add_filter

ASKS = ApprovalPolicy.from_dict({"default": "ask"})
LIMITS = {
    "default": "deny",
    "rules": [
        {"function": "label", "action": "allow"},
        {"function": "book", "action": "ask"},
    ],
}


def deny(call: ToolCall) -> Deny:
    return Deny("Not today.")


def no_opinion(call: ToolCall) -> None:
    return None


def accept(answer: str, context: AnswerContext) -> str | None:
    """Check no answer."""


def before_each(iteration: int, name: str, arguments: Mapping[str, Any]) -> bool:
    return False


def books(request: ScriptedRequest) -> ScriptedReply:
    return [call("shop-book", {"order": 1}), say("Booked.")][turn(request)]


def kernel_of(
    effects: Path, *replies: ScriptedReply | ScriptedFault, **checks: Any
) -> Kernel:
    kernel = Kernel()
    service = ScriptedChatCompletion(list(replies) or books)
    kernel.add_service(
        FunctionInvokingChatCompletion(service, **checks) if checks else service
    )
    kernel.add_plugin(Shop(effects), "shop")
    return kernel


async def interrupted(runs: Runs, effects: Path, **options: Any) -> None:
    """Begin a run that a fault leaves unfinished."""
    kernel = kernel_of(effects, ScriptedFault(status=500))
    with pytest.raises(PlannerExtError):
        await (
            await runs.start(planner_of(**options), kernel, GOAL, run_id="a")
        ).result()


SAYS: dict[str, tuple[dict[str, Any], str]] = {
    "policy": ({"interceptors": (ASKS,)}, r'the approval policy \{"default": "ask"'),
    "interceptor": (
        {"interceptors": (deny,)},
        r"the interceptor test_durable_guards\.deny",
    ),
    "lambda": (
        {"interceptors": (lambda _: Deny(),)},
        r"the interceptor test_durable_guards\.<lambda>",
    ),
    "partial": (
        {"interceptors": (partial(deny),)},
        r"the interceptor partial of test_durable_guards\.deny",
    ),
    "second": (
        {"interceptors": (deny, deny)},
        r"the interceptor test_durable_guards\.deny; the interceptor",
    ),
    "pre_invoke": (
        {"pre_invoke": before_each},
        r"the pre_invoke callback test_durable_guards\.before_each",
    ),
    "check_answer": (
        {"check_answer": accept},
        r"the check_answer hook test_durable_guards\.accept",
    ),
    "ask all": (
        {"approval": ApprovalSettings(unmatched="defer")},
        r"now 'approve' instead of 'defer' \(unmatched\)",
    ),
    "deny all": (
        {"approval": ApprovalSettings(unmatched="deny")},
        r"now 'approve' instead of 'deny' \(unmatched\)",
    ),
    "expiry": (
        {"approval": ApprovalSettings(expires_in=60)},
        r"expires_in is now None instead of 60",
    ),
}


@store_neutral("name", SAYS)
async def test_a_process_that_has_less_of_a_say_is_refused_by_name(
    name: str, store: str, tmp_path: Path
) -> None:
    """Nothing runs and the run stays as it was; a process that has what it began under continues it."""
    effects, (options, missing) = tmp_path / "effects", SAYS[name]
    async with open_runs(store) as runs:
        await interrupted(runs, effects, **options)
    async with open_runs(store) as runs:
        before = (await runs.load("a")).facts
        for again in (
            runs.start(planner_of(), kernel_of(effects), GOAL, run_id="a"),
            runs.resume("a", planner_of(), kernel_of(effects)),
            runs.resume(
                "a", planner_of(), kernel_of(effects), budget=Budget(max_iterations=9)
            ),
        ):
            with pytest.raises(RunRefusedError, match=missing):
                await (await again).result()
        for handle in await runs.recover(planner_of(), kernel_of(effects)):
            with pytest.raises(RunRefusedError, match=missing):
                await handle.result()
        stored = await runs.load("a")
        assert (stored.facts, stored.record.status, stored.record.owner) == (
            before,
            "running",
            None,
        )
        assert effects_in(effects) == []
        (handle,) = await runs.recover(planner_of(**options), kernel_of(effects))
        assert (await handle.result()).status in ("answered", "paused")


async def test_a_decided_call_is_left_to_a_process_that_may_run_it(
    store: str, tmp_path: Path
) -> None:
    """A worker without the policy does not use the decision up; one with an equal policy takes it."""
    effects = tmp_path / "effects"
    async with open_runs(store, poll_seconds=0.01) as runs:
        handle = await runs.start(
            planner_of(interceptors=(ASKS,)), kernel_of(effects), GOAL, run_id="a"
        )
        assert (await handle.result()).status == "paused"
        assert await decide_all(store) == 1
        with pytest.raises(RunRefusedError, match="the approval policy"):
            await (await runs.resume("a", planner_of(), kernel_of(effects))).result()
        async with Approvals.connect(store) as approvals:
            assert (await approvals.show("a/0/call_1")).status == "decided"
        assert effects_in(effects) == []
        equal = ApprovalPolicy.from_yaml_text("rules: []\ndefault: ask\n")
        resumed = await runs.resume(
            "a", planner_of(interceptors=(equal,)), kernel_of(effects)
        )
        assert (await resumed.result()).final_answer == "Booked."
    assert effects_in(effects) == ["book 1"]


async def test_a_worker_that_may_not_drive_a_run_leaves_it_to_one_that_may(
    store: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It says so once, does not try again and again, and another worker that comes later finishes the run."""
    effects = tmp_path / "effects"
    async with open_runs(store, poll_seconds=0.01) as runs:
        await interrupted(runs, effects, interceptors=(no_opinion,))
        waiting = await runs.start(
            planner_of(interceptors=(ASKS,)), kernel_of(effects), GOAL, run_id="b"
        )
        await waiting.result()
    await decide_all(store)
    caplog.clear()
    async with open_runs(store, poll_seconds=0.01) as runs:
        working = asyncio.create_task(runs.work(planner_of(), kernel_of(effects)))
        while len(refusals(caplog)) < 2:  # noqa: ASYNC110  (a log has no event)
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.2)  # twenty looks at what is due, in a store of our own
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
    assert len(refusals(caplog)) == 2
    assert effects_in(effects) == []
    async with open_runs(store, poll_seconds=0.01) as runs:
        both = planner_of(interceptors=(no_opinion, ASKS))
        working = asyncio.create_task(runs.work(both, kernel_of(effects)))
        statuses: set[tuple[str, str]] = set()
        while statuses != {
            ("a", "paused"),
            ("b", "answered"),
        }:  # for "a" it is more of a say: now a person is asked
            await asyncio.sleep(0.02)
            statuses = {(record.run_id, record.status) for record in await runs.list()}
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
    assert effects_in(effects) == ["book 1"]


@on_sqlite
async def test_a_worker_forgets_refused_runs_that_have_ended(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many it refuses while others drive them, as in a rolling deployment: its memory has an end."""
    monkeypatch.setattr(worker, "_MOST_REFUSED", 3)
    effects = tmp_path / "effects"
    guarded = planner_of(interceptors=(no_opinion,))
    async with open_runs(store) as old, open_runs(store) as new:
        for number in range(12):
            await new.submit(GOAL, run_id=f"r{number}", interceptors=[no_opinion])
            for handle in await old.recover(planner_of(), kernel_of(effects)):
                with pytest.raises(RunRefusedError):
                    await handle.result()
            for handle in await new.recover(guarded, kernel_of(effects)):
                await handle.result()
        assert len(old._pool._refused) <= 4


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno == logging.ERROR
        and " left to another worker: " in record.getMessage()
    ]


async def kept_under(
    tmp_path: Path, before: dict[str, Any], now: dict[str, Any]
) -> None:
    """Begin a run under some say, and continue it under another."""
    async with open_runs(str(tmp_path / "runs.db")) as runs:
        await interrupted(runs, tmp_path / "effects", **before)
        await (
            await runs.resume("a", planner_of(**now), kernel_of(tmp_path / "effects"))
        ).result()


def policy(default: str, *rules: dict[str, Any]) -> ApprovalPolicy:
    return ApprovalPolicy.from_dict({"default": default, "rules": list(rules)})


ALLOWS = {"function": "book", "action": "allow"}
PAYS = {
    "function": "pay",
    "action": "ask",
    "arguments": {"amount": {"gt": 5}},
    "expires_in": 60,
}


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ((policy("ask"),), (policy("allow"),), "its default was ask, is allow"),
        ((policy("deny"),), (policy("ask"),), "its default was deny, is ask"),
        ((policy("allow"),), (policy("ask"),), "its default was allow, is ask"),
        (
            (policy("ask", PAYS),),
            (policy("ask", {**PAYS, "arguments": {"amount": {"gt": 50}}}),),
            r'its rule 1 was \{.*"gt": 5\}.* is \{.*"gt": 50\}',
        ),
        ((policy("ask", PAYS),), (policy("ask"),), r"its rule 1 was .*, is not there"),
        (
            (policy("ask"),),
            (policy("ask", ALLOWS),),
            r"its rule 1, .*book.*, was not there",
        ),
        (
            (policy("ask"),),
            (policy("ask", ALLOWS), policy("ask")),
            "rule 1 of a policy that the run did not begin with",
        ),
        (
            (policy("ask"),),
            (policy("ask"), policy("deny", ALLOWS)),
            "rule 1 of a policy that the run did not begin",
        ),
        (
            (policy("deny"),),
            (policy("ask"), policy("deny")),
            "now 'defer' instead of 'deny'",
        ),
        (
            (deny,),
            (policy("deny", ALLOWS), deny),
            "rule 1 of a policy that the run did not begin with",
        ),
        ((deny, no_opinion), (no_opinion, deny), "the order of the interceptors"),
    ],
)
async def test_a_policy_that_changed_is_refused_with_what_differs(
    before: tuple[Any, ...], now: tuple[Any, ...], said: str, tmp_path: Path
) -> None:
    """Whichever way it changed; and so is more of a say that would overrule what there was."""
    with pytest.raises(RunRefusedError, match=said):
        await kept_under(tmp_path, {"interceptors": before}, {"interceptors": now})


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ((), (policy("ask", ALLOWS), deny)),
        ((deny,), (no_opinion, deny, no_opinion)),
        (
            (policy("ask"),),
            (deny, policy("ask"), policy("allow", {**ALLOWS, "action": "deny"})),
        ),
        ((deny,), (deny, policy("allow", ALLOWS))),
        (
            (
                policy(
                    "ask",
                    PAYS,
                    {
                        "function": "label",
                        "action": "deny",
                        "reason": "No more labels.",
                    },
                ),
            ),
            (
                ApprovalPolicy.from_yaml_text(
                    "rules:\n  - {plugin: '*', action: ask, expires_in: 60.0, function: pay, reason: Sure,\n"
                    "     arguments: {amount: {gt: 5.0}}}\n  - {action: deny, function: label}\ndefault: ask\n"
                ),
            ),
        ),
    ],
)
async def test_more_of_a_say_and_an_equal_policy_are_fine(
    before: tuple[Any, ...], now: tuple[Any, ...], tmp_path: Path
) -> None:
    """An equal policy may come from another file, with other defaults written out and other words for people."""
    await kept_under(tmp_path, {"interceptors": before}, {"interceptors": now})


async def test_a_stricter_setting_is_fine(tmp_path: Path) -> None:
    """What calls come to that nothing decides may become stricter, by a policy's default, too; so may an expiry."""
    asks = ApprovalSettings(unmatched="defer", expires_in=60)
    await kept_under(
        tmp_path / "",
        {"approval": asks},
        {"approval": ApprovalSettings(unmatched="deny", expires_in=9)},
    )


class Unmarked:
    """The shop's payment without its mark."""

    @kernel_function(description="Pays.")
    def pay(self, amount: int) -> str:
        raise AssertionError("it ran")


async def test_a_function_that_lost_its_mark_is_refused(tmp_path: Path) -> None:
    """`@requires_approval` is recorded, too; where the function is not offered any more, nothing is missing."""
    async with open_runs(str(tmp_path / "runs.db")) as runs:
        await interrupted(runs, tmp_path / "effects")
        kernel = Kernel()
        kernel.add_service(ScriptedChatCompletion([say("Done.")]))
        kernel.add_plugin(Unmarked(), "shop")
        with pytest.raises(RunRefusedError, match="@requires_approval of shop-pay"):
            await (await runs.resume("a", planner_of(), kernel)).result()
        without = planner_of(excluded_functions={"pay"})
        assert (
            await (await runs.resume("a", without, kernel)).result()
        ).status == "answered"


async def test_a_services_own_say_and_a_kernels_filter_count(tmp_path: Path) -> None:
    """A bounded service's interceptors hold for a planner's run, and an `ApprovalFilter` has a say as well."""
    effects, checks = tmp_path / "effects", {"check_for_intervention": lambda _: True}
    async with open_runs(str(tmp_path / "runs.db")) as runs:
        kernel = kernel_of(effects, ScriptedFault(status=500), **checks)
        add_filter(
            kernel,
            "function_invocation",
            ApprovalFilter(ASKS, approver=lambda _: Approve()),
        )
        with pytest.raises(PlannerExtError):
            await (await runs.start(planner_of(), kernel, GOAL, run_id="a")).result()
        with pytest.raises(
            RunRefusedError,
            match=r"the check_for_intervention callback .*; the approval",
        ):
            await (await runs.resume("a", planner_of(), kernel_of(effects))).result()


@on_sqlite
async def test_a_run_of_an_earlier_version_continues(
    store: str, tmp_path: Path
) -> None:
    """Of a journal that does not say who had a say nothing is known, and nothing is refused."""
    effects = tmp_path / "effects"
    async with open_runs(store) as runs:
        await interrupted(runs, effects, interceptors=(ASKS,))
        (row,) = await runs._store.database.transact(  # what a journal has
            ("SELECT fact FROM planner_journal WHERE run_id = 'a' AND seq = 0", {})
        )
        fact = json.loads(str(row[0][0]))
        assert fact.pop("guards")["interceptors"] == ['{"default":"ask","rules":[]}']
        values = {"fact": json.dumps(fact)}
        await runs._store.database.transact(  # likewise
            (
                "UPDATE planner_journal SET fact = :fact WHERE run_id = 'a' AND seq = 0",
                values,
            )
        )
        assert (
            await (await runs.resume("a", planner_of(), kernel_of(effects))).result()
        ).status == "answered"


async def test_a_checkpoint_is_resumed_by_another_planner(tmp_path: Path) -> None:
    """The application may resume a value with any planner; a value records no hooks."""
    effects = tmp_path / "effects"
    result = await planner_of(interceptors=(ASKS,)).invoke(kernel_of(effects), GOAL)
    assert result.facts[0].guards is None
    other: FunctionCallingStepwisePlanner = planner_of()
    resumed = await other.resume(
        kernel_of(effects, say("Done.")), result.checkpoint, {"call_1": Approve()}
    )
    assert resumed.status == "answered"


@on_sqlite
async def test_the_result_of_an_ended_run_is_read_by_any_process(
    store: str, tmp_path: Path
) -> None:
    """Nothing runs by that, so nothing has to be there."""
    effects = tmp_path / "effects"
    async with open_runs(store) as runs:
        asks = planner_of(approval=ApprovalSettings(unmatched="deny"))
        assert (
            await (
                await runs.start(asks, kernel_of(effects), GOAL, run_id="a")
            ).result()
        ).status == "answered"
        again = await runs.start(planner_of(), kernel_of(effects), GOAL, run_id="a")
        assert (await again.result()).final_answer == "Booked."
