"""Prompts to token ids without holding up the event loop.

Short texts are encoded at once; longer ones in a few threads, with a bounded number waiting. Jobs of prompts to be
served end at the context, so that no more is encoded than could be used.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from gateway.errors import ApiError, context_exceeded, invalid
from gateway.text.chat_messages import ChatError
from gateway.text.tokenizer import PromptTooLong

INLINE_CHARS = 2_048
_WAITING_PER_THREAD = 64

T = TypeVar("T")


class PromptEncoder:
    """Runs encoding jobs; `close` ends its threads."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="encode")
        self._most = threads * _WAITING_PER_THREAD
        self._waiting = 0

    async def run(self, chars: int, param: str, job: Callable[[], T]) -> T:
        """Result of `job`, which encodes about `chars` characters; its complaints become 400s about `param`."""
        try:
            if chars <= INLINE_CHARS:
                return job()
            if self._waiting >= self._most:
                raise ApiError(429, "too many long prompts wait to be encoded", code="queue_full", retry_after_s=1)
            self._waiting += 1
            try:
                return await asyncio.get_running_loop().run_in_executor(self._pool, job)
            finally:
                self._waiting -= 1
        except PromptTooLong as error:
            raise context_exceeded(error.at_least, error.limit + 1, param, counted=False) from None
        except ChatError as error:
            raise invalid(error.param, error.message) from None

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
