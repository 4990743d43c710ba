"""Byte-level BPE tokenizer read from a Hugging Face `tokenizer.json`; token for token what `tokenizers` gives.

Text to ids, ids to bytes and text, and look-ups by token string. No BOS or other template token is ever added by
itself. Parts of the file that are not implemented (normalizers, unknown-token fallback, lstrip/rstrip tokens, ...) are
refused at load with `TokenizerFileError`. Incremental decoding lives in `detokenizer`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from gateway.text.added_tokens import AddedTokenFinder, added_token
from gateway.text.bpe import BytePairMerger
from gateway.text.pretoken_cache import PretokenCache
from gateway.text.pretokenizer import Pretokenizer, TokenizerFileError

CACHE_BYTES: Final = 32 * 1024 * 1024
"""Estimated memory of the pretoken cache."""
_CACHED_LENGTH: Final = 64
_CHUNK: Final = 4096


class PromptTooLong(ValueError):  # noqa: N818 - named after what it reports, as the other prompt errors are
    """The text has certainly more tokens than allowed; `at_least` says how many were certain."""

    def __init__(self, limit: int, at_least: int) -> None:
        super().__init__(f"the prompt has at least {at_least} tokens, more than the limit of {limit}")
        self.limit = limit
        self.at_least = at_least


class Tokenizer:
    """One vocabulary. Immutable but for its cache; calls from several threads are safe."""

    def __init__(self, spec: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> None:
        """`spec` is the parsed tokenizer.json, `config` the parsed tokenizer_config.json if there is one."""
        _check_parts(spec)
        vocab: dict[str, int] = spec["model"]["vocab"]
        added = [added_token(entry) for entry in spec.get("added_tokens", [])]
        self.config: Mapping[str, Any] = config or {}
        self._pretokenizer = Pretokenizer.from_json(spec.get("pre_tokenizer"))
        self._merger = BytePairMerger(_byte_ids(vocab), _merges(spec["model"]["merges"], vocab))
        self._whole = (
            {_to_bytes(token): [token_id] for token, token_id in vocab.items()}
            if spec["model"].get("ignore_merges")
            else {}
        )
        self._ids = dict(vocab) | {token.content: token.id for token in added}
        self._tokens = {token_id: token for token, token_id in vocab.items()}
        self._tokens |= {token.id: token.content for token in added}
        self._special = frozenset(token.id for token in added if token.special)
        self._vocab_size = max(self._tokens) + 1
        self._bytes = [b""] * self._vocab_size
        for token_id, token in self._tokens.items():
            self._bytes[token_id] = _to_bytes(token)
        self._longest = max(len(data) for data in self._bytes)
        self._texts = _whole_texts(self._bytes)
        # Tokens that skip normalisation are found first, the others in what is left.
        self._finders = [AddedTokenFinder([t for t in added if t.normalized is kind]) for kind in (False, True)]
        self._cache = PretokenCache(CACHE_BYTES)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read `tokenizer.json` and, if present, `tokenizer_config.json` of a model folder."""
        path = folder / "tokenizer.json"
        try:
            spec = json.loads(path.read_bytes())
        except FileNotFoundError as exc:
            raise TokenizerFileError(f"{path}: no such file; the model folder must hold tokenizer.json") from exc
        except ValueError as exc:
            raise TokenizerFileError(f"{path}: not valid JSON: {exc}") from exc
        if not isinstance(spec, dict):
            raise TokenizerFileError(f"{path}: must be a JSON object")
        config_path = folder / "tokenizer_config.json"
        try:
            config = json.loads(config_path.read_bytes()) if config_path.is_file() else None
        except ValueError as exc:
            raise TokenizerFileError(f"{config_path}: not valid JSON: {exc}") from exc
        try:
            return cls(spec, config)
        except TokenizerFileError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            raise TokenizerFileError(f"{path}: a part is missing or has an unexpected shape: {exc!r}") from exc

    @property
    def vocab_size(self) -> int:
        """Highest id + 1; the model's own vocabulary may be larger."""
        return self._vocab_size

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids flagged special, which `skip_special_tokens` leaves out of text."""
        return self._special

    @property
    def defined_ids(self) -> frozenset[int]:
        """Ids that have a token."""
        return frozenset(self._tokens)

    @property
    def whole_texts(self) -> Mapping[int, str]:
        """Text of every id that is whole UTF-8 by itself, for decoding without looking at bytes."""
        return self._texts

    def id_of(self, token: str) -> int | None:
        """Id of a token by its spelling in the file (added tokens: the literal text)."""
        return self._ids.get(token)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes the token stands for; empty for an id without a token."""
        return self._bytes[token_id] if 0 <= token_id < self._vocab_size else b""

    def token_text(self, token_id: int) -> str:
        r"""Text of one token; a token that is not whole UTF-8 by itself is spelled `\xf0\x9f` byte by byte."""
        text = self._texts.get(token_id)
        return "".join(f"\\x{byte:02x}" for byte in self.token_bytes(token_id)) if text is None else text

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence; invalid bytes, an incomplete tail among them, become U+FFFD."""
        hidden = self._special if skip_special_tokens else frozenset()
        data = b"".join([self.token_bytes(token_id) for token_id in ids if token_id not in hidden])
        return data.decode(errors="replace")

    def encode(self, text: str, *, added_tokens: bool = True, limit: int | None = None) -> list[int]:
        """Ids of `text`. Without `added_tokens`, spellings of added tokens are ordinary text.

        Raises `PromptTooLong` as soon as more than `limit` tokens are certain. Lone surrogates count as U+FFFD.
        """
        text, size = _scalars(text)
        if limit is not None and size > limit * self._longest:
            raise PromptTooLong(limit, -(-size // self._longest))
        ids: list[int] = []
        for segment in self._segments(text) if added_tokens else [text]:
            if isinstance(segment, int):
                ids.append(segment)
            elif segment:
                self._encode_text(segment, ids, limit)
        if limit is not None and len(ids) > limit:
            raise PromptTooLong(limit, len(ids))
        return ids

    def _segments(self, text: str) -> list[str | int]:
        """The text cut at its added tokens: strings and ids."""
        segments: list[str | int] = [text]
        for finder in self._finders:
            cut: list[str | int] = []
            for segment in segments:
                cut += [segment] if isinstance(segment, int) else finder.cut(segment)
            segments = cut
        return segments

    def _encode_text(self, text: str, ids: list[int], limit: int | None) -> None:
        """Append the ids of text without added tokens."""
        cached = self._cache.get
        for number, piece in enumerate(self._pretokenizer.split(text)):
            found = cached(piece)
            if found is None:
                found = self._encode_piece(piece)
            ids += found
            if limit is not None and number % _CHUNK == 0 and len(ids) > limit:
                raise PromptTooLong(limit, len(ids))

    def _encode_piece(self, piece: str) -> list[int]:
        data = piece.encode()
        found = self._whole.get(data) or self._merger.encode(data)
        if len(data) <= _CACHED_LENGTH:
            self._cache.put(piece, found)
        return found


def _scalars(text: str) -> tuple[str, int]:
    """The text with lone surrogates replaced by U+FFFD (surrogate pairs joined), and its UTF-8 length in bytes."""
    try:
        return text, len(text.encode())
    except UnicodeEncodeError:
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return text, len(text.encode())


def _byte_alphabet() -> dict[str, int]:
    """The 256 printable characters that stand for bytes in a byte-level vocabulary: character -> byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    rest = [byte for byte in range(256) if byte not in set(printable)]
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(rest)}


_BYTE_OF: Final = _byte_alphabet()


def _to_bytes(token: str) -> bytes:
    """Bytes of a token; one with characters outside the byte alphabet stands for its own UTF-8."""
    try:
        return bytes([_BYTE_OF[char] for char in token])
    except KeyError:
        return token.encode()


def _whole_texts(token_bytes: list[bytes]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for token_id, data in enumerate(token_bytes):
        try:
            texts[token_id] = data.decode()
        except UnicodeDecodeError:
            continue
    return texts


def _byte_ids(vocab: Mapping[str, int]) -> list[int]:
    ids = [-1] * 256
    for char, byte in _BYTE_OF.items():
        if char not in vocab:
            raise TokenizerFileError(f"tokenizer.json: vocab has no token for byte 0x{byte:02x} ({char!r})")
        ids[byte] = vocab[char]
    return ids


def _merges(entries: list[Any], vocab: Mapping[str, int]) -> dict[tuple[int, int], tuple[int, int]]:
    """(left, right) -> (rank, result); entries are "a b" strings or ["a", "b"] pairs."""
    table: dict[tuple[int, int], tuple[int, int]] = {}
    for rank, entry in enumerate(entries):
        left, right = entry.split(" ") if isinstance(entry, str) else entry
        try:
            table[vocab[left], vocab[right]] = (rank, vocab[left + right])
        except KeyError as exc:
            raise TokenizerFileError(f"tokenizer.json: merge {rank} ({left!r}, {right!r}): {exc} not in vocab") from exc
    return table


def _check_parts(spec: Mapping[str, Any]) -> None:
    """Refuse what would change ids or text and is not implemented."""
    normalizer = spec.get("normalizer")
    if normalizer and not (normalizer.get("type") == "Sequence" and not normalizer.get("normalizers")):
        raise TokenizerFileError(f"tokenizer.json: normalizer {normalizer.get('type')!r} is not supported")
    for part in ("post_processor", "decoder"):
        node = spec.get(part)
        if (node or {"type": None}).get("type") not in (("ByteLevel", None) if part != "decoder" else ("ByteLevel",)):
            raise TokenizerFileError(f"tokenizer.json: {part} {node and node.get('type')!r} is not supported")
    model = spec.get("model") or {}
    if model.get("type") != "BPE":
        raise TokenizerFileError(f"tokenizer.json: model type {model.get('type')!r} is not supported (BPE is)")
    for key in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(key):
            raise TokenizerFileError(f"tokenizer.json: model.{key} = {model[key]!r} is not supported")
