"""Which chat completion service a run uses, and with which settings."""

from copy import copy

from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.chat_completion_client_base import ChatCompletionClientBase
from semantic_kernel.connectors.ai.prompt_execution_settings import PromptExecutionSettings
from semantic_kernel.const import DEFAULT_SERVICE_NAME
from semantic_kernel.exceptions import KernelServiceNotFoundError
from semantic_kernel.functions import KernelArguments

from planner_ext.kernel.errors import PlannerInvalidConfigurationError
from planner_ext.kernel.options import instance_of

__all__ = ["select_service"]


def select_service(
    kernel: Kernel,
    service_id: str | None,
    arguments: KernelArguments,
    settings: PromptExecutionSettings | None = None,
) -> tuple[ChatCompletionClientBase, PromptExecutionSettings]:
    """Select the service and the settings as the kernel does, with ``select_ai_service``.

    Args:
        kernel: Where the services are.
        service_id: The one to use; None leaves it to the kernel's selector and the arguments' execution settings.
        arguments: The application's; not changed, although Semantic Kernel's conversion would.
        settings: Used in place of the arguments' execution settings.

    Raises:
        PlannerInvalidConfigurationError: If there is no such service, or it is no chat completion service; if kernel or
            arguments are none.
    """
    instance_of("kernel", kernel, Kernel)
    asked = copy(instance_of("arguments", arguments, KernelArguments))
    if service_id is not None and (not isinstance(service_id, str) or not service_id):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PlannerInvalidConfigurationError(_not_found(kernel, service_id))
    asked.execution_settings = _settings_to_ask_with(service_id, arguments, settings)
    try:
        service, selected = kernel.select_ai_service(arguments=asked, type=ChatCompletionClientBase)
    except KernelServiceNotFoundError as error:
        raise PlannerInvalidConfigurationError(_not_found(kernel, service_id)) from error
    if not isinstance(service, ChatCompletionClientBase):
        raise PlannerInvalidConfigurationError(_not_found(kernel, service_id))
    return service, selected


def _settings_to_ask_with(
    service_id: str | None, arguments: KernelArguments, settings: PromptExecutionSettings | None
) -> dict[str, PromptExecutionSettings] | None:
    given = {key: value.model_copy(deep=True) for key, value in (arguments.execution_settings or {}).items()}
    if settings is not None:
        return {service_id or settings.service_id or DEFAULT_SERVICE_NAME: settings.model_copy(deep=True)}
    if service_id is None:
        return given or None
    for_it = given.get(service_id) or given.get(DEFAULT_SERVICE_NAME) or PromptExecutionSettings(service_id=service_id)
    return {service_id: for_it}


def _not_found(kernel: Kernel, service_id: str | None) -> str:
    wanted = "a chat completion service" if service_id is None else f"a chat completion service {service_id!r}"
    there = ", ".join(f"{key!r} ({type(service).__name__})" for key, service in kernel.services.items())
    return f"This run needs {wanted}; the kernel has {there or 'no service'}. Add one with kernel.add_service(...)."
