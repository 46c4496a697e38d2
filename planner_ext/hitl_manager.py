"""The interception point: what sees a call before it runs, what waits for a person, and who answers questions."""

import logging

from planner_ext.approval.decisions import Approve, Decision, Defer, Deny, Interceptor, Supply, ToolCall
from planner_ext.sk.approval import ApprovalSettings, DecisionRefusedError, PendingCall
from planner_ext.sk.checkpoint import Checkpoint
from planner_ext.sk.clarifier import ModelClarifier
from planner_ext.sk.questions import Clarification, Clarifier, Question

__all__ = [
    "ApprovalSettings",
    "Approve",
    "Checkpoint",
    "Clarification",
    "Clarifier",
    "Decision",
    "DecisionRefusedError",
    "Defer",
    "Deny",
    "Interceptor",
    "ModelClarifier",
    "PendingCall",
    "Question",
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
