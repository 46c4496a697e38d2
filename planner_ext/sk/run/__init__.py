"""One run, prepared in one way for every door: planner, service, handler, session.

Promises
    - An option means the same at each door, and is merged with a wrapped service's by one rule.
    - A decision is taken once, by a person who may decide, on the call that was shown; all of a resume, or none.
    - Every expected end is a value, whichever door it leaves by.

Takes a kernel, options and a history or checkpoint. Never loops: the only loop is
`planner_ext.engine.engine`.

    options         the options of every door: declared, checked, merged
    context         kernel, connector, options and functions of one run; makes its engine
    tools           a call is resolved, checked and run, for the engine
    behavior        `BoundedFunctionChoiceBehavior`
    resume          a journal continues: checks, and decisions as facts
    inside          the runs inside a paused run: checks the decisions on their calls
    iteration       the callback after each batch
    answers         the check of the final answer: its form, and ``check_answer``
    prompts         what the planner writes to the model
    form            the form of the final answer
    outcome         how a run ended, as a status, a history or an error
    returned        the message that a service or an agent returns
    orchestration   a turn that waits inside one of Semantic Kernel's orchestrations
    service         a request to the service, as a run
    tracing         describes a run to telemetry
"""
