"""What waits, and what was decided, is chosen by filters in the store, on both databases."""

import json
from pathlib import Path
from typing import Any

import pytest

from planner_ext import Deny
from planner_ext.durable import Approvals, Runs, StoreError
from planner_ext.durable.store import open_database
from planner_ext.testing import call, calls, say
from support.durable import open_runs, world


async def leave(store: str, tmp_path: Path) -> None:
    """Leave three payments in one run, the first two of which are equal."""
    batch = calls(
        *(
            call("shop-pay", {"amount": amount}, id=f"pay{place}")
            for place, amount in enumerate((5, 5, 6))
        )
    )
    planner, kernel = world(tmp_path / "effects", [batch, say("Done.")])
    async with open_runs(store) as runs:
        handle = await runs.start(planner, kernel, "Pay Zoë.", run_id="zoe")
        assert (await handle.result()).status == "paused"
    database = await open_database(store)
    tags = "UPDATE planner_runs SET tags = :tags WHERE run_id = 'zoe'"
    await database.transact((tags, {"tags": "\nnight\n\nten\n"}))
    await database.close()


async def test_calls_and_decisions_are_chosen_by_filters(
    store: str, tmp_path: Path
) -> None:
    """Each filter alone, and the count of what it lists; equal calls are counted; a page begins behind a call."""
    await leave(store, tmp_path)
    ids = ["zoe/0/pay0", "zoe/0/pay1", "zoe/0/pay2"]
    async with Approvals.connect(store) as approvals:

        async def listed(**filters: Any) -> list[str]:
            found = await approvals.pending("zoe", **filters)
            assert await approvals.count("zoe", **filters) == len(found)
            return [one.id for one in found]

        assert await listed(text="zoë") == ids
        assert await listed(text="PAY2") == ids[2:]
        assert await listed(text="100%") == []
        assert await listed(function="shop-pay") == ids
        assert await listed(function="shop") == []
        assert await listed(role="treasurer") == []
        assert await listed(tag="night") == ids
        assert await listed(tag="nigh") == []
        assert await listed(after=ids[0]) == ids[1:]
        assert await listed(expires_before=9e9) == []
        equal = await approvals.equal_calls()
        assert [await listed(equal_to=one) for one in equal if equal[one] == 2] == [
            ids[:2]
        ]
        await approvals.decide(ids[1], Deny('"by": "bob"', by="ann"))
        assert await listed(after=ids[0]) == ids[2:]

        async def decided(**filters: Any) -> list[str]:
            found = await approvals.decisions("zoe", **filters)
            assert await approvals.count_decisions("zoe", **filters) == len(found)
            return [one.id for one in found]

        assert await decided() == await decided(by="ann", kind="deny") == [ids[1]]
        assert await decided(by="bob") == await decided(kind="approve") == []
        assert await decided(decided_before=1.0) == []
        assert await decided(decided_after=1.0, tag="ten") == [ids[1]]
        with pytest.raises(StoreError, match="role must be a text"):
            await listed(role=7)
        with pytest.raises(TypeError, match="There is no filter 'rolle' of calls"):
            await listed(rolle="x")


async def test_the_address_of_the_inbox_is_the_last_one(store: str) -> None:
    """It is stored once for all workers; anything but a web address is refused."""
    async with Runs.connect(store) as runs:
        await runs.set_inbox("http://one.example/")
        await runs.set_inbox("https://two.example")
        with pytest.raises(StoreError, match="must begin with https://"):
            await runs.set_inbox("javascript:alert(1)")
    database = await open_database(store)
    statement = "SELECT value FROM planner_settings WHERE name = 'inbox'"
    ((row,),) = await database.transact((statement, {}))
    await database.transact(("DELETE FROM planner_settings WHERE name = 'inbox'", {}))
    await database.close()
    assert json.loads(str(row[0])) == "https://two.example"
