"""Making room: what the prefix cache gives up when a pool is short, and telling the worker.

Pages go leaf first and least recently used first, tails by the order of their classes; a page takes its tail with it, a
tail never its page. What is evicted before the worker has heard of its publication is not retired but never published.
"""

from scheduler_svc.core.state import Rank, State, Worker


def make_room(st: State, worker: Worker, rank: Rank, pages: int) -> bool:
    """Evict until so many pages are free; False if the cache cannot give that many (it then gives nothing)."""
    short = pages - len(rank.pages.free)
    if short <= 0:
        return True
    if st.index.idle_pages(rank.pool) < short:
        return False
    evict(st, worker, rank, short)
    return len(rank.pages.free) >= pages


def evict(st: State, worker: Worker, rank: Rank, n: int) -> int:
    """Give up to n idle pages back, with the tails at their ends. Returns how many."""
    pages, tails = st.index.evict_pages(rank.pool, n)
    for page in pages:
        if worker.publishes.pop(page, None) is None:
            worker.retire_pages.append(page)
        rank.pages.forget(page)
    for tail in tails:
        forget_tail(worker, rank, tail)
    if pages:
        st.total("pages_evicted", len(pages))
    return len(pages)


def forget_tail(worker: Worker, rank: Rank, tail: int) -> None:
    """The index has given this tail up."""
    if worker.publish_tails.pop(tail, None) is None:
        worker.retire_tails.append(tail)
    rank.tails.forget(tail)


def take_tail(st: State, worker: Worker, rank: Rank, wanted_for: int) -> int:
    """A free tail, if need be at the cost of a cached one of a class that may give way; -1 if there is none."""
    if not rank.tails.free:
        for tail in st.index.evict_tails(rank.pool, 1, wanted_for):
            forget_tail(worker, rank, tail)
            st.total("tails_evicted")
    return rank.tails.take() if rank.tails.free else -1


def room(st: State, rank: Rank) -> int:
    """Pages that are free or can be made so at once."""
    return len(rank.pages.free) + st.index.idle_pages(rank.pool)


def flush(st: State) -> int:
    """Empty the cache but for what running choices hold. Returns pages given back."""
    return sum(
        evict(st, worker, rank, rank.pages.size)
        for worker in st.workers.values()
        if worker.serving
        for rank in worker.ranks
    )
