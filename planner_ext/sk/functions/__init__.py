"""The kernel's functions: which a request offers, what arguments a model may pass, and how one of them runs.

Promises
    - Only an offered function can be called: the offer is read from the kernel before each request.
    - Everybody sees one value of an argument: policy, approver, digest, repeat limit and function.
    - A synchronous function does not block the event loop, and its exception stays in its call.
    - A call runs as it was decided, however many filters surround it.

Never decides whether a call may run, never counts, and knows neither the run nor its
budget.

    toolset      the functions on offer
    conversion   a model's arguments, converted once to their parameters' types
    execution    one function runs, behind the user's filters, with a time limit
    questions    the model asks the user
"""
