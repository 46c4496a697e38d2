"""The inbox inside another application: under a prefix, with that application's own sign-in."""

import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Mount

from planner_ext.core.errors import PlannerExtError
from planner_ext.durable import Approvals, RunsClient
from planner_ext.durable.store import opened_store
from planner_ext.inbox import Token, app
from planner_ext.inbox.security import SignIn
from support.inbox import TOKEN, Visitor, served, visitor_at

PAY = "approvals/a%2F1%2Fpay"


async def of_header(request: Request) -> str | None:
    """Sign in as a host application might: by what its own middleware found out."""
    return request.headers.get("x-user")


@asynccontextmanager
async def hosted(
    store: str, sign_in: SignIn = of_header, root: str = ""
) -> AsyncGenerator[str]:
    """Serve an application that has the inbox at ``/tools/inbox``; yield the inbox's address."""
    async with opened_store(store, create=False) as opened:
        host = Starlette(
            routes=[Mount("/tools/inbox", app(RunsClient(opened), sign_in=sign_in))]
        )
        async with served(host, root_path=root) as base:
            yield f"{base}/tools/inbox"


async def as_user(visitor: Visitor, name: str) -> Visitor:
    visitor.client.headers["x-user"] = name
    return visitor


async def test_the_host_application_signs_people_in(store: str) -> None:
    """Decisions carry the name that the host gives; without one every page is refused, and a token opens nothing."""
    async with hosted(store) as base, visitor_at(base, None) as ann:
        assert (await ann.get("")).status_code == 401
        await as_user(ann, "ann@example.com")
        assert "shop-pay" in (await ann.get("")).text and "Sign out" not in ann.page
        response = await ann.decide(PAY, "approve")
        assert response.status_code == 200 and str(response.url) == f"{base}/{PAY}"
    async with Approvals.connect(store) as approvals:
        decision = (await approvals.show("a/1/pay")).decision
    assert decision is not None and decision.by == "ann@example.com"


async def test_forged_forms_are_refused_there_too(store: str) -> None:
    """The form token is compared with a cookie of the inbox, which no other site can read or send."""
    async with hosted(store) as base, visitor_at(base, None) as ann:
        await as_user(ann, "ann")
        response = await ann.get(PAY)
        cookie = response.headers["set-cookie"].lower()
        assert (
            "httponly" in cookie
            and "samesite=strict" in cookie
            and "path=/tools/inbox;" in cookie
        )
        assert "set-cookie" not in (await ann.get(PAY)).headers
        token = ann.hidden("form_token")
        for fields, headers in (
            ({"form_token": "x"}, {}),
            ({}, {"origin": "https://evil.example"}),
        ):
            refused = await ann.send(
                PAY, {"decision": "approve", "form_token": token, **fields}, **headers
            )
            assert refused.status_code == 403
            await ann.get(PAY)
        ann.client.cookies.clear()
        assert (await ann.send(PAY, {"decision": "approve"})).status_code == 403
    async with Approvals.connect(store) as approvals:
        assert (await approvals.show("a/1/pay")).status == "open"


async def test_every_link_stays_under_the_prefix(store: str) -> None:
    """Links, forms, files and redirects of a mounted inbox lead back into it."""
    async with hosted(store, Token(TOKEN)) as base, visitor_at(base) as ann:
        for path in ("", PAY, "runs", "runs/a", "runs/nothing", "sign-in"):
            assert (await ann.get(path)).status_code in (200, 404)
            links = re.findall(
                r'(?:href|src|action|data-events)="([^"#][^"]*)"', ann.page
            )
            assert links and all(
                link.startswith(("/tools/inbox/", "data:")) for link in links
            ), links
        for path in ("static/style.css", "static/inbox.js"):
            assert (await ann.client.get(path)).status_code == 200
        assert str((await ann.decide(PAY, "approve")).url) == f"{base}/{PAY}"
        assert str((await ann.send("sign-out", {})).url) == f"{base}/sign-in"


async def test_a_proxy_may_add_a_prefix(store: str) -> None:
    """With a root path, as servers behind a proxy have, links carry it."""
    async with hosted(store, root="/ops") as base, visitor_at(base, None) as ann:
        await as_user(ann, "ann")
        response = await ann.get(PAY)
        assert 'href="/ops/tools/inbox/runs"' in response.text
        assert "path=/ops/tools/inbox;" in response.headers["set-cookie"].lower()


async def test_a_sign_in_that_returns_something_else_is_an_error(store: str) -> None:
    """A name is a text: any other value is reported as the host's fault, and opens no session."""
    for wrong in (7, "", True):
        async with (
            hosted(store, lambda _, wrong=wrong: wrong) as base,  # pyright: ignore[reportArgumentType]  (that is the test)
            visitor_at(base, None) as ann,
        ):
            assert (await ann.get("")).status_code == 500


def test_a_token_is_checked_when_it_is_made() -> None:
    """The error names the length that is needed."""
    with pytest.raises(PlannerExtError, match="20 characters; got 3"):
        Token("abc")
