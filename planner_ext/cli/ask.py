"""Asks a person at the terminal about a pending call: shows exactly what will run, and the possible answers."""

import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from planner_ext.cli.show import Signs, framed, width_of
from planner_ext.cli.text import (
    complain,
    cut_in_the_middle,
    exact,
    exact_json,
    folded_lines,
    moment_text,
    say,
    visible,
)
from planner_ext.core.state import ASK_USER
from planner_ext.hitl_manager import Approve, Decision, Deny, PendingCall, Supply
from planner_ext.sk.arguments import InvalidArguments, parse_object

__all__ = ["ApprovalPrompt", "print_pending", "terminal_prompt"]

_CHOICES = {"a": "approve", "d": "deny", "e": "edit", "w": "always", "s": "show all", "q": "quit"}
_STICKY = {"f": "function", "a": "arguments", "": "back"}

_AROUND = 14
"""Lines of a screen that a question takes beside the arguments: the frame, the other rows, and the question itself."""
_BESIDE = 18
"""Cells of a line of the frame that the arguments do not get."""
_LONGEST_NAME = 48
"""Characters of a name that is repeated next to the question."""


class ApprovalPrompt:
    """Asks the person at the terminal; Ctrl-C, Ctrl-D and ``quit`` leave a call undecided.

    The text fits the screen, so that function, id and question are visible together. Input typed before a question was
    shown is discarded.
    """

    def __init__(self, console: Console, *, by: str | None) -> None:
        """Ask on this console; decisions carry the name of the person."""
        self._console = console
        self._by = by
        self._refused: tuple[str, Decision] | None = None
        self._cut = False

    def decide(self, call: PendingCall, *, more: int) -> Decision | None:
        """Show a call and ask until there is a decision, or None if the person quits.

        Args:
            call: The call.
            more: The number of other pending calls.
        """
        refused, self._refused = self._refused, None
        again = refused[1] if refused is not None and refused[0] == call.id else None
        try:
            if again is None:
                self._cut = print_pending(self._console, call, more=more, lines=max(self._console.height - _AROUND, 6))
            if call.fully_qualified_name == ASK_USER:
                answer = self._answer("Your answer (empty: leave it open): ")
                return Supply(answer, by=self._by) if answer else None
            if isinstance(again, Approve) and again.arguments is not None and (edited := self._edited(call)):
                return edited
            return self._asked(call)
        except (EOFError, KeyboardInterrupt):
            self._console.print()
            return None

    def refuse(self, call: PendingCall, decision: Decision, reason: str) -> None:
        """Print why a decision was refused; the same call is asked about again."""
        self._complain(reason)
        self._refused = call.id, decision

    def remembered(self, call: PendingCall) -> Decision:
        """Approve a call that an earlier "always" covers, and print that."""
        self._say(f"{exact(call.fully_qualified_name)}: approved, as you said always.")
        return Approve(by=self._by, fingerprint=call.fingerprint)

    def _asked(self, call: PendingCall) -> Decision | None:
        choices = {key: name for key, name in _CHOICES.items() if self._cut or key != "s"}
        question = ", ".join(f"{name} ({key})" for key, name in choices.items()) + "? "
        while True:
            decision: Decision | None = None
            match self._choice(f"{_short_name(self._console, call)}: {question}", choices):
                case "approve":
                    decision = Approve(by=self._by, fingerprint=call.fingerprint)
                case "deny":
                    decision = Deny(self._answer("Why, for the model (may be empty): "), by=self._by)
                case "edit":
                    decision = self._edited(call)
                case "always":
                    decision = self._approved_always(call)
                case "show all":
                    print_pending(self._console, call)
                case _:
                    return None
            if decision is not None:
                return decision

    def _edited(self, call: PendingCall) -> Decision | None:
        """Ask for other arguments; None goes back to the question."""
        self._say("Now: " + exact_json(call.arguments))
        while answer := self._answer("New arguments, as one line of JSON (empty: back): "):
            edited = parse_object(answer)
            if not isinstance(edited, InvalidArguments):
                return Approve(arguments=edited, by=self._by, fingerprint=call.fingerprint)
            self._complain(f"The arguments {edited.message}")
        return None

    def _approved_always(self, call: PendingCall) -> Decision | None:
        question = "For the rest of this run: this function (f), or these arguments only (a)? "
        match self._choice(question, _STICKY):
            case "function" | "arguments" as always:
                return Approve(always=always, by=self._by, fingerprint=call.fingerprint)
            case _:
                return None

    def _choice(self, question: str, choices: dict[str, str]) -> str:
        """Ask until the answer is one of the choices, by its letter or in full."""
        while True:
            answer = self._answer(question).lower()
            chosen = choices.get(answer, answer)
            if chosen in choices.values():
                return chosen
            self._complain(f"Answer with one of: {', '.join(choices.values())}, or a letter.")

    def _answer(self, question: str) -> str:
        discard_typed_ahead()
        self._console.print(Text(question, "bold"), end="", soft_wrap=True)
        return input().strip()

    def _say(self, text: str) -> None:
        say(self._console, _shown(self._console, text, "dim"))

    def _complain(self, text: str) -> None:
        complain(self._console, text, lead="Not taken: ")


def terminal_prompt(console: Console, *, by: str | None) -> ApprovalPrompt | None:
    """Return a prompt if a person sees questions here and can answer them, else None."""
    return ApprovalPrompt(console, by=by) if is_terminal() else None


def is_terminal() -> bool:
    """Whether a person sees questions here and can answer them."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()  # pyright: ignore[reportUnnecessaryComparison]  (None without a console)


def print_pending(console: Console, call: PendingCall, *, more: int = 0, lines: int | None = None) -> bool:
    """Print a pending call: invisible characters are escaped, function and id come last.

    Args:
        console: Where to print.
        call: The call.
        more: The number of other pending calls.
        lines: Maximum lines of the prompt and the arguments together; more is cut from their middle, with a note at
            that place. None prints them whole.

    Returns:
        Whether anything was cut.
    """
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="fold")
    asks = call.fully_qualified_name == ASK_USER
    texts = {"question": visible(call.prompt)} if call.prompt else {}
    if not asks:
        texts["arguments"] = exact_json(call.arguments, indent=2) if call.arguments else "none"
    cells, cut = width_of(console) - _BESIDE, False
    for label, text in texts.items():
        shown = text
        if lines is not None and not asks:
            most = lines if label == "arguments" else lines // 2  # the arguments get the lines that the question leaves
            shown = cut_in_the_middle(text, cells=cells, lines=most)
            lines -= folded_lines(shown, cells)
            cut = cut or shown != text
        rows.add_row(label, _shown(console, shown))
    if not asks:
        rows.add_row("function", _shown(console, exact(call.fully_qualified_name), "bold"))
    rows.add_row("call", _shown(console, f"{exact(call.id)}, fingerprint {exact(call.fingerprint[:12])}"))
    if call.expires_at is not None:
        rows.add_row("open until", moment_text(call.expires_at))
    title = "The model asks you" if asks else "A call waits for your decision"
    framed(console, rows, f"{title}, and {more} more" if more else title, "yellow")
    return cut


def _shown(console: Console, text: str, style: str = "") -> Text:
    """Escape characters that the console's encoding lacks: a replacement character would deceive."""
    return Text(text.encode(console.encoding, "backslashreplace").decode(console.encoding), style)


def _short_name(console: Console, call: PendingCall) -> str:
    """Return a call's name, cut to half a line."""
    half, mark = _LONGEST_NAME // 2, Signs(console).more
    names = (exact(call.fully_qualified_name), exact(call.id))
    return ", call ".join(
        name if len(name) <= _LONGEST_NAME else f"{name[:half]}{mark}{name[-half:]}" for name in names
    )


def discard_typed_ahead() -> None:
    """Discard unread terminal input; a pipe's input is kept."""
    if not sys.stdin.isatty():
        return
    if sys.platform == "win32":
        import msvcrt  # noqa: PLC0415  (there only)

        while msvcrt.kbhit():
            msvcrt.getwch()
    else:
        import termios  # noqa: PLC0415  (not on Windows)

        termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)
