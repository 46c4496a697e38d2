"""How many tool rounds one chat request may take, in Semantic Kernel's own loop and in ours.

Promises that ``BoundedFunctionChoiceBehavior.maximum_use_attempts`` is the one bound: whatever is given, assigned or
switched, the inherited ``maximum_auto_invoke_attempts``, which Semantic Kernel's loop reads, is either 0 (manual) or
that bound. It counts nothing itself, since Semantic Kernel copies a behaviour for each request: counting is the loop's.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, TypeGuard, cast

from pydantic import Field, field_validator, model_validator
from pydantic.json_schema import SkipJsonSchema
from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.function_choice_type import FunctionChoiceType

from planner_ext.core.errors import shown
from planner_ext.sk.errors import PlannerInvalidConfigurationError

__all__ = ["UNLIMITED_ATTEMPTS", "BoundedFunctionChoiceBehavior", "PreInvokeCallback"]

UNLIMITED_ATTEMPTS = 2**31 - 1
"""What ``maximum_auto_invoke_attempts`` holds where there is no bound: Semantic Kernel knows no None there.

The value is the one of the .NET Semantic Kernel (``int.MaxValue``).
"""

PreInvokeCallback = Callable[[int, str, Mapping[str, Any]], bool | Awaitable[bool]]
"""Asked before a call runs with the 1-based round trip, the function's name and its arguments; False refuses it."""

_Filters = dict[Literal["excluded_plugins", "included_plugins", "excluded_functions", "included_functions"], list[str]]

_FIELD_KEYS = ("filters", "maximum_auto_invoke_attempts", "maximum_use_attempts")
_DICT_KEYS = ("type", "auto_invoke", "functions", *_FIELD_KEYS)


class BoundedFunctionChoiceBehavior(FunctionChoiceBehavior):
    """Semantic Kernel's function choice behaviour with a bound that means the same in its loop and in ours.

    What ``maximum_use_attempts`` counts: tool rounds of one chat request. A round is one reply of the model with calls,
    however many they are, and their results. k attempts are at most k rounds, hence at most k + 1 round trips.

    When it is checked: before each round trip after a tool round.

    What happens then: functions are withdrawn. In our loop the next request carries none and its reply is the answer,
    plain and streamed alike. In Semantic Kernel's stock loop a plain request ends the same way; a streamed one just
    stops after the k-th round, with no answer.

    Both bounds are kept in step. Of ``maximum_use_attempts`` and ``maximum_auto_invoke_attempts``, given together, the
    smaller holds for both, and 0 or less for the latter is manual. Assigned later, attempts of either switch automatic
    invocation on: those of the former replace the bound, those of the latter can only tighten it. The property
    ``auto_invoke_kernel_functions`` switches and keeps the bound.

    Copying, deep copies included, shares the callback by reference, so it may be a method of an object that cannot be
    copied. The callback is left out of ``model_dump``, ``model_dump_json`` and the JSON schema.

    Attributes:
        maximum_use_attempts: Tool rounds that one chat request may take, 1 or more; None is unlimited.
        pre_invoke_callback: Asked before each call, see ``PreInvokeCallback``; plain or async. False refuses the call,
            True is no objection. Honoured by our loop; Semantic Kernel's stock loop ignores it.
        maximum_auto_invoke_attempts: The same bound where Semantic Kernel's loop reads it: 0 if functions are not
            invoked automatically, ``UNLIMITED_ATTEMPTS`` if there is no bound.

    Raises:
        PlannerInvalidConfigurationError: A bound is not a whole number or ``maximum_use_attempts`` is below 1, the
            callback cannot be called, or a field is unknown; names the field, what was expected and the way out.
    """

    maximum_auto_invoke_attempts: int = UNLIMITED_ATTEMPTS
    maximum_use_attempts: int | None = None
    pre_invoke_callback: SkipJsonSchema[PreInvokeCallback | None] = Field(default=None, exclude=True)

    @property
    def use_attempts(self) -> int | None:
        """Tool rounds that a loop may take for one chat request; 0 is manual, None is unlimited."""
        return self.maximum_use_attempts if self.auto_invoke_kernel_functions else 0

    @property
    def auto_invoke_kernel_functions(self) -> bool:
        """Whether a loop runs the functions; assigning it keeps the bound, where Semantic Kernel's resets it to 5."""
        return self.maximum_auto_invoke_attempts > 0

    @auto_invoke_kernel_functions.setter
    def auto_invoke_kernel_functions(self, value: bool) -> None:
        self.maximum_auto_invoke_attempts = UNLIMITED_ATTEMPTS if value else 0

    @classmethod
    def Auto(
        cls,
        auto_invoke: bool = True,
        *,
        maximum_use_attempts: int | None = None,
        pre_invoke_callback: PreInvokeCallback | None = None,
        filters: _Filters | None = None,
        **kwargs: Any,
    ) -> Self:
        """Let the model decide which functions to call, if any.

        Args:
            auto_invoke: Whether a loop runs the functions; giving attempts implies it.
            maximum_use_attempts: Tool rounds of one chat request, 1 or more; None is unlimited.
            pre_invoke_callback: Asked before each call, by our loop only.
            filters: Which functions to offer, as in Semantic Kernel; None offers all.
            **kwargs: Other fields of the behaviour, as in Semantic Kernel.

        Raises:
            PlannerInvalidConfigurationError: As for the class.
        """
        return cls._of_type(
            FunctionChoiceType.AUTO,
            manual=not auto_invoke and maximum_use_attempts is None,
            maximum_use_attempts=maximum_use_attempts,
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
            auto_invoke: Whether a loop runs the functions; giving attempts implies it.
            maximum_use_attempts: Tool rounds of one chat request, 1 or more, each of them forced. Left out:
                ``maximum_auto_invoke_attempts`` where that is given, else 1. None is unlimited: forced calls then end
                only by another limit, such as a budget.
            pre_invoke_callback: Asked before each call, by our loop only.
            filters: Which functions to offer, as in Semantic Kernel; None offers all.
            **kwargs: Other fields of the behaviour, as in Semantic Kernel.

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
        """Show the model the functions without letting it call them: it may describe what it would call.

        Args:
            maximum_use_attempts: Tool rounds, should the model call functions all the same; None runs none of them.
            pre_invoke_callback: Asked before each call, by our loop only.
            filters: Which functions to show, as in Semantic Kernel; None shows all.
            **kwargs: Other fields of the behaviour, as in Semantic Kernel.

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
        """Make a behaviour from data, such as a prompt template's; ``data`` is left as it is.

        Args:
            data: May hold ``type`` ("auto" by default, "none", "required"), ``auto_invoke`` (false by default, as in
                Semantic Kernel; attempts imply it; "none" has no use for it), ``functions`` (names to offer, added to
                the filters), ``filters``, ``maximum_use_attempts`` and ``maximum_auto_invoke_attempts``.

        Raises:
            PlannerInvalidConfigurationError: A key or a type is unknown, or a value is none that its key takes.
        """
        _refuse_unknown("from_dict", data, _DICT_KEYS)
        auto_invoke = data.get("auto_invoke", False)
        if not isinstance(auto_invoke, bool):
            _refuse("auto_invoke", "true or false", auto_invoke, "Leave it out to handle the calls yourself.")
        options = {key: data[key] for key in _FIELD_KEYS if key in data}
        kind = _type_named(data.get("type", "auto"))
        if kind is FunctionChoiceType.NONE:
            behavior = cls.NoneInvoke(**options)
        else:
            behavior = (cls.Auto if kind is FunctionChoiceType.AUTO else cls.Required)(auto_invoke, **options)
        if data.get("functions") is not None:
            behavior.filters = _filters_with(data["functions"], behavior.filters)
        return behavior

    @classmethod
    def from_string(cls, data: str) -> Self:
        """Make the behaviour of the named type with its defaults: "auto", "none" or "required", in any case.

        Raises:
            PlannerInvalidConfigurationError: Another name.
        """
        return cls.from_dict({"type": data, "auto_invoke": True})

    @classmethod
    def _of_type(cls, type_: FunctionChoiceType, *, manual: bool, **options: Any) -> Self:
        if manual:
            options.setdefault("maximum_auto_invoke_attempts", 0)
        return cls(type_=type_, **options)

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, data: object) -> object:
        """Refuse a misspelt field, which pydantic would drop: the bound would silently not be there."""
        _refuse_unknown(cls.__name__, data, cls.model_fields)
        return data

    @field_validator("maximum_use_attempts", mode="before")
    @classmethod
    def _check_use_attempts(cls, value: object) -> object:
        if value is None or (_is_whole_number(value) and value >= 1):
            return value
        _refuse(
            "maximum_use_attempts",
            "a whole number, 1 or more, or None",
            value,
            "Pass None for unlimited; to handle the calls yourself, pass auto_invoke=False and no attempts.",
        )

    @field_validator("maximum_auto_invoke_attempts", mode="before")
    @classmethod
    def _check_stock_attempts(cls, value: object) -> object:
        if _is_whole_number(value):
            return value
        _refuse("maximum_auto_invoke_attempts", "a whole number", value, "Pass 0 to handle the calls yourself.")

    @field_validator("pre_invoke_callback", mode="before")
    @classmethod
    def _check_callback(cls, value: object) -> object:
        if value is None or callable(value):
            return value
        _refuse(
            "pre_invoke_callback",
            "a function of iteration, name and arguments that returns a bool, or None",
            value,
            "Pass None for no such gate.",
        )

    def model_post_init(self, _context: Any, /) -> None:
        """Keep the tighter of the bounds given."""
        self._keep_in_step(self.maximum_auto_invoke_attempts)

    if not TYPE_CHECKING:  # hidden, as pydantic hides its own: a visible one lets a misspelt assignment pass unchecked

        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name == "maximum_auto_invoke_attempts":
                self._keep_in_step(value)
            elif name == "maximum_use_attempts":
                switched_on = value is not None or self.auto_invoke_kernel_functions
                self._keep_in_step(UNLIMITED_ATTEMPTS if switched_on else 0)

    def _keep_in_step(self, stock_attempts: int) -> None:
        """Tighten the bound by what Semantic Kernel's field was given, and derive that field from the bound."""
        bound = self.maximum_use_attempts
        if 0 < stock_attempts < UNLIMITED_ATTEMPTS:
            bound = min(stock_attempts, bound or stock_attempts)
        # Written past __setattr__, which would come back here.
        vars(self).update(
            maximum_use_attempts=bound,
            maximum_auto_invoke_attempts=(bound or UNLIMITED_ATTEMPTS) if stock_attempts > 0 else 0,
        )

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        memo = {} if memo is None else memo
        memo[id(self.pre_invoke_callback)] = self.pre_invoke_callback  # known as copied: shared, never copied
        return super().__deepcopy__(memo)


def _type_named(name: object) -> FunctionChoiceType:
    if isinstance(name, FunctionChoiceType):
        return name
    allowed = {kind.value: kind for kind in FunctionChoiceType}
    kind = allowed.get(name.lower()) if isinstance(name, str) else None
    if kind is None:
        _refuse("type", f"one of {', '.join(sorted(allowed))}", name, "Leave it out for auto.")
    return kind


def _filters_with(functions: object, filters: _Filters | None) -> _Filters:
    """Add the listed functions to the filters; an empty list is refused, as Semantic Kernel takes it for all."""
    if not _are_names(functions) or not functions:
        _refuse(
            "functions",
            "a list of one or more function names",
            functions,
            "Leave it out to offer every function; to offer none, use no behaviour at all.",
        )
    given = filters or {}
    names = [*given.get("included_functions", ()), *(name.replace(".", "-") for name in functions)]
    return {**given, "included_functions": list(dict.fromkeys(names))}


def _is_whole_number(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_names(value: object) -> TypeGuard[Sequence[str]]:
    return isinstance(value, list | tuple) and all(isinstance(item, str) for item in cast("Sequence[object]", value))


def _refuse_unknown(where: str, data: object, allowed: Iterable[str]) -> None:
    names = cast("Iterable[object]", data) if isinstance(data, Mapping) else ()
    unknown = sorted(repr(name) for name in set(names) - set(allowed))
    if unknown:
        raise PlannerInvalidConfigurationError(
            f"{where} takes {', '.join(sorted(allowed))}; got {', '.join(unknown)}. Correct the name or leave it out."
        )


def _refuse(field: str, expected: str, seen: object, way_out: str) -> NoReturn:
    raise PlannerInvalidConfigurationError(f"{field} must be {expected}; got {shown(seen)}. {way_out}")
