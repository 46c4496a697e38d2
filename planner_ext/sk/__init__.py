"""Everything that touches Semantic Kernel, in five rooms; imports point down this list, to ``errors`` and ``core``.

    filter      `ApprovalFilter`, for kernels whose loop is Semantic Kernel's own
    run         one run, prepared for every door, and resumed
    charging    what a function of a run gets: a kernel that charges that run
    chat        one round trip: service, history, reply, tokens and price
    functions   the kernel's functions, their arguments, and how one of them runs

All of them use ``errors``, ``checks``, ``messages``, ``checkpoint`` and ``members``.
"""
