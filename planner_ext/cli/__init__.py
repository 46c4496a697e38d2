"""The command line: ``planner-ext demo`` and ``planner-ext run``. Needs the extra ``planner-ext[cli]``."""
