"""An edited call is judged like any other: what runs is what every rule has seen."""

from pathlib import Path
from typing import Any

import pytest
from semantic_kernel.functions import kernel_function

from planner_ext import ApprovalFilter, ApprovalPolicy, Approve, Deny
from planner_ext.durable import Approvals, Runs
from planner_ext.errors import DecisionRefusedError
from planner_ext.hitl_manager import (
    ApprovalSettings,
    Checkpoint,
    Defer,
    Supply,
    ToolCall,
)
from planner_ext.testing import call, calls
from support.approval import (
    DONE,
    LOOK,
    REFUND,
    REFUNDED,
    Door,
    arguments_in,
    asked,
    check_sendable,
    one_door,
    planner_with,
    results,
    three_doors,
    world,
)
from support.approval_filter import AUTO, chat, guarded
from support.stock import add_filter
from support.values import each_of

RULES: dict[str, Any] = {
    "default": "allow",
    "rules": [
        {
            "function": "refund",
            "arguments": {"order": {"equals": "666"}},
            "action": "deny",
            "reason": "Not to 666.",
        },
        {
            "function": "refund",
            "arguments": {"amount": {"gt": 1000}},
            "action": "ask",
            "roles": ["boss"],
        },
        {"function": "refund", "action": "ask", "roles": ["clerk"], "reason": "Sure?"},
    ],
}
ANYBODY = ApprovalSettings(authorize=lambda request: True)
FORBIDDEN = Approve(arguments={"order": "666", "amount": 5}, by="clerk")
LARGE = Approve(arguments={"order": "7", "amount": 9_000_000}, by="clerk")
SMALL = Approve(arguments={"order": "7", "amount": 20}, by="clerk")
PAID_LARGE = ("refund", "7", 9_000_000.0, "")
PAID_SMALL = ("refund", "7", 20.0, "")


def policy() -> ApprovalPolicy:
    return ApprovalPolicy.from_dict(RULES)


def options(of_filter: bool, here: Any) -> dict[str, Any]:
    """Guard a kernel by the policy: in a filter, or by a run's options."""
    if not of_filter:
        return {"interceptors": [policy()], "approval": ANYBODY}
    add_filter(here.kernel, "auto_function_invocation", ApprovalFilter(policy()))
    return {"approval": ANYBODY}


by_option_or_filter = each_of("of_filter", [False, True])


@by_option_or_filter
@three_doors
async def test_a_denied_edit_is_refused_by_name_and_the_call_waits(
    door: Door, of_filter: bool
) -> None:
    """Nothing ran, no other decision was taken, and the same checkpoint takes a better one."""
    first = world([REFUND])
    paused = await door.ask(first, **options(of_filter, first))
    here = world([DONE])
    given = options(of_filter, here)
    with pytest.raises(
        DecisionRefusedError,
        match=r"'call_1' \(shop-refund\).*policy rule 1: Not to 666\.",
    ):
        await door.resume(here, paused.checkpoint, {"call_1": FORBIDDEN}, **given)
    assert (here.ran, here.requests) == ([], 0)
    done = await door.resume(here, paused.checkpoint, {"call_1": SMALL}, **given)
    assert (done.status, here.ran) == ("answered", [PAID_SMALL])


@by_option_or_filter
@three_doors
async def test_an_edit_about_which_others_are_asked_waits_again(
    door: Door, of_filter: bool
) -> None:
    """The boss is asked about the edited call, under another fingerprint; what the boss approves is what runs."""
    first = world([REFUND])
    paused = await door.ask(first, **options(of_filter, first))
    second = world([DONE])
    again = await door.resume(
        second, paused.checkpoint, {"call_1": LARGE}, **options(of_filter, second)
    )
    (waits,) = again.pending
    assert again.status == "paused"
    assert second.ran == []
    assert second.requests == 0
    assert (waits["arguments"], waits["roles"]) == (
        {"order": "7", "amount": 9_000_000},
        ["boss"],
    )
    assert waits["fingerprint"] != paused.pending[0]["fingerprint"]
    here = world([DONE])
    boss = Approve(by="boss", fingerprint=waits["fingerprint"])
    done = await door.resume(
        here, again.checkpoint, {"call_1": boss}, **options(of_filter, here)
    )
    assert (done.status, here.ran) == ("answered", [PAID_LARGE])
    assert arguments_in(done.history) == [{"order": "7", "amount": 9_000_000}]
    check_sendable(done.history)


@three_doors
async def test_an_edit_of_the_same_question_is_answered(door: Door) -> None:
    """The clerk's edit within the clerk's rule runs, beside a call that needed no approval."""
    paused = await door.ask(
        world([calls(LOOK, REFUND)]), interceptors=[policy()], approval=ANYBODY
    )
    here = world([DONE])
    given: dict[str, Any] = {"interceptors": [policy()], "approval": ANYBODY}
    done = await door.resume(here, paused.checkpoint, {"call_2": SMALL}, **given)
    assert (done.status, here.ran) == ("answered", [("look", "7"), PAID_SMALL])


@one_door
async def test_all_or_nothing_with_a_refused_edit(door: Door) -> None:
    """The decision on another call is not taken either."""
    given: dict[str, Any] = {"interceptors": [policy()], "approval": ANYBODY}
    paused = await door.ask(world([calls(REFUND, REFUND)]), **given)
    here = world([DONE])
    one, other = paused.waiting
    with pytest.raises(DecisionRefusedError):
        await door.resume(
            here, paused.checkpoint, {one: Approve(), other: FORBIDDEN}, **given
        )
    assert here.ran == []
    await door.resume(
        here, paused.checkpoint, {one: Approve(), other: Approve()}, **given
    )
    assert here.ran == [REFUNDED, REFUNDED]


@by_option_or_filter
@one_door
async def test_the_same_arguments_do_not_count_as_an_edit(
    door: Door, of_filter: bool
) -> None:
    """Given back as they wait, also in the model's spelling, they are not reviewed again."""
    seen: list[str] = []

    def ask(call: ToolCall) -> Any:
        seen.append(call.id)
        return Defer()

    first, here = world([REFUND]), world([DONE])
    for one in (first, here):
        if of_filter:
            add_filter(one.kernel, "auto_function_invocation", ApprovalFilter(ask))
    given: dict[str, Any] = {} if of_filter else {"interceptors": [ask]}
    paused = await door.ask(first, **given)
    same = Approve(arguments={"amount": 50.0, "order": "7"})
    done = await door.resume(here, paused.checkpoint, {"call_1": same}, **given)
    assert done.status == "answered"
    assert here.ran == [REFUNDED]
    assert seen == ["call_1"]


def approver(seen: list[Any], *answers: Any) -> Any:
    """Answer what is asked, in turn, and note what it was."""

    def ask(call: ToolCall) -> Any:
        seen.append((call.arguments["amount"], tuple(call.roles)))
        return answers[len(seen) - 1]

    return ask


INLINE = [
    ((FORBIDDEN, FORBIDDEN), [(50, ("clerk",)), (50, ("clerk",))], []),
    ((FORBIDDEN, SMALL), [(50, ("clerk",)), (50, ("clerk",))], [PAID_SMALL]),
    ((LARGE, Approve()), [(50, ("clerk",)), (9_000_000, ("boss",))], [PAID_LARGE]),
    ((LARGE, Deny("No.")), [(50, ("clerk",)), (9_000_000, ("boss",))], []),
    ((LARGE, SMALL), [(50, ("clerk",)), (9_000_000, ("boss",))], []),
    ((SMALL,), [(50, ("clerk",))], [PAID_SMALL]),
]
each_answer = pytest.mark.parametrize(
    ("answers", "questions", "ran"),
    INLINE,
    ids=["deny", "then-fine", "boss", "no", "two", "fine"],
)


@by_option_or_filter
@each_of(
    ("answers", "questions", "ran"),
    INLINE,
    ids=["deny", "then-fine", "boss", "no", "two", "fine"],
)
@one_door
async def test_an_approver_of_the_run_is_asked_again_about_its_edit(
    door: Door, answers: Any, questions: Any, ran: Any, of_filter: bool
) -> None:
    """About the call, where a rule denies the edit; about the edited one, where others are asked; then it is denied."""
    seen: list[Any] = []
    here, ask = world([REFUND, DONE]), approver(seen, *answers)
    given: dict[str, Any] = {"interceptors": [policy()], "approver": ask}
    if of_filter:
        add_filter(
            here.kernel,
            "auto_function_invocation",
            ApprovalFilter(policy(), approver=ask),
        )
        given = {}
    done = await door.ask(here, **given)
    assert done.status == "answered"
    assert seen == questions
    assert here.ran == ran


@each_of(
    ("answers", "questions", "ran"),
    INLINE,
    ids=["deny", "then-fine", "boss", "no", "two", "fine"],
)
@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
async def test_an_approver_is_asked_again_in_the_stock_loop(
    answers: Any, questions: Any, ran: Any, streamed: bool
) -> None:
    """`ApprovalFilter(approver=)` on a stock kernel."""
    seen: list[Any] = []
    here = guarded(
        [REFUND, DONE],
        by=ApprovalFilter(policy(), approver=approver(seen, *answers)),
        under=AUTO,
    )
    await chat(here, asked(), streamed=streamed)
    assert (seen, here.ran) == (questions, ran)


async def test_an_edit_of_a_call_in_a_history_is_reviewed() -> None:
    """`ApprovalFilter.resume`: denied, the edit is refused by name; else the call waits for others, up to the boss."""
    by, history = ApprovalFilter(policy(), authorize=lambda request: True), asked()
    here = guarded([REFUND, DONE], by=by, under=AUTO)
    await chat(here, history, streamed=False)
    (before,) = by.pending(history)
    with pytest.raises(DecisionRefusedError, match=r"policy rule 1: Not to 666\."):
        await by.resume(here.kernel, history, {"call_1": FORBIDDEN})
    (waits,) = await by.resume(here.kernel, history, {"call_1": LARGE})
    assert here.ran == []
    assert dict(waits.arguments) == {"order": "7", "amount": 9_000_000}
    assert waits.roles == ("boss",)
    assert waits.fingerprint != before.fingerprint
    assert await by.resume(here.kernel, history, {"call_1": Approve(by="boss")}) == ()
    assert here.ran == [PAID_LARGE]
    check_sendable(history)


async def test_an_edit_of_a_call_in_a_history_is_reviewed_by_the_kernels_other_filters() -> (
    None
):
    """Each policy has seen what runs, whichever filter is resumed."""
    by, history = ApprovalFilter(lambda call: Defer()), asked()
    here = guarded([REFUND, DONE], by=by, under=AUTO)
    await chat(here, history, streamed=False)
    denying = {**RULES, "rules": RULES["rules"][:1]}
    add_filter(
        here.kernel,
        "auto_function_invocation",
        ApprovalFilter(ApprovalPolicy.from_dict(denying)),
    )
    with pytest.raises(DecisionRefusedError, match=r"Not to 666\."):
        await by.resume(here.kernel, history, {"call_1": FORBIDDEN})
    assert here.ran == []


def raised(by: float) -> Any:
    """Make an interceptor that raises each amount it sees."""

    def edit(call: ToolCall) -> Any:
        if call.function_name == "refund":
            return Approve(
                arguments={**call.arguments, "amount": call.arguments["amount"] + by},
                by="raiser",
            )
        return None

    return edit


def capped(call: ToolCall) -> Any:
    """Cut an amount, as often as it is asked."""
    return (
        Approve(arguments={**call.arguments, "amount": 20}, by="cap")
        if call.function_name == "refund"
        else None
    )


@one_door
async def test_an_interceptors_edit_is_reviewed_by_every_rule(
    door: Door,
) -> None:
    """A rule before the interceptor sees the edited call, and so does every rule after it."""
    here = world([REFUND, DONE])
    paused = await door.ask(
        here, interceptors=[policy_above(1000), raised_once(2000)], approval=ANYBODY
    )
    assert (paused.status, [one["arguments"]["amount"] for one in paused.pending]) == (
        "paused",
        [2050],
    )
    assert [one["roles"] for one in paused.pending] == [["boss"]]
    there = world([DONE])
    done = await door.resume(
        there,
        paused.checkpoint,
        {"call_1": Approve(by="boss")},
        interceptors=[policy_above(1000), raised_once(2000)],
        approval=ANYBODY,
    )
    assert (done.status, there.ran) == ("answered", [("refund", "7", 2050.0, "")])


def policy_above(amount: float) -> ApprovalPolicy:
    rule = {
        "function": "refund",
        "arguments": {"amount": {"gt": amount}},
        "action": "ask",
        "roles": ["boss"],
    }
    allow = {
        "function": "*",
        "arguments": {"amount": {"gt": amount}},
        "action": "allow",
    }
    return ApprovalPolicy.from_dict({"default": "allow", "rules": [rule, allow]})


def raised_once(by: float) -> Any:
    """Make an interceptor that raises small amounts."""
    edit = raised(by)
    return lambda call: (
        edit(call) if call.arguments.get("amount", 1000) < 1000 else None
    )


@one_door
async def test_an_edit_that_comes_again_is_one_edit(door: Door) -> None:
    """An interceptor that makes the same edit in each review approves the call with it."""
    here = world([REFUND, DONE])
    done = await door.ask(here, interceptors=[capped])
    assert (done.status, here.ran) == ("answered", [PAID_SMALL])


@one_door
async def test_a_second_different_edit_denies_by_name(door: Door) -> None:
    """An interceptor that keeps editing has no last word."""
    here = world([REFUND, DONE])
    done = await door.ask(here, interceptors=[raised(1)])
    assert here.ran == []
    (read,) = results(done.history)
    assert "shop-refund were edited a second time in one review, by raiser" in read


@one_door
async def test_what_a_rule_supplies_for_an_edit_stands(door: Door) -> None:
    """As for any call with these arguments: the function does not run, and the model reads the result."""

    def supplies(call: ToolCall) -> Any:
        return Supply("by hand") if call.arguments["amount"] > 1000 else Defer()

    paused = await door.ask(world([REFUND]), interceptors=[supplies])
    here = world([DONE])
    done = await door.resume(
        here, paused.checkpoint, {"call_1": LARGE}, interceptors=[supplies]
    )
    assert done.status == "answered"
    assert here.ran == []
    assert results(done.history) == ["by hand"]


async def test_an_edit_is_taken_once() -> None:
    """The checkpoint whose call now waits for the boss takes no other decision; the new one takes the boss's."""
    planner, here = (
        planner_with(interceptors=[policy()], approval=ANYBODY),
        world([REFUND, DONE]),
    )
    paused = await planner.invoke(here.kernel, "Refund.")
    again = await planner.resume(here.kernel, paused.checkpoint, {"call_1": LARGE})
    with pytest.raises(DecisionRefusedError, match="decided before"):
        await planner.resume(here.kernel, paused.checkpoint, {"call_1": Approve()})
    checkpoint = Checkpoint.from_json(again.checkpoint.to_json())
    done = await planner.resume(here.kernel, checkpoint, {"call_1": Approve(by="boss")})
    assert here.ran == [PAID_LARGE]
    said = [(one.kind, one.by, one.arguments) for one in done.decisions]
    edited = {"order": "7", "amount": 9_000_000}
    assert said == [("edit", "clerk", edited), ("approve", "boss", edited)]


async def test_an_edited_call_that_expires_has_no_author() -> None:
    """Who edited it did not let it expire."""
    approval = ApprovalSettings(authorize=lambda request: True)
    late = {**RULES["rules"][1], "expires_in": 1e-6}
    rules = {**RULES, "rules": [RULES["rules"][0], late, RULES["rules"][2]]}
    planner = planner_with(
        interceptors=[ApprovalPolicy.from_dict(rules)], approval=approval
    )
    here = world([REFUND, DONE])
    paused = await planner.invoke(here.kernel, "Refund.")
    again = await planner.resume(here.kernel, paused.checkpoint, {"call_1": LARGE})
    done = await planner.resume(here.kernel, again.checkpoint, {})
    assert (done.status, here.ran) == ("answered", [])
    assert [(one.kind, one.by) for one in done.decisions] == [
        ("edit", "clerk"),
        ("expire", ""),
    ]


async def test_the_worker_reviews_an_edit_of_a_stored_run(tmp_path: Path) -> None:
    """Denied, the call waits again with its problem; of others, it waits for the boss, and says who edited it."""
    store = tmp_path / "runs.db"
    planner, here = (
        planner_with(interceptors=[policy()], approval=ANYBODY),
        world([REFUND, DONE]),
    )
    everybody: Any = {"authorize": lambda request: True}
    async with (
        Runs.sqlite(store, poll_seconds=0.01, **everybody) as runs,
        Approvals.connect(store, **everybody) as approvals,
    ):
        handle = await runs.start(planner, here.kernel, "Refund.", run_id="a")
        await handle.result()
        (first,) = await approvals.pending()
        assert await approvals.decide(first.id, FORBIDDEN)
        assert (await handle.result()).status == "paused"
        (waits,) = await approvals.pending()
        assert "policy rule 1: Not to 666." in waits.problem
        assert (waits.fingerprint, waits.roles) == (first.fingerprint, ("clerk",))
        assert await approvals.decide(first.id, LARGE)
        assert (await handle.result()).status == "paused"
        (waits,) = await approvals.pending()
        assert (dict(waits.arguments), waits.roles) == (
            {"order": "7", "amount": 9_000_000},
            ("boss",),
        )
        assert (
            waits.problem
            == "clerk edited the arguments; with these, the call needs another decision of boss."
        )
        assert [one.by for one in waits.refused] == ["clerk", "clerk"]
        assert here.ran == []
        assert await approvals.decide(waits.id, Approve(by="boss"))
        result = await handle.result()
        assert (result.status, here.ran) == ("answered", [PAID_LARGE])
        assert (await approvals.show(waits.id)).problem == ""


class Post:
    """A function with an argument that has parts."""

    def __init__(self) -> None:
        self.sent: list[list[str]] = []

    @kernel_function
    async def send(self, to: list[str]) -> str:
        self.sent.append(to)
        return "sent"


def asking_and_adding(to: list[str]) -> Any:
    """Make an interceptor that lets "ann" be written to, and during whose review an address is added."""

    def ask(call: ToolCall) -> Any:
        if call.arguments["to"] != ["ann"]:
            return Defer()
        to.append("eve")
        return None

    return ask


@three_doors
async def test_an_edit_that_is_changed_after_its_review_runs_as_it_was_reviewed(
    door: Door,
) -> None:
    """The parts of the arguments are the decision's own, too."""
    to, send = ["ann"], call("post-send", {"to": ["bo"]})
    asking: dict[str, Any] = {"interceptors": [asking_and_adding(to)]}
    paused = await door.ask(world([send], post=Post()), **asking)
    here = Post()
    await door.resume(
        world([DONE], post=here),
        paused.checkpoint,
        {"call_1": Approve(arguments={"to": to})},
        **asking,
    )
    assert here.sent == [["ann"]]


async def test_an_edit_in_a_history_runs_as_it_was_reviewed() -> None:
    """`ApprovalFilter.resume` runs what its policy has seen."""
    to, send = ["ann"], call("post-send", {"to": ["bo"]})
    by, history, post = ApprovalFilter(asking_and_adding(to)), asked(), Post()
    here = guarded([send, DONE], by=by, under=AUTO, post=post)
    await chat(here, history, streamed=False)
    await by.resume(here.kernel, history, {"call_1": Approve(arguments={"to": to})})
    assert post.sent == [["ann"]]


@one_door
async def test_an_edit_that_is_approved_for_good_answers_the_next_call(
    door: Door,
) -> None:
    """An approver who edits a call, always, is not asked about one with these arguments in the same batch."""
    seen: list[Any] = []
    always = Approve(arguments={"order": "7", "amount": 20}, always="arguments")
    small = call("shop-refund", {"order": "7", "amount": 20})
    here = world([calls(REFUND, small), DONE])
    given: dict[str, Any] = {
        "interceptors": [policy()],
        "approver": approver(seen, always),
    }
    done = await door.ask(here, **given)
    assert (done.status, here.ran) == ("answered", [PAID_SMALL, PAID_SMALL])
    assert seen == [(50, ("clerk",))]


@one_door
async def test_a_rule_supplies_the_result_of_an_edited_call(door: Door) -> None:
    """What an approver edits is judged again; a rule that knows the result gives it, and nothing runs."""

    def rule(call: ToolCall) -> Any:
        return Supply("Paid before.") if call.arguments["amount"] == 20 else Defer()

    seen: list[Any] = []
    here = world([REFUND, DONE])
    given: dict[str, Any] = {
        "interceptors": [rule],
        "approver": approver(seen, SMALL),
    }
    done = await door.ask(here, **given)
    assert (done.status, here.ran, len(seen)) == ("answered", [], 1)
    assert results(done.history) == ["Paid before."]
