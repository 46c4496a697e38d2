"""The page of a run: complete, safe, self-contained, and quick for long runs."""

import re
import subprocess
import sys
import time
import unicodedata
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from semantic_kernel import Kernel

from planner_ext import FunctionCallingStepwisePlanner
from planner_ext.core.facts import Fact, ModelReplied, RequestFailed, RunStarted
from planner_ext.core.limits import Budget
from planner_ext.core.values import Usage
from planner_ext.testing import ScriptedChatCompletion, say
from planner_ext.timeline import (
    Timeline,
    TimelineMessage,
    fragment_of,
    page_of,
    timeline_of,
)
from support.examples import some_of
from support.timeline import Journal, eventful, forked, long

VOID = ("meta", "rect", "br")


class Page(HTMLParser):
    """What a page is made of: its tags and attributes, its text, and whether each tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        self.text = "".join(self._texts)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self._texts.append(data)

    def all(self, name: str) -> list[str]:
        """Every value of an attribute."""
        return [
            attributes[name] or "" for _, attributes in self.tags if name in attributes
        ]


def drawn(facts: list[Fact], now: float | None = None) -> Page:
    return Page(page_of([timeline_of(facts, now=now)]))


def test_the_page_tells_what_happened() -> None:
    """Requests, replies, calls, arguments, results, decisions, failures, crashes and spending are all on it."""
    text = drawn(eventful()).text
    for shown in (
        "I look up the order, the parcel and the customer at once.",
        'parcel="CH-1182-77", events=true',
        "TimeoutError: no answer",
        "APIStatusError: 503, the server is overloaded",
        "approved with edited arguments by ann@shop.example after 3 h 8 min",
        "- 129.9",
        "+ 120.0",
        "denied by rule 3: Only people block.",
        "nested run: 3 round trips, 1 function call, 2,760 tokens",
        "    votre colis est perdu.",
        "The process ended during this request",
        "9 of 12, 3 nested",
        "You are the order desk of a small shop.",
        "resumed 2 times",
    ):
        assert shown in text, shown


def test_the_page_needs_nothing_and_runs_nothing() -> None:
    """No script, no style attribute, no event handler, and no address but its own places."""
    page = drawn(eventful())
    assert {tag for tag, _ in page.tags} & {
        "script",
        "link",
        "img",
        "iframe",
        "object",
        "form",
        "base",
    } == set()
    names = {name for _, attributes in page.tags for name in attributes}
    assert "style" not in names
    assert not [name for name in names if name.startswith("on")]
    assert all(href.startswith("#") for href in page.all("href"))
    assert not re.search(r"url\(|@import|https?://", page_of([timeline_of(eventful())]))


@pytest.mark.parametrize("forks", [False, True])
def test_each_link_leads_to_its_place(forks: bool) -> None:
    """The ids of a page are unique, and every link has its target, also with two runs on it."""
    timelines = [timeline_of(eventful()), *([timeline_of(forked())] if forks else [])]
    page = Page(page_of(timelines))
    ids = page.all("id")
    assert len(ids) == len(set(ids))
    assert {href.removeprefix("#") for href in page.all("href")} <= set(ids)


HOSTILE = (
    '</pre></details><script>alert(1)</script><img src=x onerror="alert(2)">'
    "{{ 7 * 7 }}\u202e\u200b\x1b[31m\x00\ud800"
)


def hostile() -> list[Fact]:
    """A run in which every text is hostile."""
    run = Journal()
    run.start(
        HOSTILE,
        run_id=HOSTILE,
        limits=Budget(max_calls_per_function={HOSTILE: 1}, max_calls_per_reply=None),
    )
    run.reply(1, 0, HOSTILE, (HOSTILE, {HOSTILE: HOSTILE}), ("b", HOSTILE))
    run.decide(0, 0, HOSTILE, "defer", prompt=HOSTILE, roles=(HOSTILE,))
    run.decide(0, 0, HOSTILE, by=HOSTILE, person=True, approved=True)
    run.decide(0, 1, "b", "deny", by=HOSTILE, reason=HOSTILE, answer=HOSTILE)
    run.begin(0, 0, HOSTILE)
    run.finish(1, 0, 0, HOSTILE, HOSTILE, outcome="failed", error=HOSTILE)
    return run.facts


def test_hostile_text_is_shown_and_does_nothing() -> None:
    """Markup is shown as text, and no character passes that cannot be seen."""
    source = page_of([timeline_of(hostile())], title=HOSTILE)
    page = Page(source)
    assert {tag for tag, _ in page.tags} & {"script", "img"} == set()
    assert "49" not in page.text
    unseen = {
        one for one in source if unicodedata.category(one) in ("Cc", "Cf", "Cs", "Co")
    }
    assert unseen <= {"\n"}
    assert page.text.count("\\u202e") > 8
    assert "<script>alert(1)</script>" in page.text


@pytest.mark.examples
def test_arguments_may_be_as_deep_as_a_model_likes() -> None:
    """A call that the run refused for its depth is shown, and so is the rest of the run."""
    for depth in (*some_of(range(900, 1000, 2)), 100_000):
        run = Journal()
        run.start("Go.")
        run.reply(1, 0, "", ("shop-pay", "x"))
        deep = '{"note": ' + "[" * depth + "]" * depth + "}"
        fact = run.facts[-1]
        assert isinstance(fact, ModelReplied)
        run.facts[-1] = replace(fact, calls=(replace(fact.calls[0], arguments=deep),))
        assert "shop-pay" in drawn(run.facts).text


def test_messages_are_shown_on_demand() -> None:
    """Details are closed, so that a reader sees the run first; and nothing of a long reply is lost."""
    run = Journal()
    run.start("goal")
    long_reply = "word " * 400 + "end"
    run.reply(1, 0, long_reply)
    page = drawn(run.facts)
    assert "open" not in {name for _, attributes in page.tags for name in attributes}
    assert long_reply in page.text


def test_two_runs_stand_beside_each_other() -> None:
    """The iterations that a fork shares with its run are drawn once; the others in pairs."""
    page = Page(
        page_of(
            [timeline_of(eventful()), timeline_of(forked())],
            title="Order 7, with half the round trips",
        )
    )
    assert "The first 3 iterations are the same in both" in page.text
    assert page.text.count("I look up the order, the parcel") == 1
    assert "resumed: max_iterations 12 → 6" in page.text
    assert "It is lost, so I refund it." in page.text
    assert "Order 7, with half the round trips" in page.text


def test_a_run_beside_itself_has_everything_in_common() -> None:
    """Two equal runs have no pair left."""
    timeline = timeline_of(eventful())
    assert (
        "The first 5 iterations are the same in both"
        in Page(page_of([timeline, timeline])).text
    )


@pytest.mark.parametrize("number", [0, 3])
def test_a_page_shows_one_or_two_runs(number: int) -> None:
    """Any other number is refused."""
    with pytest.raises(ValueError, match="one run, or two"):
        page_of([Timeline()] * number)


def test_the_fragment_is_embedded() -> None:
    """A fragment is one article, without a frame or a sheet of its own."""
    fragment = Page(fragment_of(timeline_of(eventful())))
    assert fragment.tags[0][0] == "article"
    assert {tag for tag, _ in fragment.tags} & {
        "html",
        "head",
        "body",
        "style",
        "title",
    } == set()


def test_every_head_of_a_run_is_drawn() -> None:
    """A run can be looked at after each of its facts; a queued one, too."""
    facts = eventful()
    for place in range(len(facts) + 1):
        assert "<article" in fragment_of(
            timeline_of(facts[:place], now=facts[-1].at + 60)
        )


def test_a_waiting_call_is_marked_and_its_track_ends_now() -> None:
    """A paused run says what waits; the time of the pause is drawn short, so that the work before it can be seen."""
    facts = eventful(paused=True)
    page = drawn(facts, now=facts[-1].at + 1e6)
    assert "shop-refund: waits (More than 100 francs: may it?)" in page.text
    widths = [
        float(width.rstrip("%")) for width in page.all("width") if width.endswith("%")
    ]
    assert max(widths) <= 100
    asked = [
        one["width"] or ""
        for tag, one in page.tags
        if tag == "rect" and one.get("class") == "asked"
    ]
    assert min(float(width.rstrip("%")) for width in asked) > 1


def test_the_wait_for_the_next_attempt_is_not_drawn_as_a_request() -> None:
    """A failed request has its bar, and nothing follows it however late the page is drawn."""
    journal = Journal()
    journal.start("Find the lamp.")
    journal.add(2, RequestFailed, iteration=0, reason="busy", usage=Usage())
    page = drawn(journal.facts, now=journal.at + 3600)
    bars = {one.get("class") for tag, one in page.tags if tag == "rect"}
    assert "failed" in bars
    assert "asked" not in bars


def test_bars_of_parallel_calls_overlap_in_time() -> None:
    """The bars of a batch begin together and end when their calls did."""
    page = page_of([timeline_of(eventful())])
    step = page[page.index('id="i0"') : page.index('id="i1"')]
    bars = re.findall(r'class="(\w+)" x="([\d.]+)%" width="([\d.]+)%"', step)
    (_, *calls) = [(kind, float(x), float(x) + float(width)) for kind, x, width in bars]
    assert [kind for kind, _, _ in calls] == ["ran", "failed", "ran"]
    order, track, customer = calls
    assert abs(order[1] - track[1]) < 1
    assert order[2] < customer[2] < track[2]
    assert track[2] == pytest.approx(100, abs=1)


def test_a_long_run_stays_quick() -> None:
    """A page of 2,000 facts takes less than a second of processor time, and less than 2 MB."""
    facts = long()
    assert len(facts) > 2_000
    fragment_of(Timeline())  # the templates are compiled once
    began = time.process_time()
    page = page_of([timeline_of(facts)])
    assert time.process_time() - began < 1.0
    assert len(page.encode()) < 2_000_000


WITHOUT_JINJA = """
import sys
sys.modules["jinja2"] = None
from planner_ext.timeline import Timeline, page_of
page_of([Timeline()])
"""


def test_without_jinja2_the_error_names_the_extra() -> None:
    """The values need no jinja2; a page says what to install."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_JINJA],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (
        'PlannerExtError: A timeline page needs jinja2. Install it with: pip install "planner-ext[cli]"'
        in done.stderr
    )


async def test_a_result_draws_itself(tmp_path: Path) -> None:
    """``result.to_html()`` is the page of its facts, of messages that are Semantic Kernel's objects."""
    kernel = Kernel()
    kernel.add_service(ScriptedChatCompletion([say("Say hello."), say("Hello.")]))
    result = await FunctionCallingStepwisePlanner().invoke(kernel, "Greet me.")
    assert "Hello." in Page(result.to_html()).text
    assert "<title>Greeting</title>" in result.to_html(title="Greeting")


def test_the_goal_is_the_title() -> None:
    """Without a title, the page has the goal's, on one line."""
    run = Journal()
    run.start("Do this.\nThen that.")
    started = run.facts[0]
    assert isinstance(started, RunStarted)
    assert "<title>Do this. Then that.</title>" in page_of(
        [timeline_of([replace(started, run_id="r")])]
    )


def test_a_single_timeline_is_refused_with_the_way_out() -> None:
    """A page takes a list of timelines: the error says what to write."""
    single: Any = timeline_of([])
    with pytest.raises(ValueError, match=r"\[timeline\].*got a Timeline"):
        page_of(single)


def test_the_page_of_a_fork_is_headed_by_its_change() -> None:
    """The iteration after which it begins, and its instruction; the goal stands below, and a given title wins."""
    run = timeline_of(eventful())
    fork = timeline_of(forked())
    said = TimelineMessage(role="user", text="Refund half of it.")
    changed = tuple(
        replace(one, messages=(*one.messages, said)) if one.number == 2 else one
        for one in fork.iterations
    )
    fork = replace(fork, iterations=changed)
    source = page_of([run, fork])
    assert "<h1>Fork after iteration 1: Refund half of it.</h1>" in source
    assert "<title>Fork after iteration 1: Refund half of it.</title>" in source
    assert f'<p class="quiet" dir="auto">{run.goal}' in source
    assert "<h1>Mine</h1>" in page_of([run, fork], title="Mine")
