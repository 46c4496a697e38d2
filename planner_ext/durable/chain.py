"""A journal as a hash chain, so that what is changed, left out, added or moved in it shows.

The link of a fact is a digest of the link before, its place and its text, keyed with
the salt of its journal. Without salt and text nobody can tell what it was of; it still
proves what comes after. A head is the number and the last link of a journal. It proves
something where whoever writes to the store cannot write, too.
"""

import hashlib
import hmac
import os
import re
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from planner_ext.core.errors import InvalidLimitError
from planner_ext.core.values import frozen
from planner_ext.durable.database import Row
from planner_ext.durable.errors import StoreError

_HEAD = re.compile(
    r"planner-head-1\.([0-9a-f]{64})\.(\d{1,9})\.([\w-]{43})(?:\.([\w-]{86}))?",
    re.ASCII,
)

Heads: TypeAlias = Mapping[int, Collection[str]]
"""The last links of a journal that were seen outside its store, by the number of its
facts then."""


def run_digest(run_id: str) -> str:
    """Return what stands for the name of a run where the name must not."""
    return hashlib.sha256(f"planner_ext run {run_id}".encode()).hexdigest()


@frozen
class Chain:
    """The end of a journal; of a new one its beginning.

    Attributes:
        run: The `run_digest` of its name.
        number: How many facts it has.
        link: The last one's link.
        salt: Keys the links; stands in the row of the first fact.
    """

    run: str
    number: int
    link: str
    salt: str

    @classmethod
    def begin(cls, run_id: str, salt: str | None = None) -> "Chain":
        """Begin a journal; by default with a new salt."""
        run = run_digest(run_id)
        return cls(run=run, number=0, link=run, salt=salt or secrets.token_urlsafe(16))

    def after(self, text: str, *, link: str | None = None) -> "Chain":
        """Return the end of the journal after one more fact; a given link is not computed."""
        if link is None:
            said = f"{self.link} {self.number} {text}".encode()
            link = _text(hmac.digest(self.salt.encode(), said, hashlib.sha256))
        number = self.number + 1
        return Chain(run=self.run, number=number, link=link, salt=self.salt)

    @property
    def head(self) -> str:
        """The head as text, to be kept outside the store."""
        return f"planner-head-1.{self.run}.{self.number}.{self.link}"


def first_defect(run_id: str, rows: Sequence[Row], heads: Heads) -> str:
    """Name the first fact of a journal that is not the one that was written; "" if all are.

    Args:
        run_id: The run.
        rows: ``(seq, fact, link, salt)``; the text of a forgotten fact is "".
        heads: Those of the journal.
    """
    chain = Chain.begin(run_id, rows[0][3] if rows else None)
    seen = 0
    for place, (seq, fact, link, _) in enumerate(rows):
        if seq != place:
            return f"fact {place} was left out"
        chain = chain.after(fact, link=None if fact else link)
        if chain.link != link:
            return f"fact {place} was changed, added or put there, or the one before it was left out"
        known = heads.get(chain.number, (link,))
        if link not in known:
            return f"one of the facts {seen} to {place} is not that of a head: all after it was written anew"
        seen = chain.number if chain.number in heads else seen
    longest = max(heads, default=0)
    if longest > len(rows):
        return f"fact {len(rows)} was left out: a head has {longest} facts"
    return ""


def heads_in(
    text: str, is_signed: Callable[[str, bytes], bool] | None = None
) -> dict[str, dict[int, set[str]]]:
    """Find the heads in any text, such as a log or notices, by the digests of their runs.

    Args:
        text: The text.
        is_signed: Checks a signature; a head without a valid one is left out.
    """
    found: dict[str, dict[int, set[str]]] = {}
    for match in _HEAD.finditer(text):
        run, number, link, signature = match.groups()
        unsigned = match[0].removesuffix(f".{signature}")
        if is_signed is None or (
            signature and is_signed(unsigned, urlsafe_b64decode(f"{signature}=="))
        ):
            found.setdefault(run, {}).setdefault(int(number), set()).add(link)
    return found


def signer_of(key: str) -> Callable[[str], str]:
    """Return what appends a signature to a head.

    Args:
        key: An Ed25519 private key in PEM, without a password.

    Raises:
        PlannerInvalidConfigurationError: If it is none, or the extra ``sign`` is
            missing.
    """
    serialization, ed25519 = _cryptography()
    private: Any
    try:
        private = serialization.load_pem_private_key(key.encode(), None)
    except (ValueError, TypeError, AttributeError):
        private = None
    if not isinstance(private, ed25519.Ed25519PrivateKey):
        raise InvalidLimitError(
            "heads_key must be an Ed25519 private key in PEM, without a password, as of openssl genpkey -algorithm "
            "ed25519."
        )
    return lambda head: f"{head}.{_text(private.sign(head.encode()))}"


def verifier_of(key: str) -> Callable[[str, bytes], bool]:
    """Return what checks the signature of a head with a public key in PEM; raises as `signer_of`."""
    serialization, ed25519 = _cryptography()
    public: Any
    try:
        public = serialization.load_pem_public_key(key.encode())
    except ValueError:
        public = None
    if not isinstance(public, ed25519.Ed25519PublicKey):
        raise InvalidLimitError(
            "The public key must be an Ed25519 key in PEM, as of openssl pkey -pubout."
        )
    from cryptography.exceptions import InvalidSignature  # noqa: PLC0415  (an optional dependency)

    def is_signed(head: str, signature: bytes) -> bool:
        try:
            public.verify(signature, head.encode())
        except InvalidSignature:
            return False
        return True

    return is_signed


def keep_head(path: Path, head: str) -> None:
    """Append a head to a file, on disk before this returns.

    Raises:
        StoreError: If the file cannot be written.
    """
    try:
        with path.open("a", encoding="ascii") as file:
            file.write(f"{head}\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StoreError(
            f"The heads cannot be kept in {path}: {error.strerror}. Give a file that this process may write."
        ) from error


def _cryptography() -> tuple[ModuleType, ModuleType]:
    try:
        from cryptography.hazmat.primitives import serialization  # noqa: PLC0415  (an optional dependency)
        from cryptography.hazmat.primitives.asymmetric import ed25519  # noqa: PLC0415  (see above)
    except ImportError as error:
        raise InvalidLimitError(
            f"Signed heads need more ({error}). Install planner-ext[sign]."
        ) from error
    return serialization, ed25519


def _text(digest: bytes) -> str:
    return urlsafe_b64encode(digest).decode().rstrip("=")
