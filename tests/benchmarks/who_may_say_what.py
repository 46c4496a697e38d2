"""Look for calls that no entitled person was asked about: random situations, judged by an oracle of the contract.

    python tests/benchmarks/who_may_say_what.py --runs 3000 --seed 1
    python tests/benchmarks/who_may_say_what.py --seed 479 --runs 1 --show      one situation, and all that happened
    python tests/benchmarks/who_may_say_what.py --runs 300 --doors planner,kept --shrink

A situation is drawn from its seed: policies with roles, marks, interceptors that edit, refuse and ask, sticky answers,
edits by people, several people and a hook that lets some of them decide, batches, functions that call others
themselves, by prompts, planners and agents, and a door. Prints what was run, and of each broken promise how often and
with which seeds. Exits with 1 if there is one.
"""

import argparse
import asyncio
import logging
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from pprint import pformat

sys.path.insert(0, str(Path(__file__).parents[1]))

from entitlement.scenarios import DOORS, scenario_of
from entitlement.trial import Trial, shrunk, tried


def shown(trial: Trial) -> str:
    """Write a situation with all that happened in it."""
    lines = [
        pformat(trial.scenario, width=120),
        *map(str, trial.record.events),
        f"ended: {', '.join(trial.statuses)}",
    ]
    return "\n".join([*lines, *(f"BROKEN {one}" for one in trial.found)])


async def main(options: argparse.Namespace) -> int:
    """Try the situations, and print the outcomes."""
    counts, broken, seeds = (
        Counter[str](),
        Counter[str](),
        defaultdict[str, list[int]](list),
    )
    began = time.monotonic()
    for seed in range(options.seed, options.seed + options.runs):
        trial = await tried(scenario_of(seed, options.doors))
        counts.update(
            {f"door {trial.scenario.door}": 1, "functions started": trial.starts}
        )
        counts.update(
            {
                "decisions": trial.answers,
                "decisions refused": trial.refused,
                "runs": len(trial.statuses),
            }
        )
        counts.update(f"ended {status}" for status in trial.statuses)
        for promise in {one.promise for one in trial.found}:
            broken[promise] += 1
            seeds[promise].append(seed)
        if options.show:
            print(shown(trial))
        elif trial.found and options.shrink:
            print(shown(await shrunk(trial)), flush=True)
        if trial.found and options.stop:
            break
    seconds = time.monotonic() - began
    tried_now = sum(count for name, count in counts.items() if name.startswith("door "))
    print(
        f"{tried_now} situations from seed {options.seed} in {seconds:.0f} s; ", end=""
    )
    print(", ".join(f"{count} {name}" for name, count in sorted(counts.items())))
    for promise, number in broken.most_common():
        first = ", ".join(map(str, seeds[promise][:8]))
        print(
            f"BROKEN in {number}: {promise}; seeds {first}{' ...' if number > 8 else ''}"
        )
    print(
        "No promise was broken."
        if not broken
        else f"{len(broken)} promises were broken."
    )
    return 1 if broken else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Look for calls that nobody entitled was asked about."
    )
    parser.add_argument("--runs", type=int, default=3000, help="how many situations")
    parser.add_argument(
        "--seed", type=int, default=1, help="that of the first; the others follow"
    )
    parser.add_argument(
        "--doors", type=lambda given: tuple(given.split(",")), default=DOORS
    )
    parser.add_argument(
        "--show", action="store_true", help="print each situation and all that happened"
    )
    parser.add_argument(
        "--stop", action="store_true", help="end with the first that breaks a promise"
    )
    parser.add_argument(
        "--shrink",
        action="store_true",
        help="print the smallest like each that breaks a promise",
    )
    logging.disable(logging.CRITICAL)
    sys.exit(asyncio.run(main(parser.parse_args())))
