"""What a decision binds to: a digest of the run, the call, the function that will run and its arguments."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, cast

__all__ = ["digest_of", "digests_of", "fingerprint_of", "takes_no_more", "with_plain_numbers"]

_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def digest_of(function: str, arguments: Mapping[str, Any]) -> str:
    """Digest a function's name and its arguments.

    Equal JSON values give equal digests: the order of keys makes no difference, and 7.0 is 7.
    """
    return _sha256([function, {name: with_plain_numbers(value) for name, value in arguments.items()}])


def digests_of(function: str, arguments: Mapping[str, Any]) -> tuple[str, str]:
    """Give the digests by which a record may know a call: today's, and that of older records, to which 7.0 is not 7."""
    return digest_of(function, arguments), _sha256([function, arguments])


def with_plain_numbers(value: Any) -> Any:
    """Write each number of a JSON value that is an integer as one, on every level: JSON has one kind of number."""
    if type(value) is float:
        return int(value) if value.is_integer() else value
    if isinstance(value, list):
        return [with_plain_numbers(item) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {name: with_plain_numbers(item) for name, item in cast("dict[Any, Any]", value).items()}
    return value


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
