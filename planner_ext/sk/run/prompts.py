"""What a planner writes to the model: the plan request, the opening, the next step, and the form of the final answer.

The form is checked before the first request; `planner_ext.core.machine` decides when it
is asked for.
"""

import json
import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import yaml
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_calling_utils import (
    kernel_function_metadata_to_function_call_format,
)
from semantic_kernel.contents import (
    AuthorRole,
    ChatHistory,
    ChatMessageContent,
    TextContent,
)
from semantic_kernel.exceptions import KernelException
from semantic_kernel.functions import KernelArguments
from semantic_kernel.prompt_template import KernelPromptTemplate, PromptTemplateConfig

from planner_ext.core.errors import shown
from planner_ext.core.facts import Purpose
from planner_ext.core.values import Message, frozen
from planner_ext.sk.errors import InvalidOptionError, PlannerException
from planner_ext.sk.functions.toolset import ToolSet

if TYPE_CHECKING:
    from planner_ext.sk.run.form import ResponseForm

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

_STEP_MESSAGES = {
    "step": "Carry out what comes next towards the goal. If nothing is left to do, write the final answer.",
    "hand over": "Carry out what comes next towards the goal. If nothing is left to do, hand over the final answer "
    "with UserInteraction-SendFinalAnswer.",
    "revise": "The answer was not accepted. Correct what is wrong, with the functions if they help, and give the whole "
    "final answer again.",
    "insist": "That was no final answer. Go on with the functions, or, if the goal is reached, hand the answer over "
    "with UserInteraction-SendFinalAnswer.",
}


def message_of(
    purpose: Purpose,
    problem: str,
    *,
    form: "ResponseForm | None" = None,
    hands_over: bool = False,
) -> Message:
    """Write the message of a purpose; the ``problem`` is that of a refused answer, or what a person said."""
    if purpose == "said":
        return ChatMessageContent(role=AuthorRole.USER, content=problem)
    if purpose == "structure" and form is not None:
        text = form.request
    else:
        handed = purpose == "step" and hands_over
        text = _STEP_MESSAGES["hand over" if handed else purpose]
    if problem:
        text += f"\nWhat was wrong: {problem}"
    return ChatMessageContent(role=AuthorRole.USER, content=text)


@dataclass(frozen=True, slots=True)
class Templates:
    """A planner's prompts, as given and parsed; make one with `read`."""

    plan_yaml: str
    step_prompt: str
    plan: KernelPromptTemplate
    plan_settings: dict[str, Any]
    step: KernelPromptTemplate

    @classmethod
    @lru_cache(maxsize=16)
    def read(cls, plan_yaml: str, step_prompt: str) -> "Templates":
        """Read the YAML of a plan prompt, and the template of the steps: once, for all planners with the same."""
        with _template_errors(
            "get_initial_plan must return the YAML of a prompt template", plan_yaml
        ):
            config = PromptTemplateConfig(**yaml.safe_load(plan_yaml))
            if not config.template:
                raise ValueError("it has no template")
            plan = KernelPromptTemplate(prompt_template_config=config)
        with _template_errors(
            "get_step_prompt must return the text of a prompt template", step_prompt
        ):
            step = KernelPromptTemplate(
                prompt_template_config=PromptTemplateConfig(template=step_prompt)
            )
        asked = [
            settings.extension_data for settings in config.execution_settings.values()
        ]
        settings = {
            key: value
            for each in asked
            for key, value in each.items()
            if value is not None
        }
        return cls(plan_yaml, step_prompt, plan, settings, step)


@frozen
class PlannerPrompts:
    """The planner's prompts for one goal. Implements `planner_ext.engine.ports.Prompts`."""

    kernel: Kernel
    arguments: KernelArguments
    goal: str
    templates: Templates
    tools: ToolSet
    hands_over: bool

    async def plan_request(self) -> tuple[Message, ...]:
        """Render the plan prompt."""
        schemas = [
            kernel_function_metadata_to_function_call_format(function)
            for function in self.tools.metadata
        ]
        variables = {
            "goal": self.goal,
            "available_functions": json.dumps(schemas, ensure_ascii=False, default=str),
            "name_delimiter": "-",
            "last_step": "hands over the answer with " + _HAND_OVER
            if self.hands_over
            else "writes the answer",
        }
        return await self._render("get_initial_plan", self.templates.plan, variables)

    async def opening(self, plan: str) -> tuple[Message, ...]:
        """Render the step prompt with the plan in it."""
        last_step = (
            "hand over the answer with " + _HAND_OVER
            if self.hands_over
            else "write the answer"
        )
        variables = {"goal": self.goal, "initial_plan": plan, "last_step": last_step}
        messages = await self._render("get_step_prompt", self.templates.step, variables)
        if any(message.role == AuthorRole.USER for message in messages):
            return messages
        return (*messages, ChatMessageContent(role=AuthorRole.USER, content=self.goal))

    async def _render(
        self, option: str, template: KernelPromptTemplate, variables: dict[str, str]
    ) -> tuple[ChatMessageContent, ...]:
        """Render a template with the application's arguments and the planner's own; the latter win.

        A goal or plan arrives word for word and cannot open a further message.
        """
        given = cast("dict[str, object]", self.arguments)
        arguments = KernelArguments()
        for name, value in {
            **given,
            **{name: _escaped(text) for name, text in variables.items()},
        }.items():
            # Templates take text only; the rest is for the functions.
            if isinstance(value, str | int | float | bool):
                arguments[name] = value
        try:
            rendered = await template.render(self.kernel, arguments)
        except KernelException as error:
            raise PlannerException(
                f"The template of {option} could not be rendered: {error}. Correct it, or what it calls, and resume."
            ) from error
        messages = ChatHistory.from_rendered_prompt(rendered).messages
        for item in (
            item
            for message in messages
            for item in message.items
            if isinstance(item, TextContent)
        ):
            item.text = _unescaped(item.text)
        return tuple(messages)


_MARKUP = re.compile("[&<>\"'\x00-\x08\x0b-\x1f\ud800-\udfff\ue000\ufffe\uffff]")
_ESCAPED = re.compile("\ue000([0-9a-f]+);")


def _escaped(text: str) -> str:
    """Replace what XML cannot hold or reads as markup by a private-use character and the code point.

    Semantic Kernel escapes a variable once and unescapes it twice, and parses no prompt
    with a control character.
    """
    return _MARKUP.sub(lambda found: f"\ue000{ord(found[0]):x};", text)


def _unescaped(text: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(found[1], 16)), text)


@contextmanager
def _template_errors(expected: str, text: object) -> Generator[None]:
    try:
        if not isinstance(text, str):
            raise TypeError(f"got {shown(text)}")
        yield
    except (yaml.YAMLError, TypeError, ValueError, KernelException) as error:
        raise InvalidOptionError(
            f"{expected}; it cannot be read as one: {error}"
        ) from error
