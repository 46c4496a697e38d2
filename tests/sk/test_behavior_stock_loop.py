"""What Semantic Kernel's own loop makes of the bounded behaviour."""

import pytest
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_choice_type import FunctionChoiceType
from semantic_kernel.contents import (
    AuthorRole,
    ChatHistory,
)

from planner_ext.sk.run.behavior import BoundedFunctionChoiceBehavior
from support.behavior import Calculator, Gate, Make, model, results_in, settings_with


@pytest.fixture
def kernel() -> Kernel:
    kernel = Kernel()
    kernel.add_plugin(Calculator(), "math")
    return kernel


class TestStockLoop:
    """What Semantic Kernel's own loop makes of it, without any of ours."""

    @pytest.mark.parametrize("attempts", [1, 2, 3, 7])
    @pytest.mark.parametrize(
        ("make", "choice"),
        [
            (BoundedFunctionChoiceBehavior.Auto, FunctionChoiceType.AUTO),
            (BoundedFunctionChoiceBehavior.Required, FunctionChoiceType.REQUIRED),
        ],
    )
    async def test_plain(
        self, kernel: Kernel, make: Make, choice: FunctionChoiceType, attempts: int
    ) -> None:
        """With k attempts: k tool rounds, k + 1 requests; the last has no functions and gives the answer."""
        service, history = model(), ChatHistory()
        settings = settings_with(
            make(maximum_use_attempts=attempts, pre_invoke_callback=Gate().allow)
        )
        [answer] = await service.get_chat_message_contents(
            history, settings, kernel=kernel
        )
        assert service.choices == [choice] * attempts + [None]
        assert results_in(history) == attempts
        assert answer.content == "done"

    @pytest.mark.parametrize("attempts", [1, 3])
    async def test_streamed(self, kernel: Kernel, attempts: int) -> None:
        """With k attempts: k tool rounds and k requests, and then the stock stream ends with no answer."""
        service, history = model(), ChatHistory()
        settings = settings_with(
            BoundedFunctionChoiceBehavior.Auto(maximum_use_attempts=attempts)
        )
        stream = service.get_streaming_chat_message_contents(
            history, settings, kernel=kernel
        )
        texts = [
            chunk.content
            async for chunks in stream
            for chunk in chunks
            if chunk.role is AuthorRole.ASSISTANT
        ]
        assert service.choices == [FunctionChoiceType.AUTO] * attempts
        assert results_in(history) == attempts
        assert not any(texts)

    async def test_unlimited(self, kernel: Kernel) -> None:
        """With None as its bound the stock loop continues as long as the model calls, past Semantic Kernel's 5."""
        service, history = model(calls=20), ChatHistory()
        settings = settings_with(
            BoundedFunctionChoiceBehavior.Auto(maximum_use_attempts=None)
        )
        [answer] = await service.get_chat_message_contents(
            history, settings, kernel=kernel
        )
        assert results_in(history) == 20
        assert answer.content == "done"

    @pytest.mark.parametrize(
        ("behavior", "choice"),
        [
            (
                BoundedFunctionChoiceBehavior.Auto(auto_invoke=False),
                FunctionChoiceType.AUTO,
            ),
            (BoundedFunctionChoiceBehavior.NoneInvoke(), FunctionChoiceType.NONE),
        ],
    )
    async def test_manual(
        self,
        kernel: Kernel,
        behavior: BoundedFunctionChoiceBehavior,
        choice: FunctionChoiceType,
    ) -> None:
        """A manual behaviour offers the functions in one request, and nothing is run."""
        service, history = model(), ChatHistory()
        await service.get_chat_message_contents(
            history, settings_with(behavior), kernel=kernel
        )
        assert service.choices == [choice]
        assert results_in(history) == 0

    async def test_filters_reduce_what_is_offered(self, kernel: Kernel) -> None:
        """Functions that the filters leave out are not offered."""
        service, history = model(), ChatHistory()
        behavior = BoundedFunctionChoiceBehavior.Auto(
            filters={"excluded_plugins": ["math"]}
        )
        await service.get_chat_message_contents(
            history, settings_with(behavior), kernel=kernel
        )
        assert service.choices == [None]

    async def test_callers_behaviour_is_left_alone(self, kernel: Kernel) -> None:
        """A request does not use up the caller's behaviour: the next one has all attempts again."""
        behavior = BoundedFunctionChoiceBehavior.Auto(maximum_use_attempts=2)
        for _ in range(2):
            service, history = model(), ChatHistory()
            await service.get_chat_message_contents(
                history, settings_with(behavior), kernel=kernel
            )
            assert results_in(history) == 2
        assert behavior == BoundedFunctionChoiceBehavior.Auto(maximum_use_attempts=2)
