"""Programs written for the removed planner run with a changed import: names, defaults, results and errors."""

from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import pytest
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.open_ai import OpenAIChatPromptExecutionSettings
from semantic_kernel.contents import ChatHistory
from semantic_kernel.exceptions import KernelException
from semantic_kernel.functions import KernelArguments, kernel_function

from planner_ext import (
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    FunctionCallingStepwisePlannerResult,
    UserInteraction,
)
from planner_ext.errors import PlannerException, PlannerInvalidConfigurationError
from planner_ext.testing import ScriptedChatCompletion, call
from support.planner import (
    ADD,
    PLAN,
    Clock,
    final,
    kernel_of,
    never_stops,
    openai_kernel,
    planner_with,
    scripted,
)
from support.values import each_of

OLD_DEFAULTS = {
    "max_iterations": 15,
    "max_tokens": None,
    "max_tokens_ratio": 0.1,
    "max_completion_tokens": None,
    "max_prompt_tokens": None,
    "get_initial_plan": None,
    "get_step_prompt": None,
    "execution_settings": None,
    "excluded_plugins": set(),
    "excluded_functions": set(),
    "get_available_functions": None,
}
"""The options of semantic-kernel 1.35, but for min_iteration_time_ms."""


@each_of("name", OLD_DEFAULTS)
def test_the_old_options_are_there_with_their_defaults(name: str) -> None:
    """Every option of the removed planner has its name and its default."""
    assert getattr(FunctionCallingStepwisePlannerOptions(), name) == OLD_DEFAULTS[name]


def test_the_one_default_that_differs() -> None:
    """min_iteration_time_ms is 0, as in the later .NET planner, and not 100."""
    assert FunctionCallingStepwisePlannerOptions().min_iteration_time_ms == 0


@each_of("total", [0, 1, 99, 1000, 4096, 16385])
@each_of("ratio", [None, 0.0, 0.1, 0.25, 1.0])
def test_max_tokens_is_shared_as_before(total: int, ratio: float | None) -> None:
    """The completion takes ``int(max_tokens * ratio)``, the prompt ``int(max_tokens * (1 - ratio))``."""
    more: dict[str, Any] = {} if ratio is None else {"max_tokens_ratio": ratio}
    options = FunctionCallingStepwisePlannerOptions(max_tokens=total, **more)
    share = 0.1 if ratio is None else ratio

    assert options.max_completion_tokens == int(total * share)
    assert options.max_prompt_tokens == int(total * (1 - share))


def test_a_share_that_is_set_by_itself_stays() -> None:
    """Either share may be set alone, with or without max_tokens."""
    options = FunctionCallingStepwisePlannerOptions(
        max_tokens=1000, max_completion_tokens=7
    )
    assert (options.max_completion_tokens, options.max_prompt_tokens) == (7, 900)
    assert (
        FunctionCallingStepwisePlannerOptions(
            max_completion_tokens=7
        ).max_completion_tokens
        == 7
    )


def test_the_result_has_the_old_fields_and_defaults() -> None:
    """final_answer, chat_history and iterations can be given and default as before."""
    empty = FunctionCallingStepwisePlannerResult()
    assert empty.final_answer == ""
    assert empty.chat_history is None
    assert empty.iterations == 0
    made = FunctionCallingStepwisePlannerResult(
        final_answer="3", chat_history=ChatHistory(), iterations=2
    )
    assert made.final_answer == "3"
    assert made.chat_history == ChatHistory()
    assert made.iterations == 2
    assert made.raise_for_status() is made


def test_the_helper_plugin_has_its_names() -> None:
    """UserInteraction offers SendFinalAnswer with one text, ``answer``."""
    plugin = Kernel().add_plugin(UserInteraction(), "UserInteraction")
    function = plugin.functions["SendFinalAnswer"]
    assert function.fully_qualified_name == "UserInteraction-SendFinalAnswer"
    assert [(parameter.name, parameter.type_) for parameter in function.parameters] == [
        ("answer", "str")
    ]


def test_the_errors_have_their_names() -> None:
    """PlannerInvalidConfigurationError is a PlannerException is a KernelException, as before."""
    assert issubclass(PlannerInvalidConfigurationError, PlannerException)
    assert issubclass(PlannerException, KernelException)


def test_the_planner_takes_its_arguments_by_position_too() -> None:
    """``FunctionCallingStepwisePlanner(service_id, options)``, and both can be read again."""
    options = FunctionCallingStepwisePlannerOptions(max_iterations=3)
    planner = FunctionCallingStepwisePlanner("chat", options)
    assert (planner.service_id, planner.options) == ("chat", options)
    assert list(get_type_hints(planner.invoke))[:3] == [
        "kernel",
        "question",
        "arguments",
    ]


class EmailPlugin:
    """As the samples of the removed planner had it."""

    @kernel_function(
        name="SendEmail",
        description="Given an e-mail and message body, send an e-email",
    )
    def send_email(
        self,
        subject: Annotated[str, "the subject of the email"],
        body: Annotated[str, "the body of the email"],
    ) -> Annotated[str, "the output is a string"]:
        """Sends an email."""
        return f"Email sent with subject: {subject} and body: {body}"

    @kernel_function(
        name="GetEmailAddress", description="Given a name, find the email address"
    )
    def get_email_address(self, input: Annotated[str, "the name of the person"]) -> str:
        """Gets email address for given person."""
        return "{}@example.com".format(input.lower())  # noqa: UP032  (the program is as it was)


async def main(kernel: Kernel, clock: Clock, write: Callable[[str], None]) -> None:
    """A program in the style of those samples; of its lines only the import, and the clock, are not its own."""
    service_id = "chat"
    kernel.add_plugin(EmailPlugin(), plugin_name="EmailPlugin")

    questions = [
        "What is the current hour number, plus 5?",
        "Write a limerick, translate it, and send it to Jane.",
    ]

    options = FunctionCallingStepwisePlannerOptions(
        max_iterations=10,
        max_tokens=4000,
        min_iteration_time_ms=4000,
        clock=clock,
    )

    planner = FunctionCallingStepwisePlanner(service_id=service_id, options=options)

    for question in questions:
        result = await planner.invoke(kernel, question)
        write(f"Q: {question}\nA: {result.final_answer}\n")
        assert result.chat_history is not None
        write(f"Chat history: {result.chat_history.messages}\n")
        write(f"{result.iterations}")


async def test_a_program_written_for_the_removed_planner_runs() -> None:
    """Verbatim but for its import it plans, calls, answers, and finds everything where it was."""
    clock, written = Clock(), list[str]()
    script = [
        PLAN,
        ADD,
        final("It is 17."),
        PLAN,
        call("EmailPlugin-GetEmailAddress", {"input": "Jane"}),
        call("EmailPlugin-SendEmail", {"subject": "Limerick", "body": "There was"}),
        final("Sent."),
    ]
    async with openai_kernel(script) as (kernel, server):
        await main(kernel, clock, written.append)

    assert written[0].endswith("A: It is 17.\n")
    assert written[2] == "3"
    assert written[3].endswith("A: Sent.\n")
    assert "jane@example.com" in written[4]
    assert written[5] == "4"
    assert clock.slept == [4.0] * 5
    assert {request.body["max_tokens"] for request in server.requests} == {400}


async def test_old_keyword_arguments_reach_the_templates() -> None:
    """``invoke(kernel, question, arguments, **kwargs)``: the arguments by position, more by name."""
    kernel, service = scripted([PLAN, final()])
    planner = planner_with(get_step_prompt=lambda: "{{$city}} {{$day}} {{$goal}}")
    await planner.invoke(kernel, "Go.", KernelArguments(city="Rome"), day="Monday")

    assert service.requests[1].messages[0]["content"] == "Rome Monday Go."


async def test_old_settings_are_accepted() -> None:
    """execution_settings of OpenAI's class are used, and not changed by a run."""
    settings = OpenAIChatPromptExecutionSettings(
        service_id="chat", temperature=0.0, top_p=0.5
    )
    before = settings.model_dump()
    async with openai_kernel([PLAN, final()]) as (kernel, server):
        options: dict[str, Any] = {
            "execution_settings": settings,
            "max_completion_tokens": 99,
        }
        await planner_with("chat", **options).invoke(kernel, "Go.")

    assert [request.body["top_p"] for request in server.requests] == [0.5, 0.5]
    assert settings.model_dump() == before


async def test_defects_reported_against_the_old_planner_are_fixed() -> None:
    """No helper plugin is left in the caller's kernel, and a run at its limit has an answer."""
    kernel = kernel_of(ScriptedChatCompletion(never_stops, service_id="chat"))
    result = await planner_with("chat", max_iterations=2).invoke(kernel, "Go.")

    assert list(kernel.plugins) == ["math"]
    assert (result.final_answer, result.iterations) == ("Enough.", 2)


async def test_the_prompts_can_be_read_and_set() -> None:
    """``generate_plan_yaml`` and ``step_prompt`` are what the options give; set, they are what the next run sends."""
    kernel, service = scripted([PLAN, final(), PLAN, final()])
    planner = planner_with(
        get_step_prompt=lambda: "Old step. {{$goal}} {{$initial_plan}}"
    )
    assert planner.step_prompt == "Old step. {{$goal}} {{$initial_plan}}"
    assert planner.generate_plan_yaml.startswith("name: ")
    await planner.invoke(kernel, "Add.")
    planner.step_prompt = "New step. {{$goal}} {{$initial_plan}}"
    planner.generate_plan_yaml = "template: New plan. {{$goal}}"
    assert planner.step_prompt.startswith("New step.")
    await planner.invoke(kernel, "Add.")
    sent = [str(request.messages[0]["content"]) for request in service.requests]
    assert sent[1].startswith("Old step. Add.")
    assert sent[2].startswith("New plan. Add.")
    assert sent[3].startswith("New step. Add.")


@pytest.mark.parametrize("name", ["generate_plan_yaml", "step_prompt"])
@each_of("value", [None, 7, object(), b"text"], ids=["none", "int", "object", "bytes"])
def test_an_invalid_template_cannot_be_set(name: str, value: Any) -> None:
    """It is refused by name, in a sentence, and the old one stays."""
    planner = planner_with()
    before = getattr(planner, name)
    with pytest.raises(PlannerInvalidConfigurationError, match="prompt template"):
        setattr(planner, name, value)
    assert getattr(planner, name) == before


def test_the_final_answer_function_returns_what_it_returned() -> None:
    """A program that calls it gets the removed planner's word."""
    assert UserInteraction().send_final_answer("It is 3.") == "Thanks"
