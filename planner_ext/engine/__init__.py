"""The only loop: it performs the machine's actions and records what came of them. It imports no Semantic Kernel."""
