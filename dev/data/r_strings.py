"""r_strings.py FILE.rdx OUTDIR: writes the texts of an R package as files, without R.

    python3 dev/data/r_strings.py /usr/lib/R/site-library/janeaustenr/data/Rdata.rdx OUTDIR

A package keeps its data in Rdata.rdb, and Rdata.rdx says where each variable is in it. Every variable that is a vector
of strings becomes OUTDIR/VARIABLE.txt with one string per line. The format is that of R's serialize() in its binary
form (R Internals, section 1.8), as lazy loading stores it. Needs Python's standard library only.
"""

import struct
import sys
import zlib
from pathlib import Path

# Types of values, and bits of their flags (R Internals, section 1.1 and 1.8).
SYMBOL, PAIR_LIST, STRING, LOGICALS, INTEGERS, REALS, STRINGS, LIST = 1, 2, 9, 10, 13, 14, 16, 19
NULL_VALUE, REFERENCE = 254, 255
HAS_ATTRIBUTES, HAS_TAG = 1 << 9, 1 << 10


class Reader:
    """Reads one serialized value: vectors as lists, pair lists as lists of (tag, value)."""

    def __init__(self, data):
        if data[:2] != b"X\n":
            raise ValueError(f"the data begin with {data[:2]!r}, expected R's binary format, which begins with X")
        self.data, self.at, self.symbols = data, 2, []
        version = self.integers(3)[0]
        if version not in (2, 3):
            raise ValueError(f"version {version} of R's format, expected 2 or 3")
        if version == 3:
            self.bytes(self.integers(1)[0])  # the name of the native encoding

    def bytes(self, count):
        if self.at + count > len(self.data):
            raise ValueError(f"the data end at byte {len(self.data)}, expected {self.at + count} bytes or more")
        self.at += count
        return self.data[self.at - count : self.at]

    def integers(self, count):
        return struct.unpack(f">{count}i", self.bytes(4 * count))

    def pair_list(self, flags):
        """A chain of pairs; each has its own flags."""
        pairs = []
        while flags & 255 == PAIR_LIST:
            if flags & HAS_ATTRIBUTES:
                self.value()
            tag = self.value() if flags & HAS_TAG else None
            pairs.append((tag, self.value()))
            flags = self.integers(1)[0]
        return pairs

    def value(self):
        flags = self.integers(1)[0]
        kind = flags & 255
        if kind == NULL_VALUE:
            return None
        if kind == REFERENCE:
            return self.symbols[(flags >> 8) - 1]
        if kind == SYMBOL:
            self.symbols.append(self.value())
            return self.symbols[-1]
        if kind == PAIR_LIST:
            return self.pair_list(flags)
        length = self.integers(1)[0]
        if kind == STRING:
            return self.bytes(length).decode() if length >= 0 else None  # -1: a missing value
        if kind in (LOGICALS, INTEGERS):
            values = list(self.integers(length))
        elif kind == REALS:
            values = list(struct.unpack(f">{length}d", self.bytes(8 * length)))
        elif kind in (STRINGS, LIST):
            values = [self.value() for _ in range(length)]
        else:
            raise ValueError(f"a value of type {kind}, expected a vector, a list or a symbol")
        if flags & HAS_ATTRIBUTES:
            return Named(values, dict(self.value()).get("names"))
        return values


class Named(list):
    def __init__(self, values, names):
        super().__init__(values)
        self.names = names


def main():
    if len(sys.argv) != 3:
        sys.exit(f"error: r_strings.py was given {len(sys.argv) - 1} arguments, expected two: FILE.rdx OUTDIR")
    index, out = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        contents = Reader(zlib.decompress(index.read_bytes(), 47)).value()  # 47: whatever compression zlib recognizes
        variables = contents[contents.names.index("variables")]
        database = index.with_suffix(".rdb").read_bytes()
        texts = {}
        for name, (offset, length) in zip(variables.names, variables):
            # four bytes hold the length of the data before compression
            value = Reader(zlib.decompress(database[offset + 4 : offset + length])).value()
            if value and all(isinstance(line, str) for line in value):
                texts[name] = value
    except (OSError, ValueError, AttributeError, zlib.error) as e:
        sys.exit(f"error: {index}: {e}; expected the data of an R package, such as janeaustenr's Rdata.rdx")
    if not texts:
        sys.exit(f"error: {index} has no variable that is a vector of strings")
    out.mkdir(parents=True, exist_ok=True)
    for name, lines in texts.items():
        (out / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
