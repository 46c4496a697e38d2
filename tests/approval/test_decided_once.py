"""A checkpoint that is resumed twice: one planner, service or handler object takes a decision on a call once."""

import asyncio
import copy
import pickle
from contextlib import aclosing
from typing import Any

import pytest
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function

from planner_ext import (
    Approve,
    Budget,
    Deny,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    FunctionInvokingChatCompletion,
    ToolCallHandler,
)
from planner_ext.approval.policy import ApprovalPolicy
from planner_ext.errors import DecisionRefusedError, ServiceCallError
from planner_ext.hitl_manager import ApprovalSettings, Checkpoint, Defer, Supply
from planner_ext.sk import checkpoint as taken
from planner_ext.testing import Script, call, calls, say
from support.approval import (
    ASKING_REFUND,
    DONE,
    LOOK,
    REFUND,
    REFUNDED,
    Shop,
    World,
    asked,
    settings_with,
    world,
)
from support.narrow import present
from support.values import each_of

ASK: dict[str, Any] = {"interceptors": [ASKING_REFUND]}
TWO = calls(REFUND, REFUND)


class Bench:
    """One door object, asked and resumed; a planner, a service or a handler, plain or streamed."""

    def __init__(
        self,
        kind: str,
        streamed: bool,
        script: Script,
        *,
        shop: Shop | None = None,
        **options: Any,
    ) -> None:
        self.here = world(script, shop)
        self.kind, self.streamed = kind, streamed
        options = {**ASK, **options}
        match kind:
            case "planner":
                self.door: Any = planner(**options)
            case "service":
                self.door = FunctionInvokingChatCompletion(self.here.service, **options)
            case _:
                self.door = ToolCallHandler(
                    self.here.kernel, settings=settings_with(), **options
                )

    async def ask(self) -> Checkpoint:
        """Run to the first pause."""
        if self.kind == "planner":
            return (
                await self.door.invoke(self.here.kernel, "Refund order 7.")
            ).checkpoint
        if self.kind == "service":
            message = await self.door.get_chat_message_content(
                asked(), settings_with(), kernel=self.here.kernel
            )
        else:
            message = [each async for each in self.door.invoke(asked())][-1]
        return Checkpoint.from_json(message.metadata["checkpoint"])

    async def resume(
        self,
        checkpoint: Checkpoint,
        decisions: Any,
        *,
        through: Any = None,
        **more: Any,
    ) -> str:
        """Resume with an empty history, through this object or another one of its kind; return the status."""
        door = through or self.door
        if self.kind == "planner":
            if not self.streamed:
                return (
                    await door.resume(self.here.kernel, checkpoint, decisions, **more)
                ).status
            async with aclosing(
                door.resume_stream(self.here.kernel, checkpoint, decisions, **more)
            ) as events:
                return [event async for event in events][-1].result.status
        given: tuple[Any, ...] = (ChatHistory(), checkpoint, decisions)
        if self.kind == "service":
            given, more = (
                (*given, settings_with()),
                {"kernel": self.here.kernel, **more},
            )
            if not self.streamed:
                return (await door.resume(*given, **more)).metadata["status"]
            messages = door.resume_streaming(*given, **more)
        else:
            messages = (door.resume_stream if self.streamed else door.resume)(
                *given, **more
            )
        async with aclosing(messages):
            return [message async for message in messages][-1].metadata["status"]


def planner(**options: Any) -> FunctionCallingStepwisePlanner:
    return FunctionCallingStepwisePlanner(
        "scripted", FunctionCallingStepwisePlannerOptions(plan=False, **options)
    )


every_object = pytest.mark.parametrize(
    ("kind", "streamed"),
    [
        (kind, streamed)
        for kind in ("planner", "service", "handler")
        for streamed in (False, True)
    ],
)
each_object = pytest.mark.parametrize(
    ("kind", "streamed"), [("planner", False), ("service", True), ("handler", False)]
)
"""Each kind once: for what its memory of decisions does, which all resumes pass."""
ONCE = "was decided before"


@each_of(
    "second",
    [Approve(), Approve(arguments={"order": "7", "amount": 1}), Deny(), Supply("x")],
)
@every_object
async def test_a_second_decision_is_refused(
    kind: str, streamed: bool, second: Any
) -> None:
    """Resumed again with any decision on the same call, the object refuses by name, and nothing runs."""
    bench = Bench(kind, streamed, [REFUND, DONE])
    checkpoint = await bench.ask()
    assert await bench.resume(checkpoint, {"call_1": Approve()}) == "answered"
    with pytest.raises(DecisionRefusedError, match=ONCE) as refused:
        await bench.resume(checkpoint, {"call_1": second})
    assert refused.value.call_id == "call_1"
    assert (bench.here.ran, bench.here.requests) == ([REFUNDED], 2)


@every_object
async def test_of_two_resumes_at_once_one_runs(kind: str, streamed: bool) -> None:
    """Two resumes of one checkpoint at the same time: exactly one runs the call, the other is refused."""
    bench = Bench(kind, streamed, [REFUND, DONE, DONE])
    checkpoint = await bench.ask()
    both = (bench.resume(checkpoint, {"call_1": Approve()}) for _ in range(2))
    outcomes = await asyncio.gather(*both, return_exceptions=True)
    assert sorted(str(type(outcome)) for outcome in outcomes) == sorted(
        [str(str), str(DecisionRefusedError)]
    )
    assert bench.here.ran == [REFUNDED]


@each_object
async def test_a_denied_call_stays_denied(kind: str, streamed: bool) -> None:
    """What was denied cannot be approved by the old checkpoint afterwards."""
    bench = Bench(kind, streamed, [REFUND, DONE])
    checkpoint = await bench.ask()
    await bench.resume(checkpoint, {"call_1": Deny()})
    with pytest.raises(DecisionRefusedError, match=ONCE):
        await bench.resume(checkpoint, {"call_1": Approve()})
    assert bench.here.ran == []


async def test_partial_decisions_are_taken_call_by_call() -> None:
    """One call is decided in one resume and the other in the next; neither is decided, or run, twice."""
    bench = Bench("planner", False, [TWO, DONE])
    first = await bench.ask()
    half = (
        await bench.door.resume(bench.here.kernel, first, {"call_1": Approve()})
    ).checkpoint
    with pytest.raises(DecisionRefusedError, match="'call_1'"):
        await bench.resume(first, {"call_1": Approve()})
    with pytest.raises(DecisionRefusedError, match="'call_1'"):
        await bench.resume(first, {"call_2": Approve(), "call_1": Deny()})
    assert await bench.resume(half, {"call_2": Approve()}) == "answered"
    with pytest.raises(DecisionRefusedError, match=ONCE):
        await bench.resume(half, {"call_2": Approve()})
    assert bench.here.ran == [REFUNDED, REFUNDED]


async def test_a_call_that_was_approved_starts_once_when_the_other_expires() -> None:
    """Resumed without decisions after a question expired, twice: the approved call beside it runs once."""
    clock = _Clock()
    bench = Bench(
        "planner",
        False,
        [TWO, DONE, DONE],
        clock=clock,
        approval=ApprovalSettings(expires_in=60),
    )
    half = (
        await bench.door.resume(
            bench.here.kernel, await bench.ask(), {"call_1": Approve()}
        )
    ).checkpoint
    clock.seconds += 100
    assert await bench.resume(half, {}) == "answered"
    with pytest.raises(DecisionRefusedError, match=ONCE):
        await bench.resume(half, {})
    assert bench.here.ran == [REFUNDED]


class _Clock:
    seconds = 1_000_000.0

    def now(self) -> float:
        return self.seconds

    def monotonic(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        self.seconds += seconds


@each_object
async def test_returned_calls_run_once(kind: str, streamed: bool) -> None:
    """Calls that a limit returned, resumed twice with a larger budget: they run once."""
    bench = Bench(
        kind,
        streamed,
        [LOOK, DONE, DONE],
        budget=Budget(max_iterations=1, on_limit="return_calls"),
    )
    checkpoint = await bench.ask()
    assert (
        await bench.resume(checkpoint, {}, budget=Budget(max_iterations=9))
        == "answered"
    )
    with pytest.raises(DecisionRefusedError, match=ONCE):
        await bench.resume(checkpoint, {}, budget=Budget(max_iterations=9))
    assert bench.here.ran == [("look", "7")]


async def test_calls_that_were_returned_are_asked_about_again() -> None:
    """A denial returned the calls, the run is resumed and asks again: that is another decision on the same call."""
    bench = Bench(
        "planner",
        False,
        [REFUND, DONE],
        approval=ApprovalSettings(on_denial="return_calls"),
    )
    first = await bench.ask()
    denied = (
        await bench.door.resume(bench.here.kernel, first, {"call_1": Deny()})
    ).checkpoint
    again = (await bench.door.resume(bench.here.kernel, denied)).checkpoint
    assert await bench.resume(again, {"call_1": Approve()}) == "answered"
    with pytest.raises(DecisionRefusedError, match=ONCE):
        await bench.resume(again, {"call_1": Approve()})
    assert bench.here.ran == [REFUNDED]


@each_object
async def test_a_run_that_pauses_again_asks_again(kind: str, streamed: bool) -> None:
    """The same call in a later trip is another one: it is decided by itself."""
    bench = Bench(kind, streamed, [REFUND, REFUND, DONE])
    first = await bench.ask()
    if kind != "planner":
        message = await _last(bench, first, {"call_1": Approve()})
        again = Checkpoint.from_json(message.metadata["checkpoint"])
    else:
        again = (
            await bench.door.resume(bench.here.kernel, first, {"call_1": Approve()})
        ).checkpoint
    (waiting,) = present(again.state().batch).calls
    assert await bench.resume(again, {waiting.request.id: Approve()}) == "answered"
    assert bench.here.ran == [REFUNDED, REFUNDED]


async def _last(bench: Bench, checkpoint: Checkpoint, decisions: Any) -> Any:
    if bench.kind == "service":
        given = (ChatHistory(), checkpoint, decisions, settings_with())
        return await bench.door.resume(*given, kernel=bench.here.kernel)
    return [
        message
        async for message in bench.door.resume(ChatHistory(), checkpoint, decisions)
    ][-1]


async def test_a_refused_resume_gives_the_decision_back() -> None:
    """A wrong fingerprint, an unknown call beside it, invalid arguments: refused before anything was recorded."""
    bench = Bench("planner", False, [REFUND, DONE])
    checkpoint = await bench.ask()
    for wrong in (
        {"call_1": Approve(fingerprint="x")},
        {"call_1": Approve(), "call_9": Approve()},
        {"call_1": Approve(arguments={"amount": "much"})},
    ):
        with pytest.raises(DecisionRefusedError):
            await bench.resume(checkpoint, wrong)
    assert await bench.resume(checkpoint, {"call_1": Approve()}) == "answered"


@each_object
async def test_a_resume_that_fails_before_a_function_started_gives_the_decision_back(
    kind: str, streamed: bool
) -> None:
    """Denied, and the next request fails: the decision may be given again."""
    bench = Bench(kind, streamed, [REFUND])
    checkpoint = await bench.ask()
    for _ in range(2):
        with pytest.raises(Exception, match="script"):
            await bench.resume(checkpoint, {"call_1": Deny()})
    assert bench.here.ran == []


@each_object
async def test_a_resume_that_fails_after_a_function_started_keeps_the_decision(
    kind: str, streamed: bool
) -> None:
    """Approved and run, then the next request fails: resuming the old checkpoint does not run it again."""
    bench = Bench(kind, streamed, [REFUND])
    checkpoint = await bench.ask()
    with pytest.raises(Exception, match="script") as failed:
        await bench.resume(checkpoint, {"call_1": Approve()})
    with pytest.raises(DecisionRefusedError, match="result or error"):
        await bench.resume(checkpoint, {"call_1": Approve()})
    assert bench.here.ran == [REFUNDED]
    assert isinstance(failed.value, ServiceCallError)


class Slow(Shop):
    """A shop whose refund waits until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.started = asyncio.Event()

    @kernel_function(description="Pays money back.")
    async def refund(self, order: str, amount: float) -> str:
        self.ran.append(("refund", order, amount, ""))
        self.started.set()
        await asyncio.Event().wait()
        return "never"


@every_object
async def test_a_resume_that_is_cancelled_in_the_function_keeps_the_decision(
    kind: str, streamed: bool
) -> None:
    """Cancelled while the function runs: it has started, and no second resume starts it again."""
    shop = Slow()
    bench = Bench(kind, streamed, [REFUND, DONE], shop=shop)
    checkpoint = await bench.ask()
    task = asyncio.create_task(bench.resume(checkpoint, {"call_1": Approve()}))
    await shop.started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(DecisionRefusedError, match=ONCE):
        await bench.resume(checkpoint, {"call_1": Approve()})
    assert shop.ran == [REFUNDED]


async def test_a_stream_that_is_never_read_takes_nothing() -> None:
    """A stream that is made and dropped took no decision."""
    bench = Bench("planner", True, [REFUND, DONE])
    checkpoint = await bench.ask()
    await bench.door.resume_stream(
        bench.here.kernel, checkpoint, {"call_1": Approve()}
    ).aclose()
    assert await bench.resume(checkpoint, {"call_1": Approve()}) == "answered"


async def test_a_question_is_answered_once() -> None:
    """An answer to a question of the model is a decision like any other."""
    ask = call("UserInteraction-AskUser", {"question": "Which?"})
    bench = Bench("planner", False, [ask, DONE], max_clarifications=3)
    checkpoint = await bench.ask()
    await bench.resume(checkpoint, {"call_1": Supply("This one.")})
    with pytest.raises(DecisionRefusedError, match=ONCE):
        await bench.resume(checkpoint, {"call_1": Supply("That one.")})


async def test_a_plain_question_is_answered_once() -> None:
    """So is the answer to a plain reply that asks."""
    script = [
        say("Which one?"),
        call("UserInteraction-SendFinalAnswer", {"answer": "Done."}),
    ]
    bench = Bench("planner", False, script, require_final_answer_function=True)
    checkpoint = await bench.ask()
    assert (
        await bench.resume(checkpoint, {"question_0": Supply("This one.")})
        == "answered"
    )
    with pytest.raises(DecisionRefusedError, match=ONCE):
        await bench.resume(checkpoint, {"question_0": Supply("That one.")})


@each_of("copied", [copy.copy, copy.deepcopy], ids=["copy", "deepcopy"])
@each_of("kind", ["planner", "service"])
async def test_copies_of_an_object_are_the_object(kind: str, copied: Any) -> None:
    """A copy knows what the object it was made of has taken, and the object what the copy has."""
    bench = Bench(kind, False, [REFUND, DONE])
    checkpoint = await bench.ask()
    await bench.resume(checkpoint, {"call_1": Approve()}, through=copied(bench.door))
    with pytest.raises(DecisionRefusedError, match=ONCE):
        await bench.resume(checkpoint, {"call_1": Approve()})


async def test_a_service_that_handlers_share_takes_a_decision_once() -> None:
    """Two handlers and a planner over one service that limits itself: what one has taken, none takes again."""
    here: World = world([])
    scripted = world([REFUND, DONE, DONE]).service
    here.kernel.add_service(
        FunctionInvokingChatCompletion(scripted, service_id="limited", **ASK)
    )
    handlers = [
        ToolCallHandler(here.kernel, service_id="limited", settings=settings_with())
        for _ in range(2)
    ]
    paused = [message async for message in handlers[0].invoke(asked())][-1]
    text, decisions = paused.metadata["checkpoint"], {"call_1": Approve()}
    async for _ in handlers[0].resume(ChatHistory(), text, decisions):
        pass
    with pytest.raises(DecisionRefusedError, match=ONCE):
        async for _ in handlers[1].resume(ChatHistory(), text, decisions):
            pass
    over = FunctionCallingStepwisePlanner(
        "limited", FunctionCallingStepwisePlannerOptions(plan=False)
    )
    with pytest.raises(DecisionRefusedError, match=ONCE):
        await over.resume(here.kernel, Checkpoint.from_json(text), decisions)
    assert here.ran == [REFUNDED]


async def test_a_cancelled_run_is_not_resumed() -> None:
    """``cancel`` decides every call that waits; and a run that was resumed cannot be cancelled."""
    bench = Bench("planner", False, [REFUND, REFUND, DONE])
    first, second = await bench.ask(), await bench.ask()
    bench.door.cancel(first)
    with pytest.raises(DecisionRefusedError, match=ONCE):
        await bench.resume(first, {"call_1": Approve()})
    (waiting,) = present(second.state().batch).calls
    await bench.resume(second, {waiting.request.id: Approve()})
    with pytest.raises(DecisionRefusedError, match=ONCE):
        bench.door.cancel(second)
    assert bench.here.ran == [REFUNDED]


async def test_another_object_does_not_know() -> None:
    """A checkpoint is a value: another planner runs the call again, as ``resume`` says."""
    bench = Bench("planner", False, [REFUND, DONE, DONE])
    checkpoint = await bench.ask()
    await bench.resume(checkpoint, {"call_1": Approve()})
    await bench.resume(checkpoint, {"call_1": Approve()}, through=planner(**ASK))
    assert bench.here.ran == [REFUNDED, REFUNDED]


async def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """An object remembers its newest decisions: in a server it does not grow without end."""
    monkeypatch.setattr(taken, "_REMEMBERED", 3)
    memory = taken.DecisionsTaken()
    for number in range(10):
        assert memory.take(bytes([number]), object())
    assert not memory.take(bytes([9]), object())
    assert memory.take(bytes([0]), object())
    assert len(pickle.dumps(memory)) < 200


async def test_a_policy_that_asks_again_does_not_decide_twice() -> None:
    """A run under a policy that asks about everything is resumed call by call."""
    policy = ApprovalPolicy.from_dict({"default": "ask"})
    bench = Bench(
        "planner",
        False,
        [LOOK, LOOK, DONE],
        interceptors=[policy, lambda call: Defer()],
    )
    result = await bench.door.invoke(bench.here.kernel, "Look.")
    while result.pending:
        decisions = {one.id: Approve() for one in result.pending}
        result = await bench.door.resume(
            bench.here.kernel, result.checkpoint, decisions
        )
    assert (result.status, len(bench.here.ran)) == ("answered", 2)
