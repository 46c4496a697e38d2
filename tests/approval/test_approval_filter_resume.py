"""ApprovalFilter without an approver: the stock loop terminates, and the history is brought to its end later."""

import json
import math
from datetime import UTC, datetime
from typing import Any

import pytest
from openai import AsyncOpenAI
from semantic_kernel.agents import ChatHistoryAgentThread
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.connectors.ai.prompt_execution_settings import (
    PromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import KernelArguments, kernel_function

from planner_ext import ApprovalFilter, ApprovalPolicy, Approve, Deny
from planner_ext.errors import DecisionRefusedError
from planner_ext.hitl_manager import Defer, Supply
from planner_ext.testing import ScriptedOpenAIServer, call, calls, say
from support.approval import (
    DONE,
    LOOK,
    REFUND,
    REFUNDED,
    WIPE,
    Shop,
    World,
    asked,
    both_ways,
    check_sendable,
    results,
    world,
)
from support.approval_filter import AUTO, BOTH, POLICY, agent_of, chat, guarded
from support.stock import add_filter, every_result
from support.values import each_of

each_under = each_of("under", [AUTO, BOTH])


async def waiting(
    *script: Any, streamed: bool = False, under: Any = AUTO, policy: Any = POLICY
) -> tuple[World, ApprovalFilter, ChatHistory]:
    """Ask until the loop terminates; give the world, the filter and the history."""
    by, history = ApprovalFilter(policy), asked()
    here = guarded(script or [calls(LOOK, REFUND), DONE], by=by, under=under)
    await chat(here, history, streamed=streamed)
    return here, by, history


@each_under
@both_ways
async def test_the_loop_ends_and_the_call_waits(streamed: bool, under: Any) -> None:
    """Nothing risky has run, no further request is made; ``pending`` has the call as it will run, with its schema."""
    here, by, history = await waiting(streamed=streamed, under=under)
    assert (here.ran, here.requests) == ([("look", "7")], 1)
    (pending,) = by.pending(history)
    assert (pending.id, pending.fully_qualified_name) == ("call_2", "shop-refund")
    assert (dict(pending.arguments), len(pending.fingerprint)) == (
        {"order": "7", "amount": 50},
        64,
    )
    assert pending.parameters is not None
    assert pending.parameters["description"] == "Pays money back."
    assert pending.parameters["properties"]["note"]["default"] == ""
    check_sendable(history)


@both_ways
async def test_calls_without_an_id_wait_under_one_of_their_own(streamed: bool) -> None:
    """Stock Semantic Kernel answers them as "unknown": they would wait for ever, and the history could not be sent."""
    nameless = call("shop-refund", {"order": "7", "amount": 50}, id="")
    here, by, history = await waiting(
        calls(nameless, nameless, call("shop-look", {"order": "7"}, id="")),
        DONE,
        streamed=streamed,
    )
    pending = by.pending(history)
    assert len({call.id for call in pending}) == 2
    check_sendable(history)
    decisions = {pending[0].id: Approve(by="ann"), pending[1].id: Deny("Once.")}
    assert await by.resume(here.kernel, history, decisions) == ()
    assert here.ran == [("look", "7"), REFUNDED]
    check_sendable(history)


async def test_a_question_is_shown_as_it_was_asked() -> None:
    """What the call does, who asks, and until when; in a stored history, too."""
    question = Defer("Sure?", expires_in=3600, summary="Pays {amount}")
    _, by, history = await waiting(policy=lambda _: question)
    kept = ChatHistory.model_validate_json(history.model_dump_json())
    pending = by.pending(kept)[-1]
    assert (pending.prompt, pending.summary) == ("Sure?", "Pays 50")
    assert pending.asked_by.endswith("<lambda>")
    assert pending.expires_at is not None
    assert pending.expires_at > datetime.now(UTC)


async def test_an_expired_question_takes_no_decision() -> None:
    """It is refused by name, and nothing runs; a resume without it lets the model know."""
    here, by, history = await waiting(
        REFUND, DONE, policy=lambda _: Defer(expires_in=1e-9)
    )
    (pending,) = by.pending(history)
    for decision in (Approve(by="ann"), Deny(by="ann"), Supply("paid", by="ann")):
        with pytest.raises(DecisionRefusedError, match="the question expired"):
            await by.resume(here.kernel, history, {pending.id: decision})
    assert await by.resume(here.kernel, history, {}) == ()
    assert here.ran == []
    assert "nobody decided in time" in results(history)[-1]
    check_sendable(history)


async def test_a_question_for_several_persons_is_put_to_nobody() -> None:
    """No store counts their votes: also of a policy that another interceptor asks the call is refused."""
    rule = {"function": "refund", "action": "ask", "quorum": 2}
    policy = ApprovalPolicy.from_dict({"default": "allow", "rules": [rule]})
    here, by, history = await waiting(REFUND, DONE, policy=lambda call: policy(call))
    assert (by.pending(history), here.ran) == ((), [])


@each_under
async def test_the_roles_of_who_asks_are_shown(under: Any) -> None:
    """Of a rule, or of another source of decisions; a result with altered ones does not count as a pending call."""
    _, by, history = await waiting(
        under=under, policy=lambda _: Defer("Sure?", roles=["manager"])
    )
    (pending,) = by.pending(history)[:1]
    assert pending.roles == ("manager",)
    answers = [message for message in history.messages if message.role == "tool"]
    for result in (item for message in answers for item in every_result(message)):
        for mark in result.metadata.values():
            mark.update(roles=["clerk"])
    assert by.pending(history) == ()


DECISIONS: dict[str, tuple[Any, list[Any], str]] = {
    "approve": (Approve(by="ann"), [REFUNDED], "refunded 50"),
    "edit": (
        Approve(arguments={"order": "7", "amount": 20}),
        [("refund", "7", 20.0, "")],
        "refunded 20",
    ),
    "deny": (Deny("Too much."), [], "The call was refused and did not run: Too much."),
    "deny-without-reason": (Deny(), [], "The call was refused and did not run"),
    "supply": (Supply({"paid": None}), [], '{"paid":null}'),
}


@each_under
@each_of("decision", DECISIONS)
@both_ways
async def test_resumed_the_history_is_whole(
    streamed: bool, decision: str, under: Any
) -> None:
    """The decision's result stands in the place of the waiting one; the history can be sent, and the model goes on."""
    here, by, history = await waiting(streamed=streamed, under=under)
    given, ran, text = DECISIONS[decision]
    assert await by.resume(here.kernel, history, {"call_2": given}) == ()
    assert (here.ran, results(history)) == ([("look", "7"), *ran], ["sent", text])
    assert by.pending(history) == ()
    check_sendable(history)
    await chat(here, history, streamed=streamed)
    assert (here.requests, here.service.requests[1].messages[-1]["content"]) == (
        2,
        text,
    )


def shown(messages: Any) -> list[Any]:
    """List the arguments of the calls that the model reads."""
    return [
        json.loads(one["function"]["arguments"])
        for message in messages
        for one in message.get("tool_calls", ())
    ]


@both_ways
async def test_an_edited_call_is_shown_as_it_ran(streamed: bool) -> None:
    """The model reads the person's arguments; a sibling of the edited call waits as before, also in a saved history."""
    here, by, history = await waiting(calls(REFUND, REFUND), DONE, streamed=streamed)
    edit = Approve(arguments={"order": "7", "amount": 20})
    (left,) = await by.resume(here.kernel, history, {"call_1": edit})
    assert left.id == "call_2"
    history = ChatHistory.restore_chat_history(history.serialize())
    assert by.pending(history) == (left,)
    await by.resume(here.kernel, history, {"call_2": Approve()})
    await chat(here, history, streamed=streamed)
    assert shown(here.service.requests[1].messages) == [
        {"order": "7", "amount": 20},
        {"order": "7", "amount": 50},
    ]


@each_under
@both_ways
async def test_a_call_that_an_approver_edits_is_shown_as_it_ran(
    streamed: bool, under: Any
) -> None:
    """The model reads the person's arguments beside the result."""
    edit = Approve(arguments={"order": "7", "amount": 20})
    by = ApprovalFilter(POLICY, lambda _: edit)
    here = guarded([REFUND, DONE], by=by, under=under)
    await chat(here, asked(), streamed=streamed)
    assert shown(here.service.requests[1].messages) == [{"order": "7", "amount": 20}]


@both_ways
async def test_a_resumed_history_is_taken_by_a_server(streamed: bool) -> None:
    """Over HTTP, to a server as strict as OpenAI."""
    here, by, history = await waiting(streamed=streamed)
    await by.resume(here.kernel, history, {"call_2": Approve()})
    with ScriptedOpenAIServer([say("Understood.")]) as server:
        async with AsyncOpenAI(
            base_url=server.url, api_key="any", max_retries=0
        ) as client:
            connector = OpenAIChatCompletion("scripted", async_client=client)
            message = await connector.get_chat_message_content(
                history, PromptExecutionSettings()
            )
        assert (str(message), server.refused) == ("Understood.", [])


@both_ways
async def test_an_agent_waits_and_continues(streamed: bool) -> None:
    """With ChatCompletionAgent the thread's history is what is resumed; the agent then answers."""
    history = ChatHistory()
    thread = ChatHistoryAgentThread(chat_history=history)
    by = ApprovalFilter(POLICY)
    here = guarded(by=by)
    agent = agent_of(here)
    if streamed:
        async for _ in agent.invoke_stream("Refund order 7.", thread=thread):
            pass
    else:
        await agent.get_response("Refund order 7.", thread=thread)
    stored = ChatHistory(messages=[message async for message in thread.get_messages()])
    assert [call.fully_qualified_name for call in by.pending(stored)] == ["shop-refund"]
    await by.resume(here.kernel, stored, {"call_2": Approve()})
    assert here.ran == [("look", "7"), REFUNDED]
    after = [message for message in stored.messages if message.role == "tool"]
    assert any(
        "refunded 50" in str(item.result)
        for message in after
        for item in every_result(message)
    )


@both_ways
async def test_it_continues_in_another_process(streamed: bool) -> None:
    """A history from JSON, another filter, another kernel: the pending calls are the same, and run there."""
    _, by, history = await waiting(streamed=streamed)
    loaded, other, there = (
        ChatHistory.model_validate_json(history.model_dump_json()),
        ApprovalFilter(POLICY),
        world(),
    )
    assert other.pending(loaded) == by.pending(history) != ()
    await other.resume(there.kernel, loaded, {"call_2": Approve()})
    assert there.ran == [REFUNDED]


@both_ways
async def test_partial_decisions_leave_the_rest_waiting(streamed: bool) -> None:
    """Decided one by one; what still waits is returned."""
    here, by, history = await waiting(calls(REFUND, REFUND), DONE, streamed=streamed)
    rest = await by.resume(here.kernel, history, {"call_1": Approve()})
    assert ([one.id for one in rest], here.ran) == (["call_2"], [REFUNDED])
    assert await by.resume(here.kernel, history, {"call_2": Deny()}) == ()
    assert here.ran == [REFUNDED]


async def refused(
    here: World, by: ApprovalFilter, history: ChatHistory, decisions: Any, match: str
) -> None:
    before, ran = history.model_dump_json(), list(here.ran)
    with pytest.raises(DecisionRefusedError, match=match):
        await by.resume(here.kernel, history, decisions)
    assert (history.model_dump_json(), here.ran) == (before, ran)


@both_ways
async def test_decisions_are_taken_all_or_none(streamed: bool) -> None:
    """Unknown, doubled and junk decisions, other fingerprints and invalid edits: refused by name, nothing runs."""
    here, by, history = await waiting(calls(REFUND, REFUND), DONE, streamed=streamed)
    good, first = {"call_1": Approve()}, by.pending(history)[0]
    await refused(here, by, history, {**good, "call_9": Approve()}, "call_9")
    await refused(
        here,
        by,
        history,
        {**good, "call_2": Approve(fingerprint=first.fingerprint)},
        "call_2",
    )
    await refused(
        here,
        by,
        history,
        {**good, "call_2": Approve(arguments={"order": "7"})},
        "call_2",
    )
    nan = Approve(arguments={"order": "7", "amount": 1, "note": math.nan})
    await refused(here, by, history, {**good, "call_2": nan}, "call_2.*no JSON")
    text = Approve(arguments="all")  # pyright: ignore[reportArgumentType]  # junk, on purpose
    await refused(here, by, history, {**good, "call_2": text}, "call_2")
    for junk in (None, True, "approve", Defer()):
        await refused(here, by, history, {**good, "call_2": junk}, "call_2")
    await refused(here, by, history, [Approve()], "must map call ids to decisions; got")
    await by.resume(here.kernel, history, good)
    await refused(here, by, history, good, "call_1")


@both_ways
async def test_a_function_that_is_gone_or_changed_is_refused(streamed: bool) -> None:
    """Approved for one kernel, resumed with another that has no such function, or one with other parameters."""
    _, by, history = await waiting(streamed=streamed)

    class Rebuilt(Shop):
        @kernel_function
        async def refund(self, order: str, amount: float, account: str) -> str:
            self.ran.append(("refund", account))
            return "paid"

    class Gone:
        ran: list[Any] = []  # noqa: RUF012  (one list is what is wanted)

        @kernel_function
        async def look(self) -> str:
            return ""

    for shop in (Rebuilt(), Gone()):
        await refused(
            world([], shop=shop),
            by,
            history,
            {"call_2": Approve()},
            "shop-refund|call_2",
        )


@both_ways
async def test_function_filters_stand_around_a_resumed_call(streamed: bool) -> None:
    """The application's function-invocation filters see it; the approval filter itself does not ask again."""
    here, by, history = await waiting(streamed=streamed, under=BOTH)
    seen: list[str] = []

    async def watch(context: Any, next: Any) -> None:
        seen.append(context.function.name)
        await next(context)

    add_filter(here.kernel, "function_invocation", watch)
    await by.resume(here.kernel, history, {"call_2": Approve()})
    assert (seen, here.ran) == (["refund"], [("look", "7"), REFUNDED])


@both_ways
async def test_application_arguments_are_given_again(streamed: bool) -> None:
    """They are in no history; resumed with them a hidden parameter has them, and the model's come before them."""
    policy = lambda call: Defer() if call.function_name == "charge" else None  # noqa: E731  (shorter than a function)
    script = [call("shop-charge", {"amount": 5}), DONE]
    here, by, history = await waiting(*script, streamed=streamed, policy=policy)
    assert "acme" not in history.model_dump_json()
    arguments = KernelArguments(tenant="acme", amount=9999)
    await by.resume(here.kernel, history, {"call_1": Approve()}, arguments=arguments)
    assert (here.ran, dict(arguments)) == (
        [("charge", 5.0, "acme")],
        {"tenant": "acme", "amount": 9999},
    )


@both_ways
async def test_a_failing_function_is_reported_without_detail(streamed: bool) -> None:
    """An approved function that raises has a result that says so; nothing of the exception is in the history."""

    class Failing(Shop):
        @kernel_function
        async def refund(self, order: str, amount: float) -> str:
            raise RuntimeError("password=hunter2")

    _, by, history = await waiting(streamed=streamed)
    await by.resume(world([], shop=Failing()).kernel, history, {"call_2": Approve()})
    assert "failed" in results(history)[1]
    assert "hunter2" not in history.model_dump_json()


@both_ways
async def test_a_marked_function_waits(streamed: bool) -> None:
    """A marked function waits under a policy that has nothing against it."""
    here, by, history = await waiting(
        WIPE, DONE, streamed=streamed, policy=lambda call: None
    )
    assert ([one.id for one in by.pending(history)], here.ran) == (["call_1"], [])


async def test_a_call_of_a_name_with_hyphens_waits() -> None:
    """Only the first hyphen of a fully qualified name ends the plugin's name."""

    class Web:
        @kernel_function(name="fetch-page")
        def fetch(self) -> str:
            return "a page"

    by, history = ApprovalFilter(lambda _: Defer()), asked()
    here = guarded([call("web-fetch-page", {}), DONE], by=by, under=AUTO, web=Web())
    await chat(here, history)
    assert [one.fully_qualified_name for one in by.pending(history)] == [
        "web-fetch-page"
    ]
    await by.resume(here.kernel, history, {"call_1": Approve()})
    assert results(history) == ["a page"]


async def test_a_call_whose_function_was_replaced_does_not_wait() -> None:
    """A call whose function an outer filter replaced is not in the history and could not be resumed: refused."""
    by, history = ApprovalFilter(lambda _: Defer()), asked()

    async def swap(context: Any, next: Any) -> None:
        context.function = context.kernel.get_function("shop", "wipe")
        await next(context)

    here = world([LOOK, DONE])
    add_filter(here.kernel, "auto_function_invocation", swap)
    add_filter(here.kernel, "auto_function_invocation", by)
    await chat(here, history)
    assert (here.ran, by.pending(history)) == ([], ())
    assert "was refused" in results(history)[0]


@both_ways
async def test_repeated_ids_are_distinguished(streamed: bool) -> None:
    """A model that uses an id in two trips: what waits is the newer call, and only it is decided."""
    again = [
        call("shop-refund", {"order": str(n), "amount": n}, id="c") for n in (1, 2)
    ]
    here, by, history = await waiting(*again, DONE, streamed=streamed)
    await by.resume(here.kernel, history, {"c": Approve()})
    await chat(here, history, streamed=streamed)
    (pending,) = by.pending(history)
    assert dict(pending.arguments) == {"order": "2", "amount": 2}
    await by.resume(here.kernel, history, {"c": Deny()})
    assert here.ran == [("refund", "1", 1.0, "")]
    check_sendable(history)


async def test_a_key_that_is_a_fingerprint_means_the_fingerprint() -> None:
    """A model that gives a call the fingerprint of another one as its id does not get that one's decision."""
    said, by, history = [REFUND], ApprovalFilter(POLICY), asked()
    here = guarded(lambda _: said[-1], by=by, under=AUTO)
    await chat(here, history, streamed=False)
    (first,) = by.pending(history)
    said.append(
        call("shop-refund", {"order": "9", "amount": 9999}, id=first.fingerprint)
    )
    history.add_user_message("And the other one.")
    await chat(here, history, streamed=False)
    _, second = by.pending(history)
    assert second.id == first.fingerprint
    (left,) = await by.resume(here.kernel, history, {first.fingerprint: Approve()})
    assert (here.ran, left.fingerprint) == ([REFUNDED], second.fingerprint)


OVER_10: dict[str, Any] = {"function": "refund", "arguments": {"amount": {"gt": 10}}}


def two_filters(first: Any, second: Any) -> World:
    """A stock kernel with two filters, the first of which sees each call first."""
    here = guarded([REFUND, DONE], by=first, under=AUTO)
    add_filter(here.kernel, "auto_function_invocation", second)
    return here


@pytest.mark.parametrize("resumed", ["that asked", "other"])
async def test_an_approval_does_not_pass_the_filters_behind_the_one_that_asked(
    resumed: str,
) -> None:
    """What a filter behind the first question denies is refused by name, and still waits."""
    denies = ApprovalPolicy.from_dict(
        {
            "default": "allow",
            "rules": [{**OVER_10, "action": "deny", "reason": "Over."}],
        }
    )
    by, behind, history = ApprovalFilter(POLICY), ApprovalFilter(denies), asked()
    here = two_filters(by, behind)
    await chat(here, history)
    one = by if resumed == "that asked" else behind
    with pytest.raises(
        DecisionRefusedError, match=r"'call_1' cannot be taken: .*Over\..* still waits"
    ):
        await one.resume(here.kernel, history, {"call_1": Approve()})
    assert (here.ran, len(by.pending(history))) == ([], 1)
    assert await one.resume(here.kernel, history, {"call_1": Deny("Then not.")}) == ()


@pytest.mark.parametrize("order", ["clerk first", "boss first"])
async def test_each_filter_puts_its_question_one_after_the_other(order: str) -> None:
    """An answer to the first filter's question does not answer the second's, which waits next, for its own roles."""
    asks = [{**OVER_10, "action": "ask", "roles": [role]} for role in ("clerk", "boss")]
    everybody: Any = {"authorize": lambda request: True}
    filters = [
        ApprovalFilter(
            ApprovalPolicy.from_dict({"default": "allow", "rules": [one]}), **everybody
        )
        for one in asks
    ]
    roles = ["clerk", "boss"]
    if order == "boss first":
        filters.reverse()
        roles.reverse()
    here, history = two_filters(*filters), asked()
    await chat(here, history)
    assert [one.roles for one in filters[0].pending(history)] == [(roles[0],)]
    (waits,) = await filters[0].resume(
        here.kernel, history, {"call_1": Approve(by=roles[0])}
    )
    assert here.ran == []
    assert waits.roles == (roles[1],)
    assert dict(waits.arguments) == {"order": "7", "amount": 50}
    assert (
        await filters[0].resume(here.kernel, history, {"call_1": Approve(by=roles[1])})
        == ()
    )
    assert here.ran == [REFUNDED]
