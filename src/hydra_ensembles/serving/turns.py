"""Let large inputs take turns, so that they cannot fill the memory or hold up small ones."""

from __future__ import annotations

import asyncio
import heapq
import itertools

from .limits import Refusal

QUEUE = 16
"""Work may wait for up to this many times the budget; what comes then is refused."""


class Turns:
    """A semaphore weighted by size (pixels or bytes); the smallest that waits goes first.

    Args:
        budget: The sum of the sizes that are worked on at one time; one that is larger than the
            budget is worked on alone.
        places: How many are worked on at one time.
    """

    def __init__(self, budget: int, places: int) -> None:
        self._budget, self._free, self._places = budget, budget, places
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    async def take(self, size: int, seconds: float) -> None:
        """Wait for a turn; call `give_back` when the work is done.

        Raises:
            Refusal: With status 503, when too much waits already or the turn does not come within
                `seconds`.
        """
        if size + sum(waiting for waiting, _, _ in self._waiting) > QUEUE * self._budget:
            raise Refusal(
                503, "Too many large inputs wait to be decoded. Try again a little later."
            )
        turn = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (size, next(self._order), turn))
        self._next()
        done, _ = await asyncio.wait([turn], timeout=seconds)
        if not done:
            turn.cancel()
            self._waiting = [entry for entry in self._waiting if entry[2] is not turn]
            heapq.heapify(self._waiting)
            raise Refusal(
                503,
                f"This large input was not decoded within {seconds:g} seconds: the service is "
                "overloaded. Try again later.",
            )

    def give_back(self, size: int) -> None:
        """End a turn."""
        self._free += size
        self._places += 1
        self._next()

    def _next(self) -> None:
        while self._waiting and self._places:
            size, _, turn = self._waiting[0]
            if size > self._free < self._budget:
                return
            heapq.heappop(self._waiting)
            self._free -= size
            self._places -= 1
            turn.set_result(None)
