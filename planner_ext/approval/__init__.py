"""Whether a call may run: the decisions, what they bind to, and who makes them.

    decisions   `Approve`, `Deny`, `Supply`, `Defer`, and the `ToolCall` that they are for
    policy      rules as data, and the terms of a grant
    waiting     the calls and questions of a state that wait for a person
    record      the decisions that a journal holds
    guards      the names of what can decide a run's calls, recorded when it begins

``engine/gate.py`` asks who decides.
"""
