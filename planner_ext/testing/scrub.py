"""`Scrubber`: replaces the secrets in the texts of a cassette.

It knows a secret by its value (a variable of the environment, a service's key), however
encoded; by the form of well-known providers' keys, by its name (``"password": "..."``,
``api_key=...``), and by the application's patterns. Numbers are not scrubbed.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, cast

from planner_ext.core.errors import shown
from planner_ext.sk.errors import InvalidOptionError
from planner_ext.testing.encodings import Finder

SCRUBBED = "[scrubbed]"

Scrub: TypeAlias = str | re.Pattern[str] | Callable[[str], str] | Sequence["Scrub"]
"""A regular expression, a function from a text to its clean form, or a list of them."""

_NAME = (
    r"(?:[\w-]*(?:passw(?:or)?d|passphrase|secret|(?:api|access|account|private|subscription|shared)[_-]?key"
    r"|(?:access|refresh|auth|id|session|security|bearer)[_-]?token|authorization|cookie)|token|pwd)"
)
_KNOWN = (
    # By name: quoted as in JSON, also inside of JSON, and Python; then in addresses, connection strings and headers.
    rf"((?<!\\)(\\*[\"']){_NAME}\2\s*:\s*(\\*[\"']))(?!\3).+?(?=(?<!\\)\3)",
    rf"((?<![\w-])(?:{_NAME}|[\w-]*signature|sig)=)[^\s&;,#\"'<>\\]+",
    r"((?<![\w-])(?:(?:x-)?api-key|(?:set-)?cookie): ?)[^\s\"'\\]+",
    r"(\bBearer )[a-z0-9._~+/=-]{16,}",
    r"(\bAuthorization: Basic )[a-z0-9+/=]{8,}",
    r"(://)[^\s/?#@:\"']*:[^\s/?#@\"']+(?=@)",
)
_FORMS = (
    r"(?<![A-Za-z0-9])(?:sk-[A-Za-z0-9_-]{16,}|[rs]k_(?:live|test)_\w{10,}|xai-\w{20,}|gsk_\w{20,}|hf_\w{20,})",
    r"(?:AKIA|ASIA)[0-9A-Z]{16}",
    r"AIza[0-9A-Za-z_-]{35}|ya29\.[\w-]{20,}",
    r"gh[oprsu]_[A-Za-z0-9]{36,}|github_pat_\w{22,}|glpat-[\w-]{20,}",
    r"xox[abeoprs]-[A-Za-z0-9-]{10,}",
    r"eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]{8,}",  # a JSON Web Token
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?:(?!-----BEGIN)[\s\S])*?-----END [A-Z ]*PRIVATE KEY-----",
)
_PATTERNS = (
    *map(re.compile, _FORMS),
    *(re.compile(known, re.IGNORECASE | re.DOTALL) for known in _KNOWN),
)
_VARIABLE = re.compile(
    r".*(KEY|TOKEN|SECRET|PASSW(OR)?D|PASSPHRASE|CONNECTION_STRING)", re.IGNORECASE
)
_IN_ADDRESS = re.compile(r"://[^\s/?#@:]*:([^\s/?#@]+)@")
_SECRET_NAME = re.compile(_NAME, re.IGNORECASE)
_SHORTEST = 8
"""Characters of the shortest value that is a secret wherever it occurs."""


class Scrubber:
    """Replaces secrets in texts.

    Names of secret variables end in KEY, TOKEN, SECRET, PASSWORD, PASSPHRASE or
    CONNECTION_STRING; a password in an address is one, too. Values of less than 8
    characters are not searched for.
    """

    def __init__(self, own: Scrub = ()) -> None:
        self._own = [*_steps(own)]
        self._secrets: set[str] = set()
        self._finder = Finder(())
        self.add_environment()

    def add_environment(self) -> None:
        """Add the secrets in the environment."""
        for name, value in os.environ.items():
            self.add(*_IN_ADDRESS.findall(value))
            if _VARIABLE.fullmatch(name):
                self.add(value.strip())

    def add(self, *secrets: str) -> None:
        """Add secrets, however encoded."""
        known = self._secrets | {
            secret for secret in secrets if len(secret) >= _SHORTEST
        }
        if known != self._secrets:
            self._secrets = known
            self._finder = Finder(known)

    def text(self, text: str) -> str:
        """Scrub one text."""
        text = self._finder.replaced(text, SCRUBBED)
        for pattern in _PATTERNS:
            kept = r"\1" if pattern.groups else ""
            text = pattern.sub(kept + SCRUBBED, text)
        for step in self._own:
            text = step(text)
        return text

    def values(self, value: Any, name: str = "") -> Any:
        """Scrub every text in JSON values, the names in objects included."""
        if isinstance(value, str):
            return (
                SCRUBBED if value and _SECRET_NAME.fullmatch(name) else self.text(value)
            )
        if isinstance(value, dict):
            given = cast("dict[str, Any]", value)
            return {self.text(key): self.values(one, key) for key, one in given.items()}
        if isinstance(value, list):
            return [self.values(one, name) for one in cast("list[Any]", value)]
        return value


def _steps(own: Scrub) -> Iterator[Callable[[str], str]]:
    if isinstance(own, Sequence) and not isinstance(own, str):
        for one in cast("Sequence[Scrub]", own):
            yield from _steps(one)
    elif callable(own):
        yield own
    else:
        try:
            pattern = re.compile(own)
        except (TypeError, re.error) as error:
            raise InvalidOptionError(
                f"scrub: {shown(own)} is not a regular expression: {error}."
            ) from None
        if pattern.fullmatch(""):
            raise InvalidOptionError(
                f"scrub: {shown(own)} matches the empty text, which is everywhere."
            )
        yield lambda text: pattern.sub(SCRUBBED, text)
