"""What `samples/operate` hands to other programs fits the commands of this package."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

from planner_ext.durable import gauge
from support.command_line import Command

OPERATE = Path(__file__).parents[2] / "samples" / "operate"


def test_the_deployment_gives_the_worker_options_that_exist(command: Command) -> None:
    """Each option of its command line is one of the worker's, and the worker leaves before it is killed."""
    manifest: Any = yaml.safe_load((OPERATE / "kubernetes.yaml").read_text())
    pod = manifest["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    program, name = container["command"]
    assert program == "planner-ext"
    given = container["args"]
    words = dict(zip(given[::2], given[1::2], strict=True))
    listed = command(name, "--help").out
    assert all(option in listed for option in words)
    assert float(words["--grace"]) < pod["terminationGracePeriodSeconds"]
    assert container["livenessProbe"]["httpGet"]["port"] == int(words["--health"])


def test_alerts_and_panels_read_metrics_that_exist() -> None:
    """Each name is that of a gauge or a counter, as exporters for Prometheus write it; every metric is read."""
    rules: Any = yaml.safe_load((OPERATE / "alerts.yaml").read_text())
    board: Any = json.loads((OPERATE / "dashboard.json").read_text())
    (group,) = rules["groups"]
    alerts = [rule["expr"] for rule in group["rules"]]
    panels = [
        target["expr"] for panel in board["panels"] for target in panel["targets"]
    ]
    labels = {
        "planner_ext_store",
        "planner_ext_run_status",
        "planner_ext_state",
        "planner_ext_budget",
        "planner_ext_limit",
    }
    exported = {
        "planner_ext_runs_retries_total",
        "planner_ext_runs_takeovers_total",
        *(
            name.replace(".", "_") + ("_seconds" if unit == "s" else "")
            for name, (unit, _) in gauge._GAUGES.items()
        ),
    }
    for expressions in (alerts, panels):
        found = {*re.findall(r"planner_ext_\w+", " ".join(expressions))}
        assert found - labels <= exported
    read = {*re.findall(r"planner_ext_\w+", " ".join(panels))}
    assert exported <= read
