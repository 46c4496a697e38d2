"""The errors of a store, and the redaction of passwords in addresses.

StoreError (PlannerExtError)     a store that cannot be used: missing, locked, full, read-only, not reached, damaged
├── RunFencedError               another worker has continued the run; this one stops before its next side effect
└── WorkerInUseError             the worker's name belongs to a process that lives
UnknownRunError                  no run has this name
RunConflictError                 the name belongs to a run with another goal or other inputs, or the run is in use
ApprovalRefusedError             a decision that cannot be taken: unknown, expired, altered, or made for another call
NotAuthorizedError               the authorize hook refuses, or is missing (also the core's RunRefusedError)
"""

import re
from contextlib import AbstractContextManager
from urllib.parse import unquote

from planner_ext.core.errors import PlannerExtError, RunRefusedError, reading


class StoreError(PlannerExtError):
    """A store cannot be used; says why, and the way out. Recorded facts stay recorded."""

    may_pass = True


class DuplicateRowError(StoreError):
    """A row with this key exists; never leaves `planner_ext.durable`."""


class RunFencedError(StoreError):
    """Another worker continued this run, or it was cancelled; this worker stops before its next side effect."""


class WorkerInUseError(StoreError):
    """Two workers have the same name; the second one is refused."""


class UnknownRunError(PlannerExtError):
    """The store has no run of this name."""


class RunConflictError(PlannerExtError):
    """A run of this name exists with another goal or inputs, existed until it was deleted, or is in use."""


class ApprovalRefusedError(PlannerExtError):
    """A decision cannot be taken: its call is unknown, expired or altered, or it was made for another call."""


class NotAuthorizedError(RunRefusedError, ApprovalRefusedError):
    """The ``authorize`` hook refuses, or is missing here. Nothing was changed."""


def reading_row(
    what: str, error: type[PlannerExtError] = StoreError
) -> AbstractContextManager[None]:
    """Read a row that only an administrator can have damaged; any problem becomes one named error.

    Args:
        what: The subject of the error's message, with its verb.
        error: The class of the error.
    """
    return reading(what, error, way_out="Restore the store from a backup.")


_HIDDEN = "***"
_CONNECTION = re.compile(
    r"(?i)\s*(?:postgres(?:ql)?:|(?:host|hostaddr|port|dbname|user|password|service)\s*=)"
)
"""The beginning of a connection string that is not a URL, or that a path has made of
one."""
_URL = re.compile(r"[A-Za-z][\w+.-]+:/+")
"""What a URL begins with; a path that was made of one has a single slash."""
_QUERY = re.compile(r"(?P<lead>[?&])(?P<name>[^=&?]*)=(?P<value>[^&]*)")
"""A parameter of a URL."""
_KEYWORD = re.compile(
    r"(?P<lead>^|\s)(?P<name>[^\s=]+\s*)=(?P<value>\s*(?:'(?:\\.|[^'\\])*'?|(?:\\.|\S)*))"
)
"""A parameter of a connection string ``host=... password=...``."""
_PORT = re.compile(r"(?:[^:\[\]]*|\[[^\]]*\]?)(?::(?P<port>[^,/?]*))?")
_BETWEEN = re.compile(r"[^\w]+")


def is_address(where: object) -> bool:
    """Return whether this is a PostgreSQL URL; raise `StoreError` if it is another kind's."""
    text = str(where)
    if text.startswith(("postgresql://", "postgres://")):
        return True
    if "://" in text or _CONNECTION.match(text):
        raise StoreError(
            f"Expected a path or a postgresql:// address; got {redacted(text)!r}. Write an address as "
            "postgresql://user@host/database."
        )
    return False


def redacted(where: str) -> str:
    """Replace each password in an address, or a path, with ``***``."""
    return _split(where)[0]


def without_passwords(text: str, where: str) -> str:
    """Remove an address's passwords, whole, partial or percent-encoded, from a text."""
    shown, secrets = _split(where)
    text = text.replace(where, shown)
    for secret in secrets:
        text = (
            text.replace(secret, _HIDDEN)
            if len(secret) > 2 and secret not in shown
            else text
        )
    spelt = {form for secret in secrets for form in (secret, unquote(secret))}
    parts = {
        part
        for form in spelt
        for part in (form, *_BETWEEN.split(form))
        if part and part not in shown
    }
    for part in sorted(parts, key=len, reverse=True):
        text = re.sub(rf"(?<!\w){re.escape(part)}(?!\w)", _HIDDEN, text)
    return text


def _split(where: str) -> tuple[str, list[str]]:
    """Split an address into its printable text and its passwords."""
    secrets: list[str] = []

    def hide(match: re.Match[str]) -> str:
        if "pass" not in unquote(match["name"]).lower() or not match["value"].strip():
            return match[0]
        secrets.append(match["value"].strip().strip("'"))
        return f"{match['lead']}{match['name']}={_HIDDEN}"

    url = _URL.match(where)
    if url is None:
        return _without_login(_KEYWORD.sub(hide, where), secrets), secrets
    rest = _QUERY.sub(hide, where[url.end() :])
    shown = _without_login(rest, secrets)
    return (
        f"{url[0]}{_without_odd_ports(rest, secrets) if shown == rest else shown}",
        secrets,
    )


def _without_login(text: str, secrets: list[str]) -> str:
    """Hide the text between the first colon and the last @: a password may hold an @ that should be %40."""
    login, at, place = text.rpartition("@")
    user, colon, password = login.partition(":")
    if not at or not colon or not password:
        return text
    secrets.append(password)
    return f"{user}:{_HIDDEN}@{place}"


def _without_odd_ports(text: str, secrets: list[str]) -> str:
    """Hide ports that are not numbers: without a host, the password is parsed as the port."""

    def hide(match: re.Match[str]) -> str:
        port = match["port"]
        if not port or port.isdecimal():
            return match[0]
        secrets.append(port)
        return f"{match[0].removesuffix(port)}{_HIDDEN}"

    place = re.split(r"[/?]", text, maxsplit=1)[0]
    return (
        ",".join(_PORT.sub(hide, host, count=1) for host in place.split(","))
        + text[len(place) :]
    )
