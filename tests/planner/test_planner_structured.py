"""A final answer in a form: asked for without functions, checked, asked for again, and never past the budget."""

import asyncio
import json
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field
from semantic_kernel.connectors.ai.prompt_execution_settings import (
    PromptExecutionSettings,
)

from planner_ext import Budget
from planner_ext.errors import PlannerInvalidConfigurationError
from planner_ext.events import AnswerChecked
from planner_ext.hitl_manager import Checkpoint
from planner_ext.iteration import StopHandle
from planner_ext.sk.run.form import response_form
from planner_ext.testing import (
    ScriptedChatCompletion,
    ScriptedReply,
    ScriptedRequest,
    say,
)
from planner_ext.testing.service import ScriptedPromptExecutionSettings
from support.examples import tried
from support.narrow import present
from support.planner import (
    ADD,
    PLAN,
    both_ways,
    final,
    invoke,
    kernel_of,
    openai_kernel,
    planner_with,
    resume,
    scripted,
)
from support.stock import scripted_by
from support.values import each_of


class Sum(BaseModel):
    """The answer's form."""

    total: int = Field(ge=0)
    unit: str


GOOD = say('{"total": 3, "unit": "apples"}')
VALUE = Sum(total=3, unit="apples")
SCHEMA: dict[str, Any] = Sum.model_json_schema()
FORMS: dict[str, Any] = {
    "model": Sum,
    "schema": SCHEMA,
    "openai": {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}},
}

every_form = each_of("form", FORMS.values(), ids=FORMS.keys())


@both_ways
@every_form
async def test_only_the_request_for_the_answer_carries_the_form(
    form: Any, streamed: bool
) -> None:
    """Requests with functions have no response_format; prose is asked for again in the form, without functions."""
    async with openai_kernel([ADD, say("It is 3."), GOOD]) as (kernel, server):
        planner = planner_with("chat", plan=False, response_format=form)
        result = await invoke(planner, kernel, streamed=streamed)
    carried = [request.body.get("response_format") for request in server.requests]
    assert carried[:2] == [None, None]
    last: Any = carried[2]
    assert (last["type"], "total" in last["json_schema"]["schema"]["properties"]) == (
        "json_schema",
        True,
    )
    assert [bool(request.tools) for request in server.requests] == [True, True, False]
    assert result.status == "answered"
    assert result.final_answer == GOOD.text
    assert result.iterations == 3
    assert result.value == (VALUE if form is Sum else VALUE.model_dump())


@both_ways
async def test_an_answer_in_its_form_is_taken_as_it_is(streamed: bool) -> None:
    """A plain reply that validates costs no further request."""
    kernel, service = scripted([GOOD])
    result = await invoke(
        planner_with(plan=False, response_format=Sum), kernel, streamed=streamed
    )
    assert result.status == "answered"
    assert result.value == VALUE
    assert len(service.requests) == 1


async def test_the_final_answer_function_may_hand_it_over_in_its_form() -> None:
    """``SendFinalAnswer`` with text that validates ends the run; otherwise one more request asks for the form."""
    kernel, service = scripted([PLAN, final(present(GOOD.text))])
    planner = planner_with(response_format=Sum)
    result = await invoke(planner, kernel)
    assert result.status == "answered"
    assert result.value == VALUE
    assert len(service.requests) == 2
    kernel, service = scripted([PLAN, final("It is 3."), GOOD])
    result = await invoke(planner, kernel)
    assert result.status == "answered"
    assert result.value == VALUE
    assert len(service.requests) == 3


async def test_the_model_reads_what_was_wrong() -> None:
    """The request for the form names the problems of the last answer."""
    kernel, service = scripted([say('{"total": -1}'), GOOD])
    await invoke(planner_with(plan=False, response_format=Sum), kernel, streamed=False)
    asked = str(service.requests[1].messages[-1]["content"])
    assert "total: Input should be greater than or equal to 0" in asked
    assert "unit: Field required" in asked
    assert "JSON schema" not in asked  # the settings say it


async def test_settings_without_a_place_for_the_form_get_it_in_the_message() -> None:
    """A connector whose settings have no response_format gets the schema in words."""

    class PlainSettings(ScriptedPromptExecutionSettings):
        response_format: None = None

    class Plain(ScriptedChatCompletion):
        def get_prompt_execution_settings_class(self) -> type[PromptExecutionSettings]:
            return PlainSettings

    service = scripted_by(Plain, [say("It is 3."), GOOD])
    kernel = kernel_of(service)
    result = await invoke(planner_with(plan=False, response_format=Sum), kernel)
    assert result.value == VALUE
    assert json.dumps(SCHEMA) in str(service.requests[1].messages[-1]["content"])


async def test_the_reserved_trip_asks_in_the_form_at_once() -> None:
    """The request that a limit forces carries the form; the run ends at its limit and still has its value."""
    async with openai_kernel([ADD, GOOD]) as (kernel, server):
        planner = planner_with(
            "chat", plan=False, max_iterations=2, response_format=Sum
        )
        result = await invoke(planner, kernel)
    assert server.requests[1].body.get("response_format") is not None
    assert result.status == "limit_reached"
    assert result.limit == "max_iterations"
    assert result.value == VALUE


async def test_at_the_limit_the_text_is_kept_and_the_reason_says_what_is_wrong() -> (
    None
):
    """Without a trip for another request the run ends limited, with the raw text and no value."""
    kernel, service = scripted([say("a"), say("b"), say("c"), GOOD])
    planner = planner_with(plan=False, max_iterations=3, response_format=Sum)
    result = await invoke(planner, kernel)
    assert result.status == "limit_reached"
    assert result.limit == "max_iterations"
    assert result.final_answer == "c"
    assert result.value is None
    assert "Invalid JSON" in result.reason
    assert len(service.requests) == 3
    more = await resume(
        planner,
        kernel,
        result.checkpoint,
        budget=Budget(max_iterations=4),
    )
    assert more.status == "answered"
    assert more.value == VALUE
    assert more.iterations == 4


async def test_a_token_limit_forbids_the_request_for_the_form() -> None:
    """Asking again for the form does not count as a forced answer: once the tokens are spent, it is not done."""
    kernel, service = scripted([say("prose"), GOOD])
    planner = planner_with(
        plan=False, budget=Budget(max_total_tokens=1), response_format=Sum
    )
    result = await invoke(planner, kernel, streamed=False)
    assert result.status == "limit_reached"
    assert result.limit == "max_total_tokens"
    assert len(service.requests) == 1


async def test_a_used_up_call_limit_does_not_forbid_it() -> None:
    """Asking again starts no function; the run ends at the limit that forced the answer, in its form."""
    kernel, service = scripted([ADD, say("prose"), GOOD])
    planner = planner_with(
        plan=False, budget=Budget(max_tool_calls=0), response_format=Sum
    )
    result = await invoke(planner, kernel, streamed=False)
    assert result.status == "limit_reached"
    assert result.limit == "max_tool_calls"
    assert result.value == VALUE
    assert [request.tools != () for request in service.requests] == [True, False, False]


async def test_steps_are_closed_in_prose() -> None:
    """Under ``use_attempts`` a reply that closes a step does not answer the run, and need not have the form."""
    kernel, service = scripted([ADD, say("Added."), say("It is 3."), GOOD])
    planner = planner_with(plan=False, control="use_attempts", response_format=Sum)
    result = await invoke(planner, kernel, streamed=False)
    assert result.status == "answered"
    assert result.value == VALUE
    assert len(service.requests) == 4
    assert [
        fact.answer for fact in result.facts if isinstance(fact, AnswerChecked)
    ] == ["It is 3.", GOOD.text]


async def test_a_run_continues_in_another_process_with_the_form_given_again() -> None:
    """A checkpoint does not hold the form: resumed without it the run is refused, with it the answer has it."""
    service = ScriptedChatCompletion([say("prose"), RuntimeError("no line"), GOOD])
    kernel = kernel_of(service)
    planner = planner_with(plan=False, response_format=Sum)
    with pytest.raises(Exception, match="no line") as caught:
        await invoke(planner, kernel)
    error: Any = caught.value
    text = error.checkpoint.to_json()
    assert "properties" not in text
    with pytest.raises(PlannerInvalidConfigurationError, match="response_format"):
        await resume(
            planner_with(plan=False),
            kernel,
            Checkpoint.from_json(text),
        )
    result = await resume(planner, kernel, Checkpoint.from_json(text))
    assert (result.status, result.value) == ("answered", VALUE)


async def test_an_answer_that_never_meets_its_form_is_not_asked_for_without_end() -> (
    None
):
    """Without a limit on round trips it is asked for again ten times; resumed, it is asked for ten times more."""
    kernel, service = scripted(
        lambda request: say("prose") if request.index < 15 else GOOD
    )
    planner = planner_with(plan=False, max_iterations=None, response_format=Sum)
    result = await invoke(planner, kernel)
    assert result.status == "incomplete"
    assert result.final_answer == "prose"
    assert result.value is None
    assert len(service.requests) == 11
    assert "asked for again 10 times" in result.reason
    done = await resume(
        planner,
        kernel,
        Checkpoint.from_json(result.checkpoint.to_json()),
    )
    assert done.status == "answered"
    assert done.value == VALUE
    assert len(service.requests) == 16


@both_ways
async def test_an_answer_that_came_with_a_stop_is_still_read(streamed: bool) -> None:
    """A stop during the last request ends the run ``stopped``; an answer that is in its form has its value."""
    stop = StopHandle()

    def reply(request: ScriptedRequest) -> ScriptedReply:
        stop.stop("Enough.")
        return GOOD

    kernel, service = scripted(reply)
    result = await invoke(
        planner_with(plan=False, response_format=Sum),
        kernel,
        streamed=streamed,
        stop=stop,
    )
    assert result.status == "stopped"
    assert result.value == VALUE
    assert len(service.requests) == 1


@tried(40)
@given(
    trips=st.integers(1, 6),
    turns=st.lists(
        st.sampled_from([ADD, say("prose"), say("{}"), final("no"), GOOD, say("")]),
        min_size=1,
        max_size=6,
    ),
    control=st.sampled_from(["iterations_metadata", "use_attempts"]),
    plan=st.booleans(),
)
def test_the_budget_holds_for_all_answers(
    trips: int, turns: list[ScriptedReply], control: Any, plan: bool
) -> None:
    """Never a request more than allowed; a value exactly where the answer is in its form."""

    def reply(request: ScriptedRequest) -> ScriptedReply:
        turn = turns[request.index % len(turns)]
        return turn if request.tools or turn.text else say("prose")

    kernel, service = scripted(reply)
    planner = planner_with(
        plan=plan, max_iterations=trips, control=control, response_format=Sum
    )
    result = asyncio.run(invoke(planner, kernel, streamed=False))
    assert len(service.requests) == result.iterations <= trips
    form = response_form(Sum)
    assert form is not None
    assert (result.value is not None) == (form.problem(result.final_answer) == "")
    assert result.status != "answered" or result.value == VALUE


@each_of(
    "given",
    [
        int,
        "json",
        {},
        {"type": "text"},
        {"type": "json_schema"},
        {"type": "object", "required": 7},
        {"x": object()},
    ],
)
def test_an_invalid_form_is_refused_by_name(given: Any) -> None:
    """A response_format that means nothing is a configuration error before any request."""
    with pytest.raises(PlannerInvalidConfigurationError, match="response_format"):
        planner_with(response_format=given)


class NoSchema(BaseModel):
    """A model of what is no JSON."""

    call: Callable[[int], int]


@each_of(
    ("given", "named"),
    [
        (NoSchema, "NoSchema has no JSON schema"),
        (
            {"type": "object", "properties": {"a": {"$ref": "#/$defs/gone"}}},
            r"'#/\$defs/gone', which is not in it",
        ),
        (
            {"type": "array", "items": {"$ref": "http://127.0.0.1:9/a.json"}},
            r"a\.json', which is not in it",
        ),
        (
            {"items": {"pattern": "(?=a)b"}},
            r"has the pattern '\(\?=a\)b', which cannot run in time in proportion",
        ),
    ],
)
def test_a_form_that_is_not_whole_is_refused_by_name(given: Any, named: str) -> None:
    """Before any request, and without fetching anything."""
    with pytest.raises(PlannerInvalidConfigurationError, match=named):
        planner_with(response_format=given)


def test_a_schema_may_refer_to_itself() -> None:
    """References within the schema hold, by pointer and by anchor; a number that JSON does not have is refused."""
    tree: dict[str, Any] = {
        "$id": "https://example.org/tree",
        "$defs": {"leaf": {"$anchor": "leaf", "type": "integer"}},
        "properties": {
            "left": {"$ref": "#"},
            "leaf": {"$ref": "#leaf"},
            "other": {"$ref": "#/$defs/leaf"},
        },
    }
    form = response_form(tree)
    assert form is not None
    assert form.problem('{"left": {"leaf": 3}, "other": 4}') == ""
    assert (
        form.problem('{"left": {"leaf": "x"}}')
        == "$.left.leaf: 'x' is not of type 'integer'"
    )
    assert "NaN is not a number of JSON" in form.problem('{"leaf": NaN}')


@pytest.mark.timeout(60)
@each_of(
    ("schema", "hard", "said"),
    [
        ({"pattern": r"^(\w+\s?)*$"}, json.dumps("a" * 60 + "!"), "does not match"),
        (
            {"uniqueItems": True},
            json.dumps([*({"n": number} for number in range(4_000)), {"n": 0}]),
            "items that are equal",
        ),
        (
            {"items": {"$ref": "#/properties/a"}},
            "[" * 300 + "]" * 300,
            "nested too deeply",
        ),
        ({"type": ["integer", "string"]}, "1e400", "too large for a float"),
        ({"multipleOf": 0.3}, "1" + "0" * 4_000, "is not a multiple of 0.3"),
        ({"multipleOf": 1e-7}, "1e400", "too large for a float"),
    ],
    ids=["pattern", "unique", "deep", "infinite", "multiple", "multiple-infinite"],
)
async def test_an_answer_that_is_hard_to_check_is_asked_for_again(
    schema: dict[str, Any], hard: str, said: str
) -> None:
    """Checked in bounded time, without a raw error; the model reads what is wrong, and its next answer counts."""
    kernel, service = scripted([say(f'{{"a": {hard}}}'), say('{"a": "b"}')])
    wanted = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    result = await invoke(planner_with(plan=False, response_format=wanted), kernel)
    assert (result.status, result.value) == ("answered", {"a": "b"})
    assert said in str(service.requests[1].messages[-1]["content"])


class Share(BaseModel):
    """A form whose number is exact."""

    of: Fraction


@pytest.mark.timeout(60)
@each_of("hard", ['"1e30000000"', "1e400", '"1/0"', '["1e30000000"]'])
async def test_a_fraction_in_an_answer_is_bounded(hard: str) -> None:
    """Neither minutes for its digits nor a raw OverflowError: the model reads what is wrong with it."""
    kernel, service = scripted([say(f'{{"of": {hard}}}'), say('{"of": "1/3"}')])
    result = await invoke(planner_with(plan=False, response_format=Share), kernel)
    assert result.status == "answered"
    assert result.value == Share(of=Fraction(1, 3))
    assert len(service.requests) == 2


async def test_json_is_not_demanded_in_a_conversation_that_does_not_speak_of_it() -> (
    None
):
    """OpenAI refuses ``json_object`` without the word: the first answer is free text, the next is asked for as JSON."""
    async with openai_kernel([say("Three."), say('{"total": 3}')]) as (kernel, server):
        planner = planner_with(
            "chat",
            plan=False,
            response_format={"type": "json_object"},
            max_iterations=2,
        )
        kernel.plugins.clear()
        result = await invoke(planner, kernel, streamed=False)
    assert [request.body.get("response_format") for request in server.requests] == [
        None,
        {"type": "json_object"},
    ]
    assert (result.status, result.value) == ("answered", {"total": 3})


def test_any_object_is_a_form() -> None:
    """``json_object`` takes every JSON object, and nothing else."""
    form = response_form({"type": "json_object"})
    assert form is not None
    assert form.parse('{"a": [1]}') == {"a": [1]}
    assert form.problem("[1]") == "$: [1] is not of type 'object'"
    assert "nested too deeply" in form.problem("[" * 100_000)


def test_a_form_stays_as_it_was_given() -> None:
    """The caller's schema is copied: changing it later changes nothing."""
    schema = {"type": "object", "required": ["a"]}
    form = response_form(schema)
    schema["required"] = []
    assert form is not None
    assert form.problem("{}") == "$: 'a' is a required property"
