"""A final answer is checked by the application before it is final, at every door and within the budget."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_choice_behavior import (
    FunctionChoiceBehavior,
)
from semantic_kernel.connectors.ai.prompt_execution_settings import (
    PromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory

from planner_ext import (
    Budget,
    FunctionInvokingChatCompletion,
    ToolCallHandler,
    ToolUseSession,
)
from planner_ext.errors import (
    AnswerCheckError,
    PlannerInvalidConfigurationError,
    RunRefusedError,
)
from planner_ext.events import AnswerChecked, TextDelta
from planner_ext.iteration import AnswerContext
from planner_ext.testing import ScriptedChatCompletion, ScriptedReply, say
from support.durable import open_runs, planner_of
from support.planner import (
    ADD,
    both_ways,
    drained,
    final,
    invoke,
    kernel_of,
    planner_with,
    result_in,
    resume,
    scripted,
    whole_text,
)

BAD = say("It is 4.")
GOOD = say("It is 3.")
REASON = "1 + 2 is not 4."
AUTO = PromptExecutionSettings(function_choice_behavior=FunctionChoiceBehavior.Auto())


def right(answer: str, context: AnswerContext) -> str | None:
    """Accept an answer that names 3."""
    return None if "3" in answer else REASON


async def right_by_a_person(answer: str, context: AnswerContext) -> str | None:
    """Ask somebody, who takes a while."""
    await asyncio.sleep(0)
    return right(answer, context)


@both_ways
@pytest.mark.parametrize("check", [right, right_by_a_person])
async def test_a_refused_answer_goes_back_with_the_reason(
    check: Any, streamed: bool
) -> None:
    """The model reads the reason, may call functions again, and each refusal costs its round trip and nothing else."""
    kernel, service = scripted([BAD, ADD, GOOD])
    planner = planner_with(plan=False, check_answer=check)
    result = await invoke(planner, kernel, streamed=streamed)
    assert (result.status, result.final_answer) == ("answered", GOOD.text)
    assert result.iterations == len(service.requests) == 3
    assert result.tool_calls == 1
    assert REASON in whole_text(service.requests[1])
    assert all(request.tools for request in service.requests)


async def test_a_stream_says_which_text_was_refused() -> None:
    """The fact has the text and the reason, and comes before the first piece of the next reply."""
    kernel, _ = scripted([BAD, GOOD])
    planner = planner_with(plan=False, check_answer=right)
    events = await drained(planner.invoke_stream(kernel, "goal"))
    kinds = (TextDelta, AnswerChecked)
    shown = [
        f"{event.iteration}: {event.text}"
        if isinstance(event, TextDelta)
        else (event.answer, event.problem)
        for event in events
        if isinstance(event, kinds) and getattr(event, "text", "-")
    ]
    assert shown.index(("It is 4.", REASON)) < next(
        place for place, one in enumerate(shown) if str(one).startswith("1: ")
    )
    assert shown[-1] == (GOOD.text, "")
    assert result_in(events).final_answer == GOOD.text


@pytest.mark.parametrize("on_limit", ["answer", "stop", "return_calls"])
async def test_an_answer_that_was_refused_is_never_answered(on_limit: Any) -> None:
    """Where no round trip is left, the run ends at the limit with the refused answer and the reason."""
    kernel, service = scripted([BAD, BAD])
    budget = Budget(max_iterations=2, on_limit=on_limit)
    planner = planner_with(plan=False, budget=budget, check_answer=right)
    result = await invoke(planner, kernel)
    assert (result.status, result.limit) == ("limit_reached", "max_iterations")
    assert result.final_answer == BAD.text
    assert REASON in result.reason
    assert len(service.requests) == 2


async def test_a_forced_answer_is_checked() -> None:
    """The reason says whether the answer at the limit passed."""
    reasons: list[str] = []
    for forced in (BAD, GOOD):
        kernel, _ = scripted([ADD, forced])
        planner = planner_with(plan=False, max_iterations=2, check_answer=right)
        result = await invoke(planner, kernel)
        assert (result.status, result.final_answer) == ("limit_reached", forced.text)
        reasons.append(result.reason)
    assert [REASON in reason for reason in reasons] == [True, False]


async def test_without_a_limit_an_answer_is_refused_ten_times() -> None:
    """Then the run ends incomplete, with the answer and the reason."""
    kernel, service = scripted(lambda _: BAD)
    planner = planner_with(plan=False, max_iterations=None, check_answer=right)
    result = await invoke(planner, kernel)
    assert result.status == "incomplete"
    assert REASON in result.reason
    assert len(service.requests) == 11


@pytest.mark.parametrize("control", ["iterations_metadata", "use_attempts"])
async def test_an_answer_by_function_is_checked(control: Any) -> None:
    """A refused one is handed over anew, by the same function."""
    kernel, service = scripted([final("4"), final("3")])
    planner = planner_with(
        plan=False,
        control=control,
        require_final_answer_function=True,
        check_answer=right,
    )
    result = await invoke(planner, kernel)
    assert (result.status, result.final_answer) == ("answered", "3")
    assert len(service.requests) == 2


async def test_under_use_attempts_a_refusal_begins_a_step() -> None:
    """Functions are offered again, and the next plain reply is the answer."""
    kernel, _ = scripted([ADD, say("Added."), BAD, ADD, say("Added."), GOOD])
    planner = planner_with(plan=False, control="use_attempts", check_answer=right)
    result = await invoke(planner, kernel)
    assert (result.status, result.final_answer) == ("answered", GOOD.text)


class Sum(BaseModel):
    """The answer's form."""

    total: int


async def test_a_check_reads_the_answer_in_its_form() -> None:
    """An answer out of its form is no concern of the check; then it gets the value, and what was refused before."""
    seen: list[AnswerContext] = []

    def check(answer: str, context: AnswerContext) -> str | None:
        seen.append(context)
        return None if context.value.total == 3 else REASON

    kernel, service = scripted(
        [say("prose"), say('{"total": 4}'), ADD, say('{"total": 3}')]
    )
    planner = planner_with(plan=False, response_format=Sum, check_answer=check)
    result = await invoke(planner, kernel, "the goal")
    assert (result.status, result.value) == ("answered", Sum(total=3))
    assert [context.value for context in seen] == [Sum(total=4), Sum(total=3)]
    assert [context.refusals for context in seen] == [1, 2]
    assert [context.total_usage.iterations for context in seen] == [2, 4]
    assert {context.goal for context in seen} == {"the goal"}
    assert str(seen[0].chat_history.messages[-1]) == '{"total": 4}'
    offered = [bool(request.tools) for request in service.requests]
    assert offered == [True, False, True, True]


@both_ways
async def test_a_check_that_raises_ends_the_run_by_name(streamed: bool) -> None:
    """The answer is not accepted; with the check mended the run ends with it, without a further request."""

    def broken(answer: str, context: AnswerContext) -> str | None:
        raise LookupError("no table")

    kernel, service = scripted([GOOD])
    planner = planner_with(plan=False, check_answer=broken)
    with pytest.raises(AnswerCheckError, match="LookupError: no table") as caught:
        await invoke(planner, kernel, streamed=streamed)
    mended = planner_with(plan=False, check_answer=right)
    result = await resume(mended, kernel, caught.value.checkpoint)
    assert (result.status, result.final_answer) == ("answered", GOOD.text)
    assert len(service.requests) == 1


@pytest.mark.parametrize("given", [True, False, 3])
async def test_what_is_no_reason_is_a_named_error(given: Any) -> None:
    """True and False are refused: neither says whether the answer passed."""
    kernel, _ = scripted([GOOD])
    planner = planner_with(plan=False, check_answer=lambda answer, context: given)
    with pytest.raises(AnswerCheckError, match=f"it returned {given}"):
        await invoke(planner, kernel)


async def test_a_check_that_hangs_is_interrupted_by_the_time_limit() -> None:
    """The run ends at the limit with the answer, which was not accepted."""

    async def hangs(answer: str, context: AnswerContext) -> str | None:
        await asyncio.Event().wait()
        raise AssertionError("not reached")

    kernel, _ = scripted([GOOD])
    budget = Budget(max_active_seconds=0.2)
    planner = planner_with(plan=False, budget=budget, check_answer=hangs)
    result = await invoke(planner, kernel)
    assert (result.status, result.limit) == ("limit_reached", "max_active_seconds")
    assert result.final_answer == GOOD.text
    assert "The check of the answer was interrupted" in result.reason


async def test_a_run_is_not_resumed_without_its_check() -> None:
    """A checkpoint does not hold it: without it the run is refused by name, before a request."""
    kernel, service = scripted([BAD, RuntimeError("no line"), GOOD])
    planner = planner_with(plan=False, check_answer=right)
    with pytest.raises(Exception, match="no line") as caught:
        await invoke(planner, kernel)
    error: Any = caught.value
    with pytest.raises(PlannerInvalidConfigurationError, match="check_answer"):
        await resume(planner_with(plan=False), kernel, error.checkpoint)
    assert len(service.requests) == 2
    result = await resume(planner, kernel, error.checkpoint)
    assert (result.status, result.final_answer) == ("answered", GOOD.text)


def served(
    replies: Sequence[ScriptedReply], **options: Any
) -> tuple[FunctionInvokingChatCompletion, Kernel]:
    service = FunctionInvokingChatCompletion(
        ScriptedChatCompletion(replies), check_answer=right, **options
    )
    return service, kernel_of(service)


async def test_a_service_returns_the_answer_that_passed() -> None:
    """The refused answer and the reason are in the caller's history, the accepted one is returned."""
    service, kernel = served([BAD, GOOD])
    history = ChatHistory()
    history.add_user_message("goal")
    message = await service.get_chat_message_content(history, AUTO, kernel=kernel)
    assert message is not None
    assert str(message) == GOOD.text
    assert message.metadata["status"] == "answered"
    assert message.metadata["iterations"] == 2
    assert [str(one.role.value) for one in history.messages] == [
        "user",
        "assistant",
        "user",
    ]
    assert REASON in str(history.messages[-1])


async def test_a_services_stream_says_which_text_was_refused() -> None:
    """A chunk without text has it in its metadata, between the two replies."""
    service, kernel = served([BAD, GOOD])
    history = ChatHistory()
    history.add_user_message("goal")
    stream = service.get_streaming_chat_message_contents(history, AUTO, kernel=kernel)
    chunks = [chunk async for group in stream for chunk in group]
    (refused,) = [chunk for chunk in chunks if "refused_answer" in chunk.metadata]
    assert refused.metadata["refused_answer"] == BAD.text
    assert refused.metadata["reason"] == REASON
    place = chunks.index(refused)
    assert "".join(map(str, chunks[:place])) == BAD.text
    assert "".join(map(str, chunks[place:])) == GOOD.text


async def test_a_handler_checks_the_answer() -> None:
    """Its last message is the answer that passed."""
    kernel = kernel_of(ScriptedChatCompletion([BAD, GOOD]))
    handler = ToolCallHandler(kernel, check_answer=right)
    history = ChatHistory()
    history.add_user_message("goal")
    messages = [message async for message in handler.invoke(history)]
    assert str(messages[-1]) == GOOD.text


async def test_a_session_checks_the_answer() -> None:
    """The text of the prompt's answer is the one that passed."""
    kernel = kernel_of(ScriptedChatCompletion([BAD, GOOD]))
    session = ToolUseSession(kernel, check_answer=right)
    assert await session.prompt("goal") == GOOD.text


async def test_the_checks_of_a_door_and_of_its_service_are_both_asked() -> None:
    """A planner over a service that checks answers takes no answer that either refuses."""

    def polite(answer: str, context: AnswerContext) -> str | None:
        return None if "please" in answer else "Be polite."

    last = say("It is 3, please.")
    service, kernel = served([BAD, GOOD, say("It is 4, please."), last])
    planner = planner_with(plan=False, check_answer=polite)
    result = await invoke(planner, kernel)
    assert (result.status, result.final_answer) == ("answered", last.text)
    refused = [
        fact.problem
        for fact in result.facts
        if isinstance(fact, AnswerChecked) and fact.problem
    ]
    assert refused == ["Be polite.", "Be polite.", REASON]
    assert isinstance(service.inner, ScriptedChatCompletion)


async def test_a_kept_run_whose_check_raises_fails_at_once(tmp_path: Path) -> None:
    """No retry asks it again; resumed with a mended one, the run ends with the answer it had."""
    asked: list[str] = []

    def check(answer: str, context: AnswerContext) -> str | None:
        asked.append(answer)
        if len(asked) == 1:
            raise LookupError("no table")
        return None

    service = ScriptedChatCompletion([GOOD])
    async with open_runs(tmp_path / "runs.db") as runs:
        planner = planner_of(check_answer=check)
        handle = await runs.start(planner, kernel_of(service), "goal", run_id="a")
        with pytest.raises(AnswerCheckError, match="no table"):
            await handle.result()
        assert (await runs.load("a")).record.status == "failed"
        assert len(asked) == 1
        with pytest.raises(RunRefusedError, match="check_answer hook"):
            await (await runs.resume("a", planner_of(), kernel_of(service))).result()
        again = await runs.resume("a", planner, kernel_of(service))
        assert (await again.result()).final_answer == GOOD.text
    assert len(service.requests) == 1
