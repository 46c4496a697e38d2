"""Access to the inbox: sign-in, sessions, forged requests, security headers, size limits.

A request that changes something must come from a page of this application: ``Origin``
and ``Sec-Fetch-Site``, if sent, must match, and its form must hold the visitor's form
token. With a `Token`, the ``Host`` must be one of its names: otherwise a foreign page
could read the inbox under a foreign name for this address (DNS rebinding).
"""

import asyncio
import re
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from time import monotonic
from typing import TypeAlias
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.datastructures import ImmutableMultiDict, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from planner_ext.core.errors import PlannerExtError, shown
from planner_ext.engine.concurrency import called
from planner_ext.inbox.connections import client_of

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""The names by which a browser reaches its own machine."""

_SESSION_SECONDS = 12 * 3600
_SHORTEST_TOKEN = 20
_MOST_WRONG = 20
_WRONG_SECONDS = 60.0
"""After so many wrong tokens within these seconds, a client's sign-ins are refused."""
_MOST_CLIENTS = 1_000
"""Clients whose wrong tokens are counted: those who were wrong last."""
_FORM_SECONDS = 30.0
"""The time until a form is there."""
_LONGEST_NAME = 200
_LARGEST_BODY = 1_000_000
_MOST_FIELDS = 2_000
_SESSION = "planner_ext_session"
_FORM = "planner_ext_form"

_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; form-action 'self'; "
        "frame-ancestors 'none'; base-uri 'none'; img-src 'self' data:"
    ),
    "x-content-type-options": "nosniff",
    # Not no-referrer: under that policy browsers send the Origin of a form as "null".
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


@dataclass(frozen=True, slots=True)
class Visitor:
    """A person who is signed in.

    Attributes:
        name: The name under which decisions are recorded.
        form_token: What each form of this visitor must hold.
    """

    name: str
    form_token: str


class Token:
    """Sign-in by a token, under the fixed ``user`` or a name that the holder enters.

    Sessions live in the serving process, for twelve hours. An entered name is not
    verified: where names matter, as with roles, fix ``user``, or let the host
    application sign people in.

    After 20 wrong tokens within a minute from one address (of IPv6, one network) its
    sign-ins are refused for the rest of it, also with the right token; who is signed in
    continues. Behind a proxy, uvicorn takes the address from headers: see
    ``--forwarded-allow-ips`` there.

    Attributes:
        value: The token.
        user: The name of everyone who signs in; None asks for it.
        hosts: The names under which the inbox is reached; any other ``Host`` is
            refused.
    """

    def __init__(
        self,
        value: str | None = None,
        *,
        user: str | None = None,
        hosts: Collection[str] = LOOPBACK,
    ) -> None:
        """Create a token.

        Args:
            value: At least 20 characters; None makes a random one.
            user: The name of everyone who signs in; None asks for it.
            hosts: The names, without port, under which the inbox is reached. Default:
                those of this machine.

        Raises:
            PlannerExtError: If the token is too short, or a name or host is invalid.
        """
        if value is not None and len(value) < _SHORTEST_TOKEN:
            raise PlannerExtError(
                f"A token must have at least {_SHORTEST_TOKEN} characters; got {len(value)}."
            )
        if user is not None and person_name(user) is None:
            raise PlannerExtError(
                f"user must be a name of 1 to {_LONGEST_NAME} visible characters; got {shown(user)}."
            )
        for host in hosts:
            if _name_of(f"[{host}]" if ":" in host else host) != host.lower():
                raise PlannerExtError(
                    "A host must be a name without scheme, port and path, such as inbox.example.com; got "
                    f"{shown(host)}."
                )
        self.value = value or secrets.token_urlsafe(32)
        self.user = user
        self.hosts = tuple(host.lower() for host in hosts)


SignIn: TypeAlias = Token | Callable[[Request], str | Awaitable[str | None] | None]
"""A `Token`, or a function that returns the name of a request's user, or None."""


class Sessions:
    """Identifies the sender of a request.

    Attributes:
        token: None if the host application signs people in.
    """

    def __init__(self, sign_in: SignIn) -> None:
        self.token = sign_in if isinstance(sign_in, Token) else None
        self._sign_in = sign_in
        self._open: dict[str, tuple[Visitor, float]] = {}
        self._wrong: dict[str, deque[float]] = {}

    async def may_try(self, request: Request) -> bool:
        """Whether a token is compared: not after too many wrong ones of its client.

        A visitor who is signed in may sign in again in any case.
        """
        wrong = self._wrong.get(_client_of(request))
        if (
            wrong is None
            or len(wrong) < _MOST_WRONG
            or monotonic() - wrong[0] > _WRONG_SECONDS
        ):
            return True
        return await self.visitor_of(request) is not None

    def fits(self, token: str, request: Request) -> bool:
        """Compare a token in constant time, and count a wrong one for its client."""
        assert self.token is not None, "people sign in by a token"
        if same_text(token, self.token.value):
            return True
        client = _client_of(request)
        wrong = self._wrong.pop(client, deque(maxlen=_MOST_WRONG))
        wrong.append(monotonic())
        self._wrong[client] = wrong  # as the last one
        if len(self._wrong) > _MOST_CLIENTS:
            del self._wrong[next(iter(self._wrong))]
        return False

    async def visitor_of(self, request: Request) -> Visitor | None:
        """Return the signed-in sender of a request, or None."""
        if isinstance(self._sign_in, Token):
            visitor, until = self._open.get(
                request.cookies.get(_session_cookie(request), ""), (None, 0.0)
            )
            return visitor if monotonic() < until else None
        name: object = await called(self._sign_in, request)
        if name is None:
            return None
        if not isinstance(name, str) or not name.strip():
            raise PlannerExtError(
                f"sign_in must return a name, or None; got {shown(name)}."
            )
        return Visitor(name, request.cookies.get(_FORM) or secrets.token_urlsafe(32))

    def keep_form_token(
        self, visitor: Visitor, response: Response, request: Request
    ) -> None:
        """Set the form token's cookie if the host application keeps the sessions."""
        if self.token is None and request.cookies.get(_FORM) != visitor.form_token:
            _set_cookie(response, request, _FORM, visitor.form_token)

    def open(self, name: str, response: Response, request: Request) -> None:
        """Begin a session, and set its cookie."""
        now = monotonic()
        key = secrets.token_urlsafe(32)
        self._open = {
            each: session for each, session in self._open.items() if session[1] > now
        }
        self._open[key] = (
            Visitor(name, secrets.token_urlsafe(32)),
            now + _SESSION_SECONDS,
        )
        _set_cookie(response, request, _session_cookie(request), key)

    def close(self, response: Response, request: Request) -> None:
        """End a request's session, and delete its cookie."""
        name = _session_cookie(request)
        self._open.pop(request.cookies.get(name, ""), None)
        response.delete_cookie(name, path=_cookie_path(request))


def _client_of(request: Request) -> str:
    return client_of(request.client.host if request.client is not None else None)


def same_text(one: str, other: str) -> bool:
    """Compare secret texts in constant time."""
    return secrets.compare_digest(
        one.encode("utf-8", "replace"), other.encode("utf-8", "replace")
    )


def _set_cookie(response: Response, request: Request, name: str, value: str) -> None:
    response.set_cookie(
        name,
        value,
        max_age=_SESSION_SECONDS,
        path=_cookie_path(request),
        secure=request.url.scheme == "https",
        httponly=True,
        samesite="strict",
    )


def _session_cookie(request: Request) -> str:
    """Name the cookie by the port: browsers send cookies to every port of a host."""
    port = request.url.port
    return _SESSION if port is None else f"{_SESSION}_{port}"


def _cookie_path(request: Request) -> str:
    return request.scope.get("root_path") or "/"


_LOCAL = re.compile(r"(?![/\\])[!-~]*")
"""Neither ``//host`` nor a form that a browser corrects to it."""


def redirect(request: Request, to: str) -> Response:
    """Redirect to a page of this application; any other target becomes its root."""
    local = to if _LOCAL.fullmatch(to) else ""
    return RedirectResponse(
        f"{request.scope.get('root_path', '')}/{local}", status_code=303
    )


def asked_path(request: Request) -> str:
    """Return the requested page, relative to the root, to show it after the sign-in."""
    path = request.scope.get("raw_path", b"").decode("ascii", "replace")
    path = path.removeprefix(request.scope.get("root_path", "")).removeprefix("/")
    if request.method != "GET" and not path.startswith("approvals/"):
        return ""
    return f"{path}?{request.url.query}" if request.url.query else path


async def typed_in(request: Request) -> str:
    """Return the form of a request without a session, to show it after the sign-in; "" if there is none."""
    if request.method != "POST" or not asked_path(request):
        return ""
    try:
        return urlencode((await form_of(request, None)).multi_items())
    except RefusedFormError:
        return ""


class RefusedFormError(PlannerExtError):
    """A form is too large, late, malformed, or lacks the visitor's form token."""


Form: TypeAlias = ImmutableMultiDict[str, str]
"""The fields of a form; line ends are line feeds."""


async def form_of(
    request: Request, visitor: Visitor | None, *, seconds: float = _FORM_SECONDS
) -> Form:
    """Read a form, and check its token if there is a visitor."""
    try:
        async with asyncio.timeout(seconds):
            body = await _body_of(request)
    except TimeoutError:
        raise RefusedFormError(
            f"The form did not arrive within {seconds:g} seconds. Nothing was changed."
        ) from None
    form = parsed_form(body.decode("ascii", "replace"))
    if visitor is not None:
        check_form_token(form, visitor)
    return form


def parsed_form(text: str) -> Form:
    """Read the fields of a form from a request's body."""
    try:
        fields = parse_qsl(
            text, keep_blank_values=True, errors="strict", max_num_fields=_MOST_FIELDS
        )
    except ValueError as error:
        raise RefusedFormError(
            "This request is not a form of this page. Nothing was changed."
        ) from error
    lines = [(name, value.replace("\r\n", "\n")) for name, value in fields]
    return Form(lines)


def check_form_token(form: Form, visitor: Visitor) -> None:
    """Refuse a form that was not made for this visitor's session."""
    if not same_text(form.get("form_token", ""), visitor.form_token):
        raise RefusedFormError(
            "This form belongs to another session: you may have signed in again since. Nothing was changed. Reload the "
            "page and decide again."
        )


async def _body_of(request: Request) -> bytes:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _LARGEST_BODY:
            raise RefusedFormError(
                f"A form may have {_LARGEST_BODY:,} bytes; this one has more. Nothing was changed."
            )
    return body


def person_name(text: str) -> str | None:
    """Return an entered name without outer blanks; None if it is invalid."""
    name = text.strip()
    if 0 < len(name) <= _LONGEST_NAME and name.isprintable():
        return name
    return None


class Guard:
    """Refuses requests from other sites, and adds the security headers to every response."""

    def __init__(self, app: ASGIApp, *, token: Token | None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        problem = self._problem(Request(scope))
        refused = (
            None if problem is None else PlainTextResponse(problem, status_code=403)
        )
        await (refused or self._app)(scope, receive, send_with_headers)

    def _problem(self, request: Request) -> str | None:
        """Describe why a request is refused before it is read; None if it passes."""
        host = request.headers.get("host", "")
        if self._token is not None and _name_of(host) not in self._token.hosts:
            return "The inbox is not served under this name. Open it at the address that was printed at its start."
        if request.method in ("GET", "HEAD"):
            return None
        origin = request.headers.get("origin")
        if origin is not None and _place_of(origin) != host.lower():
            return "This request comes from another site. Nothing was changed."
        if request.headers.get("sec-fetch-site", "same-origin") not in (
            "same-origin",
            "none",
        ):
            return "This request comes from another site. Nothing was changed."
        return None


def _place_of(origin: str) -> str | None:
    """Return the name and port in an ``Origin`` header; None if it is invalid."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def _name_of(host: str) -> str | None:
    """Return the name in a ``Host`` header; None if it is invalid."""
    try:
        address = urlsplit(f"//{host}")
        return None if address.port == 0 else address.hostname
    except ValueError:
        return None
