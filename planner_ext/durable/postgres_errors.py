"""What PostgreSQL can say no to, as a store's errors: what is wrong, where, and the way out; no password is shown."""

import psycopg
from psycopg.conninfo import conninfo_to_dict

from planner_ext.durable.addresses import without_passwords
from planner_ext.durable.errors import StoreError

__all__ = ["cause_of", "is_passing", "store_error"]

_PASSING = ("08", "40", "53300", "57P")
"""SQLSTATEs that begin so pass by themselves: a lost connection, a conflict, no free slot, a server that restarts."""

_WAYS_OUT = {
    "28": "Check the user and the password in the URL.",
    "3D000": "Create the database, or name another one in the URL.",
    "42501": "Grant the user the rights on the tables, or create them with a user who has them.",
    "42": "Was the store made by another version? Use that version, or another database.",
    "53100": "Free space on the server's disk; the run goes on from its last recorded step.",
    "53300": "Raise max_connections, or let fewer workers run.",
    "25006": "This server takes no writes, as a standby does; use the primary's address.",
}
"""By how their SQLSTATE begins; the longest that fits counts."""

_NOT_REACHED = "Start the server, or check host and port in the URL; runs go on from their last recorded step."

_REACHED = "Look into the server's log for more; runs go on from their last recorded step."


def is_passing(error: psycopg.Error | OSError) -> bool:
    """Say whether it is worth trying again: the server is away, restarts, or asks for it."""
    if isinstance(error, OSError):
        return True
    state = error.sqlstate
    if state is None:
        return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError) and not _is_refusal(error)
    return state.startswith(_PASSING)


def store_error(url: str, error: psycopg.Error | OSError | UnicodeError) -> StoreError:
    """Name what went wrong, where, and the way out."""
    state = error.sqlstate if isinstance(error, psycopg.Error) else None
    fitting = [begin for begin in _WAYS_OUT if (state or "").startswith(begin)]
    reached = state is not None and not state.startswith(_PASSING)
    way_out = _WAYS_OUT[max(fitting, key=len)] if fitting else _REACHED if reached else _NOT_REACHED
    if isinstance(error, psycopg.DataError | UnicodeError):
        way_out = "Give a name that there may be: without NUL characters and lone surrogates."
    elif isinstance(error, psycopg.ProgrammingError) and state is None:
        way_out = "Give a URL such as postgresql://user@host/database."
    elif state is None and isinstance(error, psycopg.Error) and _is_refusal(error):
        way_out = "Check the user, the password and the name of the database in the URL."
    said = " ".join(str(error).split()).rstrip(".?") or type(error).__name__
    text = f"PostgreSQL at {_place(url)} cannot be used: {said}. {way_out}"
    return StoreError(without_passwords(text, url))


def cause_of(url: str, error: psycopg.Error | OSError | UnicodeError) -> BaseException | None:
    """Return an error as the cause of one that `store_error` made, unless its words would show a password."""
    return error if without_passwords(str(error), url) == str(error) else None


def _is_refusal(error: psycopg.Error) -> bool:
    """Say whether the server answered, and refused; while connecting, psycopg has no SQLSTATE for it."""
    return any(word in str(error) for word in ("does not exist", "authentication failed", "invalid connection option"))


def _place(url: str) -> str:
    try:
        parts = conninfo_to_dict(url)
    except psycopg.ProgrammingError:
        return "an address that is no connection string"
    host = parts.get("host") or parts.get("hostaddr") or "the local socket"
    port = f":{parts['port']}" if parts.get("port") else ""
    return f"{host}{port}, database {parts.get('dbname') or parts.get('user') or 'of the user'!s}"
