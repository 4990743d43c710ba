"""`python -m worker_svc.compiled_glue MODE FOLDER NAME.. < shapes`: compile pieces into shared objects FOLDER/NAME.so.

Its own process, so that the compiler's imports and memory do not stay with the worker. The first line of stdin is the
shapes as JSON; stdin ends when the worker does, and then so does this. Each finished piece is a line on stdout.
"""

import json
import os
import shutil
import sys
import threading
import warnings
from pathlib import Path

import torch
from torch import nn

from worker_svc.compiled_glue.library import SCRATCH
from worker_svc.compiled_glue.pieces import PIECES, Axis, Piece
from worker_svc.model.glue import GlueShapes

EXAMPLE_TOKENS = 301  # has extra columns; no other size of a model, so that nothing is taken for equal to it
MOST = 1 << 24


class _Module(nn.Module):
    """Export takes modules."""

    def __init__(self, piece: Piece, shapes: GlueShapes) -> None:
        super().__init__()
        self.function = piece.function(shapes)

    def forward(self, *inputs: torch.Tensor) -> object:
        return self.function(*inputs)


def build(name: str, shapes: GlueShapes, mode: str, file: Path) -> None:
    """Write the object of one piece to `file`, whole or not at all."""
    import torch._inductor as inductor
    import torch.export

    piece = PIECES[name]
    dims: dict[str, torch.export.Dim] = {}

    def dim(axis: Axis) -> torch.export.Dim:
        found = dims.setdefault(axis.name, torch.export.Dim(axis.name, min=axis.least, max=MOST))
        return found + axis.plus if axis.plus else found

    example = piece.example(shapes, EXAMPLE_TOKENS, torch.Generator().manual_seed(1))
    varying = tuple({at: dim(axis) for at, axis in axes.items()} for axes in piece.axes(shapes))
    exported = torch.export.export(_Module(piece, shapes), example, dynamic_shapes=(varying,))
    scratch = file.with_name(f"{SCRATCH}{os.getpid()}")
    scratch.mkdir()
    try:
        options = {
            **inductor.list_mode_options(mode),
            "aot_inductor.output_path": str(scratch / f"{name}.so"),
            "cpp.dynamic_threads": True,  # a worker takes one thread for small steps, all of them for large ones
            "compile_threads": 1,
        }
        made = inductor.aot_compile(exported.module(), example, options=options)
        assert isinstance(made, str), made
        Path(made).replace(file)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _end_with_the_worker() -> None:
    while os.read(0, 64):  # not sys.stdin: a thread inside its lock keeps the interpreter from ending
        continue
    os._exit(1)


def main(argv: list[str]) -> int:
    """Returns the exit status."""
    mode, folder, *names = argv
    shapes = GlueShapes(**json.loads(sys.stdin.readline()))
    threading.Thread(target=_end_with_the_worker, daemon=True).start()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the compiler prints goes to stderr
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name in names:
        build(name, shapes, mode, Path(folder) / f"{name}.so")
        out.write(f"{name}\n")
        out.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
