"""Prompts that fail, are cancelled, left early or made twice at once: what stays, and that the session continues."""

import asyncio
from contextlib import aclosing

import pytest
from semantic_kernel.contents import ChatHistory

from planner_ext.errors import ServiceCallError, SessionBusyError
from planner_ext.session import ToolUseSession
from planner_ext.sk.chat.history import check_history
from planner_ext.testing import ScriptedChatCompletion, ScriptedFault, call, calls, say
from support.session import OPEN, Talks, Tools, kernel_of, served, shape
from support.values import each_of

ADD = call("t-add", {"a": 1, "b": 2})


@each_of("config", [OPEN, None], ids=["open", "closed"])
async def test_a_prompt_whose_request_fails_leaves_no_trace(
    talk: Talks, config
) -> None:
    """Nothing was done, so nothing is kept: the same prompt can be made again."""
    options = {} if config is None else {"config": config}
    talking = talk([RuntimeError("connection lost"), say("Here.")], **options)
    with pytest.raises(ServiceCallError):
        await talking.ask("Are you there?")
    assert talking.shape == []
    assert await talking.ask("Are you there?") == "Here."
    assert talking.shape == [("user", "Are you there?"), ("assistant", "Here.")]


async def test_a_prompt_that_fails_after_calls_keeps_them(talk: Talks) -> None:
    """What functions did is not forgotten: ``prompt()`` continues from their results, and none runs again."""
    talking = talk([ADD, RuntimeError("connection lost"), say("3.")])
    with pytest.raises(ServiceCallError):
        await talking.ask("?")
    assert [role for role, _ in talking.shape] == ["user", "assistant", "tool"]
    assert await talking.ask() == "3."
    assert talking.tools.seen == [(1, 2)]


async def test_a_failure_over_http(streamed: bool) -> None:
    """A dropped connection in mid-reply leaves a session that a strict server takes."""
    script = [ADD, ScriptedFault(drop=True), say("3.")]
    async with served(script, Tools()) as (kernel, server):
        session = ToolUseSession(kernel)
        with pytest.raises(ServiceCallError):
            await collected(session, "?", streamed=streamed)
        assert await collected(session, None, streamed=streamed) == "3."
        assert server.refused == []


async def test_a_cancelled_prompt_answers_every_call(talk: Talks) -> None:
    """A call that was running is in doubt, its siblings' results stand, and the session continues."""
    talking = talk([calls(ADD, call("t-wait")), say("Sorry.")])
    asking = asyncio.ensure_future(talking.ask("?"))
    await talking.tools.started.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    check_history(talking.session.history().messages)
    assert talking.shape[2] == ("tool", "call_1=3")
    assert talking.shape[3][1].startswith("call_2=Cancelled while it ran")
    assert await talking.ask("What happened?") == "Sorry."


async def test_a_stream_that_is_left_while_functions_run_answers_every_call() -> None:
    """Leaving it cancels what runs, and waits for that."""
    tools = Tools()
    script = [calls(call("t-wait"), text="One moment."), say("Sorry.")]
    session = ToolUseSession(
        kernel_of(ScriptedChatCompletion(script, chunk_size=100), tools)
    )
    async with aclosing(session.prompt_streaming("?")) as stream:
        async for piece in stream:
            assert piece == "One moment."
            await tools.started.wait()
            break
    assert [role for role, _ in shape(session.history())] == [
        "user",
        "assistant",
        "tool",
    ]
    assert await session.prompt("What happened?") == "Sorry."


async def test_a_stream_that_is_left_before_any_call_leaves_no_trace() -> None:
    """A reply that was not heard to the end is not in the history, nor is its question."""
    session = ToolUseSession(
        kernel_of([say("A long answer, in many pieces."), say("Short.")])
    )
    async with aclosing(session.prompt_streaming("?")) as stream:
        await anext(stream)
    assert len(session.history()) == 0
    assert await session.prompt("?") == "Short."


async def test_a_prompt_right_after_a_stream_was_left_waits_for_its_end() -> None:
    """``break`` is enough: the stream that has lost its reader is closed first."""
    session = ToolUseSession(
        kernel_of([say("A long answer, in many pieces."), say("Short.")])
    )
    async for _ in session.prompt_streaming("?"):
        break
    assert await session.prompt("?") == "Short."
    assert shape(session.history()) == [("user", "?"), ("assistant", "Short.")]


async def test_an_unread_stream_does_nothing() -> None:
    """A prompt begins when its stream is first read."""
    session = ToolUseSession(kernel_of([say("Yes.")]))
    stream = session.prompt_streaming("?")
    assert await session.prompt("Now?") == "Yes."
    await stream.aclose()
    assert len(session.history()) == 2


async def test_a_second_prompt_meanwhile_is_refused(talk: Talks) -> None:
    """One prompt at a time; the refused one sends and changes nothing, and the first one continues."""
    talking = talk([call("t-wait"), say("Waited.")])
    asking = asyncio.ensure_future(talking.ask("?"))
    await talking.tools.started.wait()
    with pytest.raises(SessionBusyError, match="one prompt at a time"):
        await talking.ask("Are you done?")
    with pytest.raises(SessionBusyError):
        talking.session.append("Are you done?")
    assert len(talking.session.history()) == 0
    talking.tools.go_on.set()
    assert await asking == "Waited."
    assert talking.requests == 2


async def test_a_stream_that_is_still_held_refuses_a_prompt() -> None:
    """Half read and not closed, it is still the prompt being answered; once closed, the session is free."""
    session = ToolUseSession(
        kernel_of([say("A long answer, in many pieces."), say("Short.")])
    )
    stream = session.prompt_streaming("?")
    await anext(stream)
    with pytest.raises(SessionBusyError, match="close its stream"):
        await session.prompt("?")
    await stream.aclose()
    assert await session.prompt("?") == "Short."


async def test_sessions_of_one_kernel_do_not_meet(talk: Talks) -> None:
    """Each session is a conversation of its own, however many are answered at once."""
    tools = Tools()
    kernel = kernel_of([*[call("t-wait")] * 2, *[say("Done.")] * 2], tools)
    first, second = ToolUseSession(kernel), ToolUseSession(kernel)
    asking = [
        asyncio.ensure_future(each.prompt(text))
        for each, text in ((first, "One?"), (second, "Two?"))
    ]
    await tools.started.wait()
    tools.go_on.set()
    assert await asyncio.gather(*asking) == ["Done.", "Done."]
    assert [shape(each.history())[0][1] for each in (first, second)] == ["One?", "Two?"]


async def collected(
    session: ToolUseSession, prompt: str | None, *, streamed: bool
) -> str:
    """Ask plain or streamed."""
    if not streamed:
        return await session.prompt(prompt)
    return "".join([piece async for piece in session.prompt_streaming(prompt)])


async def test_a_history_may_begin_another_session(talk: Talks) -> None:
    """What `history()` gives, also as JSON, is what a session can begin with."""
    talking = talk([ADD, say("3."), say("You asked for a sum.")])
    await talking.ask("?")
    restored = ChatHistory.restore_chat_history(talking.session.history().serialize())
    again = ToolUseSession(kernel_of(talking.service), initial_prompts=restored)
    assert shape(again.history()) == talking.shape
    assert await again.prompt("What did I ask?") == "You asked for a sum."
