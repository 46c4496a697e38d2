"""The form of a final answer (``response_format``): read before the first request, asked for, and checked.

`planner_ext.core.machine` decides when an answer is checked and asked for again.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any, cast

from pydantic import BaseModel, ValidationError
from pydantic.errors import PydanticUserError
from pydantic_core import from_json
from semantic_kernel.connectors.ai import PromptExecutionSettings
from semantic_kernel.exceptions import KernelException

from planner_ext.core.errors import shown
from planner_ext.core.values import frozen
from planner_ext.sk.errors import InvalidOptionError
from planner_ext.sk.functions.conversion import UnfitError, check_exponents

_PROBLEMS = 5
"""The number of problems of one answer that the model reads."""

_EXPECTED = (
    "response_format must be a pydantic model class, a JSON schema, or a response_format of the type json_schema or "
    "json_object"
)


@frozen
class ResponseForm:
    """The form of a final answer; make one with `response_form`.

    Attributes:
        model: The pydantic model that an answer is read as, or None.
        wanted: Values for the settings' ``response_format``, the best first.
        settings: The connector's settings that ask for the form; if empty, messages
            spell it out.
    """

    model: type[BaseModel] | None = None
    schema: dict[str, Any]
    wanted: tuple[Any, ...]
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def within(self, settings: PromptExecutionSettings) -> "ResponseForm":
        """Fit the form to a connector's settings."""
        updates = (_accepted(type(settings), wanted) for wanted in self.wanted)
        return replace(
            self,
            settings=next((update for update in updates if update), dict[str, Any]()),
        )

    def problem(self, answer: str) -> str:
        """Describe what is wrong with an answer; "" if it is in the form."""
        try:
            self.parse(answer)
        except ValidationError as error:
            found = error.errors(include_url=False)[:_PROBLEMS]
            return "; ".join(
                f"{'.'.join(map(str, each['loc'])) or 'The answer'}: {each['msg']}"
                for each in found
            )
        except ValueError as error:
            return str(error)
        return ""

    def parse(self, answer: str) -> Any:
        """Read an answer: an instance of the model, or JSON values; raises ValueError."""
        if self.model is not None:
            return _parsed_as(self.model, answer)
        from planner_ext.engine.schemas import answer_problems, read_json  # noqa: PLC0415  (for runs with a form only)

        try:
            value = read_json(answer)
        except ValueError as error:
            raise ValueError(f"The answer {error}") from None
        problem = answer_problems(self.schema, value)
        if problem:
            raise ValueError(problem)
        return value

    @property
    def request(self) -> str:
        """The request for the answer in its form."""
        schema = (
            f"\nThe JSON schema: {json.dumps(self.schema, ensure_ascii=False)}"
            if not self.settings
            else ""
        )
        return f"Give the final answer again, as JSON in the form that is asked for, and nothing else.{schema}"


def _parsed_as(model: type[BaseModel], answer: str) -> BaseModel:
    try:
        value = from_json(answer)
    except ValueError:
        value = None  # pydantic says what is wrong with it
    try:
        check_exponents(model, value)
        return model.model_validate_json(answer)
    except UnfitError as unfit:
        raise ValueError(f"A number in the answer {unfit.problem}.") from None
    except ArithmeticError as error:
        # Pydantic makes a fraction of infinity, and of 1/0.
        raise ValueError(
            f"The answer holds a number that cannot be used: {error}."
        ) from None


def response_form(given: object) -> ResponseForm | None:
    """Read the option ``response_format``; None means free text."""
    if given is None:
        return None
    if isinstance(given, type) and issubclass(given, BaseModel):
        try:
            schema = given.model_json_schema()
        except PydanticUserError as error:
            raise _refused(
                f"{given.__name__} has no JSON schema: {error.message}."
            ) from error
        return ResponseForm(model=given, schema=schema, wanted=(given, _named(schema)))
    if not isinstance(given, Mapping) or not given:
        raise _refused(f"got {shown(cast('object', given))}.")
    try:
        data = json.loads(json.dumps(given, allow_nan=False))  # a copy
    except (TypeError, ValueError, RecursionError) as error:
        raise _refused(f"it cannot be written as JSON: {error}.") from error
    return _form(data)


def _form(data: Any) -> ResponseForm:
    match data:
        case {"type": "json_object"}:
            return ResponseForm(schema={"type": "object"}, wanted=(data,))
        case {"type": "json_schema", "json_schema": {"name": str(), "schema": dict()}}:
            return ResponseForm(
                schema=_valid_schema(data["json_schema"]["schema"]), wanted=(data,)
            )
        case {"type": "json_schema"}:
            raise _refused(
                f"got {shown(data)}. The type json_schema needs json_schema.name and json_schema.schema."
            )
        case _:
            return ResponseForm(schema=_valid_schema(data), wanted=(_named(data),))


def _refused(problem: str) -> InvalidOptionError:
    return InvalidOptionError(f"{_EXPECTED}; {problem}")


def _valid_schema(schema: dict[str, Any]) -> dict[str, Any]:
    from planner_ext.engine.schemas import schema_problem  # noqa: PLC0415  (loaded for runs with a form only)

    if problem := schema_problem(schema):
        raise _refused(problem)
    return schema


def _named(schema: dict[str, Any]) -> dict[str, Any]:
    name = re.sub(r"[^0-9A-Za-z_-]+", "_", str(schema.get("title") or "answer"))[:64]
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}


def _accepted(
    settings: type[PromptExecutionSettings], wanted: Any
) -> dict[str, Any] | None:
    """Return the fields that a settings class sets for a form; None if it refuses the form."""
    if "response_format" not in settings.model_fields:
        return None
    try:
        taken = settings(response_format=wanted)  # pyright: ignore[reportCallIssue]
    except (ValidationError, KernelException):
        return None
    names = {
        "response_format",
        "structured_json_response",
    } & settings.model_fields.keys()
    return {name: getattr(taken, name) for name in names}
