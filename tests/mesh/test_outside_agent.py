"""An agent's command line as its users install it, on the real mesh: Qwen Code, from npm, in a home of its own.

Its first prompt has some 27,000 tokens, tools for the most part: on two idle cores a minute of prefill. The second run
finds them in the prefix cache.
"""

import json
import os
import shutil
import subprocess

import pytest

from benchmarks._mesh import running_mesh

PACKAGE = "@qwen-code/qwen-code@0.24.4"
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(1_500),
    pytest.mark.skipif(shutil.which("npm") is None, reason="needs node and npm"),
]


@pytest.fixture(scope="module")
def url():
    with running_mesh() as base:
        yield base


def ask(folder, url, question):
    """What it reports at its end."""
    home = folder / "home"
    (home / "work").mkdir(parents=True, exist_ok=True)
    settings = {"OPENAI_API_KEY": "none", "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_MODEL": "v4-nano"}
    env = {"PATH": os.environ["PATH"], "HOME": str(home), "CI": "1", "NO_COLOR": "1"} | settings
    command = [folder / "node_modules" / ".bin" / "qwen", "--auth-type", "openai", "--output-format", "json"]
    done = subprocess.run(
        [*command, "-p", question], cwd=home / "work", env=env, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    *_, result = json.loads(done.stdout)
    assert result["type"] == "result" and result["subtype"] == "success" and not result["is_error"]
    return result


def test_an_agent_answers_and_finds_its_long_prompt_again(url, tmp_path):
    subprocess.run(["npm", "install", "--silent", "--no-audit", PACKAGE], cwd=tmp_path, check=True, timeout=600)
    first = ask(tmp_path, url, "What is 37 + 45?")
    assert "82" in first["result"] and first["usage"]["input_tokens"] > 15_000
    second = ask(tmp_path, url, "What is 12 + 30?")
    assert "42" in second["result"]
    main = second["stats"]["models"]["v4-nano"]["bySource"]["main"]
    assert main["api"]["totalErrors"] == 0 and main["tokens"]["cached"] > 10_000
