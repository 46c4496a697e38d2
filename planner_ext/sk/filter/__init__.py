"""``ApprovalFilter``: an approval policy for kernels whose loop is Semantic Kernel's own.

Promises
    - It asks once about each call, whichever of the two kinds of filter it is registered as.
    - Without an approver the loop ends; `ApprovalFilter.resume` decides what waits in the history.
    - In a run of this package the run's own gate asks it, and one approval is one start.

Never loops, and never makes a request.

    approval_filter   the filter
    waiting_results   placeholder results of calls that wait
"""
