"""The tokenizer gives what `tokenizers` gives, stays linear, and refuses files it does not understand."""

import copy
import hashlib
import json
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.text.pretokenizer import TokenizerFileError
from gateway.text.tokenizer import PromptTooLong, Tokenizer

MIXED = [
    "",
    " ",
    "Hello, world! It's 2026; they've paid $1,234.56 (12%).",
    "def f(x):\n    return {'a': [1, 2, 3]}  # ünïcode\n\n\n\tif x:\r\n\t\tpass\r\n",
    "深度求索发布了新模型，今天天气很好。カタカナとひらがな、漢字12345。한국어도 있다",
    "👩‍👩‍👧‍👦🇫🇷😀é̀̂ Z̷̛a̵l̶g̴o ½ Ⅻ ① ٣٤٥ १२३",
    "    \n \n\t \u00a0\u2003\u3000 x  \n\n  y",
    "a" * 300 + "中" * 300 + "1" * 300 + "!" * 300 + " " * 300 + "\n" * 300,
    'https://example.org/~a_b/c?d=e&f=%20#g <div class="x">&amp;</div> \\frac{1}{2} 0x1F 1e-9',
    "<｜User｜>hi<｜Assistant｜><think>x</think>y<｜end▁of▁sentence｜>",
    "<｜place▁holder▁no▁1｜><｜place▁holder▁no▁1<think<think></think>｜DSML｜<｜DSML｜tool_calls>｜｜",
    "\ufeff\u200b\u200d\ufffe\U0010ffff\x00\x7f",
]


def reference(hf, text: str, added_tokens: bool = True) -> list[int]:
    hf.encode_special_tokens = False
    return hf.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("text", MIXED)
def test_equals_reference_on_mixed_text(pair, text):
    ours, hf = pair
    ids = ours.encode(text)
    assert ids == reference(hf, text)
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == hf.decode(ids, skip_special_tokens=skip)


@settings(max_examples=150, deadline=None)
@given(st.text() | st.text("ab \n'1<｜>é中😀\u0301", max_size=60) | st.lists(st.sampled_from(MIXED)).map("".join))
def test_equals_reference_on_any_text(pair, text):
    ours, hf = pair
    assert ours.encode(text) == reference(hf, text)


def test_equals_reference_on_every_character(pair):
    """Also those that newer Unicode editions assign, alone and between letters."""
    ours, hf = pair
    points = [chr(c) for c in (*range(0x3500), *range(0xA000, 0xAC00), *range(0xF900, 0x20000, 3))]
    points = [c for c in points if not 0xD800 <= ord(c) < 0xE000]
    for text in ("".join(points), "a".join(points), " 1".join(points)):
        assert ours.encode(text) == reference(hf, text)


def test_added_tokens_can_be_switched_off(v4, v4_folder):
    import tokenizers

    spec = json.loads((v4_folder / "tokenizer.json").read_text("utf-8"))
    plain = tokenizers.Tokenizer.from_str(json.dumps(spec | {"added_tokens": []}))
    for text in MIXED:
        assert v4.encode(text, added_tokens=False) == plain.encode(text, add_special_tokens=False).ids


def test_any_ids_decode_as_the_reference_does(pair):
    ours, hf = pair
    rng = random.Random(4)
    for _ in range(200):
        ids = [rng.randrange(ours.vocab_size) for _ in range(rng.randrange(12))]
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == hf.decode(ids, skip_special_tokens=skip)


def test_real_file_is_deepseek_v4s(v4, v4_folder):
    digest = hashlib.sha256((v4_folder / "tokenizer.json").read_bytes()).hexdigest()
    assert digest == "8f9f37ca37fdc4f5fd36d5cf4d3b0e8392edb4e894fd10cc0d70b4957c8633cf"
    assert v4.vocab_size == 129280 and len(v4.defined_ids) == 129280
    assert [v4.id_of(t) for t in ("<｜begin▁of▁sentence｜>", "<｜Assistant｜>", "</think>", "｜DSML｜")] == [
        0,
        128804,
        128822,
        128825,
    ]
    assert v4.id_of("no such token") is None
    assert v4.encode("<｜DSML｜tool_calls>") == [30, 128825, 72461, 4941, 12548, 32]
    assert v4.encode("\n\n") == [271]
    assert 0 in v4.special_ids and 128822 not in v4.special_ids


def test_small_vocabulary_has_holes(small):
    assert small.vocab_size == 2000
    for hole in (40, 4000):
        assert small.token_bytes(hole) == b"" and small.token_text(hole) == ""
    assert small.decode([40, 4000, -1]) == ""


def test_token_text_spells_partial_characters_byte_by_byte(v4):
    assert [v4.token_text(i) for i in (28927, 225, 619, 7351)] == [r"\xf0\x9f\x98", r"\x80", "é", r"\x20\xf0\x9f"]
    assert v4.token_bytes(28927) + v4.token_bytes(225) == "😀".encode()


def test_lone_surrogates_count_as_replacement_characters(v4):
    assert v4.encode("a\ud800b") == v4.encode("a\ufffdb")
    assert v4.encode("\ud83d\ude00") == v4.encode("😀")


@pytest.mark.parametrize("char", ["a", " ", "1", "é", "中", "\u0301", "<"])
def test_long_runs_equal_the_reference(pair, char):
    ours, hf = pair
    text = char * 20_000
    assert ours.encode(text) == reference(hf, text)


def test_one_long_word_costs_about_linear_time(v4):
    rng = random.Random(1)
    word = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=200_000))

    def seconds(text: str) -> float:
        started = time.process_time()
        v4.encode(text)
        return time.process_time() - started

    half, whole = min(seconds(word[:100_000]) for _ in range(3)), min(seconds(word) for _ in range(3))
    assert whole / half < 3.5


def test_limit_is_exact_and_refuses_early(v4):
    text = "one two three four"
    count = len(v4.encode(text))
    assert len(v4.encode(text, limit=count)) == count
    with pytest.raises(PromptTooLong) as error:
        v4.encode(text, limit=count - 1)
    assert error.value.limit == count - 1 and error.value.at_least > count - 1
    started = time.process_time()
    with pytest.raises(PromptTooLong):
        v4.encode("word " * 2_000_000, limit=1000)
    assert time.process_time() - started < 0.5


def test_cache_stays_within_its_bound(nano):
    rng = random.Random(2)
    words = ["".join(rng.choices("abcdefgh", k=40)) for _ in range(30_000)]
    before = nano.encode(words[0])
    for word in words:
        nano.encode(word)
    cache = nano._cache
    assert cache._young_bytes <= cache._half
    assert nano.encode(words[0]) == before


def _broken(change):
    def apply(spec):
        change(spec)
        return spec

    return apply


REFUSED = {
    "normalizer": _broken(lambda s: s.update(normalizer={"type": "NFC"})),
    "model type": _broken(lambda s: s["model"].update(type="Unigram")),
    "unk_token": _broken(lambda s: s["model"].update(unk_token="<unk>")),
    "decoder": _broken(lambda s: s.update(decoder={"type": "Metaspace"})),
    "post_processor": _broken(lambda s: s.update(post_processor={"type": "TemplateProcessing"})),
    "add_prefix_space": _broken(lambda s: s["pre_tokenizer"]["pretokenizers"][-1].update(add_prefix_space=True)),
    "last pre_tokenizer": _broken(lambda s: s["pre_tokenizer"]["pretokenizers"].pop()),
    "Whitespace": _broken(lambda s: s["pre_tokenizer"]["pretokenizers"].insert(0, {"type": "Whitespace"})),
    "behavior": _broken(
        lambda s: s["pre_tokenizer"]["pretokenizers"].insert(
            0, {"type": "Split", "pattern": {"String": "x"}, "behavior": "Removed"}
        )
    ),
    "capture groups": _broken(
        lambda s: s["pre_tokenizer"]["pretokenizers"].insert(
            0, {"type": "Split", "pattern": {"Regex": "(a)b"}, "behavior": "Isolated"}
        )
    ),
    "does not compile": _broken(
        lambda s: s["pre_tokenizer"]["pretokenizers"].insert(
            0, {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated"}
        )
    ),
    "rstrip": _broken(lambda s: s["added_tokens"][3].update(rstrip=True)),
    "merge 0": _broken(lambda s: s["model"]["merges"].insert(0, ["nope", "nope"])),
    "byte 0x41": _broken(lambda s: s["model"]["vocab"].pop("A")),
    "'vocab'": _broken(lambda s: s["model"].pop("vocab")),
    "unexpected shape": _broken(lambda s: s["model"]["merges"].insert(0, ["a", "b", "c"])),
    "shape: TypeError": _broken(lambda s: s["model"].update(merges=5)),
}


@pytest.mark.parametrize("word", REFUSED)
def test_unknown_parts_are_refused_by_name(nano_folder, tmp_path, word):
    spec = REFUSED[word](json.loads((nano_folder / "tokenizer.json").read_text("utf-8")))
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(TokenizerFileError, match=word):
        Tokenizer.load(tmp_path)


def test_missing_and_broken_files_are_named(tmp_path):
    with pytest.raises(TokenizerFileError, match="no such file"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerFileError, match="not valid JSON"):
        Tokenizer.load(tmp_path)


def test_ignore_merges_takes_whole_words_from_the_vocabulary(nano_folder):
    spec = json.loads((nano_folder / "tokenizer.json").read_text("utf-8"))
    whole = copy.deepcopy(spec)
    whole["model"]["ignore_merges"] = True
    whole["model"]["vocab"]["Ġxqzxq"] = 1437
    assert Tokenizer(whole).encode(" xqzxq") == [1437]
    assert len(Tokenizer(spec).encode(" xqzxq")) > 1
