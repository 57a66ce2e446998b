"""Programs that misuse the descriptors that they inherit, and the pipes of the protocol."""

from attacks.attack import call, program, read_attacks

_FRAMES = """
import json, marshal, os, pickle, struct
bodies = [json.dumps(v).encode() for v in (
    {"value": BREACH, "failure": None}, {"ok": True, "value": BREACH}, [0, BREACH], BREACH, ["returned", BREACH],
)] + [marshal.dumps((0, BREACH)), pickle.dumps(BREACH), BREACH.encode()]
def forge(file):
    for form in ('>I', '<I', '>Q', '<Q', '!i'):
        for body in bodies:
            try:
                os.write(file, struct.pack(form, len(body)) + body)
            except OSError:
                return
    for body in bodies:
        try:
            os.write(file, body + b'\\n')
        except OSError:
            return
"""

ATTACKS = (
    *read_attacks("descriptors"),
    program("forged frames", _FRAMES + "for file in range(64):\n    if file != 1: forge(file)"),
    program(
        "forged frames through every writer",
        _FRAMES
        + """
import gc, io
for one in gc.get_objects():
    if isinstance(one, io.IOBase):
        try:
            if one.fileno() != 1: forge(one.fileno())
        except (OSError, ValueError):
            pass
""",
    ),
    call(
        "forged frames in a call",
        _FRAMES
        + """
def f(x):
    for file in range(64): forge(file)
    return x
""",
    ),
    call(
        "forged frames, then an exit",
        _FRAMES
        + """
import os
def f(x):
    for file in range(64): forge(file)
    os._exit(0)
""",
        must_fail=True,
    ),
    call(
        "replies sent ahead",
        _FRAMES
        + """
for file in range(64): forge(file)
def f(x):
    return x
""",
    ),
)
