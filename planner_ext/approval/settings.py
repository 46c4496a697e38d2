"""How a run treats decisions: the options of the approval, with what each means."""

from dataclasses import dataclass
from typing import Literal

from planner_ext.approval.decisions import is_duration
from planner_ext.core.errors import InvalidLimitError
from planner_ext.core.shown import shown

__all__ = ["ApprovalOptions"]

_ALLOWED: dict[str, tuple[str, ...]] = {
    "unmatched": ("approve", "defer", "deny"),
    "on_denial": ("refuse", "reask", "return_calls"),
    "on_deferred": ("hold_all", "run_safe_first"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ApprovalOptions:
    """What becomes of calls that nobody decided, that were denied, and that wait; see `ApprovalSettings`."""

    unmatched: Literal["approve", "defer", "deny"] = "approve"
    on_denial: Literal["refuse", "reask", "return_calls"] = "refuse"
    on_deferred: Literal["hold_all", "run_safe_first"] = "hold_all"
    expires_in: float | None = None
    interceptor_timeout: float | None = 30.0

    def __post_init__(self) -> None:
        for name, allowed in _ALLOWED.items():
            if getattr(self, name) not in allowed:
                raise InvalidLimitError(
                    f"{name} must be one of {', '.join(allowed)}; got {shown(getattr(self, name))}."
                )
        for name in ("expires_in", "interceptor_timeout"):
            value = getattr(self, name)
            if value is not None and not is_duration(value):
                raise InvalidLimitError(f"{name} must be a number of seconds above 0, or None; got {shown(value)}.")
