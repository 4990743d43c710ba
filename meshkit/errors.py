"""The error tree of the mesh, and the one table that maps it to exit codes, HTTP and gRPC status, both ways.

    MeshError               INTERNAL        exit 1   500 / INTERNAL              a bug of ours
    ├── BadRequest          INVALID                  400 / INVALID_ARGUMENT      the caller's fault
    │   ├── WireError       WIRE                     400 / INVALID_ARGUMENT      a frame breaks its contract
    │   ├── NeverFits       NEVER_FITS               400 / OUT_OF_RANGE          larger than an empty pool
    │   └── BadGrammar      BAD_GRAMMAR              400 / INVALID_ARGUMENT      a schema, regex, ... that cannot work
    ├── Refused             REFUSED                  503 / UNAVAILABLE           not now; `retry_after_ms` may say when
    │   ├── QueueFull       QUEUE_FULL               429 / RESOURCE_EXHAUSTED
    │   ├── NoWorker        NO_WORKER                503 / UNAVAILABLE           nothing attached could run it
    │   ├── Draining        DRAINING                 503 / UNAVAILABLE           this process is going away
    │   └── GrammarLater    GRAMMAR_LATER            503 / UNAVAILABLE           a grammar could not be compiled now
    ├── Fenced              FENCED                   409 / FAILED_PRECONDITION   the caller holds an older name
    │   ├── StaleAttach     STALE_ATTACH             409 / FAILED_PRECONDITION
    │   ├── Superseded      SUPERSEDED               409 / FAILED_PRECONDITION   a higher attempt is known
    │   └── Cancelled       CANCELLED                499 / CANCELLED             a Cancel came first
    ├── Poisoned            POISONED                 500 / ABORTED               was running at two worker crashes
    ├── DeadlineShort       DEADLINE                 504 / DEADLINE_EXCEEDED     no deadline, or too little of it left
    └── StartError          START           exit 1   500 / INTERNAL              cannot work here: ends the process
        ├── ConfigError     KEY             exit 3                               file, environment or flag value
        ├── GpuError        GPU_NONE        exit 4                               GPU or driver (other codes by argument)
        ├── PortError       PORT            exit 5                               an address cannot be listened on
        ├── ModelDirError   MODEL_DIR       exit 6                               the model folder
        ├── PermError       PERM            exit 6                               a file cannot be read
        ├── MemoryShort     MEMORY          exit 7                               does not fit
        └── PeerError       PEER            exit 8                               a peer was not reachable in time

Across gRPC an error travels as status, details (its message) and trailing metadata (its code, retry-after), so that
`QueueFull` raised in the scheduler is `QueueFull` in the gateway. No grpc, no numpy, no log here.
"""

# ruff: noqa: N818 - the names are the codes people read: QueueFull, NoWorker, Draining

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Final

if TYPE_CHECKING:
    from meshkit.frames import SubmitReply  # needs numpy, which a command line that only reports errors does without

CODE_KEY: Final = "v4mesh-code"
RETRY_KEY: Final = "v4mesh-retry-after-ms"


class MeshError(Exception):
    """`message` names the field, the value and the remedy; `retry_after_ms` is 0 when unknown."""

    code: ClassVar[str] = "INTERNAL"
    exit_code: ClassVar[int] = 1
    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str = "", *, retry_after_ms: int = 0) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_ms = retry_after_ms


class BadRequest(MeshError):
    code = "INVALID"
    http_status = 400
    grpc_status = "INVALID_ARGUMENT"


class WireError(BadRequest):
    code = "WIRE"


class NeverFits(BadRequest):
    code = "NEVER_FITS"
    grpc_status = "OUT_OF_RANGE"


class BadGrammar(BadRequest):
    code = "BAD_GRAMMAR"


class Refused(MeshError):
    code = "REFUSED"
    http_status = 503
    grpc_status = "UNAVAILABLE"


class QueueFull(Refused):
    code = "QUEUE_FULL"
    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"


class NoWorker(Refused):
    code = "NO_WORKER"


class Draining(Refused):
    code = "DRAINING"


class GrammarLater(Refused):
    code = "GRAMMAR_LATER"


class Fenced(MeshError):
    code = "FENCED"
    http_status = 409
    grpc_status = "FAILED_PRECONDITION"


class StaleAttach(Fenced):
    code = "STALE_ATTACH"


class Superseded(Fenced):
    code = "SUPERSEDED"


class Cancelled(Fenced):
    code = "CANCELLED"
    http_status = 499
    grpc_status = "CANCELLED"


class Poisoned(MeshError):
    code = "POISONED"
    grpc_status = "ABORTED"


class DeadlineShort(MeshError):
    code = "DEADLINE"
    http_status = 504
    grpc_status = "DEADLINE_EXCEEDED"


class StartError(MeshError):
    code = "START"


class ConfigError(StartError):
    code = "KEY"
    exit_code = 3


class GpuError(StartError):
    code = "GPU_NONE"
    exit_code = 4


class PortError(StartError):
    code = "PORT"
    exit_code = 5


class ModelDirError(StartError):
    code = "MODEL_DIR"
    exit_code = 6


class PermError(StartError):
    code = "PERM"
    exit_code = 6


class MemoryShort(StartError):
    code = "MEMORY"
    exit_code = 7


class PeerError(StartError):
    code = "PEER"
    exit_code = 8


def _tree(root: type[MeshError]) -> Iterator[type[MeshError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


BY_CODE: Final[Mapping[str, type[MeshError]]] = {kind.code: kind for kind in _tree(MeshError)}

# The class for a status that came without a code (a proxy, gRPC itself): the most general one of that status.
_BY_STATUS: Final[Mapping[str, type[MeshError]]] = {
    "INVALID_ARGUMENT": BadRequest,
    "OUT_OF_RANGE": NeverFits,
    "UNAVAILABLE": Refused,
    "RESOURCE_EXHAUSTED": QueueFull,
    "FAILED_PRECONDITION": Fenced,
    "CANCELLED": Cancelled,
    "ABORTED": Poisoned,
    "DEADLINE_EXCEEDED": DeadlineShort,
}

_BY_VERDICT: Final[Mapping[str, type[MeshError]]] = {
    "UNSPECIFIED": MeshError,
    "STALE_ATTACH": StaleAttach,
    "SUPERSEDED": Superseded,
    "CANCELLED": Cancelled,
    "QUEUE_FULL": QueueFull,
    "NEVER_FITS": NeverFits,
    "NO_WORKER": NoWorker,
    "DRAINING": Draining,
    "INVALID": BadRequest,
    "POISONED": Poisoned,
    "BAD_GRAMMAR": BadGrammar,
    "GRAMMAR_LATER": GrammarLater,
}


def to_metadata(error: MeshError) -> tuple[tuple[str, str], ...]:
    """Trailing metadata that lets the other side rebuild the class."""
    pairs: tuple[tuple[str, str], ...] = ((CODE_KEY, error.code),)
    return (*pairs, (RETRY_KEY, str(error.retry_after_ms))) if error.retry_after_ms else pairs


def from_status(status: str, details: str, metadata: Mapping[str, str]) -> MeshError:
    """The error behind a gRPC status name; unknown codes and statuses become their nearest general class."""
    kind = BY_CODE.get(metadata.get(CODE_KEY, "")) or _BY_STATUS.get(status, MeshError)
    retry = metadata.get(RETRY_KEY, "")
    return kind(details, retry_after_ms=int(retry) if retry.isascii() and retry.isdigit() else 0)


def from_verdict(reply: "SubmitReply") -> MeshError | None:
    """The error that a refusal means, None when the request was accepted."""
    if reply.verdict.name == "ACCEPTED":
        return None
    kind = _BY_VERDICT[reply.verdict.name]
    return kind(reply.message or f"the scheduler answered {reply.verdict.name}", retry_after_ms=reply.retry_after_ms)
