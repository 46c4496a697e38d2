"""``planner-ext run``: one goal on the user's kernel, watched, within a budget.

Progress goes to stderr; stdout has the answer, or with ``--json`` one JSON document, and nothing else: what the kernel's
own code prints goes to stderr, too.
"""

__all__ = ["ANSWERED", "FAULT", "INTERRUPTED", "NO_ANSWER", "UNUSABLE", "RunRequest", "run_goal"]
