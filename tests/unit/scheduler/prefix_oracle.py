"""A brute-force prefix index: one pool, plain dicts, no shortcuts. What the arrays do is compared with this."""

from dataclasses import dataclass, field

from scheduler_svc.core.tails import Reason

BRANCH, INTERVAL = int(Reason.BRANCH), int(Reason.INTERVAL)


def key_of(path, words=1 << 62):
    """A 16-byte key per path; few low words make keys collide in the map."""
    h = hash((4, *path)) & ((1 << 62) - 1)
    return (h % words).to_bytes(8, "little") + h.to_bytes(8, "little")


@dataclass
class Node:
    path: tuple
    page: int
    gen: int
    used: int = 0
    refs: int = 0
    tail: int = -1
    branch: bool = False
    lower: int = 0


@dataclass
class Tail:
    path: tuple
    reasons: int
    used: int
    refs: int = 0


@dataclass
class Oracle:
    nodes: dict = field(default_factory=dict)
    tails: dict = field(default_factory=dict)
    protected: int = 0

    def children(self, path):
        return [n for n in self.nodes.values() if len(n.path) == len(path) + 1 and n.path[: len(path)] == path]

    def prefix(self, path):
        n = 0
        while n < len(path) and path[: n + 1] in self.nodes:
            n += 1
        return n

    def servable(self, path):
        for n in range(self.prefix(path), 0, -1):
            if self.nodes[path[:n]].tail >= 0:
                return n
        return 0

    def acquire(self, path, now):
        for n in range(1, len(path) + 1):
            self.nodes[path[:n]].refs += 1
            self.nodes[path[:n]].used = now

    def release(self, path, now):
        for n in range(1, len(path) + 1):
            self.nodes[path[:n]].refs -= 1
            self.nodes[path[:n]].used = now
            assert self.nodes[path[:n]].refs >= 0

    def publish(self, path, page, gen, now):
        """One page; True if its own was published."""
        fresh = path not in self.nodes
        if fresh:
            assert len(path) == 1 or path[:-1] in self.nodes
            self.nodes[path] = Node(path, page, gen)
            if len(path) > 1 and len(self.children(path[:-1])) == 2:
                parent = self.nodes[path[:-1]]
                parent.branch = True
                if parent.tail >= 0:
                    self.tails[parent.tail].reasons |= BRANCH
        self.nodes[path].refs += 1
        self.nodes[path].used = now
        return fresh

    def attach(self, tail, path, reasons, now):
        node = self.nodes[path]
        if node.tail >= 0:
            self.tails[node.tail].reasons |= reasons
            self.tails[node.tail].used = now
            return False
        node.tail = tail
        self.tails[tail] = Tail(path, reasons | (BRANCH if node.branch else 0), now)
        return True

    def evictable(self):
        return [n for n in self.nodes.values() if not n.refs and not self.children(n.path)]

    def evict_page(self, page):
        """The real index chose this page: it must be one of the oldest leaves. Returns the tail that went with it."""
        leaves = self.evictable()
        node = next(n for n in leaves if n.page == page)
        assert node.used == min(n.used for n in leaves)
        del self.nodes[node.path]
        if node.tail >= 0:
            assert not self.tails.pop(node.tail).refs
        return node.tail

    def tail_class(self, tail):
        if tail.reasons == INTERVAL:
            return 0
        if tail.reasons & BRANCH:
            return 3 if sum(t.reasons & BRANCH > 0 for t in self.tails.values()) <= self.protected else 2
        later = any(len(o.path) > len(tail.path) and o.path[: len(tail.path)] == tail.path for o in self.tails.values())
        return 1 if later else 2

    def evict_tail(self, wanted_for):
        """The number of the tail that goes first; -1 if none may."""
        rank = {n: (self.tail_class(t), t.used, n) for n, t in self.tails.items() if not t.refs}
        if wanted_for == INTERVAL:
            rank = {n: r for n, r in rank.items() if r[0] == 0}
        if not rank:
            return -1
        number = min(rank, key=rank.get)
        self.nodes[self.tails.pop(number).path].tail = -1
        return number
