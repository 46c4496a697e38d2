"""``python -m planner_ext`` is the command ``planner-ext``."""

import runpy

if __name__ == "__main__":
    runpy.run_module("planner_ext.cli", run_name="__main__", alter_sys=True)
