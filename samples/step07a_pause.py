"""Step 7, first program: pause before anything risky, write the run to a file, and exit.

The function that pays money back is marked with ``@requires_approval``. Its call pauses the run, and the program writes
a checkpoint: signed JSON text. Then this process ends; the second program may run days later, on another machine.

Run it:

    python samples/step07a_pause.py

Output:

    paused: 2 of 6 round trips, 1 of 3 function calls
    waits: orders-refund {"order": "A-1007", "amount": 128.0}
    refunds made: []
    written: step07_checkpoint.json
"""

import asyncio
import json

from step07_shop import CHECKPOINT, KEY, Orders, build_kernel, build_planner, spent


async def main() -> None:
    orders = Orders()
    goal = "One of the four lamps of order A-1007 came broken. Refund the customer."
    result = await build_planner().invoke(build_kernel(orders), goal)

    CHECKPOINT.write_text(result.checkpoint.to_json(key=KEY), encoding="utf-8")
    print(f"{result.status}: {spent(result)}")
    for call in result.pending:
        print(f"waits: {call.fully_qualified_name} {json.dumps(dict(call.arguments))}")
    print(f"refunds made: {orders.refunds}")
    print(f"written: {CHECKPOINT}")


if __name__ == "__main__":
    asyncio.run(main())
