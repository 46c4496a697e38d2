"""Compares journals with their links, and with heads that were kept outside their store."""

from collections.abc import Mapping
from dataclasses import field
from typing import TypeAlias

from planner_ext.core.values import frozen
from planner_ext.durable.archive import read_archive
from planner_ext.durable.chain import Heads, first_defect, run_digest
from planner_ext.durable.store import JournalStore

_JOURNAL = "SELECT seq, fact, link, salt FROM planner_journal WHERE run_id = :run_id ORDER BY seq"
_DELETED = "SELECT digest, head FROM planner_deleted"

_HeadsByRun: TypeAlias = Mapping[str, Heads]


@frozen
class Verified:
    """What was verified.

    Attributes:
        journals: The journals whose links were computed.
        deleted: The runs whose deletion is noted.
        unseen: The names of runs without a head, of which only the links were compared.
        defects: By run, the first fact that is not the one that was written. A run that
            is missing is named by its `run_digest`.
    """

    journals: int = 0
    deleted: int = 0
    unseen: tuple[str, ...] = ()
    defects: Mapping[str, str] = field(default_factory=dict[str, str])


async def verify_store(store: JournalStore, heads: _HeadsByRun) -> Verified:
    """Verify all journals of a store; nothing is changed."""
    left = dict(heads)
    journals = 0
    unseen: list[str] = []
    defects: dict[str, str] = {}
    async for run_id in store.find():
        (rows,) = await store.database.transact((_JOURNAL, {"run_id": run_id}))
        known = left.pop(run_digest(run_id), {})
        journals += bool(rows)
        defect = first_defect(run_id, rows, known)
        if defect:
            defects[run_id] = defect
        elif rows and not known:
            unseen.append(run_id)
    (gone,) = await store.database.transact((_DELETED, {}))
    for run, head in gone:
        known = left.pop(run, {})
        number, _, link = (head or "0.").partition(".")
        if max(known, default=0) > int(number) or link not in known.get(
            int(number), link
        ):
            defects[run] = "it was deleted, and its journal was not that of its heads"
    defects |= {run: "its journal is missing, and no deletion is noted" for run in left}
    return Verified(
        journals=journals, deleted=len(gone), unseen=tuple(unseen), defects=defects
    )


def verify_archive(
    text: str, heads: _HeadsByRun, *, key: bytes | None = None
) -> Verified:
    """Verify the journal of an exported run.

    Args:
        text: What `planner_ext.durable.archive.export_run` wrote.
        heads: Those that were kept.
        key: As of `planner_ext.durable.archive.import_run`.

    Raises:
        InvalidJournalError: If the text is damaged, or refused by its signature.
    """
    run_id, rows = read_archive(text, key=key)
    known = heads.get(run_digest(run_id), {})
    defect = first_defect(run_id, rows, known)
    return Verified(
        journals=1,
        unseen=() if known else (run_id,),
        defects={run_id: defect} if defect else {},
    )
