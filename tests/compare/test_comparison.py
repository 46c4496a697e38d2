"""What the options do, counted by the endpoint: the figures that the decision rests on."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from semantic_kernel.connectors.ai import FunctionChoiceBehavior
from semantic_kernel.contents import FunctionCallContent

from planner_ext.compare import Comparison, Run, Trial, option, run_comparison, scenario
from planner_ext.compare.scenarios import SCRIPTS
from planner_ext.compare.strategies import OPTIONS
from planner_ext.errors import PlannerInvalidConfigurationError
from planner_ext.testing import ScriptedReply, ScriptedRequest, say
from planner_ext.testing import call as say_call
from planner_ext.testing.script import results_of
from support.values import each_of

CORRECTED = [key for key, option in OPTIONS.items() if option.info.corrected]
NEVER_ENDING = ("never-ending", "batch-of-3")
OURS = "option-2-corrected"


def found(comparison: Comparison, option: str, script: str) -> Run:
    """Find the run of an option in a script."""
    return next(run for run in comparison.of_option(option) if run.script == script)


@pytest.mark.parametrize("script", [*NEVER_ENDING, "streaming"])
def test_option_2_as_written_goes_exactly_one_over(
    comparison: Comparison, script: str
) -> None:
    """N attempts are N + 1 requests; they are charged honestly, but too late."""
    run = found(comparison, "option-2", script)
    assert (run.trips, run.charged, run.over_budget) == (6, 6, 1)
    assert run.history_valid
    assert run.answer


def test_option_2_as_written_is_lost_without_metadata(comparison: Comparison) -> None:
    """Where iterations are not reported, each chat request is charged as one: 6 + 5 + 4 + 3 + 2 round trips."""
    run = found(comparison, "option-2", "absent-metadata")
    assert (run.trips, run.charged) == (20, 5)


@pytest.mark.parametrize("script", [*NEVER_ENDING, "streaming", "absent-metadata"])
def test_option_3_alone_breaks_the_history_and_runs_far_over(
    comparison: Comparison, script: str
) -> None:
    """Uncounted, the callback lets 5 + 4 + 3 + 2 + 1 round trips pass, each refusal leaves a call without result."""
    run = found(comparison, "option-3", script)
    assert (run.trips, run.charged, run.over_budget) == (15, 5, 10)
    assert not run.history_valid
    assert "did not have response messages" in run.first_violation
    assert len(run.refused) == 10
    assert not run.answer


def test_option_1_as_written_makes_two_round_trips_for_each_that_it_charges(
    comparison: Comparison,
) -> None:
    """A step is a tool round and a closing reply; a chain of three calls takes seven round trips instead of four."""
    run = found(comparison, "option-1", "never-ending")
    assert (run.trips, run.charged) == (10, 5)
    assert (
        found(comparison, "option-1", "chain").trips,
        found(comparison, "option-2", "chain").trips,
    ) == (7, 4)


def test_the_stock_loop_cannot_be_counted_from_outside(comparison: Comparison) -> None:
    """Five tool rounds and an answer for each iteration; streamed, the rounds alone, and never an answer."""
    plain, streamed = (
        found(comparison, "stock-loop", script)
        for script in ("never-ending", "streaming")
    )
    assert (plain.trips, plain.charged, bool(plain.answer)) == (30, 5, True)
    assert (streamed.trips, streamed.charged, bool(streamed.answer)) == (25, 5, False)


@pytest.mark.parametrize(
    "script", ["direct-answer", "refusal", "clarifying-question", "never-ending"]
)
def test_the_removed_planner_takes_no_plain_answer(
    comparison: Comparison, script: str
) -> None:
    """It keeps the budget, uses all of it up, and ends silent."""
    run = found(comparison, "removed-planner", script)
    assert (run.trips, run.answer, run.status) == (5, "", "limit_reached")


@pytest.mark.parametrize("script", ["chain", "function-error"])
def test_the_removed_planner_leaves_its_final_answer_call_open(
    comparison: Comparison, script: str
) -> None:
    """Its answer is right, and its history cannot be continued."""
    run = found(comparison, "removed-planner", script)
    assert run.status == "answered"
    assert (
        "did not have response messages before the end of the messages"
        in run.first_violation
    )


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("option", CORRECTED)
def test_a_corrected_option_neither_overshoots_nor_breaks_a_history(
    comparison: Comparison, option: str, script: str
) -> None:
    """It charges what the endpoint counted, runs nothing whose result cannot be read, and keeps every other promise."""
    run = found(comparison, option, script)
    assert run.offered or script == "veto"
    assert run.over_budget == 0
    assert run.history_valid, run.first_violation
    assert run.charged == run.trips
    assert run.tools_past_budget == 0
    assert run.breaches == ()
    answers = (
        SCRIPTS[script].info.answers or script == "tokens-unreported"
    )  # where a user is entitled to none
    assert bool(run.answer) == (run.offered and answers)
    is_read = SCRIPTS[script].reports and script != "crash-in-a-request"
    assert (run.tokens_told or 0) == run.tokens_summed or not is_read


@each_of("allowed", [1, 2, 3, 7])
def test_the_figures_grow_as_the_rules_say(allowed: int) -> None:
    """As written: 2N, N + 1 and N(N + 1) / 2 round trips; corrected: N, for every N."""
    compared = asyncio.run(
        run_comparison(max_iterations=allowed, scripts=["never-ending"])
    )
    trips = {run.option: run.trips for run in compared.runs}
    assert trips["option-1"] == 2 * allowed
    assert trips["option-2"] == allowed + 1
    assert trips["option-3"] == allowed * (allowed + 1) // 2
    assert trips["stock-loop"] == 6 * allowed
    assert {trips[key] for key in (*CORRECTED, "removed-planner", "while-loop")} == {
        allowed
    }
    assert compared.holds


def test_every_round_trip_is_a_reply_in_the_history(comparison: Comparison) -> None:
    """The messages show what the endpoint counted, but for requests of functions, and a reply that nobody read."""
    for run in comparison.runs:
        if (
            run.script in ("asks-a-model-inside", "nested-run", "crash-in-a-request")
            or run.status == "failed"
        ):
            continue
        assert sum(message.trip is not None for message in run.messages) == run.trips, (
            run.option,
            run.script,
        )


def test_every_option_meets_every_situation(comparison: Comparison) -> None:
    """All 336 runs are there."""
    assert len(comparison.runs) == len(OPTIONS) * len(SCRIPTS) == 336


def test_the_work_of_the_chain_is_done_within_four_round_trips(
    comparison: Comparison,
) -> None:
    """Chaining costs a round trip for each call and one for the answer; closing each step runs out before the end."""
    chained, stepwise = (
        found(comparison, option, "chain")
        for option in ("option-2-corrected", "option-1-corrected")
    )
    assert (chained.trips, chained.answer) == (4, "Ann's parcel is in Lyon.")
    assert comparison.unfinished(stepwise)
    assert not comparison.unfinished(chained)


def test_what_the_others_do_does_not_matter(comparison: Comparison) -> None:
    """Only a corrected option can make a comparison fail."""
    assert comparison.holds
    assert any(run.over_budget and not run.history_valid for run in comparison.runs)


def test_a_corrected_option_that_goes_wrong_is_named(spoilt: Comparison) -> None:
    """Option, script and what happened stand in the sentence."""
    assert not spoilt.holds
    first, second = spoilt.failures
    assert first == "option 1, corrected, chain: 7 round trips where 5 were allowed."
    assert second.startswith(
        "option 3, corrected, chain: the history is broken: messages[1]"
    )


def test_a_corrected_option_that_fails_is_named(comparison: Comparison) -> None:
    """A comparison in which a corrected option could not be measured does not hold."""
    first = replace(
        found(comparison, OURS, "chain"), status="failed", error="ConnectError: gone"
    )
    assert replace(comparison, runs=(first,)).failures == (
        "option 2, corrected, chain: it failed: ConnectError: gone",
    )


def test_the_document_survives_json(comparison: Comparison) -> None:
    """One document with every figure of every run, computed ones included."""
    document = comparison.as_dict()
    assert json.loads(json.dumps(document)) == json.loads(
        json.dumps(document, default=str)
    )
    run = next(
        run
        for run in document["runs"]
        if (run["option"], run["script"]) == ("option-3", "never-ending")
    )
    assert {
        key: run[key]
        for key in ("trips", "charged", "over_budget", "tools_run", "tools_past_budget")
    } == {
        "trips": 15,
        "charged": 5,
        "over_budget": 10,
        "tools_run": 10,
        "tools_past_budget": 6,
    }
    assert (run["history_valid"], run["answer_present"], run["status"]) == (
        False,
        False,
        "limit_reached",
    )
    assert run["first_violation"].startswith("messages[10]")
    assert run["tokens_summed"] > run["tokens_told"]
    assert document["schema"] == 2


@each_of(
    ("wanted", "message"),
    [
        ({"options": ["option-9"]}, "option-1"),
        ({"scripts": ["x"]}, "never-ending"),
        ({"max_iterations": 0}, "1 or more"),
    ],
)
def test_what_does_not_exist_is_refused(wanted: dict[str, Any], message: str) -> None:
    """An unknown option or script is answered with those that there are; a limit that means nothing is refused."""
    with pytest.raises(PlannerInvalidConfigurationError, match=message):
        asyncio.run(run_comparison(**wanted))


def test_progress_is_reported_before_each_run() -> None:
    """How many are done, how many there are, and which one it is."""
    reported: list[tuple[int, int, str]] = []
    keys: dict[str, Any] = {
        "options": ["option-2", "option-3-corrected"],
        "scripts": ["chain"],
    }
    asyncio.run(run_comparison(progress=lambda *news: reported.append(news), **keys))
    assert reported == [
        (0, 2, "chain: option 2, as written"),
        (1, 2, "chain: option 3, corrected"),
    ]


@pytest.mark.parametrize("script", ["asks-a-model-inside", "nested-run"])
def test_what_happens_inside_functions_separates_the_options(
    comparison: Comparison, script: str
) -> None:
    """Requests that functions make are counted by the corrected options alone; a callback does not see them."""
    over = {run.option for run in comparison.of_script(script) if run.over_budget}
    assert over == set(OPTIONS) - set(CORRECTED)


def test_only_a_callback_can_forbid_a_function(comparison: Comparison) -> None:
    """Of the corrected options the third alone offers it; as written, it leaves a history that servers refuse."""
    offered = {run.option: run for run in comparison.of_script("veto") if run.offered}
    assert set(offered) == {
        "option-3",
        "option-2-callback",
        "stock-loop",
        "stock-loop-best",
        "option-3-corrected",
        "option-3-alone",
    }
    assert (offered["option-3-corrected"].tools_run, offered["option-3"].tools_run) == (
        1,
        0,
    )
    assert not offered["option-3"].history_valid


@pytest.mark.parametrize(
    "script", ["approval", "crash", "crash-before-a-call", "crash-in-a-request"]
)
def test_a_second_process_continues(comparison: Comparison, script: str) -> None:
    """A function takes effect once, over two processes; a request whose reply is lost is made again, and charged."""
    run = found(comparison, OURS, script)
    trips = 4 if script == "crash-in-a-request" else 3
    assert (run.status, run.trips, run.charged) == ("answered", trips, trips)
    assert (run.tools_run, run.breaches) == (2, ())


def test_a_cancelled_run_leaves_a_history_that_can_be_continued(
    comparison: Comparison,
) -> None:
    """Of the loops that keep their history as they go, none does."""
    broken = {
        run.option for run in comparison.of_script("cancelled") if not run.history_valid
    }
    assert broken == {
        "option-1",
        "option-2",
        "option-3",
        "option-2-callback",
        "stock-loop",
        "stock-loop-best",
        "removed-planner",
        "while-loop",
    }


def test_a_cut_reply_does_not_count_as_an_answer(comparison: Comparison) -> None:
    """A loop that does not look at the finish reason takes it for one."""
    taken = {run.option for run in comparison.of_script("cut-short") if run.breaches}
    assert taken == {
        "option-1",
        "option-2",
        "option-3",
        "option-2-callback",
        "stock-loop",
        "stock-loop-best",
        "while-loop",
    }


def test_option_3_with_the_metadata_keeps_the_budget_and_no_more(
    comparison: Comparison,
) -> None:
    """Charged by option 2's metadata the callback lets 5 of 5 pass; its refusal still leaves no answer."""
    run = found(comparison, "option-2-callback", "never-ending")
    assert (run.trips, run.charged, run.answer) == (5, 5, "")
    assert not run.history_valid


def test_the_numbers_decide_in_words(comparison: Comparison) -> None:
    """The verdict names the figures of the runs, and what follows from all of them."""
    said = comparison.verdict
    assert (
        "of the chain's 3 calls it had made 2 after 5 round trips; option 2 needed 4"
        in said[0]
    )
    assert "Option 2 as written makes 6 round trips of 5" in said[1]
    assert "Option 3 as written makes 15 round trips of 5" in said[2]
    assert (
        "makes 5, without an answer and with a history that OpenAI refuses" in said[2]
    )
    assert "alone it let 10 round trips pass where 5 were allowed" in said[3]
    assert len(said) == 6
    assert (
        "; 9 of them ran out of budget where another option finished."
        in comparison.summary
    )


@pytest.mark.parametrize(
    ("script", "option", "change", "gone"),
    [
        ("chain", "option-2-corrected", {"answer": ""}, 0),
        ("chain", "option-1-corrected", {"status": "failed", "tools_run": 0}, 0),
        ("never-ending", "option-2", {"trips": 5}, 1),
        ("never-ending", "option-3", {"trips": 5}, 2),
        ("never-ending", "option-2-callback", {"trips": 6}, 2),
        ("asks-a-model-inside", "option-2-corrected", {"charged": 4}, 3),
        ("veto", "option-3-corrected", {"tools_run": 2}, 4),
    ],
)
def test_a_sentence_that_the_runs_do_not_bear_out_is_not_said(
    comparison: Comparison, script: str, option: str, change: dict[str, Any], gone: int
) -> None:
    """Nor what would follow from it."""
    kept = [
        sentence
        for place, sentence in enumerate(comparison.verdict[:5])
        if place != gone
    ]
    there = (script, option)
    runs = tuple(
        replace(run, **change) if (run.script, run.option) == there else run
        for run in comparison.runs
    )
    assert list(replace(comparison, runs=runs).verdict) == kept
    assert (
        list(
            replace(
                comparison,
                runs=tuple(run for run in runs if (run.script, run.option) != there),
            ).verdict
        )
        == kept
    )
    assert replace(comparison, live=True).verdict == ()


def test_one_round_trip_bears_out_less() -> None:
    """With one round trip allowed no option finishes the chain, so nothing is said of it."""
    compared = asyncio.run(
        run_comparison(max_iterations=1, scripts=["chain", "never-ending"])
    )
    assert not [
        sentence
        for sentence in compared.verdict
        if "chain" in sentence or sentence.startswith("So ")
    ]


def test_your_own_option_or_situation_takes_no_key_of_another() -> None:
    """It would be taken for the other one, in tables and in the verdict."""
    mine = option("option-3")(greedy)
    for options, scripts in (([mine], []), ([], [two_lamps, two_lamps])):
        with pytest.raises(
            PlannerInvalidConfigurationError,
            match=r"another (option 'option-3'|script 'two-lamps')",
        ):
            asyncio.run(
                run_comparison(
                    options=["option-2", *options], scripts=["chain", *scripts]
                )
            )


def test_each_situation_says_what_a_user_is_entitled_to() -> None:
    """And where that is written: in the ADR, in a reference, or in another project's issue thread."""
    for each in SCRIPTS.values():
        assert each.info.entitled.endswith(".")
        assert "https://" in each.info.source


async def greedy(trial: Trial) -> None:
    """Asks until nothing is called, up to twenty times, and runs every call."""
    for _ in range(20):
        reply = await trial.ask()
        trial.charged += 1
        trial.history.add_message(reply)
        calls = [item for item in reply.items if isinstance(item, FunctionCallContent)]
        if not calls:
            trial.status, trial.answer = "answered", reply.content
            return
        for call in calls:
            await trial.kernel.invoke_function_call(call, trial.history)


@scenario(
    "two lamps",
    goal="How many lamps?",
    entitled="Two round trips are enough.",
    source="",
    functions=("stock",),
)
def two_lamps(request: ScriptedRequest) -> ScriptedReply:
    """One call, and the answer."""
    return (
        say("Two.")
        if results_of(request)
        else say_call("desk-stock", {"site": "Hamburg"})
    )


def test_a_loop_and_a_situation_of_ones_own_are_judged() -> None:
    """They run beside the built-in ones, and the findings are made from what was seen from outside."""
    mine = option("greedy", offers=("tool calls",))(greedy)
    compared = asyncio.run(
        run_comparison(
            options=[OURS, mine],
            scripts=["never-ending", "limit-of-calls", "crash", two_lamps],
        )
    )
    runs = {(run.option, run.script): run for run in compared.runs}
    assert (
        runs["greedy", "never-ending"].trips,
        runs["greedy", "never-ending"].over_budget,
    ) == (20, 15)
    assert runs["greedy", "limit-of-calls"].breaches == (
        "60 functions started where 2 were allowed",
    )
    assert not runs["greedy", "crash"].offered
    assert (
        runs["greedy", "two-lamps"].answer == runs[OURS, "two-lamps"].answer == "Two."
    )
    assert compared.option("greedy").about.startswith("Asks until nothing is called")
    assert compared.holds


def test_an_ability_that_does_not_exist_is_refused() -> None:
    """The message lists those that there are."""
    with pytest.raises(
        PlannerInvalidConfigurationError, match="tool calls, tokens, time"
    ):
        option("mine", offers=("flying",))  # pyright: ignore[reportArgumentType]  (that is the point)


@option("none-last", offers=())
async def _forbidden_last(trial: Trial) -> None:
    """The last request describes the functions and forbids to call them, as other frameworks do."""
    for trips in range(1, trial.max_iterations + 1):
        last = (
            FunctionChoiceBehavior.NoneInvoke()
            if trips == trial.max_iterations
            else None
        )
        if last is None:
            reply = await trial.ask()
        else:
            settings = trial.settings.model_copy(
                update={"function_choice_behavior": last}
            )
            (reply,) = await trial.service.get_chat_message_contents(
                trial.history, settings, kernel=trial.kernel
            )
        trial.charged = trips
        trial.history.add_message(reply)
        for call in (
            item for item in reply.items if isinstance(item, FunctionCallContent)
        ):
            await trial.kernel.invoke_function_call(call, trial.history)
    trial.answer = reply.content


def test_a_model_calls_nothing_where_the_tool_choice_forbids_it() -> None:
    """A loop may forbid calls by ``tool_choice`` and leave the functions in its last request: the model answers."""
    compared = asyncio.run(
        run_comparison(options=[OURS, _forbidden_last], scripts=["never-ending"])
    )
    run = found(compared, "none-last", "never-ending")
    assert (run.trips, run.tools_run, run.history_valid) == (5, 4, True)
    assert run.answer.startswith("E-7 is not finished")
