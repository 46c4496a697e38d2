"""The inbox: a web application in which people decide what waits in a store of runs, and read what runs did.

``planner-ext serve`` serves it on this machine. `app` makes it for another ASGI application to mount, whose people it
asks for by ``sign_in``. Its pages work without JavaScript; with it, lists follow the store.
"""

from planner_ext.inbox.app import app
from planner_ext.inbox.security import SignIn, Token

__all__ = ["SignIn", "Token", "app"]
