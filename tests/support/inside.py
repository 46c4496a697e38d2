"""Functions that talk to a model themselves, in every way there is, and a model that never stops calling them."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, cast

from openai import AsyncOpenAI
from semantic_kernel import Kernel
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.chat_completion_client_base import (
    ChatCompletionClientBase,
)
from semantic_kernel.connectors.ai.completion_usage import CompletionUsage
from semantic_kernel.connectors.ai.open_ai import (
    OpenAIChatCompletion,
    OpenAIChatPromptExecutionSettings,
)
from semantic_kernel.connectors.ai.prompt_execution_settings import (
    PromptExecutionSettings,
)
from semantic_kernel.connectors.ai.text_completion_client_base import (
    TextCompletionClientBase,
)
from semantic_kernel.contents import ChatHistory, StreamingTextContent, TextContent
from semantic_kernel.functions import KernelArguments, kernel_function
from semantic_kernel.functions.kernel_function_from_prompt import (
    KernelFunctionFromPrompt,
)

from planner_ext import (
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    requires_approval,
)
from planner_ext.testing import (
    ScriptedOpenAIServer,
    ScriptedReply,
    ScriptedRequest,
    call,
    calls,
    say,
)
from support.stock import stock

INNER = "INNER"
"""What the goals of requests inside a function begin with, so that the model knows them."""


Hidden = Annotated[Kernel, {"include_in_function_choices": False}]
HiddenService = Annotated[
    ChatCompletionClientBase, {"include_in_function_choices": False}
]


@dataclass
class Bank:
    """Functions that start: one at will, one with approval alone."""

    looked: int = 0
    paid: int = 0

    @kernel_function(description="Looks.")
    async def look(self) -> str:
        self.looked += 1
        return "seen"

    @requires_approval
    @kernel_function(description="Pays.")
    async def pay(self, account: int = 0) -> str:
        self.paid += 1
        return "paid"


def auto() -> PromptExecutionSettings:
    """Stock settings under which functions are called."""
    return OpenAIChatPromptExecutionSettings(function_choice_behavior=stock.Auto())


def with_auto() -> KernelArguments:
    return KernelArguments(settings=auto())


def first_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


@dataclass
class Inside:
    """A plugin each of whose functions asks a model, or calls another function, in a way of its own."""

    raised: list[BaseException] = field(default_factory=list[BaseException])
    started: int = 0
    captured: Kernel | None = None
    kept: Kernel | None = None
    released: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: list["asyncio.Task[Any]"] = field(default_factory=list["asyncio.Task[Any]"])

    async def _tried(self, work: Awaitable[Any]) -> str:
        self.started += 1
        try:
            return str(await work)
        except Exception as error:
            self.raised.append(first_cause(error))
            raise

    async def refusal(self) -> BaseException | None:
        """Let the tasks that were started run on, and give what the first of them raised."""
        self.released.set()
        (error, *_) = await asyncio.gather(*self.tasks, return_exceptions=True)
        return first_cause(error) if isinstance(error, BaseException) else None

    @kernel_function
    async def prompt_auto(self, kernel: Hidden) -> str:
        return await self._tried(kernel.invoke_prompt(INNER, arguments=with_auto()))

    @kernel_function
    async def prompt_plain(self, kernel: Hidden) -> str:
        return await self._tried(kernel.invoke_prompt(INNER))

    @kernel_function
    async def prompt_stream(self, kernel: Hidden) -> str:
        async def drain() -> str:
            return str(
                len(
                    [
                        piece
                        async for piece in kernel.invoke_prompt_stream(
                            INNER, arguments=with_auto()
                        )
                    ]
                )
            )

        return await self._tried(drain())

    @kernel_function
    async def prompt_stream_plain(self, kernel: Hidden) -> str:
        async def drain() -> str:
            return str(
                len([piece async for piece in kernel.invoke_prompt_stream(INNER)])
            )

        return await self._tried(drain())

    @kernel_function
    async def prompts_at_once(self, kernel: Hidden) -> str:
        async def all_of_them() -> str:
            asked = [
                kernel.invoke_prompt(INNER, arguments=with_auto()) for _ in range(3)
            ]
            return str(len(await asyncio.gather(*asked, return_exceptions=True)))

        return await self._tried(all_of_them())

    @kernel_function
    async def retries(self, kernel: Hidden) -> str:
        async def again_and_again() -> str:
            for _ in range(20):
                try:
                    await kernel.invoke_prompt(INNER, arguments=with_auto())
                except Exception as error:
                    self.raised.append(error)
            return "tried"

        return await self._tried(again_and_again())

    @kernel_function
    async def pays(self, kernel: Hidden) -> str:
        return await self._tried(kernel.invoke(plugin_name="bank", function_name="pay"))

    @kernel_function
    async def looks(self, kernel: Hidden) -> str:
        return await self._tried(
            kernel.invoke(plugin_name="bank", function_name="look")
        )

    @kernel_function
    async def template(self, kernel: Hidden) -> str:
        return await self._tried(
            kernel.invoke_prompt(INNER + " {{bank.pay}} {{bank.look}}")
        )

    @kernel_function
    async def template_looks(self, kernel: Hidden) -> str:
        return await self._tried(kernel.invoke_prompt(INNER + " {{bank.look}}"))

    @kernel_function
    async def agent(self, kernel: Hidden) -> str:
        agent = ChatCompletionAgent(kernel=kernel, name="inner", instructions=INNER)
        return await self._tried(agent.get_response(messages=INNER))

    @kernel_function
    async def agent_stream(self, kernel: Hidden) -> str:
        agent = ChatCompletionAgent(kernel=kernel, name="inner", instructions=INNER)

        async def drain() -> str:
            return str(
                len([piece async for piece in agent.invoke_stream(messages=INNER)])
            )

        return await self._tried(drain())

    @kernel_function
    async def service(self, service: HiddenService, kernel: Hidden) -> str:
        history = ChatHistory()
        history.add_user_message(INNER)
        return await self._tried(
            service.get_chat_message_content(history, auto(), kernel=kernel)
        )

    @kernel_function
    async def planner(self, kernel: Hidden) -> str:
        options = FunctionCallingStepwisePlannerOptions(plan=False)
        return await self._tried(
            FunctionCallingStepwisePlanner(options=options).invoke(kernel, INNER)
        )

    @kernel_function
    def thread(self, kernel: Hidden) -> str:
        self.started += 1
        return asyncio.run(self._in_a_loop_of_its_own(kernel))

    async def _in_a_loop_of_its_own(self, kernel: Kernel) -> str:
        url = str(cast("Any", kernel.get_service("chat")).service_url())
        async with AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
            service = OpenAIChatCompletion(
                "scripted", service_id="mine", async_client=client
            )
            kernel.add_service(service)
            arguments = KernelArguments(
                settings=auto().model_copy(update={"service_id": "mine"})
            )
            return str(await kernel.invoke_prompt(INNER, arguments=arguments))

    @kernel_function
    async def holds(self) -> str:
        assert self.captured is not None
        return await self._tried(
            self.captured.invoke_prompt(INNER, arguments=with_auto())
        )

    @kernel_function
    async def leaves(self, kernel: Hidden) -> str:
        """Start a task that outlives the call."""

        async def later() -> str:
            await self.released.wait()
            return str(await kernel.invoke_prompt(INNER, arguments=with_auto()))

        self.kept = kernel
        self.tasks.append(asyncio.get_running_loop().create_task(later()))
        self.started += 1
        return "started"


MODES = {
    "auto": stock.Auto(),
    "none": stock.NoneInvoke(),
    "required": stock.Required(maximum_auto_invoke_attempts=4),
}


def prompt_function(mode: str) -> KernelFunctionFromPrompt:
    """Make a function that is a prompt, with the function choice behaviour in its own settings."""
    settings = OpenAIChatPromptExecutionSettings(function_choice_behavior=MODES[mode])
    return KernelFunctionFromPrompt(
        function_name=mode,
        plugin_name="ask",
        prompt=INNER,
        prompt_execution_settings=settings,
    )


def greedy(way: str, times: int) -> Callable[[ScriptedRequest], ScriptedReply]:
    """Play a model that calls what it can: the way, so often at once; inside, the bank and the way again."""

    def reply(request: ScriptedRequest) -> ScriptedReply:
        if not request.tools:
            return say("Enough.")
        inner = any(
            INNER in str(message.get("content")) for message in request.messages
        )
        return (
            calls(call("bank-pay"), call("bank-look"), call(way))
            if inner
            else calls(*[call(way)] * times)
        )

    return reply


@dataclass
class World:
    """A kernel with the real OpenAI connector, what its functions did, and the server that counts."""

    kernel: Hidden
    server: ScriptedOpenAIServer
    bank: Bank
    inside: Inside
    connector: OpenAIChatCompletion

    @property
    def functions(self) -> int:
        """Count the functions that started, except prompts, which are not counted here."""
        return self.bank.looked + self.bank.paid + self.inside.started


@asynccontextmanager
async def world(script: Any, way: str | None = None) -> AsyncGenerator[World]:
    """Make the kernel and the server.

    Args:
        script: What the model says.
        way: The one way to a model that the kernel has, as a model calls it; None for
            all of ``Inside`` and of ``MODES``, which take 0.1 seconds to describe.
    """
    with ScriptedOpenAIServer(script) as server:
        async with AsyncOpenAI(
            base_url=server.url, api_key="any", max_retries=0
        ) as client:
            connector = OpenAIChatCompletion(
                "scripted", service_id="chat", async_client=client
            )
            kernel, bank, inside = Kernel(services=connector), Bank(), Inside()
            kernel.add_plugin(bank, "bank")
            match way.split("-") if way else ():
                case ["inside", name]:
                    kernel.add_function("inside", getattr(inside, name))
                case ["ask", mode]:
                    kernel.add_function("ask", prompt_function(mode))
                case [_, _]:
                    pass  # the test adds it
                case _:
                    kernel.add_plugin(inside, "inside")
                    kernel.add_functions("ask", [*map(prompt_function, MODES)])
            yield World(kernel, server, bank, inside, connector)


class ScriptedText(TextCompletionClientBase):
    """A text completion service that counts its requests."""

    asked: list[str] = []  # noqa: RUF012  (a pydantic field: copied for each instance)

    async def get_text_contents(
        self, prompt: str, settings: PromptExecutionSettings
    ) -> list[TextContent]:
        self.asked.append(prompt)
        usage = CompletionUsage(prompt_tokens=3, completion_tokens=2)
        return [
            TextContent(
                ai_model_id=self.ai_model_id, text="text", metadata={"usage": usage}
            )
        ]

    async def get_streaming_text_contents(
        self, prompt: str, settings: PromptExecutionSettings
    ) -> AsyncGenerator[list[StreamingTextContent], Any]:
        for content in await self.get_text_contents(prompt, settings):
            yield [
                StreamingTextContent(
                    choice_index=0, text=content.text, metadata=content.metadata
                )
            ]
