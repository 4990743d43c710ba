"""The dashboard and the alert rules ask only for what a gateway exports, and the written board is the generated one."""

import json
import re
from pathlib import Path

import yaml

from meshkit.obs import Metrics
from tools import dashboard

ROOT = Path(__file__).parents[3]
OBS = ROOT / "deploy" / "obs"
NAMES = re.compile(r"(?:vllm|sglang):\w+|v4mesh_\w+")


async def test_every_query_asks_for_a_metric_that_is_there(served):
    status, _, _ = await served.post("/v1/completions", {"prompt": "Hello", "max_tokens": 3})
    assert status == 200
    events = Metrics()  # as meshkit.shell counts them, in the same process as the gateway
    counted = events.counter("v4mesh_core_events_total", "What the core counted", event=None, fault=("0", "1"))
    counted.add(1, event="gap", fault="1")
    served.gateway.metrics.others.append(events.render)
    async with served.session.get(f"{served.url}/metrics") as response:
        text = await response.text()
    exported = {re.split(r"[{ ]", line)[0] for line in text.splitlines() if line and not line.startswith("#")}
    board = [target["expr"] for panel in dashboard.board()["panels"] for target in panel.get("targets", ())]
    rules = [
        rule["expr"] for group in yaml.safe_load((OBS / "rules.yml").read_text())["groups"] for rule in group["rules"]
    ]
    for query in (*board, *rules):
        names = set(NAMES.findall(query))
        assert names and names <= exported, (query, names - exported)


def test_the_board_is_the_generated_one_and_fits_the_grid():
    assert dashboard.main(["--check"]) == 0, "run: python tools/dashboard.py"
    panels = json.loads(dashboard.TARGET.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [panel["gridPos"] for panel in panels]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    assert len({(place["x"], place["y"]) for place in places}) == len(panels)


def test_the_files_fit_together():
    """Addresses and paths that one file names and another provides."""
    collector = yaml.safe_load((OBS / "collector.yaml").read_text())
    pipeline = collector["service"]["pipelines"]["traces"]
    for kind in ("receivers", "processors", "exporters"):
        assert set(pipeline[kind]) == set(collector[kind])
    board = yaml.safe_load((OBS / "grafana/provisioning/dashboards/boards.yaml").read_text())
    assert board["providers"][0]["options"]["path"] == "/var/lib/grafana/dashboards"
    sources = yaml.safe_load((OBS / "grafana/provisioning/datasources/sources.yaml").read_text())["datasources"]
    assert {source["uid"] for source in sources} == {"prometheus", "jaeger"}
