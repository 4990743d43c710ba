"""The text: seeded, rendered by the gateway's encoder, supervised where the assistant speaks, packed at 128."""

import random

import numpy as np
import pytest

from gateway.text.chat_encoding import CONSTANTS
from tools.nano import lookups, structured, sums
from tools.nano.batch import BLOCK, Packer, empty_rows, place
from tools.nano.corpus import MIXTURE, Corpus, Sources
from tools.nano.document import Document, Exchange, tokenize
from tools.nano.tokenizer_training import _FIRST


@pytest.mark.parametrize("kind", [kind for kind, _ in MIXTURE])
def test_a_seed_makes_one_text(kind, tokenizer):
    first, second = (tokenize(Corpus(Sources.load(None), 5).draw_kind(kind), tokenizer) for _ in range(2))
    assert first.ids.tolist() == second.ids.tolist()
    assert kind == "prose" or first.answers


def test_answers_are_what_the_assistant_writes(tokenizer):
    document = Document(kind="x", exchanges=[Exchange("Hi", "Hello!"), Exchange("2 + 3?", "5.")])
    found = tokenize(document, tokenizer)
    said = [tokenizer.decode(found.ids[begin:end].tolist(), skip_special_tokens=False) for begin, end in found.answers]
    assert said == ["Hello!<｜end▁of▁sentence｜>", "5.<｜end▁of▁sentence｜>"]
    assert (found.weights == 1).sum() == sum(end - begin for begin, end in found.answers)


def test_thinking_answers_begin_with_reasoning_behind_the_effort_text(tokenizer):
    exchange = Exchange("What is 7 + 5?", "7 + 5 = 12.", "7 + 5 = 12. So it is 12.")
    found = tokenize(Document(kind="x", exchanges=[exchange], thinking=True, effort="high"), tokenizer)
    text = tokenizer.decode(found.ids.tolist(), skip_special_tokens=False)
    assert CONSTANTS["effort_1"] in text
    assert text.endswith("<think>7 + 5 = 12. So it is 12.</think>7 + 5 = 12.<｜end▁of▁sentence｜>")


def test_a_tool_document_calls_and_reports(tokenizer):
    document = structured.unseen_tool(random.Random(1))
    text = tokenizer.decode(tokenize(document, tokenizer).ids.tolist(), skip_special_tokens=False)
    assert f'<｜DSML｜invoke name="{document.exchanges[0].calls[0][0]}">' in text
    assert "<tool_result>ok</tool_result>" in text


def test_sources_point_at_what_an_answer_repeats(tokenizer):
    found = tokenize(lookups.pairs(random.Random(2), lookups.CODES, 12, 4), tokenizer)
    sources = dict(found.sources())
    assert len(sources) > 20
    assert all(found.ids[place] == found.ids[source] for place, source in sources.items())


@pytest.mark.parametrize("seed", range(20))
def test_sums_are_right_and_so_is_their_working(seed):
    exchange = sums.plus(random.Random(seed), 999)
    left, right = exchange.answer.rstrip(".").split(" = ")
    assert sum(int(part) for part in left.split(" + ")) == int(right)
    for step in exchange.reasoning.split(". So")[0].split(", "):
        terms, total = step.split(" = ")
        assert sum(int(term) for term in terms.split(" + ")) == int(total)


def test_rows_hold_whole_documents_from_multiples_of_128(tokenizer):
    corpus = Corpus(Sources.load(None), 3)
    rows = Packer(lambda: tokenize(corpus.draw(0.1), tokenizer), 1024).rows(3)
    bos = tokenizer.id_of("<｜begin▁of▁sentence｜>")
    places = np.argwhere(rows.ids == bos)
    starts = places[places[:, 1] % BLOCK == 0]
    assert len(starts) == sum(int(row.max()) + 1 for row in rows.document)
    assert not rows.weights[starts[:, 0], starts[:, 1]].any()


def test_a_source_becomes_the_entry_that_holds_it(tokenizer):
    found = tokenize(lookups.pairs(random.Random(2), lookups.CODES, 12, 1), tokenizer)
    rows = empty_rows(1, 512)
    place(rows, 0, 1, 0, found)
    at, source = found.sources()[0]
    assert rows.source[0, BLOCK + at - 1] == (BLOCK + source) // 4


def test_markers_have_the_first_ids_and_digits_stay_alone(tokenizer):
    assert [tokenizer.id_of(token) for token in _FIRST] == list(range(len(_FIRST)))
    assert len(tokenizer.encode("2026")) == 4
    for token in ("<｜latest_reminder｜>", "<｜title｜>", "<｜fim▁hole｜>"):
        assert tokenizer.id_of(token) is not None
