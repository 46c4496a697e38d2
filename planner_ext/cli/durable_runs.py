"""What ``planner-ext runs list`` does: one line for each run. Imports nothing heavy."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime

from rich.text import Text

from planner_ext.cli.console import ANSWERED, complaints_of, say, stderr_console, stdout_console
from planner_ext.cli.durable_store import opened_store, say_part, store_name
from planner_ext.cli.text import exact, moment_text, one_line
from planner_ext.durable import RunRecord

__all__ = ["list_runs"]

_TIMES = ("wake_at", "created_at", "updated_at")


async def list_runs(where: str, *, status: str | None, limit: int, offset: int, as_json: bool) -> int:
    """Print the runs, and how many there are where these are not all; of a damaged row it is said that it is."""
    async with opened_store(where) as store:
        with complaints_of("planner_ext.durable"):
            records = await store.runs(status=status, limit=limit, offset=offset)
        total = await store.count_runs(status=status)
        say_part(len(records), limit=limit, offset=offset, total=total)
    if as_json:
        print(json.dumps([_document(record) for record in records], indent=2))
    elif not total:
        say(stderr_console(), Text(f"No run{f' is {status}' if status else ''} in {store_name(where)}."))
    elif records:
        _print(records)
    return ANSWERED


def _print(records: list[RunRecord]) -> None:
    console = stdout_console()
    names = max(len(exact(record.run_id)) for record in records)
    states = max(len(record.status) for record in records)
    for record in records:
        moved = moment_text(_moment(record.updated_at))
        name = (f"{exact(record.run_id):<{names}}", "bold")
        line = Text.assemble(name, f"  {record.status:<{states}}  {one_line(record.goal)}  ", (moved, "dim"))
        console.print(line, soft_wrap=True)


def _document(record: RunRecord) -> Mapping[str, object]:
    times = {name: getattr(record, name) for name in _TIMES}
    return asdict(record) | {name: None if at is None else _moment(at).isoformat() for name, at in times.items()}


def _moment(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)
