"""A journal's rows: one fact each, as JSON text with the number of its schema. Reading one runs no code."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from planner_ext.core.errors import IllegalTransitionError, InvalidJournalError
from planner_ext.core.facts import Fact
from planner_ext.core.fold import fold
from planner_ext.core.state import State
from planner_ext.durable.database import Row
from planner_ext.engine.journal import SCHEMA, check_schema, dump_facts, load_facts

__all__ = ["FactRow", "fold_journal", "read_facts", "write_facts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FactRow:
    """One row of a journal: the fact as JSON text, and the schema that it is written in."""

    seq: int
    schema: int
    fact: str


def write_facts(seq: int, facts: Sequence[Fact]) -> tuple[FactRow, ...]:
    """Write facts as rows.

    Args:
        seq: The place of the first of them in the journal, from 0.
        facts: What to write.
    """
    values = dump_facts(facts)
    return tuple(
        FactRow(seq=seq + n, schema=SCHEMA, fact=json.dumps(value, separators=(",", ":")))
        for n, value in enumerate(values)
    )


def read_facts(run_id: str, rows: Sequence[Row]) -> tuple[Fact, ...]:
    """Read the rows of a journal, in order, as ``(seq, schema, fact)``.

    Raises:
        NewerSchemaError: If a row was written by a newer version of this package.
        InvalidJournalError: Naming the run and the first row that is not as expected; nothing of it was used.
    """
    values: list[object] = []
    for place, (seq, schema, fact) in enumerate(rows):
        if seq != place:
            raise InvalidJournalError(f"The journal of run {run_id!r} is damaged: expected row {place}, found {seq}.")
        try:
            check_schema(schema)
            values.append(json.loads(str(fact)))
        except InvalidJournalError as error:
            raise type(error)(f"Row {place} of run {run_id!r}: {error}") from error
        except (ValueError, RecursionError) as error:
            raise InvalidJournalError(f"Row {place} of run {run_id!r} is not JSON: {error}.") from error
    try:
        return load_facts(values)
    except InvalidJournalError as error:
        raise type(error)(f"Run {run_id!r}: {error}") from error


def fold_journal(run_id: str, facts: Sequence[Fact]) -> State:
    """Compute the state of a run from its journal.

    Raises:
        InvalidJournalError: If the facts contradict each other, or are of another run.
    """
    try:
        state = fold(facts)
    except (IllegalTransitionError, IndexError) as error:
        raise InvalidJournalError(f"The journal of run {run_id!r} contradicts itself: {error}") from error
    if facts and state.run_id != run_id:
        raise InvalidJournalError(f"The journal of run {run_id!r} holds the facts of run {state.run_id!r}.")
    return state
