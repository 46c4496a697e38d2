"""What a function of a run gets of that run: a kernel that charges it, and its approval filters.

Promises
    - Each use of that kernel is charged to the run, and asked about, before it happens.
    - The application's own kernel, plugins and agents are not changed.

Takes the call of a run, found through a context variable. Never makes a request itself.

    nested          the run around, found from its function; the gate that decides a run's calls
    view            the kernel that a function gets, with charged services
    again           a function that is called again after a run in it waited, with the same runs
    filters         a kernel's approval filters, as a run asks them
    earlier_calls   the functions after whose calls a call comes
"""
