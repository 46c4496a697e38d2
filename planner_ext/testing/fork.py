"""``fork``: continue from an iteration of a run with another model, instruction, budget or policy.

    checkpoint = fork("tests/cassettes/refund.json", at=1, instruction="Refund half of it.")
    result = await planner.resume(kernel, checkpoint, budget=Budget(max_iterations=10))

Functions of the kept iterations are not called again; those of later ones are, and take
effect again.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

from planner_ext.core.facts import Fact
from planner_ext.durable.records import StoredRun
from planner_ext.engine.fork import forked_facts
from planner_ext.sk.checkpoint import Checkpoint, SigningKey
from planner_ext.sk.errors import InvalidCheckpointError
from planner_ext.testing.cassette import Cassette, CassetteError


def fork(
    source: Checkpoint | StoredRun | Sequence[Fact] | str | Path,
    *,
    at: int,
    instruction: str = "",
    run_id: str | None = None,
    key: bytes | None = None,
) -> Checkpoint:
    """Fork a run at the end of an iteration: the checkpoint of a new run.

    The fork begins with the usage of the kept iterations. Later decisions, and
    approvals for the rest of the run, are not in it; its policy is that of the planner
    that resumes it. ``Runs.fork`` forks a run inside its store.

    Args:
        source: A checkpoint, a run of a store, the facts of a run, or a cassette file,
            whose first run is forked.
        at: The last iteration that is kept, 0-based; -1 keeps the plan only.
        instruction: A user message to add.
        run_id: The fork's name; None generates one.
        key: Verifies the checkpoint, which must be signed with it, and signs the fork.

    Raises:
        InvalidForkError: If the run made no request after this iteration; names where
            it can be forked.
        InvalidCheckpointError: If the checkpoint is signed and the key does not fit.
        CassetteError: If the cassette cannot be used.
    """
    signing = SigningKey.of(key, "key")
    if isinstance(source, Checkpoint):
        if signing is None and source.is_signed:
            raise InvalidCheckpointError(
                "The checkpoint is signed: fork it with the key= that it was signed with."
            )
        source = source.verified(signing).facts
    elif isinstance(source, StoredRun):
        source = source.facts
    elif isinstance(source, str | Path):
        runs = Cassette.read(Path(source)).runs
        if not runs:
            raise CassetteError(f"The cassette {source} has no run.")
        source = runs[0]
    name = uuid4().hex if run_id is None else run_id
    facts = forked_facts(
        source, at=at, run_id=name, now=time.time(), instruction=instruction
    )
    return Checkpoint.of_run(facts, signing)
