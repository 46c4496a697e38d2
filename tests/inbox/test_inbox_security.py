"""What the inbox refuses: strangers, forged requests, foreign hosts, hostile texts; and what it keeps to itself."""

import logging
import re
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from semantic_kernel.functions import kernel_function

from planner_ext import requires_approval
from planner_ext.core.errors import PlannerExtError
from planner_ext.durable import Approvals
from planner_ext.inbox import Token, app, security
from planner_ext.testing import call, say
from support.inbox import TOKEN, drive, inbox, served, visitor_at
from support.values import each_of

PAY = "approvals/a%2F1%2Fpay"
PAGES = ("", PAY, "runs", "runs/a", "events", "events?of=runs")
FORMS = ("approvals", PAY, "runs/a/cancel", "sign-out")


async def status_of(store: str, id: str = "a/1/pay") -> str:
    async with Approvals.connect(store) as approvals:
        return (await approvals.show(id)).status


async def test_without_a_session_there_is_only_the_sign_in(store: str) -> None:
    """Every page of a stranger is the sign-in page, without a word of what waits."""
    async with inbox(store) as base, visitor_at(base, None) as stranger:
        for path in PAGES:
            response = await stranger.get(path)
            assert response.status_code == 401, path
            assert "<h1>Sign in</h1>" in response.text, path
            assert "shop-pay" not in response.text and "Settle" not in response.text, (
                path
            )


async def test_without_a_session_nothing_is_decided(store: str) -> None:
    """A stranger's form changes nothing."""
    fields = {
        "decision": "approve",
        "item": "0 a/1/pay",
        "form_token": "",
        "fingerprint": "",
    }
    async with inbox(store) as base, visitor_at(base, None) as stranger:
        for path in FORMS:
            assert (await stranger.client.post(path, data=fields)).status_code == 401, (
                path
            )
            assert await status_of(store) == "open", path


async def test_a_wrong_token_does_not_sign_in(
    store: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is refused in words that do not say how wrong it is, and the log has no token."""
    async with inbox(store) as base, visitor_at(base, None) as stranger:
        for token in ("", "guess", TOKEN[:-1], TOKEN + "t", "\N{SNOWMAN}", "%ff"):
            caplog.clear()
            response = await stranger.sign_in("eve", token)
            assert response.status_code == 403, token
            assert "This token is wrong." in response.text, token
            assert "set-cookie" not in response.headers, token
            assert "A sign-in with a wrong token was refused." in caplog.text, token
            assert TOKEN not in caplog.text, token
            assert not token or token not in caplog.text


async def test_tokens_are_not_guessed(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After twenty wrong ones no sign-in is compared for a minute; open sessions continue."""
    now = security.monotonic()
    monkeypatch.setattr(security, "monotonic", lambda: now)
    async with (
        inbox(store) as base,
        visitor_at(base) as ann,
        visitor_at(base, None) as eve,
    ):
        for _ in range(20):
            assert (await eve.sign_in("eve", "guess")).status_code == 403
        for token in ("guess", TOKEN):
            refused = await eve.sign_in("eve", token)
            assert refused.status_code == 429 and "set-cookie" not in refused.headers
            assert "Wait a minute" in refused.text
        assert (await ann.get("runs")).status_code == 200
        now += 61
        assert (await eve.sign_in("eve")).status_code == 200


async def test_a_name_is_needed_to_sign_in(store: str) -> None:
    """A blank, endless or invisible name is refused, since decisions are recorded under it."""
    async with inbox(store) as base, visitor_at(base, None) as stranger:
        for name in ("", "   ", "a" * 201, "a\x00b", "a\u202eb"):
            response = await stranger.sign_in(name)
            assert response.status_code == 422, name
            assert "set-cookie" not in response.headers, name


async def test_a_fixed_name_cannot_be_chosen(store: str) -> None:
    """With a user, everyone who has the token decides under that name."""
    async with (
        inbox(store, sign_in=Token(TOKEN, user="ann")) as base,
        visitor_at(base, "mallory") as visitor,
    ):
        assert "<bdi>ann</bdi>" in visitor.page and "mallory" not in visitor.page


def test_a_token_that_can_be_guessed_is_refused() -> None:
    """A short token is an error; a token that is made has 256 bits."""
    with pytest.raises(PlannerExtError, match="at least 20 characters"):
        Token("secret")
    assert len(Token().value) == 43 and Token().value != Token().value


@each_of("options", [{"user": ""}, {"user": "a\u202eb"}, {"user": "a" * 201}])
def test_a_fixed_name_is_one_that_could_be_entered(options: dict[str, str]) -> None:
    """Otherwise sign-in would be impossible."""
    with pytest.raises(
        PlannerExtError,
        match="user must be a name of 1 to 200 visible characters; got ",
    ):
        Token(**options)


@each_of(
    "host",
    ["", "https://inbox.example.com", "inbox.example.com:8443", "inbox.example.com/x"],
)
def test_an_allowed_name_is_a_name_alone(host: str) -> None:
    """What no Host header can match is refused at the start, not each request later."""
    with pytest.raises(
        PlannerExtError,
        match=r"must be a name without scheme, port and path, such as inbox\.example",
    ):
        Token(hosts=[host])


async def test_an_address_without_a_page_has_the_navigation(store: str) -> None:
    """For a visitor who is signed in: 404, with the way back; a stranger gets the sign-in."""
    async with (
        inbox(store) as base,
        visitor_at(base) as ann,
        visitor_at(base, None) as stranger,
    ):
        for path in ("nothing", "runs/a/nothing", "approvals"):
            response = await ann.get(path)
            assert (
                response.status_code == 404
                and "There is no such page." in response.text
            )
            assert re.search("<nav.*<bdi>ann</bdi>", response.text, re.DOTALL)
            assert (await stranger.get(path)).status_code == 401


async def test_the_address_with_the_token_does_not_sign_in_by_itself(
    store: str,
) -> None:
    """A preview or prefetch of the printed address opens no session: the form does, with the token in it."""
    async with inbox(store) as base, visitor_at(base, None) as stranger:
        response = await stranger.get(f"sign-in?token={TOKEN}")
        assert response.status_code == 200 and "set-cookie" not in response.headers
        assert stranger.hidden("token") == TOKEN


async def test_the_session_cookie_is_out_of_reach(store: str) -> None:
    """Scripts cannot read it, other sites do not send it, and over TLS it is never sent in clear."""
    for scheme, secure in (("http", False), ("https", True)):
        config = {"x-forwarded-proto": scheme}
        async with inbox(store) as base, visitor_at(base, None) as stranger:
            fields = {"token": TOKEN, "name": "ann"}
            response = await stranger.client.post(
                "sign-in", data=fields, headers=config
            )
            cookie = response.headers["set-cookie"].lower()
            assert (
                "httponly" in cookie
                and "samesite=strict" in cookie
                and "path=/" in cookie
            )
            assert ("secure" in cookie) == secure


async def test_two_inboxes_of_one_machine_keep_their_sessions(store: str) -> None:
    """A browser sends a cookie to every port: signing in to a second inbox ends no session of the first."""
    async with inbox(store) as one, inbox(store) as other, visitor_at(one) as ann:
        form = {"token": TOKEN, "name": "ann"}
        assert (await ann.client.post(f"{other}/sign-in", data=form)).status_code == 303
        assert (await ann.get("")).status_code == 200 and (
            await ann.get(f"{other}/")
        ).status_code == 200


async def test_a_session_ends(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Signing out, or twelve hours, ends a session on the server: the cookie is worth nothing any more."""
    async with inbox(store) as base, visitor_at(base) as ann:
        kept = dict(ann.client.cookies)
        await ann.send("sign-out", {})
        for name, value in kept.items():
            ann.client.cookies.set(name, value)
        assert (await ann.get("")).status_code == 401
        await ann.sign_in()
        now = security.monotonic()
        monkeypatch.setattr(security, "monotonic", lambda: now + 12 * 3600 + 1)
        assert (await ann.get("")).status_code == 401


FORGED: dict[str, tuple[Mapping[str, str], Mapping[str, str]]] = {
    "without a token": ({"form_token": ""}, {}),
    "with another token": ({"form_token": "x" * 43}, {}),
    "from another site": ({}, {"origin": "http://evil.example"}),
    "from a site of the same name at another port": (
        {},
        {"origin": "http://127.0.0.1:1"},
    ),
    "from nowhere": ({}, {"origin": "null"}),
    "from no address": ({}, {"origin": "http://]127.0.0.1"}),
    "that the browser calls cross-site": ({}, {"sec-fetch-site": "cross-site"}),
    "that the browser calls same-site": ({}, {"sec-fetch-site": "same-site"}),
    "under a foreign name": ({}, {"host": "evil.example"}),
}


@pytest.mark.parametrize("path", FORMS)
async def test_a_forged_form_changes_nothing(store: str, path: str) -> None:
    """A form that no page of the visitor's session made is refused, on every route that changes something."""
    async with inbox(store) as base, visitor_at(base) as ann:
        for how, (fields, headers) in FORGED.items():
            await ann.get(PAY)
            item = f"{ann.hidden('fingerprint')} a/1/pay"
            response = await ann.send(
                path, {"decision": "approve", "item": item, **fields}, **headers
            )
            assert response.status_code == 403, how
            assert (await ann.get("")).status_code == 200, f"{how}: no longer signed in"
            assert await status_of(store) == "open", how


async def test_the_token_of_another_session_is_refused(store: str) -> None:
    """Form tokens are each visitor's own."""
    async with (
        inbox(store) as base,
        visitor_at(base, "ann") as ann,
        visitor_at(base, "bob") as bob,
    ):
        await ann.get(PAY)
        await bob.get(PAY)
        taken = await ann.send(
            PAY, {"decision": "approve", "form_token": bob.hidden("form_token")}
        )
        assert taken.status_code == 403
    assert await status_of(store) == "open"


async def test_a_form_of_its_own_page_is_taken(store: str) -> None:
    """The headers that a browser sends with a form of the page itself pass."""
    async with inbox(store) as base, visitor_at(base) as ann:
        await ann.get(PAY)
        headers = {"origin": base, "sec-fetch-site": "same-origin"}
        assert (
            await ann.send(PAY, {"decision": "approve"}, **headers)
        ).status_code == 200
    assert await status_of(store) == "decided"


async def test_a_foreign_host_reads_nothing(store: str) -> None:
    """A name that was made to lead to this machine gets no page, also for a visitor who is signed in."""
    async with inbox(store) as base, visitor_at(base) as ann:
        for host in (
            "evil.example",
            "evil.example:80",
            "127.0.0.1.evil.example",
            "[::2]",
            "a b",
            "",
            "127.0.0.1:x",
        ):
            for path in (*PAGES, "sign-in", "static/style.css"):
                response = await ann.client.get(path, headers={"host": host})
                assert response.status_code in (400, 403), (host, path)
                assert "shop-pay" not in response.text, (host, path)


async def test_the_names_of_this_machine_are_served(store: str) -> None:
    """A browser may call this machine by each of its names, at any port."""
    async with inbox(store) as base, visitor_at(base, None) as stranger:
        for host in ("localhost", "LOCALHOST:99", "127.0.0.1", "[::1]:8321"):
            assert (
                await stranger.client.get("sign-in", headers={"host": host})
            ).status_code == 200, host


async def test_every_response_has_the_headers(store: str) -> None:
    """Pages, files, redirects and refusals forbid foreign scripts, frames, sniffing, referrers and caches."""
    async with inbox(store) as base, visitor_at(base) as ann:
        paths = (
            *PAGES[:4],
            "sign-in",
            "static/style.css",
            "static/inbox.js",
            "static/nothing",
            "nothing",
            "runs/no",
        )
        for path in paths:
            headers = (await ann.client.get(path)).headers
            policy = headers["content-security-policy"]
            assert (
                "default-src 'none'" in policy
                and "unsafe" not in policy
                and "frame-ancestors 'none'" in policy
            )
            assert "form-action 'self'" in policy and "base-uri 'none'" in policy
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "same-origin"
            assert headers["cache-control"] == "no-store"
        assert (
            "content-security-policy"
            in (await ann.client.post("approvals", data={})).headers
        )


OTHER_SITES = (
    "//evil.example",
    "/\\evil.example",
    "\\\\evil.example",
    "https:evil.example",
    "https://evil.example",
)


async def test_a_sign_in_leads_to_no_other_site(store: str) -> None:
    """Whatever the form says, the visitor lands on a page of this application."""
    async with inbox(store) as base, visitor_at(base, None) as stranger:
        for to in (*OTHER_SITES, "/\t/evil", " /x", "javascript:alert(1)", "\r\nx: y"):
            fields = {"token": TOKEN, "name": "ann", "next": to}
            response = await stranger.client.post("sign-in", data=fields)
            assert response.status_code == 303, to
            target = httpx.URL(base).join(response.headers["location"])
            assert str(target).startswith(f"{base}/"), to
            assert not re.match(
                r"[/\\]{2}|[a-z]+:", response.headers["location"], re.IGNORECASE
            ), to


async def test_a_sign_in_leads_to_the_page_that_was_asked_for(store: str) -> None:
    """Who follows a link to a call decides it after the sign-in, without looking for it again."""
    async with inbox(store) as base, visitor_at(base, None) as stranger:
        for path in (PAY, "runs?status=paused&goal=a%26b"):
            await stranger.get(path)
            assert stranger.hidden("next") == path
        response = await stranger.client.post(
            "sign-in",
            data={"token": TOKEN, "name": "ann", "next": stranger.hidden("next")},
            follow_redirects=True,
        )
        assert str(response.url) == f"{base}/runs?status=paused&goal=a%26b"


async def test_the_token_is_not_logged(
    store: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also a server that logs every request writes no token."""
    caplog.set_level(logging.INFO)
    application = app(store, sign_in=Token(TOKEN))
    async with (
        served(application, log_level="info") as base,
        visitor_at(base, None) as visitor,
    ):
        await visitor.get(f"sign-in?token={TOKEN}")
        await visitor.sign_in("ann")
    logged = [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith(("uvicorn", "planner_ext"))
    ]
    assert any("GET /sign-in" in line for line in logged)
    assert TOKEN not in "".join(logged)


@pytest.mark.parametrize("announced", [True, False])
async def test_an_endless_form_is_refused(store: str, announced: bool) -> None:
    """A body of more than a megabyte is not read to its end, whether or not it says how long it is."""
    async with inbox(store) as base, visitor_at(base) as ann:

        async def parts() -> AsyncIterator[bytes]:
            for _ in range(40):
                yield b"reason=" + b"x" * 100_000

        content: Any = b"x" * 2_000_000 if announced else parts()
        headers = {"content-type": "application/x-www-form-urlencoded"}
        response = await ann.client.post(PAY, content=content, headers=headers)
        assert (
            response.status_code == 403 and "may have 1,000,000 bytes" in response.text
        )


async def test_a_body_other_than_a_form_is_refused(store: str) -> None:
    """Bytes that a form of these pages never sends change nothing, and cause no fault of the server."""
    async with inbox(store) as base, visitor_at(base) as ann:
        for body in (
            b"\xff\xfe",
            b"a=%ff",
            b"&".join([b"a=1"] * 3_000),
            b"{}",
            b"--x\r\n",
        ):
            assert (await ann.client.post(PAY, content=body)).status_code == 403, body
            assert (await ann.client.post("sign-in", content=body)).status_code in (
                400,
                403,
            ), body


HOSTILE = (
    "</pre></textarea>\"'><script>alert(1)</script>{{ 7*7 }}\u202eabc\u200b\x00\x1b[2J"
    "<img src=x onerror=alert(1)>"
)


class Hostile:
    """Functions whose names and texts a stranger chose."""

    @requires_approval(prompt=HOSTILE, roles=[HOSTILE])
    @kernel_function(description=HOSTILE)
    async def pay(self, note: str, more: str = "") -> str:
        return note


async def test_hostile_texts_are_shown_and_do_nothing(tmp_path: Path) -> None:
    """What a model, a function or a person wrote is text: no markup, no invisible or reordering character passes."""
    store = str(tmp_path / "runs.db")
    script = [
        call("shop-pay", {"note": HOSTILE, "more": HOSTILE}, id=HOSTILE),
        say(HOSTILE),
    ]
    await drive(
        store, script, Hostile(), run_id="\"'><script>alert(1)<\u202e", goal=HOSTILE
    )
    async with Approvals.connect(store) as approvals:
        (waiting,) = await approvals.pending()
    async with (
        inbox(store, authorize=lambda _: True) as base,
        visitor_at(base, "<b>ann</b>") as ann,
    ):
        href = re.findall(r'class="fn" href="/(approvals/[^"]*)"', ann.page)[0]
        run = re.findall(r'href="/(runs/[^"]*)"', (await ann.get(href)).text)[0]
        asked = (
            "runs?goal=%3Cscript%3E&worker=%22%3E%3Cscript%3E",
            "approvals/%3Cscript%3E",
            "runs/%3Cscript%3E",
        )
        for path in ("", href, "runs", run, *asked):
            page = (await ann.get(path)).text
            assert page.count("<script") == 1  # its own
            for bad in ("<img", "<b>", "\u202e", "\u200b", "\x00", "\x1b"):
                assert bad not in page, (path, bad)
        assert "{{ 7*7 }}" in (await ann.get(href)).text
        await ann.get(href)
        page = (
            await ann.send(
                href, {"decision": "edit", "argument-0": HOSTILE, "argument-1": HOSTILE}
            )
        ).text
        assert page.count("<script") == 1 and "<img" not in page
        assert (await ann.decide(href, "deny", reason=HOSTILE)).status_code == 200
        assert (
            ann.page.count("<script") == 1
            and "<img" not in ann.page
            and "\u202e" not in ann.page
        )
    assert await status_of(store, waiting.id) == "decided"


async def test_a_store_that_cannot_be_used_is_said_so(tmp_path: Path) -> None:
    """A missing store is a page that names it, not a fault of the server, and it is not created."""
    async with (
        inbox(tmp_path / "nothing.db") as base,
        visitor_at(base, None) as visitor,
    ):
        response = await visitor.sign_in()
        assert response.status_code == 503 and "nothing.db" in response.text
    assert not (tmp_path / "nothing.db").exists()


async def test_an_application_without_a_token_has_no_sign_in(store: str) -> None:
    """Where the host application signs people in, no token opens a session, and strangers are sent there."""
    async with (
        served(app(store, sign_in=lambda _: None)) as base,
        visitor_at(base, None) as stranger,
    ):
        response = await stranger.sign_in()
        assert response.status_code == 404
        page = await stranger.get("")
        assert (
            page.status_code == 401
            and "Sign in to the application that hosts this inbox" in page.text
        )
