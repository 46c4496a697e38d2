"""The rows of a store, and the exported text of a run, each with the promises that hold for every content."""

import json
import sqlite3
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

from fuzzing.mutation import MARKER, Fuzzed, as_text
from fuzzing.texts import refused
from planner_ext import Approve, Deny
from planner_ext.core.errors import PlannerExtError
from planner_ext.durable import Runs
from planner_ext.durable.archive import export_run, import_run
from planner_ext.durable.runs import RunsClient
from planner_ext.durable.store import JournalStore, opened_store
from planner_ext.engine.document import dump_facts, load_facts
from planner_ext.testing import say
from planner_ext.timeline import fragment_of
from support.inbox import inbox, visitor_at
from support.till import application, asks, leave_in_doubt, leave_waiting, refunds

_TABLES = ("planner_runs", "planner_journal", "planner_approvals", "planner_refusals")
_KEY = b"a shared secret"


@asynccontextmanager
async def journal(folder: Path) -> AsyncGenerator[Fuzzed]:
    """Rows that others wrote are shown or refused by name, in the library and the inbox; none is decided unseen."""
    store = folder / "runs.db"
    for name in ("decided", "waits"):
        await leave_waiting(
            store,
            [refunds({"order": MARKER, "amount": 1}), say("Done.")],
            run_id=name,
            goal=MARKER,
        )
    await leave_waiting(store, [asks("Which order?"), say("Done.")], run_id="question")
    await leave_in_doubt(store)
    async with Runs.sqlite(store) as runs:
        await (
            await runs.start(*application([say("Done.")]), "Say done.", run_id="ended")
        ).result()
        approvals = runs.approvals(authorize=lambda _: True)
        with suppress(PlannerExtError):
            await approvals.decide(
                "decided/0/refund-0", Approve(fingerprint="another", by="eve")
            )
        await approvals.decide("decided/0/refund-0", Deny("No.", by="ann"))
        shown = {
            one.fingerprint: dict(one.arguments) for one in await approvals.pending()
        }
    async with opened_store(store, create=False) as opened:
        exported = [
            await export_run(opened, "ended"),
            await export_run(opened, "waits", key=_KEY),
        ]
        exported += [await export_run(opened, "decided")]
    with closing(sqlite3.connect(store, isolation_level=None)) as rows:
        rows.row_factory = sqlite3.Row
        kept = {
            run: _rows_of(rows, run)
            for run in ("decided", "waits", "question", "letter", "ended")
        }
        for run in kept:
            _delete(rows, run)
        async with (
            opened_store(store, create=False) as opened,
            inbox(store, authorize=lambda _: True) as base,
            visitor_at(base) as ann,
        ):
            runs = RunsClient(opened)

            async def check(text: str) -> str:
                data = _parsed(text)
                if "facts" in data or not data:
                    return await _imported(opened, rows, text)
                try:
                    run = _write(rows, data)
                except (sqlite3.Error, OverflowError, UnicodeEncodeError) as error:
                    _delete(rows, None)
                    return f"refused by the database {type(error).__name__}"
                outcome = await _shown(runs, opened, run)
                for path in ("", "runs", f"runs/{quote(run[:500], safe='')}"):
                    response = await ann.client.get(path)
                    assert response.status_code < 500 or "<html" in response.text, (
                        f"{path}: {response.text[:200]}"
                    )
                    assert MARKER not in response.text, (
                        "a text of others stands in the page as it is"
                    )
                await _decided(runs, shown)
                _delete(rows, None)
                return outcome

            yield Fuzzed([*map(json.dumps, kept.values()), *exported], check)


def _parsed(text: str) -> dict[str, Any]:
    with suppress(ValueError, RecursionError):
        if isinstance(data := json.loads(text), dict):
            return cast("dict[str, Any]", data)
    return {}


def _rows_of(rows: sqlite3.Connection, run: str) -> dict[str, Any]:
    found: dict[str, Any] = {"run": run}
    for table in _TABLES:
        found[table] = [
            dict(row)
            for row in rows.execute(f"SELECT * FROM {table} WHERE run_id = ?", (run,))
        ]
    return found


def _delete(rows: sqlite3.Connection, run: str | None) -> None:
    for table in reversed(_TABLES):
        rows.execute(
            f"DELETE FROM {table}"
            if run is None
            else f"DELETE FROM {table} WHERE run_id = '{run}'"
        )


def _write(rows: sqlite3.Connection, data: Mapping[str, Any]) -> str:
    """Write rows as a text says, as far as SQLite takes them; return the run's name."""
    for table in _TABLES:
        columns = {row[1] for row in rows.execute(f"PRAGMA table_info({table})")}
        listed = data.get(table)
        for one in cast("list[Any]", listed if isinstance(listed, list) else [])[:60]:
            values = {
                name: value
                for name, value in (one.items() if isinstance(one, dict) else ())
                if name in columns
            }
            values = {
                n: as_text(v) if isinstance(v, list | dict) else v
                for n, v in values.items()
            }
            names = ", ".join(values)
            marks = ", ".join("?" * len(values))
            if values:
                rows.execute(
                    f"INSERT INTO {table} ({names}) VALUES ({marks})",
                    tuple(values.values()),
                )
    first = rows.execute("SELECT run_id FROM planner_runs LIMIT 1").fetchone()
    return "" if first is None else str(first[0]).encode(errors="replace").decode()


async def _shown(runs: RunsClient, store: JournalStore, run: str) -> str:
    """Read a run in all ways."""
    said: list[str] = []
    approvals = runs.approvals(authorize=lambda _: True)
    reads: tuple[Callable[[], Awaitable[Any]], ...] = (
        lambda: runs.load(run),
        runs.list,
        lambda: export_run(store, run),
        approvals.pending,
        lambda: approvals.refused(run),
    )
    for read in reads:
        try:
            found: Any = await read()
            said.append(type(found).__name__)
            if hasattr(found, "facts"):
                written = dump_facts(found.facts)
                assert (
                    dump_facts(load_facts(json.loads(json.dumps(written)))) == written
                )
                fragment = fragment_of(found.timeline(now=2e9))
                assert MARKER not in fragment
        except PlannerExtError as error:
            said.append(refused(error))
    return ("refused " if said[0].startswith("refused") else "read ") + " ".join(said)[
        :300
    ]


async def _decided(runs: RunsClient, shown: Mapping[str, Mapping[str, Any]]) -> None:
    """Decide what waits; a call that has a fingerprint which was shown has the arguments that were."""
    approvals = runs.approvals(authorize=lambda _: True)
    for one in await approvals.pending():
        assert shown.get(one.fingerprint, one.arguments) == one.arguments, (
            "the call is not the one that was shown"
        )
        with suppress(PlannerExtError):
            if await approvals.decide(
                one.id, Approve(by="ann", fingerprint=one.fingerprint)
            ):
                decision = (await approvals.show(one.id)).decision
                assert (
                    decision is not None
                    and decision.by == "ann"
                    and decision.arguments == one.arguments
                )


async def _imported(store: JournalStore, rows: sqlite3.Connection, text: str) -> str:
    """Import the text of a run, signed and unsigned."""
    outcome = ""
    for key in (_KEY, None):
        try:
            run = await import_run(store, text, key=key)
            written = await export_run(store, run)
            _delete(rows, None)
            await import_run(store, written)
            assert await export_run(store, run) == written, (
                "what was imported is not what was exported"
            )
            outcome = f"read {await _shown(RunsClient(store), store, run)}"
        except PlannerExtError as error:
            outcome = refused(error)
        _delete(rows, None)
    return outcome
