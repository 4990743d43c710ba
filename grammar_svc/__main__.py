"""`python -m grammar_svc --listen unix:... --model FOLDER`: config, vocabulary, compile processes, servicer, serve."""

import asyncio
import functools
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from grammar_svc.config import GrammarConfig
from meshkit.build import build_id
from meshkit.command import service_main
from meshkit.config import Loaded
from meshkit.health import Health
from meshkit.obs import Metrics, setup_logging
from meshkit.server import Serving, run, serve


async def _serve(config: GrammarConfig) -> int:
    # Slow to import (the compiler loads torch): after flags and config have been found good.
    from grammar_svc import compiler
    from grammar_svc.attach import Attachments, Host
    from grammar_svc.children import Children
    from grammar_svc.engine import Facts
    from grammar_svc.grammars import Grammars
    from grammar_svc.ring import remove_stale
    from grammar_svc.servicer import NAME, GrammarServicer
    from grammar_svc.vocabulary import read_vocabulary

    health, metrics = Health(), Metrics()
    metrics.listen(config.metrics_port)
    model, ring_dir = Path(config.model), Path(config.ring_dir)
    remove_stale(ring_dir)
    vocabulary = read_vocabulary(model, vocab_size=config.vocab_size)
    children = Children(model, config.child_limits(), vocab_size=vocabulary.size, eos_ids=vocabulary.eos_ids)
    info = compiler.tokenizer_info(vocabulary)
    grammars = Grammars(
        children,
        functools.partial(compiler.load, info=info),
        compiler.revision(vocabulary),
        max_bytes=config.cache_bytes,
        max_queued=config.queue,
        max_queued_tenant=config.queue_tenant,
        limits=config.source_limits(),
    )
    facts = Facts(
        vocab_size=vocabulary.size,
        words=vocabulary.words,
        eos_ids=vocabulary.eos_ids,
        think_end=vocabulary.think_end,
    )
    attachments = Attachments(
        Host(
            grammars=grammars,
            facts=facts,
            matchers=compiler.MATCHERS,
            boot=secrets.randbits(64) | 1,
            build=build_id(),
            ring_dir=ring_dir,
            ring_bytes=config.ring_bytes,
            counted=metrics.counter("v4mesh_mask_events_total", "What mask streams counted", event=None),
        )
    )
    servicer = GrammarServicer(grammars, attachments, metrics)
    serving = Serving(
        listen=config.listen,
        insecure=config.insecure,
        reflection=(NAME,) if config.reflection else (),
        drain_s=config.drain_s,
    )

    async def work() -> None:
        await children.start()
        await health.set_ready(True)
        sizes = metrics.gauge("v4mesh_grammar_cache_bytes", "Bytes of compiled grammars kept")
        while True:
            sizes.put(grammars.bytes)
            await asyncio.sleep(1.0)

    async def finish() -> None:
        servicer.drain()
        try:
            await grammars.idle()
        finally:
            attachments.farewell("the grammar service is shutting down")

    try:
        return await serve(serving, health, servicer.add_to, work=work, finish=finish)
    finally:
        await grammars.stop()
        await children.stop()


def _start(loaded: Loaded[GrammarConfig]) -> int:
    setup_logging("grammar", fmt=loaded.value.log_format, level=loaded.value.log_level)
    return run(_serve(loaded.value))


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    return service_main(GrammarConfig, "grammar", _start, argv)


if __name__ == "__main__":
    sys.exit(main())
