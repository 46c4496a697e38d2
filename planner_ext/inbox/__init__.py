"""The inbox: web pages to decide the calls and questions that wait in a store, and to read its runs.

``planner-ext serve`` serves it; `app` makes it for another ASGI application to mount.
Pages work without JavaScript; with it, lists update themselves.
"""

from planner_ext.inbox.app import app
from planner_ext.inbox.security import SignIn, Token

__all__ = ["SignIn", "Token", "app"]
