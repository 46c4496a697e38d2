"""Fuzzing of a parser: real texts, changed at random, and the promises that hold for every text.

A JSON text is changed as a tree, so that most changes pass the reader of JSON and reach what is behind it: values are
replaced by odd ones, deleted, repeated, moved, and taken from other texts; texts within texts are changed, too. One
change in four is a change of characters. A text whose outcome was not seen before is changed further.
"""

import asyncio
import copy
import json
import re
import resource
import signal
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, TypeAlias, cast

__all__ = ["Fuzzed", "Report", "Subject", "TooLongError", "as_text", "fuzz", "mutated"]

CPU_SECONDS = 2.0
"""The most processor time of one execution."""
WALL_SECONDS = 60.0
"""The most time of one execution: an await that never ends."""
MOST_GROWTH = 256 * 1024
"""The most memory that one execution may add to the peak, in KiB."""
_LONGEST = 50_000
"""Characters of a text that is changed further."""
_FROM_ACCEPTED = 0.8
"""How often a text is changed that was read, and not one that was refused: behind the reader there is more to reach."""

MARKER = "<fuzz-x'\">"
"""A text that no page may contain as it is."""

ODD: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        7,
        2**31,
        2**53 + 1,
        2**63,
        -(2**63) - 1,
        10**400,
        0.5,
        -0.0,
        1e16,
        1e308,
    ),
    *(
        float("nan"),
        float("inf"),
        float("-inf"),
        "",
        " ",
        "0",
        "-1",
        "null",
        "{}",
        "[]",
        "{",
        "NaN",
        "1e999",
        "a" * 3000,
    ),
    *(
        "\x00",
        "\n",
        "\r\n",
        "\x1b[2J",
        "\u202e",
        "\u200b",
        "\ud800",
        "\ufeff",
        "é" * 5,
        "😀",
        "/",
        "..",
        "%00",
        "%",
        "*",
    ),
    *(
        "[!",
        "[" * 50,
        "*" * 40 + "x",
        "(a+)+$",
        "${jndi}",
        "{{x}}",
        "__class__",
        "$ref",
        "shop-wipe",
        "9" * 5000,
    ),
    *(
        "2026-11-22T00:00:00",
        "9999-12-31T23:59:59Z",
        "0001-01-01T00:00:00+14:00",
        MARKER,
        "javascript:alert(1)",
    ),
    *(
        [],
        {},
        [[]],
        [None],
        {"": None},
        {"a": 1},
        [0] * 300,
        {"$ref": "#"},
        {"$ref": "http://127.0.0.1:9/x"},
    ),
    *({"type": "string", "pattern": "^(a|a)*$"}, {"__proto__": {}}),
)
_TOKENS = (
    "",
    "\x00",
    "\ud800",
    '"',
    "'",
    "\\",
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "-",
    "&",
    "*",
    "!!python/none",
    "NaN",
    "\n",
    " *a",
    " &a ",
    "<<: *a",
    "? ",
    "- ",
    "!!binary ",
    "!!set ",
    " |\n ",
    "2026-11-22",
    " .inf",
    "%TAG ",
    "---\n",
)


def mutated(random: Random, text: str, others: Sequence[str]) -> str:
    """Change a text at one to four places, with parts of other texts."""
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        return _changed_text(random, text, random.choice(others))
    if random.random() < 0.2:
        return _changed_text(random, text, random.choice(others))
    box = [tree]
    try:
        for _ in range(random.choice((1, 1, 1, 2, 2, 3, 4))):
            _change(random, box, others)
        return json.dumps(box[0])
    except (
        RecursionError,
        ValueError,
    ):  # nested too deeply, or a number too long to write
        return text


def as_text(value: object) -> str:
    """Write a value as JSON, a text as it is; "" for one that is nested too deeply to be written by the fuzzer."""
    try:
        return value if isinstance(value, str) else json.dumps(value)
    except RecursionError:
        return ""


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """List each place in a tree, as its container and key."""
    found: list[tuple[Any, Any]] = []
    todo = [tree]
    while todo:
        part = todo.pop()
        keys = (
            part.keys()
            if isinstance(part, dict)
            else range(len(cast("list[Any]", part)))
        )
        for key in keys:
            found.append((part, key))
            if isinstance(part[key], dict | list):
                todo.append(part[key])
    return found


def _change(random: Random, box: list[Any], others: Sequence[str]) -> None:
    """Change one place of the tree in a box."""
    places = _places(box)
    part, key = random.choice(places)
    value = part[key]
    match random.randrange(10):
        case 0 | 1:
            part[key] = copy.deepcopy(random.choice(ODD))
        case 2 | 3:
            part[key] = _nudged(random, value, others)
        case 4:
            if part is not box:
                del part[key]
        case 5:
            other, name = random.choice(places)
            part[key] = copy.deepcopy(other[name])
        case 6:
            _take(random, part, key, others)
        case 7:
            if isinstance(part, list) and part is not box:
                part[key:key] = [
                    copy.deepcopy(value) for _ in range(random.choice((1, 1, 1, 30)))
                ]
            elif isinstance(part, dict):
                part[
                    str(random.choice(ODD)) if random.random() < 0.3 else f"{key}x"
                ] = part.pop(key)
        case 8:
            other, name = random.choice(places)
            if other is not box and part is not box:
                part[key], other[name] = (
                    copy.deepcopy(other[name]),
                    copy.deepcopy(value),
                )
        case _:
            for _ in range(random.choice((1, 1, 60, 400))):
                value = [value] if random.random() < 0.5 else {str(key): value}
            part[key] = value


def _take(random: Random, part: Any, key: Any, others: Sequence[str]) -> None:
    """Put a part of another text somewhere, under its own name if it has one."""
    try:
        other, name = random.choice(_places([json.loads(random.choice(others))]))
    except (ValueError, RecursionError):
        return
    if isinstance(part, dict) and isinstance(name, str):
        part[name] = other[name]
    else:
        part[key] = other[name]


def _nudged(random: Random, value: Any, others: Sequence[str]) -> Any:
    """Change a value to one of its own type."""
    match value:
        case bool():
            return not value
        case int() | float():
            return random.choice(
                (
                    value + 1,
                    value - 1,
                    -value,
                    value * 2,
                    value / 3 if abs(value) < 2**60 else 0,
                )
            )
        case str():
            if value[:1] in "{[" and random.random() < 0.7:
                return mutated(random, value, others)
            return _changed_text(random, value, str(random.choice(ODD)))
        case list():
            return random.sample(value, len(cast("list[Any]", value)))
        case _:
            return copy.deepcopy(random.choice(ODD))


def _changed_text(random: Random, text: str, other: str) -> str:
    """Change the characters of a text."""
    for _ in range(random.choice((1, 1, 2, 3))):
        start = random.randrange(len(text) + 1)
        end = min(start + random.choice((0, 1, 1, 2, 8, 40)), len(text))
        match random.randrange(5):
            case 0:
                piece = ""
            case 1:
                piece = random.choice(_TOKENS)
            case 2:
                piece = text[start:end] * 2
            case 3:
                place = random.randrange(len(other) + 1)
                piece = other[place : place + random.choice((1, 4, 30))]
            case _:
                piece = chr(
                    random.choice(
                        (
                            random.randrange(128),
                            random.randrange(128),
                            random.randrange(0x2100),
                        )
                    )
                )
        text = text[:start] + piece + text[end:]
    return text


Check: TypeAlias = Callable[[str], Awaitable[str]]
"""Reads a text and returns the outcome; raises where a promise is broken."""


@dataclass(frozen=True)
class Fuzzed:
    """A parser under test: texts that it reads, and the check of its promises."""

    seeds: Sequence[str]
    check: Check


Subject: TypeAlias = Callable[[Path], AbstractAsyncContextManager[Fuzzed]]
"""Makes a parser's world in a folder."""


@dataclass
class Report:
    """What fuzzing one parser did.

    Attributes:
        outcomes: How often a text was read or refused, by the first word of its outcome.
        findings: The first text and the trace of each broken promise, by where it was broken.
    """

    executions: int = 0
    cpu_seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter[str])
    distinct: int = 0
    peak_kib: int = 0
    findings: dict[str, tuple[str, str]] = field(
        default_factory=dict[str, tuple[str, str]]
    )


class TooLongError(BaseException):
    """One execution took more processor time than it may; no handler of an `Exception` catches it."""


@contextmanager
def _in_time() -> Generator[None]:
    def end(*_: object) -> None:
        raise TooLongError

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


async def executed(check: Check, text: str) -> str:
    """Check one text.

    Raises:
        BaseException: The promise that is broken.
    """
    before = _peak()
    with _in_time():
        async with asyncio.timeout(WALL_SECONDS):
            outcome = await check(text)
    assert _peak() - before < MOST_GROWTH, (
        f"one text took {(_peak() - before) // 1024} MiB of memory"
    )
    return outcome


async def fuzz(
    fuzzed: Fuzzed,
    *,
    seed: int,
    executions: int | None = None,
    minutes: float | None = None,
    found: Callable[[str, str, str], None] = lambda *_: None,
    ended: Callable[[], bool] = lambda: False,
) -> Report:
    """Check the seeds, then changed texts, for a number of executions or minutes of processor time, or until ended."""
    random, report, seen = Random(seed), Report(), set[str]()
    accepted, other = [*fuzzed.seeds], [*fuzzed.seeds]
    start, number = time.process_time(), 0
    while (
        (number < executions)
        if executions is not None
        else (report.cpu_seconds < 60 * (minutes or 0))
    ):
        if ended():
            break
        texts = accepted if random.random() < _FROM_ACCEPTED else other
        text = (
            fuzzed.seeds[number]
            if number < len(fuzzed.seeds)
            else mutated(random, random.choice(texts), texts)
        )
        number += 1
        try:
            outcome = await executed(fuzzed.check, text)
        except BaseException as error:
            where, trace = (
                _place(error),
                "".join(traceback.format_exception(error, limit=-8, chain=False)),
            )
            outcome = f"broken {where}"
            if where not in report.findings:
                report.findings[where] = text, trace
                found(where, text, trace)
        report.outcomes[outcome.split()[0]] += 1
        shape = re.sub(r"'[^']*'|\"[^\"]*\"|\d+|[^ -~]+", "", outcome)[:100]
        if shape not in seen and len(text) <= _LONGEST:
            seen.add(shape)
            (accepted if outcome.startswith("read") else other).append(text)
        report.cpu_seconds = time.process_time() - start
    report.executions, report.distinct, report.peak_kib = number, len(seen), _peak()
    return report


def _place(error: BaseException) -> str:
    """Name an error by its class and the last lines of the package that it came through."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        f"{Path(frame.filename).name}:{frame.lineno}"
        for frame in frames
        if "planner_ext/" in frame.filename
    ]
    last = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames]
    return f"{type(error).__name__} {' '.join((own or last)[-2:])}"
