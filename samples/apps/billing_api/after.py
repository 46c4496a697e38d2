"""Two agents behind an HTTP route: the front desk asks the billing agent, who looks at invoices and refunds them.

Serve ``app`` with uvicorn, then:

curl localhost:8000/ask -H 'content-type: application/json' -d '{"customer": "C-7", "question": "Why was I charged?"}'
"""

from dataclasses import dataclass
from typing import Annotated

from fastapi import FastAPI
from planner_ext import Approve, Budget, Deny, FunctionInvokingChatCompletion, requires_approval
from pydantic import BaseModel
from semantic_kernel.agents import ChatCompletionAgent, ChatHistoryAgentThread
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import kernel_function


@dataclass
class Invoice:
    """What a customer paid for, and how much of it went back."""

    customer: str
    amount: float
    reason: str
    refunded: float = 0.0


INVOICES = {
    "INV-1001": Invoice("C-7", 49.00, "Subscription, March"),
    "INV-1002": Invoice("C-7", 49.00, "Subscription, March"),
    "INV-1003": Invoice("C-8", 120.00, "Onboarding"),
}


class InvoicePlugin:
    """The invoices and the money that goes back."""

    @kernel_function
    async def list_invoices(self, customer: Annotated[str, "The customer's number, such as C-7"]) -> list[str]:
        """Lists the invoices of a customer."""
        return [
            f"{number}: {invoice.amount:.2f} euros, {invoice.reason}, {invoice.refunded:.2f} refunded"
            for number, invoice in INVOICES.items()
            if invoice.customer == customer
        ]

    @requires_approval
    @kernel_function
    async def refund(
        self,
        invoice: Annotated[str, "The number of the invoice, such as INV-1001"],
        amount: Annotated[float, "The amount in euros"],
    ) -> str:
        """Pays an amount of an invoice back to the customer's card."""
        found = INVOICES[invoice]
        if amount > found.amount - found.refunded:
            raise ValueError(f"{invoice} has only {found.amount - found.refunded:.2f} euros left to refund")
        found.refunded += amount
        return f"{amount:.2f} euros of {invoice} refunded"


approved: dict[tuple[str, float], Approve] = {}
chat = FunctionInvokingChatCompletion(
    OpenAIChatCompletion(ai_model_id="gpt-4.1-mini"),
    budget=Budget(max_iterations=10),
    approver=lambda call: approved.pop((call.arguments["invoice"], call.arguments["amount"]), Deny("A clerk decides.")),
)

billing_agent = ChatCompletionAgent(
    service=chat,
    name="BillingAgent",
    description="Answers questions about invoices, charges and refunds of a customer, and refunds.",
    instructions="You handle invoices and refunds. Look at the customer's invoices before you refund anything.",
    plugins=[InvoicePlugin()],
)

front_desk = ChatCompletionAgent(
    service=chat,
    name="FrontDesk",
    instructions=(
        "You are the front desk of a software company. Ask the BillingAgent about money; always give it the customer's"
        " number. Answer the customer with everything that the agent found."
    ),
    plugins=[billing_agent],
)

app = FastAPI(title="Billing")
threads: dict[str, ChatHistoryAgentThread] = {}


class Question(BaseModel):
    """What a customer asks."""

    customer: str
    question: str


class Answer(BaseModel):
    """What the front desk says."""

    answer: str


@app.post("/ask")
async def ask(body: Question) -> Answer:
    """Answer a customer, in the conversation that they have had so far."""
    thread = threads.setdefault(body.customer, ChatHistoryAgentThread())
    response = await front_desk.get_response(
        messages=f"Customer {body.customer}: {body.question}",
        thread=thread,
    )
    return Answer(answer=str(response))


@app.post("/approve")
async def approve(clerk: str, invoice: str, amount: float) -> None:
    """Let a refund run once, the next time that the customer asks for it."""
    approved[invoice, amount] = Approve(by=clerk)
