"""A connector around another one, whose subclasses answer its requests."""

from collections.abc import Callable
from typing import ClassVar

from semantic_kernel.connectors.ai import PromptExecutionSettings
from semantic_kernel.connectors.ai.chat_completion_client_base import (
    ChatCompletionClientBase,
)
from semantic_kernel.connectors.ai.function_call_choice_configuration import (
    FunctionCallChoiceConfiguration,
)
from semantic_kernel.connectors.ai.function_calling_utils import (
    update_settings_from_function_call_configuration,
)
from semantic_kernel.connectors.ai.function_choice_type import FunctionChoiceType
from semantic_kernel.connectors.ai.open_ai import OpenAIChatPromptExecutionSettings


class OuterConnector(ChatCompletionClientBase):
    """Delegates to a connector what it does before and after a request.

    A subclass overrides the one request at the bottom of Semantic Kernel's loop.
    Without an ``inner`` connector it behaves as OpenAI's.
    """

    SUPPORTS_FUNCTION_CALLING: ClassVar[bool] = True

    inner: ChatCompletionClientBase | None

    @property
    def connector(self) -> ChatCompletionClientBase:
        """The connector, where a request needs it."""
        assert self.inner is not None, "a request is made by a connector"
        return self.inner

    def get_prompt_execution_settings_class(self) -> type[PromptExecutionSettings]:
        """Return the connector's settings class."""
        inner = self.inner
        return (
            OpenAIChatPromptExecutionSettings
            if inner is None
            else inner.get_prompt_execution_settings_class()
        )

    def service_url(self) -> str | None:
        """Return the connector's URL."""
        if self.inner is None:
            return None
        return self.inner.service_url()

    def _verify_function_choice_settings(
        self, settings: PromptExecutionSettings
    ) -> None:
        if self.inner is not None:
            self.inner._verify_function_choice_settings(settings)

    def _update_function_choice_settings_callback(
        self,
    ) -> Callable[
        [FunctionCallChoiceConfiguration, PromptExecutionSettings, FunctionChoiceType],
        None,
    ]:
        if self.inner is None:
            return update_settings_from_function_call_configuration
        return self.inner._update_function_choice_settings_callback()

    def _reset_function_choice_settings(
        self, settings: PromptExecutionSettings
    ) -> None:
        if self.inner is not None:
            self.inner._reset_function_choice_settings(settings)
        elif isinstance(settings, OpenAIChatPromptExecutionSettings):
            settings.tools = settings.tool_choice = None
