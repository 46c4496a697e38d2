"""Who of the workers lives. A hint for who may take a run over; what is safe is decided by the journal alone."""

from typing import Protocol

__all__ = ["Workers"]


class Workers(Protocol):
    """The workers of one store, seen by one of them."""

    @property
    def worker_id(self) -> str:
        """This worker's own name."""
        ...

    async def alive(self, worker_id: str) -> bool:
        """Whether a worker lives; one that only rests, or that this one cannot see, does."""
        ...
