"""A comparison as data, and the conclusions that every renderer shows.

All numbers but ``charged`` and ``tokens_told`` were counted independently of the
options.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import count
from typing import Any, Literal, NamedTuple, TypeAlias

from semantic_kernel.contents import (
    AuthorRole,
    ChatMessageContent,
    FunctionCallContent,
    FunctionResultContent,
    TextContent,
)

from planner_ext.core.errors import counted
from planner_ext.core.values import frozen
from planner_ext.testing import rules


@frozen
class ShownCall:
    """One function call in a message; the arguments are JSON text."""

    id: str
    name: str
    arguments: str


@frozen
class ShownResult:
    """What the model reads as the result of a call."""

    call_id: str
    name: str
    text: str


@frozen
class ShownMessage:
    """One message of a history.

    Attributes:
        role: ``user``, ``assistant``, ``tool`` or ``system``.
        trip: The 1-based round trip of a reply; None for every other message.
    """

    role: str
    text: str = ""
    calls: tuple[ShownCall, ...] = ()
    results: tuple[ShownResult, ...] = ()
    trip: int | None = None


@frozen
class Violation:
    """Why servers would refuse a history, and the 0-based index of the message at fault."""

    place: int
    text: str


def shown_messages(messages: Sequence[ChatMessageContent]) -> tuple[ShownMessage, ...]:
    """Convert Semantic Kernel's messages; replies are numbered as round trips."""
    trips = count(1)
    return tuple(
        ShownMessage(
            role=message.role.value,
            text="".join(
                item.text for item in message.items if isinstance(item, TextContent)
            ),
            calls=tuple(
                ShownCall(
                    id=item.id or "",
                    name=item.name or "",
                    arguments=_text(item.arguments),
                )
                for item in message.items
                if isinstance(item, FunctionCallContent)
            ),
            results=tuple(
                ShownResult(
                    call_id=item.id or "", name=item.name or "", text=_text(item.result)
                )
                for item in message.items
                if isinstance(item, FunctionResultContent)
            ),
            trip=next(trips) if message.role == AuthorRole.ASSISTANT else None,
        )
        for message in messages
    )


def _text(value: object) -> str:
    return "" if value is None else str(value)


def find_violation(messages: Sequence[ShownMessage]) -> Violation | None:
    """Find the first of OpenAI's rules that a history breaks; None if it can be continued."""
    sent = [
        (place, part)
        for place, message in enumerate(messages)
        for part in _as_sent(message)
    ]
    broken = (
        rules.find_violation({"model": "any", "messages": [part for _, part in sent]})
        if sent
        else None
    )
    if broken is None:
        return None
    index = int(broken.param.removeprefix("messages[").partition("]")[0])
    return Violation(place=sent[index][0], text=broken.message)


def _as_sent(message: ShownMessage) -> Iterator[dict[str, Any]]:
    """Convert a message to OpenAI's JSON, in which each result is a message."""
    for result in message.results:
        yield {"role": "tool", "tool_call_id": result.call_id, "content": result.text}
    if message.results:
        return
    calls = [
        {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.calls
    ]
    yield {
        "role": message.role,
        "content": message.text or None,
        "tool_calls": calls or None,
    }


SCHEMA = 2
"""Version of the JSON document. 2: situations have entitlements, corrected options new keys."""

FindingKind: TypeAlias = Literal[
    "over budget",
    "tools past budget",
    "breach",
    "broken",
    "failed",
    "silent",
    "unfinished",
    "miscounted",
    "untold",
]

_GRAVE: tuple[FindingKind, ...] = (
    "over budget",
    "tools past budget",
    "breach",
    "broken",
    "failed",
)


class Finding(NamedTuple):
    """A fault of a run; a grave one exceeds a budget, or leaves a broken history."""

    kind: FindingKind
    text: str
    grave: bool


class Cell(NamedTuple):
    """A figure of a run as text; ``bad`` is beyond the budget or broken."""

    text: str
    level: Literal["bad", "poor", ""] = ""


@frozen
class OptionInfo:
    """One of the options compared.

    Attributes:
        key: Its name on the command line.
        name: Its name in tables; ``short`` in narrow ones.
        corrected: Whether it is this package's own, which may neither exceed the budget
            nor break a history.
        offers: What it offers beyond a budget of round trips.
        code: The text of its strategy.
    """

    key: str
    name: str
    short: str
    about: str
    corrected: bool
    offers: tuple[str, ...] = ()
    code: str = ""


@frozen
class ScriptInfo:
    """One of the situations in which every option runs.

    Attributes:
        key: Its name on the command line.
        short: The head of a narrow column, in one or two lines.
        about: The behaviour of the model.
        entitled: What a user is entitled to in it.
        source: The promise's source.
        answers: Whether that is an answer, too.
    """

    key: str
    name: str
    short: str
    about: str
    goal: str
    entitled: str = ""
    source: str = ""
    answers: bool = True


@frozen
class Run:
    """The result of one option in one situation.

    Attributes:
        trips: Round trips made, counted where requests arrive.
        charged: Round trips that the option itself counted.
        tools_run: Functions started, counted where they run.
        tools_past_budget: Those of whose results no round trip was left to read.
        tokens_summed: Tokens of all round trips, counted where requests arrive.
        tokens_past_budget: Those of the round trips beyond the budget.
        tokens_told: Those that the option reports to its caller, if any.
        status: In the option's words: ``answered``, ``limit_reached``, ``failed`` or
            another end; ``not offered`` if the option lacks what the situation needs,
            and did not run.
        answer: The text that the caller gets, or "".
        refused: Why OpenAI would refuse requests that the scripted endpoint answered.
        violation: The first fault of the final history, or None.
        breaches: The entitlements that the run did not keep, beyond the budget.
        wall_seconds: From the first request to the end.
        messages: The final history.
    """

    option: str
    script: str
    budget: int = 0
    trips: int = 0
    charged: int = 0
    tools_run: int = 0
    tools_past_budget: int = 0
    tokens_summed: int = 0
    tokens_past_budget: int = 0
    tokens_told: int | None = None
    status: str
    answer: str = ""
    error: str = ""
    refused: tuple[str, ...] = ()
    violation: Violation | None = None
    breaches: tuple[str, ...] = ()
    wall_seconds: float = 0.0
    messages: tuple[ShownMessage, ...] = ()

    @property
    def offered(self) -> bool:
        """Whether it ran: the option offers what the situation needs."""
        return self.status != "not offered"

    @property
    def over_budget(self) -> int:
        """Round trips beyond the allowed ones."""
        return max(self.trips - self.budget, 0)

    @property
    def history_valid(self) -> bool:
        """Whether the final history and every earlier request are valid."""
        return self.violation is None and not self.refused

    @property
    def finished(self) -> bool:
        """Whether it ended with the model's answer, and every promise kept."""
        kept = self.history_valid and not (self.over_budget or self.breaches)
        return self.status == "answered" and bool(self.answer) and kept

    @property
    def left_behind(self) -> str:
        """What the caller has after the run, in words."""
        answer = "with an answer" if self.answer else "without an answer"
        return f"{answer} and with a history that OpenAI {'accepts' if self.history_valid else 'refuses'}"

    @property
    def first_violation(self) -> str:
        """The first fault of the history, or ""."""
        return (
            next(iter(self.refused), "")
            if self.violation is None
            else self.violation.text
        )

    @property
    def ending(self) -> str:
        """How it ended, in a word or two."""
        return (
            "limit" if self.status == "limit_reached" else self.status.replace("_", " ")
        )

    def cells(self) -> tuple[Cell, ...]:
        """Format the figures.

        Round trips, those over the budget, those charged; functions run, those past the
        budget; tokens summed, tokens told; ending, answer, history.
        """
        over = self.over_budget
        past = self.tools_past_budget
        told = self.tokens_told
        return (
            Cell(str(self.trips)),
            Cell(f"+{over}", "bad") if over else Cell("0"),
            Cell(str(self.charged), "" if self.charged == self.trips else "poor"),
            Cell(str(self.tools_run)),
            Cell(f"+{past}", "bad") if past else Cell("0"),
            Cell(f"{self.tokens_summed:,}"),
            Cell(
                "nothing" if told is None else f"{told:,}",
                "" if told == self.tokens_summed else "poor",
            ),
            Cell(self.ending, "bad" if self.status == "failed" else ""),
            Cell("yes") if self.answer else Cell("no", "poor"),
            Cell("valid") if self.history_valid else Cell("broken", "bad"),
        )

    def as_dict(self) -> dict[str, Any]:
        """Convert it to JSON values."""
        return {
            **asdict(self),
            "over_budget": self.over_budget,
            "offered": self.offered,
            "answer_present": bool(self.answer),
            "history_valid": self.history_valid,
            "first_violation": self.first_violation or None,
        }


_NOT_MADE = Run(option="", script="", status="not offered")


@frozen
class Cost:
    """The client's processor time of one option.

    Attributes:
        round_trips: The lengths of the runs.
        milliseconds: Of a round trip, for each length; empty if the runs failed.
    """

    option: str
    round_trips: tuple[int, ...]
    milliseconds: tuple[float, ...]
    error: str = ""


@frozen
class Comparison:
    """All runs, script by script, and in each option by option.

    Attributes:
        endpoint: Who answered, in words.
        live: Whether a real model answered, so that the numbers differ each time.
        costs: The processor time of the options, if measured.
    """

    max_iterations: int
    endpoint: str
    live: bool
    versions: tuple[tuple[str, str], ...]
    options: tuple[OptionInfo, ...]
    scripts: tuple[ScriptInfo, ...]
    runs: tuple[Run, ...]
    wall_seconds: float
    costs: tuple[Cost, ...] = ()

    def of_script(self, key: str) -> tuple[Run, ...]:
        """The runs of one script, in the options' order."""
        return tuple(run for run in self.runs if run.script == key)

    def of_option(self, key: str) -> tuple[Run, ...]:
        """The runs of one option, in the scripts' order."""
        return tuple(run for run in self.runs if run.option == key)

    def option(self, key: str) -> OptionInfo:
        """Find an option by its key."""
        return next(option for option in self.options if option.key == key)

    def script(self, key: str) -> ScriptInfo:
        """Find a script by its key."""
        return next(script for script in self.scripts if script.key == key)

    def unfinished(self, run: Run) -> bool:
        """Whether the budget ran out although another option finished within it."""
        return run.status == "limit_reached" and any(
            other.finished for other in self.of_script(run.script)
        )

    def findings(self, run: Run) -> tuple[Finding, ...]:
        """List the faults of a run, the worst first."""
        if not run.offered:
            return ()
        over = run.over_budget
        past = run.tools_past_budget
        told = run.tokens_told
        summed = run.tokens_summed
        possible: dict[FindingKind, tuple[object, str]] = {
            "over budget": (over, f"{counted(over, 'round trip')} over the budget"),
            "tools past budget": (
                past,
                f"{counted(past, 'function call')} past the budget",
            ),
            "breach": (run.breaches, "; ".join(run.breaches)),
            "broken": (not run.history_valid, "history broken"),
            "failed": (run.status == "failed", "failed"),
            "silent": (not run.answer and self.script(run.script).answers, "no answer"),
            "unfinished": (
                run.answer and self.unfinished(run),
                "ran out where another option finished",
            ),
            "miscounted": (
                run.charged != run.trips,
                f"believes it made {counted(run.charged, 'round trip')}",
            ),
            "untold": (
                told not in (None, summed),
                f"tells of {told or 0:,} of {summed:,} tokens",
            ),
        }
        return tuple(
            Finding(kind, text, kind in _GRAVE)
            for kind, (applies, text) in possible.items()
            if applies
        )

    @property
    def verdict(self) -> tuple[str, ...]:
        """What the runs show of the ADR's options."""
        if self.live:  # a real model does not follow the scripts
            return ()
        shown = {(run.option, run.script): run for run in self.runs if run.offered}

        def run(option: str, script: str) -> Run:
            return shown.get((f"option-{option}", script), _NOT_MADE)

        first = run("1-corrected", "chain")
        second = run("2-corrected", "chain")
        written = run("2", "never-ending")
        kept = run("2-corrected", "never-ending")
        callback = run("3", "never-ending")
        counted_too = run("2-callback", "never-ending")
        alone = run("3-alone", "asks-a-model-inside")
        inside = run("2-corrected", "asks-a-model-inside")
        veto = run("3-corrected", "veto")
        unasked = run("2-corrected", "veto")
        possible = (
            (
                first.status == "limit_reached"
                and first.tools_run < second.tools_run
                and second.finished,
                f"Option 1 pays for a reply after each call: of the chain's {second.tools_run} calls it had made "
                f"{first.tools_run} after {first.trips} round trips; option 2 needed {second.trips} for all of it.",
            ),
            (
                written.over_budget and kept.answer and not kept.over_budget,
                f"Option 2 as written makes {written.trips} round trips of {written.budget}. So the last one is kept "
                f"for the answer: {kept.trips}, with {kept.tools_run} instead of {written.tools_run} functions run.",
            ),
            (
                callback.over_budget
                and counted_too.trips
                and not counted_too.over_budget,
                f"Option 3 as written makes {callback.trips} round trips of {callback.budget}: each request counts "
                f"from 1. With option 2's metadata it makes {counted_too.trips}, {counted_too.left_behind}.",
            ),
            (
                alone.over_budget
                and inside.trips
                and inside.charged == inside.trips
                and not inside.over_budget,
                f"Option 3's callback is not asked about requests that functions make: alone it let {alone.trips} "
                f"round trips pass where {alone.budget} were allowed. Option 2 charged them, and made {inside.trips}.",
            ),
            (
                veto.finished and veto.tools_run == 1 and not unasked.trips,
                "Option 3's callback forbade one function and let the other run, which a budget cannot.",
            ),
        )
        borne_out = tuple(sentence for holds, sentence in possible if holds)
        if len(borne_out) < len(possible) or not self.holds:
            return borne_out
        chosen = "So option 2, corrected, is the budget, option 3's callback a gate on top of it, option 1 a preset."
        return (*borne_out, chosen)

    @property
    def summary(self) -> str:
        """Whether the corrected options kept their promises, in a sentence."""
        runs = self.corrected_runs
        if not runs:
            return "No corrected option was compared."
        if not self.holds:
            return "Corrected options broke promises:"
        kinds = Counter(finding.kind for run in runs for finding in self.findings(run))
        sound = "no budget exceeded, no history and no limit broken"
        text = f"The corrected options: {sound}, in {counted(len(runs), 'run')}"
        notes = {
            "unfinished": "ran out of budget where another option finished",
            "silent": "gave no answer",
        }
        return (
            "; ".join(
                [
                    text,
                    *(
                        f"{kinds[kind]} of them {note}"
                        for kind, note in notes.items()
                        if kinds[kind]
                    ),
                ]
            )
            + "."
        )

    @property
    def corrected_runs(self) -> tuple[Run, ...]:
        """The runs of this package's own options."""
        corrected = {option.key for option in self.options if option.corrected}
        return tuple(
            run for run in self.runs if run.option in corrected and run.offered
        )

    @property
    def failures(self) -> tuple[str, ...]:
        """The promises that the corrected options broke, a sentence each."""
        return tuple(
            sentence
            for run in self.corrected_runs
            for sentence in self._broken_promises(run)
        )

    @property
    def holds(self) -> bool:
        """Whether no corrected option exceeded the budget, broke a history or failed."""
        return not self.failures

    def _broken_promises(self, run: Run) -> Iterator[str]:
        where = f"{self.option(run.option).name}, {self.script(run.script).name}"
        if run.over_budget:
            yield f"{where}: {run.trips} round trips where {run.budget} were allowed."
        if not run.history_valid:
            yield f"{where}: the history is broken: {run.first_violation}."
        if run.breaches:
            yield f"{where}: {'; '.join(run.breaches)}."
        if run.status == "failed":
            yield f"{where}: it failed: {run.error}"

    def as_dict(self) -> dict[str, Any]:
        """Convert it to JSON values."""
        return {
            "schema": SCHEMA,
            **asdict(self),
            "versions": dict(self.versions),
            "holds": self.holds,
            "verdict": self.verdict,
            "failures": self.failures,
            "runs": [
                {**run.as_dict(), "unfinished": self.unfinished(run)}
                for run in self.runs
            ],
        }
