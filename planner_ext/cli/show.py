"""Prints a run for a person: its texts as they arrive, calls, outcomes, what waits."""

import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Self, get_args

from rich.status import Status
from rich.text import Text

from planner_ext.cli.parts import drawn_parts, function_text, with_note, wrapped
from planner_ext.cli.text import (
    Terminal,
    TextFlow,
    moment_text,
    shortened,
)
from planner_ext.core import facts
from planner_ext.core.errors import counted, seconds
from planner_ext.core.limits import Left
from planner_ext.core.state import ASK_USER, READ_RESULT
from planner_ext.core.text import one_line, printable
from planner_ext.engine.timeline import TimelineCall, TimelineReader
from planner_ext.events import PlannerEvent, ResultReady, TextDelta
from planner_ext.hitl_manager import ToolCall
from planner_ext.planner.run import FunctionCallingStepwisePlannerResult
from planner_ext.readable.parts import MOST_LINES, Folded, Part, folded, parts_of
from planner_ext.readable.plain import arguments_line
from planner_ext.readable.text import duration_text, exact, visible

_RAN = get_args(facts.FunctionOutcome)
"""The outcomes of a function that was started."""

_SPINNER_CELLS = 3
"""Cells of a line that the spinner gets."""
_FEWEST_LINES = 4
"""The lines of a part, and of all arguments, that are shown at least."""
_FRAME_CELLS = 4
"""Cells of a line that its frame gets."""


class Progress:
    """Prints the events of one run; a terminal also shows what it waits for and its limits.

    Takes the events of ``invoke_stream``, or only the facts: then texts come whole.

    Attributes:
        followed: The number of facts read.
        until: When the command's timeout ends the run, in seconds since the epoch.
    """

    def __init__(self, console: Terminal, *, cut: bool | None = None) -> None:
        """Begin; ``cut`` says whether lines end where the console does: None for a terminal only."""
        self._cut = console.is_terminal if cut is None else cut
        self.followed = 0
        self.until: float | None = None
        self._console = console
        self._reader = TimelineReader()
        self._timed_at = 0.0
        self._flow: TextFlow | None = None
        self._spinner = self._new_spinner()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._rest()
        if self._flow is not None:
            self._flow.close()
            self._flow = None

    def catch_up(self, earlier: Iterable[facts.Fact]) -> None:
        """Read earlier facts of the run without printing them."""
        for fact in earlier:
            self._follow(fact)

    async def watch(
        self, stream: AsyncGenerator[PlannerEvent]
    ) -> FunctionCallingStepwisePlannerResult:
        """Print a run's events as they come, and return its result."""
        async with aclosing(stream) as events:
            async for event in events:
                self.show(event)
                if isinstance(event, ResultReady):
                    return event.result
        raise AssertionError("a stream ends with its result")

    def show(self, event: PlannerEvent) -> None:
        """Print an event."""
        self._rest()
        match event:
            case TextDelta():
                self._reply(plan=event.iteration < 0).write(event.text)
            case ResultReady():
                pass
            case _:
                self._close_reply(event)
                changed = self._follow(event)
                self._print(event)
                for call in changed:
                    self._print_call(call)
        self._wait()

    def note(self, text: str) -> None:
        """Print a line that is in no fact."""
        self._rest()
        self._line(text, "dim")
        self._wait()

    def _follow(self, fact: facts.Fact) -> list[TimelineCall]:
        self.followed += 1
        if isinstance(fact, facts.RunStarted | facts.Resumed) or hasattr(
            fact, "seconds"
        ):
            self._timed_at = fact.at
        return self._reader.read(fact)

    def _reply(self, *, plan: bool) -> TextFlow:
        """Return the text of the arriving reply; a new one begins with its header."""
        if self._flow is None:
            state = self._reader.state
            rules = state.rules
            what = (
                f"Round trip {state.usage.iterations + 1}"
                if rules.charge_plan or not plan
                else "Plan"
            )
            if rules.limits.max_iterations is not None and what != "Plan":
                what += f" of {rules.limits.max_iterations}"
            said = ": the plan" if plan and what != "Plan" else ""
            left = self._left(("max_iterations",), at=state.at)
            self._console.print(
                Text(what, "bold"), Text(said), Text(left, "dim"), sep=""
            )
            self._flow = TextFlow(
                self._console, width=self._console.text_width, indent=4
            )
        return self._flow

    def _close_reply(self, fact: facts.Fact) -> None:
        """End a reply's text; one that was not streamed is printed whole."""
        match fact:
            case facts.Planned(plan=text) | facts.ModelReplied(text=text):
                flow = self._reply(plan=isinstance(fact, facts.Planned))
                if flow.empty:
                    flow.write(text)
                flow.close()
                self._flow = None
            case _:
                pass

    def _print(self, fact: facts.Fact) -> None:
        match fact:
            case facts.Resumed():
                self._spinner = self._new_spinner()
            case facts.Paused() | facts.Ended():
                self._spinner = None
            case facts.ModelReplied(withheld=str() as limit):
                self._line(f"functions were withdrawn: {limit}", "dim")
            case facts.AnswerChecked(problem=""):
                pass
            case facts.Clarified(answer=str() as answer):
                self._line(
                    f"{self._console.signs.good} {one_line(fact.by) or 'answered'}: {one_line(answer)}"
                )
            case (
                facts.StopRequested()
                | facts.BudgetChanged()
                | facts.SharedBudgetsChecked()
                | facts.AnswerChecked()
                | facts.MessageAdded()
            ):
                self._line(_remark(fact), "dim")
            case facts.CallDecided(person=True):
                self._print_decision(fact, self._reader.calls[fact.index])
            case _:
                pass

    def _print_decision(self, fact: facts.CallDecided, call: TimelineCall) -> None:
        if call.decisions:
            kind = call.decisions[-1].kind
            edited = (
                f" in place of {arguments_line(call.requested)}" if fact.edited else ""
            )
            self._line(
                f"{one_line(fact.by) or 'a person'}: {kind} {_call_text(call)}{edited}"
            )

    def _print_call(self, call: TimelineCall) -> None:
        """Print the line of a changed call; some changes have none."""
        signs = self._console.signs
        match call.outcome:
            case "running":
                self._line(f"{signs.call} {_call_text(call)}")
            case "final_answer":
                self._line(f"{signs.call} hands over the final answer")
            case "returned":
                self._line(f"{signs.call} {call.function} is for the caller to run")
            case "waiting" if call.function == ASK_USER:
                self._line(f"? asks: {one_line(call.prompt)}")
            case "waiting":
                self._line(f"? {self._waiting_text(call)}")
            case "requested" | "ready" | "in_doubt":
                pass
            case "answered" | "denied" if call.function == ASK_USER:
                pass  # the answer has a line
            case _:
                self._print_result(call)

    def _waiting_text(self, call: TimelineCall) -> str:
        batch = self._reader.state.batch
        if batch is not None and batch.calls[call.index].waits_inside:
            return f"{one_line(call.function)} waits: a call or question inside needs a person"
        prompt = f": {one_line(call.prompt)}" if call.prompt else ""
        return f"{_call_text(call)} waits for a decision{prompt}"

    def _print_result(self, call: TimelineCall) -> None:
        """Print a call's end in one row."""
        text = call.result or call.error
        note = "not run"
        if call.outcome in _RAN:
            text = call.error or call.result
            note = f"{seconds((call.ended or 0.0) - call.attempts[-1].started)} s"
        elif call.function == READ_RESULT:
            note = "read on"
        is_good = call.outcome == "ok" or note == "read on"
        sign = self._console.signs.good if is_good else self._console.signs.bad
        column = min(max(len(each.function) for each in self._reader.calls), 30)
        text = one_line(text.removeprefix("Not executed: "))
        row = f" {one_line(call.function):<{column}}  {note:>7}  {text}"
        self._line(row, sign=Text(sign, "green" if is_good else "red"))

    def _line(self, text: str, style: str = "", *, sign: Text | None = None) -> None:
        """Print one indented line; a terminal's is cut where it ends, a log's is whole."""
        lead = sign or Text("")
        shown = printable(text)
        if self._cut:
            room = self._console.text_width - 4 - lead.cell_len
            shown = shortened(shown, room, self._console.signs.more)
        self._console.print("    ", lead, Text(shown, style), sep="", soft_wrap=True)

    def _new_spinner(self) -> Status | None:
        if not self._console.is_interactive:
            return None
        return self._console.status(self, spinner=self._console.signs.spinner)

    def _rest(self) -> None:
        if self._spinner is not None:
            self._spinner.stop()

    def _wait(self) -> None:
        if self._spinner is not None and self._flow is None:
            self._spinner.start()

    def __rich__(self) -> Text:
        """Describe what the run waits for, whenever the spinner is drawn."""
        running = sorted(
            call.function for call in self._reader.calls if call.outcome == "running"
        )
        text = (
            one_line(f"runs {', '.join(running)}") if running else "waits for the model"
        )
        now = time.time()
        left = self._left(
            at=now, elapsed=max(now - self._timed_at, 0.0), until=self.until
        )
        # One line: rich erases lines that were printed above one that wraps.
        room = self._console.width - _SPINNER_CELLS
        return Text(shortened(text + left, room, self._console.signs.more), "dim")

    def _left(
        self,
        without: Iterable[str] = (),
        *,
        at: float,
        elapsed: float = 0.0,
        until: float | None = None,
    ) -> str:
        """Describe what is left of the limits that are set.

        Args:
            without: Limits to omit.
            at: Now, in seconds since the epoch.
            elapsed: Active seconds that no fact has counted yet.
            until: A deadline besides the run's own.
        """
        state = self._reader.state
        amounts = Left.of(state.rules.limits, state.usage, at).amounts
        left = {name: max(amount, 0) for name, amount in amounts.items()}
        times = [left.pop("deadline")] if "deadline" in left else []
        if "max_active_seconds" in left:
            times.append(left.pop("max_active_seconds") - elapsed)
        if until is not None:
            times.append(until - at)
        texts = [
            _LEFT[name](value) for name, value in left.items() if name not in without
        ]
        texts += [duration_text(max(min(times), 0))] if times else []
        return f" ({', '.join(texts)} left)" if texts else ""


_LEFT: Mapping[str, Callable[[float], str]] = {
    "max_iterations": lambda left: counted(int(left), "round trip"),
    "max_tool_calls": lambda left: counted(int(left), "function call"),
    "max_total_tokens": lambda left: counted(int(left), "token"),
    "max_cost": lambda left: f"${left:,.4f}",
}
"""The format of what is left of a limit."""


def _remark(
    fact: facts.StopRequested
    | facts.BudgetChanged
    | facts.SharedBudgetsChecked
    | facts.AnswerChecked
    | facts.MessageAdded,
) -> str:
    match fact:
        case facts.SharedBudgetsChecked(limit=None):
            return "the shared budgets are checked again"
        case (
            facts.StopRequested(reason=reason)
            | facts.SharedBudgetsChecked(reason=reason)
        ):
            return one_line(reason)
        case facts.BudgetChanged(by=by):
            return (
                f"the budget was changed by {one_line(by)}"
                if by
                else "the budget was changed"
            )
        case facts.AnswerChecked(problem=problem):
            return f"the answer was refused: {one_line(problem)}"
        case facts.MessageAdded(purpose="said", by=by):
            return f"something was said by {one_line(by) or 'an unnamed person'}"
        case facts.MessageAdded(purpose=purpose):
            return (
                "asks for the next step"
                if purpose == "step"
                else "asks for a final answer"
            )


def print_pending(
    console: Terminal, call: ToolCall, *, more: int = 0, lines: int | None = None
) -> bool:
    """Print a pending call: invisible characters are marked, function and id come last.

    Args:
        console: Where to print.
        call: The call.
        more: The number of other pending calls.
        lines: The most lines of prompt and arguments; more is cut from their middle.

    Returns:
        Whether anything was cut.
    """
    width = console.text_width - _FRAME_CELLS
    asks = call.kind == "question"
    said = "\n".join(filter(None, (call.summary, call.prompt)))
    prompt = [
        line
        for text in visible(said).split("\n")
        for line in wrapped(console, Text(console.encodable(text), "bold"), width)
    ]
    arguments = list[Text]()
    is_whole = True
    if not asks:
        question = folded(prompt, lines // 2) if lines else Folded(prompt, (), ())
        hidden = len(question.middle)
        prompt = with_note(question.head, hidden, question.tail, "lines")
        # The arguments get the lines that the question leaves.
        room = lines and max(lines - len(prompt), _FEWEST_LINES)
        parts = parts_of(call.arguments, call.parameters)
        arguments, most = _fitting(console, parts, width, room)
        rest = folded(arguments, room) if room else Folded(arguments, (), ())
        arguments = with_note(rest.head, len(rest.middle), rest.tail, "lines")
        arguments = arguments or [Text("no arguments", "dim")]
        fits = most is None or all(part.size <= most for part in parts)
        is_whole = fits and not question.middle and not rest.middle
    facts = {
        "function": "" if asks else function_text(call),
        "call": f"{exact(call.id)}, fingerprint {exact(call.fingerprint[:12])}",
        "rule": exact(call.asked_by),
        "roles": ", ".join(map(exact, call.roles)),
        "open until": moment_text(call.expires_at) if call.expires_at else "",
    }
    rows = [
        line
        for label, text in facts.items()
        if text
        for line in wrapped(
            console,
            Text.assemble((f"{label:<10}  ", "dim"), console.encodable(text)),
            width,
            12,
        )
    ]
    title = "The model asks you" if asks else "A call waits for your decision"
    body = Text("\n").join([*(prompt if said else ()), *arguments, *rows])
    console.print_framed(body, f"{title}, and {more} more" if more else title, "yellow")
    return not is_whole


def _fitting(
    console: Terminal, parts: Sequence[Part], width: int, room: int | None
) -> tuple[list[Text], int | None]:
    """Draw parts with so many lines each that all fit the room; return how many."""
    if room is None:
        return drawn_parts(console, parts, width=width), None
    most = MOST_LINES
    drawn = drawn_parts(console, parts, most=most, width=width)
    while len(drawn) > room and most > _FEWEST_LINES:
        most -= 1
        drawn = drawn_parts(console, parts, most=most, width=width)
    return drawn, most


def print_answer(
    console: Terminal, result: FunctionCallingStepwisePlannerResult
) -> None:
    """Print the answer in a frame."""
    title = (
        "Answer"
        if result.limit is None
        else f"Answer, as far as {result.limit} allowed"
    )
    style = "green" if result.status == "answered" else "red"
    console.print_framed(Text(printable(result.final_answer)), title, style)


def _call_text(call: TimelineCall) -> str:
    return f"{one_line(call.function)}({arguments_line(call.arguments)})"
