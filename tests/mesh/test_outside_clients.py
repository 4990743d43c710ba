"""LiteLLM, LangChain, OpenAI's agents and Pydantic AI as their users install them, against the real mesh.

Chat, streams and rounds with a tool, through all three dialects. They bring 90 packages (480 MB), so they live in an
environment of their own that is made for this test alone.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks._mesh import running_mesh

SCRIPT = Path(__file__).with_name("outside_clients.py")
PACKAGES = (
    "litellm==1.110.2",
    "langchain-openai==1.7.4",
    "langchain-anthropic==1.7.10",
    "openai-agents==0.24.0",
    "pydantic-ai-slim[openai,anthropic]==2.68.0",
)
CHECKS = (
    "litellm hosted_vllm",
    "litellm openai",
    "litellm deepseek",
    "litellm anthropic",
    "litellm responses",
    "langchain chat",
    "langchain responses",
    "langchain anthropic",
    "openai-agents",
    "pydantic-ai",
)
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    folder = tmp_path_factory.mktemp("outside")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run([folder / "bin" / "pip", "install", "--quiet", *PACKAGES], check=True, timeout=600)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def url():
    with running_mesh("--deterministic", "--grammar", "on") as base:
        yield base


@pytest.mark.parametrize("check", CHECKS)
def test_unmodified(python, url, check):
    done = subprocess.run([python, SCRIPT, url, check], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.strip().splitlines()[-1])
    assert seen
    if "story" in seen:
        assert len(seen["story"]) > 40
    if "answer" in seen:
        assert "17" in seen["answer"] and "windy" in seen["answer"]
