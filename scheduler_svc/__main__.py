"""`python -m scheduler_svc --listen unix:...`: config, logs, metrics, traces, core, servicer, serve."""

import sys
from collections.abc import Sequence

from meshkit.build import build_id
from meshkit.command import service_main
from meshkit.config import Loaded
from meshkit.health import Health
from meshkit.obs import Metrics, setup_logging, start_tracing
from meshkit.server import Serving, run, serve
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.loop import SchedulerLoop
from scheduler_svc.servicer import NAME, SchedulerServicer


async def _serve(config: SchedulerConfig) -> int:
    health, metrics, tracing = Health(), Metrics(), start_tracing("scheduler")
    metrics.listen(config.metrics_port)
    loop = SchedulerLoop(config.limits(build_id()), health, metrics, tracing, config.grammar)
    serving = Serving(
        listen=config.listen,
        insecure=config.insecure,
        reflection=(NAME,) if config.reflection else (),
        drain_s=config.drain_s,
    )
    try:
        return await serve(serving, health, SchedulerServicer(loop).add_to, work=loop.run, finish=loop.finish)
    finally:
        tracing.shutdown()


def _start(loaded: Loaded[SchedulerConfig]) -> int:
    setup_logging("scheduler", fmt=loaded.value.log_format, level=loaded.value.log_level)
    return run(_serve(loaded.value))


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    return service_main(SchedulerConfig, "scheduler", _start, argv)


if __name__ == "__main__":
    sys.exit(main())
