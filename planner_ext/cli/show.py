"""A run as a person watches it: each round trip with its text as it comes, its calls and what became of them."""

import json
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self, cast

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.status import Status
from rich.text import Text

from planner_ext.approval.pending import record_of
from planner_ext.cli.text import TextFlow, exact, exact_json, one_line, printable, shortened
from planner_ext.core.facts import (
    CallDecided,
    CallFinished,
    CallStarted,
    CallsWithheld,
    Clarified,
    Ended,
    Fact,
    MessageAdded,
    ModelReplied,
    Paused,
    Planned,
    Resumed,
    RunStarted,
    StopRequested,
)
from planner_ext.core.limits import Consumption
from planner_ext.core.values import RequestedCall
from planner_ext.events import PlannerEvent, ResultReady, TextDelta
from planner_ext.planner.result import FunctionCallingStepwisePlannerResult

__all__ = ["WIDEST", "Progress", "Signs", "print_answer", "spent_line"]

WIDEST = 100
"""Cells of a line of text: longer ones are hard to read, however wide the terminal is."""


class Signs:
    """The few signs beside the words, in what a console's encoding has."""

    def __init__(self, console: Console) -> None:
        """Choose by the console's encoding."""
        plain = not console.encoding.lower().startswith("utf")
        self.call, self.good, self.bad, self.more = ("->", "ok", "xx", "...") if plain else ("→", "✓", "✗", "…")
        self.spinner = "line" if plain else "dots"


class Progress:
    """Prints the events of one run, in a terminal with a spinner while something is waited for.

    Takes the events of ``invoke_stream``, or, as an observer of ``invoke``, the facts alone; then texts come whole.
    """

    def __init__(self, console: Console) -> None:
        """Print to this console."""
        self._console = console
        self._signs = Signs(console)
        self._width = min(console.width, WIDEST)
        self._limit: int | None = None
        self._charge_plan = True
        self._charged = 0
        self._flow: TextFlow | None = None
        self._calls: tuple[RequestedCall, ...] = ()
        self._arguments: list[str] = []
        self._running: dict[int, tuple[str, float]] = {}
        self._status = self._spinner()
        self._shown: dict[str, Callable[[Any], None]] = {  # of other facts there is nothing to say
            "RunStarted": self._started,
            "Planned": self._planned,
            "MessageAdded": self._message_added,
            "ModelReplied": self._replied,
            "CallDecided": self._decided,
            "CallsWithheld": self._withheld,
            "CallStarted": self._call_started,
            "Clarified": self._clarified,
            "CallFinished": self._call_finished,
            "StopRequested": self._stop_requested,
            "Resumed": self._resumed,
            "Paused": self._ended,
            "Ended": self._ended,
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._rest()
        if self._flow is not None:
            self._flow.close()
            self._flow = None

    def catch_up(self, facts: Iterable[Fact]) -> None:
        """Take facts of the same run as told: its limit, its trips and its open calls are known, nothing is printed."""
        for fact in facts:
            match fact:
                case RunStarted():
                    self._started(fact)
                case Resumed():
                    self._resumed(fact)
                case ModelReplied():
                    self._calls, self._arguments = fact.calls, [call.arguments for call in fact.calls]
                case CallDecided():
                    self._keep_arguments(fact)
                case _:
                    pass
            self._charged += self._trips(fact)

    def _trips(self, fact: Fact) -> int:
        """Count the round trips that a fact charges, those of a nested run included."""
        match fact:
            case Planned():
                return fact.iterations if self._charge_plan else 0
            case ModelReplied() | Clarified():
                return fact.iterations
            case CallFinished(spent=Consumption(iterations=inside)):
                return inside
            case _:
                return 0

    def show(self, event: PlannerEvent) -> None:
        """Print what there is to say about an event; the spinner rests meanwhile."""
        self._rest()
        match event:
            case TextDelta():
                self._trip(plan=event.iteration < 0).write(event.text)
            case ResultReady():
                pass
            case _:
                self._fact(event)
        self._wait()

    def _fact(self, fact: Fact) -> None:
        if (show := self._shown.get(fact.type)) is not None:
            show(fact)
        self._charged += self._trips(fact)

    def _started(self, fact: RunStarted) -> None:
        self._limit = fact.rules.limits.max_iterations
        self._charge_plan = fact.rules.charge_plan

    def _resumed(self, fact: Resumed) -> None:
        if fact.limits is not None:
            self._limit = fact.limits.max_iterations
        self._status = self._spinner()

    def _planned(self, fact: Planned) -> None:
        self._reply(fact.plan, plan=True)

    def _replied(self, fact: ModelReplied) -> None:
        self._reply(fact.text, plan=False)
        self._calls, self._arguments = fact.calls, [call.arguments for call in fact.calls]
        if fact.withheld is not None:
            self._line(f"functions were withdrawn: {fact.withheld}", "dim")

    def _reply(self, text: str, *, plan: bool) -> None:
        """Close a reply; where it was not streamed, print it whole."""
        flow = self._trip(plan=plan)
        if flow.empty:
            flow.write(text)
        flow.close()
        self._flow = None

    def _trip(self, *, plan: bool) -> TextFlow:
        """Open a round trip with its header, unless it is open."""
        if self._flow is None:
            number = self._charged + 1
            what = "Plan" if plan and not self._charge_plan else f"Round trip {number}"
            if self._limit is not None and what != "Plan":
                what += f" of {self._limit}"
            self._console.print(Text(what, "bold"), Text(": the plan" if plan and what != "Plan" else ""), sep="")
            self._flow = TextFlow(self._console, width=self._width, indent=4, style="")
        return self._flow

    def _decided(self, fact: CallDecided) -> None:
        self._keep_arguments(fact)
        self._decided_by_person(fact)
        match fact.verdict:
            case "run":
                pass
            case "final_answer":
                self._line(f"{self._signs.call} hands over the final answer")
            case "defer" if fact.kind == "question":
                self._line(f"? asks: {one_line(fact.prompt)}")
            case "defer":
                prompt = f": {one_line(fact.prompt)}" if fact.prompt else ""
                self._line(f"? {self._call(fact)} waits for a decision{prompt}")
            case "external":
                self._line(f"{self._signs.call} {fact.function} is for the caller to run")
            case "answer" | "deny":
                self._outcome(self._signs.bad, fact.function, "not run", fact.answer or fact.reason)

    def _decided_by_person(self, fact: CallDecided) -> None:
        """Say who decided what, and what the model asked for where that was edited."""
        if fact.person and (record := record_of(fact, self._calls[fact.index])) is not None:
            edited = f" in place of {_arguments_text(self._calls[fact.index].arguments)}" if fact.edited else ""
            self._line(f"{one_line(fact.by) or 'a person'}: {record.kind} {self._call(fact)}{edited}")

    def _withheld(self, fact: CallsWithheld) -> None:
        for index in fact.indexes:
            self._outcome(self._signs.bad, self._name(index), "not run", fact.answer.removeprefix("Not executed: "))

    def _clarified(self, fact: Clarified) -> None:
        if fact.answer is not None:
            self._line(f"{self._signs.good} {one_line(fact.by) or 'answered'}: {one_line(fact.answer)}")

    def _call_started(self, fact: CallStarted) -> None:
        self._running[fact.index] = (fact.function, fact.at)
        self._line(f"{self._signs.call} {self._call(fact)}")

    def _call_finished(self, fact: CallFinished) -> None:
        _, started_at = self._running.pop(fact.index, ("", fact.at))
        sign = self._signs.good if fact.outcome == "ok" else self._signs.bad
        self._outcome(sign, fact.function, _seconds(fact.at - started_at), fact.error or fact.result)

    def _stop_requested(self, fact: StopRequested) -> None:
        self._line(one_line(fact.reason), "dim")

    def _message_added(self, fact: MessageAdded) -> None:
        self._line("asks for the next step" if fact.purpose == "step" else "asks for a final answer", "dim")

    def _ended(self, fact: Ended | Paused) -> None:  # noqa: ARG002  (the table's signature)
        self._status = None

    def _outcome(self, sign: str, name: str, note: str, text: str) -> None:
        names = [call.name for call in self._calls]
        column = min(max(map(len, [*names, name])), 30)
        style = "green" if sign == self._signs.good else "red"
        self._line(f" {one_line(name):<{column}}  {note:>7}  {one_line(text)}", sign=Text(sign, style))

    def _line(self, text: str, style: str = "", *, sign: Text | None = None) -> None:
        """Print one indented line, cut where the console ends."""
        lead = sign or Text("")
        room = self._width - 4 - lead.cell_len
        self._console.print("    ", lead, Text(shortened(printable(text), room, self._signs.more), style), sep="")

    def _name(self, index: int) -> str:
        return self._calls[index].name if index < len(self._calls) else "?"

    def _call(self, fact: CallDecided | CallStarted) -> str:
        """Write a call as a person reads one, with the arguments that it runs with."""
        arguments = self._arguments[fact.index] if fact.index < len(self._arguments) else ""
        return f"{one_line(fact.function)}({_arguments_text(arguments)})"

    def _keep_arguments(self, fact: CallDecided) -> None:
        if fact.index < len(self._calls):
            self._arguments[fact.index] = fact.arguments_of(self._calls[fact.index])

    def _spinner(self) -> Status | None:
        return self._console.status("", spinner=self._signs.spinner) if self._console.is_interactive else None

    def _rest(self) -> None:
        if self._status is not None:
            self._status.stop()

    def _wait(self) -> None:
        """Say what is waited for; while a reply comes in, the reply says it itself."""
        if self._status is None or self._flow is not None:
            return
        names = ", ".join(sorted(name for name, _ in self._running.values()))
        text = one_line(f"runs {names}") if names else "waits for the model"
        self._status.update(Text(shortened(text, self._width - 4, self._signs.more), "dim"))
        self._status.start()


def print_answer(console: Console, result: FunctionCallingStepwisePlannerResult) -> None:
    """Print the answer in a frame."""
    title = "Answer" if result.limit is None else f"Answer, as far as {result.limit} allowed"
    panel = Panel(
        Text(printable(result.final_answer)),
        title=Text(title, "bold"),
        title_align="left",
        border_style="green" if result.status == "answered" else "red",
        box=box.ROUNDED,
        width=min(console.width, WIDEST),
    )
    console.print(panel)


def spent_line(result: FunctionCallingStepwisePlannerResult, *, ended: str = "") -> str:
    """Say in one line how a run ended and what it spent."""
    usage = result.usage
    spent = [
        _counted(result.iterations, "round trip"),
        _counted(result.tool_calls, "function call"),
        f"{_counted(usage.prompt_tokens, 'token')} in",
        f"{usage.completion_tokens:,} out",
        _seconds(usage.active_seconds),
    ]
    status = ended or result.status.replace("_", " ") + (f" ({result.limit})" if result.limit else "")
    return f"{status}: {', '.join(spent)}"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:,.0f} s"


def _arguments_text(written: str) -> str:
    """Write a call's JSON arguments as a person reads a call; what is no JSON object stays as it is."""
    try:
        parsed: object = json.loads(written or "{}")
    except ValueError:
        return one_line(written)
    if not isinstance(parsed, Mapping):
        return one_line(written)
    values = cast("Mapping[str, object]", parsed)
    return ", ".join(f"{exact(name)}={exact_json(value)}" for name, value in values.items())
