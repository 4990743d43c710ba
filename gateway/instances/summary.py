"""What several schedulers say, as one status: sums of those that are attached, and one model that all of them serve."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from meshkit.frames import SchedulerStatus
from meshkit.types import ModelInfo

_SUMS: Final = (
    "running",
    "waiting",
    "pages_total",
    "pages_free",
    "slots_total",
    "slots_free",
    "workers",
    "preemptions",
    "grammar_queue",
)


class Summary:
    """Remembers what it made: the same statuses give the same object, and the same models the same model."""

    def __init__(self) -> None:
        self._seen: tuple[tuple[SchedulerStatus | None, bool], ...] = ()
        self._made: SchedulerStatus | None = None
        self._models: tuple[ModelInfo, ...] = ()
        self._model: ModelInfo | None = None

    def of(self, said: Sequence[tuple[SchedulerStatus | None, bool]]) -> SchedulerStatus | None:
        """(last word, whether attached) of each; None while nobody has said anything."""
        seen = tuple(said)
        if len(seen) != len(self._seen) or any(
            new[0] is not old[0] or new[1] != old[1] for new, old in zip(seen, self._seen, strict=True)
        ):
            self._seen, self._made = seen, self._sum(seen)
        return self._made

    def _sum(self, seen: Sequence[tuple[SchedulerStatus | None, bool]]) -> SchedulerStatus | None:
        words = [status for status, _ in seen if status is not None]
        if not words:
            return None
        here = [status for status, attached in seen if status is not None and attached]
        serving = [status for status in here if status.ready and not status.draining]
        waits = [status.retry_after_ms for status in serving or here or words]
        return SchedulerStatus(
            ready=bool(serving),
            draining=all(status.draining for status in here) if here else all(status.draining for status in words),
            model=self._common_model([status.model for status in (*serving, *words) if status.model is not None]),
            retry_after_ms=min(waits),
            **{name: sum(getattr(status, name) for status in here) for name in _SUMS},
        )

    def _common_model(self, models: list[ModelInfo]) -> ModelInfo | None:
        """The first one, with the context that fits all that serve the same."""
        if not models:
            return None
        same = tuple({id(model): model for model in models if serves_same(models[0], model)}.values())
        if len(same) != len(self._models) or any(a is not b for a, b in zip(same, self._models, strict=True)):
            self._models = same
            self._model = replace(same[0], max_context=min(model.max_context for model in same))
        return self._model


def serves_same(one: ModelInfo, other: ModelInfo) -> bool:
    """Whether a request, its ids and its page keys mean the same to both."""
    return (one.revision, one.vocab_size, one.eos_ids, one.kv_layout_id) == (
        other.revision,
        other.vocab_size,
        other.eos_ids,
        other.kv_layout_id,
    )
