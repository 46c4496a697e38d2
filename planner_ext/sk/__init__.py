"""Everything that touches Semantic Kernel, in five rooms; imports point down this list, to ``errors`` and ``core``.

    filter      `ApprovalFilter`, for kernels whose loop is Semantic Kernel's own
    run         one run, prepared for every door: its options, context, decisions, outcome and resumption
    charging    what a function of a run gets: a kernel whose requests and calls are charged to that run
    chat        one round trip: the service, the history that is sent, the reply, its tokens and price
    functions   the kernel's functions: which are offered, their arguments, and how one of them runs

Beside the rooms stands what all of them use: errors (``errors``), checks of what an
application gives (``checks``), Semantic Kernel's messages and streamed replies put
together (``messages``), a journal as JSON text (``checkpoint``), whether a private
member is what it was (``members``).
"""
