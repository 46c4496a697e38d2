"""What the tests of the machine share."""

from core_builders import (
    calls,
)

LOOP = (calls("f"),) * 20


"""A model that never stops calling where it can."""
