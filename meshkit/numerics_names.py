"""The names that `--kv-cache-dtype` and `--quantization` take, and what each KV name means.

Stands here because the worker resolves them and the command line refuses others before anything starts. Whether a
checkpoint can honour a name is the worker's to judge.
"""

from collections.abc import Mapping
from typing import Final, Literal

KvFormat = Literal["fp32", "bf16", "fp8_e4m3", "fp8_e5m2"]

KV_NAMES: Final[Mapping[str, KvFormat]] = {
    "fp32": "fp32",
    "float32": "fp32",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp8": "fp8_e4m3",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
}
EXACT_NAMES: Final = ("auto", "exact")
SCHEMES_OF_EXPERTS: Final[Mapping[str, tuple[str, ...]]] = {"fp4": ("fp4", "mxfp4", "w4a8"), "fp8": ("fp8",)}
FOREIGN_SCHEMES: Final = ("compressed-tensors",)  # formats of a checkpoint, recognised so that the refusal can say why

KV_DTYPES: Final = ("auto", *KV_NAMES)
SCHEMES: Final = (*EXACT_NAMES, *SCHEMES_OF_EXPERTS["fp8"], *SCHEMES_OF_EXPERTS["fp4"], *FOREIGN_SCHEMES)
