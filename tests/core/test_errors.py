"""The errors of the lower floors, and the classes as which they leave."""

import pickle
import subprocess
import sys

import pytest
from semantic_kernel.exceptions import KernelException

from planner_ext.approval.decisions import InvalidDecisionError
from planner_ext.core.errors import (
    EndedRunError,
    InvalidLimitError,
    LimitExceededError,
    PlannerExtError,
    UnansweredRunError,
    UnusableCheckpointError,
)
from planner_ext.errors import (
    DecisionRefusedError,
    InvalidCheckpointError,
    InvalidOptionError,
    LimitReachedError,
    RunEndedError,
    RunNotAnsweredError,
)
from support.values import each_of

DOORS = {
    InvalidDecisionError: DecisionRefusedError,
    UnusableCheckpointError: InvalidCheckpointError,
    InvalidLimitError: InvalidOptionError,
    EndedRunError: RunEndedError,
    UnansweredRunError: RunNotAnsweredError,
    LimitExceededError: LimitReachedError,
}


@each_of("below", DOORS, ids=lambda kind: kind.__name__)
def test_an_error_of_a_lower_floor_is_one_of_the_door(
    below: type[PlannerExtError],
) -> None:
    """What a lower floor raises is caught by the name in planner_ext.errors, and as Semantic Kernel's."""
    with pytest.raises(DOORS[below], match="a problem") as caught:
        raise below("a problem")
    assert type(caught.value) is DOORS[below]
    assert isinstance(caught.value, below)
    assert isinstance(caught.value, KernelException)


def test_an_error_keeps_its_attributes_and_survives_pickling() -> None:
    """The class at the door takes the arguments of the lower one."""
    error = InvalidDecisionError("a problem", call_id="pay")
    assert error.call_id == "pay"
    copied = pickle.loads(pickle.dumps(error))
    assert type(copied) is DecisionRefusedError
    assert copied.call_id == "pay"
    assert str(copied) == "a problem"


WITHOUT_SEMANTIC_KERNEL = """
import sys
sys.modules["semantic_kernel"] = None
from planner_ext.core.errors import InvalidLimitError
from planner_ext.core.limits import Budget
from planner_ext.durable.options import RetryPolicy, is_final
for refused in (lambda: Budget(max_iterations=0), lambda: RetryPolicy(attempts=0)):
    try:
        refused()
    except InvalidLimitError as error:
        print(type(error) is InvalidLimitError, is_final(error))
"""


def test_without_semantic_kernel_a_lower_floor_raises_its_own_errors() -> None:
    """A process in which Semantic Kernel cannot be imported still gets an error that says what is wrong."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_SEMANTIC_KERNEL],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["True"] * 4
