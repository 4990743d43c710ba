"""Publishing: sealed pages under their keys, and tails at the end of them, so that a dump can name them.

A page seals when its last token is booked. In this form pages are published but not shared between requests; the name
is what lets a scheduler that has just started know what a worker holds.
"""

from meshkit.frames import PublishedPage, PublishedTail
from meshkit.pages import ROOT_KEY, namespace_key, next_page_key
from meshkit.types import PAGE_TOKENS
from scheduler_svc.core.request import Phase, Seq, tokens_of
from scheduler_svc.core.state import State, Worker


def seal(st: State, worker: Worker, publishes: list[PublishedPage], publish_tails: list[PublishedTail]) -> None:
    """Publish, in the frame these lists are for, what was booked since the last frame: parents before children."""
    for seq in worker.sealing:
        if seq.worker != worker.name or seq.phase not in (Phase.PREFILL, Phase.DECODE):
            continue
        while seq.chain_open and seq.sealed < seq.length // PAGE_TOKENS:
            page = seq.pages[seq.sealed]
            if page not in worker.published:
                key = key_of(st, seq, seq.sealed)
                if key in worker.by_key:
                    seq.chain_open = False  # a twin is published: this one and what follows stays private
                    break
                worker.gen += 1
                parent = seq.pages[seq.sealed - 1] if seq.sealed else -1
                publishes.append(PublishedPage(page, worker.gen, parent, key))
                worker.published[page] = key
                worker.by_key[key] = page
            seq.sealed += 1
        if seq.base >= 0 and seq.base not in worker.published_tails and 0 < seq.base_pos <= seq.sealed * PAGE_TOKENS:
            page = seq.pages[seq.base_pos // PAGE_TOKENS - 1]
            worker.published_tails[seq.base] = page
            publish_tails.append(PublishedTail(seq.base, page))
    worker.sealing.clear()


def key_of(st: State, seq: Seq, index: int) -> bytes:
    """Key of a choice's page: the prompt's travel with the request, later ones are computed as they seal."""
    prompt_keys = seq.req.page_keys
    if index < len(prompt_keys):
        return prompt_keys[index]
    assert st.model is not None
    namespace = namespace_key(seq.req.tenant, "", st.model.revision, st.model.kv_layout_id)
    while len(prompt_keys) + len(seq.gen_keys) <= index:
        at = len(prompt_keys) + len(seq.gen_keys)
        parent = seq.gen_keys[-1] if seq.gen_keys else prompt_keys[-1] if prompt_keys else ROOT_KEY
        ids = tokens_of(seq, at * PAGE_TOKENS, (at + 1) * PAGE_TOKENS)
        seq.gen_keys.append(next_page_key(parent, ids, namespace))
    return seq.gen_keys[index - len(prompt_keys)]
