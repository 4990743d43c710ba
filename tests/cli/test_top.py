"""`v4mesh top` against made-up expositions, and against nobody."""

import json

import pytest

from meshkit.cli import main
from meshkit.cli.snapshot import compare, read_look
from meshkit.cli.top import picture

INFO = {
    "served_model_name": "v4-nano",
    "version": "1",
    "ready": True,
    "open_requests": 3,
    "scheduler": {
        "workers": 1,
        "running": 2,
        "waiting": 1,
        "preemptions": 4,
        "slots": {"total": 8, "free": 6},
        "pages": {"total": 100, "free": 25},
    },
}


def exposition(tokens, prompt, hits, firsts, fault=0):
    """firsts: (below 10 ms, below 1 s, all)."""
    labels = 'model_name="v4-nano",engine="0"'
    rows = [
        "# TYPE vllm:generation_tokens counter",
        f"vllm:generation_tokens_total{{{labels}}} {tokens}",
        "# TYPE vllm:prompt_tokens counter",
        f"vllm:prompt_tokens_total{{{labels}}} {prompt}",
        "# TYPE vllm:prefix_cache_hits counter",
        f"vllm:prefix_cache_hits_total{{{labels}}} {hits}",
        "# TYPE vllm:request_success counter",
        f'vllm:request_success_total{{{labels},finished_reason="stop"}} 5',
        "# TYPE vllm:time_to_first_token_seconds histogram",
        *(
            f'vllm:time_to_first_token_seconds_bucket{{{labels},le="{bound}"}} {count}'
            for bound, count in zip(("0.01", "1.0", "+Inf"), firsts, strict=True)
        ),
        f"vllm:time_to_first_token_seconds_count{{{labels}}} {firsts[-1]}",
        f"vllm:time_to_first_token_seconds_sum{{{labels}}} 1",
        "# TYPE v4mesh_core_events counter",
        f'v4mesh_core_events_total{{event="gap",fault="1"}} {fault}',
        'v4mesh_core_events_total{event="submits",fault="0"} 9',
    ]
    return "\n".join([*rows, ""])


def test_rates_are_those_between_two_looks():
    before = read_look(exposition(100, 50, 0, (0, 0, 0)), INFO, 10.0)
    now = read_look(exposition(300, 150, 80, (0, 100, 100)), INFO, 12.0)
    shot = compare(now, before)
    assert (shot.output_tokens_per_s, shot.prompt_tokens_per_s, shot.cache_hit_share) == (100.0, 50.0, 0.8)
    assert (shot.running, shot.waiting, shot.slots_used, shot.pages_used) == (2, 1, 2, 75)
    assert shot.first_token.p50 == pytest.approx(0.505) and shot.first_token.p99 == pytest.approx(0.9901)
    assert shot.inter_token.p50 is None
    assert shot.finished == {"stop": 5} and not shot.faults


def test_a_restarted_gateway_starts_over():
    before = read_look(exposition(1000, 0, 0, (5, 5, 5)), INFO, 0.0)
    shot = compare(read_look(exposition(40, 0, 0, (1, 1, 1)), INFO, 2.0), before)
    assert shot.output_tokens_per_s == 20.0 and shot.first_token.p50 == pytest.approx(0.005)


def test_the_picture_fits_a_terminal_and_shows_faults_only_if_there_are_any():
    clean = compare(read_look(exposition(1, 1, 1, (1, 1, 1)), INFO, 1.0), None)
    assert "FAULTS" not in picture(clean, "http://h") and "[######" in picture(clean, "http://h")
    broken = picture(compare(read_look(exposition(1, 1, 1, (1, 1, 1), fault=2), INFO, 1.0), None), "http://h" * 20)
    assert "gap 2" in broken and max(map(len, broken.splitlines())) <= 78


def test_several_instances_have_a_row_each():
    rows = [
        {"address": "unix:/run/v4mesh/a-rather-long-folder/scheduler-0.sock", "attached": True, "open": 2,
         "scheduler": {**INFO["scheduler"], "ready": True, "draining": False}},
        {"address": "127.0.0.1:50052", "attached": False, "open": 0, "scheduler": None},
    ]  # fmt: skip
    one = compare(read_look(exposition(1, 1, 1, (1, 1, 1)), {**INFO, "instances": rows[:1]}, 1.0), None)
    assert "instance" not in picture(one, "http://h")
    shot = compare(read_look(exposition(1, 1, 1, (1, 1, 1)), {**INFO, "instances": rows}, 1.0), None)
    lines = picture(shot, "http://h").splitlines()
    first, second = [line for line in lines if "scheduler-0.sock" in line or "50052" in line]
    assert first.split()[1:] == ["ready", "2", "1", "2/8", "75/100"] and second.split()[1] == "away"
    assert max(map(len, lines)) <= 78


def test_nobody_there_says_what_to_type(capsys):
    assert main.main(["top", "--url", "http://127.0.0.1:9", "--once", "--json"]) == 8
    (error,) = json.loads(capsys.readouterr().out)["errors"]
    assert "127.0.0.1:9" in error["fact"] and "v4mesh up" in error["fix"]


def test_a_missing_key_says_where_it_goes_and_none_stands_on_the_command_line(server, tmp_path, capsys):
    server.wanted_key = "key-of-ann"
    assert main.main(["top", "--url", server.url, "--once"]) == 8
    assert "--api-key-file" in capsys.readouterr().err
    (tmp_path / "keys").write_text("ann key-of-ann\n")
    main.main(["top", "--url", server.url, "--once", "--api-key-file", str(tmp_path / "keys")])
    assert "401" not in capsys.readouterr().err
    assert main.main(["top", "--api-key", "x"]) == 2
