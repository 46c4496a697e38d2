"""Step 7, second program: another process with a new kernel. Ann approves a smaller refund, and the run finishes.

The run continues with the rest of its budget. Ann's edited arguments are checked like the model's, and replace them in
the transcript; the journal has both.

Run it after step07a_pause.py:

    python samples/step07b_approve.py

Output:

    before: 2 of 6 round trips, 1 of 3 function calls
    after: 3 of 6 round trips, 2 of 3 function calls
    refunds made: [('A-1007', 32.0)]
    Dear customer, we are sorry for the broken lamp: 32.00 euros refunded for A-1007.
"""

import asyncio

from step07_shop import CHECKPOINT, KEY, Orders, build_kernel, build_planner, spent

from planner_ext import Approve
from planner_ext.hitl_manager import Checkpoint


async def main() -> None:
    orders = Orders()
    kernel, planner = build_kernel(orders), build_planner()
    checkpoint = Checkpoint.from_json(CHECKPOINT.read_text(encoding="utf-8"), key=KEY)

    # Without decisions a paused run stays paused: this makes no request, and returns the pending calls and the usage.
    paused = await planner.resume(kernel, checkpoint)
    print(f"before: {spent(paused)}")

    decisions = {
        call.id: Approve(arguments={**call.arguments, "amount": 32.0}, by="ann")  # one lamp of four
        for call in paused.pending
    }
    result = await planner.resume(kernel, checkpoint, decisions)
    print(f"after: {spent(result)}")
    print(f"refunds made: {orders.refunds}")
    print(result.final_answer)
    CHECKPOINT.unlink()  # a text does not record that it was resumed: a second approval would be a second refund


if __name__ == "__main__":
    asyncio.run(main())
