"""Natural text for v4-nano out of four Debian packages, without the programs that usually read them.

    apt-get download r-cran-janeaustenr sword-text-web wordnet-base
    for f in *.deb; do dpkg-deb -x $f DIR; done
    python -m tools.nano.natural_text DIR OUT

Writes austen.txt, web.txt, wordnet.txt (training) and held-out austen_held.txt (Persuasion) and web_held.txt (Luke).
The texts are public domain, WordNet carries its own permissive licence; none of them is kept in this repository.
"""

from __future__ import annotations

import argparse
import bz2
import html
import lzma
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

HELD_NOVEL = "PERSUASION"
HELD_BOOK = 'osisID="Luke"'
_XZ_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6}]
_CHARACTER_VECTOR_ITEM = 9  # R's serialisation tag of one string


def austen(root: Path) -> list[str]:
    """The six novels, one text each, paragraphs on one line; read from R's lazy-load database."""
    path = next(root.rglob("janeaustenr/data/Rdata.rdb"))
    novels = []
    for chunk in _r_chunks(path.read_bytes()):
        lines = _r_strings(chunk)
        if len(lines) > 1000:
            joined = "\n".join(lines).replace("_", "")
            novels.append(re.sub(r"(?<!\n)\n(?!\n)", " ", joined))
    return novels


def _r_chunks(raw: bytes) -> Iterator[bytes]:
    """Decompressed records of a lazy-load database: big-endian size, then zlib, or a letter and bzip2 or LZMA."""
    at = 0
    while at < len(raw):
        kind = raw[at + 4 : at + 5]
        decoder: bz2.BZ2Decompressor | lzma.LZMADecompressor | zlib._Decompress
        if kind == b"2":
            begin, decoder = at + 5, bz2.BZ2Decompressor()
        elif kind == b"Z":
            begin, decoder = at + 5, lzma.LZMADecompressor(format=lzma.FORMAT_RAW, filters=_XZ_FILTERS)
        else:
            begin, decoder = at + 4, zlib.decompressobj()
        yield decoder.decompress(raw[begin:])
        at = len(raw) - len(decoder.unused_data)


def _r_strings(data: bytes) -> list[str]:
    strings, at = [], 0
    while at < len(data) - 8:
        flags, length = struct.unpack(">Ii", data[at : at + 8])
        if flags & 0xFF == _CHARACTER_VECTOR_ITEM and -1 <= length < 100_000 and at + 8 + length <= len(data):
            if length >= 0:
                strings.append(data[at + 8 : at + 8 + length].decode("utf8", "replace"))
            at += 8 + max(length, 0)
        else:
            at += 1
    return strings


def bible(root: Path) -> list[tuple[str, bool]]:
    """Books of the World English Bible as (text, held out), read from the SWORD module's zlib blocks."""
    books = []
    for testament in ("ot", "nt"):
        path = next(root.rglob(f"engWEB*/{testament}.bzz"))
        index, data = path.with_suffix(".bzs").read_bytes(), path.read_bytes()
        for offset, size, _ in struct.iter_unpack("<III", index):
            markup = zlib.decompress(data[offset : offset + size]).decode("utf8", "replace")
            text = _plain(markup)
            if 'type="book"' in markup and len(text) > 2000:
                books.append((text, HELD_BOOK in markup))
    return books


def _plain(markup: str) -> str:
    """Verses as paragraphs of running text: notes, headings and tags dropped, lost spaces between words restored."""
    text = re.sub(r"<note.*?</note>|<title.*?</title>", "", markup, flags=re.S)
    text = text.replace("</w><w", "</w> <w")
    text = re.sub(r'<(?:div|milestone)[^>]*type="(?:x-p|paragraph)"[^>]*>|<lg[^>]*>', "\n", text)
    text = html.unescape(re.sub(r"<[^>]+>", "", text))
    lines = (re.sub(r"\s+", " ", line).strip() for line in text.split("\n"))
    return "\n\n".join(re.sub(r" ([,.;:?!])", r"\1", line) for line in lines if len(line) > 40)


def wordnet(root: Path) -> list[str]:
    """`word<TAB>part of speech<TAB>gloss` of every synset of one plain word."""
    lines = []
    for path in sorted(root.rglob("wordnet/data.*")):
        for line in path.read_text("latin1").splitlines():
            if line.startswith("  "):
                continue
            fields, _, gloss = line.partition(" | ")
            word, kind = fields.split()[4].replace("_", " "), fields.split()[2]
            gloss = gloss.strip().partition('; "')[0]
            if re.fullmatch(r"[A-Za-z]+", word) and 8 < len(gloss) < 160:
                lines.append(f"{word}\t{kind}\t{gloss}")
    return lines


def main() -> None:
    """Extract everything and print the sizes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("packages", type=Path, help="where the packages were unpacked")
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    novels, books = austen(options.packages), bible(options.packages)
    texts = {
        "austen.txt": "\n\n".join(novel for novel in novels if HELD_NOVEL not in novel[:200].upper()),
        "austen_held.txt": "\n\n".join(novel for novel in novels if HELD_NOVEL in novel[:200].upper()),
        "web.txt": "\n\n".join(text for text, held in books if not held),
        "web_held.txt": "\n\n".join(text for text, held in books if held),
        "wordnet.txt": "\n".join(wordnet(options.packages)),
    }
    for name, text in texts.items():
        (options.out / name).write_text(text)
        print(f"{name:18}{len(text) / 1e6:7.2f} MB")


if __name__ == "__main__":
    main()
