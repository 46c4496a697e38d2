"""What a person decides on at the terminal: nothing in it is hidden, and nothing typed before it was shown counts."""

import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from planner_ext.cli.ask import ApprovalPrompt
from planner_ext.cli.show import print_pending
from planner_ext.cli.text import Terminal
from planner_ext.hitl_manager import PendingCall
from planner_ext.readable.text import exact, exact_json, visible
from planner_ext.testing import Script, ScriptedOpenAIServer, call, calls, say
from support.command_line import Command
from support.processes import Lives
from support.terminal import QUESTION, Session
from support.values import each_of

ASK = ("run", "What is a lamp?", "--kernel", "shop:make", "--no-plan", "--ask-all")
LAMP = call("shop-price", {"article": "lamp"})
UNSEEN = {
    "soft hyphen": 0xAD,
    "combining grapheme joiner": 0x34F,
    "arabic letter mark": 0x61C,
    "hangul choseong filler": 0x115F,
    "hangul jungseong filler": 0x1160,
    "ogham space": 0x1680,
    "khmer inherent vowel": 0x17B4,
    "mongolian vowel separator": 0x180E,
    "en space": 0x2002,
    "zero width space": 0x200B,
    "joiner": 0x200D,
    "right to left mark": 0x200F,
    "line separator": 0x2028,
    "right to left override": 0x202E,
    "narrow space": 0x202F,
    "word joiner": 0x2060,
    "invisible times": 0x2062,
    "isolate": 0x2066,
    "braille blank": 0x2800,
    "ideographic space": 0x3000,
    "hangul filler": 0x3164,
    "variation selector": 0xFE0F,
    "byte order mark": 0xFEFF,
    "halfwidth hangul filler": 0xFFA0,
    "interlinear annotation": 0xFFF9,
    "null notehead": 0x1D159,
    "beam": 0x1D173,
    "tag": 0xE0041,
    "supplementary variation selector": 0xE0100,
    "no-break space": 0xA0,
    "escape": 0x1B,
    "null": 0,
    "delete": 0x7F,
    "next line": 0x85,
    "carriage return": 0x0D,
    "tab": 0x09,
    "lone surrogate": 0xD800,
    "private use": 0xE000,
    "unassigned": 0x378,
}


def pending(
    name: str = "shop-pay", id: str = "c1", prompt: str = "", **arguments: object
) -> PendingCall:
    """A call that waits."""
    return PendingCall(
        id=id,
        fully_qualified_name=name,
        arguments=arguments,
        fingerprint="f" * 64,
        expires_at=None,
        prompt=prompt,
    )


def printed(
    call: PendingCall, *, lines: int | None = None, encoding: str = "utf-8"
) -> str:
    """What print_pending prints on 80 columns."""
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    print_pending(Terminal(file, width=80), call, lines=lines)
    file.flush()
    return raw.getvalue().decode(encoding)


@each_of("code", UNSEEN.values(), ids=UNSEEN)
def test_what_is_drawn_as_nothing_is_written_as_an_escape(code: int) -> None:
    """In arguments, their names, the prompt, the function's name and the id, alone and between letters."""
    character, escape = chr(code), json.dumps(chr(code))[1:-1]
    assert exact(f"a{character}b") == f"a{escape}b"
    assert (
        exact_json({f"a{character}": [character]}) == f'{{"a{escape}": ["{escape}"]}}'
    )
    shown = printed(
        pending(
            f"pay{character}x",
            f"id{character}x",
            f"sure{character}?",
            to=f"bob{character}",
        )
    )
    assert character not in shown or character in "\n"
    assert shown.count(escape) == 4


def test_line_ends_in_names_begin_no_lines() -> None:
    """Neither a name nor an id can draw a row that is not there; each line of an argument has its number."""
    shown = printed(
        pending("pay\nfunction  safe", "c\ncall  c2", to="bob\narguments  none")
    )
    assert r"pay\nfunction  safe" in shown
    assert r"c\ncall  c2" in shown
    assert "  2  arguments  none" in shown


@each_of(
    "text",
    ["Grüße, Zoë", "日本語", "עברית", "ไทยที่", "हिन्दी", "e\u0301", "🎉", "[bold]x[/]"],
)
def test_what_can_be_seen_is_shown_as_it_is(text: str) -> None:
    """Letters of every script, with the marks that belong to them; markup is text."""
    assert exact(text) == visible(text) == text


def test_marks_that_belong_to_nothing_are_escaped() -> None:
    """A mark after a blank, at the beginning, and a pile of them."""
    assert exact("\u0338a") == r"\u0338a"
    assert exact("a \u0338") == r"a \u0338"
    assert exact("a" + "\u0301" * 4) == "a\u0301\u0301" + r"\u0301\u0301"


def test_blanks_in_a_row_are_counted() -> None:
    """A run of blanks is a number, wherever it stands; the indentation of the JSON is not one."""
    assert exact_json({"to": "bob" + " " * 400 + "x"}) == r'{"to": "bob\<400 blanks>x"}'
    assert exact_json({"to": " " * 5}, indent=2) == '{\n  "to": "\\<5 blanks>"\n}'
    assert visible("a\n" + " " * 70 + "b") == "a\n\\<70 blanks>b"
    assert exact_json({"a": {"b": {"c": "d e"}}}, indent=2).count("blanks") == 0
    assert exact(r"\<5 blanks>") == r"\\<5 blanks>"


def test_a_character_that_the_terminal_lacks_is_escaped() -> None:
    """On a terminal that cannot write a letter, two letters do not look alike."""
    shown = printed(pending(to="zoë"), encoding="ascii")
    assert r"zo\xeb" in shown


def test_long_arguments_are_cut_in_the_middle() -> None:
    """Beginning and end are shown, how much is missing is said, function and id stand below."""
    call = pending(lines=[f"line {number}" for number in range(1_900)], last="pay bob")
    shown = printed(call, lines=12).splitlines()
    assert len(shown) < 24
    text = "\n".join(shown)
    assert '"line 0"' in text and "last: pay bob" in text
    assert re.search(r"[\d,]+ lines are not shown here", text)
    assert (
        text.index("not shown here")
        < text.index("shop-pay")
        < text.index("c1, fingerprint")
    )
    whole = printed(call)
    assert all(f'"line {number}"' in whole for number in range(1_900))
    assert whole.rindex("last: ") < whole.index("shop-pay")


def test_arguments_have_the_lines_that_the_question_leaves() -> None:
    """Beside a short question they are shown whole; a question as long as they are takes half of the room."""
    arguments: dict[str, Any] = {f"n{number}": number for number in range(7)}
    assert "not shown here" not in printed(
        pending(prompt="May it?", **arguments), lines=10
    )
    both = printed(pending(prompt="May it?\n" * 99, **arguments), lines=10)
    assert both.count("not shown here") == 2
    assert len(both.splitlines()) <= 10 + 8


@each_of(
    "text",
    ["a" * 5, "a\nb\nc", "x" * 1_000_000, "\n" * 100_000, "日" * 9999, "a b\n" * 5000],
)
def test_a_cut_text_has_no_more_lines_than_it_may(text: str) -> None:
    """For every text: one long line, many short ones, wide characters, nothing but line ends; its ends are shown."""
    shown = printed(pending(text=text, last="pay bob"), lines=9).splitlines()
    assert len(shown) <= 9 + 4
    assert any("text" in line for line in shown)
    assert any("last: pay bob" in line for line in shown)


def test_what_was_typed_before_the_question_decides_nothing(
    lives: Lives, here: Path
) -> None:
    """Answers that were typed ahead are thrown away: both calls are still asked about, and nothing runs unseen."""
    script: Script = [calls(LAMP, call("shop-wait")), say("Fine.")]
    with ScriptedOpenAIServer(script) as server:
        session = Session(lives, here, *ASK, *at(server))
        session.write("a\na\na\n")
        session.type("a\na\na", after=QUESTION)
        session.type("q", after=QUESTION)
        assert session.end() == 4
        assert len(server.requests) == 1
    assert session.shown.count(QUESTION) == 2
    assert "shop-price, call call_1: approve (a)" in session.shown
    assert "shop-wait, call call_2: approve (a)" in session.shown


def test_all_of_a_long_call_is_shown_on_request(
    command: Command, typed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The question stays in sight under long arguments; "show all" prints them whole, and asks again."""
    monkeypatch.setenv("LINES", "25")
    typed += ["show all", "d", "too long"]
    long = {"article": "\n".join(f"line {number}." for number in range(2000))}
    with ScriptedOpenAIServer([call("shop-price", long), say("Fine.")]) as server:
        outcome = command(*ASK, *at(server))
        assert str(server.requests[-1].messages[-1]["content"]).endswith(
            "did not run: too long"
        )
    assert (outcome.code, outcome.out) == (0, "Fine.\n")
    first, question, whole = outcome.err.partition("show all (s), quit (q)? ")
    assert question
    panel = first[first.rindex("╭") :]
    assert len(panel.splitlines()) <= 25
    assert "line 0." in panel and "line 1999." in panel and "line 1000." not in panel
    assert "line 1000." in whole


def test_an_argument_is_edited_by_its_name(
    command: Command, typed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``NAME=VALUE`` changes one argument, as for ``approvals edit``; what is neither that nor JSON is refused."""
    monkeypatch.delenv("EDITOR", raising=False)
    monkeypatch.delenv("VISUAL", raising=False)
    typed += ["e", "article", "article=lamp"]
    with ScriptedOpenAIServer(
        [call("shop-price", {"article": "lamb"}), say("Fine.")]
    ) as server:
        outcome = command(*ASK, *at(server))
        result = str(server.requests[-1].messages[-1]["content"])
    assert (outcome.code, typed) == (0, [])
    assert "Not taken: Expected NAME=VALUE" in outcome.err
    assert "42" in result


def test_a_text_is_edited_in_the_persons_editor(
    command: Command, typed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The editor has the text itself; what it changed is shown, and counts once the person agrees."""
    monkeypatch.setenv("EDITOR", "sed -i s/lamb/lamp/")
    typed += ["e", "nothing", "article", "e", "article", "y"]
    with ScriptedOpenAIServer(
        [call("shop-price", {"article": "lamb"}), say("Fine.")]
    ) as server:
        outcome = command(*ASK, *at(server))
        result = str(server.requests[-1].messages[-1]["content"])
    assert (outcome.code, typed) == (0, [])
    assert "There is no argument nothing." in outcome.err
    assert "  - lamb\n  + lamp\n" in outcome.err
    assert "42" in result


def test_an_editor_that_fails_changes_nothing(
    command: Command, typed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The person is told, and asked again."""
    monkeypatch.setenv("EDITOR", "false")
    typed += ["e", "article", "", "d", ""]
    with ScriptedOpenAIServer(
        [call("shop-price", {"article": "x"}), say("Fine.")]
    ) as server:
        outcome = command(*ASK, *at(server))
    assert (outcome.code, typed) == (0, [])
    assert "cannot be edited" in outcome.err


def test_the_exact_json_is_shown_on_request(command: Command, typed: list[str]) -> None:
    """What is decided on, as JSON with everything in it visible."""
    typed += ["j", "d", ""]
    with ScriptedOpenAIServer(
        [call("shop-price", {"article": "a\nb"}), say("Fine.")]
    ) as server:
        outcome = command(*ASK, *at(server))
    assert '"article": "a\\nb"' in outcome.err


def test_scripted_answers_in_a_pipe_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe has no typing ahead: each line answers its question."""
    read, write = os.pipe()
    os.write(write, b"a\nd\nno\n")
    os.close(write)
    with os.fdopen(read) as answers:
        monkeypatch.setattr(sys, "stdin", answers)
        prompt = ApprovalPrompt(Terminal(io.StringIO(), width=80), by="ann")
        decisions = [
            prompt.decide(pending(), more=1),
            prompt.decide(pending(id="c2"), more=0),
        ]
    assert [type(decision).__name__ for decision in decisions] == ["Approve", "Deny"]


def at(server: ScriptedOpenAIServer) -> tuple[str, ...]:
    """The options for a scripted endpoint."""
    return ("--base-url", server.url, "--model", "scripted")
