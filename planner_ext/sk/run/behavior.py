"""``BoundedFunctionChoiceBehavior``: a limit of tool rounds, in Semantic Kernel's loop and in ours.

``maximum_use_attempts`` is the only bound; the inherited
``maximum_auto_invoke_attempts``, which Semantic Kernel's loop reads, is 0 (manual) or
the same. Counting is the loop's: Semantic Kernel copies a behaviour for each request.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, cast

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic.json_schema import SkipJsonSchema
from semantic_kernel.connectors.ai.function_choice_behavior import (
    DEFAULT_MAX_AUTO_INVOKE_ATTEMPTS,
    FunctionChoiceBehavior,
)
from semantic_kernel.connectors.ai.function_choice_type import FunctionChoiceType

from planner_ext.core.errors import shown
from planner_ext.core.limits import is_count
from planner_ext.sk.errors import InvalidBehaviorError

UNLIMITED_ATTEMPTS = 2**31 - 1
"""``maximum_auto_invoke_attempts`` without a bound: ``int.MaxValue``, as in the .NET Semantic Kernel."""

PreInvokeCallback = Callable[[int, str, Mapping[str, Any]], bool | Awaitable[bool]]
"""Called before a call runs, with the 1-based iteration, the function's name and its arguments; False refuses it."""

_Filters = dict[
    Literal[
        "excluded_plugins",
        "included_plugins",
        "excluded_functions",
        "included_functions",
    ],
    list[str],
]

_FIELD_KEYS = ("filters", "maximum_auto_invoke_attempts", "maximum_use_attempts")
_DICT_KEYS = ("type", "auto_invoke", "functions", *_FIELD_KEYS)
_EXPECTED = {
    "maximum_use_attempts": (
        "a whole number, 1 or more, or None",
        "Pass None for unlimited; to handle the calls yourself, pass auto_invoke=False and no attempts.",
    ),
    "maximum_auto_invoke_attempts": (
        "a whole number",
        "Pass 0 to handle the calls yourself.",
    ),
    "pre_invoke_callback": (
        "a function of iteration, name and arguments that returns a bool, or None",
        "Pass None for no such gate.",
    ),
}


class BoundedFunctionChoiceBehavior(FunctionChoiceBehavior):
    """A function choice behaviour whose bound means the same in Semantic Kernel's loop and in ours.

    ``maximum_use_attempts`` counts the tool rounds of one chat request. A round is one
    reply with calls, any number of them, and their results; k attempts allow at most k
    rounds and k + 1 requests. It is checked before each request after a tool round.
    Then functions are withdrawn: the next request offers none, and its reply is the
    answer. In Semantic Kernel's loop a streamed request stops after the k-th round
    without an answer.

    Of both bounds the smaller one holds; without one it is that of Semantic Kernel's
    ``Auto()``, 5. Assigning ``maximum_use_attempts`` replaces the bound and switches
    automatic invocation on; assigning ``maximum_auto_invoke_attempts`` can only tighten
    it. ``auto_invoke_kernel_functions`` switches invocation and keeps the bound.

    Copies share the callback; ``model_dump``, ``model_dump_json`` and the JSON schema
    exclude it.

    Attributes:
        maximum_use_attempts: Tool rounds of one chat request, 1 or more; None is
            unlimited, and must be given as such.
        pre_invoke_callback: Called before each call, see ``PreInvokeCallback``; sync or
            async. False refuses the call, True leaves it to the other controls.
            Semantic Kernel's own loop ignores it.
        maximum_auto_invoke_attempts: The same for Semantic Kernel's loop: 0 or less is
            manual, ``UNLIMITED_ATTEMPTS`` is no bound.

    Raises:
        PlannerInvalidConfigurationError: If a bound is invalid, the callback is not
            callable, or a field is unknown.
    """

    maximum_auto_invoke_attempts: int = UNLIMITED_ATTEMPTS
    maximum_use_attempts: int | None = None
    pre_invoke_callback: SkipJsonSchema[PreInvokeCallback | None] = Field(
        default=None, exclude=True
    )

    @property
    def use_attempts(self) -> int | None:
        """Tool rounds of one chat request; 0 is manual, None is unlimited."""
        return self.maximum_use_attempts if self.auto_invoke_kernel_functions else 0

    @property
    def auto_invoke_kernel_functions(self) -> bool:
        """Whether a loop runs the functions. Assigning it keeps the bound; Semantic Kernel's own resets it to 5."""
        return self.maximum_auto_invoke_attempts > 0

    @auto_invoke_kernel_functions.setter
    def auto_invoke_kernel_functions(self, value: bool) -> None:
        self.maximum_auto_invoke_attempts = UNLIMITED_ATTEMPTS if value else 0

    @classmethod
    def Auto(
        cls,
        auto_invoke: bool = True,
        *,
        maximum_use_attempts: int | EllipsisType | None = ...,
        pre_invoke_callback: PreInvokeCallback | None = None,
        filters: _Filters | None = None,
        **kwargs: Any,
    ) -> Self:
        """Let the model decide which functions to call, if any.

        Args:
            auto_invoke: Whether a loop runs the functions; giving attempts implies it.
            maximum_use_attempts: Tool rounds; the default is
                ``maximum_auto_invoke_attempts`` if given, otherwise 5, as for Semantic
                Kernel's ``Auto()``. None is unlimited.
            pre_invoke_callback: Called before each call, by our loop only.
            filters: The functions to offer, as in Semantic Kernel; None offers all.
            **kwargs: Other fields of the behaviour.

        Raises:
            PlannerInvalidConfigurationError: As for the class.
        """
        if not isinstance(maximum_use_attempts, EllipsisType):
            kwargs["maximum_use_attempts"] = maximum_use_attempts
        return cls._of_type(
            FunctionChoiceType.AUTO,
            manual=not auto_invoke and maximum_use_attempts in (None, ...),
            pre_invoke_callback=pre_invoke_callback,
            filters=filters,
            **kwargs,
        )

    @classmethod
    def Required(
        cls,
        auto_invoke: bool = True,
        *,
        maximum_use_attempts: int | EllipsisType | None = ...,
        pre_invoke_callback: PreInvokeCallback | None = None,
        filters: _Filters | None = None,
        **kwargs: Any,
    ) -> Self:
        """Make the model call a function in each of the attempts.

        Args:
            auto_invoke: As of `Auto`.
            maximum_use_attempts: Tool rounds, each of them forced; the default is 1.
            pre_invoke_callback: As of `Auto`.
            filters: As of `Auto`.
            **kwargs: As of `Auto`.

        Raises:
            PlannerInvalidConfigurationError: As for the class.
        """
        attempts = maximum_use_attempts
        if isinstance(attempts, EllipsisType):
            attempts = None if kwargs.get("maximum_auto_invoke_attempts") else 1
        return cls._of_type(
            FunctionChoiceType.REQUIRED,
            manual=not auto_invoke and maximum_use_attempts in (None, ...),
            maximum_use_attempts=attempts,
            pre_invoke_callback=pre_invoke_callback,
            filters=filters,
            **kwargs,
        )

    @classmethod
    def NoneInvoke(
        cls,
        *,
        maximum_use_attempts: int | None = None,
        pre_invoke_callback: PreInvokeCallback | None = None,
        filters: _Filters | None = None,
        **kwargs: Any,
    ) -> Self:
        """Show the model the functions but let it call none; it may describe what it would call.

        Args:
            maximum_use_attempts: Tool rounds if the model calls functions anyway; None
                runs none of them.
            pre_invoke_callback: As of `Auto`.
            filters: The functions to show; None shows all.
            **kwargs: As of `Auto`.

        Raises:
            PlannerInvalidConfigurationError: As for the class.
        """
        return cls._of_type(
            FunctionChoiceType.NONE,
            manual=maximum_use_attempts is None,
            maximum_use_attempts=maximum_use_attempts,
            pre_invoke_callback=pre_invoke_callback,
            filters=filters,
            **kwargs,
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Make a behaviour from data, such as a prompt template's.

        Args:
            data: May hold ``type`` ("auto" by default, "none", "required"),
                ``auto_invoke`` (false by default, as in Semantic Kernel; attempts imply
                it; "none" ignores it), ``functions`` (names to offer, added to the
                filters), ``filters``, ``maximum_use_attempts`` and
                ``maximum_auto_invoke_attempts``.

        Raises:
            PlannerInvalidConfigurationError: If a key, a type or a value is invalid.
        """
        _refuse_unknown("from_dict", data, _DICT_KEYS)
        auto_invoke = data.get("auto_invoke", False)
        if not isinstance(auto_invoke, bool):
            _refuse(
                "auto_invoke",
                "true or false",
                "Leave it out to handle the calls yourself.",
                auto_invoke,
            )
        options = {key: data[key] for key in _FIELD_KEYS if key in data}
        kind = _type_named(data.get("type", "auto"))
        if kind is FunctionChoiceType.NONE:
            behavior = cls.NoneInvoke(**options)
        else:
            behavior = (cls.Auto if kind is FunctionChoiceType.AUTO else cls.Required)(
                auto_invoke, **options
            )
        if data.get("functions") is not None:
            behavior.filters = _filters_with(data["functions"], behavior.filters)
        return behavior

    @classmethod
    def from_string(cls, data: str) -> Self:
        """Make the behaviour of the named type: "auto", "none" or "required", in any case.

        Raises:
            PlannerInvalidConfigurationError: If the name is another one.
        """
        return cls.from_dict({"type": data, "auto_invoke": True})

    @classmethod
    def _of_type(
        cls, type_: FunctionChoiceType, *, manual: bool, **options: Any
    ) -> Self:
        if manual:
            options.setdefault("maximum_auto_invoke_attempts", 0)
        return cls(type_=type_, **options)

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, data: object) -> object:
        """Refuse a misspelt field; pydantic would ignore it, and the bound with it."""
        _refuse_unknown(cls.__name__, data, cls.model_fields)
        return data

    @field_validator(
        "maximum_use_attempts",
        "maximum_auto_invoke_attempts",
        "pre_invoke_callback",
        mode="before",
    )
    @classmethod
    def _check_value(cls, value: object, info: ValidationInfo) -> object:
        field = str(info.field_name)
        valid = {
            "maximum_use_attempts": value is None or is_count(value, least=1),
            "maximum_auto_invoke_attempts": isinstance(value, int)
            and not isinstance(value, bool),
            "pre_invoke_callback": value is None or callable(value),
        }
        if not valid[field]:
            _refuse(field, *_EXPECTED[field], value)
        return value

    def model_post_init(self, _context: Any, /) -> None:
        """Keep the tighter of the bounds given; without one, that of Semantic Kernel's ``Auto()``."""
        given = self.model_fields_set
        stock_attempts = self.maximum_auto_invoke_attempts
        has_bound = "maximum_auto_invoke_attempts" in given and stock_attempts > 0
        if "maximum_use_attempts" not in given and not has_bound:
            vars(self)["maximum_use_attempts"] = DEFAULT_MAX_AUTO_INVOKE_ATTEMPTS
        self._keep_in_step(stock_attempts)

    if not TYPE_CHECKING:  # hidden, as pydantic hides its own: a visible one lets a misspelt assignment pass unchecked

        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name == "maximum_auto_invoke_attempts":
                self._keep_in_step(value)
            elif name == "maximum_use_attempts":
                switched_on = value is not None or self.auto_invoke_kernel_functions
                self._keep_in_step(UNLIMITED_ATTEMPTS if switched_on else 0)

    def _keep_in_step(self, stock_attempts: int) -> None:
        """Tighten the bound by Semantic Kernel's field, and derive that field from the bound."""
        bound = self.maximum_use_attempts
        if 0 < stock_attempts < UNLIMITED_ATTEMPTS:
            bound = min(stock_attempts, bound or stock_attempts)
        # __setattr__ would call this method again.
        vars(self).update(
            maximum_use_attempts=bound,
            maximum_auto_invoke_attempts=(bound or UNLIMITED_ATTEMPTS)
            if stock_attempts > 0
            else 0,
        )

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        memo = {} if memo is None else memo
        # Marks it as copied, so that it is shared.
        memo[id(self.pre_invoke_callback)] = self.pre_invoke_callback
        return super().__deepcopy__(memo)


def _type_named(name: object) -> FunctionChoiceType:
    try:
        return FunctionChoiceType(name.lower() if isinstance(name, str) else name)
    except ValueError:
        allowed = ", ".join(sorted(kind.value for kind in FunctionChoiceType))
        _refuse("type", f"one of {allowed}", "Leave it out for auto.", name)


def _filters_with(functions: object, filters: _Filters | None) -> _Filters:
    """Add functions to the filters; an empty list is refused, which Semantic Kernel reads as all."""
    listed = (
        cast("Sequence[object]", functions)
        if isinstance(functions, list | tuple)
        else ()
    )
    names = [name.replace(".", "-") for name in listed if isinstance(name, str)]
    if not names or len(names) != len(listed):
        way_out = "Leave it out to offer every function; to offer none, use no behaviour at all."
        _refuse(
            "functions",
            "a list of one or more function names",
            way_out,
            cast("object", functions),
        )
    given = filters or {}
    return {
        **given,
        "included_functions": list(
            dict.fromkeys([*given.get("included_functions", ()), *names])
        ),
    }


def _refuse_unknown(where: str, data: object, allowed: Iterable[str]) -> None:
    names = ()
    if isinstance(data, Mapping):
        names = cast("Iterable[object]", data)
    unknown = sorted(repr(name) for name in set(names) - set(allowed))
    if unknown:
        raise InvalidBehaviorError(
            f"{where} takes {', '.join(sorted(allowed))}; got {', '.join(unknown)}. Correct the name or leave it out."
        )


def _refuse(field: str, expected: str, way_out: str, seen: object) -> NoReturn:
    raise InvalidBehaviorError(
        f"{field} must be {expected}; got {shown(seen)}. {way_out}"
    )
