"""Everything that touches Semantic Kernel, in five rooms; imports point down this list, to ``errors`` and ``core``.

    filter      `ApprovalFilter`, for kernels whose loop is Semantic Kernel's own
    run         one run, prepared for every door, and resumed; what an option is
    charging    what a function of a run gets: a kernel that charges that run
    chat        one round trip: service, history, reply, tokens and price
    functions   the kernel's functions, their arguments, and how one of them runs

All of them use these modules:

    errors       the errors of the doors
    checks       checks of what an application gives
    messages     Semantic Kernel's messages, and what this package reads in them
    checkpoint   `Checkpoint`: a journal as JSON text, and the decisions that were taken
    members      whether a member of a library is what it was

Nothing here drives a run: `planner_ext.engine` does, through the adapters that ``run``
puts together.
"""
