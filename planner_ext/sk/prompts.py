"""The planner's messages to the model: the plan request, the opening, the next step, and the call for an answer."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import yaml
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_calling_utils import kernel_function_metadata_to_function_call_format
from semantic_kernel.contents import AuthorRole, ChatHistory, ChatMessageContent, TextContent
from semantic_kernel.exceptions import KernelException
from semantic_kernel.functions import KernelArguments, KernelFunctionMetadata
from semantic_kernel.prompt_template import KernelPromptTemplate, PromptTemplateConfig

from planner_ext.core.errors import shown
from planner_ext.core.values import Message
from planner_ext.sk.errors import PlannerException, PlannerInvalidConfigurationError

__all__ = [
    "NoPrompts",
    "PlannerPrompts",
    "default_plan_prompt",
    "default_step_prompt",
    "plan_template",
    "step_template",
]

default_plan_prompt = """\
name: WritePlan
description: Write a short plan for a goal that an assistant with functions is to reach.
template_format: semantic-kernel
template: |
    <message role="system">You write plans for an assistant that works by calling functions.
    Write the fewest numbered steps that reach the user's goal. A step calls one or more of the functions below, or
    uses what earlier steps brought. Use no other function. What you know yourself needs no step.
    The last step {{$last_step}}.
    Write the plan only; call nothing yet.

    Functions, as JSON schema:
    {{$available_functions}}</message>
    <message role="user">{{$goal}}</message>
input_variables:
    - name: goal
      description: What is to be reached
    - name: available_functions
      description: The functions that may be called, as JSON text
    - name: name_delimiter
      description: What stands between a plugin's name and a function's
    - name: last_step
      description: What the last step does with the answer
"""
"""The plan request. Replace it with ``get_initial_plan``: YAML of a prompt template with the same variables."""

default_step_prompt = """\
<message role="system">Work towards the user's goal with the functions that you are given.
A plan was made for it. Follow it as far as it helps, and leave it where the results of your calls say otherwise:

{{$initial_plan}}

When the goal is reached, {{$last_step}}.</message>
<message role="user">{{$goal}}</message>
"""
"""The opening of the steps. Replace it with ``get_step_prompt``: a template with the same variables."""

_HAND_OVER = "UserInteraction-SendFinalAnswer"

_SAY = {
    "step": "Carry out what comes next towards the goal. If nothing is left to do, write the final answer.",
    "hand over": "Carry out what comes next towards the goal. If nothing is left to do, hand over the final answer "
    "with UserInteraction-SendFinalAnswer.",
    "insist": "That was no final answer. Go on with the functions, or, if the goal is reached, hand the answer over "
    "with UserInteraction-SendFinalAnswer.",
}


class NoPrompts:
    """The prompts of a service, which adds no messages. Implements `planner_ext.engine.ports.Prompts`."""

    async def plan_request(self) -> tuple[Message, ...]:
        """Return no messages: a service makes no plan."""
        return ()

    async def opening(self, plan: str) -> tuple[Message, ...]:  # noqa: ARG002  (the port's signature)
        """Return no messages: a service makes no plan."""
        return ()

    def message(self, purpose: str) -> Message:
        """Return the planner's message."""
        return ChatMessageContent(role=AuthorRole.USER, content=_SAY[purpose])


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerPrompts:
    """The planner's prompts for one goal. Implements `planner_ext.engine.ports.Prompts`.

    Attributes:
        plan_template: Read by `plan_template`.
        step_template: Read by `step_template`.
        functions: Lists the functions that the plan may use.
        hands_over: Whether the final-answer function is offered.
    """

    kernel: Kernel
    arguments: KernelArguments
    goal: str
    plan_template: KernelPromptTemplate
    step_template: KernelPromptTemplate
    functions: Callable[[], Sequence[KernelFunctionMetadata]]
    hands_over: bool

    async def plan_request(self) -> tuple[Message, ...]:
        """Render the plan prompt."""
        schemas = [kernel_function_metadata_to_function_call_format(function) for function in self.functions()]
        variables = {
            "goal": self.goal,
            "available_functions": json.dumps(schemas, ensure_ascii=False, default=str),
            "name_delimiter": "-",
            "last_step": "hands over the answer with " + _HAND_OVER if self.hands_over else "writes the answer",
        }
        return await self._render("get_initial_plan", self.plan_template, variables)

    async def opening(self, plan: str) -> tuple[Message, ...]:
        """Render the step prompt with the plan in it."""
        last_step = "hand over the answer with " + _HAND_OVER if self.hands_over else "write the answer"
        variables = {"goal": self.goal, "initial_plan": plan, "last_step": last_step}
        messages = await self._render("get_step_prompt", self.step_template, variables)
        if any(message.role == AuthorRole.USER for message in messages):
            return messages
        return (*messages, ChatMessageContent(role=AuthorRole.USER, content=self.goal))

    def message(self, purpose: str) -> Message:
        """Ask for the next step, or for the final answer."""
        return ChatMessageContent(
            role=AuthorRole.USER, content=_SAY["hand over" if purpose == "step" and self.hands_over else purpose]
        )

    async def _render(
        self, option: str, template: KernelPromptTemplate, variables: dict[str, str]
    ) -> tuple[ChatMessageContent, ...]:
        """Render a template with the application's arguments and the planner's own; the latter win.

        No goal or plan can open a message of its own, and each arrives word for word.

        Raises:
            PlannerException: If it cannot be rendered, naming the option that it is of.
        """
        given = cast("dict[str, object]", self.arguments)
        arguments = KernelArguments()
        for name, value in {**given, **{name: _covered(text) for name, text in variables.items()}}.items():
            if isinstance(value, str | int | float | bool):  # templates take text only; the rest is for the functions
                arguments[name] = value
        try:
            rendered = await template.render(self.kernel, arguments)
        except KernelException as error:
            raise PlannerException(
                f"The template of {option} could not be rendered: {error}. Mend it, or what it calls, and resume."
            ) from error
        messages = ChatHistory.from_rendered_prompt(rendered).messages
        for item in (item for message in messages for item in message.items if isinstance(item, TextContent)):
            item.text = _uncovered(item.text)
        return tuple(messages)


_MARKUP = re.compile("[&<>\"'\x00-\x08\x0b-\x1f\ud800-\udfff\ue000\ufffe\uffff]")
_COVERED = re.compile("\ue000([0-9a-f]+);")


def _covered(text: str) -> str:
    """Write what XML cannot hold, or reads as markup, as a number behind a character of private use.

    Semantic Kernel escapes a variable once and unescapes it twice, and does not parse a prompt with a control character
    at all: then the text of every message, the system's included, becomes the user's.
    """
    return _MARKUP.sub(lambda found: f"\ue000{ord(found[0]):x};", text)


def _uncovered(text: str) -> str:
    return _COVERED.sub(lambda found: chr(int(found[1], 16)), text)


def plan_template(text: str) -> tuple[KernelPromptTemplate, dict[str, Any]]:
    """Read the YAML of a plan prompt: its template, and the settings that it asks for.

    Raises:
        PlannerInvalidConfigurationError: If it is not a valid prompt template.
    """
    template = _template(text, _plan_config, "get_initial_plan must return the YAML of a prompt template")
    settings: dict[str, Any] = {}
    for asked in template.prompt_template_config.execution_settings.values():
        settings |= {key: value for key, value in asked.extension_data.items() if value is not None}
    return template, settings


def step_template(text: str) -> KernelPromptTemplate:
    """Read the template that opens the steps.

    Raises:
        PlannerInvalidConfigurationError: If it is not a valid prompt template.
    """
    return _template(text, _step_config, "get_step_prompt must return the text of a prompt template")


def _plan_config(text: str) -> PromptTemplateConfig:
    config = PromptTemplateConfig(**yaml.safe_load(text))
    if not config.template:
        raise ValueError("it has no template")
    return config


def _step_config(text: str) -> PromptTemplateConfig:
    return PromptTemplateConfig(template=text)


def _template(text: object, read: Callable[[str], PromptTemplateConfig], expected: str) -> KernelPromptTemplate:
    try:
        if not isinstance(text, str):
            raise TypeError(f"got {shown(text)}")
        return KernelPromptTemplate(prompt_template_config=read(text))
    except (yaml.YAMLError, TypeError, ValueError, KernelException) as error:
        raise PlannerInvalidConfigurationError(f"{expected}; it cannot be read as one: {error}") from error
