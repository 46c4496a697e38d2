"""A model asks a question, with the function for it or in plain text, gets an answer, and the run continues."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from semantic_kernel.functions import kernel_function

from planner_ext import Approve, Deny
from planner_ext.core.machine import NO_MORE_QUESTIONS
from planner_ext.errors import DecisionRefusedError, PlannerException
from planner_ext.events import Clarified
from planner_ext.hitl_manager import Checkpoint, Clarification, Question, Supply
from planner_ext.testing import call, calls, say
from support.narrow import run_of
from support.planner import (
    ADD,
    FINAL_ANSWER,
    PLAN,
    Clock,
    Math,
    both_ways,
    check_sendable,
    drained,
    final,
    invoke,
    kernel_of,
    openai_kernel,
    planner_with,
    resume,
    scripted,
    texts,
)
from support.values import each_of

ASK_USER = "UserInteraction-AskUser"
WHERE = "San Jose in which country, and in celsius or fahrenheit?"
ASK = call(ASK_USER, {"question": WHERE})
LOOK = call("weather-now", {"place": "San Jose, CA", "unit": "celsius"})
INSISTING: dict[str, Any] = {"plan": False, "require_final_answer_function": True}


@dataclass
class Weather:
    """A plugin whose parameters a goal may leave open."""

    asked: list[tuple[str, str]] = field(default_factory=list)

    @kernel_function(description="Tells the weather.")
    async def now(self, place: str, unit: str) -> str:
        self.asked.append((place, unit))
        return "18 degrees"


@dataclass
class Person:
    """A clarifier that answers by rote and remembers what it was shown."""

    answers: list[Any]
    seen: list[Question] = field(default_factory=list)

    async def __call__(self, question: Question) -> Any:
        self.seen.append(question)
        return self.answers.pop(0) if self.answers else None


@both_ways
async def test_a_model_that_asks_in_plain_text_gets_its_answer_and_then_calls(
    streamed: bool,
) -> None:
    """The clarifier is shown the plain reply before it counts as final; its answer is the user's next message."""
    person, weather = Person(["In California, in celsius."]), Weather()
    async with openai_kernel(
        [say(WHERE), LOOK, say("18 degrees.")], weather=weather
    ) as (kernel, server):
        planner = planner_with(plan=False, clarifier=person)
        result = await invoke(
            planner, kernel, "Weather in San Jose?", streamed=streamed
        )

    assert result.status == "answered"
    assert result.final_answer == "18 degrees."
    assert result.iterations == 3
    assert weather.asked == [("San Jose, CA", "celsius")]
    first = person.seen[0]
    assert first.text == WHERE
    assert first.goal == "Weather in San Jose?"
    assert first.by_function is False
    assert first.iteration == 0
    assert texts(server.requests[1])[-2:] == [
        ("assistant", WHERE),
        ("user", "In California, in celsius."),
    ]
    assert [question.text for question in person.seen] == [WHERE, "18 degrees."]
    check_sendable(result.chat_history)


async def test_a_question_beside_calls_is_answered_before_any_runs() -> None:
    """The other calls wait with the question; the results follow in call order."""
    person, weather = Person(["Celsius."]), Weather()
    seen_before: list[int] = []

    async def clarifier(question: Question) -> Any:
        seen_before.append(len(weather.asked))
        return await person(question)

    async with openai_kernel(
        [calls(LOOK, ASK), say("18 degrees.")], weather=weather
    ) as (kernel, server):
        result = await invoke(planner_with(plan=False, clarifier=clarifier), kernel)

    assert result.status == "answered"
    assert seen_before[0] == 0
    assert len(weather.asked) == 1
    assert texts(server.requests[1])[-2:] == [
        ("tool", "18 degrees"),
        ("tool", "Celsius."),
    ]
    assert (person.seen[0].by_function, person.seen[0].clarifications) == (True, 0)


@both_ways
async def test_without_a_clarifier_a_question_waits_and_continues_from_json(
    streamed: bool,
) -> None:
    """The run ends ``asked`` with the question as its one pending call; another planner resumes it with Supply."""
    kernel, service = scripted([PLAN, calls(ADD, ASK)])
    result = await invoke(planner_with(max_clarifications=3), kernel, streamed=streamed)
    assert result.status == "asked"
    assert result.final_answer == ""
    assert len(service.requests) == 2
    (pending,) = result.pending
    assert (pending.fully_qualified_name, pending.arguments) == (
        ASK_USER,
        {"question": WHERE},
    )
    check_sendable(result.chat_history)

    checkpoint, math = Checkpoint.from_json(result.checkpoint.to_json()), Math()
    async with openai_kernel([final()], math=math) as (kernel, server):
        again = await resume(
            planner_with(max_clarifications=3), kernel, checkpoint, streamed=streamed
        )
        assert again.status == "asked"
        assert again.pending == result.pending
        assert server.requests == []
        decisions = {pending.id: Supply("In celsius.", by="ann")}
        done = await resume(
            planner_with(max_clarifications=3),
            kernel,
            checkpoint,
            streamed=streamed,
            decisions=decisions,
        )
        assert texts(server.requests[0])[-2:] == [
            ("tool", "3"),
            ("tool", "In celsius."),
        ]

    assert done.status == "answered"
    assert done.final_answer == "It is 3."
    assert math.sums == [(1, 2)]
    assert [
        (fact.answer, fact.by) for fact in done.facts if isinstance(fact, Clarified)
    ] == [("In celsius.", "ann")]


async def test_a_plain_question_waits_where_the_final_answer_is_insisted_on() -> None:
    """Its pending call has the same shape and an id of its own; the answer is the user's next message."""
    kernel, _ = scripted([say(WHERE)])
    result = await invoke(planner_with(**INSISTING), kernel)
    (pending,) = result.pending
    assert result.status == "asked"
    assert pending.fully_qualified_name == ASK_USER
    assert pending.arguments == {"question": WHERE}
    check_sendable(result.chat_history)

    checkpoint = Checkpoint.from_json(result.checkpoint.to_json())
    async with openai_kernel([final()]) as (kernel, server):
        done = await resume(
            planner_with(**INSISTING),
            kernel,
            checkpoint,
            decisions={pending.id: Supply("Celsius.")},
        )
        assert texts(server.requests[0])[-2:] == [
            ("assistant", WHERE),
            ("user", "Celsius."),
        ]
    assert done.status == "answered"
    assert done.final_answer == "It is 3."
    assert done.iterations == 2


async def test_a_plain_question_is_the_answer_where_nothing_is_insisted_on() -> None:
    """Without a clarifier and without insistence every plain reply is final, a question too."""
    kernel, _ = scripted([say(WHERE)])
    result = await invoke(planner_with(plan=False, max_clarifications=3), kernel)
    assert (result.status, result.final_answer) == ("answered", WHERE)


async def test_a_plain_reply_that_asks_nothing_is_insisted_upon() -> None:
    """What does not end in a question mark gets the reminder, no person."""
    kernel, service = scripted([say("It is 3."), final()])
    result = await invoke(planner_with(**INSISTING), kernel)
    assert (result.status, len(service.requests)) == ("answered", 2)


@each_of("nothing", [None, "", "  \n"])
async def test_a_clarifier_that_says_nothing_leaves_the_question_open(
    nothing: str | None,
) -> None:
    """A plain reply then counts as final; a call waits for a person."""
    kernel, _ = scripted([say(WHERE)])
    plain = await invoke(planner_with(plan=False, clarifier=Person([nothing])), kernel)
    assert (plain.status, plain.final_answer) == ("answered", WHERE)

    person = Person([nothing])
    kernel, _ = scripted([ASK, say("Done.")])
    planner = planner_with(plan=False, clarifier=person)
    asked = await invoke(planner, kernel)
    assert asked.status == "asked"
    assert len(asked.pending) == 1
    assert len(person.seen) == 1
    answer = {asked.pending[0].id: Supply("Celsius.")}
    done = await resume(planner, kernel, asked.checkpoint, decisions=answer)
    assert (done.status, [question.text for question in person.seen]) == (
        "answered",
        [WHERE, "Done."],
    )


async def test_no_more_questions_are_answered_than_the_cap_allows() -> None:
    """The answer to a call over the cap is to continue without; a plain reply over the cap is final."""
    person = Person(["One."] * 9)
    async with openai_kernel([calls(ASK, ASK), say("So?")], weather=Weather()) as (
        kernel,
        server,
    ):
        planner = planner_with(plan=False, clarifier=person, max_clarifications=1)
        result = await invoke(planner, kernel)
        assert texts(server.requests[1])[-2:] == [
            ("tool", "One."),
            ("tool", NO_MORE_QUESTIONS),
        ]
    assert result.status == "answered"
    assert result.final_answer == "So?"
    assert len(person.seen) == 1


async def test_what_an_answer_costs_is_charged() -> None:
    """Round trips and tokens of an answer are the run's; so is its time, and a person's waiting is not."""
    clock = Clock()
    costly = Clarification(text="Celsius.", by="model", iterations=2)
    answers = iter([costly, "And in California."])

    async def clarifier(question: Question) -> Any:
        clock.seconds += 100
        return next(answers, None)

    kernel, _ = scripted([say(WHERE), say(WHERE), say("Done.")])
    result = await invoke(
        planner_with(plan=False, clarifier=clarifier, clock=clock),
        kernel,
    )
    assert result.status == "answered"
    assert result.iterations == 5
    assert result.usage.active_seconds == 100.0


async def test_only_answers_are_taken_for_a_question() -> None:
    """An approval, an unknown name and a blank answer are refused by name; nothing is taken, nothing runs."""
    for script in ([ASK], [say(WHERE)]):
        kernel, service = scripted(script)
        planner = planner_with(**INSISTING)
        asked = await invoke(planner, kernel)
        name = asked.pending[0].id
        junk = Supply("x", by=3)  # pyright: ignore[reportArgumentType]  # junk, on purpose
        for decisions in (
            {name: Approve()},
            {"other": Supply("x")},
            {name: Supply(" ")},
            {name: junk},
        ):
            with pytest.raises(
                DecisionRefusedError, match=r"celsius or fahrenheit|'other'"
            ):
                await resume(
                    planner,
                    kernel,
                    asked.checkpoint,
                    decisions=decisions,
                )
        assert len(service.requests) == 1


async def test_a_denied_question_continues_the_run() -> None:
    """Deny lets the model know, with the reason, the run continues, and its record says that it was denied."""
    kernel, service = scripted([ASK, final()])
    planner = planner_with(**INSISTING)
    asked = await invoke(planner, kernel)
    denied = {asked.pending[0].id: Deny("Guess.", by="ann")}
    done = await resume(planner, kernel, asked.checkpoint, decisions=denied)
    assert done.status == "answered"
    (record,) = done.decisions
    assert record.kind == "deny"
    assert record.by == "ann"
    assert record.reason == "Guess."
    assert record.result is None
    assert texts(service.requests[1])[-1] == (
        "tool",
        "Nobody answers this. Guess. Go on with what you know.",
    )


@pytest.mark.parametrize("script", [[ASK], [say(WHERE)]], ids=["call", "plain"])
async def test_a_run_that_asks_can_be_cancelled(script: Any) -> None:
    """Cancelling answers the question with "not executed" and ends the run for good."""
    kernel, _ = scripted(script)
    planner = planner_with(**INSISTING)
    asked = await invoke(planner, kernel)
    result = planner.cancel(asked.checkpoint, by="ann")
    assert result.status == "stopped"
    assert result.pending == ()
    assert result.final_answer == ""
    check_sendable(result.chat_history)


async def test_a_clarifier_that_fails_is_a_fault() -> None:
    """An exception or an invalid answer leaves the run with its history and a checkpoint."""

    def broken(question: Question) -> Any:
        raise OSError("no terminal")

    for clarifier, error in ((broken, OSError), (Person([3]), PlannerException)):
        kernel, _ = scripted([say(WHERE)])
        with pytest.raises(error) as raised:
            await invoke(planner_with(plan=False, clarifier=clarifier), kernel)
        again = await resume(
            planner_with(plan=False, clarifier=Person([])),
            kernel,
            run_of(raised.value).checkpoint,
        )
        assert (again.status, again.final_answer) == ("answered", WHERE)


async def test_a_question_is_offered_only_where_it_may_be_answered() -> None:
    """AskUser is offered with a clarifier, a cap or insistence on the final answer, and never with a cap of 0."""
    offered = {}
    cases: dict[str, dict[str, Any]] = {
        "none": {},
        "clarifier": {"clarifier": Person([])},
        "cap": {"max_clarifications": 1},
        "insists": {"require_final_answer_function": True},
        "zero": {"clarifier": Person([]), "max_clarifications": 0},
        "insists on none": {
            "require_final_answer_function": True,
            "max_clarifications": 0,
        },
    }
    for name, options in cases.items():
        kernel, service = scripted([PLAN, final()])
        await planner_with(**options).invoke(kernel, "goal")
        assert FINAL_ANSWER in service.requests[1].tools
        offered[name] = ASK_USER in service.requests[1].tools
    assert offered == {
        "none": False,
        "clarifier": True,
        "cap": True,
        "insists": True,
        "zero": False,
        "insists on none": False,
    }


async def test_the_stream_tells_the_question_and_its_answer() -> None:
    """A streamed run yields `Clarified` between the reply and the next request."""
    kernel, _ = scripted([say(WHERE), say("Done.")])
    planner = planner_with(plan=False, clarifier=Person(["Celsius."]))
    events = await drained(planner.invoke_stream(kernel, "goal"))
    told = [(e.question, e.answer) for e in events if isinstance(e, Clarified)]
    assert told == [(WHERE, "Celsius."), ("Done.", None)]


async def test_a_final_answer_in_the_reserved_trip_is_the_forced_answer() -> None:
    """A model that calls SendFinalAnswer although functions were withdrawn gives its answer; the limit is named."""
    kernel = kernel_of(scripted([PLAN, ADD, final("It is 3.")])[1])
    result = await invoke(planner_with(max_iterations=3), kernel)
    assert result.status == "limit_reached"
    assert result.final_answer == "It is 3."
    assert result.limit == "max_iterations"
    assert (
        result.chat_history is not None
        and str(result.chat_history.messages[-1]) == "It is 3."
    )
    check_sendable(result.chat_history)
