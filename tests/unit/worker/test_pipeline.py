"""Steps through launch and collect: ahead of each other, in order, and none behind a failed one."""

import threading

from meshkit.testing import until
from worker_svc.compute import ComputeThread
from worker_svc.core.effects import Ran, Run
from worker_svc.core.work import StepOutcome, StepWork
from worker_svc.pipeline import BEHIND, Pipeline

WORK = StepWork()


class Device:
    """Notes what happens; steps named in `bad` fail where told; the others end when `gate` opens."""

    def __init__(self, bad=None):
        self.bad, self.gate, self.notes = bad or {}, threading.Event(), []

    def launch(self, work):
        number = sum(note.startswith("launch") for note in self.notes)
        self.notes.append(f"launch {number}")
        if self.bad.get(number) == "launch":
            raise ValueError("no memory")
        return number

    def collect(self, handle):
        self.gate.wait(5)
        self.notes.append(f"collect {handle}")
        if self.bad.get(handle) == "collect":
            raise ValueError("lost")
        return StepOutcome(t_start_ns=handle)


async def run(device, eras):
    """Submit a step per era; returns the answers once all are here."""
    answers, compute = [], ComputeThread()
    pipeline = Pipeline(device, compute, answers.append)
    for era in eras:
        pipeline.submit(Run(WORK, era))
    await until(lambda: sum(note.startswith("launch") for note in device.notes) >= len(eras) - len(device.bad))
    device.gate.set()
    await until(lambda: len(answers) == len(eras))
    pipeline.close()
    compute.stop()
    return answers


async def test_steps_are_launched_while_the_first_one_runs():
    device = Device()
    answers = await run(device, [0, 0, 0])
    assert device.notes == ["launch 0", "launch 1", "launch 2", "collect 0", "collect 1", "collect 2"]
    assert [answer.outcome.t_start_ns for answer in answers] == [0, 1, 2]


async def test_nothing_of_the_same_era_is_launched_behind_a_failed_launch(caplog):
    device = Device({0: "launch"})
    answers = await run(device, [0, 0])
    assert answers == [Ran(None, "ValueError: no memory"), Ran(None, BEHIND)]
    device.bad.clear()
    assert device.notes == ["launch 0"] and "no memory" in caplog.text
    device = Device({0: "launch"})
    (first, second) = await run(device, [0, 1])
    assert first.outcome is None and second.outcome is not None


async def test_a_step_that_fails_late_is_answered_with_its_error(caplog):
    device = Device({0: "collect"})
    (answer,) = await run(device, [0])
    assert answer == Ran(None, "ValueError: lost") and "lost" in caplog.text
