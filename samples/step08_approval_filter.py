"""Step 8: a policy and a person on a stock kernel.

This step uses Semantic Kernel's own loop, with ``ApprovalFilter`` as one of its filters, and neither planner nor
wrapper. A call that needs a person ends the loop. The program reads the pending call from the history, records the
decision, and sends the history again.

Run it:

    python samples/step08_approval_filter.py

Output:

    waits: mail-send {"to": "tom@example.com", "text": "We meet at eleven."}
    outbox: []
    outbox: ['tom@example.com: We meet at eleven.']
    Done: sent to tom@example.com.
"""

import asyncio
import json

from model import chat_service, results
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.prompt_execution_settings import PromptExecutionSettings
from semantic_kernel.contents import ChatHistory
from semantic_kernel.filters import FilterTypes
from semantic_kernel.functions import kernel_function

from planner_ext import ApprovalFilter, ApprovalPolicy, Approve, BoundedFunctionChoiceBehavior
from planner_ext.testing import ScriptedReply, ScriptedRequest, call, say


class Mail:
    """An address book and an outbox."""

    def __init__(self) -> None:
        self.addresses = {"Tom": "tom@example.com", "Ann": "ann@example.com"}
        self.sent: list[str] = []

    @kernel_function(description="Somebody's mail address.")
    def address(self, name: str) -> str:
        """Look it up; a stranger is an error, which the model reads."""
        return self.addresses[name]

    @kernel_function(description="Send a mail.")
    def send(self, to: str, text: str) -> str:
        """Send it; there is no way to take it back."""
        self.sent.append(f"{to}: {text}")
        return f"sent to {to}"


async def main() -> None:
    mail, service = Mail(), chat_service(script)
    kernel = Kernel(services=service)
    kernel.add_plugin(mail, "mail")

    free = {"plugin": "mail", "function": "address", "action": "allow"}
    policy = ApprovalPolicy.from_dict({"default": "ask", "rules": [free]})
    guard = ApprovalFilter(policy)  # with approver=ask it would ask at once instead, and hold the request open
    kernel.add_filter(FilterTypes.AUTO_FUNCTION_INVOCATION, guard)  # pyright: ignore[reportUnknownMemberType]

    behavior = BoundedFunctionChoiceBehavior.Auto(maximum_use_attempts=4)  # means the same in the stock loop
    settings = PromptExecutionSettings(function_choice_behavior=behavior)
    history = ChatHistory()
    history.add_user_message("Tell Tom that we meet at eleven.")
    await service.get_chat_message_content(history, settings, kernel=kernel)
    waiting = guard.pending(history)
    for waits in waiting:
        print(f"waits: {waits.fully_qualified_name} {json.dumps(dict(waits.arguments))}")
    print(f"outbox: {mail.sent}")

    # A history is JSON: it may wait in a database, and be decided on by another process.
    history = ChatHistory.restore_chat_history(history.serialize())
    await guard.resume(kernel, history, {waits.id: Approve(by="ann") for waits in waiting})
    print(f"outbox: {mail.sent}")
    print(await service.get_chat_message_content(history, settings, kernel=kernel))


# The replies of the scripted model.


def write(request: ScriptedRequest) -> ScriptedReply:
    return call("mail-send", {"to": results(request)[-1], "text": "We meet at eleven."})


def confirm(request: ScriptedRequest) -> ScriptedReply:
    return say(f"Done: {results(request)[-1]}.")


script = [call("mail-address", {"name": "Tom"}), write, confirm]

if __name__ == "__main__":
    asyncio.run(main())
