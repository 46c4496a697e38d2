"""The bound on tool rounds: its defaults, what it refuses, how it is kept in step."""

from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from semantic_kernel.connectors.ai.function_choice_behavior import (
    FunctionChoiceBehavior,
)
from semantic_kernel.connectors.ai.function_choice_type import FunctionChoiceType
from semantic_kernel.exceptions import KernelException

from planner_ext.sk.errors import PlannerInvalidConfigurationError
from planner_ext.sk.run.behavior import (
    UNLIMITED_ATTEMPTS,
    BoundedFunctionChoiceBehavior,
)
from support.behavior import (
    ATTEMPTS,
    MAKERS,
    MEANINGLESS_ATTEMPTS,
    Make,
    allow,
    in_step,
)
from support.values import each_of


class TestDefaults:
    @each_of(
        "behavior",
        [
            BoundedFunctionChoiceBehavior.Auto(),
            BoundedFunctionChoiceBehavior.from_string("auto"),
            BoundedFunctionChoiceBehavior.from_dict(
                {"type": "auto", "auto_invoke": True}
            ),
            BoundedFunctionChoiceBehavior(),
        ],
    )
    def test_auto_is_bounded_as_semantic_kernels(
        self, behavior: BoundedFunctionChoiceBehavior
    ) -> None:
        """``Auto()`` and its like have the bound of the stock ``Auto()``, and invoke; copies keep it."""
        stock = FunctionChoiceBehavior.Auto()
        assert behavior.type_ in (FunctionChoiceType.AUTO, None)
        for each in (behavior, deepcopy(behavior), behavior.model_copy()):
            assert (
                each.maximum_auto_invoke_attempts
                == stock.maximum_auto_invoke_attempts
                == 5
            )
            assert each.maximum_use_attempts == each.use_attempts == 5

    @each_of(
        "behavior",
        [
            BoundedFunctionChoiceBehavior.Auto(maximum_use_attempts=None),
            BoundedFunctionChoiceBehavior(maximum_use_attempts=None),
            BoundedFunctionChoiceBehavior.from_dict(
                {"auto_invoke": True, "maximum_use_attempts": None}
            ),
            BoundedFunctionChoiceBehavior.Auto(
                maximum_auto_invoke_attempts=UNLIMITED_ATTEMPTS
            ),
        ],
    )
    def test_none_is_unlimited(self, behavior: BoundedFunctionChoiceBehavior) -> None:
        """An explicit None has no bound, and invokes; copies and dumps keep that."""
        dumped = BoundedFunctionChoiceBehavior(**behavior.model_dump())
        for each in (behavior, deepcopy(behavior), dumped):
            assert each.maximum_use_attempts is None
            assert each.use_attempts is None
            assert each.maximum_auto_invoke_attempts == UNLIMITED_ATTEMPTS

    def test_manual_auto_is_bounded_once_it_invokes(self) -> None:
        """Switched on later, it has the bound that the stock behaviour then has."""
        behavior = BoundedFunctionChoiceBehavior.Auto(auto_invoke=False)
        stock = FunctionChoiceBehavior.Auto(auto_invoke=False)
        assert behavior.use_attempts == behavior.maximum_auto_invoke_attempts == 0
        behavior.auto_invoke_kernel_functions = stock.auto_invoke_kernel_functions = (
            True
        )
        assert (
            behavior.maximum_auto_invoke_attempts
            == stock.maximum_auto_invoke_attempts
            == 5
        )

    def test_required_is_once(self) -> None:
        """``Required()`` forces one round."""
        behavior = BoundedFunctionChoiceBehavior.Required()
        assert behavior.type_ is FunctionChoiceType.REQUIRED
        assert (
            behavior.maximum_use_attempts
            == behavior.use_attempts
            == behavior.maximum_auto_invoke_attempts
            == 1
        )

    def test_none_invoke_runs_nothing(self) -> None:
        """``NoneInvoke()`` has no bound, and does not invoke."""
        behavior = BoundedFunctionChoiceBehavior.NoneInvoke()
        assert behavior.type_ is FunctionChoiceType.NONE
        assert behavior.maximum_use_attempts is None
        assert behavior.use_attempts == behavior.maximum_auto_invoke_attempts == 0

    def test_required_may_be_unlimited_on_request(self) -> None:
        """None is unlimited for ``Required`` too, where the caller says so."""
        assert (
            BoundedFunctionChoiceBehavior.Required(
                maximum_use_attempts=None
            ).use_attempts
            is None
        )

    @each_of("make", MAKERS)
    def test_fields_are_taken(self, make: Make) -> None:
        """Each class method takes attempts, callback, filters and Semantic Kernel's own fields."""
        filters = {"included_plugins": ["math"]}
        behavior = make(
            maximum_use_attempts=4,
            pre_invoke_callback=allow,
            filters=filters,
            enable_kernel_functions=False,
        )
        assert type(behavior) is BoundedFunctionChoiceBehavior
        assert behavior.maximum_use_attempts == 4
        assert behavior.maximum_auto_invoke_attempts == 4
        assert behavior.use_attempts == 4
        assert behavior.pre_invoke_callback is allow
        assert behavior.filters == filters
        assert behavior.enable_kernel_functions is False

    @each_of("make", MAKERS)
    def test_subclass_is_kept(self, make: Make) -> None:
        """A subclass' class methods return the subclass."""

        class Mine(BoundedFunctionChoiceBehavior):
            pass

        assert type(getattr(Mine, make.__name__)()) is Mine


class TestAutoInvoke:
    @each_of("make", MAKERS[:2])
    def test_switched_off_is_manual(self, make: Make) -> None:
        """``auto_invoke=False`` without attempts is manual."""
        behavior = make(auto_invoke=False)
        assert behavior.maximum_auto_invoke_attempts == behavior.use_attempts == 0
        assert not behavior.auto_invoke_kernel_functions

    @each_of("make", MAKERS[:2])
    @each_of("attempts", [1, 3])
    def test_attempts_imply_it(self, make: Make, attempts: int) -> None:
        """Giving attempts, the default number too, invokes even with ``auto_invoke=False``."""
        behavior = make(auto_invoke=False, maximum_use_attempts=attempts)
        assert behavior.auto_invoke_kernel_functions
        assert behavior.use_attempts == attempts

    def test_required_unlimited_and_manual(self) -> None:
        """None gives no attempts, so ``auto_invoke=False`` stands beside it."""
        assert (
            BoundedFunctionChoiceBehavior.Required(
                auto_invoke=False, maximum_use_attempts=None
            ).use_attempts
            == 0
        )

    def test_required_forced_on_after_manual_runs_once(self) -> None:
        """A manual ``Required`` keeps its bound of 1 for when it is switched on."""
        behavior = BoundedFunctionChoiceBehavior.Required(auto_invoke=False)
        behavior.auto_invoke_kernel_functions = True
        assert behavior.use_attempts == 1

    @each_of("bound", [None, 2, 8])
    def test_switch_keeps_the_bound(self, bound: int | None) -> None:
        """Switching off and on again restores the bound, not Semantic Kernel's 5."""
        behavior = BoundedFunctionChoiceBehavior.Auto(maximum_use_attempts=bound)
        behavior.auto_invoke_kernel_functions = False
        assert behavior.maximum_auto_invoke_attempts == behavior.use_attempts == 0
        assert behavior.maximum_use_attempts == bound
        behavior.auto_invoke_kernel_functions = True
        assert behavior.use_attempts == bound
        assert in_step(behavior)

    def test_switching_on_what_is_on_changes_nothing(self) -> None:
        """Assigning True to a behaviour that invokes keeps its bound."""
        behavior = BoundedFunctionChoiceBehavior.Auto(maximum_use_attempts=2)
        behavior.auto_invoke_kernel_functions = True
        assert behavior.maximum_auto_invoke_attempts == 2


class TestTighterWins:
    @given(use=st.none() | ATTEMPTS, stock=st.integers(min_value=-3, max_value=1000))
    def test_given_together(self, use: int | None, stock: int) -> None:
        """Of both bounds the smaller holds, and 0 or less of Semantic Kernel's is manual."""
        for make in MAKERS:
            behavior = make(
                maximum_use_attempts=use, maximum_auto_invoke_attempts=stock
            )
            expected = max(0, stock if use is None else min(use, stock))
            assert (
                behavior.maximum_auto_invoke_attempts
                == behavior.use_attempts
                == expected
            )
            assert in_step(behavior)

    @given(
        st.lists(
            st.tuples(st.just("maximum_use_attempts"), st.none() | ATTEMPTS)
            | st.tuples(
                st.just("maximum_auto_invoke_attempts"),
                st.integers(min_value=-3, max_value=1000),
            )
            | st.tuples(st.just("auto_invoke_kernel_functions"), st.booleans())
        )
    )
    def test_any_assignments_keep_both_in_step(
        self, assignments: list[tuple[str, Any]]
    ) -> None:
        """After any assignments Semantic Kernel's field is 0 or the bound, and only the bound's own can loosen it."""
        behavior = BoundedFunctionChoiceBehavior.Auto(maximum_use_attempts=5)
        for name, value in assignments:
            before = behavior.maximum_use_attempts or UNLIMITED_ATTEMPTS
            setattr(behavior, name, value)
            assert in_step(behavior)
            if name == "maximum_use_attempts":
                assert behavior.maximum_use_attempts == value
            else:
                assert (behavior.maximum_use_attempts or UNLIMITED_ATTEMPTS) <= before

    def test_semantic_kernels_field_alone_is_the_bound(self) -> None:
        """``maximum_auto_invoke_attempts`` alone means what it means in Semantic Kernel, ``Required`` included."""
        for make in MAKERS:
            behavior = make(maximum_auto_invoke_attempts=3)
            assert (
                behavior.maximum_use_attempts
                == behavior.use_attempts
                == behavior.maximum_auto_invoke_attempts
                == 3
            )

    def test_assigning_semantic_kernels_field_tightens(self) -> None:
        """Assigning ``maximum_auto_invoke_attempts`` tightens the bound, never loosens it."""
        behavior = BoundedFunctionChoiceBehavior.Auto(maximum_use_attempts=3)
        behavior.maximum_auto_invoke_attempts = 10
        assert behavior.use_attempts == 3
        behavior.maximum_auto_invoke_attempts = 2
        assert behavior.use_attempts == behavior.maximum_use_attempts == 2

    def test_assigning_attempts_replaces_the_bound(self) -> None:
        """Assigning ``maximum_use_attempts`` loosens, tightens and lifts the bound of both loops."""
        behavior = BoundedFunctionChoiceBehavior.Auto(maximum_use_attempts=3)
        for bound in (7, 2, None):
            behavior.maximum_use_attempts = bound
            assert behavior.use_attempts == bound
            assert in_step(behavior)

    def test_assigning_attempts_to_a_manual_one(self) -> None:
        """Assigning attempts invokes, as giving them does; None gives none, so manual stays manual."""
        behavior = BoundedFunctionChoiceBehavior.Auto(auto_invoke=False)
        behavior.maximum_use_attempts = None
        assert behavior.use_attempts == 0
        behavior.maximum_use_attempts = 2
        assert behavior.use_attempts == behavior.maximum_auto_invoke_attempts == 2


class TestRefusals:
    @each_of("attempts", MEANINGLESS_ATTEMPTS)
    @each_of("make", [*MAKERS, BoundedFunctionChoiceBehavior])
    def test_meaningless_attempts(self, make: Make, attempts: Any) -> None:
        """Zero, negative, boolean and non-integer attempts are refused: field, expectation, value, way out."""
        with pytest.raises(PlannerInvalidConfigurationError) as refusal:
            make(maximum_use_attempts=attempts)
        message = str(refusal.value)
        assert (
            "maximum_use_attempts must be a whole number, 1 or more, or None" in message
        )
        assert f"got {attempts!r}" in message
        assert "None for unlimited" in message
        assert "auto_invoke=False" in message

    @each_of("attempts", MEANINGLESS_ATTEMPTS)
    def test_meaningless_assignment(self, attempts: Any) -> None:
        """A refused assignment leaves the behaviour as it was."""
        behavior = BoundedFunctionChoiceBehavior.Auto(maximum_use_attempts=3)
        with pytest.raises(
            PlannerInvalidConfigurationError, match="maximum_use_attempts"
        ):
            behavior.maximum_use_attempts = attempts
        assert behavior == BoundedFunctionChoiceBehavior.Auto(maximum_use_attempts=3)

    @each_of("attempts", [True, "3", 2.0, None])
    def test_meaningless_stock_attempts(self, attempts: Any) -> None:
        """Semantic Kernel's field takes whole numbers only."""
        with pytest.raises(
            PlannerInvalidConfigurationError,
            match=r"maximum_auto_invoke_attempts.*Pass 0",
        ):
            BoundedFunctionChoiceBehavior.Auto(maximum_auto_invoke_attempts=attempts)

    @each_of("make", [*MAKERS, BoundedFunctionChoiceBehavior])
    @each_of("callback", ["allow", 1, True])
    def test_callback_that_cannot_be_called(self, make: Make, callback: Any) -> None:
        """A callback that cannot be called is refused by name."""
        with pytest.raises(
            PlannerInvalidConfigurationError,
            match="pre_invoke_callback must be a function",
        ):
            make(pre_invoke_callback=callback)

    @each_of("make", [*MAKERS, BoundedFunctionChoiceBehavior])
    def test_misspelt_field(self, make: Make) -> None:
        """A misspelt option is refused, not dropped: otherwise the bound would silently not be there."""
        with pytest.raises(
            PlannerInvalidConfigurationError, match="'maximum_use_atempts'"
        ):
            make(maximum_use_atempts=3)

    def test_misspelt_assignment(self) -> None:
        """A misspelt assignment is refused too, and changes nothing."""
        behavior = BoundedFunctionChoiceBehavior.Auto()
        with pytest.raises(
            PlannerInvalidConfigurationError, match="'maximum_use_atempts'"
        ):
            behavior.maximum_use_atempts = 3  # pyright: ignore[reportAttributeAccessIssue]  # misspelt on purpose
        assert behavior == BoundedFunctionChoiceBehavior.Auto()

    def test_malformed_filters(self) -> None:
        """Filters are checked by pydantic, as in Semantic Kernel; the field is named."""
        with pytest.raises(ValidationError, match="filters"):
            BoundedFunctionChoiceBehavior.Auto(filters={"include": ["a"]})  # pyright: ignore[reportArgumentType]  # junk, on purpose

    def test_error_belongs_to_semantic_kernel_and_not_to_pydantic(self) -> None:
        """The refusal can be caught as Semantic Kernel's error, and is no ValueError."""
        with pytest.raises(KernelException) as refusal:
            BoundedFunctionChoiceBehavior.Auto(maximum_use_attempts=0)
        assert not isinstance(refusal.value, ValueError)
