"""What a comparison found, as values: one `Run` for each option and script, and what follows from them.

Knows neither how an option works nor how its numbers are shown. Every number but ``charged`` and ``tokens_told`` was
counted by somebody other than the option.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Comparison", "OptionInfo", "Run", "ScriptInfo", "ShownCall", "ShownMessage", "ShownResult", "Violation"]

SCHEMA = 1
"""Version of the JSON document. 1: the first one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownCall:
    """One function call in a message: its id, the function's name, and the arguments as JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownResult:
    """What the model reads as the result of the call with this id."""

    call_id: str
    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownMessage:
    """One message of a history, of whatever library.

    Attributes:
        role: ``user``, ``assistant``, ``tool`` or ``system``.
        text: All text of it; the results of calls stand in ``results``.
        trip: The 1-based round trip whose reply this is; None where it is no reply.
    """

    role: str
    text: str = ""
    calls: tuple[ShownCall, ...] = ()
    results: tuple[ShownResult, ...] = ()
    trip: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """Why a history may not be sent: in words, and the 0-based place of the message at fault."""

    place: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionInfo:
    """One of the options compared.

    Attributes:
        key: By which the command line names it.
        name: As the tables show it.
        short: Where the tables are narrow.
        about: What it does, in a sentence or two.
        corrected: Whether it is one of this package's own, which may neither overshoot nor break a history.
    """

    key: str
    name: str
    short: str
    about: str
    corrected: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptInfo:
    """One of the situations that every option is put in.

    Attributes:
        key: By which the command line names it.
        name: As the tables show it.
        short: Where it heads a narrow column; of one or two lines.
        about: What the model does in it.
        goal: What it is asked.
    """

    key: str
    name: str
    short: str
    about: str
    goal: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one option did in one situation.

    Attributes:
        option: The option's key.
        script: The script's key.
        budget: Round trips that were allowed.
        trips: Round trips made, counted where the requests arrive.
        charged: Round trips that the option believes it made.
        tools_run: Functions started, counted in the kernel.
        tools_past_budget: Those of them started when no round trip was left in which the model could read the result.
        tokens_summed: Tokens of all round trips, counted where the requests arrive.
        tokens_past_budget: Those of them that came after the last round trip allowed.
        tokens_told: What the option tells its caller: the usage of its result, or, where it has none, of the last
            message. None where nothing is told.
        status: How it ended, in the option's words: ``answered``, ``limit_reached``, ``failed`` or another end.
        answer: The text that the caller gets, "" for none.
        error: Why it failed, "" where it did not.
        refused: Requests that OpenAI's rules refuse, each with the reason; the scripted endpoint answers them all the
            same, as some endpoints do.
        violations: What is wrong with the history that is left, in order.
        wall_seconds: From the first request to the end.
        messages: The history that is left.
    """

    option: str
    script: str
    budget: int
    trips: int
    charged: int
    tools_run: int
    tools_past_budget: int
    tokens_summed: int
    tokens_past_budget: int
    tokens_told: int | None
    status: str
    answer: str = ""
    error: str = ""
    refused: tuple[str, ...] = ()
    violations: tuple[Violation, ...] = ()
    wall_seconds: float = 0.0
    messages: tuple[ShownMessage, ...] = ()

    @property
    def over_budget(self) -> int:
        """Round trips beyond those that were allowed."""
        return max(self.trips - self.budget, 0)

    @property
    def history_valid(self) -> bool:
        """Whether the history that is left may be sent, and every request on the way could be."""
        return not self.violations and not self.refused

    @property
    def first_violation(self) -> str:
        """The first thing wrong, "" for nothing."""
        return next(iter((*(violation.text for violation in self.violations), *self.refused)), "")

    @property
    def broken(self) -> bool:
        """Whether the history is not valid."""
        return not self.history_valid

    def as_dict(self) -> dict[str, Any]:
        """Write it as JSON values; what is computed stands beside what was counted."""
        counted = asdict(self)
        messages, violations = counted.pop("messages"), counted.pop("violations")
        return {
            **counted,
            "over_budget": self.over_budget,
            "answer_present": bool(self.answer),
            "history_valid": self.history_valid,
            "first_violation": self.first_violation or None,
            "violations": violations,
            "messages": messages,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All runs, in the order in which they were made: script by script, and in each option by option.

    Attributes:
        max_iterations: Round trips that each run was allowed.
        endpoint: Who answered, in words.
        live: Whether a real model answered, so that the numbers differ from one time to the next.
        versions: The versions of what was measured, by name.
        options: What was compared.
        scripts: In which situations.
        runs: One for each option and script.
        wall_seconds: All in all.
    """

    max_iterations: int
    endpoint: str
    live: bool
    versions: tuple[tuple[str, str], ...]
    options: tuple[OptionInfo, ...]
    scripts: tuple[ScriptInfo, ...]
    runs: tuple[Run, ...]
    wall_seconds: float

    def of_script(self, key: str) -> tuple[Run, ...]:
        """The runs of one script, in the order of the options."""
        return tuple(run for run in self.runs if run.script == key)

    def of_option(self, key: str) -> tuple[Run, ...]:
        """The runs of one option, in the order of the scripts."""
        return tuple(run for run in self.runs if run.option == key)

    def option(self, key: str) -> OptionInfo:
        """Find an option by its key."""
        return next(option for option in self.options if option.key == key)

    def script(self, key: str) -> ScriptInfo:
        """Find a script by its key."""
        return next(script for script in self.scripts if script.key == key)

    def unfinished(self, run: Run) -> bool:
        """Whether the budget ran out in this run, where another option finished the same work within it."""
        others = (other for other in self.of_script(run.script) if other.status == "answered")
        return run.status == "limit_reached" and any(not other.over_budget for other in others)

    @property
    def failures(self) -> tuple[str, ...]:
        """What the corrected options did that they promise not to do, a sentence each."""
        corrected = {option.key for option in self.options if option.corrected}
        return tuple(_sentences(self, (run for run in self.runs if run.option in corrected)))

    @property
    def holds(self) -> bool:
        """Whether no corrected option overshot, broke a history or failed; the others cannot change that."""
        return not self.failures

    def as_dict(self) -> dict[str, Any]:
        """Write it as JSON values."""
        return {
            "schema": SCHEMA,
            "max_iterations": self.max_iterations,
            "endpoint": self.endpoint,
            "live": self.live,
            "versions": dict(self.versions),
            "holds": self.holds,
            "failures": list(self.failures),
            "wall_seconds": self.wall_seconds,
            "options": [asdict(option) for option in self.options],
            "scripts": [asdict(script) for script in self.scripts],
            "runs": [{**run.as_dict(), "unfinished": self.unfinished(run)} for run in self.runs],
        }


def _sentences(comparison: Comparison, runs: Iterable[Run]) -> Iterable[str]:
    for run in runs:
        where = f"{comparison.option(run.option).name}, {comparison.script(run.script).name}"
        if run.over_budget:
            yield f"{where}: {run.trips} round trips where {run.budget} were allowed."
        if run.broken:
            yield f"{where}: the history is broken: {run.first_violation}."
        if run.status == "failed":
            yield f"{where}: it failed: {run.error}"
