"""What test modules share: scripted worlds, builders of facts, servers and processes; one module for each subject."""

from pathlib import Path

__all__ = ["TESTS"]

TESTS = Path(__file__).parent.parent
"""The folder of the tests, from which ``support`` is imported."""
