"""Little-endian columns: numpy arrays and tuples of ints to `bytes` and back, with every check that a column needs.

The only place that knows the dtypes on the wire. A column that breaks a rule raises `WireError` naming the field; the
stream it came on is closed and nothing else changes.
"""

from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshkit.errors import WireError
from meshkit.frames import F32, I32, U8

MAX_I32: Final = 2**31 - 1
MAX_I64: Final = 2**63 - 1
MAX_TEXT: Final = 4096  # bytes of any one string on the wire
CLIP_TEXT: Final = 1000  # characters that a free-text field (reason, message) is cut to when sent
KEY_BYTES: Final = 16
FEW: Final = 16  # so many items are looked at one by one: that is sooner done than numpy begins

_EMPTY_I32: Final = np.empty(0, "<i4")
_EMPTY_I64: Final = np.empty(0, "<i8")
_EMPTY_F32: Final = np.empty(0, "<f4")
_EMPTY_U8: Final = np.empty(0, "u1")


def put_i32(values: I32 | Iterable[int]) -> bytes:
    """A column of int32. Values beyond int32 raise OverflowError: they are our own mistake."""
    if isinstance(values, np.ndarray):
        assert values.dtype == np.int32 and values.ndim == 1, (values.dtype, values.shape)
        return values.astype("<i4", copy=False).tobytes()
    items = values if isinstance(values, (list, tuple)) else list(values)
    return np.array(items, "<i4").tobytes() if items else b""


def put_i64(values: Iterable[int]) -> bytes:
    items = list(values)
    return np.array(items, "<i8").tobytes() if items else b""


def put_f32(values: F32 | Iterable[float]) -> bytes:
    if isinstance(values, np.ndarray):
        assert values.dtype == np.float32 and values.ndim == 1, (values.dtype, values.shape)
        return values.astype("<f4", copy=False).tobytes()
    items = list(values)
    return np.array(items, "<f4").tobytes() if items else b""


def put_u8(values: U8) -> bytes:
    assert values.dtype == np.uint8 and values.ndim == 1, (values.dtype, values.shape)
    return values.tobytes()


def put_keys(keys: Iterable[bytes], field: str) -> bytes:
    """16-byte keys, one after the other."""
    items = tuple(keys)
    for key in items:
        if len(key) != KEY_BYTES:
            raise WireError(f"{field}: a key has {len(key)} bytes, expected {KEY_BYTES}")
    return b"".join(items)


def clip(text: str) -> str:
    """Free text for people, cut so that it always fits."""
    return text if len(text) <= CLIP_TEXT else text[: CLIP_TEXT - 1] + "…"


def get_i32(data: bytes, field: str, *, low: int = 0, high: int = MAX_I32, length: int | None = None) -> I32:
    """Read an int32 column as a read-only view; every value in low..high, exactly `length` items when given."""
    if not _whole(data, 4, field, length):
        return _EMPTY_I32
    column = np.frombuffer(data, "<i4")
    # Seen as unsigned, a negative value is beyond any int32: one pass where 0 is the least.
    if low or column.size <= FEW or int(np.maximum.reduce(column.view("<u4"))) > high:
        _within(column, field, low, high)
    return column


def get_i64(data: bytes, field: str, *, length: int | None = None) -> NDArray[np.int64]:
    column = np.frombuffer(data, "<i8") if _whole(data, 8, field, length) else _EMPTY_I64
    _within(column, field, 0, MAX_I64)
    return column


def get_f32(data: bytes, field: str, *, length: int | None = None) -> F32:
    """Read a float32 column; NaN is refused, infinities are values (a masked token's log-probability)."""
    if not _whole(data, 4, field, length):
        return _EMPTY_F32
    column = np.frombuffer(data, "<f4")
    if np.isnan(column).any():
        raise WireError(f"{field}: holds NaN")
    return column


def get_u8(data: bytes, field: str, *, low: int = 0, high: int = 255, length: int | None = None) -> U8:
    if not _whole(data, 1, field, length):
        return _EMPTY_U8
    column = np.frombuffer(data, "u1")
    if low or (high < 255 and (max(data) if column.size <= FEW else int(np.maximum.reduce(column))) > high):
        _within(column, field, low, high)
    return column


def get_ints(
    data: bytes, field: str, *, low: int = 0, high: int = MAX_I32, length: int | None = None
) -> tuple[int, ...]:
    """Read an int32 column of rare operations as Python ints."""
    return tuple(get_i32(data, field, low=low, high=high, length=length).tolist())


def get_keys(data: bytes, field: str, *, length: int | None = None) -> tuple[bytes, ...]:
    _whole(data, KEY_BYTES, field, length)
    return tuple(data[at : at + KEY_BYTES] for at in range(0, len(data), KEY_BYTES))


def get_id(data: bytes, field: str) -> bytes:
    """A 128-bit name."""
    if len(data) != KEY_BYTES:
        raise WireError(f"{field}: {len(data)} bytes, expected {KEY_BYTES}")
    return data


def get_text(text: str, field: str) -> str:
    if len(text.encode("utf-8", "surrogatepass")) > MAX_TEXT:
        raise WireError(f"{field}: longer than {MAX_TEXT} bytes")
    return text


def get_int(value: int, field: str, *, low: int = 0, high: int = MAX_I32) -> int:
    if not low <= value <= high:
        raise WireError(f"{field}: {value} is not in {low}..{high}")
    return value


def check_sum(counts: NDArray[np.int32] | NDArray[np.uint8], total: int, field: str, flat: str) -> None:
    """The flat column `flat` holds exactly as many items as `counts` announces."""
    announced = sum(counts.tolist()) if counts.size <= FEW else int(np.add.reduce(counts, dtype=np.int64))
    if announced != total:
        raise WireError(f"{field} announce {announced} items, {flat} holds {total}")


def _whole(data: bytes, width: int, field: str, length: int | None) -> int:
    """Number of items in `data`, checked."""
    count, rest = divmod(len(data), width)
    if rest:
        raise WireError(f"{field}: {len(data)} bytes are no whole number of {width}-byte items")
    if length is not None and count != length:
        raise WireError(f"{field}: {count} items, its partner columns have {length}")
    return count


def _within(column: NDArray[np.int32] | NDArray[np.int64] | NDArray[np.uint8], field: str, low: int, high: int) -> None:
    if not column.size:
        return
    if column.size <= FEW:
        items = column.tolist()
        least, most = min(items), max(items)
    else:
        least, most = int(column.min()), int(column.max())
    if least < low or most > high:
        raise WireError(f"{field}: {least if least < low else most} is not in {low}..{high}")
