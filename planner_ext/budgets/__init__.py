"""Budgets that many runs share, in many processes: limits per hour, day or month, for each user or for the app.

    from planner_ext.budgets import BudgetStore, SharedBudget

    store = BudgetStore.sqlite("runs.db")
    per_user = SharedBudget("per user", store=store, per="day", key=lambda arguments: arguments["user"], max_cost=2.0)

Every door takes them as ``shared_budgets=[per_user, ...]``, beside the run's
``budget``. A run is charged once, with all that runs inside its functions.
"""

from planner_ext.budgets.budget import SharedBudget
from planner_ext.budgets.store import BudgetStore, BudgetUsage

__all__ = ["BudgetStore", "BudgetUsage", "SharedBudget"]
