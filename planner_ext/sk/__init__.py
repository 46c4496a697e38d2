"""Everything that touches Semantic Kernel: one round trip, one function call, the behaviour, the service wrapper."""
