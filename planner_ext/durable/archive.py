"""A run as one JSON document, to move it to another store, or to keep it after its store deletes it.

The document holds the journal, from which an import derives the rows again, and the
decisions of persons: taken, not taken yet, and refused, and the votes on what waits. They bind to the run's name,
which an imported run keeps.
"""

# ruff: noqa: S608  (only this module's own text is put into a statement)

import json
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from planner_ext.core.errors import InvalidJournalError, reading
from planner_ext.core.facts import Fact
from planner_ext.core.state import Phase, State
from planner_ext.durable.authorization import Doorkeeper
from planner_ext.durable.chain import Chain
from planner_ext.durable.database import Row, Step, read_values
from planner_ext.durable.errors import DuplicateRowError, RunConflictError, reading_row
from planner_ext.durable.inputs import (
    RunInputs,
    hooks_in,
    read_inputs,
    read_new_budget,
    read_said,
)
from planner_ext.durable.listing import joined
from planner_ext.durable.records import (
    RUN_ID,
    fold_journal,
    read_facts,
    read_votes,
    write_votes,
)
from planner_ext.durable.store import ADD_NOTICE, JournalStore
from planner_ext.durable.writer import ADD_FACT, JournalWriter, compact, fact_rows
from planner_ext.engine.document import (
    document_of,
    dump_facts,
    load_facts,
    read_document,
)
from planner_ext.engine.fork import forked_facts

_KEYS = "run_id", "run", "facts", "chain", "decisions", "votes", "refusals"
_RUN = (
    "goal",
    "status",
    "created_at",
    "updated_at",
    "problem",
    "inputs",
    "new_budget",
    "said",
    "tags",
)
_DECISIONS = "id", "fingerprint", "decision", "decided_at"
_VOTES = "id", "fingerprint", "votes"
_REFUSALS = "id", "decision", "problem", "at"
_SELECT = (
    f"SELECT {', '.join(_RUN)} FROM planner_runs WHERE run_id = :run_id",
    f"SELECT {', '.join(_DECISIONS)} FROM planner_approvals WHERE run_id = :run_id AND decision IS NOT NULL",
    f"SELECT {', '.join(_VOTES)} FROM planner_approvals WHERE run_id = :run_id AND votes IS NOT NULL",
    f"SELECT {', '.join(_REFUSALS)} FROM planner_refusals WHERE run_id = :run_id ORDER BY at",
    "SELECT seq, schema, fact, link, salt FROM planner_journal WHERE run_id = :run_id ORDER BY seq",
)
_JSON = ("goal", "problem", "inputs", "new_budget", "decision", "votes")
"""The columns of text that is JSON."""

_TIMES = ("created_at", "updated_at", "decided_at", "at")
_LATEST = 1e11
"""The year 5138. A time that is no date would hide whole lists of runs."""

_NOT_DERIVED = ("queued", "failed", "quarantined")
"""The statuses of a run that its journal does not say."""
_ADD_RUN = """
    INSERT INTO planner_runs (run_id, goal, status, created_at, updated_at, problem, inputs, new_budget, said, tags)
    VALUES (:run_id, :goal, 'running', :created_at, :updated_at, :problem, :inputs, :new_budget, :said, :tags)
"""
_SET_ASIDE = "UPDATE planner_runs SET status = :status, problem = :problem WHERE run_id = :run_id"
_MAKE_DUE = """
    UPDATE planner_runs SET problem = :problem, wake_at = updated_at WHERE run_id = :run_id AND status = 'running'
"""
_DECIDE = """
    UPDATE planner_approvals SET decision = :decision, decided_at = :decided_at,
        status = CASE WHEN status = 'open' THEN 'decided' ELSE status END
    WHERE id = :id AND run_id = :run_id AND fingerprint = :fingerprint
"""
"""A decision that the journal does not hold yet is taken by a worker of this store."""
_VOTE = """
    UPDATE planner_approvals SET votes = :votes
    WHERE id = :id AND run_id = :run_id AND fingerprint = :fingerprint
"""
_REFUSE = """
    INSERT INTO planner_refusals (run_id, id, decision, problem, at) VALUES (:run_id, :id, :decision, :problem, :at)
"""


async def export_run(
    store: JournalStore, run_id: str, *, key: bytes | None = None
) -> str:
    """Write a run as JSON text; it stays in the store.

    Args:
        store: Holds the run.
        run_id: The run, in any state.
        key: Signs the text (HMAC-SHA256), for `import_run`. None leaves it unsigned:
            anyone who can write it can put an approval in it.

    Raises:
        UnknownRunError: If the store has no such run.
        InvalidJournalError: If its journal cannot be read.
    """
    steps = ((statement, {"run_id": run_id}) for statement in _SELECT)
    runs, decided, voted, refused, facts = await store.database.transact(*steps)
    if not runs:
        await store.record(run_id)  # says that there is no such run
    with reading_row(f"A row of run {run_id!r} is", InvalidJournalError):
        run = _document(_RUN, runs[0])
        decisions = [_document(_DECISIONS, row) for row in decided]
        votes = [_document(_VOTES, row) for row in voted]
        refusals = [_document(_REFUSALS, row) for row in refused]
    document = document_of(
        "run",
        key,
        run_id=run_id,
        run=run,
        facts=dump_facts(read_facts(run_id, facts)),
        chain=_chain(facts),
        decisions=decisions,
        votes=votes,
        refusals=refusals,
    )
    return json.dumps(document, separators=(",", ":"))


async def import_run(
    store: JournalStore,
    text: str,
    *,
    key: bytes | None = None,
    doorkeeper: Doorkeeper | None = None,
    by: str = "",
) -> str:
    """Add an exported run to a store; its rows are derived from its journal.

    Workers of this store continue an unfinished run. Delete or cancel it in the first
    store, else both continue it.

    Args:
        store: Receives the run.
        text: What `export_run` wrote.
        key: Refuses text that is unsigned, altered or signed with another key. None
            checks no signature.
        doorkeeper: Asks whether the run may be imported.
        by: Who imports it.

    Returns:
        The run's name.

    Raises:
        InvalidJournalError: If the text is damaged, refused by its signature, or no
            run.
        NewerSchemaError: If a newer version of this package wrote it.
        RunConflictError: If the store has a run of this name.
        NotAuthorizedError: If the ``authorize`` hook refuses, or is missing and the run
            began under one.
    """
    with reading("The exported run is", InvalidJournalError):
        data = read_document(text, "run", _KEYS, key=key)
        run_id = data["run_id"]
        facts = load_facts(data["facts"])
        state = fold_journal(run_id, facts)
        if RUN_ID.fullmatch(run_id) is None:
            raise ValueError("the name of the run is not one")
        run = _row(run_id, _RUN, data["run"])
        _check_run(run, data["run"]["goal"], state)
        for fact in facts:
            _time(fact.at)
        last = _SET_ASIDE if run["status"] in _NOT_DERIVED else _MAKE_DUE
        steps: list[Step] = [(last, run)]
        for statement, columns, rows in (
            (_DECIDE, _DECISIONS, data["decisions"]),
            (_VOTE, _VOTES, data["votes"]),
            (_REFUSE, _REFUSALS, data["refusals"]),
        ):
            steps += [(statement, _row(run_id, columns, row)) for row in rows]
        steps = [*await _journal_steps(run_id, facts, data["chain"]), *steps]
    first = None
    if data["facts"]:
        first = json.dumps(data["facts"][0])
    hooks = hooks_in(run_id, run["inputs"], first)
    await (doorkeeper or Doorkeeper()).check_under(hooks, "import", run_id, by=by)
    way_out = "Delete it first, or import into another store."
    return await _add(store, run, steps, way_out=way_out)


async def fork_run(
    store: JournalStore,
    run_id: str,
    *,
    at: int,
    new_run_id: str,
    now: float,
    instruction: str = "",
) -> str:
    """Add a fork of a run to its store; see `planner_ext.engine.fork.forked_facts`."""
    stored = await store.load(run_id)
    facts = forked_facts(
        stored.facts, at=at, run_id=new_run_id, now=now, instruction=instruction
    )
    run = {
        "run_id": new_run_id,
        "goal": json.dumps(stored.record.goal),
        "status": "stopped",
        "created_at": now,
        "updated_at": now,
        "problem": None,
        "inputs": RunInputs(arguments=stored.inputs.arguments).to_json(),
        "new_budget": None,
        "said": None,
        "tags": joined(stored.record.tags),
    }
    steps = await _journal_steps(new_run_id, facts)
    # nothing waits in a fork, and what was decided binds to the first run
    kept = [step for step in steps if "planner_approvals" not in step[0]]
    return await _add(store, run, kept, way_out="Give the fork another name.")


async def _add(
    store: JournalStore, run: Mapping[str, Any], steps: Sequence[Step], *, way_out: str
) -> str:
    """Add a run's rows in one transaction; return its name."""
    run_id = run["run_id"]
    try:
        await store.database.transact((_ADD_RUN, run), *steps)
    except DuplicateRowError as error:
        raise RunConflictError(
            f"Run {run_id!r} is there already, and was not changed. {way_out}"
        ) from error
    return run_id


def _check_run(run: Mapping[str, Any], goal: object, state: State) -> None:
    """Check the columns that the journal does not derive: a worker could take the run, and its status fits."""
    read_inputs(run["run_id"], run["inputs"])
    read_new_budget(run["run_id"], run["new_budget"])
    read_said(run["run_id"], run["said"])
    is_new = state.phase is Phase.NEW
    status = run["status"]
    if not isinstance(goal, str) or not (is_new or goal == state.goal):
        raise ValueError("its goal is not that of its journal")
    if status in _NOT_DERIVED and not (
        is_new if status == "queued" else state.ended is None
    ):
        raise ValueError(f"it is {status}, and its journal contradicts that")


async def _journal_steps(
    run_id: str, facts: Sequence[Fact], given: object = None
) -> list[Step]:
    """List the steps that write a journal and its derived rows, without notices.

    Args:
        run_id: The run.
        facts: Its journal.
        given: What `_chain` returned, which is kept as it is. None begins a new chain.
    """
    derived = _Steps()
    writer = JournalWriter(derived, run_id, ())
    for seq, fact in enumerate(facts):
        await writer.append(run_id, seq, (fact,))
    rows, _ = fact_rows(run_id, Chain.begin(run_id), dump_facts(facts))
    if given is not None:
        rows = [
            {**row, "link": link, "salt": salt}
            for row, (link, salt) in zip(rows, _read_chain(given), strict=True)
        ]
    return [
        *((ADD_FACT, row) for row in rows),
        *(step for step in derived.steps if step[0] not in (ADD_FACT, ADD_NOTICE)),
    ]


def _chain(rows: Sequence[Row]) -> dict[str, object]:
    """Turn the links of a journal into JSON values."""
    salt = rows[0][4] if rows else None
    links = [row[3] for row in rows]
    return {"salt": salt, "links": links}


def _read_chain(given: Any) -> list[tuple[str | None, str | None]]:
    """Read the links, and the salt, which stands beside the first one."""
    salt, *links = read_values(list[str | None], [given["salt"], *given["links"]])
    return [(link, None if place else salt) for place, link in enumerate(links)]


def read_archive(text: str, *, key: bytes | None = None) -> tuple[str, list[Row]]:
    """Read the name of an exported run, and the rows that `first_defect` compares; raises as `import_run`."""
    with reading("The exported run is", InvalidJournalError):
        data = read_document(text, "run", _KEYS, key=key)
        facts = [compact(fact) for fact in data["facts"]]
        pairs = zip_longest(facts, _read_chain(data["chain"]))
        rows: list[Row] = [
            (-1 if fact is None else place, fact, *(chain or (None, None)))
            for place, (fact, chain) in enumerate(pairs)
        ]
        return str(data["run_id"]), rows


class _Steps(JournalStore):
    """Collects what a writer would store."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    async def append(self, run_id: str, *steps: Step) -> None:  # noqa: ARG002  (of one run)
        self.steps += steps


def _document(columns: Sequence[str], row: Row) -> dict[str, object]:
    """Turn a row into JSON values."""
    return {
        column: json.loads(value) if column in _JSON and value is not None else value
        for column, value in zip(columns, row, strict=True)
    }


def _row(
    run_id: str, columns: Sequence[str], document: Mapping[str, Any]
) -> dict[str, Any]:
    """Turn JSON values back into a row; any other value is an error."""
    row: dict[str, Any] = {"run_id": run_id}
    for column in columns:
        value = document[column]
        if column in _TIMES:
            row[column] = _time(value)
        elif column == "votes":
            row[column] = write_votes(read_votes(json.dumps(value)))
        elif column in _JSON:
            row[column] = None if value is None else json.dumps(value)
        elif isinstance(value, str) or (value is None and column in ("said", "tags")):
            row[column] = value
        else:
            raise TypeError(f"{column} is not a text")
    return row


def _time(value: Any) -> float:
    if not 0 <= (at := float(value)) < _LATEST:
        raise ValueError(f"{at} is not a time")
    return at
