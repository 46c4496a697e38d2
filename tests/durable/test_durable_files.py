"""A store's files: for their owner's eyes alone, and named where they cannot be used."""

import os
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from planner_ext import Approve
from planner_ext.durable import (
    ApprovalRefusedError,
    Approvals,
    Runs,
    StoreError,
    sqlite,
)
from planner_ext.errors import PlannerInvalidConfigurationError
from support.durable import GOAL, PAY, open_runs, world
from support.processes import Lives


@pytest.fixture(params=[0o000, 0o022, 0o077, 0o777], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    """Take this umask for a test."""
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.mark.parametrize("connect", [Runs.sqlite, Runs.connect, Approvals.connect])
async def test_a_store_that_was_not_opened_says_how(
    connect: Any, tmp_path: Path
) -> None:
    """Without ``async with`` the first use is refused, with the line to write; no file is made."""
    store = connect(tmp_path / "runs.db")
    with pytest.raises(
        StoreError, match=rf"async with \w+\.{connect.__name__}\(\.\.\.\) as"
    ):
        await store.count()
    assert os.listdir(tmp_path) == []


def test_a_store_is_opened_and_not_constructed() -> None:
    """``Runs(path)`` says which functions open a store."""
    path: Any = "runs.db"
    with pytest.raises(
        PlannerInvalidConfigurationError, match=r"Runs\.sqlite\(path\).*got 'runs\.db'"
    ):
        Runs(path)


async def test_values_in_each_others_place_are_refused_by_name(tmp_path: Path) -> None:
    """A kernel for the planner, and a pending call for its id, are refused before the store is asked."""
    planner, kernel = world(tmp_path / "effects", [PAY])
    async with open_runs(tmp_path / "runs.db") as runs:
        with pytest.raises(
            PlannerInvalidConfigurationError, match=r"planner must be .* got a Kernel"
        ):
            await runs.start(kernel, planner, GOAL)  # pyright: ignore[reportArgumentType]  (swapped, on purpose)
        assert await runs.count() == 0
        await (await runs.start(planner, kernel, GOAL)).result()
        (waiting,) = await runs.approvals().pending()
        with pytest.raises(
            ApprovalRefusedError,
            match=r"approval_id .* got a PendingApproval\. Pass its \.id",
        ):
            await runs.approvals().decide(waiting, Approve())  # pyright: ignore[reportArgumentType]  (on purpose)


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize("linked", [False, True], ids=["file", "link"])
async def test_a_store_and_its_side_files_are_their_owners_alone(
    linked: bool, tmp_path: Path
) -> None:
    """Mode 0600 under any umask: the file, its log, its index and the worker's lock."""
    path = tmp_path / "runs.db"
    if linked:
        path.symlink_to(tmp_path / "elsewhere.db")
    async with open_runs(path) as runs:
        await (
            await runs.start(*world(tmp_path / "effects", [PAY]), GOAL, run_id="a")
        ).result()
        modes = [
            entry.stat().st_mode
            for entry in os.scandir(tmp_path)
            if entry.name != "effects"
        ]
        assert len(modes) == 4 + linked
        assert {stat.S_IMODE(mode) for mode in modes} == {0o600}


async def made(path: Path) -> None:
    """Make a store with a run that waits."""
    async with Runs.sqlite(path) as runs:
        await (
            await runs.start(*world(path.parent / "effects", [PAY]), GOAL, run_id="a")
        ).result()


def statement(*texts: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with closing(sqlite3.connect(path)) as database, database:
            database.execute("PRAGMA foreign_keys = OFF")
            for text in texts:
                database.execute(text)
        database.close()

    return damage


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def other(path: Path) -> None:
    path.unlink()
    statement("CREATE TABLE planner_runs (name TEXT)")(path)


GONE = (
    "ALTER TABLE planner_runs RENAME COLUMN goal TO aim",
    "ALTER TABLE planner_approvals RENAME COLUMN call TO cell",
)

DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "text": (
        lambda path: path.write_text("no database, but long enough for a header " * 90),
        "not an SQLite database",
    ),
    "cut in two": (
        lambda path: os.truncate(path, path.stat().st_size // 2),
        "is damaged",
    ),
    "cut to a page": (lambda path: os.truncate(path, 4096), "is damaged"),
    "cut to a header": (
        lambda path: os.truncate(path, 50),
        "damaged|not an SQLite database",
    ),
    "a hole": (
        lambda path: path.write_bytes(
            path.read_bytes()[:4096] + bytes(path.stat().st_size)
        ),
        "is damaged",
    ),
    "a directory": (folder, "it cannot be opened"),
    "another application's": (other, "is not one of planner_ext"),
    "no journal": (statement("DROP TABLE planner_journal"), "lacks planner_journal"),
    "no approvals": (
        statement("DROP TABLE planner_approvals"),
        "lacks planner_approvals",
    ),
    "no runs": (statement("DROP TABLE planner_runs"), "lacks planner_runs"),
    "no schema": (statement("DROP TABLE planner_schema"), "is not one of planner_ext"),
    "a column gone": (statement(*GONE), "refused its tables"),
    "no number": (
        statement("ALTER TABLE planner_schema RENAME COLUMN schema TO n"),
        "refused its tables",
    ),
    "no row": (statement("DELETE FROM planner_schema"), "does not say its schema"),
}


@pytest.mark.parametrize("name", DAMAGES)
async def test_a_damaged_store_is_a_named_error(name: str, tmp_path: Path) -> None:
    """For workers and approvers alike: a `StoreError` that says what is wrong, and the file stays as it is."""
    path, (damage, said) = tmp_path / "runs.db", DAMAGES[name]
    await made(path)
    damage(path)
    before = path.read_bytes() if path.is_file() else b""
    for open_again in (lambda: Runs.sqlite(path), lambda: Approvals.connect(path)):
        with pytest.raises(StoreError, match=said):
            async with open_again() as opened:
                await (
                    opened.list() if isinstance(opened, Runs) else opened.pending("a")
                )
                await (
                    opened.load("a")
                    if isinstance(opened, Runs)
                    else opened.show("a/0/pay")
                )
    if name != "a column gone":  # which is found only once it is asked for
        assert (path.read_bytes() if path.is_file() else b"") == before


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("x" * 300, "File name too long"),
        ("x" * 250, "File name too long|cannot be opened"),
        ("/".join(["y" * 200] * 30) + "/runs.db", "File name too long"),
        ("a\x00b", "NUL"),
        ("nowhere/runs.db", "its folder does not exist"),
    ],
    ids=["long", "long with a lock", "long folders", "NUL", "no folder"],
)
async def test_a_path_that_there_cannot_be_is_a_named_error(
    where: str, said: str, tmp_path: Path
) -> None:
    """Too long, with a NUL character, or in a folder that is not there: one `StoreError`, for looking, too."""
    with pytest.raises(StoreError, match=said):
        async with Runs.sqlite(tmp_path / where):
            pass
    with pytest.raises(StoreError):
        async with Approvals.connect(tmp_path / where):
            pass


def test_a_file_that_may_not_be_read_is_a_named_error(lives: Lives) -> None:
    """The error says: permission denied."""
    code = (
        "import asyncio, os, sys\nfrom planner_ext.durable import Approvals, StoreError\n"
        "if os.geteuid() == 0:\n    os.setgroups([])\n    os.setuid(65534)\n"
        "async def main():\n    async with Approvals.connect(sys.argv[1]):\n        pass\n"
        "try:\n    asyncio.run(main())\nexcept StoreError as error:\n    print(error)\n"
    )
    # Not in pytest's folder, which the next start of pytest closes to others.
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        path = Path(folder) / "runs.db"
        path.touch(0)
        done = lives.run("-c", code, str(path), cwd=Path(folder))
    assert "cannot be opened" in done.stdout, done.stderr


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "9p", "fuse.sshfs"])
async def test_a_network_file_system_is_refused_by_name(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file is made; whoever knows that its locks hold names it, and no other one."""
    mounts = tmp_path / "mountinfo"
    with mounts.open("w") as file:
        device = os.fstat(file.fileno()).st_dev
        file.write(
            f"1 0 0:0 / / rw - ext4 /dev/a rw\n"
            f"2 1 {os.major(device)}:{os.minor(device)} / {tmp_path} rw shared:1 - {kind} server:/x rw\n"
        )
    monkeypatch.setattr(sqlite, "_MOUNTS", mounts)
    trusted = "PLANNER_EXT_TRUSTED_FILE_SYSTEMS"
    monkeypatch.setenv(trusted, "afs")
    with pytest.raises(StoreError, match=rf"network file system \({kind}\).*{trusted}"):
        async with Runs.sqlite(tmp_path / "runs.db"):
            pass
    assert os.listdir(tmp_path) == ["mountinfo"]
    monkeypatch.setenv(trusted, f"afs,{kind}")
    async with Runs.sqlite(tmp_path / "runs.db") as runs:
        assert await runs.count() == 0
