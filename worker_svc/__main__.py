"""`python -m worker_svc --scheduler unix:...`: config, logs, metrics, compute thread, health, load, warm up, attach."""

import logging
import os
import sys
from collections.abc import Sequence

from meshkit.command import service_main
from meshkit.config import Loaded
from meshkit.health import Health
from meshkit.obs import Metrics, setup_logging, start_tracing
from meshkit.server import Serving, run, serve
from worker_svc.compute import ComputeThread
from worker_svc.config import WorkerConfig
from worker_svc.servicer import WorkerProcess


async def _serve(config: WorkerConfig) -> int:
    health, metrics, compute = Health(), Metrics(), ComputeThread()
    metrics.listen(config.metrics_port)
    tracing = start_tracing("worker")
    process = WorkerProcess(config, health, metrics, compute, tracing)
    serving = Serving(listen=config.health_address, insecure=config.insecure, drain_s=5.0, grace_s=0.5)
    try:
        status = await serve(serving, health, lambda server: None, work=process.run, finish=process.finish)
    finally:
        tracing.shutdown()
        idle = compute.stop()
    if not idle:  # inside a load or a long step: the interpreter cannot be unwound under running native code
        logging.shutdown()
        os._exit(status)
    return status


def _start(loaded: Loaded[WorkerConfig]) -> int:
    setup_logging("worker", fmt=loaded.value.log_format, level=loaded.value.log_level)
    return run(_serve(loaded.value))


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    return service_main(WorkerConfig, "worker", _start, argv)


if __name__ == "__main__":
    sys.exit(main())
