"""Writes deploy/obs/grafana/dashboards/v4mesh.json: the Grafana board, as rows of panels over one list of queries.

`python tools/dashboard.py [--check]`. Every metric it asks for is one that the gateway exports: a test compares names.
"""

import json
import sys
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parents[1] / "deploy" / "obs" / "grafana" / "dashboards" / "v4mesh.json"
SOURCE = {"type": "prometheus", "uid": "prometheus"}
WIDTH, HEIGHT = 8, 7

Panel = tuple[str, str, dict[str, str]]  # title, unit, legend -> query


def quantiles(name: str) -> dict[str, str]:
    """p50, p90 and p99 of a histogram."""
    return {f"p{q}": f"histogram_quantile(0.{q}, sum by (le) (rate({name}_bucket[1m])))" for q in (50, 90, 99)}


ROWS: dict[str, list[Panel]] = {
    "Traffic": [
        (
            "Requests running and waiting",
            "short",
            {"running": "sglang:num_running_reqs", "waiting": "sglang:num_queue_reqs"},
        ),
        (
            "Tokens per second",
            "short",
            {
                "prompt": "sum(rate(vllm:prompt_tokens_total[1m]))",
                "output": "sum(rate(vllm:generation_tokens_total[1m]))",
            },
        ),
        (
            "Answers by status",
            "reqps",
            {"{{status_code}}": "sum by (status_code) (rate(sglang:http_responses_total[1m]))"},
        ),
    ],
    "Latency": [
        ("Time to first token", "s", quantiles("vllm:time_to_first_token_seconds")),
        ("Between tokens", "s", quantiles("vllm:inter_token_latency_seconds")),
        ("Whole request", "s", quantiles("vllm:e2e_request_latency_seconds")),
    ],
    "Stages": [
        ("In the queue", "s", quantiles("vllm:request_queue_time_seconds")),
        ("Prefill", "s", quantiles("vllm:request_prefill_time_seconds")),
        ("Decode", "s", quantiles("vllm:request_decode_time_seconds")),
    ],
    "Memory": [
        ("KV pages in use", "percentunit", {"in use": "vllm:kv_cache_usage_perc"}),
        ("Slots and pages free", "short", {"slots": "v4mesh_slots_free", "pages": "v4mesh_pages_free"}),
        (
            "Prompt tokens from the prefix cache",
            "percentunit",
            {"share": "sum(rate(vllm:prefix_cache_hits_total[5m])) / sum(rate(vllm:prefix_cache_queries_total[5m]))"},
        ),
    ],
    "Health": [
        (
            "How requests end",
            "reqps",
            {"{{finished_reason}}": "sum by (finished_reason) (rate(vllm:request_success_total[1m]))"},
        ),
        ("Preemptions", "short", {"preempted": "increase(vllm:num_preemptions_total[1m])"}),
        (
            "Faults (must be zero)",
            "short",
            {"{{event}}": 'sum by (event) (increase(v4mesh_core_events_total{fault="1"}[5m]))'},
        ),
    ],
}


def board() -> dict[str, Any]:
    """The dashboard as Grafana stores it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS.items():
        panels.append(
            {"type": "row", "title": title, "id": len(panels) + 1, "gridPos": {"x": 0, "y": top, "w": 24, "h": 1}}
        )
        top += 1
        for column, (name, unit, queries) in enumerate(row):
            panels.append(_panel(len(panels) + 1, name, unit, queries, column * WIDTH, top))
        top += HEIGHT
    return {
        "uid": "v4mesh",
        "title": "v4mesh",
        "schemaVersion": 41,
        "version": 1,
        "editable": False,
        "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "tags": ["v4mesh"],
        "panels": panels,
    }


def _panel(number: int, title: str, unit: str, queries: dict[str, str], left: int, top: int) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": title,
        "datasource": SOURCE,
        "gridPos": {"x": left, "y": top, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": SOURCE, "expr": query, "legendFormat": legend}
            for index, (legend, query) in enumerate(queries.items())
        ],
    }


def main(argv: list[str]) -> int:
    """Write the file, or with --check say whether it is up to date."""
    text = json.dumps(board(), indent=1) + "\n"
    if argv == ["--check"]:
        return 0 if TARGET.exists() and TARGET.read_text() == text else 1
    TARGET.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
