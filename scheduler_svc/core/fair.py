"""Deficit round robin over tenants: whose waiting choice is next, so that nobody's load decides another's wait.

Each tenant with waiting choices earns a quantum of tokens per round and pays a choice's cost (prefill and expected
decode tokens) when it starts. Rounds are not walked: how many a tenant must still wait for its next choice is computed.
Not here: the choices themselves, priorities and limits per tenant (queue, policy).
"""

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence


class FairShare:
    """Deficits of the tenants that wait. Those not given to `order` are forgotten: who idles saves nothing."""

    __slots__ = ("_deficit", "_next", "_served", "_turns", "quantum")

    def __init__(self, quantum: float) -> None:
        if quantum <= 0:
            raise ValueError(f"quantum: {quantum} is not positive; use about the tokens of a short request")
        self.quantum = quantum
        self._deficit: dict[str, float] = {}
        self._next: dict[str, float] = {}  # cost of the choice each waits to start
        self._served: dict[str, int] = {}  # turn of the last charge: the longest unserved goes first in a round
        self._turns = 0

    def deficit(self, tenant: str) -> float:
        """What this tenant may spend before it waits for a round."""
        return self._deficit.get(tenant, 0.0)

    def order(self, costs: Mapping[str, Sequence[float]], most: int) -> Iterator[str]:
        """The tenants of the next `most` choices, one per choice. `costs`: each tenant's waiting choices in its order.

        Nothing is paid: `charge` those that start.
        """
        self._active(costs)
        spent = dict.fromkeys(costs, 0.0)
        taken = dict.fromkeys(costs, 0)
        heap = [(self._rounds(t, c[0]), self._served.get(t, 0), t) for t, c in costs.items() if c]
        heapq.heapify(heap)
        for turn in range(self._turns + 1, self._turns + 1 + most):
            if not heap:
                return
            tenant = heap[0][2]
            queue = costs[tenant]
            spent[tenant] += queue[taken[tenant]]
            taken[tenant] += 1
            if taken[tenant] < len(queue):
                rounds = self._rounds(tenant, spent[tenant] + queue[taken[tenant]])
                heapq.heapreplace(heap, (rounds, turn, tenant))
            else:
                heapq.heappop(heap)
            yield tenant

    def charge(self, tenant: str, cost: float) -> None:
        """This tenant's choice starts: rounds pass until it can pay, for all who wait."""
        rounds = self._rounds(tenant, cost)
        earned = rounds * self.quantum
        for other, next_cost in self._next.items():
            if other != tenant and earned:
                # Who could pay long ago but does not start (its KV does not fit) saves no more than one choice's cost.
                deficit = self._deficit[other]
                self._deficit[other] = max(deficit, min(deficit + earned, next_cost + earned))
        self._deficit[tenant] = self._deficit.get(tenant, 0.0) + earned - cost
        self._turns += 1
        self._served[tenant] = self._turns

    def _rounds(self, tenant: str, cost: float) -> int:
        return max(0, math.ceil((cost - self._deficit.get(tenant, 0.0)) / self.quantum))

    def _active(self, costs: Mapping[str, Sequence[float]]) -> None:
        for gone in [t for t in self._deficit if t not in costs]:
            del self._deficit[gone]
            self._served.pop(gone, None)
        self._next = {tenant: queue[0] if queue else 0.0 for tenant, queue in costs.items()}
        for tenant in costs:
            self._deficit.setdefault(tenant, 0.0)
