"""Tools that evaluate and load servers, as their users install them, on the real mesh.

Each lives in an environment of its own that is made for this test alone: lm-eval brings 760 MB, aiperf 1.2 GB,
guidellm with its torch 1.4 GB. What they write at their end is read here: a tool that
gives up half way writes nothing, or less.
"""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from benchmarks._mesh import running_mesh
from meshkit.models import DEFAULT_MODEL

LM_EVAL, AIPERF, GUIDELLM = "lm-eval[api]==0.4.13", "aiperf==0.13.0", "guidellm==0.8.1"
SUMS = [(37, 45), (12, 30), (8, 9), (50, 21), (64, 17), (23, 23), (71, 14), (5, 88)]
TASK = """\
task: sums
dataset_path: json
dataset_kwargs:
  data_files: {{test: {questions}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: [], max_gen_toks: 64, temperature: 0}}
filter_list:
  - name: last
    filter:
      - {{function: regex, regex_pattern: "(\\\\d+)\\\\D*$"}}
      - {{function: take_first}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
"""
CHOICE = """\
task: endings
dataset_path: json
dataset_kwargs:
  data_files: {{test: {questions}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{begin}}}}"
doc_to_choice: "{{{{ends}}}}"
doc_to_target: right
target_delimiter: " "
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
"""
BEGUN = ["Once upon a", "One day his grandmother gave him a yellow", "In a little house by the"]
ENDS = [["time", "seven"], ["lamp", "because"], ["meadow", "gave"]]
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1_500)]


@pytest.fixture(scope="module")
def url():
    with running_mesh("--deterministic") as base:
        yield base


def installed(folder: Path, *packages: str) -> Path:
    """The folder of the programs of a new environment that holds these packages."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run([folder / "bin" / "pip", "install", "--quiet", *packages], check=True, timeout=900)
    return folder / "bin"


def run(command: list[str | Path], folder: Path, **environment: str) -> str:
    """What it printed; AssertionError with the end of what it said if it failed."""
    env = {**os.environ, "OPENAI_API_KEY": "none", **environment}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def test_lm_eval_runs_a_task_of_sums(url, tmp_path):
    """Through chat, four requests at once; the model's answers are exact."""
    questions = tmp_path / "sums.jsonl"
    rows = [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in SUMS]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "sums.yaml").write_text(TASK.format(questions=questions))
    model = f"model=v4-nano,base_url={url}/v1/chat/completions,num_concurrent=4"
    command = [installed(tmp_path / "env", LM_EVAL) / "lm_eval", "run", "--model", "local-chat-completions"]
    command += ["--model_args", model, "--tasks", "sums", "--include_path", tmp_path, "--apply_chat_template"]
    run([*command, "--output_path", tmp_path / "out"], tmp_path, HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    (results,) = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(results.read_text())
    assert found["n-samples"]["sums"]["effective"] == len(SUMS)
    assert found["results"]["sums"]["exact_match,last"] >= 0.75


def test_lm_eval_compares_endings_by_their_likelihood(url, tmp_path):
    """Through completions: prompts of ids, echoed with their log-probabilities."""
    questions = tmp_path / "endings.jsonl"
    rows = [{"begin": begin, "ends": ends, "right": 0} for begin, ends in zip(BEGUN, ENDS, strict=True)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "endings.yaml").write_text(CHOICE.format(questions=questions))
    model = f"model=v4-nano,base_url={url}/v1/completions,num_concurrent=2,tokenizer={DEFAULT_MODEL}"
    command = [installed(tmp_path / "env", LM_EVAL, "transformers") / "lm_eval", "run", "--model", "local-completions"]
    command += ["--model_args", model, "--tasks", "endings", "--include_path", tmp_path]
    run([*command, "--output_path", tmp_path / "out"], tmp_path, HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    (results,) = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(results.read_text())
    assert found["n-samples"]["endings"]["effective"] == len(BEGUN)
    assert found["results"]["endings"]["acc,none"] == 1.0


def test_aiperf_measures_a_stream_and_reads_the_metrics(url, tmp_path):
    """It asks /metrics with HEAD, then scrapes it beside the load."""
    command = [installed(tmp_path / "env", AIPERF) / "aiperf", "profile", "--model", "v4-nano", "--url", url]
    command += ["--endpoint-type", "chat", "--streaming", "--tokenizer", DEFAULT_MODEL, "--request-count", "8"]
    command += ["--concurrency", "4", "--synthetic-input-tokens-mean", "60", "--output-tokens-mean", "16"]
    command += ["--extra-inputs", "ignore_eos:true"]
    run([*command, "--artifact-dir", tmp_path / "out", "--ui", "none"], tmp_path)
    found = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text())
    assert found["completed_request_count"]["avg"] == 8 and not found["error_summary"]
    assert found["total_usage_completion_tokens"]["avg"] == 8 * 16
    scraped = json.loads((tmp_path / "out" / "server_metrics_export.json").read_text())
    assert scraped["summary"]["endpoints_successful"] == [f"{url}/metrics"]


def test_guidellm_measures_concurrent_streams(url, tmp_path):
    """It asks /health first, and for usage on every chunk."""
    torch = f"torch=={version('torch')}"  # the build that is installed here, not the one for GPUs
    command = [installed(tmp_path / "env", GUIDELLM, torch) / "guidellm", "run", "--disable-console-interactive"]
    command += ["--backend", f"kind=openai_http,target={url},model=v4-nano", "--profile", "kind=concurrent,streams=4"]
    command += ["--constraint", "kind=max_requests,count=8"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=60,output_tokens=16"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={DEFAULT_MODEL}"]
    run([*command, "--output", f"kind=json,path={tmp_path / 'out.json'}"], tmp_path, HF_HUB_OFFLINE="1")
    (found,) = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    assert found["metrics"]["request_totals"] == {"successful": 8, "errored": 0, "incomplete": 0, "total": 8}
    assert found["metrics"]["output_token_count"]["successful"]["total_sum"] == 8 * 16
