"""Human in the loop: interceptors and their decisions, calls that wait for a person, and clarifiers."""

import logging

from planner_ext.approval.decisions import (
    ApprovalSettings,
    Approve,
    Authorize,
    Decision,
    DecisionRequest,
    Defer,
    Deny,
    Interceptor,
    Supply,
    ToolCall,
)
from planner_ext.approval.policy import ApprovalRule, ArgumentPredicate
from planner_ext.engine.gate import Approver, CheckForIntervention, PreInvoke
from planner_ext.engine.ports import Clarification
from planner_ext.sk.chat.clarifier import ModelClarifier
from planner_ext.sk.checkpoint import Checkpoint, SigningKey
from planner_ext.sk.errors import DecisionRefusedError
from planner_ext.sk.functions.questions import Clarifier, Question

__all__ = [
    "ApprovalRule",
    "ApprovalSettings",
    "Approve",
    "Approver",
    "ArgumentPredicate",
    "Authorize",
    "CheckForIntervention",
    "Checkpoint",
    "Clarification",
    "Clarifier",
    "Decision",
    "DecisionRefusedError",
    "DecisionRequest",
    "Defer",
    "Deny",
    "Interceptor",
    "ModelClarifier",
    "PendingCall",
    "PreInvoke",
    "Question",
    "SigningKey",
    "Supply",
    "ToolCall",
    "check_for_intervention",
]

PendingCall = ToolCall
"""A call that waits for a person."""

_logger = logging.getLogger(__name__)


def check_for_intervention(call: ToolCall) -> bool:
    """Return whether a call needs a person's consent; this default returns False.

    Replace it by a function of your own, sync or async: True defers the call, so that
    the run pauses; False is no opinion, never an approval.
    """
    _logger.info(
        "Intercepted a call to %s.%s; it may proceed.",
        call.plugin_name,
        call.function_name,
    )
    return False
