"""What each process of `Lives` has imported when it is forked, and what no collection of garbage walks there."""

import gc
from importlib import import_module

for name in (
    "support.durable",
    "planner_ext.planner.planner",
    "planner_ext.cli.app",
    "planner_ext.cli.run",
    "planner_ext.compare.life",
    "semantic_kernel.connectors.ai.open_ai",
    "uvicorn",
):
    import_module(name)
gc.freeze()
