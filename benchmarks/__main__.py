"""`python -m benchmarks NAME [--json FILE] [args]`: run one benchmark; `python -m benchmarks list` names them.

A benchmark is a module of this package with `TITLE: str` and `run(args: list[str]) -> dict[str, float | int | str]`. It
may print tables; this harness prints the closing JSON line `{"bench", "metrics", "machine"}` and writes it to a file.
"""

import argparse
import ast
import datetime
import importlib
import json
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PACKAGES = ("torch", "grpcio", "protobuf", "transformers", "tokenizers")


def names() -> list[str]:
    """Every benchmark there is."""
    return sorted(p.stem for p in FOLDER.glob("*.py") if not p.stem.startswith("_"))


def title(name: str) -> str:
    """TITLE of a benchmark, read without importing what it needs."""
    body = ast.parse((FOLDER / f"{name}.py").read_text()).body
    found = [node for node in body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "TITLE"]
    return str(ast.literal_eval(found[0].value))


def machine() -> dict[str, Any]:
    """Where and when these numbers were measured: a number without its machine says nothing."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = models[0].split(":", 1)[1].strip() if models else cpu
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "versions": versions,
    }


def main(argv: list[str]) -> int:
    """Run the benchmark named first, or list them."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__.split("\n\n")[0], add_help=argv[:1] in (["-h"], ["--help"])
    )
    parser.add_argument("name", help="a benchmark, or `list`; NAME --help tells its options")
    parser.add_argument("--json", metavar="FILE", help="also write the closing JSON line there")
    options, rest = parser.parse_known_args(argv)
    if options.name == "list":
        for name in names():
            print(f"{name:20} {title(name)}")
        return 0
    if options.name not in names():
        print(f"no benchmark named {options.name!r}; there are: {', '.join(names())}", file=sys.stderr)
        return 2
    if {"-h", "--help"} & set(rest) and "ArgumentParser" not in (FOLDER / f"{options.name}.py").read_text():
        print(f"{options.name}: {title(options.name)}; it takes no options")
        return 0
    try:
        benchmark = importlib.import_module(f"benchmarks.{options.name}")
    except ModuleNotFoundError as error:
        print(f"{options.name} needs the Python module {error.name}, which is not installed here", file=sys.stderr)
        return 2
    metrics = benchmark.run(rest)
    line = json.dumps({"bench": options.name, "metrics": metrics, "machine": machine()})
    if options.json:
        Path(options.json).write_text(line + "\n")
    print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
