"""`python -m scheduler_svc --listen unix:...`: config, logs, metrics, traces, core, servicer, serve.

With --standby a second process of the same command line waits, imported and ready, for the first one's end.
"""

import sys
from collections.abc import Sequence

from meshkit.address import parse_address
from meshkit.build import build_id
from meshkit.command import service_main
from meshkit.config import Loaded
from meshkit.exit_codes import Exit
from meshkit.health import Health
from meshkit.obs import Metrics, setup_logging, start_tracing
from meshkit.server import Serving, run, serve
from meshkit.standby import Place, beating, take_over, until_taken
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.loop import SchedulerLoop
from scheduler_svc.servicer import NAME, SchedulerServicer


async def _serve(config: SchedulerConfig) -> int:
    address = parse_address(config.listen)
    if not config.standby or address.path is None:
        return await _work(config)
    place = Place(address.path)
    try:
        if not place.take():
            ended = await take_over(address, until_taken(place), metrics_port=config.metrics_port)
            if isinstance(ended, Exit):
                return int(ended)
        return await _work(config, place)
    finally:
        place.leave()


async def _work(config: SchedulerConfig, place: Place | None = None) -> int:
    health, metrics, tracing = Health(), Metrics(), start_tracing("scheduler")
    metrics.listen(config.metrics_port)
    loop = SchedulerLoop(
        config.limits(build_id()),
        health,
        metrics,
        tracing,
        config.grammar,
        hand_over=config.hand_over or config.standby,
    )
    serving = Serving(
        listen=config.listen,
        insecure=config.insecure,
        reflection=(NAME,) if config.reflection else (),
        drain_s=config.drain_s,
    )
    try:
        async with beating(place):
            return await serve(serving, health, SchedulerServicer(loop).add_to, work=loop.run, finish=loop.finish)
    finally:
        metrics.close()
        tracing.shutdown()


def _start(loaded: Loaded[SchedulerConfig]) -> int:
    setup_logging("scheduler", fmt=loaded.value.log_format, level=loaded.value.log_level)
    return run(_serve(loaded.value))


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    return service_main(SchedulerConfig, "scheduler", _start, argv)


if __name__ == "__main__":
    sys.exit(main())
