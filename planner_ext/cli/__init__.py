"""The command line: ``planner-ext run``, ``resume``, ``runs``, ``approvals``, ``worker``, ``demo`` and ``compare``.

Needs the extra ``planner-ext[cli]``.
"""
