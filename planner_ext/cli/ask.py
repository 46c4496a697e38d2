"""Asks a person at the terminal to decide a call, and shows exactly what will run."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from planner_ext.cli.edit import (
    changed_arguments,
    edited_object,
    edited_value,
    editor,
)
from planner_ext.cli.parts import drawn_parts
from planner_ext.cli.show import print_pending
from planner_ext.cli.text import Terminal
from planner_ext.hitl_manager import Approve, Decision, Deny, Supply, ToolCall
from planner_ext.readable.parts import Part, changes_of
from planner_ext.readable.text import exact, exact_json
from planner_ext.sk.functions.conversion import InvalidArguments, parse_object

_CHOICES = {
    "a": "approve",
    "d": "deny",
    "e": "edit",
    "w": "always",
    "j": "exact JSON",
    "s": "show all",
    "q": "quit",
}
_AGREE = "Approve with these changes (y), or edit on (e)? "
_STICKY = {"f": "function", "a": "arguments", "": "back"}

_FRAME_LINES = 14
"""Lines of the screen beside the arguments."""
_LONGEST_NAME = 48
"""Characters of a name in a question."""


class ApprovalPrompt:
    """Asks the person at the terminal; Ctrl-C, Ctrl-D and ``quit`` leave a call undecided.

    Function, id and question fit the screen together. Input typed before a question was
    shown is discarded.
    """

    def __init__(self, console: Terminal, *, by: str) -> None:
        self._console = console
        self._by = by
        self._refused: tuple[str, Decision] | None = None
        self._cut = False

    def decide(self, call: ToolCall, *, more: int) -> Decision | None:
        """Show a call and ask; None if the person quits. ``more`` others wait."""
        refused = self._refused
        self._refused = None
        again = None
        if refused is not None and refused[0] == call.id:
            again = refused[1]
        try:
            if again is None:
                self._cut = print_pending(
                    self._console,
                    call,
                    more=more,
                    lines=max(self._console.height - _FRAME_LINES, 6),
                )
            if call.kind == "question":
                answer = self._answer("Your answer (empty: leave it open): ")
                if answer:
                    return Supply(answer, by=self._by)
                return None
            if (
                isinstance(again, Approve)
                and again.arguments is not None
                and (edited := self._edited(call))
            ):
                return edited
            return self._asked(call)
        except (EOFError, KeyboardInterrupt):
            self._console.print()
            return None

    def refuse(self, call: ToolCall, decision: Decision, reason: str) -> None:
        """Print why a decision was refused; the call is asked about again."""
        self._complain(reason)
        self._refused = call.id, decision

    def remembered(self, call: ToolCall) -> Decision:
        """Approve a call that an earlier "always" covers, and print that."""
        self._say(f"{exact(call.fully_qualified_name)}: approved, as you said always.")
        return Approve(by=self._by, fingerprint=call.fingerprint)

    def _asked(self, call: ToolCall) -> Decision | None:
        choices = {
            key: name for key, name in _CHOICES.items() if self._cut or key != "s"
        }
        offered = (f"{name} ({key})" for key, name in choices.items())
        question = f"{', '.join(offered)}? "
        while True:
            decision: Decision | None = None
            match self._choice(
                f"{_short_name(self._console, call)}: {question}", choices
            ):
                case "approve":
                    decision = Approve(by=self._by, fingerprint=call.fingerprint)
                case "deny":
                    decision = Deny(
                        self._answer("Why, for the model (may be empty): "), by=self._by
                    )
                case "edit":
                    decision = self._edited(call)
                case "always":
                    decision = self._approved_always(call)
                case "exact JSON" | "show all" as what:
                    self._show(call, as_json=what == "exact JSON")
                case _:
                    return None
            if decision is not None:
                return decision

    def _show(self, call: ToolCall, *, as_json: bool) -> None:
        if as_json:
            self._say(exact_json(call.arguments, indent=2))
        else:
            print_pending(self._console, call)

    def _edited(self, call: ToolCall) -> Decision | None:
        edited = self._in_editor(call) if editor() else self._typed(call)
        if edited is None:
            return None
        return Approve(arguments=edited, by=self._by, fingerprint=call.fingerprint)

    def _typed(self, call: ToolCall) -> Mapping[str, Any] | None:
        self._say("Now: " + exact_json(call.arguments))
        while answer := self._answer(
            "NAME=VALUE, or all arguments as one line of JSON (empty: back): "
        ):
            if not answer.startswith("{"):
                try:
                    return changed_arguments(call.arguments, [answer])
                except ValueError as error:
                    self._complain(str(error))
                    continue
            edited = parse_object(answer)
            if not isinstance(edited, InvalidArguments):
                return edited
            self._complain(f"The arguments {edited.message}")
        return None

    def _in_editor(self, call: ToolCall) -> Mapping[str, Any] | None:
        """Edit one argument, or all as JSON; then show what was changed."""
        arguments = dict(call.arguments)
        names = [exact(name) for name in arguments]
        while name := self._answer(
            f"Edit {', '.join(names)}, or all as JSON (all; empty: back): "
        ):
            try:
                if name in arguments:
                    arguments[name] = edited_value(arguments[name])
                elif name == "all":
                    arguments = edited_object(arguments)
                else:
                    self._complain(f"There is no argument {name}.")
                    continue
            except ValueError as error:
                self._complain(f"The value {error}.")
                continue
            self._print_changes(changes_of(call.arguments, arguments))
            agreed = self._choice(_AGREE, {"y": "yes", "e": "edit"})
            if agreed == "yes":
                return arguments
        return None

    def _print_changes(self, changes: Sequence[Part]) -> None:
        width = self._console.text_width
        for line in drawn_parts(self._console, changes, width=width):
            self._console.print(line, soft_wrap=True)
        if not changes:
            self._say("Nothing is changed.")

    def _approved_always(self, call: ToolCall) -> Decision | None:
        question = (
            "For the rest of this run: this function (f), or these arguments only (a)? "
        )
        match self._choice(question, _STICKY):
            case "function" | "arguments" as always:
                return Approve(always=always, by=self._by, fingerprint=call.fingerprint)
            case _:
                return None

    def _choice(self, question: str, choices: dict[str, str]) -> str:
        while True:
            answer = self._answer(question).lower()
            chosen = choices.get(answer, answer)
            if chosen in choices.values():
                return chosen
            self._complain(
                f"Answer with one of: {', '.join(choices.values())}, or a letter."
            )

    def _answer(self, question: str) -> str:
        discard_typed_ahead()
        text = Text(question, "bold")
        self._console.print(text, end="", soft_wrap=not self._console.is_terminal)
        return input().strip()

    def _say(self, text: str) -> None:
        self._console.say(self._console.encodable(text), "dim")

    def _complain(self, text: str) -> None:
        self._console.complain(text, lead="Not taken: ")


def is_terminal() -> bool:
    """Whether a person sees questions here and can answer them."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()  # pyright: ignore[reportUnnecessaryComparison]  (None without a console)


def _short_name(console: Terminal, call: ToolCall) -> str:
    half = _LONGEST_NAME // 2
    mark = console.signs.more
    names = (exact(call.fully_qualified_name), exact(call.id))
    return ", call ".join(
        name if len(name) <= _LONGEST_NAME else f"{name[:half]}{mark}{name[-half:]}"
        for name in names
    )


def discard_typed_ahead() -> None:
    """Discard unread terminal input; a pipe's is kept."""
    if not sys.stdin.isatty():
        return
    if sys.platform == "win32":
        import msvcrt  # noqa: PLC0415  (there only)

        while msvcrt.kbhit():
            msvcrt.getwch()
    else:
        import termios  # noqa: PLC0415  (not on Windows)

        termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)
