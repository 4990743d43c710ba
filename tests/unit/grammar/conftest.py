"""A small byte vocabulary compiled in this process: token i < 256 is byte i, then EOS, </think>, two longer ones."""

from types import SimpleNamespace

import pytest

from grammar_svc import compiler
from grammar_svc.limits import SourceLimits
from grammar_svc.sources import read_source
from grammar_svc.vocabulary import Vocabulary

EOS, THINK_END = 256, 257
VOCAB = 320


def _byte_spelling():
    """Byte-level BPE's own letters for the 256 bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spelled, extra = {byte: chr(byte) for byte in plain}, 256
    for byte in range(256):
        if byte not in spelled:
            spelled[byte], extra = chr(extra), extra + 1
    return [spelled[byte] for byte in range(256)]


@pytest.fixture(scope="session")
def small():
    tokens = [*_byte_spelling(), "", "", '"}', "true", *[""] * (VOCAB - 260)]
    vocabulary = Vocabulary(tokens=tuple(tokens), eos_ids=(EOS,), think_end=THINK_END, digest="small")
    info = compiler.tokenizer_info(vocabulary)
    made = compiler.compiler(info, vocabulary)

    def compile_(kind, text):
        return compiler.compile_source(made, read_source(kind, text, SourceLimits()))

    return SimpleNamespace(vocabulary=vocabulary, info=info, made=made, compile=compile_, words=vocabulary.words)
