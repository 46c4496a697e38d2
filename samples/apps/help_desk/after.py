"""An IT help desk in the terminal: one agent, its plugins, and a thread that remembers the conversation.

Without arguments it is a conversation, until "exit"; with a question as its argument it answers that one.
"""

import asyncio
import os
import sqlite3
import sys
from typing import Annotated

from planner_ext import Approve, Budget, Deny, FunctionInvokingChatCompletion, ToolExecution, requires_approval
from planner_ext.hitl_manager import ToolCall
from semantic_kernel.agents import AgentThread, ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.core_plugins import TimePlugin
from semantic_kernel.functions import kernel_function

INSTRUCTIONS = """
You are the IT help desk of a company with 200 people.
Find the login of the person before you do anything for them, and look at their open tickets before you open another.
Answer in one or two sentences.
"""


class TicketPlugin:
    """The tickets, in a SQLite file."""

    def __init__(self, path: str) -> None:
        self._db = sqlite3.connect(path)
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS tickets"
            " (number INTEGER PRIMARY KEY, login TEXT, summary TEXT, status TEXT DEFAULT 'open')"
        )

    @kernel_function
    def open_tickets(self, login: Annotated[str, "The login of the person"]) -> list[str]:
        """Lists the open tickets of a person."""
        rows = self._db.execute(
            "SELECT number, summary FROM tickets WHERE login = ? AND status = 'open'", (login,)
        ).fetchall()
        return [f"#{number}: {summary}" for number, summary in rows]

    @kernel_function
    def open_ticket(
        self,
        login: Annotated[str, "The login of the person"],
        summary: Annotated[str, "The problem in one line"],
    ) -> int | None:
        """Opens a ticket and returns its number."""
        with self._db:
            return self._db.execute("INSERT INTO tickets (login, summary) VALUES (?, ?)", (login, summary)).lastrowid

    @kernel_function
    def close_ticket(self, number: Annotated[int, "The number of the ticket"]) -> str:
        """Closes a ticket."""
        with self._db:
            self._db.execute("UPDATE tickets SET status = 'closed' WHERE number = ?", (number,))
        return f"Ticket #{number} is closed."


PEOPLE = {"Ada Lovelace": "ada", "Grace Hopper": "grace", "Katherine Johnson": "kjohnson"}


class AccountPlugin:
    """The company's directory and the accounts in it."""

    @kernel_function
    def find_login(self, name: Annotated[str, "The full name, or a part of it"]) -> str:
        """Finds the login of a person by their name."""
        found = [login for person, login in PEOPLE.items() if name.lower() in person.lower()]
        return ", ".join(found) or "No such person."

    @requires_approval(prompt="Reset the password?")
    @kernel_function
    def reset_password(self, login: Annotated[str, "The login of the account"]) -> str:
        """Resets the password of an account and sends a temporary one to the owner's phone."""
        if login not in PEOPLE.values():
            raise ValueError(f"There is no account {login!r}.")
        print(f"  [directory] password of {login} reset")
        return f"A temporary password is on its way to the phone of {login}."


def ask(call: ToolCall) -> Approve | Deny:
    """Ask the technician at the keyboard."""
    yes = input(f"{call.prompt} {dict(call.arguments)} [y/n] ") == "y"
    return Approve() if yes else Deny("The technician refused.")


async def main() -> None:
    """Answer one question, or chat until "exit"."""
    agent = ChatCompletionAgent(
        service=FunctionInvokingChatCompletion(
            OpenAIChatCompletion(ai_model_id="gpt-4.1-mini"),
            budget=Budget(max_iterations=6, max_tool_calls=12),
            execution=ToolExecution(threads=False),  # SQLite's connection belongs to this thread
            approver=ask,
        ),
        name="HelpDesk",
        instructions=INSTRUCTIONS,
        plugins=[TicketPlugin(os.environ.get("TICKETS_DB", "tickets.db")), AccountPlugin(), TimePlugin()],
    )
    thread: AgentThread | None = None

    if len(sys.argv) > 1:
        response = await agent.get_response(messages=" ".join(sys.argv[1:]))
        print(f"{response.name}: {response}")
        return

    while True:
        try:
            user_input = await asyncio.to_thread(input, "You: ")
        except (KeyboardInterrupt, EOFError):
            break
        if user_input.strip().lower() == "exit":
            break
        response = await agent.get_response(messages=user_input, thread=thread)
        print(f"{response.name}: {response}")
        thread = response.thread

    if thread:
        await thread.delete()


if __name__ == "__main__":
    asyncio.run(main())
