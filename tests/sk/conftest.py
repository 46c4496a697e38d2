"""The fixtures of the service's tests; what else they share is imported from `served`, by a name of its own."""

from support.served import ask, history, kernel, resend, serve, streamed, tools

__all__ = ["ask", "history", "kernel", "resend", "serve", "streamed", "tools"]
