"""`v4mesh explain`: what it asks, the picture it draws, and what it says when it cannot."""

import json
from pathlib import Path

import pytest

from meshkit.cli import main
from meshkit.cli.explain import WHY, picture
from scheduler_svc.core import explain as words

RANK = {  # as the gateway answers; the test on the real mesh holds the two together
    "group": "w0",
    "rank": 1,
    "pages": {"asked": 4, "present": 3, "servable": 2, "idle": 9},
    "why": "tail_evicted",
    "first_missing": 3,
    "missing_classes": ["C4"],
    "tier": "L2",
    "start": {"action": "tail", "token": 512},
}


def test_the_picture_says_why_and_what_is_computed():
    text = picture({"tokens": 1100, "ranks": [RANK]})
    assert "1100 tokens: 4 pages" in text and "w0 rank 1: 3 of 4 pages present, 2 servable" in text
    assert WHY["tail_evicted"] in text and "computes 588 of 1100 tokens" in text
    assert "first missing: page 3, without C4, to be loaded from L2" in text
    hit = picture({"tokens": 513, "ranks": [{**RANK, "why": "hit", "first_missing": None, "tier": None}]})
    assert "first missing" not in hit and WHY["hit"] in hit
    short = {**RANK, "pages": dict.fromkeys(RANK["pages"], 0), "why": "hit", "first_missing": None}
    assert "no full page to share" in picture({"tokens": 9, "ranks": [short]})
    two = picture({"tokens": 513, "ranks": [{**RANK, "instance": 0}, {**RANK, "instance": 1}]})
    assert f"\ninstance 1, {RANK['group']} rank {RANK['rank']}: " in two and "instance" not in text
    assert "no worker serves" in picture({"tokens": 1, "ranks": []})


def test_every_reason_of_the_scheduler_has_its_sentence():
    source = Path(words.__file__).read_text("utf-8")
    (line,) = [row for row in source.splitlines() if row.strip().startswith("why: str")]
    assert line.split("#")[1].replace(" ", "").split(",") == list(WHY)


@pytest.mark.parametrize(
    ("args", "body"),
    [
        (["hello"], {"messages": [{"role": "user", "content": "hello"}]}),
        (["hello", "--raw", "--salt", "s"], {"prompt": "hello", "cache_salt": "s"}),
        (["--request", "FILE"], {"messages": [], "temperature": 1}),
    ],
)
def test_the_question_is_the_request(server, tmp_path, capsys, args, body):
    server.answer = {"tokens": 300, "ranks": [RANK]}
    (tmp_path / "r.json").write_text(json.dumps(body))
    args = [str(tmp_path / "r.json") if arg == "FILE" else arg for arg in args]
    assert main.main(["explain", *args, "--url", server.url, "--json"]) == 0
    assert server.bodies == [body]
    assert json.loads(capsys.readouterr().out)["ranks"] == [RANK]


def test_what_cannot_be_asked_is_said(server, tmp_path, capsys):
    (tmp_path / "r.json").write_text("[1]")
    assert main.main(["explain"]) == 2
    assert main.main(["explain", "--request", str(tmp_path / "r.json")]) == 2
    assert main.main(["explain", "--request", str(tmp_path / "none.json")]) == 2
    server.status = 400
    assert main.main(["explain", "x", "--url", server.url]) == 8
    assert main.main(["explain", "x", "--url", "http://127.0.0.1:9"]) == 8
    errors = capsys.readouterr().err
    assert "give TEXT, or --request FILE" in errors and "queue is full" in errors and "v4mesh up" in errors
