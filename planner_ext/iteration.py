"""What governs the loop between round trips: how functions are run, how a run is stopped, what it has used."""

from planner_ext.core.values import Usage
from planner_ext.engine import StopHandle
from planner_ext.kernel.execution import ToolExecution

__all__ = ["StopHandle", "ToolExecution", "Usage"]
