"""Fuzz a parser that reads what others wrote; print how much was run and what was found.

    python tests/benchmarks/fuzz.py checkpoint --minutes 10 --seed 1
    python tests/benchmarks/fuzz.py all --minutes 1 --keep found/

Parsers: checkpoint, journal, policy, cassette, reply, webhook, inbox, front_end. Minutes are of processor time. Each
text that breaks a promise is printed with its trace, and written to a file in ``--keep``. Exits with 1 if there is
one. SIGINT and SIGTERM end it after the text at hand; the figures up to then are printed.
"""

import argparse
import asyncio
import json
import logging
import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzzing.mutation import Report, fuzz
from fuzzing.subjects import SUBJECTS

ENDED: list[int] = []
"""The signals that ended the fuzzing."""


async def fuzzed(name: str, options: argparse.Namespace) -> Report:
    """Fuzz one parser."""

    def found(where: str, text: str, trace: str) -> None:
        print(
            f"{name}: {where}\n{trace}\n{text[:1000]!r}\n", file=sys.stderr, flush=True
        )
        if options.keep is not None:
            options.keep.mkdir(parents=True, exist_ok=True)
            file = options.keep / f"{name}-{abs(hash(where))}.json"
            file.write_text(json.dumps({"parser": name, "where": where, "text": text}))

    with TemporaryDirectory() as folder:
        async with SUBJECTS[name](Path(folder)) as subject:
            minutes, ended = options.minutes, lambda: bool(ENDED)
            return await fuzz(
                subject, seed=options.seed, minutes=minutes, found=found, ended=ended
            )


def main() -> int:
    """Fuzz, and print one line a parser."""
    parser = argparse.ArgumentParser(
        description="Fuzz the parsers that read what others wrote."
    )
    parser.add_argument("parser", choices=[*SUBJECTS, "all"])
    parser.add_argument(
        "--minutes",
        type=float,
        default=10.0,
        help="minutes of processor time for each parser",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--keep", type=Path, help="folder for the texts that break a promise"
    )
    options, broken = parser.parse_args(), 0
    logging.disable(logging.CRITICAL)
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, lambda number, _: ENDED.append(number))
    for name in SUBJECTS if options.parser == "all" else [options.parser]:
        if ENDED:
            break
        print(f"Fuzzes {name}.", file=sys.stderr, flush=True)
        report = asyncio.run(fuzzed(name, options))
        broken += len(report.findings)
        outcomes = ", ".join(
            f"{count} {outcome}" for outcome, count in report.outcomes.most_common()
        )
        print(
            f"{name}: {report.cpu_seconds / 60:.1f} minutes, {report.executions} executions ({outcomes}), "
            f"{report.distinct} distinct outcomes, peak {report.peak_kib // 1024} MiB, "
            f"{len(report.findings)} findings",
            flush=True,
        )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
