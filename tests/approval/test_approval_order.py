"""Who is asked about a call, in which order, and what each decision does: the same through every door."""

from typing import Any

from planner_ext import ApprovalPolicy, Approve, Deny
from planner_ext.hitl_manager import ApprovalSettings, Defer, Supply, ToolCall
from planner_ext.testing import call, calls
from support.approval import (
    DONE,
    LOOK,
    REFUND,
    REFUNDED,
    WIPE,
    Door,
    arguments_in,
    check_sendable,
    decided,
    one_door,
    only,
    requested,
    results,
    service_and_handler,
    three_doors,
    world,
)
from support.stock import sent_calls
from support.values import each_of

ASK_REFUND = {"default": "allow", "rules": [{"function": "refund", "action": "ask"}]}


@one_door
async def test_the_first_decision_wins(door: Door) -> None:
    """Interceptors are asked in the order given, until one decides; those after it are not asked."""
    seen: list[str] = []

    def named(name: str, decision: Any) -> Any:
        def interceptor(call: ToolCall) -> Any:
            seen.append(name)
            return decision

        return interceptor

    here = world([REFUND, DONE])
    interceptors = [
        named("one", None),
        named("two", Deny("No.")),
        named("three", Approve()),
    ]
    outcome = await door.ask(here, interceptors=interceptors)
    assert seen == ["one", "two"]
    assert here.ran == []
    assert results(outcome.history) == ["The call was refused and did not run: No."]


@one_door
async def test_silence_runs_the_call(door: Door) -> None:
    """None abstains: where all interceptors abstain, the calls run, as with any filter."""
    here = world()
    outcome = await door.ask(here, interceptors=[lambda call: None])
    assert outcome.status == "answered"
    assert outcome.text == "Done."
    assert outcome.iterations == 2
    assert outcome.tool_calls == 2
    assert here.ran == [("look", "7"), REFUNDED]


@one_door
async def test_a_call_is_shown_as_it_will_run(door: Door) -> None:
    """Interceptors see resolved name, validated arguments, the raw text, trip, place and batch size of each call."""
    seen: list[ToolCall] = []
    here = world([LOOK, calls(LOOK, REFUND), DONE])
    await door.ask(here, interceptors=[seen.append])
    assert [(c.plugin_name, c.function_name, c.fully_qualified_name) for c in seen] == [
        ("shop", "look", "shop-look"),
        ("shop", "look", "shop-look"),
        ("shop", "refund", "shop-refund"),
    ]
    assert [(c.id, c.iteration, c.index, c.batch_size) for c in seen] == [
        ("call_1", 0, 0, 1),
        ("call_2", 1, 0, 2),
        ("call_3", 1, 1, 2),
    ]
    assert seen[2].arguments == {"order": "7", "amount": 50}
    assert seen[2].raw_arguments == '{"order":"7","amount":50}'
    assert len({c.fingerprint for c in seen}) == 3


@three_doors
async def test_edited_arguments_run_and_are_recorded(door: Door) -> None:
    """An edit runs in place of the model's arguments; the transcript shows it, the journal keeps the original."""
    facts: list[Any] = []
    here = world()
    edit = only("refund", Approve(arguments={"order": "7", "amount": 20}, by="ann"))
    outcome = await door.ask(here, interceptors=[edit], observers=[facts.append])
    assert here.ran == [("look", "7"), ("refund", "7", 20.0, "")]
    assert arguments_in(outcome.history) == [
        {"order": "7"},
        {"order": "7", "amount": 20},
    ]
    assert requested(facts) == [{"order": "7"}, {"order": "7", "amount": 50}]
    assert [(d.verdict, d.by, d.edited) for d in decided(facts)][1] == (
        "run",
        "ann",
        '{"order":"7","amount":20}',
    )
    check_sendable(outcome.history)


@one_door
async def test_the_model_reads_the_edit(door: Door) -> None:
    """The next request shows the model the call with the edited arguments, beside its result."""
    here = world([REFUND, DONE])
    await door.ask(
        here,
        interceptors=[only("refund", Approve(arguments={"order": "7", "amount": 20}))],
    )
    message, result = here.service.requests[1].messages[-2:]
    assert (
        sent_calls(message)[0]["function"]["arguments"] == '{"order":"7","amount":20}'
    )
    assert result["content"] == "refunded 20"


INVALID_EDITS: dict[str, dict[str, Any]] = {
    "missing": {"order": "7"},
    "unknown": {"order": "7", "amount": 1, "speed": 2},
    "type": {"order": "7", "amount": "much"},
    "nan": {"order": "7", "amount": float("nan")},
    "surrogate": {"order": "\ud800", "amount": 1},
}


@each_of("edit", INVALID_EDITS)
@one_door
async def test_an_invalid_edit_denies(door: Door, edit: str) -> None:
    """Edited arguments are validated like the model's; an interceptor whose edit does not pass denies the call."""
    facts: list[Any] = []
    here = world([REFUND, DONE])
    approve = Approve(arguments=INVALID_EDITS[edit])
    outcome = await door.ask(
        here, interceptors=[only("refund", approve)], observers=[facts.append]
    )
    assert here.ran == []
    assert outcome.status == "answered"
    assert [d.verdict for d in decided(facts)] == ["deny"]


@one_door
async def test_an_edit_cannot_reach_hidden_parameters(door: Door) -> None:
    """What is hidden from the model is hidden from an edit, too."""
    here = world([call("shop-charge", {"amount": 1}), DONE])
    approve = Approve(arguments={"amount": 1, "tenant": "victim"})
    await door.ask(here, interceptors=[only("charge", approve)])
    assert here.ran == []


@one_door
async def test_a_supplied_result_replaces_the_functions(door: Door) -> None:
    """Supply gives the model a result, encoded as a function's would be; nothing runs, and no tool call is counted."""
    here = world()
    outcome = await door.ask(
        here,
        interceptors=[only("refund", Supply({"paid": None, "to": "Zoë"}, by="test"))],
    )
    assert (here.ran, outcome.tool_calls) == ([("look", "7")], 1)
    assert results(outcome.history) == ["sent", '{"paid":null,"to":"Zoë"}']


@three_doors
async def test_deferring_pauses_the_run_as_a_value(door: Door) -> None:
    """Defer ends the run as paused with the call pending, before anything of its batch ran, and ends the questions."""
    here = world()
    outcome = await door.ask(here, interceptors=[only("refund", Defer("Sure?"))])
    assert outcome.status == "paused"
    assert here.ran == []
    assert here.requests == 1
    assert outcome.tool_calls == 0
    (pending,) = outcome.pending
    assert (pending["id"], pending["fully_qualified_name"]) == ("call_2", "shop-refund")
    assert (pending["arguments"], pending["prompt"]) == (
        {"order": "7", "amount": 50},
        "Sure?",
    )


ORDER: dict[str, tuple[dict[str, Any], str]] = {
    "interceptor-beats-mark": ({"interceptors": [lambda call: Approve()]}, "ran"),
    "interceptor-beats-pre-invoke": (
        {"interceptors": [lambda call: Approve()], "pre_invoke": lambda *_: False},
        "ran",
    ),
    "allow-rule-frees-a-mark": (
        {
            "interceptors": [
                ApprovalPolicy.from_dict(
                    {"default": "deny", "rules": [{"action": "allow"}]}
                )
            ]
        },
        "ran",
    ),
    "allow-default-does-not": (
        {"interceptors": [ApprovalPolicy.from_dict({"default": "allow"})]},
        "paused",
    ),
    "deny-default-comes-after-a-mark": (
        {"interceptors": [ApprovalPolicy.from_dict({"default": "deny"})]},
        "paused",
    ),
    "mark-beats-pre-invoke": ({"pre_invoke": lambda *_: False}, "paused"),
    "mark-beats-unmatched": (
        {"approval": ApprovalSettings(unmatched="deny")},
        "paused",
    ),
    "pre-invoke-frees-no-mark": ({"pre_invoke": lambda *_: True}, "paused"),
    "deny-rule-beats-a-mark": (
        {
            "interceptors": [
                ApprovalPolicy.from_dict(
                    {"default": "allow", "rules": [{"action": "deny"}]}
                )
            ]
        },
        "denied",
    ),
}


@each_of("case", ORDER)
@one_door
async def test_the_order_for_a_marked_function(door: Door, case: str) -> None:
    """Interceptors and a policy's rules come before the mark; pre-invoke, defaults and unmatched come after it."""
    options, expected = ORDER[case]
    here = world([WIPE, DONE])
    outcome = await door.ask(here, **options)
    seen = "ran" if here.ran else "paused" if outcome.status == "paused" else "denied"
    assert seen == expected


DEFAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "pre-invoke-beats-a-default": (
        {
            "pre_invoke": lambda *_: False,
            "interceptors": [ApprovalPolicy.from_dict({"default": "allow"})],
        },
        "denied",
    ),
    "default-ask-beats-unmatched": (
        {"interceptors": [ApprovalPolicy.from_dict({"default": "ask"})]},
        "paused",
    ),
    "default-deny-beats-unmatched": (
        {"interceptors": [ApprovalPolicy.from_dict({"default": "deny"})]},
        "denied",
    ),
    "default-allow-beats-unmatched": (
        {
            "interceptors": [ApprovalPolicy.from_dict({"default": "allow"})],
            "approval": ApprovalSettings(unmatched="deny"),
        },
        "ran",
    ),
    "later-interceptor-beats-a-default": (
        {
            "interceptors": [
                ApprovalPolicy.from_dict({"default": "allow"}),
                lambda call: Deny(),
            ]
        },
        "denied",
    ),
    "unmatched-approve": ({"approval": ApprovalSettings(unmatched="approve")}, "ran"),
    "unmatched-defer": ({"approval": ApprovalSettings(unmatched="defer")}, "paused"),
    "unmatched-deny": ({"approval": ApprovalSettings(unmatched="deny")}, "denied"),
}


@each_of("case", DEFAULTS)
@one_door
async def test_the_order_of_defaults(door: Door, case: str) -> None:
    """A policy's default is asked after everybody else, and only its silence leaves the call to ``unmatched``."""
    options, expected = DEFAULTS[case]
    here = world([REFUND, DONE])
    outcome = await door.ask(here, **options)
    seen = "ran" if here.ran else "paused" if outcome.status == "paused" else "denied"
    assert seen == expected


@service_and_handler
async def test_check_for_intervention_stands_between_pre_invoke_and_the_default(
    door: Door,
) -> None:
    """pre_invoke denies before the check is asked; a check that defers comes before a policy's default."""
    asked: list[str] = []

    def check(call: ToolCall) -> bool:
        asked.append(call.fully_qualified_name)
        return True

    here = world([REFUND, DONE])
    outcome = await door.ask(
        here, pre_invoke=lambda *_: False, check_for_intervention=check
    )
    assert outcome.status == "answered"
    assert asked == []
    assert here.ran == []
    here = world([REFUND, DONE])
    policy = ApprovalPolicy.from_dict({"default": "deny"})
    outcome = await door.ask(here, interceptors=[policy], check_for_intervention=check)
    assert outcome.status == "paused"
    assert asked == ["shop-refund"]
    assert here.ran == []


@three_doors
async def test_no_default_hook_and_no_budget_callback_approves_what_a_policy_asks_about(
    door: Door,
) -> None:
    """Beside a policy that asks, the default hook's False and a callback's True do not approve: the call waits."""
    for policy in (ASK_REFUND, {"default": "ask"}):
        here = world([REFUND, DONE])
        options: dict[str, Any] = {
            "interceptors": [ApprovalPolicy.from_dict(policy)],
            "pre_invoke": lambda *_: True,
        }
        outcome = await door.ask(here, **options)
        assert outcome.status == "paused"
        assert outcome.waiting == ["call_1"]
        assert here.ran == []
