"""A journal shows its own changes: by its links, and by heads that were kept outside its store."""

import json
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from planner_ext.durable import Runs
from planner_ext.durable.archive import export_run, import_run
from planner_ext.durable.chain import Chain, heads_in, signer_of, verifier_of
from planner_ext.durable.retention import apply_retention
from planner_ext.durable.store import opened_store
from planner_ext.durable.verify import Verified, verify_archive, verify_store
from planner_ext.errors import PlannerInvalidConfigurationError
from planner_ext.testing import say
from support.durable import GOAL, PAY, decide_all, on_sqlite, open_runs, world

NOT_WRITTEN = "was changed, added or put there, or the one before it was left out"


@pytest.fixture
def heads(tmp_path: Path) -> Path:
    """Name the file of the heads."""
    return tmp_path / "heads.log"


async def drive(store: str, tmp_path: Path, *names: str, **options: Any) -> None:
    """Drive runs to their end, each over a pause, in two lives."""
    for name in names:
        made = world(tmp_path / "effects", [PAY, say("Paid.")])
        options |= {"heads": tmp_path / "heads.log"}
        async with open_runs(store, **options) as runs:
            await (await runs.start(*made, GOAL, run_id=name)).result()
        await decide_all(store)
        made = world(tmp_path / "effects", [say("Paid.")])
        async with open_runs(store, **options) as runs:
            await (await runs.start(*made, GOAL, run_id=name)).result()


def kept(heads: Path) -> str:
    """Read the file of the heads."""
    return heads.read_text()


async def verified(store: str, heads: Path | None = None) -> Verified:
    """Verify a store with the heads of a file."""
    text = "" if heads is None else kept(heads)
    async with opened_store(store, create=False) as opened:
        return await verify_store(opened, heads_in(text))


async def altered(store: str, *statements: str, **values: Any) -> None:
    """Change a store past the package."""
    async with opened_store(store) as opened:
        await opened.database.transact(*((one, values) for one in statements))


async def written_anew(
    store: str, run_id: str, change: Callable[[list[str]], Iterable[str]]
) -> None:
    """Change the facts of a journal as somebody does who knows how links are computed."""
    async with opened_store(store) as opened:
        read = (
            "SELECT fact, salt FROM planner_journal WHERE run_id = :run_id ORDER BY seq"
        )
        (rows,) = await opened.database.transact((read, {"run_id": run_id}))
        chain = Chain.begin(run_id, str(rows[0][1]))
        add = """
            INSERT INTO planner_journal (run_id, seq, schema, fact, link, salt)
            VALUES (:run_id, :seq, 1, :fact, :link, :salt)
        """
        steps: list[Any] = [
            ("DELETE FROM planner_journal WHERE run_id = :run_id", {"run_id": run_id})
        ]
        for fact in change([str(fact) for fact, _ in rows]):
            seq = chain.number
            chain = chain.after(fact)
            values = {"run_id": run_id, "seq": seq, "fact": fact, "link": chain.link}
            steps.append((add, {**values, "salt": None if seq else chain.salt}))
        await opened.database.transact(*steps)


async def length(store: str, run_id: str) -> int:
    """Count the facts of a run."""
    async with Runs.connect(store) as runs:
        return len((await runs.load(run_id)).facts)


async def test_what_was_written_is_verified(
    store: str, tmp_path: Path, heads: Path
) -> None:
    """Over pauses, decisions and lives; each pause and end has a head, and nothing in it is a text."""
    await drive(store, tmp_path, "a", "b")
    lines = kept(heads).splitlines()
    assert len(lines) == len(set(lines)) == 4
    assert await verified(store, heads) == Verified(journals=2)
    assert (await verified(store)).unseen == ("a", "b")


async def test_a_changed_fact_is_named(store: str, tmp_path: Path, heads: Path) -> None:
    """By its place, with and without heads."""
    await drive(store, tmp_path, "a", "b")
    change = "UPDATE planner_journal SET fact = REPLACE(fact, 'pay', 'keep') WHERE run_id = 'a' AND seq = 2"
    await altered(store, change)
    for one in (await verified(store), await verified(store, heads)):
        assert one.defects == {"a": f"fact 2 {NOT_WRITTEN}"}


@pytest.mark.parametrize(
    ("statements", "defect"),
    [
        (["DELETE FROM planner_journal WHERE seq = 3"], "fact 3 was left out"),
        (["DELETE FROM planner_journal WHERE seq = 0"], "fact 0 was left out"),
        (
            [
                "DELETE FROM planner_journal WHERE seq = 3",
                "UPDATE planner_journal SET seq = -seq WHERE seq > 3",
                "UPDATE planner_journal SET seq = -seq - 1 WHERE seq < 0",
            ],
            f"fact 3 {NOT_WRITTEN}",
        ),
        (
            [
                "UPDATE planner_journal SET seq = -1 WHERE seq = 3",
                "UPDATE planner_journal SET seq = 3 WHERE seq = 4",
                "UPDATE planner_journal SET seq = 4 WHERE seq = -1",
            ],
            f"fact 3 {NOT_WRITTEN}",
        ),
        (
            ["UPDATE planner_journal SET schema = 1, link = 'x' WHERE seq = 2"],
            f"fact 2 {NOT_WRITTEN}",
        ),
    ],
    ids=["left out", "the first", "closed up", "exchanged", "link"],
)
@on_sqlite
async def test_a_fact_that_is_elsewhere_or_gone_is_named(
    store: str, tmp_path: Path, statements: list[str], defect: str
) -> None:
    """The first one of the journal."""
    await drive(store, tmp_path, "a")
    await altered(store, *statements)
    assert (await verified(store)).defects == {"a": defect}


@on_sqlite
async def test_a_fact_of_another_run_is_named(store: str, tmp_path: Path) -> None:
    """Put in the place of the same fact of a run with the same goal."""
    await drive(store, tmp_path, "a", "b")
    put = """
        UPDATE planner_journal SET (fact, link) = (
            SELECT fact, link FROM planner_journal WHERE run_id = 'b' AND seq = 4
        ) WHERE run_id = 'a' AND seq = 4
    """
    await altered(store, put)
    assert (await verified(store)).defects == {"a": f"fact 4 {NOT_WRITTEN}"}


async def test_the_end_of_a_journal_is_missed(
    store: str, tmp_path: Path, heads: Path
) -> None:
    """A journal that was cut is whole by its links; its head says how long it was."""
    await drive(store, tmp_path, "a")
    number = await length(store, "a")
    await altered(store, f"DELETE FROM planner_journal WHERE seq >= {number - 2}")
    assert (await verified(store)).defects == {}
    defect = f"fact {number - 2} was left out: a head has {number} facts"
    assert (await verified(store, heads)).defects == {"a": defect}


@on_sqlite
async def test_whoever_computes_the_links_anew_is_found_by_the_heads(
    store: str, tmp_path: Path, heads: Path
) -> None:
    """The first head that differs says between which facts; facts before a right head are not named."""
    await drive(store, tmp_path, "a")
    number = await length(store, "a")
    first, _ = sorted(next(iter(heads_in(kept(heads)).values())))

    def change(facts: list[str]) -> list[str]:
        facts[first] = facts[first].replace("}", ' ,"by":"eve"}', 1)
        return facts

    await written_anew(store, "a", change)
    assert (await verified(store)).defects == {}
    defect = f"one of the facts {first} to {number - 1} is not that of a head: all after it was written anew"
    assert (await verified(store, heads)).defects == {"a": defect}


@on_sqlite
async def test_a_run_that_is_missing_is_named(
    store: str, tmp_path: Path, heads: Path
) -> None:
    """By the digest of its name; a run that was deleted by command is not."""
    await drive(store, tmp_path, "a", "b")
    async with Runs.connect(store) as runs:
        await runs.delete("a")
    assert await verified(store, heads) == Verified(journals=1, deleted=1)
    tables = ("journal", "approvals", "notices", "runs")
    await altered(store, *(f"DELETE FROM planner_{table}" for table in tables))
    run = Chain.begin("b").run
    missing = "its journal is missing, and no deletion is noted"
    assert (await verified(store, heads)).defects == {run: missing}


@on_sqlite
async def test_a_deletion_after_a_change_is_named(
    store: str, tmp_path: Path, heads: Path
) -> None:
    """A deleted run keeps the number and the last link of its journal."""
    await drive(store, tmp_path, "a", "b")
    await written_anew(store, "a", lambda facts: facts[:-1])
    async with Runs.connect(store) as runs:
        await runs.delete("a")
        await runs.delete("b")
    defect = "it was deleted, and its journal was not that of its heads"
    run = Chain.begin("a").run
    assert (await verified(store, heads)).defects == {run: defect}


async def test_what_was_forgotten_still_verifies(
    store: str, tmp_path: Path, heads: Path
) -> None:
    """Text and salt are gone, the links stay; one that is changed then is named."""
    await drive(store, tmp_path, "a")
    async with Runs.connect(store) as runs, opened_store(store) as opened:
        await runs.retain(journals=timedelta(days=7))
        (record,) = await runs.list()
        await apply_retention(opened, now=record.updated_at + 8 * 86_400)
        texts = (
            "SELECT COUNT(*) FROM planner_journal WHERE fact <> '' OR salt IS NOT NULL"
        )
        assert await opened.database.transact((texts, {})) == [[(0,)]]
    assert await verified(store, heads) == Verified(journals=1)
    last = "UPDATE planner_journal SET link = 'x' WHERE seq = (SELECT MAX(seq) FROM planner_journal)"
    await altered(store, last)
    assert "is not that of a head" in (await verified(store, heads)).defects["a"]


@on_sqlite
async def test_an_archive_is_verified_without_a_store(
    store: str, tmp_path: Path, heads: Path
) -> None:
    """And in the store into which it is imported, which goes on with the chain."""
    await drive(store, tmp_path, "a")
    known = heads_in(kept(heads))
    async with opened_store(store) as opened:
        text = await export_run(opened, "a")
    assert verify_archive(text, known) == Verified(journals=1)
    other = str(tmp_path / "other.db")
    async with opened_store(other) as opened:
        await import_run(opened, text)
        assert await verify_store(opened, known) == Verified(journals=1)

    document = json.loads(text)
    del document["facts"][3]
    shorter = verify_archive(json.dumps(document), known)
    assert shorter.defects == {"a": f"fact 3 {NOT_WRITTEN}"}
    document = json.loads(text)
    del document["facts"][-1]
    shorter = verify_archive(json.dumps(document), known)
    assert shorter.defects == {"a": f"fact {len(document['facts'])} was left out"}
    document = json.loads(text)
    document["facts"].append(document["facts"][-1])
    number = len(document["facts"]) - 1
    longer = verify_archive(json.dumps(document), known)
    assert longer.defects == {"a": f"fact {number} {NOT_WRITTEN}"}


@on_sqlite
async def test_a_fork_and_a_cancelled_run_have_chains_of_their_own(
    store: str, tmp_path: Path
) -> None:
    """A run that another process cancels goes on with the chain of its worker."""
    await drive(store, tmp_path, "a")
    async with open_runs(store, grace_seconds=0) as runs:
        await runs.fork("a", at=0, new_run_id="b")
        made = world(tmp_path / "effects", [PAY])
        await (await runs.start(*made, GOAL, run_id="c")).result()
        await runs.submit(GOAL, run_id="d")
        await runs.cancel("c")
        await runs.cancel("d")
    assert await verified(store) == Verified(journals=4, unseen=("a", "b", "c", "d"))


def pem_of(key: Any) -> tuple[str, str]:
    """Write a private key and its public one as PEM."""
    kind = serialization.PrivateFormat.PKCS8
    plain = serialization.NoEncryption()
    private = key.private_bytes(serialization.Encoding.PEM, kind, plain)
    public = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return private.decode(), public.decode()


@on_sqlite
async def test_only_signed_heads_count_for_an_auditor(
    store: str, tmp_path: Path, heads: Path
) -> None:
    """Who has the public key alone; heads without a signature, or with that of another head or key, say nothing."""
    private, public = pem_of(Ed25519PrivateKey.generate())
    await drive(store, tmp_path, "a", heads_key=private)
    known = heads_in(kept(heads), verifier_of(public))
    assert known == heads_in(kept(heads))
    async with opened_store(store) as opened:
        assert await verify_store(opened, known) == Verified(journals=1)
    _, other = pem_of(Ed25519PrivateKey.generate())
    assert heads_in(kept(heads), verifier_of(other)) == {}
    head = Chain.begin("b").after("x").head
    signature = kept(heads).split()[0].rpartition(".")[2]
    for text in (head, f"{head}.{signature}", f"{head}.{'A' * 86}"):
        assert heads_in(text, verifier_of(public)) == {}
    assert heads_in(signer_of(private)(head), verifier_of(public)) == heads_in(head)


@pytest.mark.parametrize(
    "key",
    ["", "x", pem_of(generate_private_key(SECP256R1()))[0]],
    ids=["none", "no PEM", "P-256"],
)
def test_another_key_is_refused(key: str) -> None:
    """Of another kind, or none."""
    with pytest.raises(PlannerInvalidConfigurationError, match="Ed25519"):
        signer_of(key)
    with pytest.raises(PlannerInvalidConfigurationError, match="Ed25519"):
        verifier_of(key)


@on_sqlite
async def test_heads_that_cannot_be_kept_are_kept_later(
    store: str, tmp_path: Path
) -> None:
    """The notice is tried again, and says why."""
    made = world(tmp_path / "effects", [say("Done.")])
    async with open_runs(store, heads=tmp_path) as runs:
        await (await runs.start(*made, GOAL, run_id="a")).result()
    async with Runs.connect(store) as client:
        (notice,) = await client.notices("a")
    assert "heads cannot be kept" in notice.problem
    assert notice.next_at is not None


@on_sqlite
async def test_a_notice_has_the_head(store: str, tmp_path: Path) -> None:
    """For a webhook or a listener, which keeps it elsewhere."""
    notices: list[Any] = []
    made = world(tmp_path / "effects", [say("Done.")])
    async with open_runs(store, on_ended=notices.append) as runs:
        await (await runs.start(*made, GOAL, run_id="a")).result()
    (notice,) = notices
    (known,) = heads_in(json.dumps(notice.as_dict())).values()
    assert {*known} == {await length(store, "a")}
