"""What a run does on its way to an answer: plan, steps, final answer."""

from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.contents import ChatHistory

from planner_ext import Budget
from planner_ext.errors import InvalidHistoryError
from planner_ext.testing import ScriptedChatCompletion, ScriptedReply, call, calls, say
from support.planner import (
    ADD,
    FINAL_ANSWER,
    GOAL,
    PLAN,
    Math,
    both_ways,
    check_sendable,
    final,
    invoke,
    kernel_of,
    never_stops,
    openai_kernel,
    planner_with,
    scripted,
    texts,
    whole_text,
)
from support.stock import first_result
from support.values import each_of


@both_ways
async def test_a_goal_is_planned_worked_on_and_answered(streamed: bool) -> None:
    """A run asks for a plan, calls functions, takes the final answer, and reports what the server saw."""
    math = Math()
    async with openai_kernel([PLAN, ADD, final()], math=math) as (kernel, server):
        result = await invoke(planner_with("chat"), kernel, streamed=streamed)
        plan, step, last = server.requests

    assert result.status == "answered"
    assert result.final_answer == "It is 3."
    assert result.plan == "1. Add 1 and 2."
    assert result.iterations == 3
    assert result.tool_calls == 1
    assert result.limit is None
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (
        server.prompt_tokens,
        server.completion_tokens,
    )
    assert math.sums == [(1, 2)]
    assert [request.stream for request in server.requests] == [streamed] * 3
    assert (plan.tools, sorted(step.tools)) == (
        (),
        [FINAL_ANSWER, "math-add", "math-fail"],
    )
    assert [role for role, _ in texts(step)] == ["system", "user"]
    assert "1. Add 1 and 2." in whole_text(step)
    assert [role for role, _ in texts(last)] == ["system", "user", "assistant", "tool"]
    assert result.raise_for_status() is result


@both_ways
async def test_the_history_of_a_run_ends_with_its_answer_and_can_be_sent(
    streamed: bool,
) -> None:
    """The result's history has the opening, every pair of call and result, and the answer, and OpenAI would take it."""
    kernel, _ = scripted([PLAN, ADD, final()])
    result = await invoke(planner_with(), kernel, streamed=streamed)

    check_sendable(result.chat_history)
    assert result.chat_history is not None
    roles = [message.role.value for message in result.chat_history.messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "tool"]


async def test_a_plain_answer_is_the_last_message_of_the_history() -> None:
    """The planner stores the final answer too."""
    kernel, _ = scripted([PLAN, ADD, say("It is 3.")])
    result = await invoke(planner_with(), kernel)

    assert (result.status, result.final_answer) == ("answered", "It is 3.")
    assert result.chat_history is not None
    assert result.chat_history.messages[-1].content == "It is 3."


async def test_without_a_plan_the_goal_is_all_that_is_said() -> None:
    """With plan=False the run has neither a plan request nor a system message nor functions of the planner."""
    kernel, service = scripted([ADD, say("It is 3.")])
    result = await invoke(planner_with(plan=False), kernel)

    first, _ = service.requests
    assert texts(first) == [("user", GOAL)]
    assert first.tools == ("math-add", "math-fail")
    assert result.status == "answered"
    assert result.final_answer == "It is 3."
    assert result.iterations == 2


async def test_a_text_is_taken_as_the_plan() -> None:
    """With a plan given no plan is asked for, and the steps open with it."""
    kernel, service = scripted([ADD, final()])
    result = await invoke(planner_with(plan="1. Look at the moon."), kernel)

    assert "1. Look at the moon." in whole_text(service.requests[0])
    assert FINAL_ANSWER in service.requests[0].tools
    assert (result.status, result.iterations) == ("answered", 2)


async def test_a_plan_that_was_made_can_be_used_again() -> None:
    """``plan=result.plan`` opens the steps with the same messages as the run that made it."""
    kernel, service = scripted([PLAN, final()])
    made = await invoke(planner_with(), kernel)
    again_kernel, again = scripted([final()])
    await invoke(planner_with(plan=made.plan), again_kernel)

    assert texts(again.requests[0]) == texts(service.requests[1])


def earlier_conversation() -> ChatHistory:
    history = ChatHistory(system_message="Be brief.")
    history.add_user_message("Are you there?")
    history.add_assistant_message("Yes.")
    return history


@both_ways
async def test_a_given_history_is_continued(streamed: bool) -> None:
    """With plan=False the goal is added to a copy of the history, and nothing else is."""
    history = earlier_conversation()
    before = history.model_dump_json()
    kernel, service = scripted([say("It is 3.")])
    result = await invoke(
        planner_with(plan=False), kernel, streamed=streamed, chat_history=history
    )

    assert texts(service.requests[0]) == [
        ("system", "Be brief."),
        ("user", "Are you there?"),
        ("assistant", "Yes."),
        ("user", GOAL),
    ]
    assert history.model_dump_json() == before
    assert result.chat_history is not history
    assert result.chat_history is not None
    assert [message.content for message in result.chat_history.messages[3:]] == [
        GOAL,
        "It is 3.",
    ]


async def test_no_plan_is_asked_for_where_a_history_is_given() -> None:
    """A run that continues a history makes no plan request; it still offers the final-answer function."""
    kernel, service = scripted([final()])
    result = await invoke(planner_with(), kernel, chat_history=earlier_conversation())

    (request,) = service.requests
    assert FINAL_ANSWER in request.tools
    assert (result.status, result.iterations) == ("answered", 1)


async def test_a_given_plan_is_followed_where_a_history_is_given_too() -> None:
    """A plan that the caller wrote is not silently dropped because there is a history."""
    kernel, service = scripted([final()])
    planner = planner_with(plan="1. Look at the moon.")
    await invoke(planner, kernel, chat_history=earlier_conversation())

    assert "1. Look at the moon." in whole_text(service.requests[0])


@both_ways
async def test_a_history_that_may_not_be_sent_is_refused(streamed: bool) -> None:
    """A history with an unanswered call is refused by id before anything is sent."""
    kernel, service = scripted([ADD])
    left = await invoke(
        planner_with(
            plan=False, max_iterations=1, budget=Budget(on_limit="return_calls")
        ),
        kernel,
        streamed=streamed,
    )
    assert left.chat_history is not None

    with pytest.raises(InvalidHistoryError, match="call_1"):
        await invoke(
            planner_with(plan=False),
            kernel,
            streamed=streamed,
            chat_history=left.chat_history,
        )
    assert len(service.requests) == 1


async def test_a_history_is_repaired_on_request_and_in_the_copy_only() -> None:
    """``on_invalid_history="repair"`` answers the open call in what is sent, and leaves the caller's history alone."""
    kernel, service = scripted([ADD, say("It is 3.")])
    left = await invoke(
        planner_with(
            plan=False, max_iterations=1, budget=Budget(on_limit="return_calls")
        ),
        kernel,
    )
    assert left.chat_history is not None
    before = left.chat_history.model_dump_json()

    planner = planner_with(plan=False, on_invalid_history="repair")
    result = await invoke(planner, kernel, chat_history=left.chat_history)

    assert [role for role, _ in texts(service.requests[1])] == [
        "user",
        "assistant",
        "tool",
        "user",
    ]
    assert result.status == "answered"
    assert left.chat_history.model_dump_json() == before


@each_of(
    "batch",
    [(final(), ADD), (ADD, final()), (ADD, final(), ADD)],
    ids=["first", "last", "mid"],
)
async def test_calls_beside_a_final_answer_do_not_run(
    batch: tuple[ScriptedReply, ...],
) -> None:
    """The final answer is taken, the calls beside it are answered as not executed, and no further request is made."""
    math = Math()
    async with openai_kernel([PLAN, calls(*batch)], math=math) as (kernel, server):
        result = await invoke(planner_with(), kernel)

    assert (result.status, result.final_answer) == ("answered", "It is 3.")
    assert len(server.requests) == 2
    assert result.tool_calls == 0
    assert math.sums == []
    check_sendable(result.chat_history)
    assert result.chat_history is not None
    answers = [
        str(first_result(message).result)
        for message in result.chat_history.messages[-len(batch) :]
    ]
    assert sum("Not executed" in answer for answer in answers) == len(batch) - 1


@each_of(
    "arguments",
    [
        {},
        "{not json",
        {"answer": None},
        {"answer": ["It", "is", 3]},
        {"text": "It is 3."},
    ],
    ids=["missing", "no-json", "null", "list", "other-name"],
)
async def test_a_malformed_final_answer_is_asked_for_again(arguments: Any) -> None:
    """A final answer that cannot be read is answered with what is wrong, and the model hands it over again."""
    kernel, service = scripted([PLAN, call(FINAL_ANSWER, arguments), final()])
    result = await invoke(planner_with(), kernel)

    assert result.status == "answered"
    assert result.final_answer == "It is 3."
    assert result.iterations == 3
    assert "UserInteraction-SendFinalAnswer" in str(
        service.requests[2].messages[-1]["content"]
    )


async def test_final_answers_that_stay_malformed_stay_within_the_budget() -> None:
    """A model that never gets its final answer right makes no more requests than allowed; the last asks for text."""
    async with openai_kernel(
        lambda r: call(FINAL_ANSWER, "{") if r.tools else say("It is 3.")
    ) as (kernel, server):
        result = await invoke(planner_with(max_iterations=4), kernel)

    assert (len(server.requests), result.iterations) == (4, 4)
    assert (result.status, result.final_answer) == ("limit_reached", "It is 3.")


async def test_the_final_answer_function_can_be_insisted_on() -> None:
    """With require_final_answer_function a plain reply does not end the run: the model is asked again, and calls it."""
    kernel, service = scripted([say("I think it is 3."), final()])
    planner = planner_with(plan=False, require_final_answer_function=True)
    result = await invoke(planner, kernel)

    assert result.status == "answered"
    assert result.final_answer == "It is 3."
    assert result.iterations == 2
    role, content = texts(service.requests[1])[-1]
    assert role == "user"
    assert FINAL_ANSWER in str(content)


async def test_insisting_ends_at_the_limit() -> None:
    """A model that only talks is asked again until the last trip, whose reply is the forced answer."""
    async with openai_kernel(lambda _: say("Hm.")) as (kernel, server):
        planner = planner_with(
            plan=False, require_final_answer_function=True, max_iterations=3
        )
        result = await invoke(planner, kernel)

    assert len(server.requests) == 3
    assert result.status == "limit_reached"
    assert result.final_answer == "Hm."


async def test_use_attempts_takes_one_tool_round_per_step() -> None:
    """With control="use_attempts" the plain reply after a tool round closes the step, and does not answer the run."""
    async with openai_kernel(
        [PLAN, ADD, say("Step 1 done."), ADD, say("Step 2 done."), final()]
    ) as (kernel, server):
        result = await invoke(planner_with(control="use_attempts"), kernel)

    assert [bool(request.tools) for request in server.requests] == [
        False,
        True,
        False,
        True,
        False,
        True,
    ]
    assert result.status == "answered"
    assert result.final_answer == "It is 3."
    assert result.iterations == 6


async def test_under_use_attempts_a_plain_reply_to_an_offer_is_the_answer() -> None:
    """A reply without calls is the answer where functions were offered, and the close of a step where they were not."""
    kernel, service = scripted([PLAN, ADD, say("Step done."), say("It is 3.")])
    result = await invoke(planner_with(control="use_attempts"), kernel)

    assert (result.status, result.final_answer) == ("answered", "It is 3.")
    assert len(service.requests) == 4


async def test_a_refused_call_closes_the_chain() -> None:
    """With control="pre_invoke" tool rounds chain until the callback refuses; then text is asked for, as the answer."""
    async with openai_kernel(never_stops) as (kernel, server):
        planner = planner_with(
            plan=False, control="pre_invoke", pre_invoke=lambda trip, *_: trip < 3
        )
        result = await invoke(planner, kernel)

    assert [bool(request.tools) for request in server.requests] == [
        True,
        True,
        True,
        False,
    ]
    assert result.status == "answered"
    assert result.final_answer == "Enough."
    assert result.limit is None
    assert result.tool_calls == 2


async def test_no_message_names_a_function_that_is_not_offered() -> None:
    """Where the final-answer function is not offered, no message of the planner's asks the model to call it."""
    kernel, service = scripted([ADD, say("Step done."), say("It is 3.")])
    result = await invoke(planner_with(plan=False, control="use_attempts"), kernel)

    assert result.status == "answered"
    assert all(FINAL_ANSWER not in request.tools for request in service.requests)
    assert all(FINAL_ANSWER not in whole_text(request) for request in service.requests)


@both_ways
@each_of(
    "reply",
    [
        ScriptedReply(text="It is", finish_reason="length"),
        ScriptedReply(text="It is", finish_reason="content_filter"),
        ScriptedReply(calls=ADD.calls, finish_reason="length"),
        ScriptedReply(),
        ScriptedReply(text=""),
    ],
    ids=["length", "filter", "half-a-call", "nothing", "empty"],
)
async def test_a_reply_that_is_not_whole_is_incomplete(
    reply: ScriptedReply, streamed: bool
) -> None:
    """A reply that was cut short, or that is empty, ends the run incomplete, and none of its calls run."""
    math = Math()
    kernel = kernel_of(ScriptedChatCompletion([PLAN, reply]), math=math)
    result = await invoke(planner_with(), kernel, streamed=streamed)

    assert result.status == "incomplete"
    assert result.final_answer == ""
    assert math.sums == []
    check_sendable(result.chat_history)


async def test_an_empty_kernel_reaches_no_limit() -> None:
    """Without any function the reply is the answer, also on the only trip."""
    kernel = Kernel()
    kernel.add_service(ScriptedChatCompletion([say("It is 3.")]))
    result = await invoke(planner_with(plan=False, max_iterations=1), kernel)

    assert result.status == "answered"
    assert result.final_answer == "It is 3."
    assert result.limit is None
