"""The messages on the two pipes of a process: a header of kind, token and length, and a body.

A reply repeats its request's random token: a program cannot reply to a request that it has not received.
"""

from __future__ import annotations

import os
import struct
from typing import NamedTuple

HEADER = struct.Struct(">BQI")

# From the parent; the bodies of all but RUN are texts of `values`.
RUN, LOAD, CALL, GIVE = 1, 2, 3, 4
# From the program: READY, with the process id, and UNCONFINED come before any untrusted code runs.
READY, UNCONFINED, FAILED, VALUE, ASKED = 11, 12, 13, 14, 15


class Frame(NamedTuple):
    """One message; its token is that of the request that it is or belongs to, 0 before the first."""

    kind: int
    token: int
    body: bytes = b""

    def to_bytes(self) -> bytes:
        """Return the header and the body."""
        return HEADER.pack(self.kind, self.token, len(self.body)) + self.body


def read_frame(descriptor: int) -> Frame | None:
    """Read a message, waiting for it; None if the pipe has ended."""
    header = _read_all(descriptor, HEADER.size)
    if header is None:
        return None
    kind, token, length = HEADER.unpack(header)
    body = _read_all(descriptor, length)
    return None if body is None else Frame(kind, token, body)


def write_frame(descriptor: int, frame: Frame) -> None:
    """Write a message, waiting for its reader."""
    data = memoryview(frame.to_bytes())
    while data:
        data = data[os.write(descriptor, data) :]


def _read_all(descriptor: int, length: int) -> bytes | None:
    parts = []
    while length:
        part = os.read(descriptor, min(length, 1 << 20))
        if not part:
            return None
        parts.append(part)
        length -= len(part)
    return b"".join(parts)
