"""The page of a run in the inbox."""

from pathlib import Path
from typing import Any

from planner_ext.durable import Runs
from support.durable import effects_in, see_through
from support.inbox import inbox, visitor_at


async def status_of(store: str) -> str:
    async with Runs.connect(store) as runs:
        return (await runs.load("a")).record.status


async def test_a_run_has_its_timeline_and_what_waits_of_it(store: str) -> None:
    """The timeline is part of the page, with the status in the store; what waits leads to its decision."""
    async with inbox(store) as base, visitor_at(base, "ann") as ann:
        assert (await ann.get("runs/a")).status_code == 200
        assert '<article class="run">' in ann.page
        assert '<span class="chip poor">paused</span>' in ann.page
        assert "approvals/a%2F1%2Fpay" in ann.page
        assert ann.page.count("<h1") == 1
        assert " style=" not in ann.page


async def test_a_run_is_cancelled_by_a_confirmed_form(
    store: str, tmp_path: Path
) -> None:
    """It ends under the visitor's name and reason, nothing waits any more, and no worker continues it."""
    async with inbox(store) as base, visitor_at(base, "ann") as ann:
        await ann.get("runs/a")
        response = await ann.send(
            "runs/a/cancel", {"confirm": "yes", "reason": "Wrong <b>order</b>."}
        )
        assert (
            response.status_code == 200
            and "Cancelled by ann: Wrong &lt;b&gt;order&lt;/b&gt;." in response.text
        )
        assert "Cancel this run" not in response.text
        assert "Nothing waits." in (await ann.get("")).text
        assert (
            await ann.send("runs/a/cancel", {"confirm": "yes", "form_token": ""})
        ).status_code == 403
    assert await status_of(store) == "stopped"
    await see_through(store, tmp_path / "effects", "a")
    assert not any(line.startswith("pay") for line in effects_in(tmp_path / "effects"))


async def test_a_run_is_not_cancelled_by_mistake(store: str) -> None:
    """Without the confirmation nothing happens, and the reason stays; a run that ended cannot be cancelled."""
    async with inbox(store) as base, visitor_at(base) as ann:
        await ann.get("runs/a")
        response = await ann.send("runs/a/cancel", {"reason": "Hm <i>"})
        assert response.status_code == 409 and 'value="Hm &lt;i&gt;"' in response.text
        assert await status_of(store) == "paused"
        token = ann.hidden("form_token")
        await ann.send("runs/a/cancel", {"confirm": "yes"})
        response = await ann.send(
            "runs/a/cancel", {"confirm": "yes", "form_token": token}
        )
        assert response.status_code == 409 and "had ended before" in response.text
        assert (
            await ann.send("runs/b/cancel", {"confirm": "yes", "form_token": token})
        ).status_code == 404


async def test_a_run_is_cancelled_by_whom_the_hook_lets_in(store: str) -> None:
    """The application's hook is asked about the cancellation, with the name that was typed beside the token."""
    asked: list[Any] = []

    def authorize(request: Any) -> bool | str:
        if request.action != "decide":  # the list asks what the visitor may decide
            asked.append(
                (
                    request.action,
                    request.by,
                    request.run_id,
                    request.call,
                    request.verified,
                )
            )
        return True if request.by == "ann" else "only ann"

    async with (
        inbox(store, authorize=authorize) as base,
        visitor_at(base, "eve") as eve,
        visitor_at(base) as ann,
    ):
        await eve.get("runs/a")
        response = await eve.send("runs/a/cancel", {"confirm": "yes", "reason": "x"})
        assert response.status_code == 409 and "only ann" in response.text
        assert (await status_of(store), asked) == (
            "paused",
            [("cancel", "eve", "a", None, False)],
        )
        await ann.get("runs/a")
        assert (await ann.send("runs/a/cancel", {"confirm": "yes"})).status_code == 200
    assert await status_of(store) == "stopped"
