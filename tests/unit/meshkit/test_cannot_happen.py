"""Every counter of what cannot happen is shown by /metrics before it does: the names in the code and those declared."""

import re
from pathlib import Path

import pytest

from gateway.journal.journal import CANNOT_HAPPEN as GATEWAY
from scheduler_svc.core.state import CANNOT_HAPPEN as SCHEDULER
from worker_svc.core.slots import CANNOT_HAPPEN as WORKER

ROOT = Path(__file__).parents[3]
COUNTED = re.compile(r'Count\("(\w+)", fault=True\)|st\.fault\("(\w+)"\)')
FRAME_ERROR = re.compile(r'FrameError\(\s*"(\w+)"(?!.*fault=False)')


def _named(*folders: str) -> set[str]:
    text = "\n".join(path.read_text() for folder in folders for path in sorted((ROOT / folder).glob("*.py")))
    names = {first or second for first, second in COUNTED.findall(text)}
    return names | {f"frame_error_{code}" for code in FRAME_ERROR.findall(text)}


@pytest.mark.parametrize(
    ("declared", "folders", "uplink"),
    [
        (GATEWAY, ("gateway/journal",), {"bad_hello_ack"}),
        (SCHEDULER, ("scheduler_svc/core",), set()),
        (WORKER, ("worker_svc/core",), {"bad_hello_ack"}),
    ],
)
def test_what_cannot_happen_is_declared(declared, folders, uplink):
    assert len(set(declared)) == len(declared)
    assert set(declared) == _named(*folders) | uplink


def test_the_uplink_that_gateway_and_worker_share_counts_nothing_else():
    assert {first for first, _ in COUNTED.findall((ROOT / "meshkit/uplink.py").read_text())} == {"bad_hello_ack"}
