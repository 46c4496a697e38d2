"""Step 17: a trace of a run that pauses, continues, and calls another planner.

Each activation of a run is an ``invoke_agent`` span, with a child span for each iteration and, below it, each request
and each function. After a pause the next activation links to the previous one, also in another process. No text of the
model, a person or a function is recorded. This program prints the spans as trees; an application sets another
exporter, or starts under ``opentelemetry-instrument``, and changes nothing else.

Run it, after ``pip install "planner-ext[otel]"``:

    python samples/step17_telemetry.py

Output:

    invoke_agent FunctionCallingStepwisePlanner paused
      planner_ext.iteration
        chat scripted
        execute_tool researcher-reach_goal
          invoke_agent FunctionCallingStepwisePlanner answered
            planner_ext.iteration
              chat scripted
              execute_tool orders-find
            planner_ext.iteration
              chat scripted
      planner_ext.iteration
        chat scripted
      * planner_ext.decision orders-refund defer
      * planner_ext.pause
    invoke_agent FunctionCallingStepwisePlanner answered (after another)
      planner_ext.iteration
        execute_tool orders-refund
      planner_ext.iteration
        chat scripted
      * planner_ext.decision orders-refund run ann
"""

import asyncio
from collections.abc import Mapping, Sequence

from model import chat_service, results
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function

from planner_ext import (
    Approve,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    requires_approval,
)
from planner_ext.plugin import PlannerPlugin
from planner_ext.testing import ScriptedReply, ScriptedRequest, call, say


class Orders:
    """The orders: the researcher finds them, the clerk refunds them."""

    @kernel_function(description="What a customer paid for an order.")
    def find(self, order: str) -> float:
        """Look an order up."""
        return {"A-1007": 128.0}[order]

    @requires_approval
    @kernel_function(description="Refund an amount.")
    def refund(self, amount: float) -> str:
        """Pay back."""
        return f"{amount:.2f} euros refunded"


async def main() -> None:
    exporter = InMemorySpanExporter()  # in production: OTLPSpanExporter() in a BatchSpanProcessor
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)

    library = Kernel(plugins={}, services=chat_service(research))
    library.add_plugin(Orders(), "orders")
    kernel = Kernel(plugins={}, services=chat_service(clerk))
    options = FunctionCallingStepwisePlannerOptions(plan=False)
    planner, researcher = (FunctionCallingStepwisePlanner(options=options) for _ in range(2))
    kernel.add_plugin(PlannerPlugin(researcher, kernel=library, description="Finds out."), "researcher")
    kernel.add_plugin(Orders(), "orders")

    paused = await planner.invoke(kernel, "One lamp of order A-1007 came broken. Refund it.")
    await planner.resume(kernel, paused.checkpoint, {call.id: Approve(by="ann") for call in paused.pending})
    show(sorted(exporter.get_finished_spans(), key=lambda span: span.start_time or 0))


def show(spans: Sequence[ReadableSpan], parent: int | None = None, indent: str = "") -> None:
    """Print spans as a tree, each with its status, its link and its events."""
    for span in spans:
        if span.context is not None and (None if span.parent is None else span.parent.span_id) == parent:
            links = ["(after another)"] if span.links else []
            print(" ".join([f"{indent}{span.name}", *words(span.attributes, "planner_ext.run.status"), *links]))
            show(spans, span.context.span_id, f"{indent}  ")
            for event in span.events:
                names = ("gen_ai.tool.name", "planner_ext.decision.verdict", "planner_ext.decision.by")
                print(" ".join([f"{indent}  * {event.name}", *words(event.attributes, *names)]))


def words(attributes: Mapping[str, object] | None, *names: str) -> list[str]:
    """List the values of the given attributes that are set."""
    return [str(attributes[name]) for name in names if attributes and name in attributes]


# The replies of the scripted models.


def clerk(request: ScriptedRequest) -> ScriptedReply:
    match results(request):
        case []:
            return call("researcher-reach_goal", {"goal": "What was paid for order A-1007?"})
        case [_]:
            return call("orders-refund", {"amount": 32.0})
        case outcomes:
            return say(f"Done: {outcomes[-1]}.")


def research(request: ScriptedRequest) -> ScriptedReply:
    found = results(request)
    return say(f"{found[0]} euros.") if found else call("orders-find", {"order": "A-1007"})


if __name__ == "__main__":
    asyncio.run(main())
