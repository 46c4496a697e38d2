"""What `samples/operate` hands to other programs fits the commands of this package."""

from pathlib import Path
from typing import Any

import yaml

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
