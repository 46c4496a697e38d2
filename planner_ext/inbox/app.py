"""The ASGI application of the inbox: its routes and their handlers."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias, cast
from urllib.parse import unquote, urlencode

from markupsafe import Markup
from starlette.applications import Starlette
from starlette.datastructures import ImmutableMultiDict
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from planner_ext.approval.decisions import Approve, Authorize, Decision, Deny, Supply
from planner_ext.core.errors import PlannerExtError
from planner_ext.core.values import frozen
from planner_ext.durable.approvals import Approvals
from planner_ext.durable.errors import (
    ApprovalRefusedError,
    StoreError,
    UnknownRunError,
)
from planner_ext.durable.grants import typed_grant
from planner_ext.durable.listing import (
    STATUSES,
    CallFilters,
    RunFilters,
    StoreMarks,
)
from planner_ext.durable.options import checked_hook
from planner_ext.durable.records import PendingApproval, approval_path
from planner_ext.durable.runs import RunsClient
from planner_ext.durable.store import opened_store
from planner_ext.inbox import views
from planner_ext.inbox.forms import Field, read_form
from planner_ext.inbox.live import Live, Topic
from planner_ext.inbox.operations import ACTIONS, LIMITS
from planner_ext.inbox.security import (
    Form,
    Guard,
    RefusedFormError,
    Sessions,
    SignIn,
    Token,
    Visitor,
    asked_path,
    check_form_token,
    form_of,
    parsed_form,
    person_name,
    redirect,
    typed_in,
)
from planner_ext.timeline import Timeline, fragment_of
from planner_ext.timeline.conversation import runs_around

logger = logging.getLogger(__name__)

PAGE = 50
"""Entries of a list that one page shows."""

_ROWS_SECONDS = 10
"""The longest age of the relative times in a cached list."""
_MOST_PARTS = 100
_LONG_PAGE = 200
"""Entries of a page of equal calls: there is one call to read."""
_MOST_ASKED = 500
"""The oldest calls that are grouped, and about which the hook is asked whether a visitor may decide them."""
_LONG_RUN = 300
"""The most calls of a run whose page has all details."""
_MOST_RUNS = 1_000
"""The runs that one form acts on."""
_MOST_KEPT = 50
"""The outcomes of many decisions, and the texts typed before a sign-in, that are kept."""

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
_SIGNED_OUT = "You had been signed out: nothing was decided. Read it again, and decide."
_NO_DATE = "Expected a date such as 2026-11-22."
_Handler: TypeAlias = Callable[[Request], Awaitable[Response]]
_RUN_FILTERS = ("goal", "worker", "tag", "created_after", "created_before")
_CALL_FILTERS = ("text", "function", "role", "tag", "run_id", "equal_to", "expires_in")
_DECISION_FILTERS = (
    "text",
    "function",
    "role",
    "tag",
    "run_id",
    "by",
    "kind",
    "decided_after",
    "decided_before",
)


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


@frozen
class _Part:
    """A page of the waiting calls, as HTML.

    Attributes:
        shown: The rows of the page: calls, or groups of equal ones.
        calls: The calls of these.
        total: The rows of the list.
        size: How many a page shows.
        others: How many of the oldest ones the hook keeps from the person.
        later: How many are not listed, since there are older ones.
        person: Whose calls these are; "" for all.
        is_checked: Whether a hook checks who decides.
    """

    shown: int
    calls: int
    total: int
    size: int
    rows: Markup
    others: int
    later: int
    person: str
    is_checked: bool


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
        self._rows: dict[object, _Part] = {}
        self._kept: dict[str, tuple[str, object]] = {}
        self._rows_state = "", 0.0
        self.live = Live(self._marks)
        self._templates = views.environment()

    def routes(self) -> list[Route]:
        """List the routes; all but sign-in and static files need a signed-in visitor."""
        pages: list[tuple[str, str, _Handler]] = [
            ("/", "GET", self._show_waiting),
            ("/approvals", "POST", self._decide_many),
            ("/next", "GET", self._show_next),
            ("/outcomes/{key}", "GET", self._show_outcomes),
            ("/decisions", "GET", self._show_decisions),
            ("/decisions.{form}", "GET", self._send_decisions),
            ("/approvals/{id:path}", "GET", self._show_approval),
            ("/approvals/{id:path}", "POST", self._decide),
            ("/grants", "GET", self._show_grants),
            ("/grants", "POST", self._revoke),
            ("/runs", "GET", self._show_runs),
            ("/runs/{id}", "GET", self._show_run),
            ("/runs", "POST", self._act_on_many),
            ("/runs/{id}/{action}", "POST", self._act),
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
                return await self._sign_in_page(
                    request,
                    next=asked_path(request),
                    typed=await typed_in(request),
                    status=401,
                )
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
                response = await self._problem_page(request, status, title, error)
            self.sessions.keep_form_token(visitor, response, request)
            return response

        return handle

    # Sign-in

    async def _show_sign_in(self, request: Request) -> Response:
        token = request.query_params.get("token", "")
        # A server writes the query into its log after the response.
        request.scope["query_string"] = b""
        return await self._sign_in_page(request, token=token)

    async def _sign_in_by_token(self, request: Request) -> Response:
        token = self.sessions.token
        if token is None:
            return await self._sign_in_page(request, status=404)
        try:
            form = await form_of(request, None)
        except RefusedFormError as error:
            return await self._sign_in_page(request, problem=str(error), status=400)
        typed = {name: form.get(name, "") for name in ("name", "next", "typed")}
        if not await self.sessions.may_try(request):
            problem = "There were too many wrong tokens from your address. Wait a minute, and try again."
            return await self._sign_in_page(
                request,
                **typed,
                token=form.get("token", ""),
                problem=problem,
                status=429,
            )
        given = form.get("token", "").strip()
        if not self.sessions.fits(given, request):
            logger.warning("A sign-in with a wrong token was refused.")
            return await self._sign_in_page(
                request, **typed, problem="This token is wrong.", status=403
            )
        name = token.user or person_name(typed["name"])
        if name is None:
            problem = "Give your name: decisions are recorded under it."
            return await self._sign_in_page(
                request,
                **typed,
                token=form.get("token", ""),
                problem=problem,
                status=422,
            )
        to = typed["next"]
        if typed["typed"]:
            draft = self._keep(name, parsed_form(typed["typed"]))
            to += f"{'&' if '?' in to else '?'}draft={draft}"
        response = redirect(request, to)
        self.sessions.open(name, response, request)
        return response

    async def _sign_in_page(
        self,
        request: Request,
        *,
        token: str = "",
        name: str = "",
        next: str = "",
        typed: str = "",
        problem: str = "",
        status: int = 200,
    ) -> Response:
        known = self.sessions.token
        values = {
            "by_token": known is not None,
            "user": known and known.user,
            "problem": problem,
            "fields": [
                (name, text)
                for name, text in parsed_form(typed).multi_items()
                if name != "form_token"
            ],
        }
        return await self._page(
            request,
            "sign_in",
            status=status,
            token=token,
            name=name,
            next=next,
            typed=typed,
            **values,
        )

    def _keep(self, author: str, value: object) -> str:
        """Keep a value for a person's next page, and return its key."""
        key = secrets.token_urlsafe(12)
        self._kept[key] = author, value
        if len(self._kept) > _MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        return key

    def _kept_of(self, request: Request, key: str) -> object:
        author, value = self._kept.get(key, ("", None))
        return value if author == _visitor_in(request).name else None

    async def _sign_out(self, request: Request) -> Response:
        await form_of(request, _visitor_in(request))
        response = redirect(request, "sign-in")
        self.sessions.close(response, request)
        return response

    # What waits

    async def _show_waiting(self, request: Request) -> Response:
        marks = await self._marks()
        offset = _offset_of(request)
        chosen = _chosen(request, _CALL_FILTERS)
        part = await self._part(request, marks.waiting, offset)
        paging = views.paging_of(
            request,
            size=part.size,
            offset=offset,
            shown=part.shown,
            total=part.total,
        )
        return await self._page(
            request,
            "waiting",
            part=part,
            paging=paging,
            filters=chosen,
            query=_query_of(request),
            grouped=_query_of(request, groups="yes"),
            ungrouped=_query_of(request, groups=""),
            later=_later_query(request),
            mark=marks.waiting,
            held=views.hold_text(marks.hold),
        )

    async def _part(self, request: Request, mark: str, offset: int) -> "_Part":
        """Render a page of the waiting calls, once for all viewers who may decide the same."""
        now = time.time()
        approvals = await self._approvals()
        person = _person(request, approvals)
        is_grouped = request.query_params.get("groups") == "yes"
        if (state := (mark, now // _ROWS_SECONDS)) != self._rows_state or len(
            self._rows
        ) > _MOST_PARTS:
            self._rows_state = state
            self._rows = {}
        root = request.scope.get("root_path", "")
        key = (root, request.url.query, person)
        rows = self._rows  # those of this state: a later request may begin the next one
        known = rows.get(key)
        if known is not None:
            return known
        filters, run_id = _call_filters(request, now)
        size = _LONG_PAGE if "equal_to" in filters else PAGE
        total = await approvals.count(run_id, **filters)
        others = 0
        later = 0
        if person or is_grouped:
            found = await self._decidable(request, filters, run_id, _MOST_ASKED)
            later = max(total - _MOST_ASKED, 0)
            others = total - later - len(found)
            groups = views.grouped(found) if is_grouped else [[one] for one in found]
            total = len(groups)
            groups = groups[offset : offset + size]
        else:
            found = await approvals.pending(
                run_id, limit=size, offset=offset, **filters
            )
            groups = [[one] for one in found]
        equal = await approvals.equal_calls()
        text = await asyncio.to_thread(
            self._templates.get_template("rows.html.jinja").render,
            root=f"{root}/",
            groups=groups,
            equal=equal,
            query=_query_of(request),
            all=request.query_params.get("select") == "all",
        )
        part = _Part(
            shown=len(groups),
            calls=sum(map(len, groups)),
            total=total,
            size=size,
            rows=Markup(text),  # noqa: S704  (escaped by the template)
            others=others,
            later=later,
            person=person,
            is_checked=approvals.asks_hook,
        )
        rows[key] = part
        return part

    async def _decidable(
        self, request: Request, filters: CallFilters, run_id: str | None, limit: int
    ) -> list[PendingApproval]:
        """List the oldest calls, without those that the hook keeps from the person of the list."""
        approvals = await self._approvals()
        if person := _person(request, approvals):
            return await approvals.decidable(
                run_id, person=person, limit=limit, **filters
            )
        return await approvals.pending(run_id, limit=limit, **filters)

    async def _show_next(self, request: Request) -> Response:
        return redirect(
            request, await self._next_of(request, request.query_params.get("after", ""))
        )

    async def _next_of(self, request: Request, id: str) -> str:
        """Return the address of the next call in the visitor's list, or of the empty list."""
        filters, run_id = _call_filters(request, time.time())
        limit = 2
        if _person(request, await self._approvals()):
            limit = _MOST_ASKED
        behind: CallFilters = {**filters, "after": id}
        for chosen in (behind, filters):
            for call in await self._decidable(request, chosen, run_id, limit):
                if call.id != id:
                    return approval_path(call.id) + _query_of(request)
        return _query_of(request)

    async def _decide_many(self, request: Request) -> Response:
        form = await form_of(request, _visitor_in(request))
        approvals = await self._approvals()
        by = _visitor_in(request).name
        outcomes = list[views.Outcome]()
        kind = form.get("decision", "")
        if kind not in _PAST:
            raise RefusedFormError(
                "Expected the decision approve or deny. Nothing was changed."
            )
        chosen = [one for text in form.getlist("item") for one in views.items_of(text)]
        for fingerprint, id in chosen:
            try:
                call = await approvals.show(id)
                _check_shown(call, fingerprint)
                if kind == "approve" and not views.is_selectable(call):
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
            outcomes.append(
                views.Outcome(id=id, href=approval_path(id), taken=taken, text=text)
            )
        key = self._keep(by, ("call", _PAST[kind], outcomes))
        return redirect(request, f"outcomes/{key}{_query_of(request)}")

    async def _show_outcomes(self, request: Request) -> Response:
        """Show what many decisions led to, while this process remembers it."""
        kept = self._kept_of(request, request.path_params["key"])
        if not isinstance(kept, tuple):
            by = _visitor_in(request).name
            return redirect(request, f"decisions?{urlencode({'by': by})}")
        noun, done, outcomes = cast("tuple[str, str, Sequence[views.Outcome]]", kept)
        return await self._page(
            request,
            "outcomes",
            outcomes=outcomes,
            noun=noun,
            done=done,
            query=_query_of(request),
        )

    # Decisions

    async def _show_decisions(self, request: Request) -> Response:
        approvals = await self._approvals()
        offset = _offset_of(request)
        chosen = _chosen(request, _DECISION_FILTERS)
        problem = ""
        calls: Sequence[PendingApproval] = ()
        total = 0
        try:
            filters, run_id = _decision_filters(chosen)
            calls = await approvals.decisions(
                run_id, limit=PAGE, offset=offset, **filters
            )
            total = await approvals.count_decisions(run_id, **filters)
        except ValueError:
            problem = _NO_DATE
        return await self._page(
            request,
            "decisions",
            calls=calls,
            paging=views.paging_of(
                request, size=PAGE, offset=offset, shown=len(calls), total=total
            ),
            filters=chosen,
            problem=problem,
            exported=urlencode(chosen),
        )

    async def _send_decisions(self, request: Request) -> Response:
        """Send all chosen decisions as CSV or JSON, as they are read."""
        writer = views.WRITERS.get(request.path_params["form"])
        if writer is None:
            return await self._show_no_page(request)
        media_type, write = writer
        try:
            filters, run_id = _decision_filters(_chosen(request, _DECISION_FILTERS))
        except ValueError:
            return await self._show_decisions(request)
        # A decision that is made meanwhile would shift the others.
        filters.setdefault("decided_before", time.time())
        approvals = await self._approvals()

        async def parts() -> AsyncGenerator[str]:
            offset = 0
            while True:
                calls = await approvals.decisions(
                    run_id, limit=_LONG_PAGE, offset=offset, **filters
                )
                yield write(calls, is_first=offset == 0)
                if not calls:
                    return
                offset += _LONG_PAGE

        return StreamingResponse(parts(), media_type=media_type)

    async def _show_approval(self, request: Request) -> Response:
        id = request.path_params["id"]
        draft = self._kept_of(request, request.query_params.get("draft", ""))
        if isinstance(draft, ImmutableMultiDict):
            form = cast("Form", draft)
            return await self._refused_page(request, id, form, _SIGNED_OUT, 200)
        call = await (await self._approvals()).show(id)
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
        around = [Timeline()]
        unreadable = ""
        marks = await self._marks()
        approvals = await self._approvals()
        by = _visitor_in(request).name
        waiting = await approvals.pending(call.run_id, limit=PAGE)
        try:
            stored = await (await self._runs()).load(call.run_id)
            timeline = await asyncio.to_thread(stored.timeline)
            around = runs_around(timeline, call.id)
        except PlannerExtError as error:  # the call may still be decided: the decision binds to its fingerprint
            unreadable = str(error)
        now = datetime.now(UTC)
        expired = call.expires_at is not None and call.expires_at <= now
        is_open = call.status == "open"
        why_not = await approvals.why_not(call, by=by)
        return await self._page(
            request,
            "approval",
            status=status,
            call=call,
            timeline=around[-1],
            outer=around[:-1],
            standing="expired" if is_open and expired else call.status,
            is_open=is_open and not expired,
            may=not why_not,
            who=views.who_decides(
                call, why_not=why_not, is_checked=approvals.asks_hook
            ),
            siblings=[one for one in views.told_apart(waiting) if one[0].id != call.id],
            query=_query_of(request),
            unreadable=unreadable,
            fields=fields,
            edited=edited,
            problem=problem,
            typed=typed or {},
            mark=marks.waiting,
            held=views.hold_text(marks.hold),
        )

    async def _decide(self, request: Request) -> Response:
        visitor = _visitor_in(request)
        form = await form_of(request, None)
        approvals = await self._approvals()
        id = request.path_params["id"]
        call = await approvals.show(id)
        kind, _, then = form.get("decision", "").partition(" ")
        fields = None
        try:
            check_form_token(form, visitor)
            _check_shown(call, form.get("fingerprint", ""))
            if kind in _EDITS and views.is_editable(call):
                arguments, fields, problem = _edit_of(form, call)
                if problem:
                    return await self._approval_page(
                        request,
                        call,
                        status=422,
                        fields=fields,
                        problem=problem,
                        typed=form,
                    )
                if not _was_seen(form, call, arguments):
                    return await self._approval_page(
                        request, call, fields=fields, edited=arguments, typed=form
                    )
                decision = Approve(
                    arguments=arguments,
                    by=visitor.name,
                    fingerprint=call.fingerprint,
                )
            else:
                decision = _decision_on(call, kind, form, visitor.name)
            terms = {name: form.get(name, "") for name in views.GRANT}
            grant = typed_grant(terms)
            taken = await approvals.decide(id, decision, grant=grant)
        except (ApprovalRefusedError, RefusedFormError) as error:
            status = 403 if isinstance(error, RefusedFormError) else 409
            return await self._refused_page(request, id, form, str(error), status)
        if taken and then:
            return redirect(request, await self._next_of(request, id))
        if taken:
            return redirect(request, approval_path(id) + _query_of(request))
        call = await approvals.show(id)
        return await self._refused_page(request, id, form, _first_text(call), 409)

    async def _refused_page(
        self, request: Request, id: str, form: Form, problem: str, status: int
    ) -> Response:
        """Show a call as it is now, with what was typed in a form that was not taken."""
        call = await (await self._approvals()).show(id)
        fields = None
        if form.get("decision") in _EDITS and views.is_editable(call):
            _, fields, _ = _edit_of(form, call)
        return await self._approval_page(
            request,
            call,
            status=status,
            fields=fields,
            problem=problem,
            typed=form,
        )

    async def _show_grants(self, request: Request) -> Response:
        found = await (await self._approvals()).grants()
        return await self._page(request, "grants", grants=found)

    async def _revoke(self, request: Request) -> Response:
        form = await form_of(request, _visitor_in(request))
        by = _visitor_in(request).name
        approvals = await self._approvals()
        for grant in form.getlist("grant"):
            await approvals.revoke(grant, by=by)
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
        statuses: Sequence[str] = ()
        chosen = _chosen(request, _RUN_FILTERS)
        problem = ""
        records = []
        total = 0
        marks = await runs.marks()
        try:
            statuses, filters = _run_filters(request)
            records = await runs.list(
                status=statuses or None, limit=PAGE, offset=offset, **filters
            )
            total = await runs.count(status=statuses or None, **filters)
        except ValueError:
            problem = _NO_DATE
        return await self._page(
            request,
            "runs",
            runs=records,
            now=now,
            paging=views.paging_of(
                request, size=PAGE, offset=offset, shown=len(records), total=total
            ),
            statuses=[("", "any"), *((one, one.replace("_", " ")) for one in STATUSES)],
            chosen=statuses,
            filters=chosen,
            problem=problem,
            mark=marks.runs,
            held=views.hold_text(marks.hold),
            query=request.url.query,
        )

    async def _act(self, request: Request) -> Response:
        form = await form_of(request, _visitor_in(request))
        run_id = request.path_params["id"]
        name = request.path_params["action"]
        action = ACTIONS.get(name)
        if action is None:
            return await self._show_no_page(request)
        by = _visitor_in(request).name
        typed = {**form, "action": name}
        try:
            done = await action.act(await self._acting(), run_id, form, by)
        except UnknownRunError:
            raise
        except PlannerExtError as error:
            return await self._show_run(request, status=409, problem=error, typed=typed)
        if not done:
            return await self._show_run(
                request, status=409, problem=action.unchanged, typed=typed
            )
        return redirect(
            request, views.run_href(done if isinstance(done, str) else run_id)
        )

    async def _act_on_many(self, request: Request) -> Response:
        form = await form_of(request, _visitor_in(request))
        action = ACTIONS.get(form.get("action", ""))
        if action is None:
            return await self._show_no_page(request)
        by = _visitor_in(request).name
        runs = await self._acting()
        chosen = [unquote(item) for item in form.getlist("item")]
        if form.get("every") == "yes":
            statuses, filters = _run_filters(request)
            found = runs.find(status=statuses or action.statuses or None, **filters)
            chosen = [run_id async for run_id in found]
        outcomes: list[views.Outcome] = []
        for run_id in chosen[:_MOST_RUNS]:
            try:
                taken = bool(await action.act(runs, run_id, form, by))
                text = action.done if taken else action.unchanged
            except PlannerExtError as error:
                taken = False
                text = str(error)
            outcomes.append(
                views.Outcome(
                    id=run_id, href=views.run_href(run_id), taken=taken, text=text
                )
            )
        key = self._keep(by, ("run", action.done, outcomes))
        return redirect(request, f"outcomes/{key}")

    async def _show_run(
        self,
        request: Request,
        *,
        status: int = 200,
        problem: object = "",
        typed: Mapping[str, str] | None = None,
    ) -> Response:
        runs = await self._runs()
        stored = await runs.load(request.path_params["id"])
        record = stored.record
        calls = await (await self._approvals()).pending(record.run_id, limit=PAGE)
        now = time.time()
        timeline = await asyncio.to_thread(stored.timeline, now=now)
        iterations = timeline.iterations
        number = request.query_params.get("iteration")
        chosen = tuple(one for one in iterations if str(one.number) == number)
        shown = replace(timeline, iterations=chosen) if chosen else timeline
        is_long = sum(len(one.calls) for one in shown.iterations) > _LONG_RUN
        here = f"{request.scope.get('root_path', '')}/{views.run_href(record.run_id)}"
        details = f"{here}?iteration=" if is_long and not chosen else ""
        drawn = await asyncio.to_thread(fragment_of, shown, details=details)
        offered = [
            name
            for name, action in ACTIONS.items()
            if record.status in (action.statuses or STATUSES)
        ]
        return await self._page(
            request,
            "run",
            status=status,
            offered=offered,
            labels=LIMITS,
            problem=str(problem),
            typed=typed or {},
            run=record,
            now=now,
            iterations=[
                (str(one.number), "the plan" if one.number < 0 else str(one.number))
                for one in iterations
            ],
            is_part=bool(chosen),
            calls=views.told_apart(calls),
            timeline=Markup(drawn),  # noqa: S704  (escaped by its own templates)
            mark=(await self._marks()).runs,
        )

    # Pages

    async def _show_no_page(self, request: Request) -> Response:
        return await self._problem_page(
            request, 404, "Not found", "There is no such page."
        )

    async def _send_static(self, request: Request) -> Response:
        found = _STATIC.get(request.path_params["name"])
        if found is None:
            return await self._problem_page(
                request, 404, "Not found", "There is no such file."
            )
        path, kind = found
        return Response(path.read_bytes(), media_type=kind)

    async def _problem_page(
        self, request: Request, status: int, title: str, problem: object
    ) -> Response:
        return await self._page(
            request,
            "problem",
            status=status,
            title=title,
            problem=str(problem),
        )

    async def _page(
        self, request: Request, template: str, *, status: int = 200, **values: Any
    ) -> Response:
        """Render a page, in a thread; every template gets the application's path and the visitor."""
        root = request.scope.get("root_path", "")
        text = await asyncio.to_thread(
            self._templates.get_template(f"{template}.html.jinja").render,
            root=f"{root}/",
            visitor=request.scope.get(_VISITOR),
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


def _edit_of(
    form: Form, call: PendingApproval
) -> tuple[dict[str, Any], tuple[Field, ...], str]:
    """Read the arguments of an edit; see `read_form`."""
    given = {key: text for key, text in form.items() if key.startswith("argument")}
    return read_form(call.parameters, call.arguments, given)


def _was_seen(form: Form, call: PendingApproval, arguments: Mapping[str, Any]) -> bool:
    """Whether an edit is decided on: if its form showed changes, they are its changes."""
    seen = form.get("looked_at") or views.edit_digest(call, arguments)
    return form.get("decision") == "edit" and seen == views.edit_digest(call, arguments)


def _decision_on(call: PendingApproval, kind: str, form: Form, by: str) -> Decision:
    """Read a decision without edited arguments."""
    match kind:
        case "approve" | "deny" if kind == "deny" or call.kind == "function":
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
    if text.isascii() and text.isdigit() and len(text) < 10:
        return int(text)
    return 0


def _query_of(request: Request, **changes: str) -> str:
    """Return the filters of the visitor's list, to keep them in an address; "" without one."""
    given = {**request.query_params, **changes}
    kept = {
        name: text
        for name in (*_CALL_FILTERS, "person", "groups")
        # Without a person the list is the visitor's, with "" everybody's.
        if (text := given.get(name)) or (name == "person" and text is not None)
    }
    return f"?{urlencode(kept)}" if kept else ""


def _later_query(request: Request) -> str:
    """Return the query of the calls behind the oldest ones: each call, of all persons."""
    query = _query_of(request, groups="", person="")
    return f"{query}{'&' if query else '?'}offset={_MOST_ASKED}"


def _person(request: Request, approvals: Approvals) -> str:
    """Return whose calls a list has, where a hook says who decides: by default the visitor's; "" for all."""
    if not approvals.asks_hook:
        return ""
    return request.query_params.get("person", _visitor_in(request).name).strip()


def _chosen(request: Request, names: Sequence[str]) -> dict[str, str]:
    """Return the filters of a page that are not blank, as they were typed."""
    return {
        name: text
        for name in names
        if (text := request.query_params.get(name, "").strip())
    }


def _filters(chosen: Mapping[str, str]) -> dict[str, object]:
    """Read filters; `ValueError` if a date is invalid."""
    return {
        name: datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
        if name.endswith(("_after", "_before"))
        else text
        for name, text in chosen.items()
    }


def _run_filters(request: Request) -> tuple[Sequence[str], RunFilters]:
    """Read statuses and filters of runs; `ValueError` if a date is invalid."""
    given = request.query_params.getlist("status")
    filters = _filters(_chosen(request, _RUN_FILTERS))
    return [one for one in given if one in STATUSES], cast("RunFilters", filters)


def _call_filters(request: Request, now: float) -> tuple[CallFilters, str | None]:
    """Read the filters of what waits, and the run."""
    filters = _filters(_chosen(request, _CALL_FILTERS))
    run_id = filters.pop("run_id", None)
    seconds = str(filters.pop("expires_in", ""))
    if seconds.isdecimal() and len(seconds) < 10:
        filters["expires_before"] = now + int(seconds)
    return cast("CallFilters", filters), cast("str | None", run_id)


def _decision_filters(chosen: Mapping[str, str]) -> tuple[CallFilters, str | None]:
    """Read the filters of decisions, and the run; `ValueError` if a date is invalid."""
    filters = _filters(chosen)
    run_id = filters.pop("run_id", None)
    return cast("CallFilters", filters), cast("str | None", run_id)
