"""The form of a final answer: a pydantic model or a JSON schema, sent to a connector and checked against an answer.

A form is checked before the first request, and the caller's object is not changed. When an answer is asked for in its
form, `planner_ext.core.machine` decides.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from pydantic import BaseModel, ValidationError
from pydantic.errors import PydanticUserError
from semantic_kernel.connectors.ai.prompt_execution_settings import PromptExecutionSettings
from semantic_kernel.contents import AuthorRole, ChatMessageContent
from semantic_kernel.exceptions import KernelException

from planner_ext.core.errors import shown
from planner_ext.core.values import Message
from planner_ext.sk.errors import PlannerInvalidConfigurationError

__all__ = ["ResponseForm", "ResponseFormat", "response_form"]

ResponseFormat = type[BaseModel] | Mapping[str, Any]
"""A pydantic model, a JSON schema, or ``response_format`` as OpenAI takes it (``json_schema`` or ``json_object``)."""

_PROBLEMS = 5
"""The number of problems of one answer that the model reads."""

_EXPECTED = (
    "response_format must be a pydantic model class, a JSON schema, or a response_format of the type json_schema or "
    "json_object"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseForm:
    """The form of a final answer. Implements `planner_ext.engine.ports.AnswerForm`. Make one with `response_form`.

    Attributes:
        model: The pydantic model that an answer is read as, or None.
        schema: The JSON schema of an answer.
        wanted: Values for the settings' ``response_format``, the best first.
        settings: The connector's settings that ask for the form; empty if it has none, so that messages spell the
            form out.
    """

    model: type[BaseModel] | None = None
    schema: dict[str, Any]
    wanted: tuple[Any, ...]
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def within(self, settings: PromptExecutionSettings) -> "ResponseForm":
        """Fit the form to a connector's settings."""
        updates = (_accepted(type(settings), wanted) for wanted in self.wanted)
        return replace(self, settings=next((update for update in updates if update), dict[str, Any]()))

    def problem(self, answer: str) -> str:
        """Describe what is wrong with an answer; "" if it is in the form."""
        try:
            self.parse(answer)
        except ValidationError as error:
            found = error.errors(include_url=False)[:_PROBLEMS]
            return "; ".join(f"{'.'.join(map(str, each['loc'])) or 'The answer'}: {each['msg']}" for each in found)
        except ValueError as error:
            return str(error)
        return ""

    def parse(self, answer: str) -> Any:
        """Read an answer: an instance of the model, or JSON values.

        Raises:
            ValueError: If it is not in the form (pydantic's ``ValidationError`` is one).
        """
        if self.model is not None:
            return self.model.model_validate_json(answer)
        try:
            value = json.loads(answer, parse_constant=_no_number)
        except RecursionError:
            raise ValueError("The answer is nested too deeply.") from None
        except ValueError as error:
            raise ValueError(f"The answer is not JSON: {error}.") from None
        from planner_ext.sk.schemas import answer_problems  # noqa: PLC0415  (loaded for runs with a form only)

        if problem := answer_problems(self.schema, value):
            raise ValueError(problem)
        return value

    def request(self, problem: str) -> Message:
        """Ask for the answer in its form, and say what was wrong with the last one."""
        schema = f"\nThe JSON schema: {json.dumps(self.schema, ensure_ascii=False)}" if not self.settings else ""
        text = f"Give the final answer again, as JSON in the form that is asked for, and nothing else.{schema}"
        return ChatMessageContent(role=AuthorRole.USER, content=f"{text}\nWhat was wrong: {problem}")


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


def response_form(given: object) -> ResponseForm | None:
    """Read the option ``response_format``; None stands for no form.

    Raises:
        PlannerInvalidConfigurationError: If it is not a valid form.
    """
    if given is None:
        return None
    if isinstance(given, type) and issubclass(given, BaseModel):
        try:
            schema = given.model_json_schema()
        except PydanticUserError as error:
            raise _refused(f"{given.__name__} has no JSON schema: {error.message}.") from error
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
            return ResponseForm(schema=_checked(data["json_schema"]["schema"]), wanted=(data,))
        case {"type": "json_schema"}:
            raise _refused(f"got {shown(data)}. The type json_schema needs json_schema.name and json_schema.schema.")
        case _:
            return ResponseForm(schema=_checked(data), wanted=(_named(data),))


def _refused(problem: str) -> PlannerInvalidConfigurationError:
    return PlannerInvalidConfigurationError(f"{_EXPECTED}; {problem}")


def _checked(schema: dict[str, Any]) -> dict[str, Any]:
    """Refuse what is not a valid schema, and one with references that lead out of it."""
    from planner_ext.sk.schemas import schema_problem  # noqa: PLC0415  (loaded for runs with a form only)

    if problem := schema_problem(schema):
        raise _refused(problem)
    return schema


def _named(schema: dict[str, Any]) -> dict[str, Any]:
    """Wrap a schema as OpenAI takes it; a name may have letters, digits, underscores and hyphens there."""
    name = re.sub(r"[^0-9A-Za-z_-]+", "_", str(schema.get("title") or "answer"))[:64]
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}


def _accepted(settings: type[PromptExecutionSettings], wanted: Any) -> dict[str, Any] | None:
    """Return the fields that a settings class sets for a form, flags included; None if it refuses the form."""
    if "response_format" not in settings.model_fields:
        return None
    try:
        taken = settings(response_format=wanted)  # pyright: ignore[reportCallIssue]
    except (ValidationError, KernelException):
        return None
    names = {"response_format", "structured_json_response"} & settings.model_fields.keys()
    return {name: getattr(taken, name) for name in names}
