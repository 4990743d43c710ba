"""Triton's interpreter counts loops with `int(array)`, which NumPy 2.4 refuses for arrays of one element."""

import importlib.util

import pytest


@pytest.fixture(autouse=True, scope="session")
def _interpreter_counts_loops():
    if importlib.util.find_spec("triton") is None:
        yield
        return
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
    yield
    interpreter._patch_lang_tensor = original
