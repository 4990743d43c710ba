"""What cannot happen did not: after every test here, on /metrics of each core that ran in this process.

Meshes of child processes are looked at by `benchmarks._mesh.running_mesh` when it stops them, and services that a test
starts by themselves here, by their logs.
"""

import re

import pytest

from benchmarks._mesh import running_mesh
from meshkit.shell import Shell
from meshkit.testing import ServiceProcess

_FAULT = re.compile(r'^v4mesh_core_events_total\{event="(\w+)",fault="1"\} (\S+)$', re.MULTILINE)


@pytest.fixture(scope="session")
def constrained_mesh():
    """URL of a mesh with a grammar service, for all files whose tests leave one as they found it."""
    with running_mesh("--deterministic", "--grammar", "on") as url:
        yield url


@pytest.fixture(scope="session")
def plain_mesh():
    """The same without a grammar service."""
    with running_mesh("--deterministic") as url:
        yield url


@pytest.fixture(autouse=True)
def _nothing_impossible_happened(monkeypatch):
    shells, processes = [], []
    for cls, made in ((Shell, shells), (ServiceProcess, processes)):
        original = cls.__init__

        def init(self, *args, _original=original, _made=made, **options):
            _original(self, *args, **options)
            _made.append(self)

        monkeypatch.setattr(cls, "__init__", init)
    yield
    for shell in shells:
        shown = _FAULT.findall(shell.metrics.render().decode())
        assert {name for name, _ in shown} >= set(shell.core.cannot_happen), "a counter is not on /metrics"
        assert not [name for name, value in shown if float(value)], "this cannot happen"
    for process in processes:
        assert "this cannot happen" not in process.log.read_text()
