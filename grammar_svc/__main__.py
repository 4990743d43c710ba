"""`python -m grammar_svc --listen unix:... --model FOLDER`: config, vocabulary, compile processes, servicer, serve."""

import asyncio
import logging
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from grammar_svc.config import GrammarConfig
from meshkit.address import parse_address
from meshkit.build import build_id
from meshkit.command import service_main
from meshkit.config import Loaded
from meshkit.exit_codes import Exit
from meshkit.health import Health
from meshkit.obs import Metrics, setup_logging, start_tracing
from meshkit.server import Serving, run, serve
from meshkit.standby import Place, beating, take_over, until_served, until_taken

if TYPE_CHECKING:
    from grammar_svc.children import Children
    from grammar_svc.grammars import Grammars
    from grammar_svc.vocabulary import Vocabulary

OTHERS_AFTER_S: Final = 1.0  # one compile process is enough to begin with; importing in others would delay first work
FOLLOW_S: Final = 0.5  # between two looks of a standby at what was compiled meanwhile

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Parts:
    """What takes seconds to have: a standby has it before it serves."""

    vocabulary: "Vocabulary"
    children: "Children"
    grammars: "Grammars"


def _prepare(config: GrammarConfig, place: Place | None) -> _Parts:
    # Slow to import (the compiler loads torch): after flags and config have been found good. All of it here: a standby
    # that takes over has no time for it.
    from grammar_svc import attach, compiler, servicer  # noqa: F401
    from grammar_svc.children import Children
    from grammar_svc.grammars import Grammars
    from grammar_svc.kept import Kept
    from grammar_svc.vocabulary import read_vocabulary

    vocabulary = read_vocabulary(Path(config.model), vocab_size=config.vocab_size)
    children = Children(
        Path(config.model),
        config.child_limits(),
        vocab_size=vocabulary.size,
        eos_ids=vocabulary.eos_ids,
        whitespace=config.json_whitespace,
    )
    grammars = Grammars(
        children,
        compiler.Builder(compiler.tokenizer_info(vocabulary), vocabulary, config.json_whitespace),
        compiler.revision(vocabulary, config.json_whitespace),
        max_bytes=config.cache_bytes,
        kept=Kept(None if place is None else place.beside("grammars")),
        max_queued=config.queue,
        max_queued_tenant=config.queue_tenant,
        limits=config.source_limits(),
    )
    return _Parts(vocabulary, children, grammars)


async def _serve(config: GrammarConfig) -> int:
    """Serve, or stand by for the process that serves here and take over when it ends."""
    address = parse_address(config.listen)
    place = Place(address.path) if address.path else None
    if place is None or place.take():
        return await _work(config, _prepare(config, place), place)
    parts = await take_over(address, _stand_by(config, place), metrics_port=config.metrics_port)
    if isinstance(parts, Exit):
        return int(parts)
    return await _work(config, parts, place)


async def _stand_by(config: GrammarConfig, place: Place) -> _Parts:
    if await until_served(place):
        return _prepare(config, place)
    parts = _prepare(config, place)
    try:
        await parts.children.start(1)
        await parts.grammars.preload()
        log.info("warm")
        loading = asyncio.create_task(_follow(parts.grammars))
        try:
            await until_taken(place)
        finally:
            loading.cancel()
    except BaseException:
        await parts.children.stop()
        raise
    return parts


async def _follow(grammars: "Grammars") -> None:
    """Have what the serving process has compiled."""
    while True:
        await asyncio.sleep(FOLLOW_S)
        await grammars.preload()


async def _work(config: GrammarConfig, parts: _Parts, place: Place | None) -> int:
    from grammar_svc import compiler
    from grammar_svc.attach import Attachments, Host
    from grammar_svc.engine import Facts
    from grammar_svc.ring import YOUNG_S, remove_stale
    from grammar_svc.servicer import NAME, GrammarServicer

    health, metrics, tracing = Health(), Metrics(), start_tracing("grammar")
    metrics.listen(config.metrics_port)
    ring_dir = Path(config.ring_dir)
    remove_stale(ring_dir)
    vocabulary, children, grammars = parts.vocabulary, parts.children, parts.grammars
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
    servicer = GrammarServicer(grammars, attachments, metrics, tracing)
    serving = Serving(
        listen=config.listen,
        insecure=config.insecure,
        reflection=(NAME,) if config.reflection else (),
        drain_s=config.drain_s,
    )

    async def work() -> None:
        await children.start(1)
        await health.set_ready(True)
        await asyncio.sleep(OTHERS_AFTER_S)
        await children.start()
        if place is not None:
            place.announce()
        sizes = metrics.gauge("v4mesh_grammar_cache_bytes", "Bytes of compiled grammars kept")
        await asyncio.sleep(YOUNG_S)
        remove_stale(ring_dir)  # once more: what a process wrote to until it was killed looked young at our start
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
        async with beating(place):
            try:
                return await serve(serving, health, servicer.add_to, work=work, finish=finish)
            finally:
                metrics.close()
                tracing.shutdown()
                await grammars.stop()
                await children.stop()
    finally:
        if place is not None:
            place.leave()


def _start(loaded: Loaded[GrammarConfig]) -> int:
    setup_logging("grammar", fmt=loaded.value.log_format, level=loaded.value.log_level)
    return run(_serve(loaded.value))


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    return service_main(GrammarConfig, "grammar", _start, argv)


if __name__ == "__main__":
    sys.exit(main())
