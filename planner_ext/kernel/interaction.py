"""The functions that the package itself offers a model beside the kernel's: hand over the answer, ask the user."""

from typing import Annotated, Final

from semantic_kernel.functions import KernelFunction, KernelPlugin, kernel_function

__all__ = ["OWN_FUNCTIONS", "OWN_PLUGIN", "UserInteraction", "own_function"]

OWN_PLUGIN: Final = "UserInteraction"
OWN_FUNCTIONS: Final = ("SendFinalAnswer", "AskUser")


class UserInteraction:
    """The planner's own functions, as the model sees them."""

    @kernel_function(name="SendFinalAnswer", description="Hand the final answer over to the user; this ends the work.")
    def send_final_answer(self, answer: Annotated[str, "The whole answer, as the user shall read it"]) -> str:  # noqa: ARG002  (what the model is told of it)
        """Take the final answer; returns what the removed planner's function did."""
        return "Thanks"

    @kernel_function(
        name="AskUser",
        description="Ask the user one question, where something that is needed is missing or ambiguous and no other "
        "function tells it. The result is the user's answer.",
    )
    def ask_user(self, question: Annotated[str, "The question, as the user shall read it"]) -> str:
        """Take a question."""
        return question


def own_function(name: str) -> KernelFunction:
    """Make one of the functions of `UserInteraction`, by its own name."""
    return KernelPlugin.from_object(OWN_PLUGIN, UserInteraction()).functions[name]
