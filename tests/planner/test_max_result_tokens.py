"""A result that is too long for the conversation: its beginning is read at once, the rest on request."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import tiktoken
from hypothesis import example, given
from hypothesis import strategies as st
from semantic_kernel.contents import FunctionResultContent
from semantic_kernel.functions import kernel_function

from planner_ext import (
    ApprovalPolicy,
    ApprovalSettings,
    Budget,
    Defer,
    Deny,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    PlannerPlugin,
    Supply,
    ToolExecution,
    ToolUseSession,
)
from planner_ext.core.fold import fold
from planner_ext.core.limits import tightest
from planner_ext.core.results import (
    MOST_READS,
    NOT_READ,
    cut_of,
    name_of_result,
    piece_of,
)
from planner_ext.core.state import READ_RESULT
from planner_ext.engine.document import dump_facts, load_facts
from planner_ext.errors import PlannerInvalidConfigurationError
from planner_ext.events import CallDecided, CallFinished
from planner_ext.hitl_manager import Checkpoint
from planner_ext.sk.chat.prices import estimated_tokens
from planner_ext.testing import (
    ScriptedChatCompletion,
    ScriptedReply,
    ScriptedRequest,
    call,
    calls,
    fork,
    record,
    replay,
    say,
)
from support.approval import DONE, Door, every_door, only, planner_with, results, world
from support.values import each_of

PAGE = "".join(f"Line {number} of the page.\n" for number in range(130))
FETCH = call("web-fetch", {})
CAP = Budget(max_result_tokens=100)
_CUT = re.compile(
    r'\n\n\[Cut here: about (\d+) more tokens .* call Results-read with call="(.+)" and offset=(\d+)\.\]$'
)


class Web:
    """Returns a long page, or fails with one."""

    def __init__(self, text: str = PAGE) -> None:
        self.text = text
        self.fetched = 0

    @kernel_function(description="Fetches the page.")
    async def fetch(self) -> str:
        self.fetched += 1
        return self.text

    @kernel_function(description="Fails at length.")
    async def fail(self) -> str:
        raise RuntimeError(self.text)


def newest(request: ScriptedRequest) -> str:
    return next(
        (
            str(one["content"])
            for one in reversed(request.messages)
            if one["role"] == "tool"
        ),
        "",
    )


class Reader:
    """A model that fetches a page, reads on as each note says, and answers at the end of it."""

    def __init__(self, first: ScriptedReply = FETCH) -> None:
        self.first = first
        self.pieces: list[str] = []
        self.offered: list[bool] = []

    def __call__(self, request: ScriptedRequest) -> ScriptedReply:
        self.offered.append(READ_RESULT in request.tools)
        if not any(message["role"] == "tool" for message in request.messages):
            return self.first
        text = newest(request)
        cut = _CUT.search(text)
        self.pieces.append(text[: cut.start()] if cut else text)
        return (
            call(READ_RESULT, {"call": cut[2], "offset": int(cut[3])}) if cut else DONE
        )


def finished(facts: Any) -> list[CallFinished]:
    return [fact for fact in facts if isinstance(fact, CallFinished)]


# The cut and the pieces.

TEXTS = st.text() | st.lists(
    st.sampled_from(
        [
            "word ",
            "12345",
            "\n",
            "\r\n",
            "é",
            "e\u0301",
            "漢字",
            "👍🏽",
            "👩‍👧",
            '{"a":[1]},',
            "x" * 50,
        ]
    ),
    max_size=200,
).map("".join)
COUNTS = {
    "estimated": estimated_tokens,
    "characters": len,
    "bytes": lambda text: -(-len(text.encode()) // 3),
}


def pieces_of(text: str, most: int, count: Callable[[str], int]) -> list[str]:
    """Read a result from each offset that a note names, to its end; without the notes."""
    cut = cut_of(text, most, count)
    pieces, offset = (
        [text if cut is None else text[: cut.shown]],
        len(text) if cut is None else cut.shown,
    )
    while offset < len(text):
        piece, good = piece_of(
            {"n": text}, {"call": "n", "offset": offset}, most, count
        )
        found = _CUT.search(piece)
        assert good
        pieces.append(piece[: found.start()] if found else piece)
        offset = int(found[3]) if found else len(text)
    return pieces


@given(text=TEXTS, most=st.integers(4, 120), how=st.sampled_from([*COUNTS]))
def test_the_pieces_are_the_whole_text_and_each_is_within_the_cap(
    text: str, most: int, how: str
) -> None:
    """Reading from each offset that a note names gives the whole result back, in pieces of at most the cap."""
    count = COUNTS[how]
    assert (cut_of(text, most, count) is None) == (count(text) <= most)
    pieces = pieces_of(text, most, count)
    assert "".join(pieces) == text
    assert [count(piece) for piece in pieces if count(piece) > most] == []


def words_are_tokens() -> Callable[[str], int]:
    """Count with a tokenizer that has two words: to leave out a letter of one makes several tokens of it."""
    learned = [b"he", b"the", b"rd", b"ord", b"word"]
    ranks = {bytes([value]): value for value in range(256)} | {
        token: 256 + rank for rank, token in enumerate(learned)
    }
    encoding = tiktoken.Encoding(
        "words", pat_str=r"\w+|\W", mergeable_ranks=ranks, special_tokens={}
    )
    return lambda text: len(encoding.encode_ordinary(text))


@given(
    text=st.lists(st.sampled_from(["the", "word", "\u0301", " ", "漢", "w"])).map(
        "".join
    ),
    most=st.integers(4, 40),
)
@example(text="word\u0301" * 9, most=5)
def test_a_piece_is_within_the_cap_also_where_a_cut_splits_its_last_token(
    text: str, most: int
) -> None:
    """A piece that ends before a letter with an accent may have more tokens than with the letter: it gets shorter."""
    count = words_are_tokens()
    pieces = pieces_of(text, most, count)
    assert "".join(pieces) == text
    assert [count(piece) for piece in pieces if count(piece) > most] == []


@each_of("text", ["👍🏽" * 50, "e\u0301" * 50, "👩\u200d👧" * 50, "\r\n" * 50])
def test_what_is_one_sign_to_a_reader_is_not_cut(text: str) -> None:
    """No cut between a letter and its accent, an emoji and its tone, or the two characters of a line end."""
    sign = text[: len(text) // 50]
    for most in range(5, 20):
        cut = cut_of(text, most, len)
        assert cut is not None and text[: cut.shown] == sign * (cut.shown // len(sign))


def test_a_cap_below_one_character_shows_one() -> None:
    """Where not even a character fits, one is shown: reading on always comes to an end."""
    cut = cut_of("漢字漢字", 1, lambda text: 3 * len(text))
    assert cut is not None and cut.shown == 1


def test_only_a_few_times_the_cap_is_counted() -> None:
    """A cut costs a few counts of the piece; of what is left out a sample is counted."""
    counted: list[int] = []

    def count(text: str) -> int:
        counted.append(len(text))
        return estimated_tokens(text)

    cut = cut_of("lorem ipsum " * 1_000_000, 100, count)
    assert cut is not None and cut.left_out == pytest.approx(2_000_000, rel=0.01)
    assert sum(counted) < 250_000


def test_to_read_on_counts_in_proportion_to_the_piece() -> None:
    """However long the rest is: a note extrapolates what is left out from as many characters as the piece has."""
    counted: list[int] = []

    def count(text: str) -> int:
        counted.append(len(text))
        return estimated_tokens(text)

    piece, good = piece_of(
        {"n": "lorem ipsum " * 1_000_000}, {"call": "n", "offset": 12}, 100, count
    )
    found = _CUT.search(piece)
    assert good and found and int(found[1]) == pytest.approx(2_000_000, rel=0.05)
    assert sum(counted) < 10 * len(piece)


def test_short_results_are_not_counted_at_all() -> None:
    """No token has less than a byte: most results need no count."""
    assert cut_of("a" * 100, 100, lambda _: pytest.fail("counted")) is None


# Through every door.


@every_door
async def test_a_model_reads_a_long_result_to_its_end(door: Door) -> None:
    """The model reads the beginning and how to read on; the pieces are the whole; reading is free."""
    reader, web = Reader(), Web()
    here = world(reader, web=web)
    outcome = await door.ask(here, budget=CAP, behavior=None)
    assert outcome.status == "answered"
    assert outcome.tool_calls == 1
    assert web.fetched == 1
    assert "".join(reader.pieces) == PAGE
    assert all(estimated_tokens(piece) <= 100 for piece in reader.pieces)
    assert reader.offered == [False, *[True] * (len(reader.offered) - 1)]
    assert max(map(len, results(outcome.history))) < 1000


async def test_the_facts_keep_the_whole_result() -> None:
    """The journal has the whole text and where it was cut; the transcript has what the model read, in every life."""
    here = world([FETCH, DONE], web=Web())
    result = await planner_with(budget=CAP).invoke(here.kernel, "Go.")
    (fact,) = finished(result.facts)
    assert fact.result == PAGE and fact.cut is not None
    loaded = load_facts(dump_facts(result.facts))
    assert finished(loaded)[0].cut == fact.cut
    assert fold(loaded).cut == {name_of_result(PAGE, 0, 0): PAGE}
    shown = results(result.chat_history or pytest.fail())[0]
    assert (
        shown.startswith(PAGE[: fact.cut.shown])
        and f"about {fact.cut.left_out} more" in shown
    )
    assert PAGE.splitlines()[-1] in result.to_html()
    assert (
        f"of which the model read the first {fact.cut.shown} characters"
        in result.to_html()
    )


async def test_without_the_limit_nothing_is_cut_and_nothing_written() -> None:
    """By default results have no limit: the model reads everything, and the journal does not mention one."""
    here = world([FETCH, DONE], web=Web())
    result = await planner_with().invoke(here.kernel, "Go.")
    assert results(result.chat_history or pytest.fail()) == [PAGE]
    assert not any("cut" in value for value in dump_facts(result.facts))


async def test_errors_and_supplied_results_are_cut_and_denials_are_not() -> None:
    """All that a function or an interceptor adds has the cap; what a person says in a denial is theirs."""
    here = world(
        [call("web-fail", {}), calls(FETCH, call("shop-look", {"order": "7"})), DONE],
        web=Web(),
    )
    options: dict[str, Any] = {
        "execution": ToolExecution(include_error_detail=True),
        "interceptors": [only("fetch", Supply(PAGE))],
        "budget": Budget(max_result_tokens=40),
    }
    result = await planner_with(**options).invoke(here.kernel, "Go.")
    assert [
        bool(_CUT.search(text))
        for text in results(result.chat_history or pytest.fail())
    ] == [True, True, False]
    supplied = next(
        fact
        for fact in result.facts
        if isinstance(fact, CallDecided) and fact.reason == "supplied"
    )
    assert supplied.answer == PAGE and supplied.cut is not None
    assert result.decisions[0].result == PAGE
    assert result.to_html().count("of which the model read the first") == 2


async def test_a_paused_run_reads_on_in_another_process() -> None:
    """What was cut before a pause is readable after it; what a person supplies is cut as well."""
    ask = only("look", Defer())
    here = world([FETCH, call("shop-look", {"order": "7"})], web=Web())
    paused = await planner_with(budget=CAP, interceptors=[ask]).invoke(
        here.kernel, "Go."
    )
    name = name_of_result(PAGE, 0, 0)
    reads = call(READ_RESULT, {"call": name, "offset": len(PAGE) - 20})
    other = world([reads, DONE], web=Web())
    checkpoint = Checkpoint.from_json(paused.checkpoint.to_json())
    decisions = {one.id: Supply(PAGE) for one in paused.pending}
    result = await planner_with(interceptors=[ask]).resume(
        other.kernel, checkpoint, decisions
    )
    shown = results(result.chat_history or pytest.fail())
    assert [bool(_CUT.search(text)) for text in shown] == [True, True, False]
    assert shown[-1] == PAGE[-20:]


async def test_an_open_read_is_answered_where_the_run_continues() -> None:
    """A call that reads, in a batch that was returned undecided, is known to the process that resumes the run."""
    reads = call(
        READ_RESULT, {"call": name_of_result(PAGE, 0, 0), "offset": len(PAGE) - 20}
    )
    here = world([FETCH, calls(reads, call("shop-look", {"order": "7"}))], web=Web())
    returns = ApprovalSettings(on_denial="return_calls")
    first = await planner_with(
        budget=CAP, approval=returns, interceptors=[only("look", Deny("No."))]
    ).invoke(here.kernel, "Go.")
    assert first.status == "stopped"
    other = world([DONE], web=Web())
    second = await planner_with(approval=returns).resume(
        other.kernel, first.checkpoint, budget=CAP
    )
    assert results(second.chat_history or pytest.fail())[1:] == [PAGE[-20:], "sent"]


@each_of(
    ("arguments", "says"),
    [
        ({"call": "call_1", "offset": 0}, "There is no result under this name"),
        ({"call": "NAME", "offset": -1}, "offset must be"),
        ({"call": "NAME", "offset": len(PAGE)}, "offset must be"),
        ({"call": "NAME"}, "is missing"),
        ({"call": "NAME", "offset": "here"}, "cannot be used"),
    ],
)
async def test_a_read_that_cannot_be_meant_is_answered_in_words(
    arguments: dict[str, Any], says: str
) -> None:
    """A wrong call or offset ends nothing: the model reads what is wrong, and the errors in a row count it."""

    def model(request: ScriptedRequest) -> ScriptedReply:
        trips = sum(message["role"] == "tool" for message in request.messages)
        if trips == 1:
            cut = _CUT.search(newest(request))
            named = {
                key: cut[2] if cut and value == "NAME" else value
                for key, value in arguments.items()
            }
            return call(READ_RESULT, named)
        return DONE if trips else FETCH

    budget = replace(CAP, max_consecutive_errors=1)
    result = await planner_with(budget=budget).invoke(
        world(model, web=Web()).kernel, "Go."
    )
    assert says in results(result.chat_history or pytest.fail())[-1]
    assert result.limit == "max_consecutive_errors"


@every_door
async def test_one_reply_reads_on_a_handful_of_times(door: Door) -> None:
    """Of 900 reads in one reply the first few are answered with their pieces, the others in words."""
    name = name_of_result(PAGE, 0, 0)
    reads = [call(READ_RESULT, {"call": name, "offset": place}) for place in range(900)]
    here = world([FETCH, calls(*reads), DONE], web=Web())
    outcome = await door.ask(here, budget=CAP, behavior=None)
    shown = results(outcome.history)[1:]
    assert (outcome.status, len(shown)) == ("answered", 900)
    assert [place for place, text in enumerate(shown) if text != NOT_READ] == [
        *range(MOST_READS)
    ]
    assert all(_CUT.search(text) for text in shown[:MOST_READS])


async def test_nothing_is_offered_before_something_was_cut() -> None:
    """A call of the function that reads, where nothing was cut, is one of a function that there is not."""
    here = world(
        [call(READ_RESULT, {"call": "a", "offset": 0}), DONE], web=Web("short")
    )
    result = await planner_with(budget=CAP).invoke(here.kernel, "Go.")
    assert "There is no function" in results(result.chat_history or pytest.fail())[0]


async def test_the_last_trip_offers_no_reading_and_reading_costs_trips() -> None:
    """A model that reads on and on uses up its round trips, and gives the answer of the reserved one."""
    reader = Reader()

    def model(request: ScriptedRequest) -> ScriptedReply:
        return reader(request) if request.tools else say("As far as I read.")

    here = world(model, web=Web())
    result = await planner_with(budget=replace(CAP, max_iterations=4)).invoke(
        here.kernel, "Go."
    )
    assert result.status == "limit_reached"
    assert result.limit == "max_iterations"
    assert result.iterations == 4
    assert reader.offered == [False, True, True]


async def test_a_call_id_that_comes_again_names_another_result() -> None:
    """Models reuse ids: the name of a result is its own, and each is read as it was."""
    first, second = PAGE, PAGE.upper()
    web = Web(first)
    same = call("web-fetch", {}, id="call_1")
    seen: list[str] = []

    def model(request: ScriptedRequest) -> ScriptedReply:
        texts = [
            str(one["content"]) for one in request.messages if one["role"] == "tool"
        ]
        if len(texts) < 2:
            web.text = second if texts else first
            return same
        if len(texts) == 2:
            names = [cut[2] for cut in map(_CUT.search, texts) if cut]
            return calls(
                *[
                    call(READ_RESULT, {"call": name, "offset": len(PAGE) - 20})
                    for name in names
                ]
            )
        seen.extend(texts[2:])
        return DONE

    await planner_with(budget=CAP).invoke(world(model, web=web).kernel, "Go.")
    assert seen == [first[-20:], second[-20:]]


async def test_compaction_takes_nothing_away() -> None:
    """A result that a callback removed from the transcript is read from the facts."""
    names: list[str] = []

    async def forget(context: Any) -> None:
        shown = [item for message in context.messages for item in message.items]
        texts = [
            str(item.result)
            for item in shown
            if isinstance(item, FunctionResultContent)
        ]
        names.extend(cut[2] for cut in map(_CUT.search, texts) if cut)
        context.messages[:] = context.messages[:1]

    def model(request: ScriptedRequest) -> ScriptedReply:
        if newest(request):
            return DONE
        return (
            call(READ_RESULT, {"call": names[0], "offset": len(PAGE) - 20})
            if names
            else FETCH
        )

    planner = planner_with(budget=CAP, iteration_completed=forget)
    result = await planner.invoke(world(model, web=Web()).kernel, "Go.")
    assert results(result.chat_history or pytest.fail()) == [PAGE[-20:]]


async def test_a_budget_given_later_cuts_from_then_on() -> None:
    """A run that is resumed with a cap cuts what comes; what was whole stays whole."""
    here = world([FETCH, FETCH], web=Web())
    planner = planner_with(budget=Budget(max_iterations=1, on_limit="stop"))
    first = await planner.invoke(here.kernel, "Go.")
    other = world([FETCH, DONE], web=Web())
    budget = Budget(max_iterations=6, max_result_tokens=100)
    second = await planner.resume(other.kernel, first.checkpoint, budget=budget)
    assert second.status == "answered"
    assert [fact.cut is not None for fact in finished(second.facts)] == [True]


async def test_a_nested_run_has_the_cap_of_the_run_around() -> None:
    """The functions of a nested planner are cut as well, and so is its answer; it reads on in what is its own."""
    reader = Reader()
    here = world([call("expert-reach_goal", {"goal": "Part."}), DONE], web=Web())
    here.kernel.add_service(
        ScriptedChatCompletion(
            lambda request: say(PAGE) if (reply := reader(request)) is DONE else reply,
            service_id="expert",
        )
    )
    expert = FunctionCallingStepwisePlanner(
        "expert", FunctionCallingStepwisePlannerOptions(plan=False)
    )
    here.kernel.add_plugin(PlannerPlugin(expert), "expert")
    result = await planner_with(budget=replace(CAP, max_iterations=200)).invoke(
        here.kernel, "Go."
    )
    assert len(reader.pieces) > 1 and "".join(reader.pieces) == PAGE
    assert [
        bool(_CUT.search(text))
        for text in results(result.chat_history or pytest.fail())
    ] == [True]


async def test_reading_is_not_put_to_a_policy() -> None:
    """The loop's own function is exempt, as those that answer and ask are."""
    reader = Reader()
    policy = ApprovalPolicy.from_dict(
        {"default": "deny", "rules": [{"plugin": "web", "action": "allow"}]}
    )
    result = await planner_with(budget=CAP, interceptors=[policy]).invoke(
        world(reader, web=Web()).kernel, "Go."
    )
    assert result.status == "answered" and "".join(reader.pieces) == PAGE


async def test_a_session_reads_on() -> None:
    """A prompt of a session reads a long result to its end."""
    reader = Reader()
    session = ToolUseSession(world(reader, web=Web()).kernel, budget=CAP)
    assert await session.prompt("Go.") == "Done."
    assert "".join(reader.pieces) == PAGE


@pytest.mark.parametrize("stops", [False, True])
async def test_a_later_prompt_of_a_chat_says_that_the_rest_is_not_kept(
    stops: bool,
) -> None:
    """The note in the history names a function that is not offered: the model reads what to do, and nothing ends."""
    told: list[str] = []

    def model(request: ScriptedRequest) -> ScriptedReply:
        texts = [
            str(message["content"])
            for message in request.messages
            if message["role"] == "tool"
        ]
        if not texts:
            return FETCH
        if sum(message["role"] == "user" for message in request.messages) == 1:
            return DONE
        if len(texts) > 1:
            told.append(texts[-1])
            return DONE
        cut = _CUT.search(texts[0]) or pytest.fail()
        return call(READ_RESULT, {"call": cut[2], "offset": int(cut[3])})

    execution = ToolExecution(stop_on_unknown_function=stops)
    session = ToolUseSession(
        world(model, web=Web()).kernel, budget=CAP, execution=execution
    )
    assert [await session.prompt("Go."), await session.prompt("And the rest?")] == [
        "Done.",
        "Done.",
    ]
    assert "Call the function of such a result again." in told[0]


# The option.


async def test_a_function_of_that_name_is_refused_before_anything_is_sent() -> None:
    """A kernel whose plugin is Results with a function read cannot have the cap; without it, it can."""

    class Results:
        @kernel_function
        async def read(self) -> str:
            return "mine"

    here = world([call(READ_RESULT, {}), DONE], Results=Results())
    with pytest.raises(PlannerInvalidConfigurationError, match="max_result_tokens"):
        await planner_with(budget=CAP).invoke(here.kernel, "Go.")
    assert here.requests == 0
    result = await planner_with().invoke(here.kernel, "Go.")
    assert results(result.chat_history or pytest.fail()) == ["mine"]


@each_of("value", [0, -1, True, 1.5, "9"])
def test_an_invalid_cap_is_refused(value: Any) -> None:
    """A whole number, 1 or more, or None."""
    with pytest.raises(PlannerInvalidConfigurationError, match="max_result_tokens"):
        Budget(max_result_tokens=value)


def test_the_tighter_cap_applies() -> None:
    """Two budgets that both apply give the smaller cap."""
    for one, other in ((5, 9), (9, 5), (None, 5), (5, None)):
        assert (
            tightest(
                Budget(max_result_tokens=one), Budget(max_result_tokens=other)
            ).max_result_tokens
            == 5
        )


# Kept, replayed and forked.


async def test_a_recorded_run_is_cut_alike_when_it_is_replayed(tmp_path: Path) -> None:
    """A replay with live functions, and one with recorded ones, find the same cuts and the same pieces."""
    reader = Reader()
    with record(tmp_path / "reads.json") as tape:
        await planner_with(budget=CAP).invoke(
            tape.kernel(world(reader, web=Web()).kernel), "Go."
        )
    ways: tuple[Literal["live", "recorded"], ...] = ("live", "recorded")
    for functions in ways:
        with replay(tmp_path / "reads.json", functions=functions) as tape:
            result = await planner_with(budget=CAP).invoke(
                tape.kernel(world([], web=Web()).kernel), "Go."
            )
        assert result.status == "answered"
        assert [fact.cut is not None for fact in finished(result.facts)] == [True]


async def test_a_fork_reads_on_under_the_names_that_its_transcript_has() -> None:
    """A fork has another run id, and replies that were written before it: what they name is still found."""
    reader = Reader()
    first = await planner_with(budget=CAP).invoke(
        world(reader, web=Web()).kernel, "Go."
    )
    whole, reader.pieces = reader.pieces, []
    checkpoint = fork(first.facts, at=2, run_id="fork")
    second = await planner_with().resume(world(reader, web=Web()).kernel, checkpoint)
    assert second.status == "answered" and reader.pieces == whole[2:]
