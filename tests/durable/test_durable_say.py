"""What is said to a kept run: read once before its next request, kept while calls wait, refused after the end."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function

from planner_ext import Approve, Budget
from planner_ext.core.facts import (
    Ended,
    Fact,
    MessageAdded,
    ModelReplied,
    StopRequested,
)
from planner_ext.durable import Approvals, DecisionRequest, RunsClient
from planner_ext.durable.errors import NotAuthorizedError, RunFencedError, StoreError
from planner_ext.durable.inputs import said_line
from planner_ext.durable.store import opened_store
from planner_ext.durable.writer import JournalWriter
from planner_ext.errors import PlannerInvalidConfigurationError
from planner_ext.hitl_manager import ApprovalSettings
from planner_ext.iteration import AnswerContext
from planner_ext.sk.messages import load_message, text_of
from planner_ext.testing import (
    ScriptedChatCompletion,
    ScriptedReply,
    ScriptedRequest,
    call,
    say,
)
from planner_ext.testing.crash import kill
from support.durable import (
    GOAL,
    decide_all,
    effects_in,
    on_sqlite,
    open_runs,
    pays,
    planner_of,
    world,
)
from support.narrow import present
from support.planner import whole_text
from support.processes import Lives

TEXT = "The customer has moved to Oslo."


class Desk:
    """A function that says something to its own run, once."""

    def __init__(self) -> None:
        self.said = False
        self.speak: asyncio.Future[Callable[[], Awaitable[None]]] = asyncio.Future()

    @kernel_function(description="Looks a customer up.")
    async def look(self) -> str:
        speak = await self.speak
        if not self.said:
            self.said = True
            await speak()
        return "found"


def said_in(facts: Any) -> list[tuple[str, str]]:
    """List what was said, and by whom."""
    return [
        (text_of(load_message(fact.message)), fact.by)
        for fact in facts
        if isinstance(fact, MessageAdded) and fact.purpose == "said"
    ]


def desk(script: Any) -> tuple[Kernel, ScriptedChatCompletion, Desk]:
    """Make a kernel with the desk."""
    kernel = Kernel()
    service = ScriptedChatCompletion(script)
    plugin = Desk()
    kernel.add_service(service)
    kernel.add_plugin(plugin, "desk")
    return kernel, service, plugin


async def test_what_is_said_by_a_handle_is_in_the_next_request(store: str) -> None:
    """Once, by whoever said it, at no round trip of its own."""
    kernel, service, plugin = desk([call("desk-look"), say("Sent to Oslo.")])
    async with open_runs(store, poll_seconds=60) as runs:
        handle = await runs.start(planner_of(), kernel, GOAL, run_id="a")
        plugin.speak.set_result(lambda: handle.say(TEXT, by="ann"))
        result = await handle.result()
    assert (result.status, result.iterations) == ("answered", 2)
    assert said_in(result.facts) == [(TEXT, "ann")]
    assert TEXT not in whole_text(service.requests[0])
    assert whole_text(service.requests[-1]).count(TEXT) == 1


async def test_what_another_process_says_is_read_while_the_run_goes_on(
    store: str,
) -> None:
    """The worker finds it at its next look; each reply after that knows it."""

    def script(request: ScriptedRequest) -> ScriptedReply:
        known = TEXT in whole_text(request)
        return say("Sent to Oslo.") if known else call("desk-look")

    kernel, service, plugin = desk(script)
    planner = planner_of(max_iterations=None)
    async with (
        RunsClient.connect(store) as client,
        open_runs(store, poll_seconds=0.01) as runs,
    ):
        plugin.speak.set_result(lambda: client.say("a", TEXT, by="ann"))
        handle = await runs.start(planner, kernel, GOAL, run_id="a")
        result = await handle.result()
    assert (result.status, result.final_answer) == ("answered", "Sent to Oslo.")
    assert said_in(result.facts) == [(TEXT, "ann")]
    assert whole_text(service.requests[-1]).count(TEXT) == 1
    assert result.iterations == len(service.requests)


def speaking(store: str) -> Any:
    """Make a check of the answer that accepts all, and says something while it checks the first one."""

    async def check(answer: str, context: AnswerContext) -> str | None:
        if answer == "Done.":
            async with RunsClient.connect(store) as client:
                await client.say("a", TEXT)
        return None

    return check


async def test_an_answer_given_before_it_was_read_is_not_final(store: str) -> None:
    """Said just before the end it is read and answered, however slowly the worker looks for it."""
    kernel, service, _ = desk([say("Done."), say("Sent to Oslo.")])
    planner = planner_of(check_answer=speaking(store))
    async with open_runs(store, poll_seconds=60) as runs:
        handle = await runs.start(planner, kernel, GOAL, run_id="a")
        result = await handle.result()
    assert (result.status, result.final_answer) == ("answered", "Sent to Oslo.")
    assert said_in(result.facts) == [(TEXT, "")]
    assert len(service.requests) == result.iterations == 2
    assert sum(isinstance(fact, Ended) for fact in result.facts) == 1


async def test_while_a_call_waits_it_is_kept_and_shown_to_who_decides(
    store: str, tmp_path: Path
) -> None:
    """It voids no decision, wakes no run, and is read after the batch, once."""
    planner, kernel = world(tmp_path / "effects", pays)
    async with open_runs(store) as runs:
        handle = await runs.start(planner, kernel, GOAL, run_id="a")
        assert (await handle.result()).status == "paused"
        await handle.say(TEXT, by="ann")
        await runs.say("a", "Hurry.")
        stored = await runs.load("a")
        assert said_in(stored.facts) == []
        async with Approvals.connect(store) as approvals:
            (waiting,) = await approvals.pending()
            assert [(one.text, one.by) for one in waiting.said] == [
                (TEXT, "ann"),
                ("Hurry.", ""),
            ]
            shown = waiting.as_dict()["said"]
            assert [one["text"] for one in shown] == [TEXT, "Hurry."]
            assert await approvals.decide(waiting.id, Approve(by="bob"))
        result = await handle.result()
    assert result.status == "answered"
    assert effects_in(tmp_path / "effects") == ["pay 5"]
    kinds = [type(fact) for fact in result.facts]
    assert said_in(result.facts) == [(TEXT, "ann"), ("Hurry.", "")]
    last = len(kinds) - 1 - kinds[::-1].index(ModelReplied)
    assert kinds[last - 2 : last] == [MessageAdded, MessageAdded]


async def test_what_is_said_once_is_said_once(store: str, tmp_path: Path) -> None:
    """Whoever did not see the outcome may repeat it, at once or after the end; the same words are another message."""
    async with open_runs(store) as runs:
        await runs.submit(GOAL, run_id="r", tags=["nightly"])
        await asyncio.gather(*(runs.say("r", TEXT, once="first") for _ in range(5)))
        await runs.say("r", TEXT, once="second")
        (record,) = await runs.list(tag="first")
        assert record.tags == ("nightly", "first", "second")
        await runs.recover(*world(tmp_path / "effects", lambda _: say("Done.")))
        await runs.wait("r")
        await runs.say("r", TEXT, once="first")
        with pytest.raises(PlannerInvalidConfigurationError, match="has ended"):
            await runs.say("r", TEXT, once="third")
        with pytest.raises(StoreError, match="a tag must be"):
            await runs.say("r", TEXT, once="a\nb")
        facts = (await runs.load("r")).facts
    assert said_in(facts) == [(TEXT, "")] * 2


@on_sqlite
async def test_after_the_end_it_is_refused_by_name(store: str, tmp_path: Path) -> None:
    """Nothing is recorded; a name that is no run's, and a blank text, are refused, too."""
    planner, kernel = world(tmp_path / "effects", [say("Hello.")])
    async with open_runs(store) as runs:
        handle = await runs.start(planner, kernel, GOAL, run_id="a")
        await handle.result()
        before = await runs.load("a")
        with pytest.raises(Exception, match=r"'a' has ended \(answered\)"):
            await handle.say(TEXT)
        with pytest.raises(Exception, match="'b'"):
            await runs.say("b", TEXT)
        with pytest.raises(PlannerInvalidConfigurationError, match="text of a message"):
            await runs.say("a", " ")
        assert (await runs.load("a")).facts == before.facts


@on_sqlite
async def test_a_run_that_has_no_request_left_ends_with_it_unanswered(
    store: str,
) -> None:
    """It ends at the limit, with what was said as a fact; resumed with a larger budget, the model reads it."""
    kernel, service, _ = desk([say("Done."), say("Sent to Oslo.")])
    planner = planner_of(check_answer=speaking(store), max_iterations=1)
    async with open_runs(store, poll_seconds=60) as runs:
        handle = await runs.start(planner, kernel, GOAL, run_id="a")
        result = await handle.result()
        assert (result.status, result.iterations) == ("limit_reached", 1)
        assert said_in(result.facts) == [(TEXT, "")]
        larger = Budget(max_iterations=5)
        again = await runs.resume("a", planner, kernel, budget=larger)
        result = await again.result()
    assert (result.status, result.final_answer) == ("answered", "Sent to Oslo.")
    assert TEXT in whole_text(service.requests[-1])


@on_sqlite
async def test_cancelled_while_something_was_said(store: str, tmp_path: Path) -> None:
    """A run that waits is cancelled all the same; a further message is refused."""
    planner, kernel = world(tmp_path / "effects", pays)
    async with open_runs(store) as runs:
        handle = await runs.start(planner, kernel, GOAL, run_id="a")
        await handle.result()
        await handle.say(TEXT)
        assert await runs.cancel("a", by="ann")
        with pytest.raises(Exception, match=r"has ended \(stopped\)"):
            await handle.say(TEXT)


@on_sqlite
async def test_what_was_said_to_a_queued_run_is_in_its_first_request(
    store: str,
) -> None:
    """Submitted, spoken to, then driven; and read with the messages that it begins with."""
    kernel, service, _ = desk([say("Sent to Oslo.")])
    async with open_runs(store) as runs:
        submitted = await runs.submit(GOAL, run_id="a")
        await submitted.say(TEXT)
        for handle in await runs.recover(planner_of(), kernel):
            assert (await handle.result()).status == "answered"
    assert TEXT in whole_text(service.requests[0])


@on_sqlite
async def test_who_may_say_something_is_asked_of_the_hook(
    store: str, tmp_path: Path
) -> None:
    """The action is ``say``; a process without the hook is refused."""
    asked: list[str] = []

    def hook(request: DecisionRequest) -> bool:
        asked.append(request.action)
        return request.by == "ann"

    approval = ApprovalSettings(authorize=hook)
    planner, kernel = world(tmp_path / "effects", pays, approval=approval)
    async with open_runs(store) as runs:
        handle = await runs.start(planner, kernel, GOAL, run_id="a")
        await handle.result()
        await handle.say(TEXT, by="ann")
        with pytest.raises(NotAuthorizedError, match="'bob' may not write to run 'a'"):
            await handle.say(TEXT, by="bob")
        assert asked == ["say", "say"]
        with pytest.raises(NotAuthorizedError, match="lacks"):
            await runs.say("a", TEXT, by="ann")


async def test_said_by_many_at_once_it_is_all_read_in_order_of_the_store(
    store: str, tmp_path: Path
) -> None:
    """None is lost and none is doubled."""
    planner, kernel = world(tmp_path / "effects", pays)
    async with open_runs(store) as runs:
        handle = await runs.start(planner, kernel, GOAL, run_id="a")
        await handle.result()
        await asyncio.gather(*(handle.say(f"message {n}") for n in range(20)))
        await decide_all(store)
        result: Any = await handle.result()
    texts = [text for text, _ in said_in(result.facts)]
    assert sorted(texts) == sorted(f"message {n}" for n in range(20))


def killed_life(store: str, effects: Path, at: str) -> None:
    """Drive a run, and die once a fact of this type is recorded."""

    def die(fact: Fact) -> None:
        if fact.type == at:
            kill()

    async def drive() -> None:
        planner, kernel = world(effects, pays, observers=[die])
        async with open_runs(store) as runs:
            await (await runs.start(planner, kernel, GOAL, run_id="a")).result()

    asyncio.run(drive())


@pytest.mark.parametrize(
    "at", ["CallFinished", "IterationCompleted", "MessageAdded", "ModelReplied"]
)
async def test_it_is_read_exactly_once_over_a_death(
    at: str, lives: Lives, store: str, tmp_path: Path
) -> None:
    """Wherever the worker is killed around it, the next one has it once in the journal and in what is sent."""
    effects = tmp_path / "effects"
    planner, kernel = world(effects, pays)
    async with open_runs(store) as runs:
        handle = await runs.start(planner, kernel, GOAL, run_id="a")
        await handle.result()
        await handle.say(TEXT, by="ann")
    await decide_all(store)
    assert lives.live(killed_life, store, effects, at) == -9
    async with open_runs(store, poll_seconds=0.01) as runs:
        handle = await runs.start(*world(effects, pays), GOAL, run_id="a")
        result = await handle.result()
        while result.status == "paused":
            await decide_all(store)
            result = await handle.result()
    assert result.status == "answered"
    assert said_in(result.facts) == [(TEXT, "ann")]
    texts = [str(message) for message in present(result.chat_history).messages]
    assert texts.count(TEXT) == 1
    assert effects_in(effects) == ["pay 5"]


async def test_a_worker_that_reads_it_a_second_time_is_fenced(
    store: str, tmp_path: Path
) -> None:
    """One that still holds a message which another life took records nothing."""
    planner, kernel = world(tmp_path / "effects", pays)
    async with open_runs(store) as runs:
        handle = await runs.start(planner, kernel, GOAL, run_id="a")
        await handle.result()
        await handle.say(TEXT)
    async with opened_store(store) as opened:
        facts = (await opened.load("a")).facts
        writer = JournalWriter(opened, "a", facts)
        writer.budget.say(said_line(TEXT, by="", at=0.0))
        assert writer.budget.next_message() == (TEXT, "")
        stopped = StopRequested(reason="enough", at=0.0)
        with pytest.raises(RunFencedError):
            await writer.append("a", len(facts), (stopped,))
        assert (await opened.load("a")).facts == facts
