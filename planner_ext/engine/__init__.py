"""The only loop: it performs the machine's actions and records their outcomes."""
