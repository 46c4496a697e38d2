"""What a decision binds to: a digest of the run, the call, the function that will run and its arguments."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

__all__ = ["digest_of", "fingerprint_of", "takes_no_more"]

_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def digest_of(function: str, arguments: Mapping[str, Any]) -> str:
    """Digest a function's name and its arguments; equal JSON values give equal digests, whatever their key order."""
    return _sha256([function, arguments])


def fingerprint_of(run_id: str, iteration: int, call_id: str, digest: str, signature: str = "") -> str:
    """Digest one call of one run.

    Args:
        run_id: The run.
        iteration: The trip in which the call was made.
        call_id: The call's id.
        digest: See `digest_of`.
        signature: What the function takes, see `takes_no_more`; "" where that is not known.
    """
    call = [run_id, iteration, call_id, digest]
    return _sha256([*call, signature] if signature else call)


def takes_no_more(before: str, now: str) -> bool:
    """Whether a function takes nothing but what it took before; it may have lost a parameter.

    Args:
        before: Its signature then: ``name=digest`` of each parameter, joined by commas; "" where that is not known.
        now: Its signature now.
    """
    return not before or set(filter(None, now.split(","))) <= set(before.split(","))


def _sha256(value: object) -> str:
    return hashlib.sha256(_CANONICAL.encode(value).encode("ascii")).hexdigest()
