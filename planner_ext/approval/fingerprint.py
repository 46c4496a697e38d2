"""What a decision binds to: a digest of the run, the call, the function that will run and its arguments."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

__all__ = ["digest_of", "fingerprint_of"]

_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def digest_of(function: str, arguments: Mapping[str, Any]) -> str:
    """Digest a function's name and its arguments; equal JSON values give equal digests, whatever their key order."""
    return _sha256([function, arguments])


def fingerprint_of(run_id: str, iteration: int, call_id: str, digest: str) -> str:
    """Digest one call of one run; see `digest_of` for the last part."""
    return _sha256([run_id, iteration, call_id, digest])


def _sha256(value: object) -> str:
    return hashlib.sha256(_CANONICAL.encode(value).encode("ascii")).hexdigest()
