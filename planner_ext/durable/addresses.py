"""The address of a store without the passwords in it, however it is written: nothing that is printed may show one."""

import re
from urllib.parse import unquote

__all__ = ["redacted", "without_passwords"]

_HIDDEN = "***"
_URL = re.compile(r"[A-Za-z][\w+.-]+:/+")
"""What a URL begins with; a path that was made of one has a single slash."""
_QUERY = re.compile(r"(?P<lead>[?&])(?P<name>[^=&?]*)=(?P<value>[^&]*)")
"""A parameter of a URL."""
_KEYWORD = re.compile(r"(?P<lead>^|\s)(?P<name>[^\s=]+\s*)=(?P<value>\s*(?:'(?:\\.|[^'\\])*'?|(?:\\.|\S)*))")
"""A parameter of a connection string ``host=... password=...``."""
_PORT = re.compile(r"(?:[^:\[\]]*|\[[^\]]*\]?)(?::(?P<port>[^,/?]*))?")
_BETWEEN = re.compile(r"[^\w]+")


def redacted(where: str) -> str:
    """Write an address, or a path, with ``***`` in place of each password in it."""
    return _read(where)[0]


def without_passwords(text: str, where: str) -> str:
    """Take an address's passwords, also in part or percent-encoded, out of what others say about it."""
    shown, secrets = _read(where)
    text = text.replace(where, shown)
    for secret in secrets:
        text = text.replace(secret, _HIDDEN) if len(secret) > 2 and secret not in shown else text
    spelt = {form for secret in secrets for form in (secret, unquote(secret))}
    parts = {part for form in spelt for part in (form, *_BETWEEN.split(form)) if part and part not in shown}
    for part in sorted(parts, key=len, reverse=True):
        text = re.sub(rf"(?<!\w){re.escape(part)}(?!\w)", _HIDDEN, text)
    return text


def _read(where: str) -> tuple[str, list[str]]:
    """Split an address into what may be shown, and its passwords."""
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
    return f"{url[0]}{_without_odd_ports(rest, secrets) if shown == rest else shown}", secrets


def _without_login(text: str, secrets: list[str]) -> str:
    """Hide what stands between the first colon and the last @: an @ in a password should be written %40, and is not."""
    login, at, place = text.rpartition("@")
    user, colon, password = login.partition(":")
    if not at or not colon or not password:
        return text
    secrets.append(password)
    return f"{user}:{_HIDDEN}@{place}"


def _without_odd_ports(text: str, secrets: list[str]) -> str:
    """Hide ports that are not numbers: where the host was forgotten, the password stands there."""

    def hide(match: re.Match[str]) -> str:
        port = match["port"]
        if not port or port.isdecimal():
            return match[0]
        secrets.append(port)
        return f"{match[0].removesuffix(port)}{_HIDDEN}"

    place = re.split(r"[/?]", text, maxsplit=1)[0]
    return ",".join(_PORT.sub(hide, host, count=1) for host in place.split(",")) + text[len(place) :]
