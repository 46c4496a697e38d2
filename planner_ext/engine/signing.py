"""Journals as JSON text that leave a process: signed with a key, and read without ambiguity."""

import hashlib
import hmac
import json
from collections.abc import Mapping

from planner_ext.core.errors import InvalidJournalError, reading

__all__ = ["read_json", "signature_of", "signatures_match"]


def signature_of(document: Mapping[str, object], key: bytes) -> str:
    """Sign a document of JSON values (HMAC-SHA256), however its text is spaced and its keys are sorted."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hmac.new(key, text.encode("ascii"), hashlib.sha256).hexdigest()


def signatures_match(given: object, expected: str) -> bool:
    """Compare a value, which may be anything, with the expected signature in constant time."""
    return isinstance(given, str) and hmac.compare_digest(expected.encode(), given.encode(errors="replace"))


def read_json(text: str, expected: str) -> object:
    """Read JSON text; an object with one key twice is refused, since two readers may read two different runs.

    Args:
        text: The text.
        expected: What it should be, for the error.

    Raises:
        InvalidJournalError: If it is not JSON, or an object has one key twice.
    """

    def without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
        data = dict(pairs)
        if len(data) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise InvalidJournalError(f"The key {twice[:80]!r} stands twice in one JSON object. The text was altered.")
        return data

    with reading(f"Expected {expected} as JSON text; this is not JSON, or", InvalidJournalError):
        return json.loads(text, object_pairs_hook=without_duplicates)
