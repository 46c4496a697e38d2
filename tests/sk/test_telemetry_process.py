"""Telemetry between processes, through the real exporter: to an OTLP receiver over HTTP, and on to another life."""

import asyncio
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import metrics, trace
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from planner_ext.durable import Runs
from planner_ext.testing import say
from support.durable import GOAL, PAY, decide_all, world
from support.processes import Lives


class Collector:
    """A collector of OTLP over HTTP: it parses what it is sent, and keeps it.

    Attributes:
        url: Where it listens.
        spans: The spans that came, by the name of the process that sent them.
        metrics: The metrics that came, by the same name.
    """

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        self.metrics: list[tuple[str, Any]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.headers["Content-Type"] == "application/x-protobuf"
                answer = collector.take(self.path, body)
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: object) -> None:
                """Print nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def take(self, path: str, body: bytes) -> bytes:
        """Keep what one request holds."""
        if path == "/v1/traces":
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                name = value_in(resource.resource.attributes, "service.name")
                self.spans += [
                    (name, span)
                    for scope in resource.scope_spans
                    for span in scope.spans
                ]
            return ExportTraceServiceResponse().SerializeToString()
        for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            name = value_in(resource.resource.attributes, "service.name")
            self.metrics += [
                (name, metric)
                for scope in resource.scope_metrics
                for metric in scope.metrics
            ]
        return ExportMetricsServiceResponse().SerializeToString()

    def metric(self, process: str, name: str) -> Any:
        """Find the last value of one metric that a process sent."""
        return [
            metric
            for sender, metric in self.metrics
            if (sender, metric.name) == (process, name)
        ][-1]


def value_in(attributes: Any, name: str) -> Any:
    """Read one attribute."""
    for attribute in attributes:
        if attribute.key == name:
            return getattr(attribute.value, attribute.value.WhichOneof("value"))
    raise KeyError(name)


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    thread = threading.Thread(target=collector.server.serve_forever)
    thread.start()
    yield collector
    collector.server.shutdown()
    thread.join()
    collector.server.server_close()


@contextmanager
def exported(url: str) -> Generator[Any]:
    """Configure OpenTelemetry as an application does; export everything at the end."""
    tracers = TracerProvider()
    tracers.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{url}/v1/traces")))
    trace.set_tracer_provider(tracers)
    meters = MeterProvider(
        [
            PeriodicExportingMetricReader(
                OTLPMetricExporter(f"{url}/v1/metrics"), 3_600_000
            )
        ]
    )
    metrics.set_meter_provider(meters)
    try:
        yield meters
    finally:
        tracers.shutdown()
        meters.shutdown()


def pausing_life(url: str, store: Path, effects: Path) -> None:
    """Drive a run to its pause."""

    async def drive() -> None:
        planner, kernel = world(effects, [PAY])
        async with Runs.sqlite(store) as runs:
            assert (
                await (
                    await runs.start(planner, kernel, GOAL, run_id="order-7")
                ).result()
            ).status == "paused"
            meters.force_flush()

    with exported(url) as meters:
        asyncio.run(drive())


def resuming_life(url: str, store: Path, effects: Path) -> None:
    """Decide what waits, and drive the run to its end."""

    async def drive() -> None:
        planner, kernel = world(effects, [say("Settled.")])
        async with Runs.sqlite(store) as runs:
            assert await decide_all(store) == 1
            assert (
                await (
                    await runs.start(planner, kernel, GOAL, run_id="order-7")
                ).result()
            ).status == "answered"
            meters.force_flush()

    with exported(url) as meters:
        asyncio.run(drive())


def test_two_processes_export_one_run(
    collector: Collector, lives: Lives, tmp_path: Path
) -> None:
    """Over real OTLP: the second process's span links to the first one's, and each reports what waits in the store."""
    for life in (pausing_life, resuming_life):
        code = lives.live(
            life,
            collector.url,
            tmp_path / "runs.db",
            tmp_path / "effects",
            OTEL_SERVICE_NAME=life.__name__,
        )
        assert code == 0
    agents = {
        process: span
        for process, span in collector.spans
        if span.name.startswith("invoke_agent")
    }
    first, second = agents["pausing_life"], agents["resuming_life"]
    assert [(link.trace_id, link.span_id) for link in second.links] == [
        (first.trace_id, first.span_id)
    ]
    assert {
        value_in(span.attributes, "gen_ai.conversation.id") for span in agents.values()
    } == {"order-7"}
    tools = [
        span for _, span in collector.spans if span.name == "execute_tool shop-pay"
    ]
    assert [span.trace_id for span in tools] == [second.trace_id]

    for process, waiting in (("pausing_life", 1), ("resuming_life", 0)):
        (point,) = collector.metric(
            process, "planner_ext.approvals.waiting"
        ).gauge.data_points
        assert point.as_int == waiting
        assert value_in(point.attributes, "planner_ext.store") == str(
            tmp_path / "runs.db"
        )
    (point,) = collector.metric(
        "resuming_life", "planner_ext.run.iterations"
    ).histogram.data_points
    assert (point.count, point.sum) == (1, 2)
    assert list(point.explicit_bounds) == [1, 2, 4, 8, 16, 32, 64, 128]
    (duration,) = collector.metric(
        "resuming_life", "gen_ai.invoke_agent.duration"
    ).histogram.data_points
    assert list(duration.explicit_bounds)[:2] == [0.1, 0.2]
