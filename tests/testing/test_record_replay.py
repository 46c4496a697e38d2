"""Record and replay: a run with a model behind real HTTP is played without it, and what has changed is named."""

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import pytest
from openai import AsyncOpenAI
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.open_ai import (
    OpenAIChatCompletion,
    OpenAIChatPromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function

from planner_ext import (
    Approve,
    Budget,
    Deny,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    FunctionInvokingChatCompletion,
    PlannerPlugin,
    ToolCallHandler,
    requires_approval,
)
from planner_ext.engine.document import dump_facts
from planner_ext.errors import ServiceCallError
from planner_ext.events import CallFinished, ResultReady, TextDelta
from planner_ext.sk.run.behavior import BoundedFunctionChoiceBehavior
from planner_ext.testing import (
    CassetteError,
    ReplayDifferenceError,
    Script,
    ScriptedChatCompletion,
    ScriptedFault,
    ScriptedOpenAIServer,
    call,
    calls,
    record,
    replay,
    say,
)
from planner_ext.testing.cassette import Cassette, same
from support.examples import some_of
from support.odd import ODD, every_place, with_odd
from support.values import each_of

KEY = "sk-proj-0123456789abcdefghij"


class Shop:
    """Prices, and refunds that a person approves."""

    def __init__(self, price: str = "12 EUR") -> None:
        self.shown = price
        self.called: list[str] = []

    @kernel_function(description="The price of an article.")
    def price(self, article: str) -> str:
        self.called.append(f"price {article}")
        return f"{article}: {self.shown}"

    @kernel_function(description="Refund an order.")
    @requires_approval()
    def refund(self, order: str) -> str:
        self.called.append(f"refund {order}")
        return f"refunded {order}"


def shop_kernel(shop: Shop | None = None, service: Any = None) -> Kernel:
    kernel = Kernel()
    kernel.add_plugin(Shop() if shop is None else shop, "shop")
    if service is not None:
        kernel.add_service(service)
    return kernel


@asynccontextmanager
async def model(script: Script) -> AsyncGenerator[OpenAIChatCompletion]:
    """A real connector, at a scripted server."""
    with ScriptedOpenAIServer(script) as server:
        async with AsyncOpenAI(
            base_url=server.url, api_key=KEY, max_retries=0
        ) as client:
            yield OpenAIChatCompletion("gpt-4.1", "chat", async_client=client)


def planner(**options: Any) -> FunctionCallingStepwisePlanner:
    return FunctionCallingStepwisePlanner(
        options=FunctionCallingStepwisePlannerOptions(**{"plan": False, **options})
    )


def document(path: Path) -> Any:
    """Read a cassette's JSON."""
    return json.loads(path.read_text("utf-8"))


def write(path: Path, data: Any) -> None:
    """Write a cassette's JSON."""
    path.write_text(json.dumps(data), "utf-8")


LAMPS = [
    calls(
        call("shop-price", {"article": "lamp"}),
        call("shop-price", {"article": "desk"}),
        text="Both.",
    ),
    say("A lamp costs 12 EUR."),
]


@pytest.fixture
async def cassette(tmp_path: Path) -> Path:
    """Two prices, asked for at the same time."""
    path = tmp_path / "cassettes" / "lamps.json"
    async with model(LAMPS) as service:
        with record(path) as tape:
            await planner().invoke(
                tape.kernel(shop_kernel(service=service)), "What do they cost?"
            )
    return path


async def replayed(path: Path, kernel: Kernel | None = None, **options: Any) -> Any:
    with replay(path, **options) as tape:
        return await planner().invoke(
            tape.kernel(kernel or shop_kernel()), "What do they cost?"
        )


async def test_a_cassette_replayed_a_hundred_times_gives_the_same_journal(
    cassette: Path,
) -> None:
    """Without a model, key or connector, every replay gives one and the same journal: ids and times are recorded."""
    journals = {
        json.dumps(dump_facts((await replayed(cassette)).facts)) for _ in range(100)
    }
    assert len(journals) == 1
    (recorded,) = document(cassette)["runs"]
    (played,) = map(json.loads, journals)
    untimed = [{k: v for k, v in fact.items() if k != "seconds"} for fact in recorded]
    assert [
        {k: v for k, v in fact.items() if k != "seconds"} for fact in played
    ] == untimed
    assert [fact.get("seconds", 0) for fact in played] == pytest.approx(
        [fact.get("seconds", 0) for fact in recorded], abs=0.01
    )


async def test_a_function_that_returns_something_else_is_named(cassette: Path) -> None:
    """The error names the function, what it returned then, and what it returns now."""
    with pytest.raises(
        ReplayDifferenceError,
        match="the result of shop-price: expected 'lamp: 12 EUR', got",
    ) as caught:
        await replayed(cassette, shop_kernel(Shop("13 EUR")))
    found = caught.value.differences
    assert [(one.function, one.expected, one.got) for one in found] == [
        ("shop-price", "lamp: 12 EUR", "lamp: 13 EUR"),
        ("shop-price", "desk: 12 EUR", "desk: 13 EUR"),
    ]
    assert vars(caught.value)["checkpoint"].facts


async def test_differences_are_collected_on_request(cassette: Path) -> None:
    """A run that differs is played to its end, and the differences are listed."""
    with replay(cassette, on_difference="collect") as tape:
        result = await planner().invoke(
            tape.kernel(shop_kernel(Shop("13 EUR"))), "What do they cost?"
        )
    assert result.final_answer == "A lamp costs 12 EUR."
    assert [one.got for one in tape.differences] == ["lamp: 13 EUR", "desk: 13 EUR"]


@pytest.mark.parametrize("functions", ["live", "recorded"])
async def test_calls_start_and_end_in_the_recorded_order(
    cassette: Path, functions: Any
) -> None:
    """A recorded result is there at once, yet the calls of a batch start and end as the functions did."""
    (recorded,) = document(cassette)["runs"]
    played = await replayed(cassette, functions=functions)
    kinds = [
        [(one["type"], one.get("index")) for one in run]
        for run in (dump_facts(played.facts), recorded)
    ]
    assert kinds[0] == kinds[1]


async def test_recorded_functions_are_not_called(cassette: Path) -> None:
    """With functions="recorded" nothing of the application runs, and the model reads what it read."""
    shop = Shop("13 EUR")
    result = await replayed(cassette, shop_kernel(shop), functions="recorded")
    assert shop.called == []
    assert [fact.result for fact in result.facts if isinstance(fact, CallFinished)] == [
        "lamp: 12 EUR",
        "desk: 12 EUR",
    ]


async def test_a_call_that_was_not_recorded_does_not_run(cassette: Path) -> None:
    """With functions="recorded" a reply that was written into the file calls no function either."""
    data = document(cassette)
    data["runs"][0] = [fact for fact in data["runs"][0] if fact["type"] == "RunStarted"]
    write(cassette, data)
    shop = Shop("13 EUR")
    with replay(cassette, functions="recorded", on_difference="collect") as tape:
        await planner().invoke(tape.kernel(shop_kernel(shop)), "What do they cost?")
    assert shop.called == [] and "one more call of shop-price" in {
        one.what for one in tape.differences
    }


async def test_a_changed_prompt_schema_or_setting_is_named(cassette: Path) -> None:
    """A prompt, the schema of a function and a setting are named as what they are, with both values."""

    class Other(Shop):
        @kernel_function(description="The price in EUR.")
        def price(self, article: str) -> str:
            return super().price(article)

    with replay(cassette, on_difference="collect") as tape:
        kernel = tape.kernel(shop_kernel(Other()))
        settings = OpenAIChatPromptExecutionSettings(temperature=0.5)
        await planner(execution_settings=settings).invoke(
            kernel, "What do the two cost?"
        )
    what = [one.what for one in tape.differences]
    assert what == [
        "the schema of shop-price",
        "the setting temperature",
        "message 0 (user)",
    ]
    assert tape.differences[-1].got == "What do the two cost?"
    assert "in EUR" in str(tape.differences[0])


async def test_a_replay_that_asks_less_or_more_is_an_error(cassette: Path) -> None:
    """Requests that were not made, and one for which no reply is left, are named."""
    problem = "request 0, the request: expected 'as recorded', got 'not made'"
    with pytest.raises(ReplayDifferenceError, match=problem), replay(cassette):
        pass
    with replay(cassette) as tape:
        kernel = tape.kernel(shop_kernel())
        await planner().invoke(kernel, "What do they cost?")
        with pytest.raises(ReplayDifferenceError, match="one more request"):
            await planner().invoke(kernel, "And now?")
        tape.differences.clear()


async def test_the_kernel_is_not_changed(tmp_path: Path) -> None:
    """Recording works on a copy: services, plugins and filters of the given kernel stay what they are."""
    async with model(LAMPS) as service:
        with record(tmp_path / "c.json") as tape:
            kernel = shop_kernel(service=service)
            copied = tape.kernel(kernel)
            copied.add_function("more", Shop().price)
            await planner().invoke(copied, "What do they cost?")
            assert kernel.services == {"chat": service}
            assert list(kernel.plugins) == ["shop"]


async def test_functions_end_in_the_recorded_order(tmp_path: Path) -> None:
    """Calls that run at the same time end as they did, so a journal does not depend on threads."""

    class Slow:
        def __init__(self, waits: dict[str, float]) -> None:
            self.waits = waits

        @kernel_function(description="Work.")
        def work(self, name: str) -> str:
            time.sleep(self.waits[name])
            return name

    def kernel(waits: dict[str, float], service: Any = None) -> Kernel:
        made = shop_kernel(service=service)
        made.add_plugin(Slow(waits), "slow")
        return made

    path = tmp_path / "c.json"
    script = [
        calls(call("slow-work", {"name": "a"}), call("slow-work", {"name": "b"})),
        say("Done."),
    ]
    async with model(script) as service:
        with record(path) as tape:
            recorded = await planner().invoke(
                tape.kernel(kernel({"a": 0.2, "b": 0.0}, service)), "Go."
            )
    with replay(path) as tape:
        played = await planner().invoke(
            tape.kernel(kernel({"a": 0.0, "b": 0.1})), "Go."
        )
    ended = [
        [fact.result for fact in run.facts if isinstance(fact, CallFinished)]
        for run in (recorded, played)
    ]
    assert ended == [["b", "a"], ["b", "a"]]


async def test_a_stream_is_recorded_and_replayed(tmp_path: Path) -> None:
    """A streamed run is replayed as a stream, in pieces, or plainly; both give the same facts."""
    path = tmp_path / "c.json"
    async with model(LAMPS) as service:
        with record(path) as tape:
            kernel = tape.kernel(shop_kernel(service=service))
            events = [
                event
                async for event in planner().invoke_stream(kernel, "What do they cost?")
            ]
    assert any(isinstance(event, TextDelta) for event in events)
    with replay(path) as tape:
        kernel = tape.kernel(shop_kernel())
        played = [
            event
            async for event in planner().invoke_stream(kernel, "What do they cost?")
        ]
    texts = [
        event.text
        for event in played
        if isinstance(event, TextDelta) and event.iteration == 1
    ]
    assert len(texts) > 1
    assert "".join(texts) == "A lamp costs 12 EUR."
    last = played[-1]
    assert isinstance(last, ResultReady)
    assert dump_facts(last.result.facts) == dump_facts((await replayed(path)).facts)


@pytest.mark.parametrize("streaming", [False, True])
async def test_service_and_handler_are_recorded(
    tmp_path: Path, *, streaming: bool
) -> None:
    """A FunctionInvokingChatCompletion and a ToolCallHandler are on the tape as the planner is."""

    async def ask(kernel: Kernel) -> list[str]:
        settings = OpenAIChatPromptExecutionSettings(
            function_choice_behavior=BoundedFunctionChoiceBehavior.Auto()
        )
        service: Any = kernel.get_service("chat")
        history = ChatHistory()
        history.add_user_message("What do they cost?")
        if streaming:
            chunks = [
                one
                async for one in service.get_streaming_chat_message_content(
                    history, settings, kernel=kernel
                )
            ]
            first = "".join(str(one) for one in chunks)
        else:
            first = str(
                await service.get_chat_message_content(history, settings, kernel=kernel)
            )
        asked = ChatHistory()
        asked.add_user_message("And again?")
        handler = ToolCallHandler(kernel)
        stream = handler.invoke_stream(asked) if streaming else handler.invoke(asked)
        return [first, "".join([str(one) async for one in stream])]

    path = tmp_path / "c.json"
    async with model([*LAMPS, *LAMPS]) as service:
        with record(path) as tape:
            recorded = await ask(
                tape.kernel(
                    shop_kernel(service=FunctionInvokingChatCompletion(service))
                )
            )
    async with model([]) as unused:
        with replay(path) as tape:
            played = await ask(
                tape.kernel(shop_kernel(service=FunctionInvokingChatCompletion(unused)))
            )
    assert played == recorded
    assert "A lamp costs 12 EUR." in recorded[0]
    assert len(tape.runs) == 2


async def test_nested_planners_and_prompts_are_on_the_tape(tmp_path: Path) -> None:
    """Requests of a planner and of a prompt inside a function are recorded and named after it; runs have journals."""
    path = tmp_path / "c.json"

    def kernel(service: Any = None) -> Kernel:
        made = shop_kernel(service=service)
        made.add_plugin(
            PlannerPlugin(planner(excluded_plugins={"helper", "writer"})), "helper"
        )
        made.add_function(
            plugin_name="writer", function_name="rhyme", prompt="Rhyme on {{$word}}."
        )
        return made

    def script(request: Any) -> Any:
        last = request.messages[-1]
        if last["role"] == "user" and "Rhyme on" in last["content"]:
            return say("camp")
        if last["role"] == "user":
            wanted = (
                call("helper-reach_goal", {"goal": "Price of a lamp."}),
                call("writer-rhyme", {"word": "lamp"}),
            )
            return (
                call("shop-price", {"article": "lamp"})
                if "lamp" in last["content"]
                else calls(*wanted)
            )
        return say(f"It is: {last['content']}")

    async with model(script) as service:
        names = kernel(service).get_full_list_of_function_metadata()
        assert "helper-reach_goal" in {one.fully_qualified_name for one in names}, names
        with record(path) as tape:
            recorded = await planner().invoke(tape.kernel(kernel(service)), "Go.")
    written = document(path)
    assert {one.get("function", "") for one in written["requests"]} == {
        "",
        "helper-reach_goal",
        "writer-rhyme",
    }
    assert len(written["runs"]) == 2
    for functions in ("live", "recorded"):
        with replay(path, functions=functions) as tape:
            played = await planner().invoke(tape.kernel(kernel()), "Go.")
        assert played.final_answer == recorded.final_answer
        assert [len(run) for run in tape.runs.values()] == [
            len(run) for run in written["runs"]
        ]
        assert (played.iterations, played.usage.total_tokens) == (
            recorded.iterations,
            recorded.usage.total_tokens,
        )


_Hidden = Annotated[Kernel, "The kernel", {"include_in_function_choices": False}]


class Lab:
    """A function that makes a run, in which another function asks the model."""

    @kernel_function(description="Research a topic.")
    async def research(self, topic: str, kernel: _Hidden) -> str:
        return (
            await planner(excluded_functions={"lab-research"}).invoke(
                kernel, f"Deep: {topic}"
            )
        ).final_answer

    @kernel_function(description="Judge a topic.")
    async def judge(self, topic: str, kernel: _Hidden) -> str:
        return str(await kernel.invoke_prompt(f"Judge {topic}."))


@pytest.mark.parametrize("functions", ["live", "recorded"])
async def test_requests_far_inside_a_function_are_its_own(
    tmp_path: Path, functions: Any
) -> None:
    """A recorded function is not called, so that no request inside it is missed, however deep it was made."""
    path = tmp_path / "c.json"

    def script(request: Any) -> Any:
        last = str(request.messages[-1]["content"])
        if request.messages[-1]["role"] == "user" and not last.startswith("Judge"):
            return call(
                "lab-judge" if last.startswith("Deep") else "lab-research",
                {"topic": "lamps"},
            )
        return say("Fine.")

    async def run(kernel: Kernel) -> Any:
        kernel.add_plugin(Lab(), "lab")
        return await planner(excluded_functions={"lab-judge"}).invoke(kernel, "Go.")

    async with model(script) as service:
        with record(path) as tape:
            recorded = await run(tape.kernel(shop_kernel(service=service)))
    inside = [
        (one.get("function", ""), one.get("within", []))
        for one in document(path)["requests"]
    ]
    assert ("lab-judge", ["lab-research"]) in inside
    with replay(path, functions=functions) as tape:
        played = await run(tape.kernel(shop_kernel()))
    assert (played.final_answer, played.iterations) == (
        recorded.final_answer,
        recorded.iterations,
    )


async def test_a_run_that_pauses_is_recorded_and_replayed(tmp_path: Path) -> None:
    """Pause and resume are on one cassette; a changed decision is a difference in what the model reads."""
    path, script = (
        tmp_path / "c.json",
        [call("shop-refund", {"order": "A-7"}), say("Refunded.")],
    )

    async def run(kernel: Kernel, decision: Any) -> Any:
        paused = await planner().invoke(kernel, "Refund A-7.")
        assert paused.status == "paused"
        decisions = {one.id: decision for one in paused.pending}
        return await planner().resume(kernel, paused.checkpoint, decisions)

    async with model(script) as service:
        with record(path) as tape:
            recorded = await run(
                tape.kernel(shop_kernel(service=service)), Approve(by="ann")
            )
    with replay(path) as tape:
        played = await run(tape.kernel(shop_kernel()), Approve(by="ann"))
    journals = [
        [{**one, "seconds": 0} for one in dump_facts(run.facts)]
        for run in (played, recorded)
    ]
    assert journals[0] == journals[1]
    problem = "result of shop-refund: expected 'refunded A-7', got "
    with pytest.raises(ReplayDifferenceError, match=problem), replay(path) as tape:
        await run(tape.kernel(shop_kernel()), Deny("no"))


async def test_a_request_that_failed_fails_again(tmp_path: Path) -> None:
    """An error of the service is on the cassette, with its causes: the replay raises what was raised."""
    path = tmp_path / "c.json"
    async with model([ScriptedFault(status=429)]) as service:
        with record(path) as tape:
            kernel = tape.kernel(shop_kernel(service=service))
            with pytest.raises(ServiceCallError) as recorded:
                await planner().invoke(kernel, "What do they cost?")
    with pytest.raises(ServiceCallError) as played:
        await replayed(path)
    said = re.sub(
        r" Its endpoint is \S+/\.", "", str(recorded.value)
    )  # a cassette has none
    assert str(played.value) == said
    assert "RateLimitError" in str(played.value)


class Ärger(Exception):
    """A class of an application, whose name is not an ASCII identifier."""


Ärger.__name__ = "Ärger[int]"


async def test_any_exception_of_a_service_is_recorded(tmp_path: Path) -> None:
    """For every class of it, the run gets the service's own exception, and a replay one of that text."""
    path = tmp_path / "c.json"
    for tape, service in (
        (record(path), ScriptedChatCompletion([Ärger("nicht da")])),
        (replay(path), None),
    ):
        with tape as made, pytest.raises(ServiceCallError) as raised:
            await planner().invoke(made.kernel(shop_kernel(service=service)), "Go.")
        assert str(raised.value.__cause__) == "nicht da"


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_request_that_was_abandoned_is_abandoned_again(
    tmp_path: Path, *, streaming: bool
) -> None:
    """A request that a limit of time cut off takes as long in the replay, which ends as the recorded run did."""
    path, limited = tmp_path / "c.json", planner(budget=Budget(max_active_seconds=0.3))

    async def hang(request: Any) -> None:
        if request.index == 1:
            await asyncio.sleep(60)

    async def run(kernel: Kernel) -> Any:
        if not streaming:
            return await limited.invoke(kernel, "Go.")
        async with aclosing(limited.invoke_stream(kernel, "Go.")) as events:
            (result,) = [
                event.result async for event in events if isinstance(event, ResultReady)
            ]
            return result

    script = [call("shop-price", {"article": "lamp"}), say("Too late.")]
    with record(path) as tape:
        recorded = await run(
            tape.kernel(
                shop_kernel(service=ScriptedChatCompletion(script, before_reply=hang))
            )
        )
    assert (recorded.status, recorded.limit) == ("limit_reached", "max_active_seconds")
    with replay(path) as tape:
        played = await run(tape.kernel(shop_kernel()))
    journals = [
        [{**one, "seconds": 0} for one in dump_facts(run.facts)]
        for run in (played, recorded)
    ]
    assert journals[0] == journals[1]


async def test_a_stream_that_was_left_is_left_again(tmp_path: Path) -> None:
    """What had arrived of its text arrives again."""
    path = tmp_path / "c.json"

    async def read(kernel: Kernel, pieces: int) -> str:
        text = ""
        async with aclosing(planner().invoke_stream(kernel, "Go.")) as events:
            async for event in events:
                text += event.text if isinstance(event, TextDelta) else ""
                if len(text) >= pieces:
                    break
        return text

    with record(path) as tape:
        await read(
            tape.kernel(
                shop_kernel(service=ScriptedChatCompletion([say("word " * 100)]))
            ),
            8,
        )
    with replay(path) as tape:
        assert (await read(tape.kernel(shop_kernel()), 8)).startswith("word wor")


async def test_an_object_in_the_settings_is_compared_without_its_address(
    tmp_path: Path,
) -> None:
    """Settings may hold values beyond JSON: a replay in another process has other objects, which count as equal."""
    path = tmp_path / "c.json"

    async def run(kernel: Kernel) -> Any:
        chat: Any = kernel.get_service()
        settings = OpenAIChatPromptExecutionSettings(extra_body={"routing": Shop()})
        history = ChatHistory()
        history.add_user_message("Go.")
        return await chat.get_chat_message_content(history, settings, kernel=kernel)

    kept = [Shop()]  # so that no address is used twice
    for tape, service in (
        (record(path), ScriptedChatCompletion([say("Yes.")])),
        (replay(path), None),
    ):
        with tape as made:
            assert str(await run(made.kernel(shop_kernel(kept[0], service)))) == "Yes."


@each_of(
    ("recorded", "value", "equal"),
    [
        ("a [scrubbed] b [scrubbed]", "a secret b other", True),
        ("a [scrubbed] b", "a  b", True),
        ("a [scrubbed] b", "a b", False),
        ("[scrubbed]x[scrubbed]x", "xx", True),
        ("[scrubbed]x[scrubbed]x", "x", False),
        ("[scrubbed]", "", True),
        ({"a": ["[scrubbed]", 1]}, {"a": ["b", 1]}, True),
        ({"a": ["[scrubbed]", 1]}, {"a": ["b", 2]}, False),
        ({"a": "[scrubbed]"}, {"a": 5}, False),
        ([1], [1, 2], False),
    ],
)
def test_what_was_scrubbed_equals_any_text(
    recorded: Any, value: Any, equal: bool
) -> None:
    """A scrubbed part stands for any text, and for nothing but text; what is around it must be there, in order."""
    assert same(recorded, value) is equal


def test_a_failed_test_leaves_the_cassette_as_it_was(cassette: Path) -> None:
    """The file is written when the block ends well, and only then."""
    before = cassette.read_bytes()
    with pytest.raises(RuntimeError, match="no"), record(cassette):
        raise RuntimeError("no")
    assert cassette.read_bytes() == before
    assert [one.name for one in cassette.parent.iterdir()] == [cassette.name]


@pytest.mark.parametrize(
    ("place", "value", "named"),
    [
        (["kind"], "run", "'run'"),
        (["schema"], 99, "schema 99"),
        (["requests", 1, "continues"], 1, r"requests\.1\.continues"),
        (["requests", 0, "replies"], [{"role": "nobody"}], r"requests\.0 "),
        (["requests", 0, "settings"], "x", r"requests\.0\.settings"),
        (["requests", 0, "messages"], [{"tool_calls": [5]}], r"requests\.0 "),
        (
            ["requests", 0, "error"],
            [{"type": "os.system", "text": "x"}],
            r"requests\.0\.error\.0\.type",
        ),
        (["runs", 0, 1, "iteration"], "x", r"runs\.0.*iteration"),
        (["runs", 0, 0, "type"], "Ended", r"runs\.0"),
        (["services"], {"chat": 5}, r"services\.chat"),
        (["services"], {"chat": " "}, r"services\.chat"),
        (["more"], 1, "more"),
    ],
)
async def test_a_damaged_cassette_is_refused_with_the_place(
    cassette: Path, place: list[Any], value: Any, named: str
) -> None:
    """A file that was altered is refused before anything runs, and the error names the place."""
    data = document(cassette)
    inner: Any = data
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    write(cassette, data)
    with pytest.raises(CassetteError, match=named):
        await replayed(cassette)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"[" * 100_000,
        b'{"schema": 1, "schema": 1}',
        b'{"schema": 1}',
    ],
)
def test_a_file_other_than_a_cassette_is_refused(
    tmp_path: Path, content: bytes
) -> None:
    """Neither size nor depth nor encoding of a file does more than raise an error that names the file."""
    path = tmp_path / "c.json"
    path.write_bytes(content)
    with pytest.raises(CassetteError, match=r"c\.json"), replay(path):
        pass


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({"note": 10**5000}, "cannot be written: .*digits"),
        ({"note": "ü" * 99}, "at most 400"),
    ],
)
async def test_what_could_not_be_read_is_not_written(
    tmp_path: Path, metadata: Any, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes when the cassette is recorded, not when a test replays it; the earlier file stays."""
    path, service = (
        tmp_path / "c.json",
        ScriptedChatCompletion([say("Yes.")], metadata=metadata),
    )
    path.write_text("the earlier one")
    monkeypatch.setattr("planner_ext.testing.cassette.MOST_BYTES", 400)
    with pytest.raises(CassetteError, match=problem), record(path) as tape:
        await planner().invoke(tape.kernel(shop_kernel(service=service)), "Go.")
    assert path.read_text() == "the earlier one"


def test_a_file_that_is_too_large_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is read up to a size, before it is parsed."""
    path = tmp_path / "c.json"
    path.write_bytes(b"x" * 401)
    monkeypatch.setattr("planner_ext.engine.document.MOST_BYTES", 400)
    with (
        pytest.raises(CassetteError, match=r"c\.json is too large for a cassette"),
        replay(path),
    ):
        pass


def test_a_small_file_does_not_become_a_large_one(tmp_path: Path) -> None:
    """Requests that each continue the one before are bounded by what they hold together, not by the file's size."""
    requests: list[Any] = [
        {"service": "s", "continues": n - 1 if n else None, "messages": [{}]}
        for n in range(20_000)
    ]
    data = {
        "schema": 1,
        "kind": "cassette",
        "versions": {},
        "options": [],
        "services": {},
        "requests": requests,
        "runs": [],
    }
    write(tmp_path / "c.json", data)
    with (
        pytest.raises(CassetteError, match=r"requests\.\d+ .* messages"),
        replay(tmp_path / "c.json"),
    ):
        pass


def test_a_missing_cassette_is_named(tmp_path: Path) -> None:
    """The error names the file that is not there."""
    with (
        pytest.raises(CassetteError, match=r"gone\.json cannot be read"),
        replay(tmp_path / "gone.json"),
    ):
        pass


async def test_a_connector_without_a_network_is_recorded_too(tmp_path: Path) -> None:
    """Any connector can be recorded, and is replayed by its own settings where the kernel has it."""
    path = tmp_path / "c.json"
    with record(path) as tape:
        await planner().invoke(
            tape.kernel(shop_kernel(service=ScriptedChatCompletion(LAMPS))),
            "What do they cost?",
        )
    idle = ScriptedChatCompletion([])
    assert (
        await replayed(path, shop_kernel(service=idle))
    ).final_answer == "A lamp costs 12 EUR."
    assert idle.requests == []


@pytest.mark.examples
@pytest.mark.parametrize("odd", ODD)
def test_an_odd_value_at_any_place_of_a_cassette_is_read_or_refused_by_name(
    cassette: Path, odd: str
) -> None:
    """Every defect of a file is a CassetteError: no overflow, no recursion, no bad digits."""
    text = cassette.read_text("utf-8")
    for path in some_of(every_place(json.loads(text))):
        cassette.write_text(with_odd(text, path, ODD[odd]), "utf-8")
        with suppress(CassetteError):
            Cassette.read(cassette)
