"""A tracer and a meter that keep what they record, for as long as a test lasts, and traces as trees."""

import json
import sys
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.metrics import _internal as metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, Sampler
from semantic_kernel.functions import KernelFunction
from semantic_kernel.utils.telemetry.model_diagnostics import (
    decorators,
    function_tracer,
)

from planner_ext.engine import telemetry

__all__ = ["Recording", "Tree", "events_of", "recording", "said_by", "tree_of"]

Tree = tuple[str, Sequence["Tree"]]
"""A span's name, and the trees of its children in the order in which they began."""


@dataclass
class Recording:
    """What was recorded.

    Attributes:
        exporter: Keeps the spans that have ended.
        reader: Reads the metrics.
        patch: Puts everything back after the test.
    """

    exporter: InMemorySpanExporter
    reader: InMemoryMetricReader
    patch: pytest.MonkeyPatch

    @property
    def spans(self) -> Sequence[ReadableSpan]:
        """The spans that have ended, in the order in which they began."""
        return sorted(
            self.exporter.get_finished_spans(), key=lambda span: span.start_time or 0
        )

    def named(self, prefix: str) -> list[ReadableSpan]:
        """Find spans by the beginning of their names."""
        return [span for span in self.spans if span.name.startswith(prefix)]

    def only(self, prefix: str) -> ReadableSpan:
        """Find the one span whose name begins so."""
        (span,) = self.named(prefix)
        return span

    @property
    def trees(self) -> list[Tree]:
        """All spans, as trees of names."""
        return tree_of(self.spans)

    def points(self, name: str) -> list[tuple[dict[str, Any], Any]]:
        """Read one metric: the attributes of each series, and its point."""
        data = self.reader.get_metrics_data()
        found = [
            metric
            for resource in (data.resource_metrics if data is not None else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
        ]
        return [
            (dict(point.attributes or {}), point)
            for metric in found
            for point in metric.data.data_points
        ]

    def text(self) -> str:
        """Write everything of this package that was recorded, as one text."""
        ours = [
            json.loads(span.to_json())
            for span in self.spans
            if scope_of(span) == "planner_ext"
        ]
        data = self.reader.get_metrics_data()
        return json.dumps(ours) + ("" if data is None else data.to_json())

    def be_default(self) -> None:
        """Turn Semantic Kernel's diagnostics off, as they are by default: its connectors write no spans."""
        self.patch.setattr(
            decorators.MODEL_DIAGNOSTICS_SETTINGS, "enable_otel_diagnostics", False
        )

    def be_sensitive(self) -> None:
        """Turn Semantic Kernel's sensitive diagnostics on."""
        for module in (decorators, function_tracer):
            self.patch.setattr(
                module.MODEL_DIAGNOSTICS_SETTINGS,
                "enable_otel_diagnostics_sensitive",
                True,
            )


def scope_of(span: ReadableSpan) -> str:
    """Name the library that made a span."""
    return (
        span.instrumentation_scope.name
        if span.instrumentation_scope is not None
        else ""
    )


def said_by(span: ReadableSpan) -> dict[str, Any]:
    """Read a span's attributes."""
    return dict(span.attributes or {})


def events_of(span: ReadableSpan) -> list[tuple[str, dict[str, Any]]]:
    """List a span's events: name and attributes."""
    return [(event.name, dict(event.attributes or {})) for event in span.events]


def tree_of(spans: Iterable[ReadableSpan]) -> list[Tree]:
    """Arrange spans by their parents."""
    children: dict[int | None, list[ReadableSpan]] = {}
    for span in spans:
        children.setdefault(
            None if span.parent is None else span.parent.span_id, []
        ).append(span)

    def trees(parent: int | None) -> list[Tree]:
        return [
            (span.name, trees(span.context.span_id))
            for span in children.get(parent, ())
            if span.context
        ]

    return trees(None)


def recorded(patch: pytest.MonkeyPatch, sampler: Sampler) -> Recording:
    """Set providers that record, and let Semantic Kernel make its own spans."""
    exporter, reader = InMemorySpanExporter(), InMemoryMetricReader()
    tracers = TracerProvider(sampler=sampler)
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    meters = MeterProvider([reader], shutdown_on_exit=False)
    meter = meters.get_meter("planner_ext")
    patch.setattr(trace, "_TRACER_PROVIDER", tracers)
    patch.setattr(metrics, "_METER_PROVIDER", meters)
    patch.setattr(telemetry, "_TRACER", tracers.get_tracer("planner_ext"))
    patch.setattr(telemetry, "_COST", meter.create_counter("planner_ext.cost"))
    names = telemetry._HISTOGRAMS  # pyright: ignore[reportPrivateUsage]  (what an application's provider would replace, once for all tests)
    histograms = {name: meter.create_histogram(name) for name in names}
    patch.setattr(telemetry, "_HISTOGRAMS", histograms)
    functions = sys.modules[
        KernelFunction.__module__
    ]  # the package has a decorator of the module's name
    patch.setattr(functions, "tracer", tracers.get_tracer("semantic_kernel"))
    patch.setattr(decorators, "tracer", tracers.get_tracer("semantic_kernel"))
    patch.setattr(
        decorators.MODEL_DIAGNOSTICS_SETTINGS, "enable_otel_diagnostics", True
    )
    return Recording(exporter, reader, patch)


@pytest.fixture
def recording(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Generator[Recording]:
    """Record spans and metrics; parametrized indirectly with another sampler on request."""
    yield recorded(monkeypatch, getattr(request, "param", ParentBased(ALWAYS_ON)))
