"""From a config to a simulated worker: vocabulary from the model folder, pools as one H200 would have for Flash.

Needs config.json and, for text that reads as text, tokenizer.json. The sizes of a page, slot and tail are Flash's.
"""

import json
import logging
from pathlib import Path
from typing import Final

from meshkit.errors import MemoryShort
from meshkit.models import resolve_model, served_name
from meshkit.types import PAGE_TOKENS, ModelInfo
from meshkit.vocab import unsampleable_ids
from worker_svc.checkpoint.config import V4Config
from worker_svc.config import WorkerConfig
from worker_svc.core.table import PoolConfig
from worker_svc.loaded import Loaded
from worker_svc.sim.cost import FlashOnH200
from worker_svc.sim.executor import SimExecutor, Waiting
from worker_svc.sim.state import SlotArrays

PAGE_BYTES: Final = 998_208  # all layers of Flash, FP8 rows
TAIL_BYTES: Final = 3_700_000
SLOT_BYTES: Final = 17_000_000  # window rings of 192 rows and compressor states
KV_BYTES: Final = 64 << 30  # of the 141 GB of an H200 whose share of the weights leaves so much
SLOTS: Final = 256
STEP_TOKENS: Final = 8192
CONTEXT: Final = 1 << 20

log = logging.getLogger(__name__)


def load(config: WorkerConfig) -> Loaded:
    """Takes no time worth mentioning. Raises StartError and CheckpointError classes."""
    folder = resolve_model(config.model)
    pools = pool_sizes(config)
    info = _info(folder, config, pools.pages * PAGE_TOKENS)
    slots = SlotArrays(
        pools.slots, pools.tails, plain_ids(folder, info.vocab_size), info.eos_ids[0], _chance(config.sim_tokens)
    )
    cost = FlashOnH200(efficiency=config.sim_efficiency, gpus=config.sim_gpus, step_ms=config.sim_step_ms)
    waiting = Waiting(spin=config.sim_spin, threaded=config.sim_spin)
    log.info(
        "simulating %s: %d slots, %d pages of 256 tokens, %d tails", info.name, pools.slots, pools.pages, pools.tails
    )
    return Loaded(SimExecutor(info, slots, cost, waiting), info, pools)


def pool_sizes(config: WorkerConfig) -> PoolConfig:
    """What fits into the KV memory of the simulated GPU, by the config or by default."""
    slots = config.slots or SLOTS
    tails = config.tails or 4 * slots
    budget = (config.kv_memory or KV_BYTES) - slots * SLOT_BYTES - tails * TAIL_BYTES
    pages = config.pages or budget // PAGE_BYTES
    if pages < 2:
        raise MemoryShort(
            f"{slots} slots and {tails} tails of Flash leave {budget / 1e9:.2f} GB for pages: "
            "fewer slots or tails, or a larger kv_memory"
        )
    step_tokens = config.max_step_tokens or STEP_TOKENS
    return PoolConfig(slots=slots, pages=pages, tails=tails, max_step_tokens=step_tokens, max_verify=1)


def _info(folder: Path, config: WorkerConfig, room: int) -> ModelInfo:
    v4 = V4Config.load(folder)
    return ModelInfo(
        name=config.served_model_name or served_name(folder),
        revision="simulated",
        vocab_size=v4.vocab_size,
        max_context=min(CONTEXT, room),
        eos_ids=(v4.eos_token_id,),
        kv_layout_id="simulated",
    )


def plain_ids(folder: Path, vocab_size: int) -> list[int]:
    """Ids of ordinary text; without a tokenizer all but the first few, which are markers in DeepSeek's vocabularies."""
    file = folder / "tokenizer.json"
    if not file.exists():
        return list(range(3, vocab_size))
    masked = set(unsampleable_ids(folder, vocab_size))
    masked |= {int(entry["id"]) for entry in json.loads(file.read_bytes()).get("added_tokens", [])}
    return [i for i in range(vocab_size) if i not in masked]


def _chance(tokens: int) -> float:
    """Of EOS at each position, for answers of so many tokens on average; 0: answers end at max_tokens."""
    return 1 / tokens if tokens else 0.0
