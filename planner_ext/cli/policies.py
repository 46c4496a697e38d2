"""The guards that ``--policy`` and ``--ask-all`` add; imports no Semantic Kernel."""

from typing import Any

from planner_ext.approval.decisions import ApprovalSettings
from planner_ext.cli.options import ApprovalArgs
from planner_ext.core.errors import InvalidLimitError


def approval_options(given: ApprovalArgs) -> dict[str, Any]:
    """Return the planner's options for ``--policy`` and ``--ask-all``; empty without them.

    Raises:
        PlannerInvalidConfigurationError: If the two contradict each other, or the file cannot be read.
        InvalidPolicyError: If the file's policy is invalid.
    """
    if given.policy is None:
        return {"approval": ApprovalSettings(unmatched="defer")} if given.ask_all else {}
    if given.ask_all:
        problem = (
            "--ask-all and --policy contradict each other: a policy decides every call. Leave one of them out; a "
            "policy with only `default: ask` is --ask-all."
        )
        raise InvalidLimitError(problem)
    from planner_ext.approval.policy import ApprovalPolicy  # noqa: PLC0415  (slow, and only for a policy)

    try:
        return {"interceptors": (ApprovalPolicy.from_yaml(given.policy),)}
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        problem = f"--policy {given.policy} cannot be read: {reason}."
        raise InvalidLimitError(problem) from None
