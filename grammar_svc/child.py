"""A compile process: one source at a time from stdin, one answer to stdout, under processor and memory limits.

It tells whether a source compiles within them, and what came of it in bytes; the engine's process then compiles it too.
To write a grammar out and read it again would take up to a hundred times as long as to compile it twice.

It may be killed at any moment; nothing is shared with it but two pipes. A message is a header (JSON) and a body, each
behind its length (u32 little-endian). Limits: RLIMIT_CPU per compile, address space on top of what the imports took,
no core dumps, no new files. Started as `python -m grammar_svc.child`.
"""

import json
import os
import resource
import struct
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

LENGTHS = struct.Struct("<II")


def pack(header: dict[str, Any], body: bytes = b"") -> bytes:
    """One message."""
    head = json.dumps(header).encode()
    return LENGTHS.pack(len(head), len(body)) + head + body


def read(stream: BinaryIO) -> tuple[dict[str, Any], bytes] | None:
    """One message, None at the end of the stream."""
    lengths = stream.read(LENGTHS.size)
    if len(lengths) < LENGTHS.size:
        return None
    head, body = LENGTHS.unpack(lengths)
    return json.loads(stream.read(head)), stream.read(body)


def main() -> int:
    """Serve until stdin ends."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever the compiler prints goes to stderr
    first = read(sys.stdin.buffer)
    if first is None:
        return 0
    setup, _ = first

    from grammar_svc import compiler
    from grammar_svc.sources import Source
    from grammar_svc.vocabulary import read_vocabulary
    from meshkit.types import GrammarKind

    vocabulary = read_vocabulary(Path(setup["model"]), vocab_size=setup["vocab_size"], eos_ids=tuple(setup["eos_ids"]))
    made = compiler.compiler(compiler.tokenizer_info(vocabulary), vocabulary, setup["whitespace"])
    compiler.compile_source(made, Source(GrammarKind.JSON_OBJECT, ""))  # tables that the first compile builds
    _limit(setup["memory_bytes"])
    _send(out, pack({"ready": True, "grammar_rev": compiler.revision(vocabulary, setup["whitespace"])}))
    while (message := read(sys.stdin.buffer)) is not None:
        header, body = message
        _limit_cpu(header["cpu_s"])
        started = time.perf_counter()
        try:
            compiled = compiler.compile_source(made, Source(GrammarKind(header["kind"]), body.decode()))
            spent = round((time.perf_counter() - started) * 1e6)
            answer = pack({"memory": compiled.memory_size_bytes, "us": spent})
        except MemoryError:
            answer = pack({"memory_error": True})
        except compiler.CompileFailed as error:
            text = str(error)
            answer = pack({"memory_error": True} if "bad_alloc" in text else {"error": text[-600:]})
        _send(out, answer)
    return 0


def _send(out: BinaryIO, message: bytes) -> None:
    out.write(message)
    out.flush()


def _limit(memory_bytes: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def _limit_cpu(seconds: float) -> None:
    """The kernel ends this process when the compile has used so much, even if nobody watches any more."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:
        sys.exit(0)  # the service is gone
