"""The inbox: a web application to decide the calls and questions that wait in a store, and to read its runs.

``planner-ext serve`` serves it on this machine. `app` makes it for another ASGI
application to mount, which names its users by ``sign_in``. Its pages work without
JavaScript; with it, lists update themselves.
"""

from planner_ext.inbox.app import app
from planner_ext.inbox.security import SignIn, Token

__all__ = ["SignIn", "Token", "app"]
