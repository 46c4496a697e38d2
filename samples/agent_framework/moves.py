"""A run that begins on Semantic Kernel waits for a person, and ends on agent-framework, without Semantic Kernel.

    pip install "planner-ext[cli]" agent-framework-openai
    python samples/agent_framework/moves.py

Output:

    Semantic Kernel: paused after 2 requests; waits: orders-refund
    order-7/1/call_2 is approved with the arguments shown: orders-refund will run with {"order": 7, "amount": 128.0}
    agent-framework: answered after 3 requests: 128.00 euros went back for order 7.
    Semantic Kernel imported here: False
    refunded: 128.0 for order 7

The processes share one SQLite file. The budget of four requests is the run's: two of them were spent by the first.
"""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from planner_ext.testing import ScriptedOpenAIServer, call, say

SCRIPT = (
    call("orders-find", {"order": 7}),
    call("orders-refund", {"order": 7, "amount": 128.0}),
    say("128.00 euros went back for order 7."),
)
APPROVE = "-m planner_ext.cli approvals approve order-7/1/call_2 --by ann --store runs.db"


def main() -> None:
    here = Path(__file__).parent
    with TemporaryDirectory() as folder, ScriptedOpenAIServer(SCRIPT) as server:
        steps = ([str(here / "begin.py"), server.url], APPROVE.split(), [str(here / "end.py"), server.url])
        for step in steps:
            subprocess.run([sys.executable, *step], cwd=folder, check=True)  # noqa: S603  (our own programs)
        print((Path(folder) / "refunds.txt").read_text(encoding="utf-8").strip())


if __name__ == "__main__":
    main()
