"""What each process of `Lives` has imported when it is forked, and what no collection of garbage walks there.

Half of the time of a forked process went into imports that nearly all of them make.
"""

import gc
from importlib import import_module

for name in (
    "support.durable",
    "planner_ext.planner.planner",
    "planner_ext.sk.chat.openai",
    "planner_ext.sk.members",
    "planner_ext.plugin",
    "planner_ext.durable.sqlite",
    "planner_ext.durable.postgres",
    "planner_ext.budgets.budget",
    "planner_ext.budgets.charges",
    "planner_ext.budgets.store",
    "planner_ext.engine.background",
    "planner_ext.engine.review",
    "planner_ext.engine.shared",
    "planner_ext.ag_ui.kept",
    "planner_ext.timeline.page",
    "planner_ext.cli.app",
    "planner_ext.cli.approvals",
    "planner_ext.cli.run",
    "planner_ext.cli.runs",
    "planner_ext.cli.store",
    "planner_ext.cli.streams",
    "planner_ext.compare.life",
    "semantic_kernel.agents",
    "semantic_kernel.connectors.ai.open_ai",
    "openai.resources.chat",
    "anyio._backends._asyncio",
    "concurrent.futures.thread",
    "fastapi",
    "h11",
    "httpcore2",
    "uvicorn",
):
    import_module(name)
gc.freeze()
