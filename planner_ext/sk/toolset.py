"""Which functions a request offers, and that no other can be called: computed afresh from the kernel each time."""

from collections.abc import Callable, Mapping, Sequence
from operator import is_not
from typing import Any, Literal, Self

from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_call_choice_configuration import FunctionCallChoiceConfiguration
from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.function_choice_type import FunctionChoiceType
from semantic_kernel.connectors.ai.prompt_execution_settings import PromptExecutionSettings
from semantic_kernel.functions import KernelFunction, KernelFunctionMetadata

from planner_ext.approval.decisions import Defer, approval_required
from planner_ext.sk.arguments import hidden_parameters
from planner_ext.sk.errors import InvalidOptionError

__all__ = ["RequestBehavior", "ToolSet", "mark_of"]

_TYPES = {"auto": FunctionChoiceType.AUTO, "required": FunctionChoiceType.REQUIRED, "none": FunctionChoiceType.NONE}


class RequestBehavior(FunctionChoiceBehavior):
    """Tells a connector exactly which functions one request offers; the connector never invokes them itself."""

    offered: list[KernelFunctionMetadata] = []  # noqa: RUF012  (a pydantic field: copied for each instance)
    schemas: list[Any] = []  # noqa: RUF012  (likewise)

    @classmethod
    def of(
        cls,
        offered: list[KernelFunctionMetadata],
        choice: Literal["auto", "required", "none"],
        *,
        schemas: Sequence[Any] = (),
    ) -> Self:
        """Offer these functions, and those that the caller knows the schemas of, under this tool choice."""
        return cls.model_construct(
            type_=_TYPES[choice],
            offered=offered,
            schemas=list(schemas),
            filters=None,
            enable_kernel_functions=True,
            maximum_auto_invoke_attempts=0,
        )

    def configure(
        self, kernel: Kernel, update_settings_callback: Callable[..., None], settings: PromptExecutionSettings
    ) -> None:
        """Let the connector write the functions into its settings, then add the caller's own schemas to them."""
        super().configure(kernel, update_settings_callback, settings)
        if self.schemas:
            written: Any = settings
            written.tools = [*(written.tools or ()), *self.schemas]

    def get_config(self, kernel: Kernel) -> FunctionCallChoiceConfiguration:  # noqa: ARG002  (the signature of the base class)
        """Answer the connector's question which functions there are."""
        return FunctionCallChoiceConfiguration(available_functions=self.offered)

    def __deepcopy__(self, memo: Any = None) -> Self:
        """Share: settings are deep-copied on each request, and nothing here changes."""
        return self


class ToolSet:
    """The functions of one run, as the kernel has them now.

    Attributes:
        functions: By fully qualified name, those that the last request offered or the next one will.
        metadata: What is offered, for a request: one and the same tuple for as long as the functions are the same.
            Without the parameters that Semantic Kernel or `planner_ext.durable.effect` fills in.
        schema_only: Names in the settings' own tool schemas for which the kernel has no function.
        schemas: Those schemas.
        available: Whether there is anything to call.
    """

    def __init__(
        self,
        kernel: Kernel,
        behavior: FunctionChoiceBehavior | None,
        settings: PromptExecutionSettings,
        *,
        own: Sequence[KernelFunction] = (),
        select: Callable[[Sequence[KernelFunctionMetadata]], Sequence[KernelFunctionMetadata]] | None = None,
    ) -> None:
        """Bind the offer to a kernel.

        Args:
            kernel: Where the functions are; read again at each `refresh`.
            behavior: What narrows them; None offers only ``own``.
            settings: Whose tool schemas name functions that the caller runs itself.
            own: The planner's own functions, offered beside the kernel's.
            select: Narrows the kernel's functions further.
        """
        self._kernel = kernel
        self._behavior = behavior
        self._own = tuple(own)
        self._select = select
        self._schemas: dict[str, Any] = {}  # the caller's own, by the names of their functions
        tools: Any = getattr(settings, "tools", None) or ()
        for tool in tools:
            function: Any = tool.get("function") if isinstance(tool, Mapping) else None  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
            if isinstance(function, Mapping) and isinstance(name := function.get("name"), str):  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
                self._schemas[name] = tool
        self._offered: tuple[KernelFunctionMetadata, ...] = ()
        self.metadata: tuple[KernelFunctionMetadata, ...] = ()
        self.refresh()

    def refresh(self) -> None:
        """Read the kernel's functions again."""
        functions = {function.fully_qualified_name: function for function in self._own}
        for metadata in self._kernel_functions():
            name = metadata.fully_qualified_name
            if name in functions:
                raise InvalidOptionError(
                    f"The kernel has a function {name!r}, which is the name of one that the planner offers itself. "
                    "Rename the plugin or the function, or exclude it."
                )
            functions[name] = self._kernel.get_function(metadata.plugin_name, metadata.name)
        self.functions: Mapping[str, KernelFunction] = functions
        offered = tuple(function.metadata for function in functions.values())
        if len(offered) != len(self._offered) or any(map(is_not, offered, self._offered)):
            self._offered, self.metadata = offered, tuple(map(_without_injected, functions.values()))
        self.schema_only = frozenset(self._schemas.keys() - functions.keys())
        self.schemas = tuple(schema for name, schema in self._schemas.items() if name in self.schema_only)
        self.available = bool(functions or self.schema_only)

    def _kernel_functions(self) -> Sequence[KernelFunctionMetadata]:
        behavior = self._behavior
        if behavior is None or not behavior.enable_kernel_functions:
            return ()
        filters = behavior.filters or {}
        if [] in (filters.get("included_functions"), filters.get("included_plugins")):
            return ()  # Semantic Kernel takes an empty list for "all".
        try:
            config = behavior.get_config(self._kernel)
        except ValueError as error:
            raise InvalidOptionError(f"The behaviour's filters cannot be used: {error}") from error
        offered = config.available_functions or []
        return offered if self._select is None else self._select(offered)


def mark_of(function: KernelFunction | None) -> Defer | None:
    """Read ``@requires_approval`` off a function of the kernel; None if it has no such mark."""
    return approval_required(getattr(function, "method", None))


def _without_injected(function: KernelFunction) -> KernelFunctionMetadata:
    """Leave out the parameters that the model does not fill, such as ``kernel: Kernel``, whose schema is not JSON."""
    metadata, hidden = function.metadata, hidden_parameters(function)
    shown = [parameter for parameter in metadata.parameters if parameter.name not in hidden]
    return metadata if len(shown) == len(metadata.parameters) else metadata.model_copy(update={"parameters": shown})
