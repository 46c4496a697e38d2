"""Bad input gets a clear error, before anything is sent: what was expected, what was seen, and the way out."""

import math
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.prompt_execution_settings import (
    PromptExecutionSettings,
)
from semantic_kernel.contents import AuthorRole, ChatHistory, ChatMessageContent
from semantic_kernel.exceptions import KernelException

from planner_ext import (
    BoundedFunctionChoiceBehavior,
    Budget,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    FunctionInvokingChatCompletion,
    StopHandle,
    ToolCallHandler,
    ToolUseSession,
    UserInteraction,
)
from planner_ext.errors import (
    PlannerException,
    PlannerExtError,
    PlannerInvalidConfigurationError,
)
from support.planner import (
    GOAL,
    PLAN,
    both_ways,
    drained,
    final,
    invoke,
    never_stops,
    planner_with,
    scripted,
)
from support.values import each_of


def check_error(error: PlannerInvalidConfigurationError, *words: str) -> None:
    """Fail where an error is of the wrong kind, or does not say what it must."""
    assert isinstance(error, PlannerException | KernelException)
    assert isinstance(error, PlannerExtError)
    assert not isinstance(error, ValueError)
    for word in words:
        assert word in str(error)


@each_of("value", [0, -1, True, False, 1.5, "3", [3]], ids=repr)
def test_max_iterations_takes_a_whole_number_from_one(value: Any) -> None:
    """Options and budget refuse anything but a whole number of at least 1, and say what they take."""
    for kind in (FunctionCallingStepwisePlannerOptions, Budget):
        with pytest.raises(PlannerInvalidConfigurationError) as raised:
            kind(max_iterations=value)
        check_error(
            raised.value,
            "max_iterations",
            "whole number, 1 or more",
            "None",
            repr(value),
        )


@each_of(
    ("name", "value"),
    [
        ("max_iterations", {}),
        ("budget", 5),
        ("budget", "answer"),
        ("control", "sometimes"),
        ("control", None),
        ("plan", 3.5),
        ("plan", None),
        ("charge_plan", "perhaps"),
        ("require_final_answer_function", 2),
        ("execution", 5),
        ("approval", 5),
        ("interceptors", print),
        ("interceptors", [5.25]),
        ("pre_invoke", 5),
        ("iteration_completed", 5),
        ("observers", print),
        ("observers", "print"),
        ("observers", [5.25]),
        ("clock", 5),
        ("min_iteration_time_ms", -1),
        ("min_iteration_time_ms", 1.5),
        ("min_iteration_time_ms", True),
        ("excluded_plugins", "math"),
        ("excluded_plugins", {5.25}),
        ("excluded_functions", "math-add"),
        ("get_available_functions", 5),
        ("get_initial_plan", "name: plan"),
        ("get_step_prompt", "Go on."),
        ("execution_settings", 5),
        ("max_tokens", -1),
        ("max_tokens", "many"),
        ("max_tokens_ratio", "half"),
        ("max_tokens_ratio", 1.5),
        ("max_tokens_ratio", -0.5),
        ("max_tokens_ratio", math.nan),
        ("max_tokens_ratio", math.inf),
        ("max_completion_tokens", -1),
        ("max_prompt_tokens", 0.5),
        ("on_invalid_history", "ignore"),
        ("strict_finish_reason", "maybe"),
    ],
)
def test_an_option_of_a_wrong_kind_is_refused_by_name(name: str, value: Any) -> None:
    """An option that cannot be used is refused when it is given, naming it and what was seen."""
    more = {"max_tokens": 1000} if name == "max_tokens_ratio" else {}
    with pytest.raises(PlannerInvalidConfigurationError) as raised:
        planner_with(**{name: value, **more})
    check_error(raised.value, name, "5.25" if "5.25" in repr(value) else repr(value))


def test_an_unknown_option_is_refused_with_those_there_are() -> None:
    """A misspelt option is not dropped; the error lists the known ones."""
    with pytest.raises(PlannerInvalidConfigurationError) as raised:
        FunctionCallingStepwisePlannerOptions(max_iteration=3)  # pyright: ignore[reportCallIssue]  # misspelt on purpose
    check_error(
        raised.value, "max_iteration", "max_iterations", "min_iteration_time_ms", "3"
    )


@each_of(
    ("name", "value"),
    [
        ("max_iterations", 0),
        ("plan", 3.5),
        ("control", "x"),
        ("max_iteration", 3),
        ("min_iteration_time_ms", -1),
    ],
)
def test_an_option_is_checked_when_it_is_assigned_too(name: str, value: Any) -> None:
    """Assigning to an option is checked as giving it is, with the same error, and leaves the options as they were."""
    options = FunctionCallingStepwisePlannerOptions()
    with pytest.raises(PlannerInvalidConfigurationError) as raised:
        setattr(options, name, value)
    check_error(raised.value, name)
    assert options == FunctionCallingStepwisePlannerOptions()


@each_of(
    ("name", "value"),
    [
        ("max_tool_calls", -1),
        ("max_total_tokens", 0),
        ("max_active_seconds", 0),
        ("max_active_seconds", math.nan),
        ("deadline", "tomorrow"),
        ("max_calls_per_function", {"math-add": -1}),
        ("max_consecutive_errors", True),
        ("on_limit", "explode"),
        ("batch_over_limit", "some"),
        ("last_trip", "away"),
    ],
)
def test_a_limit_that_means_nothing_is_refused_by_name(name: str, value: Any) -> None:
    """A value of the budget that means nothing is refused, naming the field, what it takes and what was seen."""
    with pytest.raises(PlannerInvalidConfigurationError) as raised:
        Budget(**{name: value})
    check_error(raised.value, name, "must")


@both_ways
@each_of("goal", ["", "\n\t", "caf\udce9", None, b"goal", ["goal"]], ids=repr)
async def test_a_goal_is_a_text_that_is_not_empty(goal: Any, streamed: bool) -> None:
    """A goal that is empty, blank, not a string or undecodable is refused with what was seen."""
    kernel, service = scripted([PLAN, final()])
    with pytest.raises(PlannerInvalidConfigurationError) as raised:
        await invoke(planner_with(), kernel, goal, streamed=streamed)

    check_error(raised.value, "goal", repr(goal))
    assert service.requests == []


def test_a_control_that_needs_a_callback_gets_one() -> None:
    """control="pre_invoke" without a callback is refused with the way out."""
    with pytest.raises(PlannerInvalidConfigurationError) as raised:
        planner_with(control="pre_invoke")
    check_error(raised.value, "control", "pre_invoke=")


@each_of(
    "options",
    [{}, {"max_iterations": 3}, 5, "max_iterations=3", Budget()],
    ids=["empty-dict", "dict", "number", "text", "budget"],
)
def test_options_are_of_the_options_class(options: Any) -> None:
    """Options of another type are refused, empty ones included, and the error names the class to use."""
    with pytest.raises(PlannerInvalidConfigurationError) as raised:
        FunctionCallingStepwisePlanner(options=options)
    check_error(raised.value, "options", "FunctionCallingStepwisePlannerOptions")


@each_of(
    "text",
    [
        "name: [",
        "- a\n- list",
        "only text",
        "",
        "name: plan\n",
        "name: plan\ntemplate: ''\n",
        "name: plan\ntemplate: 5\n",
        "name: plan\ntemplate: '{{$goal}}'\ntemplate_format: handlebars\n",
        "name: plan\ntemplate: '{{math. add}}'\n",
        5,
        None,
    ],
    ids=[
        "yaml",
        "list",
        "text",
        "empty",
        "no-template",
        "empty-template",
        "number",
        "format",
        "syntax",
        "int",
        "None",
    ],
)
def test_an_invalid_plan_prompt_is_refused_when_the_planner_is_made(text: Any) -> None:
    """What get_initial_plan returns is read at once: what is no YAML of a prompt template is refused by that name."""
    with pytest.raises(PlannerInvalidConfigurationError) as raised:
        planner_with(get_initial_plan=lambda: text)
    check_error(raised.value, "get_initial_plan")


@each_of("text", ["{{math. add}}", 5, None], ids=["syntax", "int", "None"])
def test_an_invalid_step_prompt_is_refused_when_the_planner_is_made(text: Any) -> None:
    """What get_step_prompt returns is read at once, before a plan is paid for."""
    with pytest.raises(PlannerInvalidConfigurationError) as raised:
        planner_with(get_step_prompt=lambda: text)
    check_error(raised.value, "get_step_prompt")


@both_ways
@each_of(
    ("name", "value"),
    [
        ("chat_history", ["a message"]),
        ("chat_history", "hello"),
        ("arguments", {"city": "Rome"}),
        ("stop", "now"),
    ],
    ids=["list", "text", "dict", "stop"],
)
async def test_an_argument_of_a_wrong_type_is_refused_by_name(
    name: str, value: Any, streamed: bool
) -> None:
    """A history, arguments or a stop handle of another type: the error names the argument."""
    kernel, service = scripted([final()])
    with pytest.raises(PlannerInvalidConfigurationError) as raised:
        await invoke(
            planner_with(plan=False), kernel, streamed=streamed, **{name: value}
        )

    check_error(raised.value, name)
    assert service.requests == []


MISTAKEN: dict[str, Any] = {
    "chat_history": "go",
    "settings": {"temperature": 0},
    "kernel": Kernel,
    "arguments": {"tenant": "a"},
    "stop": True,
    "store_final": "yes",
    "checkpoint": ChatMessageContent(
        role=AuthorRole.ASSISTANT, content="This run waits for a decision."
    ),
}
"""What a newcomer may take for the arguments of a request."""


@both_ways
@each_of("name", MISTAKEN)
async def test_an_argument_of_a_request_of_a_wrong_type_is_refused_by_name(
    name: str, streamed: bool
) -> None:
    """By a service, which handler and session ask; before anything is sent."""
    kernel, inner = scripted([final()])
    settings = PromptExecutionSettings(
        function_choice_behavior=BoundedFunctionChoiceBehavior.Auto()
    )
    given = {
        "chat_history": ChatHistory(),
        "settings": settings,
        "kernel": kernel,
        name: MISTAKEN[name],
    }
    service: Any = FunctionInvokingChatCompletion(inner)
    plain, stream = (
        service.get_chat_message_contents,
        service.get_streaming_chat_message_contents,
    )
    if name == "checkpoint":
        given["decisions"] = {}
        plain, stream = service.resume, service.resume_streaming
    with pytest.raises(PlannerInvalidConfigurationError) as raised:
        await (drained(stream(**given)) if streamed else plain(**given))
    check_error(raised.value, f"{name} must be", "got ")
    assert inner.requests == []


@pytest.mark.parametrize("door", [ToolCallHandler, ToolUseSession])
def test_settings_of_a_wrong_type_are_refused_by_name(door: Any) -> None:
    """When handler or session is made."""
    kernel, _ = scripted([final()])
    with pytest.raises(PlannerInvalidConfigurationError) as raised:
        door(kernel, settings={"temperature": 0})
    check_error(raised.value, "settings must be", "got {'temperature': 0}")


def test_a_kernel_is_refused_as_a_service_id() -> None:
    """The first argument of the planner is the service's id; handler and session begin with the kernel."""
    kernel, _ = scripted([final()])
    with pytest.raises(PlannerInvalidConfigurationError) as raised:
        FunctionCallingStepwisePlanner(kernel)  # pyright: ignore[reportArgumentType]  # junk, on purpose
    check_error(raised.value, "service_id must be", "got a Kernel")


@pytest.mark.parametrize("reason", [None, 5])
def test_a_reason_to_stop_is_a_text(reason: Any) -> None:
    """None would not stop the run, and another value damages its journal."""
    with pytest.raises(PlannerInvalidConfigurationError) as raised:
        StopHandle().stop(reason)
    check_error(raised.value, "reason must be a text", f"got {reason}")


async def test_a_kernel_is_needed() -> None:
    """Without a kernel the error says so."""
    nothing: Any = None
    with pytest.raises(PlannerInvalidConfigurationError) as raised:
        await invoke(planner_with(), nothing)
    check_error(raised.value, "kernel")


async def test_a_function_of_the_planners_own_name_is_refused() -> None:
    """A kernel that has UserInteraction-SendFinalAnswer itself, as old programs may, is refused with the way out."""
    kernel, service = scripted(never_stops)
    kernel.add_plugin(UserInteraction(), "UserInteraction")
    with pytest.raises(PlannerInvalidConfigurationError) as raised:
        await invoke(planner_with(), kernel, GOAL)
    check_error(raised.value, "UserInteraction-SendFinalAnswer", "exclude")
    assert service.requests == []

    result = await invoke(
        planner_with(excluded_plugins={"UserInteraction"}, max_iterations=2),
        kernel,
    )
    assert result.status == "limit_reached"
