"""The text side is plain computation: no event loop, no sockets, no numerics, no Rust-built wheel."""

import subprocess
import sys

MODULES = ("chat_encoding", "output_parser", "detokenizer", "tokenizer", "stop_strings")
FORBIDDEN = ("asyncio", "aiohttp", "grpc", "torch", "numpy", "tokenizers", "transformers", "deepseek_recipe")


def test_importing_the_text_side_loads_nothing_heavy():
    code = f"import sys; {'; '.join(f'import gateway.text.{m}' for m in MODULES)}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "gateway.text.chat_encoding" in loaded
    assert not set(FORBIDDEN) & set(loaded)
