"""The form of a final answer: a pydantic model or a JSON schema, given to a connector, and held to an answer.

Promises that what was given is checked before the first request, and not changed. Must not know the loop, nor when an
answer is asked for: that is `planner_ext.core.machine`.
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
"""Problems of one answer that the model is told."""

_ANY_OBJECT: dict[str, Any] = {"type": "object"}

_EXPECTED = (
    "response_format must be a pydantic model class, a JSON schema, or a response_format of the type json_schema or "
    "json_object"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseForm:
    """What a final answer has to be. Implements `planner_ext.engine.ports.AnswerForm`. Make one with `response_form`.

    Attributes:
        model: The pydantic model that an answer is read as, or None.
        schema: The JSON schema of an answer.
        wanted: What settings are given, the best first.
        settings: What asks for the form in the connector's settings; empty where these have no place for it, so that
            messages spell it out.
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
        """Say what is wrong with an answer; "" where nothing is."""
        try:
            self.parse(answer)
        except ValidationError as error:
            found = error.errors(include_url=False)
            return "; ".join(
                f"{'.'.join(map(str, each['loc'])) or 'The answer'}: {each['msg']}" for each in found[:_PROBLEMS]
            )
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
            raise ValueError(f"The answer is no JSON: {error}.") from None
        from planner_ext.sk.schemas import answer_problems  # noqa: PLC0415  (only who has a form pays for it)

        if problem := answer_problems(self.schema, value):
            raise ValueError(problem)
        return value

    def request(self, problem: str) -> Message:
        """Ask for the answer in its form, and say what was wrong with the last one."""
        schema = f"\nThe JSON schema: {json.dumps(self.schema, ensure_ascii=False)}" if not self.settings else ""
        text = f"Give the final answer again, as JSON in the form that is asked for, and nothing else.{schema}"
        return ChatMessageContent(role=AuthorRole.USER, content=f"{text}\nWhat was wrong: {problem}")


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def response_form(given: object) -> ResponseForm | None:
    """Read the option ``response_format``; None is no form.

    Raises:
        PlannerInvalidConfigurationError: If it is no form.
    """
    if given is None:
        return None
    if isinstance(given, type) and issubclass(given, BaseModel):
        schema = _schema_of(given)
        return ResponseForm(model=given, schema=schema, wanted=(given, _named(schema)))
    if not isinstance(given, Mapping) or not given:
        raise PlannerInvalidConfigurationError(f"{_EXPECTED}; got {shown(cast('object', given))}.")
    data = _copied(cast("Mapping[str, Any]", given))
    match data.get("type"):
        case "json_object":
            return ResponseForm(schema=_ANY_OBJECT, wanted=(data,))
        case "json_schema":
            return ResponseForm(schema=_checked(_inner(data)), wanted=(data,))
        case _:
            return ResponseForm(schema=_checked(data), wanted=(_named(data),))


def _schema_of(model: type[BaseModel]) -> dict[str, Any]:
    try:
        return model.model_json_schema()
    except PydanticUserError as error:
        raise PlannerInvalidConfigurationError(
            f"{_EXPECTED}; {model.__name__} has no JSON schema: {error.message}."
        ) from error


def _inner(data: dict[str, Any]) -> dict[str, Any]:
    """Find the schema in OpenAI's form of one."""
    named: Any = data.get("json_schema")
    named = cast("dict[str, Any]", named if isinstance(named, dict) else {})
    schema = named.get("schema")
    if not isinstance(schema, dict) or not isinstance(named.get("name"), str):
        raise PlannerInvalidConfigurationError(
            f"{_EXPECTED}; got {shown(data)}. The type json_schema needs json_schema.name and json_schema.schema."
        )
    return cast("dict[str, Any]", schema)


def _copied(given: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a form, which stays as it is whatever becomes of the caller's."""
    try:
        return json.loads(json.dumps(given, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise PlannerInvalidConfigurationError(f"{_EXPECTED}; what was given is no JSON: {error}.") from error


def _checked(schema: dict[str, Any]) -> dict[str, Any]:
    """Refuse what is no schema, and one that is not whole."""
    from planner_ext.sk.schemas import schema_problem  # noqa: PLC0415  (likewise)

    if problem := schema_problem(schema):
        raise PlannerInvalidConfigurationError(f"{_EXPECTED}; {problem}")
    return schema


def _named(schema: dict[str, Any]) -> dict[str, Any]:
    """Wrap a schema as OpenAI takes it; a name may have letters, digits, underscores and hyphens there."""
    name = re.sub(r"[^0-9A-Za-z_-]+", "_", str(schema.get("title") or "answer"))[:64]
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}


def _accepted(settings: type[PromptExecutionSettings], wanted: Any) -> dict[str, Any] | None:
    """Let a settings class take a form; what it sets beside, such as a flag, goes with it. None where it does not."""
    if "response_format" not in settings.model_fields:
        return None
    try:
        taken = settings(response_format=wanted)  # pyright: ignore[reportCallIssue]
    except (ValidationError, KernelException):
        return None
    names = {"response_format", "structured_json_response"} & settings.model_fields.keys()
    return {name: getattr(taken, name) for name in names}
