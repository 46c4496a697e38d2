"""A worker that posts notices: the URL on the command line or in the environment, the key in the environment alone."""

import base64
import hashlib
import hmac

import pytest

from support.command_line import Command
from support.durable_shop import APP, CALL, RUN, STORE, till
from support.webhook import WebhookServer

__all__ = ["till"]

pytestmark = pytest.mark.usefixtures("till")


@pytest.mark.parametrize("place", ["option", "environment"])
def test_a_worker_posts_signed_notices(
    place: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --once, too: it posts the runs that it has driven to their end before it leaves."""
    monkeypatch.setenv("PLANNER_EXT_NOTIFY_KEY", "k3y")
    assert command(*RUN).code == 4
    assert command("approvals", "approve", CALL, *STORE).code == 0
    with WebhookServer() as server:
        option = ("--notify", server.url) if place == "option" else ()
        if place == "environment":
            monkeypatch.setenv("PLANNER_EXT_NOTIFY", server.url)
        worked = command("worker", *STORE, *APP, "--once", *option)
        (received,) = server.wait_for(1)
    assert worked.code == 0
    assert "s3cret-path" not in worked.err
    assert (
        received.body["run_id"],
        received.body["event"],
        received.body["status"],
    ) == (
        "order-7",
        "ended",
        "answered",
    )
    assert received.body["where"].endswith("runs.db")
    signed = f"{received.headers['webhook-id']}.{received.headers['webhook-timestamp']}.{received.text}".encode()
    mac = base64.b64encode(hmac.new(b"k3y", signed, hashlib.sha256).digest()).decode()
    assert received.headers["webhook-signature"] == f"v1,{mac}"


def test_a_worker_says_what_troubles_it(command: Command) -> None:
    """Not only what happens to runs: a notice that was not delivered, a store or a heartbeat that fails, too."""
    assert command(*RUN).code == 4
    assert command("approvals", "approve", CALL, *STORE).code == 0
    with WebhookServer([500]) as server:
        worked = command("worker", *STORE, *APP, "--once", "--notify", server.url)
    assert worked.code == 0
    assert (
        "The notice that run order-7 ended was not delivered, it is tried again"
        in " ".join(worked.err.split())
    )


def test_a_url_that_cannot_be_used_is_refused(command: Command) -> None:
    """By the option's name, and without the URL: it may be a secret."""
    refused = command(
        "worker", *STORE, *APP, "--once", "--notify", "hooks.example/s3cret"
    )
    assert refused.code == 2
    assert "notify must be a URL that begins with https:// or http://" in " ".join(
        refused.err.split()
    )
    assert "s3cret" not in refused.err
