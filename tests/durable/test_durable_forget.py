"""A person's texts are taken out of a store: no file of the database contains them any more."""

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Thread
from typing import Any

import psycopg
import pytest
from semantic_kernel.functions import KernelArguments

from planner_ext import Approve
from planner_ext.budgets import BudgetStore, SharedBudget
from planner_ext.durable import Approvals, Grant, RunConflictError, Runs
from planner_ext.testing import call, say
from support.budgets import opened, shared
from support.durable import GOAL, PAY, open_runs, world

PERSON = "user-7"
MARK = "Wilhelmine"
"""Stands in every text of the person."""
FOLDER = """
    SELECT current_setting('data_directory') || '/base/' || oid FROM pg_database WHERE datname = current_database()
"""


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path, which: str) -> Iterator[str]:
    """Name a store whose files are read."""
    if which == "sqlite":
        yield str(tmp_path / "runs.db")
    else:
        yield request.getfixturevalue("postgres_url")


both = pytest.mark.parametrize("which", ["sqlite", "postgresql"])


def files_of(store: str) -> list[Path]:
    """List the files of a database: of a server those of its tables, without its log."""
    if "://" not in store:
        return sorted(Path(store).parent.glob("runs.db*"))
    with psycopg.connect(store) as connection:
        row = connection.execute(FOLDER).fetchone()
    assert row is not None
    return sorted(Path(row[0]).iterdir())


def found_in(store: str, *texts: str) -> list[str]:
    """List the files of a store that contain one of the texts."""
    if "://" in store:
        with psycopg.connect(store, autocommit=True) as connection:
            connection.execute("CHECKPOINT")
    return [
        f"{path.name}: {text}"
        for path in files_of(store)
        for text in texts
        if text.encode() in path.read_bytes()
    ]


def told(amount: int) -> Any:
    """Pay, then answer with the person's name."""
    return [
        call("shop-pay", {"amount": amount}, id="pay"),
        say(f"Paid {MARK} {'x' * 3000}"),
    ]


async def live(store: str, tmp_path: Path, name: str, *tags: str, script: Any) -> None:
    """Drive a run to its end, with a person's yes."""
    async with open_runs(store) as runs:
        goal = f"Refund {MARK * 400}." if PERSON in tags else GOAL
        made = world(tmp_path / "effects", script)
        handle = await runs.start(*made, goal, run_id=name, tags=tags)
        await handle.result()
        async with Approvals.connect(store) as approvals:
            for item in await approvals.pending():
                await approvals.decide(item.id, Approve(by="ann"))
        await handle.result()


@both
async def test_no_file_contains_a_text_of_the_person(
    store: str, tmp_path: Path
) -> None:
    """Goal, replies, arguments, tags and the name of the run are gone; runs of others are whole."""
    for number in range(30):
        tags = [PERSON] if number % 3 == 0 else ["user-77"]
        script = told(number) if number % 3 == 0 else [PAY, say("Paid." * 300)]
        name = f"{MARK}-{number}" if number % 3 == 0 else f"other-{number}"
        await live(store, tmp_path, name, *tags, script=script)
    assert found_in(store, MARK)
    async with Runs.connect(store) as runs:
        assert await runs.forget(PERSON) == 10
        assert await runs.count() == 20
        assert found_in(store, MARK, f"{PERSON}\n", f'{PERSON}"') == []
        assert (await runs.result("other-1")).final_answer == "Paid." * 300
        assert await runs.forget(PERSON) == 0


@both
async def test_deleting_without_rewriting_leaves_the_rows_gone(
    store: str, tmp_path: Path
) -> None:
    """The files may keep copies until they are rewritten later."""
    await live(store, tmp_path, "a", PERSON, script=told(1))
    async with Runs.connect(store) as runs:
        assert await runs.forget(PERSON, rewrite=False) == 1
        assert await runs.count() == 0
        await runs.forget(PERSON)
    assert found_in(store, MARK) == []


@both
async def test_a_run_that_has_not_ended_is_refused(store: str, tmp_path: Path) -> None:
    """Nothing is forgotten; the message says how to end it."""
    await live(store, tmp_path, "a", PERSON, script=told(1))
    async with open_runs(store) as runs:
        made = world(tmp_path / "effects", [PAY])
        await (await runs.start(*made, GOAL, run_id="b", tags=[PERSON])).result()
        with pytest.raises(
            RunConflictError, match=r"1 run .* not ended.* --tag user-7"
        ):
            await runs.forget(PERSON)
        assert await runs.count() == 2


@both
async def test_grants_of_the_person_go(store: str, tmp_path: Path) -> None:
    """What was given in one of the runs, or names the person, answers nothing any more."""
    async with open_runs(store) as runs:
        for name, tag in (("a", PERSON), ("b", "user-77")):
            made = world(tmp_path / "effects", [PAY, say("Paid.")])
            handle = await runs.start(*made, GOAL, run_id=name, tags=[tag])
            await handle.result()
            async with Approvals.connect(store) as approvals:
                (item,) = await approvals.pending()
                grant = Grant(expires_in=3600)
                await approvals.decide(item.id, Approve(by="ann"), grant=grant)
            await handle.result()
            async with Approvals.connect(store) as approvals:
                for one in await approvals.grants():
                    if name == "a":
                        assert one.run_id == "a"
                        await runs.forget(PERSON)
                assert len(await approvals.grants()) == (0 if name == "a" else 1)


def forget_now(store: str) -> None:
    """Forget the person while a run is under way here, as another process does."""

    async def forget() -> None:
        async with Runs.connect(store) as runs:
            await runs.forget(PERSON, rewrite=False)

    other = Thread(target=asyncio.run, args=(forget(),))
    other.start()
    other.join()


def budget_of(budgets: BudgetStore, **more: Any) -> SharedBudget:
    """Make a budget for each user."""
    return shared(
        budgets,
        "per user",
        key=lambda arguments: arguments["user"],
        max_iterations=3,
        **more,
    )


async def asked(
    store: str, tmp_path: Path, budgets: BudgetStore, name: str, **more: Any
) -> Any:
    """Drive a run of the person that makes as many requests as it may."""
    made = world(
        tmp_path / "effects",
        lambda _: call("shop-label", {"order": 1}),
        shared_budgets=[budget_of(budgets, **more)],
        max_iterations=2,
    )
    async with open_runs(store) as runs:
        arguments = KernelArguments(user=PERSON)
        handle = await runs.start(
            *made, GOAL, run_id=name, tags=[PERSON], arguments=arguments
        )
        return await handle.result()


@both
@pytest.mark.parametrize("per", ["day", None])
async def test_forgetting_gives_nobody_his_money_back(
    store: str, tmp_path: Path, per: str | None
) -> None:
    """What was used in a running period stays used, under a digest; no file has the key."""
    async with opened(store) as budgets:
        first = await asked(store, tmp_path, budgets, "a", per=per)
        assert first.iterations == 2
        async with Runs.connect(store) as runs:
            await runs.forget(PERSON)
        assert found_in(store, PERSON) == []
        (row,) = await budgets.usage()
        assert row.key.startswith("forgotten:")
        assert row.iterations == 2
        second = await asked(store, tmp_path, budgets, "b", per=per)
        assert (second.iterations, second.limit) == (1, "per user: max_iterations")
        async with Runs.connect(store) as runs:
            await runs.forget(PERSON)
        third = await asked(store, tmp_path, budgets, "c", per=per)
        assert (third.iterations, third.limit) == (0, "per user: max_iterations")
        assert [row.iterations for row in await budgets.usage()] == [3]


@both
async def test_ended_periods_of_the_person_go(store: str, tmp_path: Path) -> None:
    """Their digest would serve nobody."""
    async with opened(store) as budgets:
        await asked(store, tmp_path, budgets, "a")
        (row,) = await budgets.usage()
        past = (datetime.now(UTC) - timedelta(days=3)).strftime("%Y-%m-%d")
        move = "UPDATE planner_budgets SET period = :past WHERE period = :period"
        step = (move, {"past": past, "period": row.period})
        await budgets.perform(budgets.transact(step))
        async with Runs.connect(store) as runs:
            await runs.forget(PERSON)
        assert await budgets.usage() == []


@both
async def test_a_run_under_way_is_charged_to_the_digest(
    store: str, tmp_path: Path
) -> None:
    """The key of an untagged run is forgotten between two of its requests: each is charged, and its end, too."""
    async with opened(store) as budgets:
        replies = 0

        def reply(_: object) -> Any:
            nonlocal replies
            replies += 1
            if replies == 2:
                forget_now(store)
            return (
                say("Done.") if replies == 3 else call("shop-label", {"order": replies})
            )

        made = world(
            tmp_path / "effects",
            reply,
            shared_budgets=[budget_of(budgets, max_total_tokens=10_000)],
        )
        async with open_runs(store) as runs:
            arguments = KernelArguments(user=PERSON)
            handle = await runs.start(*made, GOAL, arguments=arguments)
            result = await handle.result()
        (row,) = await budgets.usage()
        assert row.key.startswith("forgotten:")
        assert (row.iterations, row.tokens) == (3, result.usage.total_tokens)
        counted = "SELECT COUNT(*) FROM planner_budget_runs"
        (rows,) = await budgets.perform(budgets.transact((counted, {})))
        assert rows[0] == (0,)


@both
async def test_a_key_that_is_forgotten_at_the_end_of_a_run_is_settled(
    store: str, tmp_path: Path
) -> None:
    """The tokens of the last reply are charged, and nothing stays reserved."""
    async with opened(store) as budgets:

        def reply(_: object) -> Any:
            forget_now(store)
            return say("Done.")

        made = world(
            tmp_path / "effects",
            reply,
            shared_budgets=[budget_of(budgets, max_total_tokens=10_000)],
        )
        async with open_runs(store) as runs:
            arguments = KernelArguments(user=PERSON)
            result = await (await runs.start(*made, GOAL, arguments=arguments)).result()
        (row,) = await budgets.usage()
        assert (row.iterations, row.tokens) == (1, result.usage.total_tokens)
