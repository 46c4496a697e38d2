"""A final answer that has to be in a form: it is checked before the run ends with it, and asked for again."""

from planner_ext.core.actions import Action, AddMessage, CheckAnswer, Finish
from planner_ext.core.state import State

__all__ = ["in_form"]

_MOST_REQUESTS = 10
"""How often the answer is asked for again where no limit on round trips bounds it."""


def in_form(state: State, end: Finish, spent: str | None) -> Action:
    """Say what comes before an end with an answer, where the run's answer has to be in a form.

    An answer in its form ends the run. Another one is asked for again, without functions, as long as a request may be
    made; then the run ends at its limit with the text as it is, and its reason says what is wrong with it. Without
    a limit on round trips it is asked for ten times, and the run ends ``incomplete``.

    Args:
        state: The run.
        end: How it would end.
        spent: The limit that forbids a further request, or None.
    """
    checked = state.checked
    if not end.answer or (checked is not None and not checked.problem):
        return end
    if state.stopping is not None:
        return Finish(status="stopped", answer=end.answer, reason=state.stopping)
    if checked is None:
        return CheckAnswer(answer=end.answer)
    if spent is not None:
        reason = f"The answer is not in its form, and no further request may be made. {checked.problem}"
        return Finish(status="limit_reached", answer=end.answer, limit=end.limit or spent, reason=reason)
    if state.rules.limits.max_iterations is None and state.structuring >= _MOST_REQUESTS:
        reason = f"The answer is not in its form; it was asked for again {state.structuring} times. {checked.problem}"
        return Finish(status="incomplete", answer=end.answer, reason=reason)
    return AddMessage(purpose="structure", problem=checked.problem)
