"""The one ustar encoding that evidence archives use (POSIX.1-1988): headers of regular files, padding, the end. Pure.

Every field except name and size is fixed, so that an archive follows from names and contents alone. Written out here
and not left to a tar library, which is free to write the same file in another way in its next release.
"""

from __future__ import annotations

BLOCK = 512
RECORD = 20 * BLOCK
MAX_SIZE = 8**11 - 1

_NAME = 100
_PREFIX = 155
_FIELDS = (
    ("name", 100),
    ("mode", 8),
    ("uid", 8),
    ("gid", 8),
    ("size", 12),
    ("mtime", 12),
    ("checksum", 8),
    ("type", 1),
    ("link name", 100),
    ("magic", 8),
    ("user", 32),
    ("group", 32),
    ("device major", 8),
    ("device minor", 8),
    ("prefix", 155),
    ("padding", 12),
)
_SIZE_AT = 124


def split(path: str) -> tuple[bytes, bytes] | None:
    """``path`` as (prefix, name): no prefix up to 100 bytes, else cut at the first ``/`` that leaves at most 100.

    None if ustar cannot hold it (name up to 100 bytes, prefix up to 155). Raises UnicodeEncodeError for lone
    surrogates.
    """
    whole = path.encode()
    if len(whole) <= _NAME:
        return b"", whole
    cut = whole.find(b"/", len(whole) - _NAME - 1)
    if cut <= 0 or cut > _PREFIX or cut == len(whole) - 1:
        return None
    return whole[:cut], whole[cut + 1 :]


def header(path: str, size: int) -> bytes:
    """The 512 bytes before a member: a regular file, mode 0644, owner 0/0 without names, modified at 0.

    Raises:
        ValueError: the path or the size does not fit; callers check both before.
    """
    parts = split(path)
    if parts is None or not 0 <= size <= MAX_SIZE:
        raise ValueError(f"ustar cannot hold {path!r} of {size} bytes")
    prefix, name = parts
    block = b"".join(
        (
            name.ljust(100, b"\0"),
            b"0000644\0" + b"0000000\0" * 2,
            b"%011o\0" % size + b"00000000000\0",
            b" " * 8,  # the checksum counts itself as blanks
            b"0" + bytes(100),
            b"ustar\00000" + bytes(32 + 32 + 8 + 8),
            prefix.ljust(155, b"\0") + bytes(12),
        )
    )
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def size_of(block: bytes) -> int | None:
    """The size that a header states, in bytes; None unless it is 11 octal digits and a NUL."""
    field = block[_SIZE_AT : _SIZE_AT + 12]
    if len(field) != 12 or field[-1:] != b"\0" or not all(0x30 <= digit <= 0x37 for digit in field[:-1]):
        return None
    return int(field[:-1], 8)


def padding(size: int) -> int:
    """Zero bytes after a member of ``size`` bytes, up to a whole block."""
    return -size % BLOCK


def span(size: int) -> int:
    """Bytes that a member of ``size`` bytes takes in an archive: header, content, padding."""
    return BLOCK + size + padding(size)


def ending(position: int) -> int:
    """Zero bytes at the end of an archive whose members end at ``position``: two blocks, then up to a whole record."""
    return 2 * BLOCK + -(position + 2 * BLOCK) % RECORD


def differences(expected: bytes, actual: bytes) -> str:
    """The fields in which two headers differ, with both values, for people."""
    found = []
    at = 0
    for name, width in _FIELDS:
        want, have = expected[at : at + width], actual[at : at + width]
        at += width
        if want != have:
            found.append(f"{name} is {_show(have)}, expected {_show(want)}")
    return ", ".join(found)


def _show(field: bytes) -> str:
    text = field.rstrip(b"\0 ").decode("utf-8", "backslashreplace")
    return ascii(text if len(text) <= 60 else text[:57] + "...")
