"""The bounded behaviour from dictionaries and strings, and its copies."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from semantic_kernel.connectors.ai.function_choice_type import FunctionChoiceType
from semantic_kernel.connectors.ai.prompt_execution_settings import (
    PromptExecutionSettings,
)

from planner_ext.sk.errors import PlannerInvalidConfigurationError
from planner_ext.sk.run.behavior import BoundedFunctionChoiceBehavior
from support.behavior import (
    ATTEMPTS,
    MAKERS,
    Gate,
    Make,
    allow,
    allow_async,
    in_step,
)
from support.values import each_of


@pytest.fixture
def openai_settings() -> type[PromptExecutionSettings]:
    """The settings of a real connector, imported where the warning of its own import can be silenced."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from semantic_kernel.connectors.ai.open_ai import (
            OpenAIChatPromptExecutionSettings,
        )
    return OpenAIChatPromptExecutionSettings


class TestFromDict:
    def test_defaults_are_semantic_kernels(self) -> None:
        """An empty dict is manual auto, as in Semantic Kernel."""
        behavior = BoundedFunctionChoiceBehavior.from_dict({})
        assert type(behavior) is BoundedFunctionChoiceBehavior
        assert behavior.type_ is FunctionChoiceType.AUTO
        assert behavior.use_attempts == 0

    @each_of(
        ("data", "type_", "attempts"),
        [
            ({"type": "auto", "auto_invoke": True}, FunctionChoiceType.AUTO, 5),
            ({"type": "AUTO", "auto_invoke": False}, FunctionChoiceType.AUTO, 0),
            ({"type": FunctionChoiceType.AUTO}, FunctionChoiceType.AUTO, 0),
            (
                {"auto_invoke": False, "maximum_use_attempts": 3},
                FunctionChoiceType.AUTO,
                3,
            ),
            ({"maximum_auto_invoke_attempts": 3}, FunctionChoiceType.AUTO, 3),
            (
                {"maximum_use_attempts": 4, "maximum_auto_invoke_attempts": 3},
                FunctionChoiceType.AUTO,
                3,
            ),
            ({"maximum_use_attempts": None}, FunctionChoiceType.AUTO, 0),
            ({"type": "required"}, FunctionChoiceType.REQUIRED, 0),
            ({"type": "required", "auto_invoke": True}, FunctionChoiceType.REQUIRED, 1),
            (
                {"type": "required", "maximum_use_attempts": 2},
                FunctionChoiceType.REQUIRED,
                2,
            ),
            ({"type": "none"}, FunctionChoiceType.NONE, 0),
            ({"type": "none", "auto_invoke": True}, FunctionChoiceType.NONE, 0),
        ],
    )
    def test_meaning(
        self, data: dict[str, Any], type_: FunctionChoiceType, attempts: int | None
    ) -> None:
        """Types in any case; attempts imply auto-invoke, and without either a dict is manual."""
        behavior = BoundedFunctionChoiceBehavior.from_dict(data)
        assert behavior.type_ is type_
        assert behavior.use_attempts == attempts
        assert in_step(behavior)

    def test_functions_join_the_filters(self) -> None:
        """Listed functions are added to the included ones once, in order, with Semantic Kernel's separator."""
        behavior = BoundedFunctionChoiceBehavior.from_dict(
            {
                "functions": ["math.add", "math-sub"],
                "filters": {
                    "included_functions": ["math-sub"],
                    "excluded_plugins": ["web"],
                },
            }
        )
        assert behavior.filters == {
            "included_functions": ["math-sub", "math-add"],
            "excluded_plugins": ["web"],
        }

    @each_of(
        ("data", "filters"),
        [
            ({}, None),
            ({"functions": None, "filters": None}, None),
            ({"functions": ["math.add"]}, {"included_functions": ["math-add"]}),
            (
                {"filters": {"included_plugins": ["math"]}},
                {"included_plugins": ["math"]},
            ),
        ],
    )
    def test_filters(
        self, data: dict[str, Any], filters: dict[str, list[str]] | None
    ) -> None:
        """Functions and filters each stand alone; without both every function is offered."""
        assert BoundedFunctionChoiceBehavior.from_dict(data).filters == filters

    def test_callers_dict_is_left_alone(self) -> None:
        """The caller's dict and what is in it stay as they are, and later changes of it do not reach the behaviour."""
        data: dict[str, Any] = {
            "type": "required",
            "auto_invoke": True,
            "functions": ["math.add"],
            "filters": {"included_functions": ["math-sub"]},
            "maximum_use_attempts": 2,
        }
        before = copy.deepcopy(data)
        behavior = BoundedFunctionChoiceBehavior.from_dict(data)
        assert data == before
        data["filters"]["included_functions"].append("math-div")
        assert behavior.filters == {"included_functions": ["math-sub", "math-add"]}

    @each_of(
        ("data", "message"),
        [
            (
                {"maximum_attempts": 3, "x": 1},
                r"from_dict takes auto_invoke, .*type; got 'maximum_attempts', 'x'\.",
            ),
            ({"type": "any"}, r"type must be one of auto, none, required; got 'any'\."),
            ({"type": None}, r"type must be one of auto, none, required; got None\."),
            (
                {"auto_invoke": "false"},
                "auto_invoke must be true or false; got 'false'",
            ),
            (
                {"functions": "math.add"},
                "functions must be a list of one or more function names; got 'math.add'",
            ),
            (
                {"functions": []},
                r"functions must be a list .* Leave it out to offer every function",
            ),
            ({"functions": [1]}, "functions must be a list"),
            ({"maximum_use_attempts": 0}, "maximum_use_attempts must be"),
            ({"maximum_use_attempts": "3"}, "maximum_use_attempts must be"),
            (
                {"maximum_auto_invoke_attempts": None},
                "maximum_auto_invoke_attempts must be",
            ),
        ],
    )
    def test_refusals(self, data: dict[str, Any], message: str) -> None:
        """Unknown keys and types and values of the wrong kind are refused by name, with the way out."""
        with pytest.raises(PlannerInvalidConfigurationError, match=message):
            BoundedFunctionChoiceBehavior.from_dict(data)

    @given(
        make=st.sampled_from(MAKERS),
        use=st.none() | ATTEMPTS,
        stock=st.integers(min_value=0, max_value=1000),
    )
    def test_dump_builds_the_same_behaviour(
        self, make: Make, use: int | None, stock: int
    ) -> None:
        """What ``model_dump`` and ``model_dump_json`` write builds an equal behaviour."""
        behavior = make(maximum_use_attempts=use, maximum_auto_invoke_attempts=stock)
        assert BoundedFunctionChoiceBehavior(**behavior.model_dump()) == behavior
        assert (
            BoundedFunctionChoiceBehavior.model_validate_json(
                behavior.model_dump_json()
            )
            == behavior
        )


class TestFromString:
    @each_of(
        ("name", "expected"),
        [
            ("auto", BoundedFunctionChoiceBehavior.Auto()),
            ("Required", BoundedFunctionChoiceBehavior.Required()),
            ("NONE", BoundedFunctionChoiceBehavior.NoneInvoke()),
        ],
    )
    def test_is_the_types_default(
        self, name: str, expected: BoundedFunctionChoiceBehavior
    ) -> None:
        """Each name, in any case, is what its class method makes without options."""
        assert BoundedFunctionChoiceBehavior.from_string(name) == expected

    def test_unknown_type(self) -> None:
        """Another name is refused with the allowed ones."""
        with pytest.raises(
            PlannerInvalidConfigurationError,
            match="auto, none, required; got 'sometimes'",
        ):
            BoundedFunctionChoiceBehavior.from_string("sometimes")


class TestCopies:
    @each_of("duplicate", [copy.copy, copy.deepcopy, lambda b: b.model_copy(deep=True)])
    def test_copies_share_the_callback(
        self,
        duplicate: Callable[
            [BoundedFunctionChoiceBehavior], BoundedFunctionChoiceBehavior
        ],
    ) -> None:
        """Copies keep class and bounds, and share the callback of an object that cannot be copied."""
        callback = Gate().allow
        behavior = BoundedFunctionChoiceBehavior.Auto(
            maximum_use_attempts=3, pre_invoke_callback=callback
        )
        behavior.auto_invoke_kernel_functions = False
        twin = duplicate(behavior)
        assert type(twin) is BoundedFunctionChoiceBehavior
        assert twin == behavior
        assert twin is not behavior
        assert twin.pre_invoke_callback is callback

    def test_deep_copy_has_its_own_filters(self) -> None:
        """Changing the filters of a deep copy leaves the original's alone; no callback is fine."""
        behavior = BoundedFunctionChoiceBehavior.Auto(
            filters={"included_plugins": ["math"]}
        )
        twin = copy.deepcopy(behavior)
        assert twin.filters is not None
        twin.filters["included_plugins"].append("web")
        assert behavior.filters == {"included_plugins": ["math"]}

    def test_settings_conversion_and_copy(
        self, openai_settings: type[PromptExecutionSettings]
    ) -> None:
        """A service's own settings, deep-copied as Semantic Kernel does, keep class, attempts and callback."""
        callback = Gate().allow
        behavior = BoundedFunctionChoiceBehavior.Auto(
            maximum_use_attempts=3, pre_invoke_callback=callback
        )
        generic = PromptExecutionSettings(function_choice_behavior=behavior)
        settings = copy.deepcopy(
            openai_settings.from_prompt_execution_settings(generic)
        )
        kept = settings.function_choice_behavior
        assert type(kept) is BoundedFunctionChoiceBehavior
        assert kept is not behavior
        assert kept.use_attempts == kept.maximum_use_attempts == 3
        assert kept.pre_invoke_callback is callback

    def test_serialisation_leaves_the_callback_out(
        self, openai_settings: type[PromptExecutionSettings]
    ) -> None:
        """Dump, JSON and JSON schema work with a callback and leave it out, and a request's data is not disturbed."""
        behavior = BoundedFunctionChoiceBehavior.Auto(
            maximum_use_attempts=3, pre_invoke_callback=Gate().allow
        )
        assert "pre_invoke_callback" not in behavior.model_dump()
        assert '"maximum_use_attempts":3' in behavior.model_dump_json()
        assert "pre_invoke_callback" not in behavior.model_json_schema()["properties"]
        settings = openai_settings.from_prompt_execution_settings(
            PromptExecutionSettings(function_choice_behavior=behavior)
        )
        assert "function_choice_behavior" not in settings.prepare_settings_dict()

    @each_of("callback", [allow, allow_async, None])
    def test_callbacks_are_plain_or_async(self, callback: Any) -> None:
        """Plain and async functions are taken as they are, also by assignment."""
        behavior = BoundedFunctionChoiceBehavior.Auto()
        behavior.pre_invoke_callback = callback
        assert behavior.pre_invoke_callback is callback
        assert behavior.use_attempts == 5
