"""The command line ``planner-ext``, of the extra ``planner-ext[cli]``."""
