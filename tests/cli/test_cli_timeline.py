"""A kept run that is written as a page."""

from pathlib import Path

import pytest

from support.command_line import Command
from support.durable_shop import RUN, STORE, till

__all__ = ["till"]

pytestmark = pytest.mark.usefixtures("till")


def test_a_run_is_written_as_a_page(command: Command, here: Path) -> None:
    """``--html`` writes the timeline of a kept run beside what is printed, with its status in the store."""
    assert command(*RUN).code == 4
    shown = command("runs", "show", "order-7", *STORE, "--html", "run.html")
    assert shown.code == 0
    assert "Written: run.html" in shown.err
    page = (here / "run.html").read_text("utf-8")
    assert '<span class="chip poor">paused</span>' in page
    assert "shop-refund" in page
    lost = command("runs", "show", "order-7", *STORE, "--html", "none/run.html")
    assert lost.code == 2
    assert "--html none/run.html cannot be written" in lost.err
