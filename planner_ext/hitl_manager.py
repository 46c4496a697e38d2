"""The interception point: what sees a call before it runs, what it may decide, and what waits for a person."""

import logging

from planner_ext.approval.decisions import Approve, Decision, Defer, Deny, Interceptor, Supply, ToolCall
from planner_ext.kernel.approval import ApprovalSettings, DecisionRefusedError, PendingCall
from planner_ext.kernel.checkpoint import Checkpoint

__all__ = [
    "ApprovalSettings",
    "Approve",
    "Checkpoint",
    "Decision",
    "DecisionRefusedError",
    "Defer",
    "Deny",
    "Interceptor",
    "PendingCall",
    "Supply",
    "ToolCall",
    "check_for_intervention",
]

_logger = logging.getLogger(__name__)


def check_for_intervention(call: ToolCall) -> bool:
    """Say whether a call needs a person's consent. The default: none does.

    The simplest interceptor. Put one of your own in its place, sync or async: True defers the call, so that the run
    pauses; False is no objection, and never an approval.

    Args:
        call: The function that will run, and its validated arguments.
    """
    _logger.info("Intercepted a call to %s.%s; it may proceed.", call.plugin_name, call.function_name)
    return False
