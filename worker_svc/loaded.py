"""What loading a backend comes to: an executor that is ready, what it serves, and the pools to announce."""

from dataclasses import dataclass

from meshkit.types import ModelInfo
from worker_svc.core.table import PoolConfig
from worker_svc.core.work import Executor


@dataclass(frozen=True, slots=True)
class Loaded:
    """A warm executor with its model and pool sizes."""

    executor: Executor
    info: ModelInfo
    pools: PoolConfig
