"""LiteLLM, LangChain, OpenAI's agents, Pydantic AI and Vercel's AI SDK as their users install them, on the real mesh.

Chat, streams and rounds with a tool, through all three dialects. They bring 90 packages (480 MB), so they live in an
environment of their own that is made for this test alone.
"""

import json
import shutil
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
NPM_PACKAGES = (
    "ai@6.0.326",
    "@ai-sdk/anthropic@3.0.140",
    "@ai-sdk/deepseek@2.0.69",
    "@ai-sdk/openai@3.0.141",
    "@ai-sdk/openai-compatible@2.0.92",
    "zod@4.6.7",
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


@pytest.mark.skipif(shutil.which("npm") is None, reason="needs node and npm")
def test_ai_sdk(url, tmp_path):
    script = shutil.copy(SCRIPT.with_suffix(".mjs"), tmp_path)
    subprocess.run(["npm", "install", "--silent", "--no-audit", *NPM_PACKAGES], cwd=tmp_path, check=True, timeout=600)
    done = subprocess.run(["node", script, url], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.strip().splitlines()[-1])
    assert set(seen) == {"responses", "chat", "messages", "compatible", "deepseek"}
    for name, answers in seen.items():
        assert answers["text"] == answers["streamed"] and "windy" in answers["text"], name
    assert all(seen[name]["object"]["city"] in ("Paris", "Rome") for name in ("responses", "chat"))
