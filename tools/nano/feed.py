"""Batches from generator processes: text is made while the GPU computes, so no document is seen twice."""

from __future__ import annotations

import multiprocessing
import queue
import signal
from pathlib import Path
from typing import Any

from gateway.text.tokenizer import Tokenizer
from tools.nano.batch import PackedRows, Packer
from tools.nano.corpus import Corpus, Sources
from tools.nano.document import tokenize

FIRST_SEED = 100
_WAITING_BATCHES = 24


class Feed:
    """`processes` generators with seeds from FIRST_SEED on. Start before CUDA is touched: they are forked."""

    def __init__(
        self, text: Path | None, tokenizer: Path, *, rows: int, length: int, processes: int, seed: int
    ) -> None:
        context = multiprocessing.get_context("fork")
        self._queue: Any = context.Queue(maxsize=_WAITING_BATCHES)
        self.level: Any = context.Value("d", 0.0)
        sources = Sources.load(text)
        self._processes = [
            context.Process(
                target=_generate,
                args=(sources, tokenizer, self._queue, self.level, rows, length, seed + number),
                daemon=True,
            )
            for number in range(processes)
        ]
        for process in self._processes:
            process.start()

    def next(self) -> PackedRows:
        """The next batch, from whichever process has one."""
        while True:
            try:
                rows: PackedRows = self._queue.get(timeout=30)
                return rows
            except queue.Empty:
                if not any(process.is_alive() for process in self._processes):
                    raise RuntimeError("all text generators have died; their error stands above") from None

    def waiting(self) -> int:
        """Batches made and not yet taken."""
        return int(self._queue.qsize())

    def stop(self) -> None:
        """End the generators."""
        for process in self._processes:
            process.terminate()
            process.join()
        self._queue.cancel_join_thread()
        self._queue.close()


def _generate(sources: Sources, folder: Path, batches: Any, level: Any, rows: int, length: int, seed: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tokenizer, corpus = Tokenizer.load(folder), Corpus(sources, seed)
    packer = Packer(lambda: tokenize(corpus.draw(level.value), tokenizer), length)
    while True:
        batches.put(packer.rows(rows))
