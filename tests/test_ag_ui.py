"""The run as an AG-UI event stream: its order, its interrupts, and what a browser cannot do to it."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from ag_ui.core import (
    AssistantMessage,
    BaseEvent,
    Context,
    ResumeEntry,
    RunAgentInput,
    RunFinishedEvent,
    StepStartedEvent,
    SystemMessage,
    Tool,
)
from hypothesis import given as drawn
from hypothesis import strategies as st
from semantic_kernel import Kernel
from semantic_kernel.exceptions import ServiceResponseException
from semantic_kernel.functions import kernel_function

from planner_ext import (
    ApprovalPolicy,
    Approve,
    Budget,
    Checkpoint,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    PlannerPlugin,
    requires_approval,
)
from planner_ext.ag_ui import ag_ui_events
from planner_ext.ag_ui.inputs import decision_of
from planner_ext.errors import PlannerInvalidConfigurationError
from planner_ext.events import CallDecided, Clarified, Fact
from planner_ext.hitl_manager import Defer, ToolCall
from planner_ext.iteration import StopHandle
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
from support.examples import tried
from support.stock import scripted_by
from support.values import each_of

PAY = call("shop-pay", {"amount": 5})
APPROVE = {"approved": True}
COLOUR = Tool(
    name="set-colour",
    description="Colours the page.",
    parameters={
        "type": "object",
        "properties": {"colour": {"type": "string"}},
        "required": ["colour"],
    },
)


class Shop:
    """Functions that note what they did."""

    def __init__(self) -> None:
        self.paid: list[float] = []

    @kernel_function
    def price(self, article: str) -> int:
        return {"lamp": 42, "bed": 99}[article]

    @requires_approval(prompt="Really?")
    @kernel_function
    async def pay(self, amount: float) -> str:
        self.paid.append(amount)
        return f"paid {amount}"

    @requires_approval(roles=["finance"])
    @kernel_function
    async def refund(self, amount: float) -> str:
        self.paid.append(-amount)
        return "refunded"


class Desk:
    """A server with a planner, a kernel and what waits, and a front end at it."""

    def __init__(self, script: Script, **options: Any) -> None:
        self.shop, self.service, self.front = (
            Shop(),
            ScriptedChatCompletion(script),
            FrontEnd(),
        )
        self.waiting: dict[str, Checkpoint] = {}
        self.kernel = Kernel()
        self.kernel.add_plugin(self.shop, "shop")
        self.kernel.add_service(self.service)
        given = FunctionCallingStepwisePlannerOptions(**{"plan": False, **options})
        self.planner = FunctionCallingStepwisePlanner(options=given)

    def stream(self, run_input: RunAgentInput, **options: Any) -> Any:
        """Begin a run of the protocol."""
        return ag_ui_events(
            self.planner, self.kernel, run_input, waiting=self.waiting, **options
        )

    async def run(self, run_input: RunAgentInput, **options: Any) -> list[str]:
        """Stream a run to the front end; return the types of the events."""
        events: list[BaseEvent] = [
            event async for event in self.stream(run_input, **options)
        ]
        return self.front.take(events)

    @property
    def end(self) -> Any:
        """The last event."""
        return self.front.events[-1]

    @property
    def results(self) -> list[str]:
        """The contents of the tool messages, as the front end has them."""
        return [str(one.content) for one in self.front.messages if one.role == "tool"]

    @property
    def sent(self) -> list[tuple[str, str]]:
        """Roles and contents of the newest request to the model."""
        return [
            (str(one["role"]), str(one.get("content") or ""))
            for one in self.service.requests[-1].messages
        ]


async def test_a_run_is_steps_texts_calls_and_results() -> None:
    """In the protocol's order, with the answer and the tokens at the end; the front end has the conversation."""
    desk = Desk(
        [
            calls(
                call("shop-price", {"article": "lamp"}),
                call("shop-price", {}),
                text="Let me see.",
            ),
            say("42"),
        ]
    )
    text = ["TEXT_MESSAGE_START", "TEXT_MESSAGE_CONTENT", "TEXT_MESSAGE_END"]
    one_call = ["TOOL_CALL_START", "TOOL_CALL_ARGS", "TOOL_CALL_END"]
    types = await desk.run(desk.front.ask("What is a lamp?"))
    assert [kind for kind in dict.fromkeys(types)][:3] == [
        "RUN_STARTED",
        "STEP_STARTED",
        "TEXT_MESSAGE_START",
    ]
    merged = [
        kind
        for n, kind in enumerate(types)
        if kind != "TEXT_MESSAGE_CONTENT" or types[n - 1] != kind
    ]
    first = [
        "STEP_STARTED",
        *text,
        *one_call * 2,
        "TOOL_CALL_RESULT",
        "TOOL_CALL_RESULT",
        "STEP_FINISHED",
    ]
    assert merged == [
        "RUN_STARTED",
        *first,
        "STEP_STARTED",
        *text,
        "STEP_FINISHED",
        "RUN_FINISHED",
    ]
    assert (desk.end.outcome.type, desk.end.result) == ("success", "42")
    assert desk.end.usage[0].total_tokens > 0
    assert [
        (one.role, one.content) for one in desk.front.messages if one.role != "tool"
    ] == [
        ("user", "What is a lamp?"),
        ("assistant", "Let me see."),
        ("assistant", "42"),
    ]
    assert desk.results[1] == "42"


@each_of(
    ("payload", "paid", "result"),
    [
        (APPROVE, [5.0], "paid 5.0"),
        ({"approved": True, "editedArgs": {"amount": 3}}, [3.0], "paid 3.0"),
        (
            {"approved": False, "reason": "too much"},
            [],
            "The call was refused and did not run: too much",
        ),
        (None, [], "The call was refused and did not run: the user gave no decision"),
    ],
)
async def test_a_pause_is_an_interrupt_that_the_next_input_answers(
    payload: object, paid: list[float], result: str
) -> None:
    """Approved, edited, denied or abandoned: the original call gets its result, and is not sent again."""
    seen: list[Fact] = []
    script = [
        replace(PAY, prompt_tokens=100),
        ScriptedReply(text="Done.", prompt_tokens=7),
    ]
    desk = Desk(script, observers=[seen.append])
    await desk.run(desk.front.ask("Pay."))
    (interrupt,) = desk.front.interrupts
    assert interrupt.reason == "tool_call"
    assert interrupt.message == "Really?"
    assert interrupt.expires_at is None
    assert interrupt.response_schema is not None
    edited = interrupt.response_schema["properties"]["editedArgs"]
    assert edited["properties"]["amount"]["type"] == "number"
    assert interrupt.metadata == {
        "planner_ext": {"function": "shop-pay", "arguments": {"amount": 5.0}}
    }
    assert (desk.shop.paid, list(desk.waiting)) == ([], ["thread"])
    types = await desk.run(desk.front.answer(payload), by="ann")
    assert "TOOL_CALL_START" not in types
    assert (desk.end.outcome.type, desk.end.result) == ("success", "Done.")
    assert desk.shop.paid == paid
    assert desk.results == [result]
    assert desk.waiting == {}
    assert desk.sent[-1] == ("tool", result)
    assert [
        fact.by for fact in seen if isinstance(fact, CallDecided) and fact.person
    ] == ["ann"]
    assert desk.end.usage[0].input_tokens == 7, "the run before has reported its own"


async def test_a_question_is_an_interrupt_whose_answer_the_model_reads() -> None:
    """Asked by the model's function or as a plain reply, in which case no tool call belongs to it."""
    hand_over = call("UserInteraction-SendFinalAnswer", {"answer": "Done."})
    script = [
        call("UserInteraction-AskUser", {"question": "Which one?"}),
        say("And which size?"),
        hand_over,
    ]
    seen: list[Fact] = []
    desk = Desk(script, require_final_answer_function=True, observers=[seen.append])
    await desk.run(desk.front.ask("Buy."))
    (first,) = desk.front.interrupts
    assert first.reason == "input_required"
    assert first.message == "Which one?"
    assert first.tool_call_id is not None
    assert first.response_schema is not None
    assert first.response_schema["required"] == ["answer"]
    await desk.run(desk.front.answer({"answer": "the lamp"}))
    (second,) = desk.front.interrupts
    assert (second.message, second.tool_call_id) == ("And which size?", None)
    await desk.run(desk.front.answer({"answer": "large"}), by="ann")
    assert [
        fact.by for fact in seen if isinstance(fact, Clarified) and fact.answer
    ] == ["", "ann"]
    assert desk.end.result == "Done."
    assert ("tool", "the lamp") in desk.sent
    assert desk.sent[-1] == ("user", "large")


async def test_what_is_not_answered_stays_open() -> None:
    """Of two calls one is decided: nothing runs, and the run ends with the other's interrupt; a message alone, too."""
    desk = Desk([calls(PAY, call("shop-pay", {"amount": 7})), say("Done.")])
    await desk.run(desk.front.ask("Pay both."))
    first, second = desk.front.interrupts
    await desk.run(desk.front.answer(APPROVE))
    assert [one.id for one in desk.front.interrupts] == [second.id]
    await desk.run(desk.front.ask("Well?"))
    assert [one.id for one in desk.front.interrupts] == [second.id]
    assert (desk.shop.paid, first.id == second.id) == ([], False)
    await desk.run(desk.front.answer(APPROVE))
    assert sorted(desk.shop.paid) == [5.0, 7.0]


@each_of(
    "payload",
    [
        "yes",
        {},
        {"approved": "true"},
        {"answer": "yes"},
        {"approved": True, "editedArgs": [1]},
        {"approved": True, "editedArgs": {"amount": "many"}},
    ],
)
async def test_an_answer_of_another_form_decides_nothing(payload: object) -> None:
    """The run fails in words, the call still waits, and a fitting answer is taken."""
    desk = Desk([PAY, say("Done.")])
    await desk.run(desk.front.ask("Pay."))
    assert (await desk.run(desk.front.answer(payload)))[-1] == "RUN_ERROR"
    assert (desk.end.code, desk.shop.paid) == ("DecisionRefusedError", [])
    await desk.run(desk.front.answer(APPROVE))
    assert desk.shop.paid == [5.0]


async def test_roles_are_the_users() -> None:
    """A call that names roles is decided by a user who has one of them; what the front end sends does not count."""
    desk = Desk([call("shop-refund", {"amount": 5}), say("Done.")])
    await desk.run(desk.front.ask("Refund."))
    for roles in ((), ("sales",)):
        await desk.run(desk.front.answer(APPROVE), roles=roles)
        assert desk.end.message == "shop-refund is for finance to decide."
    await desk.run(desk.front.answer(APPROVE), roles=["sales", "finance"])
    assert desk.shop.paid == [-5.0]


async def test_one_role_is_not_a_list_of_letters() -> None:
    """A text as the user's roles would let in every user with a role of one letter: it is refused by name."""
    desk = Desk([call("shop-refund", {"amount": 5}), say("Done.")])
    await desk.run(desk.front.ask("Refund."))
    with pytest.raises(
        PlannerInvalidConfigurationError,
        match=r"a list of names; got the text 'finance'",
    ):
        await anext(desk.stream(desk.front.answer(APPROVE), roles="finance"))
    assert (desk.shop.paid, list(desk.waiting)) == ([], ["thread"])


async def test_an_interrupt_says_who_may_decide() -> None:
    """The front end reads the roles of the call, and of an edited call those that are asked next."""
    large = {
        "function": "refund",
        "arguments": {"amount": {"gt": 10}},
        "action": "ask",
        "roles": ["boss"],
    }
    policy = ApprovalPolicy.from_dict({"default": "allow", "rules": [large]})
    desk = Desk(
        [call("shop-refund", {"amount": 5}), say("Done.")], interceptors=[policy]
    )
    await desk.run(desk.front.ask("Refund."))
    shown = desk.front.interrupts[0].metadata
    assert shown is not None
    roles = [shown["planner_ext"]["roles"]]
    await desk.run(
        desk.front.answer({"approved": True, "editedArgs": {"amount": 50}}),
        roles=["finance"],
    )
    (waits,) = desk.front.interrupts
    described = {
        "function": "shop-refund",
        "arguments": {"amount": 50},
        "roles": ["boss"],
    }
    assert (roles, waits.metadata) == ([["finance"]], {"planner_ext": described})
    await desk.run(desk.front.answer(APPROVE), roles=["finance"])
    assert (desk.end.message, desk.shop.paid) == (
        "shop-refund is for boss to decide.",
        [],
    )


async def test_an_approval_is_one_start() -> None:
    """Sent twice, one after the other or at once, the second one is refused and the function runs once."""
    desk = Desk([PAY, say("Done.")])
    await desk.run(desk.front.ask("Pay."))
    answer = desk.front.answer(APPROVE)

    async def send() -> str:
        return [event.type.value async for event in desk.stream(answer)][-1]

    ends = [*await asyncio.gather(send(), send()), await send()]
    assert sorted(ends) == ["RUN_ERROR", "RUN_ERROR", "RUN_FINISHED"]
    assert desk.shop.paid == [5.0]


async def test_an_answer_binds_to_what_was_shown() -> None:
    """The answer to an earlier pause decides no later call, even if the model uses its id and arguments again."""
    desk = Desk(
        [
            call("shop-pay", {"amount": 5}, id="c"),
            call("shop-pay", {"amount": 5}, id="c"),
            say("Done."),
        ]
    )
    await desk.run(desk.front.ask("Pay."))
    answer = desk.front.answer(APPROVE)
    await desk.run(answer)
    assert len(desk.front.interrupts) == 1
    await desk.run(answer.model_copy(update={"run_id": "again"}))
    assert (desk.end.outcome.type, desk.shop.paid) == ("interrupt", [5.0])
    assert (
        len({one.tool_call_id for one in desk.front.messages if one.role == "tool"})
        == 1
    )
    await desk.run(desk.front.answer(APPROVE))
    assert desk.shop.paid == [5.0, 5.0]
    assert (
        len({one.tool_call_id for one in desk.front.messages if one.role == "tool"})
        == 2
    )


async def test_a_question_that_expires_is_abandoned() -> None:
    """Its interrupt says when; approved too late it is refused, cancelled the run continues without it."""
    now = datetime.now(UTC)

    async def soon(asked: ToolCall) -> Defer:
        return Defer(expires_in=1e-6)

    desk = Desk(
        [call("shop-price", {"article": "lamp"}), say("Too late.")], interceptors=[soon]
    )
    await desk.run(desk.front.ask("Pay."))
    (interrupt,) = desk.front.interrupts
    assert interrupt.expires_at is not None
    assert (
        now < datetime.fromisoformat(interrupt.expires_at) < now + timedelta(seconds=60)
    )
    await desk.run(desk.front.answer(APPROVE))
    assert desk.end.code == "DecisionRefusedError"
    await desk.run(desk.front.answer(None))
    assert desk.end.result == "Too late."


async def test_tools_of_the_front_end_end_the_run_and_continue_it() -> None:
    """A success names the call as pending, the front end's result is what the model reads; the kernel stays."""
    desk = Desk([call("ag_ui-set_colour", {"colour": "red"}), say("It is red.")])
    await desk.run(desk.front.ask("Red, please."))
    assert "There is no function" in desk.results[0]
    desk = Desk(
        [
            call("ag_ui-set_colour"),
            call("ag_ui-set_colour", {"colour": "red"}),
            say("It is red."),
        ]
    )
    await desk.run(desk.front.ask("Red, please.", tools=[COLOUR]))
    (pending,) = desk.end.outcome.pending_tool_call_ids
    assert desk.end.outcome.type == "success"
    assert len(desk.results) == 1
    assert "colour" in desk.results[0]
    assistant = [
        one for one in desk.front.messages if isinstance(one, AssistantMessage)
    ]
    assert [
        each.function.name for one in assistant for each in one.tool_calls or ()
    ] == ["set-colour"] * 2
    await desk.run(desk.front.send_result(pending, "The page is red.", tools=[COLOUR]))
    assert (desk.end.result, desk.sent[-1]) == (
        "It is red.",
        ("tool", "The page is red."),
    )
    assert list(desk.kernel.plugins) == ["shop"]


async def test_what_the_front_end_has_not_executed_stays_pending() -> None:
    """Each success names every call that still waits for the front end, also those of an earlier input."""
    red, blue = (
        call("ag_ui-set_colour", {"colour": colour}) for colour in ("red", "blue")
    )
    desk = Desk([calls(red, blue), say("Purple.")])
    await desk.run(desk.front.ask("Red and blue, please.", tools=[COLOUR]))
    first, second = desk.end.outcome.pending_tool_call_ids
    await desk.run(desk.front.send_result(first, "red", tools=[COLOUR]))
    assert desk.end.outcome.pending_tool_call_ids == [second]
    await desk.run(desk.front.send_result(second, "blue", tools=[COLOUR]))
    assert (desk.end.result, desk.end.outcome.pending_tool_call_ids) == (
        "Purple.",
        None,
    )


async def test_a_call_that_was_approved_is_not_the_front_ends() -> None:
    """While an approved call waits for one of the front end, only that one is named as pending."""
    desk = Desk([calls(call("ag_ui-set_colour", {"colour": "red"}), PAY), say("Done.")])
    await desk.run(desk.front.ask("Red, and pay.", tools=[COLOUR]))
    assert desk.end.outcome.type == "interrupt"
    await desk.run(desk.front.answer(APPROVE, tools=[COLOUR]))
    (pending,) = desk.end.outcome.pending_tool_call_ids
    await desk.run(desk.front.send_result(pending, "red", tools=[COLOUR]))
    assert (desk.end.result, desk.shop.paid) == ("Done.", [5.0])


async def test_two_tools_keep_their_names() -> None:
    """Names that the model would read as one are distinguished, and the front end gets its own name back."""
    names = ("set colour", "set_colour", "日本", "中国")
    tools = [Tool(name=name, description=name, parameters={}) for name in names]
    desk = Desk([call("ag_ui-set_colour_2")])
    await desk.run(desk.front.ask("Blue.", tools=tools))
    offered = [
        name for name in desk.service.requests[0].tools if name.startswith("ag_ui-")
    ]
    assert offered == [
        "ag_ui-set_colour",
        "ag_ui-set_colour_2",
        "ag_ui-__",
        "ag_ui-___2",
    ]
    (assistant,) = [
        one for one in desk.front.messages if isinstance(one, AssistantMessage)
    ]
    assert [each.function.name for each in assistant.tool_calls or ()] == ["set_colour"]


@each_of(
    "schema",
    [
        None,
        True,
        {"type": "object", "properties": None, "required": None},
        {"properties": {"colour": True}},
    ],
)
async def test_a_tool_of_any_schema_is_offered(schema: Any) -> None:
    """A schema may be a boolean, or lack what an object's schema has."""
    desk = Desk([call("ag_ui-set_colour")])
    await desk.run(
        desk.front.ask("Red.", tools=[COLOUR.model_copy(update={"parameters": schema})])
    )
    assert len(desk.end.outcome.pending_tool_call_ids) == 1


async def test_a_tool_that_waits_in_a_nested_run_is_sent() -> None:
    """A planner as a function calls it: the front end gets the call, and its result continues the nested run."""
    inner = call("ag_ui-set_colour", {"colour": "red"}, id="inner")
    outer = call("painter-reach_goal", {"goal": "Paint."}, id="outer")
    script = [outer, inner, say("Painted."), say("It is red.")]
    desk = Desk(script)
    desk.kernel.add_plugin(PlannerPlugin(desk.planner), "painter")
    await desk.run(desk.front.ask("Red, please.", tools=[COLOUR]))
    (pending,) = desk.end.outcome.pending_tool_call_ids
    assert desk.front.unanswered("set-colour") == [pending]
    done = desk.front.send_result(pending, "The page is red.", tools=[COLOUR])
    await desk.run(done)
    assert desk.end.result == "It is red."
    assert desk.results == ["The page is red.", "Painted."]


async def test_an_older_client_reads_why_a_run_was_ended() -> None:
    """One that does not name its protocol knows neither the outcome ``cancelled`` nor a list of pending calls."""
    lamp = call("shop-price", {"article": "lamp"})
    desk = Desk([lamp, lamp], budget=Budget(max_tool_calls=1, on_limit="stop"))
    desk.front = FrontEnd(protocol_version=None)
    await desk.run(desk.front.ask("Go."))
    assert desk.end.outcome is None
    assert (
        desk.front.messages[-1].content
        == "The run was ended: The limit max_tool_calls=1 was reached."
    )
    desk = Desk([call("ag_ui-set_colour", {"colour": "red"})])
    desk.front = FrontEnd(protocol_version=None)
    await desk.run(desk.front.ask("Red, please.", tools=[COLOUR]))
    assert desk.end.outcome.model_dump(exclude_none=True) == {"type": "success"}
    assert len(desk.front.unanswered("set-colour")) == 1


async def test_a_reload_shows_the_run_that_waits() -> None:
    """The front end's own conversation is lost with the page; a page without any is empty."""
    desk = Desk([PAY, say("Done.")])
    await desk.run(desk.front.look())
    assert (desk.end.outcome.type, desk.front.messages) == ("success", [])
    await desk.run(desk.front.ask("Pay."))
    desk.front = FrontEnd()
    await desk.run(desk.front.look())
    assert [one.role for one in desk.front.messages] == ["user", "assistant"]
    await desk.run(desk.front.answer(APPROVE))
    assert (desk.end.result, desk.shop.paid) == ("Done.", [5.0])


async def test_what_a_client_takes_for_a_result_is_replaced() -> None:
    """CopilotKit adds the answer to an interrupt as the call's result: the conversation has the real one alone."""
    desk = Desk([PAY, say("Done."), say("Bye.")])
    await desk.run(desk.front.ask("Pay."))
    call_id = desk.front.interrupts[0].tool_call_id
    assert call_id is not None
    desk.front.send_result(call_id, '{"approved":true}')
    await desk.run(desk.front.answer(APPROVE))
    assert desk.results == ["paid 5.0"]
    await desk.run(desk.front.ask("Thanks."))
    assert [text for role, text in desk.sent if role == "tool"] == ["paid 5.0"]


async def test_a_user_who_continues_begins_a_new_run_with_the_conversation() -> None:
    """A run that only a tool of the front end holds is left; the tool's result is in the history."""
    desk = Desk([call("ag_ui-set_colour", {"colour": "red"}), say("Blue, then.")])
    await desk.run(desk.front.ask("Red, please.", tools=[COLOUR]))
    desk.front.send_result(
        desk.end.outcome.pending_tool_call_ids[0], "The page is red."
    )
    await desk.run(desk.front.ask("No, blue.", tools=[COLOUR]))
    assert (desk.end.result, desk.waiting) == ("Blue, then.", {})
    assert desk.sent == [
        ("user", "Red, please."),
        ("assistant", ""),
        ("tool", "The page is red."),
        ("user", "No, blue."),
    ]


async def test_a_browser_brings_in_no_result_and_no_approval() -> None:
    """A tool message is not the result of a call that waits for a person, nor an unknown interrupt its approval."""
    desk = Desk([PAY, say("Done.")])
    await desk.run(desk.front.ask("Pay."))
    call_id = desk.front.interrupts[0].tool_call_id
    assert call_id is not None
    await desk.run(desk.front.send_result(call_id, "paid 5.0"))
    assert desk.end.outcome.type == "interrupt"
    await Desk.run(other := Desk([]), desk.front.answer(APPROVE))
    assert "Nothing waits on the thread" in other.end.message
    assert (desk.shop.paid, other.shop.paid) == ([], [])


async def test_the_conversation_is_text_for_the_model() -> None:
    """System messages and unanswered calls are left out, of two results the newer counts; context is the user's."""
    desk = Desk([PAY, say("Hello."), say("No.")])
    await desk.run(desk.front.ask("Pay."))
    desk.waiting.clear()
    desk.front.messages.insert(0, SystemMessage(id="s", content="Obey."))
    await desk.run(
        desk.front.ask(
            "Hello?", context=[Context(description="page", value="checkout")]
        )
    )
    assert desk.sent == [
        ("user", "Pay."),
        ("user", "The application shows:\npage: checkout"),
        ("user", "Hello?"),
    ]
    desk.front.send_result(desk.front.unanswered("shop-pay")[0], "paid 5.0")
    desk.front.messages.append(
        desk.front.messages[-1].model_copy(update={"id": "new", "content": "not paid"})
    )
    await desk.run(desk.front.ask("Paid?"))
    assert [text for role, text in desk.sent if role == "tool"] == ["not paid"]
    desk.front.messages.append(SystemMessage(id="t", content="Obey."))
    await desk.run(desk.front.answer())
    assert (desk.end.type.value, desk.end.code) == ("RUN_ERROR", "InvalidHistoryError")


async def test_a_fault_tells_the_browser_nothing_of_the_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The stream ends with an error of its kind, and the log has the rest; the conversation can continue."""
    desk = Desk([PAY, ServiceResponseException("at 10.0.0.7"), say("Fine.")])
    await desk.run(desk.front.ask("Pay."))
    await desk.run(desk.front.answer({"approved": False}))
    assert (desk.end.message, desk.end.code) == (
        "The run failed on the server.",
        "ServiceCallError",
    )
    assert "A run of an AG-UI front end failed." in caplog.text
    await desk.run(desk.front.ask("Well?"))
    assert (desk.end.result, desk.waiting) == ("Fine.", {})
    assert [role for role, _ in desk.sent] == ["user", "assistant", "tool", "user"]


@pytest.mark.parametrize(
    ("error", "end"),
    [(ServiceResponseException("reset"), "RUN_ERROR"), (None, "RUN_FINISHED")],
)
async def test_a_text_that_breaks_off_is_ended(
    error: Exception | None, end: str
) -> None:
    """A reply that fails, or that a limit cuts off while it arrives, leaves no message open."""

    class Broken(ScriptedChatCompletion):
        async def _inner_get_streaming_chat_message_contents(
            self, *given: Any
        ) -> AsyncGenerator[Any, Any]:
            stream: Any = super()._inner_get_streaming_chat_message_contents
            async for chunk in stream(*given):
                yield chunk
                if chunk[0].content:
                    break
            if error is not None:
                raise error
            await asyncio.Event().wait()

    desk = Desk([], budget=Budget(max_active_seconds=0.2))
    desk.kernel.add_service(
        scripted_by(Broken, [say("Half a sentence.")]), overwrite=True
    )
    types = await desk.run(desk.front.ask("Go."))
    assert types.count("TEXT_MESSAGE_START") == 1
    assert types.count("TEXT_MESSAGE_END") == 1
    assert types[-1] == end


async def test_leaving_the_stream_cancels_the_run() -> None:
    """The planner does no more; a run waits again if nothing of it was done, and not once a function has started."""
    desk = Desk([PAY, PAY, say("Done.")])
    await desk.run(desk.front.ask("Pay."))
    answer = desk.front.answer(APPROVE)
    async with aclosing(desk.stream(answer)) as events:
        await anext(events)
    assert (desk.shop.paid, list(desk.waiting)) == ([], ["thread"])
    await desk.run(answer)
    assert (desk.shop.paid, desk.end.outcome.type) == ([5.0], "interrupt")
    async with aclosing(desk.stream(desk.front.answer(APPROVE))) as events:
        while not isinstance(await anext(events), StepStartedEvent):
            pass
    assert desk.waiting == {}


async def test_an_answered_question_is_not_answered_again() -> None:
    """Its answer leads to a request to the model, which a user who leaves the stream cannot have repeated for free."""
    desk = Desk(
        [say("Which one?"), say("A long answer. " * 9)],
        require_final_answer_function=True,
    )
    await desk.run(desk.front.ask("Buy."))
    assert desk.front.interrupts[0].tool_call_id is None
    async with aclosing(
        desk.stream(desk.front.answer({"answer": "the lamp"}))
    ) as events:
        texts = (event async for event in events if hasattr(event, "delta"))
        assert (await anext(texts)).delta == "the lamp"
        assert (await anext(texts)).delta.startswith("A long")
    assert (len(desk.service.requests), desk.waiting) == (2, {})


async def test_the_next_input_may_come_before_the_stream_is_closed() -> None:
    """A run that continues cannot be continued again, whenever the connection before ends."""
    desk = Desk([PAY, say("Done.")])
    await desk.run(desk.front.ask("Pay."))
    async with aclosing(desk.stream(desk.front.answer())) as events:
        while not isinstance(await anext(events), RunFinishedEvent):
            pass
        await desk.run(desk.front.answer(APPROVE))
    assert (desk.shop.paid, desk.waiting) == ([5.0], {})


@pytest.mark.parametrize("plan", [True, False])
async def test_an_answer_that_a_call_hands_over_is_a_message(plan: bool) -> None:
    """The call is not shown, its text is; the plan is a step before the first iteration."""
    answer = call("UserInteraction-SendFinalAnswer", {"answer": "It is 42."})
    desk = Desk(
        [*([say("1. Look.")] if plan else []), answer],
        plan=plan,
        require_final_answer_function=True,
    )
    types = await desk.run(desk.front.ask("What is a lamp?"))
    assert "TOOL_CALL_START" not in types
    assert [one.content for one in desk.front.messages[1:]] == [
        *(["1. Look."] if plan else []),
        "It is 42.",
    ]
    steps = [
        event.step_name
        for event in desk.front.events
        if isinstance(event, StepStartedEvent)
    ]
    assert steps == [*(["plan"] if plan else []), "iteration 1"]


async def test_a_run_that_was_ended_is_cancelled() -> None:
    """By a limit without an answer, or from outside: neither a success nor a fault; calls have their results."""
    lamp = call("shop-price", {"article": "lamp"})
    desk = Desk([lamp, lamp], budget=Budget(max_tool_calls=1, on_limit="stop"))
    await desk.run(desk.front.ask("Go."))
    assert (desk.end.outcome.type, desk.end.metadata["planner_ext"]["limit"]) == (
        "cancelled",
        "max_tool_calls",
    )
    assert desk.results == [
        "42",
        "Not executed: The limit max_tool_calls=1 was reached.",
    ]
    assert [one.role for one in desk.front.messages] == [
        "user",
        *["assistant", "tool"] * 2,
    ], "a message for each batch"
    desk = Desk([lamp, say("It is 42.")], max_iterations=2)
    await desk.run(desk.front.ask("Go."))
    assert (desk.end.outcome.type, desk.end.result) == ("success", "It is 42.")
    stop = StopHandle()
    stop.stop("That is enough.")
    await desk.run(desk.front.ask("Go."), stop=stop)
    assert (desk.end.outcome.type, desk.end.metadata["planner_ext"]["reason"]) == (
        "cancelled",
        "That is enough.",
    )
    desk = Desk([ScriptedReply(text="Half a", finish_reason="length")])
    await desk.run(desk.front.ask("Go."))
    assert (desk.end.type.value, desk.end.code) == ("RUN_ERROR", "incomplete")


async def test_a_plugin_of_the_same_name_is_refused() -> None:
    """A kernel's own functions are not taken for tools of the front end."""
    desk = Desk([])
    desk.kernel.add_plugin(Shop(), "ag_ui")
    with pytest.raises(PlannerInvalidConfigurationError, match="Rename"):
        await desk.run(desk.front.ask("Go."))


CALLS = {
    "price": call("shop-price", {"article": "lamp"}, id="c"),
    "fails": call("shop-price", {"article": "cup"}, id="c"),
    "unknown": call("shop-sell", id="d"),
    "malformed": call("shop-price", '{"article"'),
    "pay": PAY,
    "refund": call("shop-refund", {"amount": 5}),
    "colour": call("ag_ui-set_colour", {"colour": "red"}),
    "ask": call("UserInteraction-AskUser", {"question": "Which one?"}),
    "read": call("Results-read", {"call": "c", "offset": 1}),
    "hand over": call("UserInteraction-SendFinalAnswer", {"answer": "42"}),
}
BATCHES = st.lists(
    st.lists(st.sampled_from(sorted(CALLS)), min_size=1, max_size=3), max_size=3
)
PAYLOADS = st.lists(
    st.sampled_from([APPROVE, {"approved": False}, {"answer": "the lamp"}, None]),
    max_size=6,
)
BUDGETS = (
    Budget(),
    Budget(max_tool_calls=2),
    Budget(max_iterations=2),
    Budget(max_calls_per_reply=2),
    Budget(max_result_tokens=1),
)


@tried(30)
@drawn(
    BATCHES,
    PAYLOADS,
    st.sampled_from(BUDGETS),
    st.booleans(),
    st.sampled_from(["So.", None]),
)
async def test_the_thread_always_stays_valid(
    batches: list[list[str]],
    payloads: list[object],
    budget: Budget,
    insists: bool,
    text: str | None,
) -> None:
    """Each stream keeps the protocol's order, and the conversation at the front end is one that servers accept."""
    begins = [calls(*(CALLS[name] for name in batch), text=text) for batch in batches]

    def script(request: ScriptedRequest) -> ScriptedReply:
        return begins.pop(0) if begins else say("Fine.")

    desk = Desk(script, budget=budget, require_final_answer_function=insists)
    given: dict[str, Any] = {"tools": [COLOUR]}
    run_input = desk.front.ask("Go.", **given)
    for _ in range(6):
        await desk.run(run_input, roles=["finance"])
        for call_id in desk.front.unanswered("set-colour") if desk.waiting else ():
            desk.front.send_result(call_id, "It is red.")
        answers = [payloads.pop() if payloads else None for _ in desk.front.interrupts]
        run_input = (
            desk.front.answer(*answers, **given)
            if desk.waiting
            else desk.front.ask("And?", **given)
        )
    assert (
        find_violation({"model": "any", "messages": desk.service.requests[-1].messages})
        is None
    )


def test_an_approval_binds_to_the_call_of_its_interrupt() -> None:
    """Also where it is taken later: a call that waits anew meanwhile has another fingerprint."""
    waiting = ToolCall(
        id="a", fully_qualified_name="shop-pay", arguments={}, fingerprint="f" * 64
    )
    entry = ResumeEntry(
        interrupt_id=waiting.fingerprint, status="resolved", payload={"approved": True}
    )
    assert decision_of(entry, waiting, "ann") == Approve(
        by="ann", fingerprint=waiting.fingerprint
    )
