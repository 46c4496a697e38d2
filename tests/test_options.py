"""One list of options, and every door takes all of it: planner, service, handler and session."""

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from pydantic import SkipValidation
from semantic_kernel import Kernel
from semantic_kernel.contents import AuthorRole, ChatMessageContent, FunctionCallContent

from planner_ext import (
    ApprovalSettings,
    Budget,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    FunctionInvokingChatCompletion,
    Runs,
    ToolCallHandler,
    ToolExecution,
    ToolUseSession,
)
from planner_ext.budgets import BudgetStore, SharedBudget
from planner_ext.core.facts import Fact
from planner_ext.durable import WorkerOptions
from planner_ext.errors import InvalidHistoryError, PlannerInvalidConfigurationError
from planner_ext.sk.run.options import DEFAULTS, CheckedOptions, RunOptions
from planner_ext.testing import ScriptedChatCompletion, call, say
from support.values import each_of

DOORS = (FunctionInvokingChatCompletion, ToolCallHandler, ToolUseSession)


class Clock:
    """A clock that stands still."""

    def now(self) -> float:
        return 0.0

    def monotonic(self) -> float:
        return 0.0

    def sleep(self, seconds: float) -> None:
        pass


def asked(_: Any) -> None:
    """An interceptor, a callback, an observer and a clarifier of no opinion."""


GIVEN: dict[str, Any] = {
    "budget": Budget(max_total_tokens=7),
    "shared_budgets": [
        SharedBudget("app", store=BudgetStore.memory(), max_iterations=5)
    ],
    "price": lambda model, usage: 0.01,
    "execution": ToolExecution(max_concurrency=1),
    "approval": ApprovalSettings(unmatched="deny"),
    "interceptors": [asked],
    "pre_invoke": lambda iteration, name, arguments: True,
    "check_for_intervention": lambda call: False,
    "approver": asked,
    "iteration_completed": asked,
    "clarifier": asked,
    "max_clarifications": 3,
    "check_answer": lambda answer, context: None,
    "observers": [asked],
    "clock": Clock(),
    "min_iteration_time_ms": 11,
    "max_prompt_tokens": 1000,
    "on_invalid_history": "repair",
    "strict_finish_reason": True,
    "checkpoint_key": b"key",
    "name": "clerk",
    "agent_id": "clerk-1",
}
"""A value of each option that is not its default."""

REFUSED: dict[str, Any] = {
    **dict.fromkeys(DEFAULTS, 5.25),
    "strict_finish_reason": "perhaps",
    "checkpoint_key": b"",
}


def kernel() -> Kernel:
    """Make a kernel with a service."""
    made = Kernel()
    made.add_service(ScriptedChatCompletion([say("Done.")], service_id="chat"))
    return made


def made_by(door: type, **options: Any) -> CheckedOptions:
    """Make a door with options, and read what it works with."""
    if door is FunctionInvokingChatCompletion:
        return FunctionInvokingChatCompletion(
            ScriptedChatCompletion([]), **options
        ).options
    if door is FunctionCallingStepwisePlannerOptions:
        planner = FunctionCallingStepwisePlanner(
            options=FunctionCallingStepwisePlannerOptions(**options)
        )
        return planner._checked_options()
    return door(kernel(), **options)._service.options


every_door = pytest.mark.parametrize(
    "door", [*DOORS, FunctionCallingStepwisePlannerOptions]
)


@pytest.mark.parametrize("door", DOORS)
def test_a_door_shows_every_option(door: type) -> None:
    """The signature spells all options out, by keyword, with their defaults and types."""
    shown = inspect.signature(door.__init__).parameters
    for name, kind in get_type_hints(RunOptions).items():
        assert shown[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert shown[name].default == DEFAULTS[name]
        assert shown[name].annotation == kind
    assert all(one.kind is not one.VAR_KEYWORD for one in shown.values())


@pytest.mark.parametrize("door", [Runs.sqlite, Runs.postgres])
def test_a_store_shows_every_option_of_a_worker(door: Any) -> None:
    """Both take the same options, by keyword, with the types that `WorkerOptions` documents; another is refused."""
    shown = inspect.signature(door).parameters
    documented = get_type_hints(WorkerOptions)
    assert [name for name, one in shown.items() if one.kind is one.KEYWORD_ONLY] == [
        *documented
    ]
    assert {name: shown[name].annotation for name in documented} == documented
    assert all(f"    {name}: " in str(WorkerOptions.__doc__) for name in documented)


async def test_a_worker_takes_no_option_that_there_is_not(tmp_path: Path) -> None:
    """A misspelt one is a type error, before a file is made."""
    given: dict[str, Any] = {"lease": 3}
    with pytest.raises(TypeError, match="lease"):
        async with Runs.sqlite(tmp_path / "runs.db", **given):
            pass
    assert not (tmp_path / "runs.db").exists()


def test_the_planners_options_are_the_same() -> None:
    """The planner's options have a field for each, of the same type and default."""
    fields, kinds = (
        FunctionCallingStepwisePlannerOptions.model_fields,
        get_type_hints(RunOptions),
    )
    own = get_type_hints(FunctionCallingStepwisePlannerOptions)
    for name in DEFAULTS:
        assert fields[name].default == DEFAULTS[name]
        assert own[name] in (kinds[name], SkipValidation[kinds[name]])


@each_of("name", [name for name in DEFAULTS if name != "clock"])
def test_an_option_of_a_wrapped_service_holds_unless_it_is_the_doors_alone(
    name: str,
) -> None:
    """Each option has a rule for the merge: a door without options has those of the service that it wraps."""
    wrapped = FunctionInvokingChatCompletion(ScriptedChatCompletion([]), **GIVEN)
    merged = (
        made_by(FunctionInvokingChatCompletion),
        FunctionInvokingChatCompletion(wrapped).options,
    )
    own = (
        "execution",
        "min_iteration_time_ms",
        "on_invalid_history",
        "strict_finish_reason",
    )
    assert (getattr(merged[0], name) == getattr(merged[1], name)) == (name in own)


@every_door
@each_of("name", DEFAULTS)
def test_no_door_loses_an_option(door: type, name: str) -> None:
    """What is given to a door is what its runs work with."""
    given, default = made_by(door, **{name: GIVEN[name]}), made_by(door)
    assert getattr(given, name) != getattr(default, name)


@every_door
@each_of("name", [name for name in DEFAULTS if name != "strict_finish_reason"])
def test_an_option_is_refused_by_name_when_a_door_is_made(
    door: type, name: str
) -> None:
    """A value that means nothing is refused, naming the option, by every door."""
    with pytest.raises(PlannerInvalidConfigurationError, match=name):
        made_by(door, **{name: REFUSED[name]})


@pytest.mark.parametrize("door", DOORS)
def test_an_unknown_option_is_a_type_error(door: type) -> None:
    """It is refused as a misspelt parameter is, with the options there are, and where limits are given."""
    with pytest.raises(
        TypeError,
        match=r"unexpected keyword argument 'max_iterations'; .*budget=Budget\(",
    ):
        made_by(door, max_iterations=3)


def test_the_planner_reads_its_options_again_once_they_have_changed() -> None:
    """Options that are assigned, or changed in place, hold from the next run on."""
    options = FunctionCallingStepwisePlannerOptions(interceptors=[asked])
    planner = FunctionCallingStepwisePlanner(options=options)
    before = planner._checked_options()
    assert planner._checked_options() is before
    options.interceptors.append(asked)  # pyright: ignore[reportAttributeAccessIssue]  # a list was given
    options.max_iterations = 4
    after = planner._checked_options()
    assert after.interceptors == (asked, asked)
    assert after.budget == replace(before.budget, max_iterations=4)


def unanswered() -> list[ChatMessageContent]:
    """Make a conversation with a call without a result."""
    call = FunctionCallContent(id="call_1", name="math-add", arguments="{}")
    return [
        ChatMessageContent(role=AuthorRole.USER, content="Add."),
        ChatMessageContent(role=AuthorRole.ASSISTANT, items=[call]),
        ChatMessageContent(role=AuthorRole.USER, content="Well?"),
    ]


async def test_a_session_repairs_a_conversation_on_request() -> None:
    """``on_invalid_history="repair"`` answers a call without a result in the session's copy."""
    with pytest.raises(InvalidHistoryError):
        ToolUseSession(kernel(), initial_prompts=unanswered())
    session = ToolUseSession(
        kernel(), initial_prompts=unanswered(), on_invalid_history="repair"
    )
    assert await session.prompt("Go.") == "Done."
    assert [message.role for message in session.history().messages[:3]] == [
        "user",
        "assistant",
        "tool",
    ]


async def test_a_sessions_clarifier_answers_questions() -> None:
    """A session takes a clarifier, and so the model may ask it."""
    facts: list[Fact] = []
    made = Kernel()
    ask = call("UserInteraction-AskUser", {"question": "Which city?"})
    made.add_service(
        ScriptedChatCompletion([ask, say("It is sunny in Rome.")], service_id="chat")
    )
    session = ToolUseSession(
        made,
        clarifier=lambda question: None if question.text.startswith("It") else "Rome",
        observers=[facts.append],
    )
    assert await session.prompt("What is the weather?") == "It is sunny in Rome."
    assert [fact.answer for fact in facts if fact.type == "Clarified"] == ["Rome", None]
