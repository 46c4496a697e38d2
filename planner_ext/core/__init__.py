"""The pure heart of the package: values, facts, and the two functions that make a run out of them.

Standard library only; no clock, no randomness, no IO, no logging, and nothing of Semantic Kernel.
"""
