"""Incremental decoding: whole characters only, exact bytes, and no dependence on how ids arrive."""

import random

from gateway.text.detokenizer import IncrementalDetokenizer


def test_a_character_of_two_tokens_comes_out_whole(v4):
    stream = IncrementalDetokenizer(v4)
    assert stream.push([28927]) == "" and stream.pending == b"\xf0\x9f\x98"
    assert stream.push([225]) == "😀" and stream.pending == b""
    assert stream.push([619]) == "é"
    assert stream.finish() == ""


def test_an_unfinished_tail_is_dropped_and_a_broken_middle_replaced(v4):
    stream = IncrementalDetokenizer(v4)
    assert stream.push([28927, 28927, 225]) == "\ufffd😀"
    assert stream.push([28927]) == "" and stream.finish() == ""
    assert stream.push([619]) == "é"


def test_special_tokens_are_left_out_on_request(v4):
    assert IncrementalDetokenizer(v4).push([0, 619, 128804, 1]) == "é<｜Assistant｜>"
    whole = IncrementalDetokenizer(v4, skip_special_tokens=False).push([0, 619])
    assert whole == "<｜begin▁of▁sentence｜>é"


def test_equals_decoding_the_whole_however_it_is_cut(pair):
    ours, hf = pair
    rng = random.Random(3)
    for _ in range(150):
        ids = [rng.choice((28927, 225, 244, 7351, 619)) if ours.vocab_size > 2000 and rng.random() < 0.5
               else rng.randrange(ours.vocab_size) for _ in range(rng.randrange(1, 20))]  # fmt: skip
        stream, text, at = IncrementalDetokenizer(ours), "", 0
        while at < len(ids):
            step = rng.randrange(1, 4)
            text += stream.push(ids[at : at + step])
            at += step
        tail = "\ufffd" if stream.pending else ""
        assert text + tail == hf.decode(ids)
        assert text.encode() == text.encode("utf-8", "strict")
