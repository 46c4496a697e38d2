"""The readers of what arrives over HTTP from others, each with the promises that hold for every input."""

import asyncio
import base64
import hashlib
import hmac
import json
import sqlite3
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlencode

from openai import AsyncOpenAI
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion

from fuzzing.mutation import MARKER, Fuzzed, as_text
from fuzzing.texts import refused
from planner_ext import Budget, ToolUseSession
from planner_ext.core.errors import PlannerExtError
from planner_ext.core.facts import CallStarted
from planner_ext.core.values import Usage
from planner_ext.durable import Approvals
from planner_ext.durable.notices import RunNotice, Webhook
from planner_ext.testing import calls, say
from planner_ext.testing.script import ScriptedReply, completion_body, completion_chunks
from planner_ext.testing.server import HttpRequest, HttpResponse, LoopbackServer
from support.approval import DOORS, LOOK, REFUND, Shop, World
from support.inbox import TOKEN, inbox, visitor_at
from support.till import asks, leave_in_doubt, leave_waiting, refunds

TRIPS, CALLS = 4, 5
_ANSWERS: tuple[ScriptedReply, ...] = (
    calls(LOOK, REFUND),
    say("Done."),
    ScriptedReply(text="Both.", calls=calls(LOOK).calls),
    ScriptedReply(text=None, finish_reason="length"),
    ScriptedReply(refusal="No."),
)
_BUSY = {
    "status": 429,
    "headers": {"retry-after": "Fri, 01 Jan 2100 00:00:00 GMT"},
    "body": {"error": {"message": "Too many requests."}},
}


def _written(reply: ScriptedReply, *, streamed: bool) -> dict[str, Any]:
    """Write one answer as JSON values: a body, or the events of a stream."""
    named = ScriptedReply(
        text=reply.text,
        calls=tuple(
            type(one)(name=one.name, arguments=one.arguments, id=f"c{at}")
            for at, one in enumerate(reply.calls)
        ),
        finish_reason=reply.finish_reason,
        refusal=reply.refusal,
    )
    usage = Usage(prompt_tokens=3, completion_tokens=2)
    head = {"status": 200, "headers": {"x-request-id": "r"}, "drop": False}
    if not streamed:
        return {**head, "body": completion_body(named, index=0, model="m", usage=usage)}
    events = [
        *completion_chunks(named, index=0, model="m", usage=usage, chunk_size=8),
        "[DONE]",
    ]
    return {**head, "events": events}


def _response(answer: Any) -> HttpResponse:
    """Send what a text says, as far as HTTP can carry it."""
    given = cast(
        "dict[str, Any]", answer if isinstance(answer, dict) else {"body": answer}
    )
    status = given.get("status")
    headers = given.get("headers") if isinstance(given.get("headers"), dict) else {}
    kind, parts = (
        "application/json",
        (as_text(given.get("body")).encode(errors="replace"),),
    )
    if isinstance(events := given.get("events"), list):
        kind = "text/event-stream"
        parts = tuple(
            b
            for one in events
            if (b := f"data: {as_text(one)}\n\n".encode(errors="replace"))
        )
    sent = {
        _header(name): _header(as_text(value))
        for name, value in cast("dict[str, Any]", headers).items()
    }
    return HttpResponse(
        status=status if type(status) is int and 200 <= status <= 599 else 200,
        content_type=kind,
        parts=parts,
        headers=sent,
        streamed=isinstance(events, list) and given.get("drop") is not True,
        dropped=given.get("drop") is True,
    )


def _header(text: str) -> str:
    return text.encode("latin-1", "replace").decode("latin-1")[:2000]


@asynccontextmanager
async def reply(_: Path) -> AsyncGenerator[Fuzzed]:
    """A run whose model says anything ends in a status or a named error, within its budget; no call runs twice."""
    waiting: list[Any] = []
    requests = 0

    def respond(request: HttpRequest) -> HttpResponse:
        nonlocal requests
        requests += 1
        if waiting:
            return _response(waiting.pop(0))
        return _response(
            _written(
                say("Done."), streamed=json.loads(request.body).get("stream") is True
            )
        )

    server = LoopbackServer(respond)
    client = AsyncOpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1",
        api_key="any",
        max_retries=0,
        timeout=10,
    )
    connector = OpenAIChatCompletion(
        "scripted", service_id="scripted", async_client=client
    )

    async def check(text: str) -> str:
        nonlocal requests
        given = _parsed(text)
        way: Any = given.get("way")
        way = way if isinstance(way, int) else len(text)
        answers = given.get("answers")
        waiting[:] = (
            cast("list[Any]", answers)[:20] if isinstance(answers, list) else [given]
        )
        requests, shop = 0, Shop()
        outcome = await _asked(connector, shop, way % 8)
        assert requests <= TRIPS, f"{requests} requests; allowed were {TRIPS}"
        assert len(shop.ran) <= CALLS, (
            f"{len(shop.ran)} calls ran; allowed were {CALLS}"
        )
        return f"{outcome} {requests} {len(shop.ran)}"

    seeds = [
        json.dumps(
            {
                "way": way,
                "answers": [_written(one, streamed=way % 2 == 1) for one in answers],
            }
        )
        for way in range(8)
        for answers in (_ANSWERS[:2], _ANSWERS[2:3], _ANSWERS[3:4], _ANSWERS[4:])
    ]
    seeds.append(json.dumps({"way": 0, "answers": [_BUSY]}))
    try:
        yield Fuzzed(seeds, check)
    finally:
        await client.close()
        server.stop()


async def _asked(connector: OpenAIChatCompletion, shop: Shop, way: int) -> str:
    """Ask through one of the doors, plain or streamed."""
    kernel, budget = Kernel(), Budget(max_iterations=TRIPS, max_tool_calls=CALLS)
    kernel.add_service(connector)
    kernel.add_plugin(shop, "shop")
    options: dict[str, Any] = {"budget": budget}
    try:
        if way >= 6:
            session = ToolUseSession(kernel, budget=budget)
            if way == 6:
                await session.prompt("Look up.")
            else:
                async with aclosing(session.prompt_streaming("Look up.")) as pieces:
                    async for _ in pieces:
                        pass
            return "read session"
        outcome = await DOORS[way].ask(
            World(kernel, cast("Any", connector), shop), **options
        )
    except PlannerExtError as error:
        made = getattr(error, "checkpoint", None)
        starts = (
            []
            if made is None
            else [fact for fact in made.facts if isinstance(fact, CallStarted)]
        )
        _check_once(
            shop,
            [(one.iteration, one.index) for one in starts]
            if made is not None
            else None,
        )
        return refused(error)
    assert len(shop.ran) <= outcome.tool_calls <= CALLS
    assert outcome.iterations <= TRIPS
    return f"read {outcome.status}"


def _check_once(shop: Shop, starts: Sequence[tuple[int, int]] | None) -> None:
    if starts is not None:
        assert len(set(starts)) == len(starts), f"a call started twice: {starts}"
        assert len(shop.ran) <= len(starts)


def _parsed(text: str) -> dict[str, Any]:
    """Read a text as JSON; a text that is not an object is a body as it is."""
    with suppress(ValueError, RecursionError):
        if isinstance(data := json.loads(text), dict):
            return cast("dict[str, Any]", data)
    return {"status": 200, "body": text}


# Webhooks.

_KEY = "whsec_" + base64.b64encode(b"k" * 24).decode()
_NOTICE = {
    "id": "n-1",
    "run_id": "a",
    "event": "ended",
    "status": "answered",
    "goal": "Ü\u202e",
    "problem": "no",
    "where": "runs.db",
}
_TAKEN = "HTTP/1.1 204 No Content\r\ncontent-length: 0\r\n\r\n"
_WEBHOOKS = (
    {"notice": _NOTICE, "answer": _TAKEN},
    {
        "notice": _NOTICE,
        "answer": "HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:9/\r\ncontent-length: 0\r\n\r\n",
    },
    {
        "notice": _NOTICE,
        "answer": "HTTP/1.1 100 Continue\r\n\r\n"
        "HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 2\r\n\r\nok",
    },
    {
        "notice": _NOTICE,
        "answer": "HTTP/1.1 500 No\r\ntransfer-encoding: chunked\r\n\r\n2\r\nno\r\n0\r\n\r\n",
    },
    {
        "notice": _NOTICE,
        "answer": "HTTP/1.1 101 Switching Protocols\r\nset-cookie: a=b\r\n\r\n",
    },
)


@asynccontextmanager
async def webhook(_: Path) -> AsyncGenerator[Fuzzed]:
    """A receiver reads what was sent, signed; to the sender 2xx alone means taken."""
    received: list[bytes] = []
    answer = b""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                int(line[15:])
                for line in head.lower().split(b"\r\n")
                if line.startswith(b"content-length:")
            )
            received.append(head + await reader.readexactly(length))
            writer.write(answer)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    sender = Webhook(
        f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hooks/s3cret", _KEY
    )
    sender.open()

    async def check(text: str) -> str:
        nonlocal answer
        given = _parsed(text)
        fields = {
            name: str(value)
            for name, value in _object(given.get("notice")).items()
            if name in _NOTICE
        }
        notice = RunNotice(
            **cast("dict[str, Any]", {**_NOTICE, **fields, "id": "n-1"}),
            pending=(),
            at=datetime.now(UTC),
        )
        answer = str(given.get("answer")).encode("utf-8", "surrogatepass")
        received.clear()
        try:
            await sender(notice)
            outcome = "read taken"
        except PlannerExtError as error:
            outcome = refused(error)
            assert "s3cret" not in str(error) and "127.0.0.1" in str(error)
        if outcome == "read taken":
            assert b" 2" in answer[:4000], "an answer that is not 2xx counts as taken"
        if received:
            _check_received(received[0], notice)
        return outcome

    try:
        yield Fuzzed([json.dumps(one) for one in _WEBHOOKS], check)
    finally:
        await sender.close()
        server.close()
        await server.wait_closed()


def _check_received(raw: bytes, notice: RunNotice) -> None:
    """Read a notice as a receiver does, by the rules of Standard Webhooks."""
    head, _, body = raw.partition(b"\r\n\r\n")
    lines = [line.split(": ", 1) for line in head.decode("ascii").split("\r\n")[1:]]
    headers = {name.lower(): value for name, value in lines}
    said = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    signed = base64.b64encode(
        hmac.new(b"k" * 24, said, hashlib.sha256).digest()
    ).decode()
    assert headers["webhook-signature"] == f"v1,{signed}"
    assert json.loads(body) == notice.as_dict()


def _object(value: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value if isinstance(value, dict) else {})


# The inbox.

_CALL = "/approvals/order-7%2F0%2Frefund-0"
_FORM = {"form_token": "{form_token}", "fingerprint": "{fingerprint}"}
_SAME = {"origin": "http://{host}", "sec-fetch-site": "same-origin"}
_REQUESTS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("GET", "/", {}),
    ("GET", "/?offset=50", {}),
    ("GET", _CALL, {}),
    ("GET", "/approvals/question%2F0%2Fasks", {}),
    (
        "GET",
        "/runs?status=paused&goal=Refund&worker=w&created_after=2026-01-01&created_before=2027-01-01&offset=0",
        {},
    ),
    ("GET", "/runs/order-7", {}),
    ("GET", "/events?of=runs", {}),
    ("GET", "/static/style.css", {}),
    ("GET", "/sign-in?token=abc", {}),
    ("POST", "/sign-in", {"token": TOKEN, "name": "bob", "next": "runs"}),
    ("POST", "/sign-in", {"token": "wrong", "name": "bob", "next": "runs"}),
    ("POST", _CALL, {**_FORM, "decision": "approve", "always": "function"}),
    ("POST", _CALL, {**_FORM, "decision": "deny", "reason": "no"}),
    (
        "POST",
        _CALL,
        {
            **_FORM,
            "decision": "edit",
            "argument-0": "A-1",
            "argument-1": "5",
            "argument-3": "false",
            "argument-5": "a\nb",
        },
    ),
    (
        "POST",
        "/approvals/question%2F0%2Fasks",
        {**_FORM, "decision": "answer", "answer": "42"},
    ),
    (
        "POST",
        "/approvals/letter%2F0%2Fsend",
        {**_FORM, "decision": "done", "result": "sent"},
    ),
    (
        "POST",
        "/approvals",
        {
            "form_token": "{form_token}",
            "decision": "approve",
            "item": "{fingerprint} order-7%2F0%2Frefund-0",
        },
    ),
    (
        "POST",
        "/runs/m/cancel",
        {"form_token": "{form_token}", "confirm": "yes", "reason": "no"},
    ),
)


@asynccontextmanager
async def inbox_pages(folder: Path) -> AsyncGenerator[Fuzzed]:
    """Any request gets a page below status 500, with nothing unescaped; only a visitor's own form decides."""
    store = folder / "runs.db"
    await leave_waiting(store)
    await leave_waiting(store, [asks("Which order?"), say("Done.")], run_id="question")
    await leave_in_doubt(store)
    await leave_waiting(
        store,
        [refunds({"order": MARKER, "amount": 1e3, "note": MARKER}), say("")],
        run_id="m",
        goal=MARKER,
    )
    async with inbox(store, authorize=lambda _: True) as base, visitor_at(base) as ann:
        await ann.get(_CALL)
        known = {
            "form_token": ann.hidden("form_token"),
            "fingerprint": ann.hidden("fingerprint"),
            "host": base.removeprefix("http://"),
        }
        cookie = "; ".join(
            f"{name}={value}" for name, value in ann.client.cookies.items()
        )
        with closing(sqlite3.connect(store, isolation_level=None)) as rows:
            before = _decisions(rows)

            async def check(text: str) -> str:
                given = _parsed(text)
                raw = _request(given, known, cookie)
                status, page = await _exchanged(known["host"], raw)
                assert status < 500, f"status {status}: {page[-500:]}"
                assert MARKER not in page, (
                    "a text of others stands in the page as it is"
                )
                if _decisions(rows) != before:
                    assert known["form_token"].encode() in raw, (
                        "a request without the form's token decided"
                    )
                    await _check_decided(store, raw, known)
                    _undo(rows)
                    assert _decisions(rows) == before
                return f"read {status} {given.get('method')}"

            seeds = [
                json.dumps(
                    {
                        "method": method,
                        "target": target,
                        "headers": _SAME,
                        "form": form,
                        "cookie": True,
                    }
                )
                for method, target, form in _REQUESTS
            ]
            yield Fuzzed(seeds, check)


def _request(given: Mapping[str, Any], known: Mapping[str, str], cookie: str) -> bytes:
    """Write a request as a text says; ``{name}`` stands for what the page holds."""

    def filled(text: object) -> str:
        written = as_text(text)
        for name, value in known.items():
            written = written.replace(f"{{{name}}}", value)
        return written

    form = given.get("form")
    pairs = [
        (filled(name), one)
        for name, value in _object(form).items()
        for one in (value if isinstance(value, list) else [value])
    ]
    body = (
        urlencode(
            [
                (name.encode(errors="replace"), filled(value).encode(errors="replace"))
                for name, value in pairs
            ]
        )
        if isinstance(form, dict)
        else filled(form or "")
    )
    headers = {
        "host": known["host"],
        "content-type": "application/x-www-form-urlencoded",
    }
    headers |= {
        filled(name): filled(value)
        for name, value in _object(given.get("headers")).items()
    }
    if given.get("cookie"):
        headers["cookie"] = cookie
    content = body.encode(errors="replace")
    lines = [
        f"{filled(given.get('method', 'GET'))} {filled(given.get('target', '/'))} HTTP/1.1"
    ]
    lines += [f"{name}: {value}" for name, value in headers.items()] + [
        f"content-length: {len(content)}",
        "connection: close",
    ]
    return "\r\n".join(lines).encode("utf-8", "replace") + b"\r\n\r\n" + content


async def _exchanged(host: str, raw: bytes) -> tuple[int, str]:
    """Send a request; return the status, 400 if the server closed at once, and the page, without events."""
    name, _, port = host.partition(":")
    reader, writer = await asyncio.open_connection(name, int(port))
    try:
        writer.write(raw)
        with suppress(ConnectionError):
            await writer.drain()
        head = b""
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
        page = (
            b""
            if b"text/event-stream" in head
            else await reader.read(-1)
            if head
            else b""
        )
    except ConnectionError:
        page = b""
    finally:
        writer.close()
    return int(head[9:12]) if head else 400, page.decode("utf-8", "replace")


_DECIDED = "SELECT id, status, decision FROM planner_approvals ORDER BY id"


def _decisions(rows: sqlite3.Connection) -> list[Any]:
    return rows.execute(_DECIDED).fetchall()


def _undo(rows: sqlite3.Connection) -> None:
    rows.execute(
        "UPDATE planner_approvals SET status = 'open', decision = NULL, decided_at = NULL"
    )
    rows.execute("DELETE FROM planner_refusals")


async def _check_decided(store: Path, raw: bytes, known: Mapping[str, str]) -> None:
    """A decision is the visitor's, and an approval is of what the page showed."""
    async with Approvals.connect(store, authorize=lambda _: True) as approvals:
        for run, call in (
            ("order-7", "0/refund-0"),
            ("question", "0/asks"),
            ("letter", "0/send"),
            ("m", "0/refund-0"),
        ):
            decision = (await approvals.show(f"{run}/{call}")).decision
            if decision is not None:
                assert decision.by == "ann", decision
                assert (
                    decision.kind == "deny"
                    or known["fingerprint"].encode() in raw
                    or run != "order-7"
                )
