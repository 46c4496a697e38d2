"""The command line: ``planner-ext run``, ``resume``, ``demo`` and ``compare``. Needs the extra ``planner-ext[cli]``."""
