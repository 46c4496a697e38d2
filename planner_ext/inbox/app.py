"""The ASGI application of the inbox: its routes and their handlers."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias, cast

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from planner_ext.approval.decisions import Approve, Authorize, Decision, Deny, Supply
from planner_ext.core.errors import PlannerExtError
from planner_ext.durable.approvals import Approvals
from planner_ext.durable.errors import (
    ApprovalRefusedError,
    NotAuthorizedError,
    StoreError,
    UnknownRunError,
)
from planner_ext.durable.grants import typed_grant
from planner_ext.durable.listing import STATUSES, RunFilters, StoreMarks
from planner_ext.durable.options import checked_hook
from planner_ext.durable.records import PendingApproval
from planner_ext.durable.runs import RunsClient
from planner_ext.durable.store import opened_store
from planner_ext.inbox import views
from planner_ext.inbox.forms import Field, read_form
from planner_ext.inbox.live import Live, Topic
from planner_ext.inbox.security import (
    Form,
    Guard,
    RefusedFormError,
    Sessions,
    SignIn,
    Token,
    Visitor,
    asked_path,
    form_of,
    person_name,
    redirect,
)
from planner_ext.readable.html import html_of
from planner_ext.readable.text import exact, visible, visible_line
from planner_ext.timeline import Timeline, fragment_of

logger = logging.getLogger(__name__)

PAGE = 50
"""Entries of a list that one page shows."""

_ROWS_SECONDS = 10
"""The longest age of the relative times in a cached list."""
_MOST_PARTS = 100

_FOLDER = Path(__file__).parent
_STATIC = {
    "style.css": (_FOLDER.parent / "timeline" / "style.css", "text/css"),
    "inbox.js": (_FOLDER / "inbox.js", "text/javascript"),
}

_PROBLEMS: Mapping[type[PlannerExtError], tuple[int, str]] = {
    RefusedFormError: (403, "Not taken"),
    UnknownRunError: (404, "Not found"),
    ApprovalRefusedError: (404, "Not found"),
    StoreError: (503, "The store cannot be used"),
}
_UNREADABLE = 500, "The run cannot be read"
"""The page of any other error: a journal is damaged, or newer than this version."""

_VISITOR = "planner_ext.visitor"
"""The visitor's key in a request's scope."""

_EDITS = ("look", "edit")
"""An edit is looked at, then decided on."""
_PAST = {"approve": "approved", "deny": "denied"}
"""The decisions on many calls."""
_Handler: TypeAlias = Callable[[Request], Awaitable[Response]]
_MAY_CANCEL = ("queued", "running", "paused", "failed", "quarantined")
_FILTERS = ("goal", "worker", "created_after", "created_before")


def app(
    runs: "str | Path | RunsClient",
    *,
    sign_in: SignIn,
    authorize: Authorize | None = None,
) -> Starlette:
    """Make the inbox of a store, an ASGI application to serve or to mount under any path.

    Decisions are recorded under the name of the signed-in user.

    Args:
        runs: The runs of an open store, or a store's SQLite file or ``postgresql://``
            address, which is open from the first request to the end of the ASGI
            lifespan. A server runs that for the outermost application only: give open
            runs to a mounted inbox.
        sign_in: A `Token`, or a function of the host application, async or not, that
            returns the name of a request's user, or None. With a function the host
            application checks the ``Host`` header.
        authorize: Asked before each decision and cancellation; see
            `planner_ext.durable.Approvals.connect`. A request is ``verified`` if a
            function signs people in, or a `Token` has a ``user``. None uses the hook of
            the open runs.

    Raises:
        PlannerInvalidConfigurationError: If ``authorize`` is not a function.
    """
    checked_hook(authorize)
    inbox = _Inbox(runs, sign_in, authorize)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        try:
            yield
        finally:
            await inbox.close()

    application = Starlette(
        routes=inbox.routes(),
        middleware=[Middleware(Guard, token=inbox.sessions.token)],
        lifespan=lifespan,
    )
    application.state.live = inbox.live
    return application


class _Inbox:
    """The handlers of the routes, and the store that they share."""

    def __init__(
        self,
        runs: str | Path | RunsClient,
        sign_in: SignIn,
        authorize: Authorize | None,
    ) -> None:
        self._given = runs
        self.sessions = Sessions(sign_in)
        self._is_verified = not isinstance(sign_in, Token) or sign_in.user is not None
        self._authorize = authorize
        self._client = runs if isinstance(runs, RunsClient) else None
        self._opening = asyncio.Lock()
        self._opened = AsyncExitStack()
        self._rows: dict[tuple[str, int], tuple[int, Markup]] = {}
        self._rows_state = "", 0.0
        self.live = Live(self._marks)
        self._templates = Environment(
            loader=PackageLoader("planner_ext.inbox"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters |= {  # pyright: ignore[reportUnknownMemberType]  (partially unknown in jinja2)
            "exact": exact,
            "line": visible_line,
            "moment": views.moment_of,
            "parts": html_of,
            "run_href": views.run_href,
        }

    def routes(self) -> list[Route]:
        """List the routes; all but sign-in and static files need a signed-in visitor."""
        pages: list[tuple[str, str, _Handler]] = [
            ("/", "GET", self._show_waiting),
            ("/approvals", "POST", self._decide_many),
            ("/approvals/{id:path}", "GET", self._show_approval),
            ("/approvals/{id:path}", "POST", self._decide),
            ("/grants", "GET", self._show_grants),
            ("/grants", "POST", self._revoke),
            ("/runs", "GET", self._show_runs),
            ("/runs/{id}", "GET", self._show_run),
            ("/runs/{id}/cancel", "POST", self._cancel_run),
            ("/events", "GET", self._stream_events),
            ("/sign-out", "POST", self._sign_out),
            ("/{path:path}", "GET", self._show_no_page),
        ]
        return [
            Route("/sign-in", self._show_sign_in, methods=["GET"]),
            Route("/sign-in", self._sign_in_by_token, methods=["POST"]),
            Route("/static/{name}", self._send_static, methods=["GET"]),
            *(
                Route(path, self._for_visitors(handler), methods=[method])
                for path, method, handler in pages
            ),
        ]

    async def close(self) -> None:
        """End the streams, and close the store if it was opened here."""
        self.live.close()
        await self._opened.aclose()

    async def _runs(self) -> RunsClient:
        async with self._opening:
            if self._client is None:
                where = cast("str | Path", self._given)
                self._client = RunsClient(
                    await self._opened.enter_async_context(
                        opened_store(where, create=False)
                    )
                )
            return self._client

    async def _acting(self) -> RunsClient:
        return (await self._runs()).acting(
            authorize=self._authorize, verified=self._is_verified
        )

    async def _approvals(self) -> Approvals:
        return (await self._acting()).approvals()

    async def _marks(self) -> StoreMarks:
        return await (await self._runs()).marks()

    def _for_visitors(self, handler: _Handler) -> _Handler:
        """Restrict a handler to signed-in visitors, and show its errors as pages."""

        async def handle(request: Request) -> Response:
            visitor = await self.sessions.visitor_of(request)
            if visitor is None:
                return self._sign_in_page(request, next=asked_path(request), status=401)
            request.scope[_VISITOR] = visitor
            try:
                response = await handler(request)
            except PlannerExtError as error:
                status, title = next(
                    (
                        said
                        for kind, said in _PROBLEMS.items()
                        if isinstance(error, kind)
                    ),
                    _UNREADABLE,
                )
                if status >= 500:
                    logger.error(
                        "The inbox cannot show %s: %s", request.url.path, error
                    )
                response = self._problem_page(request, status, title, error)
            self.sessions.keep_form_token(visitor, response, request)
            return response

        return handle

    # Sign-in

    async def _show_sign_in(self, request: Request) -> Response:
        token = request.query_params.get("token", "")
        # A server writes the query into its log after the response.
        request.scope["query_string"] = b""
        return self._sign_in_page(request, token=token)

    async def _sign_in_by_token(self, request: Request) -> Response:
        token = self.sessions.token
        if token is None:
            return self._sign_in_page(request, status=404)
        try:
            form = await form_of(request, None)
        except RefusedFormError as error:
            return self._sign_in_page(request, problem=str(error), status=400)
        typed = {"name": form.get("name", ""), "next": form.get("next", "")}
        if not await self.sessions.may_try(request):
            problem = "There were too many wrong tokens from your address. Wait a minute, and try again."
            return self._sign_in_page(
                request,
                **typed,
                token=form.get("token", ""),
                problem=problem,
                status=429,
            )
        if not self.sessions.fits(form.get("token", "").strip(), request):
            logger.warning("A sign-in with a wrong token was refused.")
            return self._sign_in_page(
                request, **typed, problem="This token is wrong.", status=403
            )
        if (name := token.user or person_name(typed["name"])) is None:
            problem = "Give your name: decisions are recorded under it."
            return self._sign_in_page(
                request,
                **typed,
                token=form.get("token", ""),
                problem=problem,
                status=422,
            )
        response = redirect(request, typed["next"])
        self.sessions.open(name, response, request)
        return response

    def _sign_in_page(
        self,
        request: Request,
        *,
        token: str = "",
        name: str = "",
        next: str = "",
        problem: str = "",
        status: int = 200,
    ) -> Response:
        known = self.sessions.token
        values = {
            "by_token": known is not None,
            "user": known and known.user,
            "problem": problem,
        }
        return self._page(
            request,
            "sign_in",
            status=status,
            token=token,
            name=name,
            next=next,
            **values,
        )

    async def _sign_out(self, request: Request) -> Response:
        await form_of(request, _visitor_in(request))
        response = redirect(request, "sign-in")
        self.sessions.close(response, request)
        return response

    # What waits

    async def _show_waiting(self, request: Request) -> Response:
        marks = await self._marks()
        offset = _offset_of(request)
        shown, rows = await self._waiting_rows(request, marks.waiting, offset)
        paging = views.paging_of(
            request, size=PAGE, offset=offset, shown=shown, total=marks.number
        )
        return self._page(
            request, "waiting", rows=rows, paging=paging, mark=marks.waiting
        )

    async def _waiting_rows(
        self, request: Request, mark: str, offset: int
    ) -> tuple[int, Markup]:
        """Render a page of the waiting calls, once for all viewers."""
        now = time.time()
        root = request.scope.get("root_path", "")
        if (state := (mark, now // _ROWS_SECONDS)) != self._rows_state or len(
            self._rows
        ) > _MOST_PARTS:
            self._rows_state = state
            self._rows = {}
        rows = self._rows
        key = (root, offset)
        if key not in rows:
            calls = await (await self._approvals()).pending(limit=PAGE, offset=offset)
            template = self._templates.get_template("rows.html.jinja")
            text = template.render(
                root=f"{root}/", calls=[views.waiting_of(call, now) for call in calls]
            )
            rows[key] = len(calls), Markup(text)  # noqa: S704  (escaped by the template)
        return rows[key]

    async def _decide_many(self, request: Request) -> Response:
        form = await form_of(request, _visitor_in(request))
        approvals = await self._approvals()
        by = _visitor_in(request).name
        outcomes = list[views.Outcome]()
        kind = form.get("decision")
        if kind not in _PAST:
            raise RefusedFormError(
                "Expected the decision approve or deny. Nothing was changed."
            )
        for item in form.getlist("item"):
            fingerprint, id = views.item_of(item)
            try:
                call = await approvals.show(id)
                _check_shown(call, fingerprint)
                if (
                    kind == "approve"
                    and not views.waiting_of(call, time.time()).selectable
                ):
                    raise ApprovalRefusedError(
                        "This one is decided on its own page: open it."
                    )
                decision = _plain_decision(kind, form, by, fingerprint)
                taken = await approvals.decide(id, decision)
                call = await approvals.show(id)
                text = _outcome_text(kind, call) if taken else _first_text(call)
            except ApprovalRefusedError as error:
                taken = False
                text = str(error)
            outcomes.append(views.outcome_of(id, taken=taken, text=text))
        return self._page(request, "outcomes", outcomes=outcomes, kind=kind)

    async def _show_approval(self, request: Request) -> Response:
        call = await (await self._approvals()).show(request.path_params["id"])
        return await self._approval_page(request, call)

    async def _approval_page(
        self,
        request: Request,
        call: PendingApproval,
        *,
        status: int = 200,
        fields: tuple[Field, ...] | None = None,
        edited: Mapping[str, Any] | None = None,
        problem: str = "",
        typed: Mapping[str, str] | None = None,
    ) -> Response:
        timeline = Timeline()
        unreadable = ""
        mark = (await self._marks()).waiting
        approvals = await self._approvals()
        by = _visitor_in(request).name
        waiting = await approvals.pending(call.run_id, limit=PAGE)
        try:
            stored = await (await self._runs()).load(call.run_id)
            timeline = await asyncio.to_thread(stored.timeline)
        except PlannerExtError as error:  # the call may still be decided: the decision binds to its fingerprint
            unreadable = str(error)
        page = views.approval_page(
            call,
            timeline,
            time.time(),
            who=views.who_decides(
                call,
                why_not=await approvals.why_not(call, by=by),
                is_checked=approvals.asks_hook,
            ),
            siblings=[one for one in waiting if one.id != call.id],
            unreadable=unreadable,
            fields=fields,
            edited=edited,
            problem=problem,
            typed=typed,
        )
        return self._page(request, "approval", status=status, page=page, mark=mark)

    async def _decide(self, request: Request) -> Response:
        form = await form_of(request, _visitor_in(request))
        approvals = await self._approvals()
        id = request.path_params["id"]
        by = _visitor_in(request).name
        call = await approvals.show(id)
        typed = {name: form.get(name, "") for name in views.TYPED}
        fields = None
        try:
            _check_shown(call, form.get("fingerprint", ""))
            if form.get("decision") in _EDITS and views.is_editable(call):
                given = {
                    key: text
                    for key, text in form.items()
                    if key.startswith("argument")
                }
                arguments, fields, problem = read_form(
                    call.parameters, call.arguments, given
                )
                if problem:
                    return await self._approval_page(
                        request,
                        call,
                        status=422,
                        fields=fields,
                        problem=problem,
                        typed=typed,
                    )
                if not _was_seen(form, call, arguments):
                    return await self._approval_page(
                        request, call, fields=fields, edited=arguments, typed=typed
                    )
                decision = Approve(
                    arguments=arguments, by=by, fingerprint=call.fingerprint
                )
            else:
                decision = _decision_on(call, form, by)
            grant = typed_grant({name: form.get(name, "") for name in views.GRANT})
            taken = await approvals.decide(id, decision, grant=grant)
        except ApprovalRefusedError as error:
            call = await approvals.show(id)
            return await self._approval_page(
                request,
                call,
                status=409,
                fields=fields,
                problem=str(error),
                typed=typed,
            )
        if taken:
            return redirect(request, views.approval_href(id))
        call = await approvals.show(id)
        return await self._approval_page(
            request, call, status=409, problem=_first_text(call), typed=typed
        )

    async def _show_grants(self, request: Request) -> Response:
        found = await (await self._approvals()).grants()
        return self._page(request, "grants", grants=found, now=time.time())

    async def _revoke(self, request: Request) -> Response:
        form = await form_of(request, _visitor_in(request))
        by = _visitor_in(request).name
        await (await self._approvals()).revoke(form.get("grant", ""), by=by)
        return redirect(request, "grants")

    async def _stream_events(self, request: Request) -> Response:
        topic: Topic = "runs" if request.query_params.get("of") == "runs" else "waiting"

        async def events() -> AsyncGenerator[bytes]:
            async with aclosing(self.live.events(topic)) as stream:
                async for event in stream:
                    # The session may have ended meanwhile.
                    if await self.sessions.visitor_of(request) is None:
                        return
                    yield event

        return StreamingResponse(events(), media_type="text/event-stream")

    # Runs

    async def _show_runs(self, request: Request) -> Response:
        runs = await self._runs()
        now = time.time()
        offset = _offset_of(request)
        statuses = [
            status
            for status in request.query_params.getlist("status")
            if status in STATUSES
        ]
        chosen = {
            name: text
            for name in _FILTERS
            if (text := request.query_params.get(name, "").strip())
        }
        problem = ""
        records = []
        total = 0
        marks = await runs.marks()
        try:
            filters = _filters(chosen)
            records = await runs.list(
                status=statuses or None, limit=PAGE, offset=offset, **filters
            )
            total = await runs.count(status=statuses or None, **filters)
        except ValueError:
            problem = "Expected a date such as 2026-11-22."
        return self._page(
            request,
            "runs",
            runs=records,
            now=now,
            paging=views.paging_of(
                request, size=PAGE, offset=offset, shown=len(records), total=total
            ),
            statuses=STATUSES,
            chosen=statuses,
            filters={name: chosen.get(name, "") for name in _FILTERS},
            problem=problem,
            mark=marks.runs,
        )

    async def _cancel_run(self, request: Request) -> Response:
        form = await form_of(request, _visitor_in(request))
        runs = await self._acting()
        run_id = request.path_params["id"]
        by = _visitor_in(request).name
        reason = form.get("reason", "")
        problem = ""
        if form.get("confirm") != "yes":
            problem = "Confirm that the run is to end. Nothing was changed."
        try:
            if not problem and not await runs.cancel(run_id, by=by, reason=reason):
                problem = "The run had ended before. Nothing was changed."
        except NotAuthorizedError as error:
            problem = str(error)
        if problem:
            return await self._show_run(
                request, status=409, problem=problem, reason=reason
            )
        return redirect(request, views.run_href(run_id))

    async def _show_run(
        self,
        request: Request,
        *,
        status: int = 200,
        problem: str = "",
        reason: str = "",
    ) -> Response:
        stored = await (await self._runs()).load(request.path_params["id"])
        calls = await (await self._approvals()).pending(
            stored.record.run_id, limit=PAGE
        )
        now = time.time()
        timeline = await asyncio.to_thread(
            lambda: fragment_of(stored.timeline(now=now))
        )
        return self._page(
            request,
            "run",
            status=status,
            may_cancel=stored.record.status in _MAY_CANCEL,
            problem=visible(problem),
            reason=reason,
            run=stored.record,
            calls=[views.waiting_of(call, now) for call in calls],
            timeline=Markup(timeline),  # noqa: S704  (escaped by its own templates)
        )

    # Pages

    async def _show_no_page(self, request: Request) -> Response:
        return self._problem_page(request, 404, "Not found", "There is no such page.")

    async def _send_static(self, request: Request) -> Response:
        if (found := _STATIC.get(request.path_params["name"])) is None:
            return self._problem_page(
                request, 404, "Not found", "There is no such file."
            )
        path, kind = found
        return Response(path.read_bytes(), media_type=kind)

    def _problem_page(
        self, request: Request, status: int, title: str, problem: object
    ) -> Response:
        return self._page(
            request,
            "problem",
            status=status,
            title=title,
            problem=visible(str(problem)),
        )

    def _page(
        self, request: Request, template: str, *, status: int = 200, **values: Any
    ) -> Response:
        """Render a page; every template gets the application's path and the visitor."""
        root = request.scope.get("root_path", "")
        visitor = request.scope.get(_VISITOR)
        text = self._templates.get_template(f"{template}.html.jinja").render(
            root=f"{root}/",
            visitor=visitor,
            shown_name=exact(visitor.name) if visitor is not None else "",
            can_sign_out=self.sessions.token is not None,
            **values,
        )
        return HTMLResponse(text, status_code=status)


def _visitor_in(request: Request) -> Visitor:
    return request.scope[_VISITOR]


def _check_shown(call: PendingApproval, fingerprint: str) -> None:
    """Refuse a decision on something other than what its page showed."""
    if fingerprint != call.fingerprint:
        raise ApprovalRefusedError(
            "The call has changed since this page was loaded. Check it, and decide again. Nothing was changed."
        )


def _was_seen(form: Form, call: PendingApproval, arguments: Mapping[str, Any]) -> bool:
    """Whether an edit is decided on: if its form showed changes, they are its changes."""
    seen = form.get("looked_at") or views.edit_digest(call, arguments)
    return form.get("decision") == "edit" and seen == views.edit_digest(call, arguments)


def _decision_on(call: PendingApproval, form: Form, by: str) -> Decision:
    """Read a decision without edited arguments."""
    match form.get("decision", ""):
        case "approve" | "deny" as kind if kind == "deny" or call.kind == "function":
            return _plain_decision(kind, form, by, call.fingerprint)
        case "retry" if call.in_doubt:
            return Approve(by=by, fingerprint=call.fingerprint)
        case "done" if call.in_doubt:
            return Supply(form.get("result", ""), by=by)
        case "answer" if call.kind == "question" and form.get("answer", "").strip():
            return Supply(form.get("answer", ""), by=by)
        case "answer":
            raise ApprovalRefusedError(
                "Write an answer, or deny the question to leave it unanswered."
            )
        case other:
            raise ApprovalRefusedError(
                f"The decision {other!r} does not fit this kind of call. Nothing was changed."
            )


def _plain_decision(kind: str, form: Form, by: str, fingerprint: str) -> Decision:
    if kind == "deny":
        return Deny(form.get("reason", ""), by=by)
    # The store refuses any other value than those of the form.
    always: Any = form.get("always") or None
    return Approve(always=always, by=by, fingerprint=fingerprint)


def _outcome_text(kind: str, call: PendingApproval) -> str:
    voted = kind == "approve" and call.tally
    return f"{_PAST[kind]}, {call.tally}" if voted else _PAST[kind]


def _first_text(call: PendingApproval) -> str:
    if call.decision is None:
        return "It no longer waits: its run continued, or ended."
    by = call.decision.by or "an unnamed person"
    at = f"{call.decision.at:%Y-%m-%d %H:%M:%S} UTC"
    return f"The first decision counts: {call.decision.kind} by {by}, {at}. Yours was recorded and changes nothing."


def _offset_of(request: Request) -> int:
    text = request.query_params.get("offset", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def _filters(chosen: Mapping[str, str]) -> RunFilters:
    """Read the filters of the runs; `ValueError` if a date is invalid."""
    days = {
        name: chosen[name]
        for name in ("created_after", "created_before")
        if name in chosen
    }
    times = {
        name: datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp()
        for name, day in days.items()
    }
    return cast(
        "RunFilters",
        {
            **{name: chosen[name] for name in ("goal", "worker") if name in chosen},
            **times,
        },
    )
