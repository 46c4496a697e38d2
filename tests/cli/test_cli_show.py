"""How a run is shown: every fact that matters, in any console."""

import re
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from io import BytesIO, StringIO, TextIOWrapper
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function

from planner_ext import (
    Budget,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    FunctionCallingStepwisePlannerResult,
    PlannerPlugin,
    requires_approval,
)
from planner_ext.cli.show import Progress, print_answer
from planner_ext.cli.text import Terminal, TextFlow, shortened, spent_line
from planner_ext.core.facts import Fact, Rules, RunStarted
from planner_ext.core.text import one_line, printable
from planner_ext.core.values import RequestedCall
from planner_ext.events import CallFinished, ResultReady, TextDelta
from planner_ext.hitl_manager import Deny, ToolCall
from planner_ext.iteration import StopHandle
from planner_ext.testing import Script, ScriptedChatCompletion, call, calls, say
from support.core import PAUSED, began, decided, ended, replied, run_started
from support.core import calls as calls_of
from support.values import each_of


class Shop:
    @kernel_function
    def price(self, article: str) -> int:
        return {"lamp": 42}[article]

    @requires_approval
    @kernel_function
    def buy(self, article: str) -> str:
        return f"one {article}"


def console(
    *, terminal: bool = False, encoding: str = "utf-8", width: int = 80
) -> Terminal:
    """A console that keeps what it prints, in an encoding."""
    file = TextIOWrapper(BytesIO(), encoding=encoding, errors="replace")
    return Terminal(file, width=width, force_terminal=terminal, color_system=None)


def text_of(shown: Terminal) -> str:
    """What a console printed."""
    assert isinstance(shown.file, TextIOWrapper)
    shown.file.flush()
    shown.file.seek(0)
    return shown.file.read()


async def show(
    script: Script, *, on: Terminal, stop: StopHandle | None = None, **options: object
) -> FunctionCallingStepwisePlannerResult:
    """Run a scripted planner streamed, on a console."""
    kernel = Kernel()
    kernel.add_plugin(Shop(), "shop")
    kernel.add_service(ScriptedChatCompletion(script))
    planner = FunctionCallingStepwisePlanner(
        options=FunctionCallingStepwisePlannerOptions(**{"plan": False, **options})
    )
    with Progress(on) as progress:
        async for event in planner.invoke_stream(kernel, "What is a lamp?", stop=stop):
            progress.show(event)
            if isinstance(event, ResultReady):
                return event.result
    raise AssertionError("no result")


def lines_of(shown: Terminal) -> list[str]:
    """The lines on a console, durations set to nought."""
    return re.sub(r"\d+\.\d\d s", "0.00 s", text_of(shown)).splitlines()


async def test_calls_that_did_not_run_say_why() -> None:
    """An unknown function, unusable arguments and a denial each have a line with what the model reads."""

    async def deny_beds(asked: ToolCall) -> Deny | None:
        return Deny("no beds here") if asked.arguments == {"article": "bed"} else None

    on = console(width=100)
    script = [
        calls(
            call("shop-sell"),
            call("shop-price", '{"article"'),
            call("shop-price", {"article": "bed"}),
            call("shop-price", {"article": "lamp"}),
        ),
        say("Fine."),
    ]
    await show(script, on=on, interceptors=[deny_beds])
    lines = lines_of(on)
    assert lines[0] == "Round trip 1 of 15"
    assert lines[1].startswith(
        '    ✗ shop-sell   not run  There is no function "shop-sell".'
    )
    assert lines[2].startswith("    ✗ shop-price  not run  ")
    assert lines[3].startswith("    ✗ shop-price  not run  ")
    assert "no beds here" in lines[3]
    assert lines[4:] == [
        '    → shop-price(article="lamp")',
        "    ✓ shop-price   0.00 s  42",
        "Round trip 2 of 15",
        "    Fine.",
    ]


async def test_a_failure_shows_the_exception_that_the_model_does_not_read() -> None:
    """The person at the terminal sees what went wrong; the model only that it did."""
    on = console()
    result = await show([call("shop-price", {"article": "bed"}), say("Sorry.")], on=on)
    assert "    ✗ shop-price   0.00 s  KeyError: 'bed'" in lines_of(on)
    assert result.chat_history is not None
    assert "KeyError" not in str(result.chat_history.messages[2].items[0])


async def test_a_stop_is_shown_with_its_reason() -> None:
    """What was asked of the run from outside stands where it happened."""
    on, stop = console(), StopHandle()

    def stop_after_the_call(fact: Fact) -> None:
        if isinstance(fact, CallFinished):
            stop.stop("That is enough.")

    result = await show(
        [call("shop-price", {"article": "lamp"})],
        on=on,
        stop=stop,
        observers=[stop_after_the_call],
    )
    assert lines_of(on)[-1] == "    That is enough."
    assert spent_line(result).startswith("stopped: 1 round trip, 1 function call, ")


@each_of(
    ("sent", "shown"),
    [
        ("", ""),
        ("{}", ""),
        ('{"a": [1, "é"], "b": null}', 'a=[1, "é"], b=null'),
        ("[1,\n 2]", "[1, 2]"),
        ("{half", "{half"),
    ],
)
def test_arguments_read_like_a_call(sent: str, shown: str) -> None:
    """An object is written as keywords; anything else stays as it was sent, on one line."""
    on = console()
    asked = RequestedCall(id="c0", name="f", arguments=sent)
    reply = replace(replied(calls_of("f")), calls=(asked,))
    with Progress(on) as progress:
        for fact in (run_started(), reply, decided(0), began(0)):
            progress.show(fact)
    assert lines_of(on)[-1] == f"    → f({shown})"


async def test_a_call_is_shown_with_what_its_function_gets() -> None:
    """Arguments that were converted are shown as they are used, whether the call waits or runs."""
    on = console()
    await show(
        [call("shop-price", {"article": 7}), call("shop-buy", {"article": 7})], on=on
    )
    shown = text_of(on)
    assert 'shop-price(article="7")' in shown
    assert 'shop-buy(article="7") waits' in shown


async def test_a_call_that_waits_is_shown_as_it_will_run() -> None:
    """A pause shows the exact call, and nothing more is waited for."""
    on = console()
    result = await show([call("shop-buy", {"article": "lamp"})], on=on)
    assert lines_of(on)[-1] == '    ? shop-buy(article="lamp") waits for a decision'
    assert spent_line(result).startswith("paused: 1 round trip, 0 function calls, ")


async def test_a_run_inside_that_waits_is_not_shown_as_the_call_around_it() -> None:
    """The call around it is not the one to decide: its line says that something inside is."""
    on = console()
    buys = call("shop-buy", {"article": "lamp"})
    kernel = Kernel()
    kernel.add_plugin(Shop(), "shop")
    kernel.add_service(
        ScriptedChatCompletion([call("desk-reach_goal", {"goal": "Buy."}), buys])
    )
    options = FunctionCallingStepwisePlannerOptions(plan=False)
    planner = FunctionCallingStepwisePlanner(options=options)
    inner = FunctionCallingStepwisePlanner(options=options)
    kernel.add_plugin(PlannerPlugin(inner), "desk")
    with Progress(on) as progress:
        result = await progress.watch(planner.invoke_stream(kernel, "Go."))
    assert [one.fully_qualified_name for one in result.pending] == ["shop-buy"]
    said = "desk-reach_goal waits: a call or question inside needs a person"
    assert lines_of(on)[-1] == f"    ? {said}"


async def test_withheld_calls_and_withdrawn_functions_name_the_limit() -> None:
    """Beyond a limit, calls are shown as not run, and the last request as one without functions."""
    on = console()
    script = [call("shop-price", {"article": "lamp"}), say("No idea.")]
    result = await show(script, on=on, budget=Budget(max_tool_calls=0))
    lines = lines_of(on)
    assert "    ✗ shop-price  not run  The limit max_tool_calls=0 was reached." in lines
    assert "    functions were withdrawn: max_tool_calls" in lines
    assert spent_line(result).startswith(
        "limit reached (max_tool_calls): 2 round trips, 0 function calls, "
    )


async def test_each_round_trip_says_what_is_left_of_the_other_limits() -> None:
    """Calls, tokens, cost and active time, as far as they are limited; its own number has the round trips."""
    on = console(width=100)
    budget = Budget(
        max_tool_calls=3,
        max_total_tokens=900_000,
        max_cost=0.5,
        max_active_seconds=7000.5,
    )
    script = [call("shop-price", {"article": "lamp"}), say("It is 42.")]
    await show(script, on=on, budget=budget, price=lambda model, usage: 0.125)
    first, second = (line for line in lines_of(on) if line.startswith("Round trip"))
    assert (
        first
        == "Round trip 1 of 15 (3 function calls, 900,000 tokens, $0.5000, 116 minutes left)"
    )
    assert re.fullmatch(
        r"Round trip 2 of 15 \(2 function calls, 899,\d+ tokens, \$0.3750, 116 minutes left\)",
        second,
    )


def test_a_terminal_shows_the_time_that_is_left_at_this_moment() -> None:
    """The tightest of active time, deadline and the command's own timeout, also while no fact comes."""
    now = time.time()
    limits = Budget(
        max_iterations=4,
        max_active_seconds=2000.0,
        deadline=datetime.fromtimestamp(now + 4000, UTC),
    )
    for until, left in (
        (None, "31 minutes"),
        (now + 75, "74 seconds"),
        (now - 1, "0 seconds"),
    ):
        on = console(terminal=True, width=100)
        with Progress(on) as progress:
            progress.until = until
            progress.show(
                RunStarted(
                    run_id="r", rules=Rules(limits=limits), messages=(), at=now - 100
                )
            )
        assert f"waits for the model (4 round trips, {left} left)" in text_of(on)


async def test_a_final_answer_is_not_shown_twice() -> None:
    """The call that hands it over is one line; the answer has its frame."""
    on = console()
    answer = call("UserInteraction-SendFinalAnswer", {"answer": "It is 42."})
    result = await show([say("1. Answer."), answer], on=on, plan=True)
    assert lines_of(on)[-2:] == [
        "Round trip 2 of 15",
        "    → hands over the final answer",
    ]
    print_answer(on, result)
    assert [line.strip("│ ") for line in lines_of(on)[-2:-1]] == ["It is 42."]


async def test_an_uncharged_plan_has_no_number() -> None:
    """Numbers are what the run was charged."""
    on = console()
    await show([say("1. Answer."), say("42")], on=on, plan=True, charge_plan=False)
    assert lines_of(on) == ["Plan", "    1. Answer.", "Round trip 1 of 15", "    42"]


async def test_the_next_step_is_shown_when_the_planner_asks_for_it() -> None:
    """With one tool round a step, the planner's own request for the next one is shown."""
    on = console()
    script = [
        call("shop-price", {"article": "lamp"}),
        say("42 so far."),
        say("It is 42."),
    ]
    await show(script, on=on, control="use_attempts")
    assert "    asks for the next step" in lines_of(on)


async def test_a_terminal_without_unicode_gets_signs_that_it_has() -> None:
    """In ASCII no sign is a question mark, and the frame is drawn with what there is."""
    on = console(encoding="ascii")
    result = await show(
        [call("shop-price", {"article": "lamp"}), call("shop-price"), say("It is 42.")],
        on=on,
    )
    print_answer(on, result)
    shown = text_of(on)
    assert '    -> shop-price(article="lamp")\n    ok shop-price' in shown
    assert "    xx shop-price  not run" in shown
    assert on.signs.more == "..."
    assert "?" not in shown


async def test_a_terminal_shows_what_is_waited_for_and_is_left_as_it_was() -> None:
    """The spinner says what runs, and every hidden cursor is shown again."""
    on = console(terminal=True)
    await show([call("shop-price", {"article": "lamp"}), say("It is 42.")], on=on)
    shown = text_of(on)
    assert "runs shop-price" in shown
    assert "waits for the model" in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") > 0


def test_leaving_in_the_middle_ends_the_line() -> None:
    """The next output on the terminal starts on a new line."""
    on = console()
    with Progress(on) as progress:
        progress.show(TextDelta(text="Half a sen", iteration=0))
    assert text_of(on) == "Round trip 1\n    Half a sen\n"


@pytest.mark.parametrize("end", [PAUSED, ended()])
def test_nothing_is_waited_for_after_the_end(end: Fact) -> None:
    """No spinner turns on after a pause or the end."""
    on = console(terminal=True)
    with Progress(on) as progress:
        progress.catch_up(
            [
                run_started(),
                *(
                    [replied(calls_of("ask")), decided(0, "ask")]
                    if end is PAUSED
                    else []
                ),
            ]
        )
        progress.show(end)
    assert text_of(on) == ""


def test_a_call_for_the_caller_is_said_to_be_one() -> None:
    """A function known by its schema only is the caller's to run."""
    on = console()
    progress = Progress(on)
    progress.catch_up([run_started(), replied(calls_of("remote"))])
    progress.show(decided(0, "remote", "external"))
    assert text_of(on) == "    → remote is for the caller to run\n"


# Text.


def flowed(write: Callable[[TextFlow], None], *, width: int = 30) -> str:
    """What a flow prints."""
    on = console(width=80)
    flow = TextFlow(on, width=width, indent=4)
    write(flow)
    flow.close()
    return text_of(on)


WORDS = st.text(alphabet="ab 日\n\t.", max_size=80)


@given(WORDS, st.lists(st.integers(0, 80)))
def test_text_looks_the_same_however_it_arrives(text: str, cuts: list[int]) -> None:
    """A text in pieces is printed as if it came at once, within its width, and no word is lost."""
    places = [0, *sorted(cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(places)]

    def bit_by_bit(flow: TextFlow) -> None:
        for piece in pieces:
            flow.write(piece)

    whole = flowed(lambda flow: flow.write(text), width=90)
    assert flowed(bit_by_bit, width=90) == whole
    assert whole.split() == text.split()
    assert all(cell_len(line) <= 30 for line in flowed(bit_by_bit).splitlines())


def test_a_texts_own_lines_and_indents_stay() -> None:
    """Line breaks, one blank line at most, and the indent of a list are kept; the edges are trimmed."""
    assert (
        flowed(lambda flow: flow.write("\n\nOne:\n  - two\n\n\n\nthree  \n"))
        == "    One:\n      - two\n\n    three\n"
    )


def test_a_word_that_is_too_long_is_cut() -> None:
    """Nothing is wider than the flow, and a text without blanks does not wait for its end."""
    on = console()
    flow = TextFlow(on, width=14, indent=4)
    flow.write("x" * 25)
    assert text_of(on) == "    xxxxxxxxxx\n    xxxxxxxxxx\n    xxxxx"


def test_control_characters_are_taken_out() -> None:
    """What moves a cursor, changes a colour or reorders a line is replaced; text in any script stays."""
    assert printable("a\x1b[31mb\x07\x9b\u202ec\r\nd\te\u2028f\ud800 日本 é") == (
        "a\N{REPLACEMENT CHARACTER}[31mb"
        + "\N{REPLACEMENT CHARACTER}" * 3
        + "c\nd e\nf\N{REPLACEMENT CHARACTER} 日本 é"
    )


def test_a_line_is_cut_at_its_cells() -> None:
    """Wide characters count double, and what is cut has a mark."""
    assert one_line(" a\n b\t c ") == "a b c"
    assert shortened("abc", 3, "…") == "abc"
    assert shortened("abcd", 3, "…") == "ab…"
    assert shortened("日本語", 4, "…") == "日…"
    assert cell_len(shortened("x" * 1_000_000, 20, "...")) == 20


def test_a_panel_for_a_forced_answer_names_the_limit() -> None:
    """An answer that a limit forced is framed as one."""
    out = StringIO()
    on = Terminal(out, width=60)
    print_answer(
        on,
        FunctionCallingStepwisePlannerResult(
            final_answer="Half.", status="limit_reached", limit="max_iterations"
        ),
    )
    assert out.getvalue().startswith("╭─ Answer, as far as max_iterations allowed ─")
