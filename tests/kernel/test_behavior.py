"""The bound on tool rounds: what it refuses, how it is kept in step, what Semantic Kernel's own loop makes of it."""

import copy
import threading
import warnings
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, ValidationError
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.chat_completion_client_base import ChatCompletionClientBase
from semantic_kernel.connectors.ai.function_calling_utils import update_settings_from_function_call_configuration
from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.function_choice_type import FunctionChoiceType
from semantic_kernel.connectors.ai.prompt_execution_settings import PromptExecutionSettings
from semantic_kernel.contents import (
    AuthorRole,
    ChatHistory,
    ChatMessageContent,
    FunctionCallContent,
    FunctionResultContent,
    StreamingChatMessageContent,
    StreamingTextContent,
)
from semantic_kernel.exceptions import KernelException
from semantic_kernel.functions import kernel_function

from planner_ext.kernel import behavior as behavior_module
from planner_ext.kernel.behavior import UNLIMITED_ATTEMPTS, BoundedFunctionChoiceBehavior
from planner_ext.kernel.errors import PlannerInvalidConfigurationError

Make = Callable[..., BoundedFunctionChoiceBehavior]

MAKERS: list[Make] = [
    BoundedFunctionChoiceBehavior.Auto,
    BoundedFunctionChoiceBehavior.Required,
    BoundedFunctionChoiceBehavior.NoneInvoke,
]
MEANINGLESS_ATTEMPTS = [0, -1, True, False, 2.0, 1.5, float("inf"), "3", [3]]
ATTEMPTS = st.integers(min_value=1, max_value=1000)


def allow(iteration: int, name: str, arguments: Mapping[str, Any]) -> bool:
    return True


async def allow_async(iteration: int, name: str, arguments: Mapping[str, Any]) -> bool:
    return True


class Gate:
    """An owner of a callback that cannot be deep-copied."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def allow(self, iteration: int, name: str, arguments: Mapping[str, Any]) -> bool:
        return True


def in_step(behavior: BoundedFunctionChoiceBehavior) -> bool:
    """The one invariant: Semantic Kernel's field is 0 or the bound."""
    bound = behavior.maximum_use_attempts
    if not behavior.auto_invoke_kernel_functions:
        return behavior.maximum_auto_invoke_attempts == 0 and behavior.use_attempts == 0
    return behavior.maximum_auto_invoke_attempts == (bound or UNLIMITED_ATTEMPTS) and behavior.use_attempts == bound


class TestDefaults:
    def test_auto_is_unlimited(self) -> None:
        """``Auto()`` has no bound, and invokes."""
        behavior = BoundedFunctionChoiceBehavior.Auto()
        assert behavior.type_ is FunctionChoiceType.AUTO
        assert behavior.maximum_use_attempts is None
        assert behavior.use_attempts is None
        assert behavior.maximum_auto_invoke_attempts == UNLIMITED_ATTEMPTS

    def test_required_is_once(self) -> None:
        """``Required()`` forces one round."""
        behavior = BoundedFunctionChoiceBehavior.Required()
        assert behavior.type_ is FunctionChoiceType.REQUIRED
        assert behavior.maximum_use_attempts == behavior.use_attempts == behavior.maximum_auto_invoke_attempts == 1

    def test_none_invoke_runs_nothing(self) -> None:
        """``NoneInvoke()`` has no bound, and does not invoke."""
        behavior = BoundedFunctionChoiceBehavior.NoneInvoke()
        assert behavior.type_ is FunctionChoiceType.NONE
        assert behavior.maximum_use_attempts is None
        assert behavior.use_attempts == behavior.maximum_auto_invoke_attempts == 0

    def test_required_may_be_unlimited_on_request(self) -> None:
        """None is unlimited for ``Required`` too, where the caller says so."""
        assert BoundedFunctionChoiceBehavior.Required(maximum_use_attempts=None).use_attempts is None

    def test_constructor_is_unlimited(self) -> None:
        """The plain constructor has no bound and invokes."""
        assert BoundedFunctionChoiceBehavior().use_attempts is None

    @pytest.mark.parametrize("make", MAKERS)
    def test_fields_are_taken(self, make: Make) -> None:
        """Each class method takes attempts, callback, filters and Semantic Kernel's own fields."""
        filters = {"included_plugins": ["math"]}
        behavior = make(
            maximum_use_attempts=4, pre_invoke_callback=allow, filters=filters, enable_kernel_functions=False
        )
        assert type(behavior) is BoundedFunctionChoiceBehavior
        assert (behavior.maximum_use_attempts, behavior.maximum_auto_invoke_attempts, behavior.use_attempts) == (
            4,
            4,
            4,
        )
        assert behavior.pre_invoke_callback is allow
        assert behavior.filters == filters
        assert behavior.enable_kernel_functions is False

    @pytest.mark.parametrize("make", MAKERS)
    def test_subclass_is_kept(self, make: Make) -> None:
        """A subclass' class methods return the subclass."""

        class Mine(BoundedFunctionChoiceBehavior):
            pass

        assert type(getattr(Mine, make.__name__)()) is Mine


class TestAutoInvoke:
    @pytest.mark.parametrize("make", MAKERS[:2])
    def test_switched_off_is_manual(self, make: Make) -> None:
        """``auto_invoke=False`` without attempts is manual."""
        behavior = make(auto_invoke=False)
        assert behavior.maximum_auto_invoke_attempts == behavior.use_attempts == 0
        assert not behavior.auto_invoke_kernel_functions

    @pytest.mark.parametrize("make", MAKERS[:2])
    @pytest.mark.parametrize("attempts", [1, 3])
    def test_attempts_imply_it(self, make: Make, attempts: int) -> None:
        """Giving attempts, the default number too, invokes even with ``auto_invoke=False``."""
        behavior = make(auto_invoke=False, maximum_use_attempts=attempts)
        assert behavior.auto_invoke_kernel_functions
        assert behavior.use_attempts == attempts

    def test_required_unlimited_and_manual(self) -> None:
        """None gives no attempts, so ``auto_invoke=False`` stands beside it."""
        assert BoundedFunctionChoiceBehavior.Required(auto_invoke=False, maximum_use_attempts=None).use_attempts == 0

    def test_required_forced_on_after_manual_runs_once(self) -> None:
        """A manual ``Required`` keeps its bound of 1 for when it is switched on."""
        behavior = BoundedFunctionChoiceBehavior.Required(auto_invoke=False)
        behavior.auto_invoke_kernel_functions = True
        assert behavior.use_attempts == 1

    @pytest.mark.parametrize("bound", [None, 2, 8])
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
            behavior = make(maximum_use_attempts=use, maximum_auto_invoke_attempts=stock)
            expected = max(0, stock if use is None else min(use, stock))
            assert behavior.maximum_auto_invoke_attempts == behavior.use_attempts == expected
            assert in_step(behavior)

    @given(
        st.lists(
            st.tuples(st.just("maximum_use_attempts"), st.none() | ATTEMPTS)
            | st.tuples(st.just("maximum_auto_invoke_attempts"), st.integers(min_value=-3, max_value=1000))
            | st.tuples(st.just("auto_invoke_kernel_functions"), st.booleans())
        )
    )
    def test_any_assignments_keep_both_in_step(self, assignments: list[tuple[str, Any]]) -> None:
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
            assert behavior.maximum_use_attempts == behavior.use_attempts == behavior.maximum_auto_invoke_attempts == 3

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
    @pytest.mark.parametrize("attempts", MEANINGLESS_ATTEMPTS)
    @pytest.mark.parametrize("make", [*MAKERS, BoundedFunctionChoiceBehavior])
    def test_meaningless_attempts(self, make: Make, attempts: Any) -> None:
        """Zero, negative, boolean and non-integer attempts are refused: field, expectation, value, way out."""
        with pytest.raises(PlannerInvalidConfigurationError) as refusal:
            make(maximum_use_attempts=attempts)
        message = str(refusal.value)
        assert "maximum_use_attempts must be a whole number, 1 or more, or None" in message
        assert f"got {attempts!r}" in message
        assert "None for unlimited" in message
        assert "auto_invoke=False" in message

    @pytest.mark.parametrize("attempts", MEANINGLESS_ATTEMPTS)
    def test_meaningless_assignment(self, attempts: Any) -> None:
        """A refused assignment leaves the behaviour as it was."""
        behavior = BoundedFunctionChoiceBehavior.Auto(maximum_use_attempts=3)
        with pytest.raises(PlannerInvalidConfigurationError, match="maximum_use_attempts"):
            behavior.maximum_use_attempts = attempts
        assert behavior == BoundedFunctionChoiceBehavior.Auto(maximum_use_attempts=3)

    @pytest.mark.parametrize("attempts", [True, "3", 2.0, None])
    def test_meaningless_stock_attempts(self, attempts: Any) -> None:
        """Semantic Kernel's field takes whole numbers only."""
        with pytest.raises(PlannerInvalidConfigurationError, match=r"maximum_auto_invoke_attempts.*Pass 0"):
            BoundedFunctionChoiceBehavior.Auto(maximum_auto_invoke_attempts=attempts)

    @pytest.mark.parametrize("make", [*MAKERS, BoundedFunctionChoiceBehavior])
    @pytest.mark.parametrize("callback", ["allow", 1, True])
    def test_callback_that_cannot_be_called(self, make: Make, callback: Any) -> None:
        """A callback that cannot be called is refused by name."""
        with pytest.raises(PlannerInvalidConfigurationError, match="pre_invoke_callback must be a function"):
            make(pre_invoke_callback=callback)

    @pytest.mark.parametrize("make", [*MAKERS, BoundedFunctionChoiceBehavior])
    def test_misspelt_field(self, make: Make) -> None:
        """A misspelt option is refused, not dropped: otherwise the bound would silently not be there."""
        with pytest.raises(PlannerInvalidConfigurationError, match="'maximum_use_atempts'"):
            make(maximum_use_atempts=3)

    def test_misspelt_assignment(self) -> None:
        """A misspelt assignment is refused too, and changes nothing."""
        behavior = BoundedFunctionChoiceBehavior.Auto()
        with pytest.raises(PlannerInvalidConfigurationError, match="'maximum_use_atempts'"):
            behavior.maximum_use_atempts = 3  # type: ignore[attr-defined]
        assert behavior == BoundedFunctionChoiceBehavior.Auto()

    def test_malformed_filters(self) -> None:
        """Filters are checked by pydantic, as in Semantic Kernel; the field is named."""
        with pytest.raises(ValidationError, match="filters"):
            BoundedFunctionChoiceBehavior.Auto(filters={"include": ["a"]})  # type: ignore[dict-item]

    def test_error_belongs_to_semantic_kernel_and_not_to_pydantic(self) -> None:
        """The refusal can be caught as Semantic Kernel's error, and is no ValueError."""
        with pytest.raises(KernelException) as refusal:
            BoundedFunctionChoiceBehavior.Auto(maximum_use_attempts=0)
        assert not isinstance(refusal.value, ValueError)


class TestFromDict:
    def test_defaults_are_semantic_kernels(self) -> None:
        """An empty dict is manual auto, as in Semantic Kernel."""
        behavior = BoundedFunctionChoiceBehavior.from_dict({})
        assert type(behavior) is BoundedFunctionChoiceBehavior
        assert behavior.type_ is FunctionChoiceType.AUTO
        assert behavior.use_attempts == 0

    @pytest.mark.parametrize(
        ("data", "type_", "attempts"),
        [
            ({"type": "auto", "auto_invoke": True}, FunctionChoiceType.AUTO, None),
            ({"type": "AUTO", "auto_invoke": False}, FunctionChoiceType.AUTO, 0),
            ({"type": FunctionChoiceType.AUTO}, FunctionChoiceType.AUTO, 0),
            ({"auto_invoke": False, "maximum_use_attempts": 3}, FunctionChoiceType.AUTO, 3),
            ({"maximum_auto_invoke_attempts": 3}, FunctionChoiceType.AUTO, 3),
            ({"maximum_use_attempts": 4, "maximum_auto_invoke_attempts": 3}, FunctionChoiceType.AUTO, 3),
            ({"maximum_use_attempts": None}, FunctionChoiceType.AUTO, 0),
            ({"type": "required"}, FunctionChoiceType.REQUIRED, 0),
            ({"type": "required", "auto_invoke": True}, FunctionChoiceType.REQUIRED, 1),
            ({"type": "required", "maximum_use_attempts": 2}, FunctionChoiceType.REQUIRED, 2),
            ({"type": "none"}, FunctionChoiceType.NONE, 0),
            ({"type": "none", "auto_invoke": True}, FunctionChoiceType.NONE, 0),
        ],
    )
    def test_meaning(self, data: dict[str, Any], type_: FunctionChoiceType, attempts: int | None) -> None:
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
                "filters": {"included_functions": ["math-sub"], "excluded_plugins": ["web"]},
            }
        )
        assert behavior.filters == {"included_functions": ["math-sub", "math-add"], "excluded_plugins": ["web"]}

    @pytest.mark.parametrize(
        ("data", "filters"),
        [
            ({}, None),
            ({"functions": None, "filters": None}, None),
            ({"functions": ["math.add"]}, {"included_functions": ["math-add"]}),
            ({"filters": {"included_plugins": ["math"]}}, {"included_plugins": ["math"]}),
        ],
    )
    def test_filters(self, data: dict[str, Any], filters: dict[str, list[str]] | None) -> None:
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

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            ({"maximum_attempts": 3, "x": 1}, r"from_dict takes auto_invoke, .*type; got 'maximum_attempts', 'x'\."),
            ({"type": "any"}, r"type must be one of auto, none, required; got 'any'\."),
            ({"type": None}, r"type must be one of auto, none, required; got None\."),
            ({"auto_invoke": "false"}, "auto_invoke must be true or false; got 'false'"),
            ({"functions": "math.add"}, "functions must be a list of one or more function names; got 'math.add'"),
            ({"functions": []}, r"functions must be a list .* Leave it out to offer every function"),
            ({"functions": [1]}, "functions must be a list"),
            ({"maximum_use_attempts": 0}, "maximum_use_attempts must be"),
            ({"maximum_use_attempts": "3"}, "maximum_use_attempts must be"),
            ({"maximum_auto_invoke_attempts": None}, "maximum_auto_invoke_attempts must be"),
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
    def test_dump_builds_the_same_behaviour(self, make: Make, use: int | None, stock: int) -> None:
        """What ``model_dump`` and ``model_dump_json`` write builds an equal behaviour."""
        behavior = make(maximum_use_attempts=use, maximum_auto_invoke_attempts=stock)
        assert BoundedFunctionChoiceBehavior(**behavior.model_dump()) == behavior
        assert BoundedFunctionChoiceBehavior.model_validate_json(behavior.model_dump_json()) == behavior


class TestFromString:
    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("auto", BoundedFunctionChoiceBehavior.Auto()),
            ("Required", BoundedFunctionChoiceBehavior.Required()),
            ("NONE", BoundedFunctionChoiceBehavior.NoneInvoke()),
        ],
    )
    def test_is_the_types_default(self, name: str, expected: BoundedFunctionChoiceBehavior) -> None:
        """Each name, in any case, is what its class method makes without options."""
        assert BoundedFunctionChoiceBehavior.from_string(name) == expected

    def test_unknown_type(self) -> None:
        """Another name is refused with the allowed ones."""
        with pytest.raises(PlannerInvalidConfigurationError, match="auto, none, required; got 'sometimes'"):
            BoundedFunctionChoiceBehavior.from_string("sometimes")


@pytest.fixture
def openai_settings() -> type[PromptExecutionSettings]:
    """The settings of a real connector, imported where the warning of its own import can be silenced."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from semantic_kernel.connectors.ai.open_ai import OpenAIChatPromptExecutionSettings
    return OpenAIChatPromptExecutionSettings


class TestCopies:
    @pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda b: b.model_copy(deep=True)])
    def test_copies_share_the_callback(
        self, duplicate: Callable[[BoundedFunctionChoiceBehavior], BoundedFunctionChoiceBehavior]
    ) -> None:
        """Copies keep class and bounds, and share the callback of an object that cannot be copied."""
        callback = Gate().allow
        behavior = BoundedFunctionChoiceBehavior.Auto(maximum_use_attempts=3, pre_invoke_callback=callback)
        behavior.auto_invoke_kernel_functions = False
        twin = duplicate(behavior)
        assert type(twin) is BoundedFunctionChoiceBehavior
        assert twin == behavior
        assert twin is not behavior
        assert twin.pre_invoke_callback is callback

    def test_deep_copy_has_its_own_filters(self) -> None:
        """Changing the filters of a deep copy leaves the original's alone; no callback is fine."""
        behavior = BoundedFunctionChoiceBehavior.Auto(filters={"included_plugins": ["math"]})
        twin = copy.deepcopy(behavior)
        assert twin.filters is not None
        twin.filters["included_plugins"].append("web")
        assert behavior.filters == {"included_plugins": ["math"]}

    def test_settings_conversion_and_copy(self, openai_settings: type[PromptExecutionSettings]) -> None:
        """A service's own settings, deep-copied as Semantic Kernel does, keep class, attempts and callback."""
        callback = Gate().allow
        behavior = BoundedFunctionChoiceBehavior.Auto(maximum_use_attempts=3, pre_invoke_callback=callback)
        generic = PromptExecutionSettings(function_choice_behavior=behavior)
        settings = copy.deepcopy(openai_settings.from_prompt_execution_settings(generic))
        kept = settings.function_choice_behavior
        assert type(kept) is BoundedFunctionChoiceBehavior
        assert kept is not behavior
        assert kept.use_attempts == kept.maximum_use_attempts == 3
        assert kept.pre_invoke_callback is callback

    def test_serialisation_leaves_the_callback_out(self, openai_settings: type[PromptExecutionSettings]) -> None:
        """Dump, JSON and JSON schema work with a callback and leave it out, and a request's data is not disturbed."""
        behavior = BoundedFunctionChoiceBehavior.Auto(maximum_use_attempts=3, pre_invoke_callback=Gate().allow)
        assert "pre_invoke_callback" not in behavior.model_dump()
        assert '"maximum_use_attempts":3' in behavior.model_dump_json()
        assert "pre_invoke_callback" not in behavior.model_json_schema()["properties"]
        settings = openai_settings.from_prompt_execution_settings(
            PromptExecutionSettings(function_choice_behavior=behavior)
        )
        assert "function_choice_behavior" not in settings.prepare_settings_dict()

    @pytest.mark.parametrize("callback", [allow, allow_async, None])
    def test_callbacks_are_plain_or_async(self, callback: Any) -> None:
        """Plain and async functions are taken as they are, also by assignment."""
        behavior = BoundedFunctionChoiceBehavior.Auto()
        behavior.pre_invoke_callback = callback
        assert behavior.pre_invoke_callback is callback
        assert behavior.use_attempts is None


class ToolSettings(PromptExecutionSettings):
    """A connector's settings, as far as functions go."""

    tools: list[dict[str, Any]] | None = None
    tool_choice: FunctionChoiceType | None = None


class EagerModel(ChatCompletionClientBase):
    """A model that calls a function whenever it is offered one, and answers otherwise; records what it was sent."""

    SUPPORTS_FUNCTION_CALLING: ClassVar[bool] = True
    calls: int = UNLIMITED_ATTEMPTS
    choices: list[FunctionChoiceType | None] = Field(default_factory=list)

    def get_prompt_execution_settings_class(self) -> type[PromptExecutionSettings]:
        return ToolSettings

    def _update_function_choice_settings_callback(self) -> Callable[..., None]:
        return update_settings_from_function_call_configuration

    def _reset_function_choice_settings(self, settings: PromptExecutionSettings) -> None:
        assert isinstance(settings, ToolSettings)
        settings.tool_choice = settings.tools = None

    def _call(self, settings: PromptExecutionSettings) -> FunctionCallContent | None:
        assert isinstance(settings, ToolSettings)
        self.choices.append(settings.tool_choice if settings.tools else None)
        if not settings.tools or len(self.choices) > self.calls:
            return None
        return FunctionCallContent(
            id=f"call_{len(self.choices)}", index=0, name="math-add", arguments='{"a": 1, "b": 2}'
        )

    async def _inner_get_chat_message_contents(
        self, chat_history: ChatHistory, settings: PromptExecutionSettings
    ) -> list[ChatMessageContent]:
        call = self._call(settings)
        if call is None:
            return [ChatMessageContent(role=AuthorRole.ASSISTANT, content="done")]
        return [ChatMessageContent(role=AuthorRole.ASSISTANT, items=[call])]

    async def _inner_get_streaming_chat_message_contents(
        self, chat_history: ChatHistory, settings: PromptExecutionSettings, function_invoke_attempt: int = 0
    ) -> AsyncGenerator[list[StreamingChatMessageContent], Any]:
        call = self._call(settings)
        item = call or StreamingTextContent(choice_index=0, text="done")
        yield [StreamingChatMessageContent(role=AuthorRole.ASSISTANT, choice_index=0, items=[item])]


class Calculator:
    @kernel_function
    def add(self, a: int, b: int) -> int:
        return a + b


@pytest.fixture
def kernel() -> Kernel:
    kernel = Kernel()
    kernel.add_plugin(Calculator(), "math")
    return kernel


def model(calls: int = UNLIMITED_ATTEMPTS) -> EagerModel:
    return EagerModel(ai_model_id="scripted", calls=calls)


def results_in(history: ChatHistory) -> int:
    return sum(isinstance(item, FunctionResultContent) for message in history for item in message.items)


def settings_with(behavior: FunctionChoiceBehavior) -> PromptExecutionSettings:
    return PromptExecutionSettings(function_choice_behavior=behavior)


class TestStockLoop:
    """What Semantic Kernel's own loop makes of it, without any of ours."""

    @pytest.mark.parametrize("attempts", [1, 2, 3, 7])
    @pytest.mark.parametrize(
        ("make", "choice"),
        [
            (BoundedFunctionChoiceBehavior.Auto, FunctionChoiceType.AUTO),
            (BoundedFunctionChoiceBehavior.Required, FunctionChoiceType.REQUIRED),
        ],
    )
    async def test_plain(self, kernel: Kernel, make: Make, choice: FunctionChoiceType, attempts: int) -> None:
        """With k attempts: k tool rounds, k + 1 requests; the last has no functions and gives the answer."""
        service, history = model(), ChatHistory()
        settings = settings_with(make(maximum_use_attempts=attempts, pre_invoke_callback=Gate().allow))
        [answer] = await service.get_chat_message_contents(history, settings, kernel=kernel)
        assert service.choices == [choice] * attempts + [None]
        assert results_in(history) == attempts
        assert answer.content == "done"

    @pytest.mark.parametrize("attempts", [1, 3])
    async def test_streamed(self, kernel: Kernel, attempts: int) -> None:
        """With k attempts: k tool rounds and k requests, and then the stock stream ends with no answer."""
        service, history = model(), ChatHistory()
        settings = settings_with(BoundedFunctionChoiceBehavior.Auto(maximum_use_attempts=attempts))
        stream = service.get_streaming_chat_message_contents(history, settings, kernel=kernel)
        texts = [chunk.content async for chunks in stream for chunk in chunks if chunk.role is AuthorRole.ASSISTANT]
        assert service.choices == [FunctionChoiceType.AUTO] * attempts
        assert results_in(history) == attempts
        assert not any(texts)

    async def test_unlimited(self, kernel: Kernel) -> None:
        """Without a bound the stock loop goes on as long as the model calls, past Semantic Kernel's 5."""
        service, history = model(calls=20), ChatHistory()
        settings = settings_with(BoundedFunctionChoiceBehavior.Auto())
        [answer] = await service.get_chat_message_contents(history, settings, kernel=kernel)
        assert results_in(history) == 20
        assert answer.content == "done"

    @pytest.mark.parametrize(
        ("behavior", "choice"),
        [
            (BoundedFunctionChoiceBehavior.Auto(auto_invoke=False), FunctionChoiceType.AUTO),
            (BoundedFunctionChoiceBehavior.NoneInvoke(), FunctionChoiceType.NONE),
        ],
    )
    async def test_manual(
        self, kernel: Kernel, behavior: BoundedFunctionChoiceBehavior, choice: FunctionChoiceType
    ) -> None:
        """A manual behaviour offers the functions in one request, and nothing is run."""
        service, history = model(), ChatHistory()
        await service.get_chat_message_contents(history, settings_with(behavior), kernel=kernel)
        assert service.choices == [choice]
        assert results_in(history) == 0

    async def test_filters_narrow_what_is_offered(self, kernel: Kernel) -> None:
        """Functions that the filters leave out are not offered."""
        service, history = model(), ChatHistory()
        behavior = BoundedFunctionChoiceBehavior.Auto(filters={"excluded_plugins": ["math"]})
        await service.get_chat_message_contents(history, settings_with(behavior), kernel=kernel)
        assert service.choices == [None]

    async def test_callers_behaviour_is_left_alone(self, kernel: Kernel) -> None:
        """A request does not use up the caller's behaviour: the next one has all attempts again."""
        behavior = BoundedFunctionChoiceBehavior.Auto(maximum_use_attempts=2)
        for _ in range(2):
            service, history = model(), ChatHistory()
            await service.get_chat_message_contents(history, settings_with(behavior), kernel=kernel)
            assert results_in(history) == 2
        assert behavior == BoundedFunctionChoiceBehavior.Auto(maximum_use_attempts=2)


def test_exports() -> None:
    """The module exports the behaviour, its callback's type and the name of "no bound"."""
    assert behavior_module.__all__ == ["UNLIMITED_ATTEMPTS", "BoundedFunctionChoiceBehavior", "PreInvokeCallback"]
