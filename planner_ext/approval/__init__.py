"""Whether a call may run: the decisions, what they bind to, and who makes them."""
