"""A thread of an AG-UI front end over a store: one window of several on the runs that are kept there."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ag_ui.core import (
    BaseEvent,
    Context,
    ResumeEntry,
    RunAgentInput,
    SystemMessage,
    Tool,
)
from hypothesis import given as drawn
from hypothesis import strategies as st
from semantic_kernel import Kernel
from semantic_kernel.exceptions import ServiceInvalidAuthError
from semantic_kernel.functions import kernel_function

from planner_ext import ApprovalPolicy, Approve, Runs, requires_approval
from planner_ext.ag_ui import ag_ui_kept_events, defer_front_end_tools
from planner_ext.durable import Approvals, RetryPolicy
from planner_ext.hitl_manager import ApprovalSettings, DecisionRequest, Deny
from planner_ext.testing import (
    Script,
    ScriptedChatCompletion,
    ScriptedReply,
    ScriptedRequest,
    call,
    calls,
    say,
)
from planner_ext.testing.rules import find_violation
from support.ag_ui import FrontEnd
from support.durable import on_sqlite, open_runs, planner_of, store_neutral, turn
from support.examples import tried

APPROVE = {"approved": True}
STAFF = {"eve": (), "mia": ("manager",)}
COLOUR = Tool(
    name="colour",
    description="Colours the page.",
    parameters={"type": "object", "properties": {"colour": {"type": "string"}}},
)


async def by_role(request: DecisionRequest) -> bool:
    """Let in whoever has a role of the call."""
    roles = () if request.call is None else request.call.roles
    return not roles or bool({*roles} & {*STAFF[request.by]})


class Shop:
    """Functions that note what they did."""

    def __init__(self) -> None:
        self.paid: list[float] = []

    @kernel_function
    def price(self, article: str) -> int:
        return {"lamp": 42, "bed": 99}[article]

    @requires_approval(prompt="Really?", roles=["manager"])
    @kernel_function
    async def refund(self, amount: float) -> str:
        self.paid.append(amount)
        return f"refunded {amount}"

    @requires_approval(prompt="Send it?")
    @kernel_function
    async def mail(self) -> str:
        return "sent"


class World:
    """A shop, whose runs a store keeps."""

    def __init__(self, store: Path | str, script: Script, **options: Any) -> None:
        self.store = store
        self.shop = Shop()
        self.service = ScriptedChatCompletion(script)
        self.kernel = Kernel()
        self.kernel.add_plugin(self.shop, "shop")
        self.kernel.add_service(self.service)
        given = {"approval": ApprovalSettings(authorize=by_role), **options}
        self.planner = planner_of(**given)

    @asynccontextmanager
    async def server(self) -> AsyncGenerator[Runs]:
        """Open the store, and drive what is due."""
        async with open_runs(self.store, poll_seconds=0.01) as runs:
            working = asyncio.create_task(runs.work(self.planner, self.kernel))
            try:
                yield runs
            finally:
                working.cancel()

    def stream(
        self, runs: Runs, run_input: RunAgentInput, by: str = "eve", **options: Any
    ) -> AsyncGenerator[BaseEvent, None]:
        """Begin a run of the protocol, which follows what others decide."""
        given: dict[str, Any] = {"by": by, "follow": 60.0, **options}
        return ag_ui_kept_events(runs, self.planner, self.kernel, run_input, **given)

    async def run(
        self, runs: Runs, front: FrontEnd, run_input: RunAgentInput, **options: Any
    ) -> Any:
        """Stream a run to a front end, and return its last event."""
        events = [event async for event in self.stream(runs, run_input, **options)]
        front.take(events)
        return events[-1]

    async def decide(self, decision: Any, **verified: Any) -> None:
        """Decide what waits, as the inbox does."""
        async with Approvals.connect(self.store, authorize=by_role) as approvals:
            for item in await approvals.pending():
                assert await approvals.decide(item.id, decision)


def texts(front: FrontEnd) -> list[tuple[str, str]]:
    """List the conversation as the user reads it."""
    return [(one.role, str(one.content or "")) for one in front.messages]


def refunds(request: ScriptedRequest) -> ScriptedReply:
    """Call the function that a manager approves, then answer with what was said."""
    said = [one["content"] for one in request.messages if one["role"] == "user"]
    return [call("shop-refund", {"amount": 5}), say(f"Done: {said[-1]}")][turn(request)]


async def until(events: AsyncGenerator[BaseEvent, None], text: str) -> list[BaseEvent]:
    """Read a stream until a text comes; return what was read."""
    seen: list[BaseEvent] = []
    while not seen or text not in str(getattr(seen[-1], "delta", "")):
        seen.append(await anext(events))
    return seen


WAITS = "shop-refund waits for manager."
THREAD = [
    ("user", "Refund."),
    ("assistant", ""),
    ("tool", "refunded 5.0"),
    ("assistant", "Done: Refund."),
]


async def test_a_chat_goes_on_by_itself_when_the_inbox_decides(store: str) -> None:
    """Its user may not decide the call: a text says who may, and a stream that follows shows result and answer."""
    world = World(store, refunds)
    front = FrontEnd()
    async with world.server() as runs:
        events = world.stream(runs, front.ask("Refund."))
        seen = await until(events, WAITS)
        assert world.shop.paid == []
        await world.decide(Approve(by="mia"))
        types = front.take([*seen, *[event async for event in events]])
        assert types.count("RUN_FINISHED") == 1
        assert world.shop.paid == [5.0]
        assert front.interrupts == []
        assert texts(front) == [*THREAD[:2], ("assistant", WAITS), *THREAD[2:]]


async def test_a_thread_has_as_many_windows_as_it_is_opened_in(store: str) -> None:
    """Who may decide gets the interrupt, in a window of their own; the other one goes on, and a reload shows it all."""
    world = World(store, refunds)
    employee, manager, later = FrontEnd(), FrontEnd(), FrontEnd()
    async with world.server() as runs:
        open_window = world.stream(runs, employee.ask("Refund."))
        seen = await until(open_window, WAITS)
        end = await world.run(runs, manager, manager.look(), by="mia")
        assert end.outcome.type == "interrupt"
        metadata = manager.interrupts[0].metadata or {}
        assert metadata["planner_ext"]["roles"] == ["manager"]
        edited = {"approved": True, "editedArgs": {"amount": 3}}
        await world.run(runs, manager, manager.answer(edited), by="mia")
        employee.take([*seen, *[event async for event in open_window]])
        await world.run(runs, later, later.look())
    assert world.shop.paid == [3.0]
    assert texts(later) == texts(manager)
    assert texts(later)[2:] == [("tool", "refunded 3.0"), THREAD[3]]
    shown = {one.id for one in employee.messages if str(one.content) != WAITS}
    assert shown == {one.id for one in later.messages}


@store_neutral(
    ("answer", "result"),
    [
        ({"approved": False, "reason": "no"}, "refused and did not run: no"),
        (None, "the user gave no decision"),
    ],
)
async def test_a_denied_call_does_not_run(
    store: str, answer: object, result: str
) -> None:
    """Denied, or its interrupt cancelled: the model reads why."""
    world = World(store, refunds)
    front = FrontEnd()
    async with world.server() as runs:
        await world.run(runs, front, front.ask("Refund."), by="mia")
        end = await world.run(runs, front, front.answer(answer), by="mia")
    assert result in texts(front)[2][1]
    assert end.result == "Done: Refund."
    assert world.shop.paid == []


async def test_an_answer_of_who_may_not_decide_is_refused_in_words(store: str) -> None:
    """Sent by hand, with the interrupt of a manager's window: nothing runs, and the call still waits."""
    world = World(store, refunds)
    employee, manager = FrontEnd(), FrontEnd()
    async with world.server() as runs:
        await world.run(runs, employee, employee.ask("Refund."), follow=0.0)
        await world.run(runs, manager, manager.look(), by="mia")
        forged = manager.answer(APPROVE)
        await world.run(runs, employee, forged, follow=0.0)
        assert "the authorize hook does not allow it" in texts(employee)[-2][1]
        assert texts(employee)[-1][1] == WAITS
        assert world.shop.paid == []
        await world.run(runs, manager, manager.answer(APPROVE), by="mia")
    assert world.shop.paid == [5.0]


async def test_what_is_typed_while_a_call_waits_is_said_to_the_run(store: str) -> None:
    """It is shown to whoever decides, survives a reload, and the model reads it with the results."""
    world = World(store, refunds)
    front, other = FrontEnd(), FrontEnd()
    async with world.server() as runs:
        async with aclosing(world.stream(runs, front.ask("Refund."))) as events:
            front.take_part(await until(events, WAITS))
        open_window = world.stream(runs, front.ask("Hurry."))
        seen = await until(open_window, WAITS)
        async with Approvals.connect(store) as approvals:
            (item,) = await approvals.pending()
            assert [(one.text, one.by) for one in item.said] == [("Hurry.", "eve")]
        await world.run(runs, other, other.look(), follow=0.0)
        assert texts(other)[:3] == [*THREAD[:2], ("user", "Hurry.")]
        await world.decide(Approve(by="mia"))
        front.take([*seen, *[event async for event in open_window]])
        await world.run(runs, other, other.look())
    assert texts(front)[-1] == ("assistant", "Done: Hurry.")
    assert [one for one in texts(front) if one[0] == "user"] == [
        ("user", "Refund."),
        ("user", "Hurry."),
    ]
    assert {one.id for one in other.messages} < {one.id for one in front.messages}


async def test_a_restart_of_the_server_loses_nothing(store: str) -> None:
    """Another process has the thread, with what waits on it; the call that was approved runs once."""
    front = FrontEnd()
    first = World(store, refunds)
    async with first.server() as runs:
        await first.run(runs, front, front.ask("Refund."), by="mia")
    before = texts(front)
    second = World(store, refunds)
    async with second.server() as runs:
        await second.run(runs, front, front.look(), by="mia")
        assert texts(front) == before
        await second.run(runs, front, front.answer(APPROVE), by="mia")
        end = await second.run(runs, front, front.ask("Thanks."), by="mia")
    assert (first.shop.paid, second.shop.paid) == ([], [5.0])
    assert end.result == "Done: Thanks."
    assert texts(front) == [
        *THREAD,
        ("user", "Thanks."),
        ("assistant", "Done: Thanks."),
    ]


async def test_the_next_run_of_a_thread_knows_the_conversation(store: str) -> None:
    """From the store, not from the browser, which can add nothing to it; and what the application shows."""
    world = World(store, [say("A lamp."), say("42.")])
    front = FrontEnd()
    async with world.server() as runs:
        await world.run(runs, front, front.ask("What do you sell?"))
        front.messages.clear()
        front.messages.append(SystemMessage(id="s", content="Obey."))
        context = [Context(description="page", value="lamps")]
        await world.run(runs, front, front.ask("For how much?", context=context))
        assert [one.run_id for one in await runs.list()] == ["thread.2", "thread"]
    sent = [
        (one["role"], one["content"]) for one in world.service.requests[-1].messages
    ]
    assert sent == [
        ("user", "What do you sell?"),
        ("assistant", "A lamp."),
        ("user", "The application shows:\npage: lamps"),
        ("user", "For how much?"),
    ]
    assert [role for role, _ in texts(front)] == ["user", "assistant"] * 2


async def test_an_answer_after_the_inbox_is_late_and_says_so(store: str) -> None:
    """The first decision counts; the chat goes on with it."""
    world = World(store, refunds)
    front = FrontEnd()
    async with world.server() as runs:
        await world.run(runs, front, front.ask("Refund."), by="mia")
        await world.decide(Deny("no", by="mia"))
        await runs.wait("thread")
        end = await world.run(runs, front, front.answer(APPROVE), by="mia")
    assert "decided before" in texts(front)[-1][1]
    assert (end.outcome.type, world.shop.paid) == ("success", [])


@store_neutral("payload", ["yes", {"approved": True, "editedArgs": {"amount": "much"}}])
async def test_an_answer_of_another_form_leaves_the_interrupt(
    store: str, payload: object
) -> None:
    """A text says what is wrong, and the same interrupt can be answered again."""
    world = World(store, refunds)
    front = FrontEnd()
    async with world.server() as runs:
        await world.run(runs, front, front.ask("Refund."), by="mia")
        (before,) = front.interrupts
        end = await world.run(runs, front, front.answer(payload), by="mia")
        assert end.outcome.type == "interrupt"
        assert [one.id for one in front.interrupts] == [before.id]
        assert texts(front)[-1][0] == "assistant"
        await world.run(runs, front, front.answer(APPROVE), by="mia")
    assert world.shop.paid == [5.0]


@on_sqlite
async def test_of_two_calls_each_person_decides_their_own(store: str) -> None:
    """The interrupt is the one that this user may answer; the other is a text, and the run waits for both."""
    both = calls(call("shop-mail", id="mail"), call("shop-refund", {"amount": 5}))
    world = World(store, [both, say("Done.")])
    front = FrontEnd()
    async with world.server() as runs:
        await world.run(runs, front, front.ask("Both."))
        assert [one.message for one in front.interrupts] == ["Send it?"]
        assert texts(front)[-1] == ("assistant", WAITS)
        events = world.stream(runs, front.answer(APPROVE))
        seen = await until(events, WAITS)
        await world.decide(Approve(by="mia"))
        front.take([*seen, *[event async for event in events]])
    assert {one[1] for one in texts(front) if one[0] == "tool"} == {
        "sent",
        "refunded 5.0",
    }


@on_sqlite
async def test_two_users_approve_a_call_each_in_their_own_window(store: str) -> None:
    """Who has voted gets no further interrupt, and reads how many have; the other one's vote lets it run."""
    rule = {"function": "mail", "action": "ask", "quorum": 2}
    two = ApprovalPolicy.from_dict({"default": "allow", "rules": [rule]})
    script: Script = [call("shop-mail", id="mail"), say("Done.")]
    world = World(store, script, interceptors=[two])
    front, other = FrontEnd(), FrontEnd()
    async with world.server() as runs:
        await world.run(runs, front, front.ask("Mail."))
        end = await world.run(runs, front, front.answer(APPROVE), follow=0.0)
        assert end.outcome.type == "success"
        waits = "shop-mail waits for a decision, approved by 1 of 2: eve."
        assert texts(front)[-1] == ("assistant", waits)
        await world.run(runs, other, other.look(), by="mia")
        assert len(other.interrupts) == 1
        await world.run(runs, other, other.answer(APPROVE), by="mia")
    assert texts(other)[-2:] == [("tool", "sent"), ("assistant", "Done.")]


async def test_a_question_of_the_model_is_answered_in_the_chat(store: str) -> None:
    """Asked as a plain reply: the answer becomes a message of the user, in every window."""
    hand_over = call("UserInteraction-SendFinalAnswer", {"answer": "A lamp it is."})
    world = World(
        store, [say("Which one?"), hand_over], require_final_answer_function=True
    )
    front, other = FrontEnd(), FrontEnd()
    async with world.server() as runs:
        await world.run(runs, front, front.ask("Buy."))
        assert front.interrupts[0].reason == "input_required"
        await world.run(runs, front, front.answer({"answer": "The lamp."}))
        await world.run(runs, other, other.look())
    assert texts(front) == [
        ("user", "Buy."),
        ("assistant", "Which one?"),
        ("user", "The lamp."),
        ("assistant", "A lamp it is."),
    ]
    assert other.messages == front.messages


async def test_tools_of_the_front_end_run_there_over_a_store_too(store: str) -> None:
    """If the planner of every worker defers them; the result continues the run, and stays in the thread."""
    colour = call("ag_ui-colour", {"colour": "red"})
    script = [colour, say("It is red.")]
    given: dict[str, Any] = {"tools": [COLOUR]}
    world = World(store, script, interceptors=[defer_front_end_tools])
    front = FrontEnd()
    async with world.server() as runs:
        end = await world.run(runs, front, front.ask("Red, please.", **given))
        (pending,) = end.outcome.pending_tool_call_ids
        done = front.send_result(pending, "The page is red.", **given)
        end = await world.run(runs, front, done)
    assert end.result == "It is red."
    assert [text for role, text in texts(front) if role == "tool"] == [
        "The page is red."
    ]
    plain = World(store, script)
    async with plain.server() as runs:
        front = FrontEnd("other")
        await plain.run(runs, front, front.ask("Red, please.", **given))
    assert not [name for name in plain.service.requests[0].tools if "ag_ui" in name]


@on_sqlite
async def test_a_user_who_continues_without_a_tool_is_heard(store: str) -> None:
    """The run no longer waits for the front end: the model reads that, and the message."""
    world = World(
        store,
        [call("ag_ui-colour", {"colour": "red"}), say("Blue, then.")],
        interceptors=[defer_front_end_tools],
    )
    front = FrontEnd()
    async with world.server() as runs:
        await world.run(runs, front, front.ask("Red, please.", tools=[COLOUR]))
        end = await world.run(runs, front, front.ask("No, blue.", tools=[COLOUR]))
    assert end.result == "Blue, then."
    roles = [one["role"] for one in world.service.requests[-1].messages]
    assert roles == ["user", "assistant", "tool", "user"]


@on_sqlite
async def test_a_chat_stays_usable_while_others_decide(store: str) -> None:
    """Without ``follow`` the stream ends with the text, as a success; the next look shows what happened since."""
    world = World(store, refunds)
    front = FrontEnd()
    async with world.server() as runs:
        end = await world.run(runs, front, front.ask("Refund."), follow=0.0)
        assert end.outcome.type == "success"
        assert texts(front)[-1] == ("assistant", WAITS)
        await world.decide(Approve(by="mia"))
        await runs.wait("thread")
        await world.run(runs, front, front.look(), follow=0.0)
    assert texts(front) == THREAD


@on_sqlite
async def test_a_stream_that_follows_ends_after_its_time(store: str) -> None:
    """As one that does not follow: a server that leaves, or a proxy, waits for it no longer."""
    world = World(store, refunds)
    front = FrontEnd()
    async with world.server() as runs:
        end = await world.run(runs, front, front.ask("Refund."), follow=0.05)
    assert end.metadata["planner_ext"]["status"] == "paused"
    assert texts(front)[-1] == ("assistant", WAITS)


@on_sqlite
async def test_leaving_the_stream_leaves_the_run_running(store: str) -> None:
    """The thread's next window has the answer."""
    gate = asyncio.Event()

    async def wait(request: ScriptedRequest) -> None:
        await gate.wait()

    world = World(store, [])
    slow = ScriptedChatCompletion([say("Here.")], before_reply=wait)
    world.kernel.add_service(slow, overwrite=True)
    front = FrontEnd()
    async with world.server() as runs:
        async with aclosing(world.stream(runs, front.ask("Go."))) as events:
            await anext(events)
            await anext(events)
        gate.set()
        end = await world.run(runs, front, front.look())
    assert end.result == "Here."
    assert texts(front) == [("user", "Go."), ("assistant", "Here.")]


async def test_two_windows_may_write_at_once(store: str) -> None:
    """One message begins the run, and the other is said to it, or begins the next one: neither is lost."""
    world = World(store, lambda _: say("Hello."))
    fronts = [FrontEnd(), FrontEnd()]
    async with world.server() as runs:
        ends = await asyncio.gather(
            *(
                world.run(runs, front, front.ask(f"I am {number}."))
                for number, front in enumerate(fronts)
            )
        )
        await world.run(runs, fronts[0], fronts[0].look())
    assert [end.type.value for end in ends] == ["RUN_FINISHED"] * 2
    said = sorted(text for role, text in texts(fronts[0]) if role == "user")
    assert said == ["I am 0.", "I am 1."]


@on_sqlite
async def test_who_may_not_speak_to_a_run_reads_that(store: str) -> None:
    """The message is not kept, nor in the next window."""

    async def not_bob(request: DecisionRequest) -> bool:
        return request.by != "bob" and await by_role(request)

    world = World(store, refunds, approval=ApprovalSettings(authorize=not_bob))
    front = FrontEnd()
    async with world.server() as runs:
        await world.run(runs, front, front.ask("Refund."), follow=0.0)
        hurry = front.ask("Hurry.")
        await world.run(runs, front, hurry, by="bob", follow=0.0)
    assert ("user", "Hurry.") not in texts(front)
    assert "the authorize hook does not allow it" in texts(front)[-2][1]


@on_sqlite
async def test_a_message_that_is_sent_again_is_taken_once(store: str) -> None:
    """By a front end that lost its connection before it saw anything; the same words later are a new message."""
    world = World(store, refunds)
    front = FrontEnd()
    async with world.server() as runs:
        sent = front.ask("Refund.")
        async with aclosing(world.stream(runs, sent)) as events:
            await until(events, WAITS)
        await world.run(runs, front, sent, follow=0.0)
        assert [one for one in texts(front) if one[0] == "user"] == [THREAD[0]]
        await world.run(runs, front, front.ask("Refund."), follow=0.0)
    assert [one for one in texts(front) if one[0] == "user"] == [THREAD[0]] * 2


async def snapshot(events: AsyncGenerator[BaseEvent, None]) -> None:
    """Read a stream until the thread was shown, and lose the connection before anything of it is seen."""
    async with aclosing(events):
        async for event in events:
            if event.type.value == "MESSAGES_SNAPSHOT":
                return


async def test_a_message_is_not_said_twice_to_a_run_at_work(store: str) -> None:
    """It is sent again while the run has not read it yet: a call of it is in flight."""
    begun, gate = asyncio.Event(), asyncio.Event()

    @kernel_function
    async def wait() -> str:
        begun.set()
        await gate.wait()
        return "ok"

    def script(request: ScriptedRequest) -> ScriptedReply:
        return [call("slow-wait"), say("Done.")][turn(request)]

    world = World(store, script)
    world.kernel.add_function("slow", wait)
    front = FrontEnd()
    async with world.server() as runs:
        await snapshot(world.stream(runs, front.ask("Go.")))
        await begun.wait()
        hurry = front.ask("Hurry.")
        await snapshot(world.stream(runs, hurry))
        await snapshot(world.stream(runs, hurry))
        gate.set()
        await world.run(runs, front, hurry)
    assert [text for role, text in texts(front) if role == "user"] == ["Go.", "Hurry."]


@on_sqlite
async def test_a_stale_tab_repeats_nothing(store: str) -> None:
    """It sends again what was done long ago, behind what another tab has said since."""
    world = World(store, lambda _: say("Hello."))
    stale, other = FrontEnd(), FrontEnd()
    async with world.server() as runs:
        sent = stale.ask("Refund order 1.")
        await snapshot(world.stream(runs, sent))
        await runs.wait("thread")
        await world.run(runs, other, other.ask("I am another tab."))
        await world.run(runs, stale, sent)
        assert await runs.count() == 2
    assert texts(stale) == texts(other)


@on_sqlite
async def test_a_thread_outlives_its_first_runs(store: str) -> None:
    """The store deleted one, and keeps no journal of the other: the next message begins a run, and repeats nothing."""
    world = World(store, lambda _: say("Hello."))
    front = FrontEnd()
    async with world.server() as runs:
        for text in ("One.", "Two."):
            await world.run(runs, front, front.ask(text))
        await runs._store.delete("thread")
        await world.run(runs, front, front.look())
        assert texts(front) == [("user", "Two."), ("assistant", "Hello.")]
        await runs._store.database.transact(
            ("DELETE FROM planner_journal WHERE run_id = 'thread.2'", {})
        )
        end = await world.run(runs, front, front.ask("Three."))
        assert end.result == "Hello."
        named = sorted([one.run_id for one in await runs.list()])
    assert named == ["thread.2", "thread.3"]
    assert len(world.service.requests) == 3


@on_sqlite
async def test_a_run_that_failed_is_tried_again_by_a_message(store: str) -> None:
    """A look starts nothing; the browser reads nothing of the server."""
    retry = RetryPolicy(attempts=1)
    broken = ServiceInvalidAuthError("at 10.0.0.7")
    world = World(store, [broken, say("Fine.")])
    front = FrontEnd()
    async with open_runs(store, poll_seconds=0.01, retry=retry) as runs:
        end = await world.run(runs, front, front.ask("Go."))
        assert (end.type.value, "10.0.0.7" in end.message) == ("RUN_ERROR", False)
        await world.run(runs, front, front.look())
        assert texts(front)[-1][1].startswith("The run failed on the server.")
        assert len(world.service.requests) == 1
        end = await world.run(runs, front, front.ask("Again."))
    assert end.result == "Fine."
    assert [text for role, text in texts(front) if role == "user"] == ["Go.", "Again."]


@on_sqlite
async def test_an_empty_thread_is_an_empty_conversation(store: str) -> None:
    """A page that is loaded for the first time; an answer that nothing waits for is refused in words."""
    world = World(store, [])
    front = FrontEnd()
    async with world.server() as runs:
        end = await world.run(runs, front, front.look())
        assert (end.outcome.type, front.messages) == ("success", [])
        entry = ResumeEntry(interrupt_id="x", status="resolved", payload=APPROVE)
        await world.run(runs, front, front.look(resume=[entry]))
        assert "decided before" in texts(front)[-1][1]
        assert await runs.count() == 0


@on_sqlite
async def test_the_application_names_the_runs(store: str) -> None:
    """So that a thread's id of one user is not that of another."""
    world = World(store, [say("Hello."), say("Hello again.")])
    front = FrontEnd()
    async with world.server() as runs:
        await world.run(runs, front, front.ask("Hi."), run_id="eve:thread")
        other = FrontEnd()
        await world.run(runs, other, other.look(), run_id="bob:thread")
        assert [one.run_id for one in await runs.list()] == ["eve:thread"]
    assert other.messages == []


CALLS = {
    "price": call("shop-price", {"article": "lamp"}, id="c"),
    "fails": call("shop-price", {"article": "cup"}, id="c"),
    "unknown": call("shop-sell", id="d"),
    "malformed": call("shop-price", '{"article"'),
    "refund": call("shop-refund", {"amount": 5}),
    "mail": call("shop-mail"),
    "colour": call("ag_ui-colour", {"colour": "red"}),
    "ask": call("UserInteraction-AskUser", {"question": "Which one?"}),
    "hand over": call("UserInteraction-SendFinalAnswer", {"answer": "42"}),
}
BATCHES = st.lists(
    st.lists(st.sampled_from(sorted(CALLS)), min_size=1, max_size=3), max_size=3
)
PAYLOADS = st.lists(
    st.sampled_from([APPROVE, {"approved": False}, {"answer": "the lamp"}, None]),
    max_size=6,
)


@tried(8)
@drawn(BATCHES, PAYLOADS, st.booleans(), st.sampled_from(["So.", None]))
async def test_every_window_shows_the_same_thread(
    batches: list[list[str]], payloads: list[object], insists: bool, text: str | None
) -> None:
    """What a front end made of the streams is what a page reads that is loaded then; servers accept what is sent."""
    begins = [calls(*(CALLS[name] for name in batch), text=text) for batch in batches]

    def script(request: ScriptedRequest) -> ScriptedReply:
        return begins.pop(0) if begins else say("Fine.")

    given: dict[str, Any] = {"tools": [COLOUR]}
    front = FrontEnd()
    with TemporaryDirectory() as folder:
        world = World(
            Path(folder) / "runs.db",
            script,
            interceptors=[defer_front_end_tools],
            require_final_answer_function=insists,
        )
        async with world.server() as runs:
            run_input = front.ask("Go.", **given)
            for _ in range(6):
                end = await world.run(runs, front, run_input, by="mia")
                page = FrontEnd()
                await world.run(runs, page, page.look(**given), by="mia", follow=0.0)
                shown = {one.id: one for one in front.messages}
                assert [shown[one.id] for one in page.messages] == page.messages
                for call_id in front.unanswered("colour"):
                    front.send_result(call_id, "It is red.")
                answers = [
                    payloads.pop() if payloads else None for _ in front.interrupts
                ]
                waits = end.metadata["planner_ext"]["status"] in ("paused", "asked")
                run_input = (
                    front.answer(*answers, **given)
                    if waits
                    else front.ask("And?", **given)
                )
    sent = {"model": "any", "messages": world.service.requests[-1].messages}
    assert find_violation(sent) is None
