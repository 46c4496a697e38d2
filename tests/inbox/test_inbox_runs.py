"""The page of a run in the inbox."""

from support.inbox import inbox, visitor_at


async def test_a_run_has_its_timeline_and_what_waits_of_it(store: str) -> None:
    """The timeline is part of the page, with the status in the store; what waits leads to its decision."""
    async with inbox(store) as base, visitor_at(base, "ann") as ann:
        assert (await ann.get("runs/a")).status_code == 200
        assert '<article class="run">' in ann.page
        assert '<span class="chip poor">paused</span>' in ann.page
        assert "approvals/a%2F1%2Fpay" in ann.page
        assert ann.page.count("<h1") == 1
        assert " style=" not in ann.page
