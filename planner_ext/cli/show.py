"""Prints a run for a person: round trips with their text as it arrives, calls and their outcomes, what waits."""

import json
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from types import TracebackType
from typing import Self, cast

from rich.status import Status
from rich.table import Table
from rich.text import Text

from planner_ext.approval.decisions import record_of
from planner_ext.cli.text import (
    Terminal,
    TextFlow,
    cut_in_the_middle,
    duration_text,
    folded_lines,
    moment_text,
    shortened,
)
from planner_ext.core import facts
from planner_ext.core.errors import IllegalTransitionError, counted, seconds
from planner_ext.core.fold import apply
from planner_ext.core.limits import remaining_limits
from planner_ext.core.state import ASK_USER, State
from planner_ext.core.text import exact, exact_json, one_line, printable, visible
from planner_ext.core.values import RequestedCall
from planner_ext.events import PlannerEvent, ResultReady, TextDelta
from planner_ext.hitl_manager import PendingCall
from planner_ext.planner.run import FunctionCallingStepwisePlannerResult

_BESIDE = 18
"""Cells of a line of the frame that the arguments of a call do not get."""


class Progress:
    """Prints the events of one run; a terminal also shows what the run waits for, and the rest of its limits.

    Takes the events of ``invoke_stream``, or, as an observer of ``invoke``, only the facts; then each text is printed
    whole.

    Attributes:
        followed: The number of facts that it has seen.
        until: When the command's own timeout ends the run, in seconds since the epoch; None without one.
    """

    def __init__(self, console: Terminal) -> None:
        self.followed = 0
        self.until: float | None = None
        self._console = console
        self._state = State()
        self._timed_at = 0.0
        self._flow: TextFlow | None = None
        self._calls: tuple[RequestedCall, ...] = ()
        self._arguments: list[str] = []
        self._running: dict[int, facts.CallStarted] = {}
        self._spinner = self._new_spinner()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._rest()
        if self._flow is not None:
            self._flow.close()
            self._flow = None

    def catch_up(self, earlier: Iterable[facts.Fact]) -> None:
        """Read earlier facts of the same run without printing them: its limits, what it spent, and its open calls."""
        for fact in earlier:
            self._follow(fact)

    async def watch(self, stream: AsyncGenerator[PlannerEvent, None]) -> FunctionCallingStepwisePlannerResult:
        """Print a run's events as they come, and return its result."""
        async with aclosing(stream) as events:
            async for event in events:
                self.show(event)
                if isinstance(event, ResultReady):
                    return event.result
        raise AssertionError("a stream ends with its result")

    def show(self, event: PlannerEvent) -> None:
        """Print an event; the spinner pauses meanwhile."""
        self._rest()
        match event:
            case TextDelta():
                self._reply(plan=event.iteration < 0).write(event.text)
            case ResultReady():
                pass
            case _:
                self._close_reply(event)
                self._follow(event)
                self._print(event)
        self._wait()

    def note(self, text: str) -> None:
        """Print a line about the run that is in no fact; the spinner pauses meanwhile."""
        self._rest()
        self._line(text, "dim")
        self._wait()

    def _follow(self, fact: facts.Fact) -> None:
        """Remember the values for later lines: the state of the run, and the calls with their arguments."""
        self.followed += 1
        with suppress(IllegalTransitionError):  # facts before it are missing; then the numbers stay as they were
            self._state = apply(self._state, fact)
        if isinstance(fact, facts.RunStarted | facts.Resumed) or hasattr(fact, "seconds"):
            self._timed_at = fact.at
        match fact:
            case facts.ModelReplied():
                self._calls = fact.calls
                self._arguments = [call.arguments for call in fact.calls]
            case facts.CallDecided() if fact.index < len(self._calls):
                self._arguments[fact.index] = fact.arguments_of(self._calls[fact.index])
            case _:
                pass

    def _reply(self, *, plan: bool) -> TextFlow:
        """Return the text of the arriving reply; a new one begins with its header."""
        if self._flow is None:
            rules = self._state.rules
            what = f"Round trip {self._state.ledger.iterations + 1}" if rules.charge_plan or not plan else "Plan"
            if rules.limits.max_iterations is not None and what != "Plan":
                what += f" of {rules.limits.max_iterations}"
            said = ": the plan" if plan and what != "Plan" else ""
            left = self._left(("max_iterations",), at=self._state.at)
            self._console.print(Text(what, "bold"), Text(said), Text(left, "dim"), sep="")
            self._flow = TextFlow(self._console, width=self._console.text_width, indent=4)
        return self._flow

    def _close_reply(self, fact: facts.Fact) -> None:
        """End a reply's text; one that was not streamed is printed whole."""
        if isinstance(fact, facts.Planned | facts.ModelReplied):
            flow = self._reply(plan=isinstance(fact, facts.Planned))
            if flow.empty:
                flow.write(fact.plan if isinstance(fact, facts.Planned) else fact.text)
            flow.close()
            self._flow = None

    def _print(self, fact: facts.Fact) -> None:
        """Print the lines of a fact; some have none."""
        match fact:
            case facts.Resumed():
                self._spinner = self._new_spinner()
            case facts.Paused() | facts.Ended():
                self._spinner = None
            case facts.ModelReplied(withheld=str() as limit):
                self._line(f"functions were withdrawn: {limit}", "dim")
            case facts.Clarified(answer=str() as answer):
                self._line(f"{self._console.signs.good} {one_line(fact.by) or 'answered'}: {one_line(answer)}")
            case facts.StopRequested() | facts.BudgetChanged() | facts.SharedBudgetsChecked() | facts.MessageAdded():
                self._line(_remark(fact), "dim")
            case facts.CallDecided():
                self._print_decision(fact)
            case _:
                self._print_call(fact)

    def _print_call(self, fact: facts.Fact) -> None:
        match fact:
            case facts.CallsWithheld():
                for index in fact.indexes:
                    name = self._calls[index].name if index < len(self._calls) else "?"
                    self._outcome(self._console.signs.bad, name, "not run", fact.answer.removeprefix("Not executed: "))
            case facts.CallStarted():
                self._running[fact.index] = fact
                self._line(f"{self._console.signs.call} {self._call(fact)}")
            case facts.CallFinished():
                started = self._running.pop(fact.index, fact)
                sign = self._console.signs.good if fact.outcome == "ok" else self._console.signs.bad
                self._outcome(sign, fact.function, f"{seconds(fact.at - started.at)} s", fact.error or fact.result)
            case _:
                pass

    def _print_decision(self, fact: facts.CallDecided) -> None:
        if fact.person and (record := record_of(fact, self._calls[fact.index])) is not None:
            edited = f" in place of {_arguments_text(self._calls[fact.index].arguments)}" if fact.edited else ""
            self._line(f"{one_line(fact.by) or 'a person'}: {record.kind} {self._call(fact)}{edited}")
        prompt = one_line(fact.prompt)
        match fact.verdict:
            case "run":
                pass
            case "final_answer":
                self._line(f"{self._console.signs.call} hands over the final answer")
            case "defer" if fact.kind == "question":
                self._line(f"? asks: {prompt}")
            case "defer":
                self._line(f"? {self._call(fact)} waits for a decision" + (f": {prompt}" if prompt else ""))
            case "external":
                self._line(f"{self._console.signs.call} {fact.function} is for the caller to run")
            case "answer" | "deny":
                signs = self._console.signs
                reads = fact.kind == "read"
                sign, note = (signs.good, "read on") if reads else (signs.bad, "not run")
                self._outcome(sign, fact.function, note, fact.answer or fact.reason)

    def _outcome(self, sign: str, name: str, note: str, text: str) -> None:
        column = min(max(len(each) for each in (name, *(call.name for call in self._calls))), 30)
        style = "green" if sign == self._console.signs.good else "red"
        self._line(f" {one_line(name):<{column}}  {note:>7}  {one_line(text)}", sign=Text(sign, style))

    def _line(self, text: str, style: str = "", *, sign: Text | None = None) -> None:
        """Print one indented line, cut where the console ends."""
        lead = sign or Text("")
        room = self._console.text_width - 4 - lead.cell_len
        self._console.print(
            "    ", lead, Text(shortened(printable(text), room, self._console.signs.more), style), sep=""
        )

    def _call(self, fact: facts.CallDecided | facts.CallStarted) -> str:
        """Format a call for a person, with the arguments that it runs with."""
        arguments = self._arguments[fact.index] if fact.index < len(self._arguments) else ""
        return f"{one_line(fact.function)}({_arguments_text(arguments)})"

    def _new_spinner(self) -> Status | None:
        if not self._console.is_interactive:
            return None
        return self._console.status(_Drawn(self._activity), spinner=self._console.signs.spinner)

    def _rest(self) -> None:
        if self._spinner is not None:
            self._spinner.stop()

    def _wait(self) -> None:
        """Show what the run waits for, except while a reply arrives."""
        if self._spinner is not None and self._flow is None:
            self._spinner.start()

    def _activity(self) -> Text:
        """Describe what the run waits for, and what is left of its limits at this moment."""
        names = ", ".join(sorted(call.function for call in self._running.values()))
        text = one_line(f"runs {names}") if names else "waits for the model"
        now = time.time()
        left = self._left(at=now, elapsed=max(now - self._timed_at, 0.0), until=self.until)
        room = max(self._console.text_width - 4 - len(left), 20)
        return Text(shortened(text, room, self._console.signs.more) + left, "dim")

    def _left(self, without: Iterable[str] = (), *, at: float, elapsed: float = 0.0, until: float | None = None) -> str:
        """Describe what is left of the limits that are set.

        Args:
            without: Limits to leave out.
            at: The time that deadlines are compared with, in seconds since the epoch.
            elapsed: Active time that no fact has counted yet.
            until: A deadline besides that of the run, or None.
        """
        limits = replace(self._state.rules.limits, tell_budget=True)
        left = {item.name: item.left for item in remaining_limits(limits, self._state.ledger, at)}
        times = [left.pop("deadline")] if "deadline" in left else []
        if "max_active_seconds" in left:
            times.append(left.pop("max_active_seconds") - elapsed)
        if until is not None:
            times.append(until - at)
        texts = [_LEFT[name](value) for name, value in left.items() if name not in without]
        texts += [duration_text(max(min(times), 0))] if times else []
        return f" ({', '.join(texts)} left)" if texts else ""


class _Drawn:
    """A text that is computed each time it is drawn."""

    def __init__(self, make: Callable[[], Text]) -> None:
        self._make = make

    def __rich__(self) -> Text:
        return self._make()


_LEFT: Mapping[str, Callable[[float], str]] = {
    "max_iterations": lambda left: counted(int(left), "round trip"),
    "max_tool_calls": lambda left: counted(int(left), "function call"),
    "max_total_tokens": lambda left: counted(int(left), "token"),
    "max_cost": lambda left: f"${left:,.4f}",
}
"""How what is left of a limit is written."""


def _remark(
    fact: facts.StopRequested | facts.BudgetChanged | facts.SharedBudgetsChecked | facts.MessageAdded,
) -> str:
    match fact:
        case facts.SharedBudgetsChecked(limit=None):
            return "the shared budgets are checked again"
        case facts.StopRequested(reason=reason) | facts.SharedBudgetsChecked(reason=reason):
            return one_line(reason)
        case facts.BudgetChanged(by=by):
            return f"the budget was changed by {one_line(by)}" if by else "the budget was changed"
        case facts.MessageAdded(purpose=purpose):
            return "asks for the next step" if purpose == "step" else "asks for a final answer"


def print_pending(console: Terminal, call: PendingCall, *, more: int = 0, lines: int | None = None) -> bool:
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
    cells = console.text_width - _BESIDE
    cut = False
    for label, text in texts.items():
        shown = text
        if lines is not None and not asks:
            most = lines if label == "arguments" else lines // 2  # the arguments get the lines that the question leaves
            shown = cut_in_the_middle(text, cells=cells, lines=most)
            lines -= folded_lines(shown, cells)
            cut = cut or shown != text
        rows.add_row(label, console.encodable(shown))
    if not asks:
        rows.add_row("function", Text(console.encodable(exact(call.fully_qualified_name)), "bold"))
    rows.add_row("call", console.encodable(f"{exact(call.id)}, fingerprint {exact(call.fingerprint[:12])}"))
    if call.roles:
        rows.add_row("roles", console.encodable(", ".join(map(exact, call.roles))))
    if call.expires_at is not None:
        rows.add_row("open until", moment_text(call.expires_at))
    title = "The model asks you" if asks else "A call waits for your decision"
    console.print_framed(rows, f"{title}, and {more} more" if more else title, "yellow")
    return cut


def print_answer(console: Terminal, result: FunctionCallingStepwisePlannerResult) -> None:
    """Print the answer in a frame."""
    title = "Answer" if result.limit is None else f"Answer, as far as {result.limit} allowed"
    style = "green" if result.status == "answered" else "red"
    console.print_framed(Text(printable(result.final_answer)), title, style)


def _arguments_text(written: str) -> str:
    """Format a call's JSON arguments for a person; anything but a JSON object stays as it is."""
    try:
        parsed: object = json.loads(written or "{}")
    except ValueError:
        parsed = None
    if not isinstance(parsed, Mapping):
        return one_line(written)
    values = cast("Mapping[str, object]", parsed)
    return ", ".join(f"{exact(name)}={exact_json(value)}" for name, value in values.items())
