"""The only loop: it performs the machine's actions and records their outcomes.

engine          the loop: asks the machine what is next, does it, records the fact
batch           the calls of a reply: reviewed, run, left and called again
gate            the interceptors of a run: how a call is decided before it runs
review          all interceptors around a call and its approvers, asked in order; also about an edit
journal         records the facts of a run, measures its time, ends it from outside
fork            the journal of a run that begins as another one did
ports           what the engine needs of others, as protocols; ``sk`` implements them
shared          reserves what a run takes of shared budgets
concurrency     threads, time limits, `StopHandle`
background      the event loop of code that is not async
activation      how a store and a planner meet: what drives a kept run once
effects         ``@effect``: whether a function may run twice
authorization   asks the ``authorize`` hook
schemas         checks values against JSON schemas, in bounded time
document        facts as JSON; checkpoints, exported runs and cassettes
timeline        what a journal tells its readers, as values
telemetry, log  spans and metrics of a run; lines of the log
"""
