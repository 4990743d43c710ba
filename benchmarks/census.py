"""Tensors and bytes of Flash and Pro, computed by the loader's name table, against the published numbers.

Needs no weights: the table that checks a checkpoint is the table that is counted.
"""

import argparse
import time

from worker_svc.checkpoint.census import PUBLISHED, census, preset

TITLE = "tensor census of DeepSeek-V4-Flash and -Pro from their configs, against the published totals"


def run(args: list[str]) -> dict[str, float | int | str]:
    """Print the census of both checkpoints; `census_ok` is 1 if all four numbers agree."""
    argparse.ArgumentParser(prog="python -m benchmarks census", description=TITLE).parse_args(args)
    metrics: dict[str, float | int | str] = {}
    agree = True
    started = time.perf_counter()
    print(f"{'model':8}{'tensors':>10}{'published':>11}{'bytes':>18}{'published':>18}")
    for name, (tensors, num_bytes) in PUBLISHED.items():
        found = census(preset(name))
        agree &= (found.num_tensors, found.num_bytes) == (tensors, num_bytes)
        metrics |= {f"{name}_tensors": found.num_tensors, f"{name}_bytes": found.num_bytes}
        print(f"{name:8}{found.num_tensors:>10,}{tensors:>11,}{found.num_bytes:>18,}{num_bytes:>18,}")
        print(f"{'':8}{', '.join(f'{dtype} {count:,}' for dtype, count in sorted(found.by_dtype.items()))}")
    metrics["seconds"] = round(time.perf_counter() - started, 3)
    return {"census_ok": int(agree), **metrics}
