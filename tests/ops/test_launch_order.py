"""Overlapped kernels as they are compiled for a GPU: none reads its inputs before it has waited for who writes them.

Compiled for Hopper in a process of its own, because this one interprets kernels; nothing runs.
"""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

COMPILE = """
import json, re, sys
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

class Absent:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device=0): return 0

driver.set_active(Absent())
launch, seen = jit.JITFunction.run, {}

def compile_only(self, *args, grid, warmup, **options):
    made = launch(self, *args, grid=grid, warmup=True, **options)
    ptx = made.asm["ptx"]
    wait = ptx.find("griddepcontrol.wait")
    early = len(re.findall(r"ld\\.global|cp\\.async", ptx[:max(wait, 0)]))
    lets_on = "griddepcontrol.launch_dependents" in ptx[wait:]
    seen[self.fn.__name__] = [wait >= 0, early, lets_on, bool(options.get("launch_pdl"))]

jit.JITFunction.run = compile_only
from benchmarks._gpu_op import Bench
from benchmarks._gpu_op_products import skinny
from benchmarks._gpu_op_rows import boundary, routing
from worker_svc.ops import launches
from worker_svc.ops.top_entries import triton as top
import torch
assert not launches.INTERPRETED
bench = Bench("cpu")
boundary(bench, (1,))
routing(bench, (1,))
skinny(bench, (1,), tune=False)
ints = torch.zeros(1, dtype=torch.int32)
top.top_rows(torch.zeros(1, 256), ints, ints, ints.view(1, 1), torch.zeros(1, 64, dtype=torch.int32))
print(json.dumps(seen))
"""


@pytest.mark.timeout(240)
def test_no_input_is_read_before_the_wait():
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=env, timeout=220)
    assert done.returncode == 0, done.stderr[-2000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert {"collapse_norm", "mix_few", "_select", "_place", "_middle", "_quantise_rows", "_top_of_tile"} <= seen.keys()
    assert {"_skinny_fp8", "_skinny_bf16"} <= seen.keys()
    for name, (waits, early, lets_on, overlapped) in seen.items():
        assert waits and overlapped, name
        assert (early == 0) != (name == "mix_few"), (name, early)  # that one reads the mixer's weights first
        assert lets_on == (name != "_place"), name
