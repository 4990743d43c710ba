"""Compiled grammars in files: found again whole or not at all, bounded, and never a reason to refuse a source."""

import os
from pathlib import Path

import pytest

from grammar_svc.children import Compiled
from grammar_svc.grammars import Grammars
from grammar_svc.kept import Kept
from grammar_svc.sources import Source
from grammar_svc.verdict import Outcome
from meshkit.types import GrammarKind

ONE, TWO, THREE = (bytes([n]) * 16 for n in (1, 2, 3))
SOURCE = Source(GrammarKind.REGEX, "é+")
MADE = Compiled(1234, 56)


async def test_what_was_kept_is_found_by_another_process(tmp_path: Path):
    await Kept(tmp_path / "k").put(ONE, SOURCE, MADE)
    other = Kept(tmp_path / "k")
    assert await other.get(ONE) == (SOURCE, MADE) and await other.changed() == [ONE]
    assert await other.get(TWO) is None
    assert (tmp_path / "k").stat().st_mode & 0o077 == 0
    assert not await other.changed(), "nothing has come or gone"


@pytest.mark.parametrize("keep", [0, 10, 31, 38, -1], ids=str)
async def test_a_torn_or_changed_file_is_not_found(tmp_path: Path, keep: int):
    kept = Kept(tmp_path)
    await kept.put(ONE, SOURCE, MADE)
    file = tmp_path / ONE.hex()
    raw = file.read_bytes()
    file.write_bytes(raw[:keep] if keep >= 0 else raw[:-1] + bytes([raw[-1] ^ 1]))
    assert await kept.get(ONE) is None


async def test_the_longest_unused_goes_first(tmp_path: Path):
    kept = Kept(tmp_path, 2)
    for n, name in enumerate((ONE, TWO)):
        await kept.put(name, SOURCE, MADE)
        os.utime(tmp_path / name.hex(), (n, n))
    assert await kept.get(TWO, used=False) is not None  # only looked at
    assert await kept.get(ONE) is not None  # used now
    await kept.put(THREE, SOURCE, MADE)
    assert [await kept.get(name) is not None for name in (ONE, TWO, THREE)] == [True, False, True]


async def test_a_folder_that_cannot_be_costs_compiles_only(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for kept in (Kept(tmp_path / "file" / "k"), Kept(None)):
        await kept.put(ONE, SOURCE, MADE)
        assert await kept.get(ONE) is None


class Compiler:
    def __init__(self) -> None:
        self.asked = 0

    async def compile(self, source: object) -> Compiled:
        self.asked += 1
        return MADE


def built(source: Source) -> str:
    return f"built {source.text}"


async def compiled(folder: Path, compiler: Compiler, build=built) -> tuple[Grammars, bytes]:
    grammars = Grammars(compiler, build, "rev", max_bytes=1 << 20, kept=Kept(folder))
    verdict = await grammars.compile(GrammarKind.REGEX, "ab+")
    assert verdict.outcome is Outcome.OK
    await grammars.stop()
    return grammars, verdict.grammar_id


async def test_a_successor_builds_without_a_child(tmp_path: Path):
    compiler = Compiler()
    _, first = await compiled(tmp_path, compiler)
    grammars, second = await compiled(tmp_path, compiler)
    assert first == second and compiler.asked == 1
    assert grammars.get(second) == "built ab+"


async def test_a_file_that_the_engine_does_not_take_is_compiled_again(tmp_path: Path):
    compiler = Compiler()
    await compiled(tmp_path, compiler)
    refused = []

    def build(source: Source) -> str:
        if not refused:
            refused.append(source)
            raise RuntimeError("not any more")
        return built(source)

    grammars, grammar_id = await compiled(tmp_path, compiler, build)
    assert compiler.asked == 2 and refused and grammars.get(grammar_id) == "built ab+"


async def test_a_standby_has_what_was_compiled_before_anybody_asks(tmp_path: Path):
    first, second = Compiler(), Compiler()
    _, grammar_id = await compiled(tmp_path, first)
    await Kept(tmp_path).put(ONE, SOURCE, MADE)  # of another revision: its id is not this source's
    (tmp_path / f"{TWO.hex()}.77").write_bytes(b"half a file")
    builds = []

    def build(source: Source) -> str:
        builds.append(source)
        return built(source)

    standby = Grammars(second, build, "rev", max_bytes=1 << 20, kept=Kept(tmp_path))
    for _ in range(2):
        await standby.preload()
    assert standby.get(grammar_id) == "built ab+" and len(standby) == len(builds) == 1
    assert (await standby.compile(GrammarKind.REGEX, "ab+")).cached and not second.asked


async def test_a_standby_goes_on_past_a_file_that_the_engine_does_not_take(tmp_path: Path):
    _, grammar_id = await compiled(tmp_path, Compiler())

    def build(source: Source) -> str:
        raise RuntimeError("not any more")

    standby = Grammars(Compiler(), build, "rev", max_bytes=1 << 20, kept=Kept(tmp_path))
    await standby.preload()
    assert standby.get(grammar_id) is None
