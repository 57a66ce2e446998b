"""Programs that know the runner: they find its pipes and its token, and send any message that they like."""

from attacks.attack import Attack, call, program

_SPY = """
import os, struct, sys
def runner():
    frame = sys._getframe()
    while frame:
        for one in list(frame.f_locals.values()):
            if hasattr(one, '_replies') and hasattr(one, '_token'): return one._replies, one._token
        if 'replies' in frame.f_locals and hasattr(frame.f_locals.get('frame'), 'token'):
            return frame.f_locals['replies'], frame.f_locals['frame'].token
        frame = frame.f_back
    return 63, 0
def send(kind, body=b'', change=0, length=None):
    file, token = runner()
    data = struct.pack('>BQI', kind, (token + change) % 2**64, len(body) if length is None else length) + body
    view = memoryview(data)
    while view: view = view[os.write(file, view):]
"""


def _sends(name: str, statements: str, must_fail: bool = False) -> Attack:
    return call(name, f"{_SPY}\ndef f(x):\n    {statements}\n    return x", must_fail=must_fail)


def _value(name: str, body: str, must_fail: bool = True) -> Attack:
    """Return the attack whose reply has this body instead of a value."""
    return call(
        name, f"{_SPY}\ndef f(x):\n    send(14, {body})\n    import time\n    time.sleep(9)", must_fail=must_fail
    )


ATTACKS = (
    *(_sends(f"message of kind {kind}", f"send({kind}, b'{{}}')") for kind in (0, 1, 2, 3, 4, 10, 11, 12, 15, 16, 255)),
    _sends("unconfined, says the program", "send(12, b'Landlock is missing')\n    os._exit(0)", must_fail=True),
    _sends("ready again", "send(11)\n    send(11)\n    os._exit(0)", must_fail=True),
    _sends(
        "failed message that names itself unverified",
        "send(13, b'unverified: a worker was lost')\n    os._exit(0)",
        must_fail=True,
    ),
    _sends("reply of another request", "send(14, b'1', change=1)"),
    _sends("flood of replies of other requests", "for i in range(10**5): send(14, b'1', change=1 + i)"),
    _sends("two replies", "send(14, b'1')\n    send(14, b'2')"),
    _sends("flood of replies", "while True: send(14, b'1')"),
    _sends("many small questions", 'while True: send(15, b\'{"t": ["g", {"t": []}]}\')', must_fail=True),
    _sends("reply without an end", "send(14, b'[1', length=1 << 20)\n    os._exit(0)", must_fail=True),
    _sends(
        "reply that is longer than any memory", "send(14, b'[1', length=2**32 - 1)\n    os._exit(0)", must_fail=True
    ),
    _sends("half a header", "os.write(runner()[0], b'\\x0e\\0')\n    os._exit(0)", must_fail=True),
    _sends(
        "endless reply",
        "send(14, length=2**32 - 1)\n    while True: os.write(runner()[0], bytes(1 << 16))",
        must_fail=True,
    ),
    _value("deep reply", "b'[' * 200_000 + b']' * 200_000"),
    _value("deep objects", "b'{\"t\": [' * 50_000"),
    _value("reply that is not JSON", "b'\\xff\\0'"),
    _value("reply with surrogates", "b'\"\\\\ud800\"'", must_fail=False),
    _value("decimal digits", "b'9' * 1_000_000"),
    _value("float of many digits", "b'0.' + b'9' * 1_000_000", must_fail=False),
    _value("float that overflows", "b'1e999999999'", must_fail=False),
    _value("not a number in JSON", "b'[NaN, Infinity, -Infinity]'", must_fail=False),
    _value("set of lists", "b'{\"s\": [[1]]}'"),
    _value("dict of lists", "b'{\"d\": [[[1], 2]]}'"),
    _value("dict of triples", "b'{\"d\": [[1, 2, 3]]}'"),
    _value("two keys", 'b\'{"t": [], "s": []}\''),
    _value("unknown kind", 'b\'{"__import__": "os"}\''),
    _value("kind of a wrong type", "b'{\"t\": 3}'"),
    _value("complex without parts", "b'{\"c\": []}'"),
    _value("complex of text", 'b\'{"c": ["1", "2"]}\''),
    _value("hex that is none", 'b\'{"i": "zz"}\''),
    _value("bytes that are none", 'b\'{"b": "0"}\''),
    _value("int of a megabyte", "b'{\"i\": \"' + b'f' * 1_000_000 + b'\"}'", must_fail=False),
    _value(
        "keys of one hash",
        "b'{\"s\": [' + b','.join(b'{\"i\": \"%x\"}' % (i * (2**61 - 1)) for i in range(20_000)) + b']}'",
    ),
    _value("keys that repeat", "b'{\"d\": [[1, 1], [1, 2], [true, 3]]}'", must_fail=False),
    call("reply while loading", f"{_SPY}\nsend(14, b'3')\ndef f(x): return x"),
    call(
        "reply for the next call while loading",
        f"{_SPY}\nfor i in range(1000): send(14, b'3', change=i)\ndef f(x): return x",
    ),
    call("failure while loading", f"{_SPY}\nsend(12, b'no')\nos._exit(0)", must_fail=True),
    call(
        "runner replaced",
        f"""{_SPY}
import gc
def f(x):
    frame = sys._getframe(1)
    while frame:
        one = frame.f_locals.get('self')
        if one is not None and hasattr(one, '_replies'):
            one._replies, one._requests, one._token = 1, 0, 5
        frame = frame.f_back
    return x
""",
    ),
    call(
        "loop of the runner taken over",
        f"""{_SPY}
def f(x):
    file, token = runner()
    send(14, b'1')
    while True:
        header = os.read(62, 13)
        if len(header) < 13: os._exit(0)
        kind, token, length = struct.unpack('>BQI', header)
        os.read(62, length)
        os.write(file, struct.pack('>BQI', 14, token, 3) + b'"A"')
""",
    ),
    program("value from a whole program", f"{_SPY}\nsend(14, b'1')\nprint('x')"),
    program("unconfined, says a whole program", f"{_SPY}\nsend(12, b'no Landlock')\nos._exit(0)"),
    program("failure and success", f"{_SPY}\nsend(13, b'unverified: a worker was lost')\nos._exit(0)"),
    program("flood on the pipe of replies", f"{_SPY}\nwhile True: os.write(63, bytes(1 << 16))", must_fail=True),
    program(
        "flood of failures",
        f"{_SPY}\nfile, token = runner()\ndata = struct.pack('>BQI', 13, token, 0) * 5000\nwhile True: os.write(file, data)",
        must_fail=True,
    ),
    program("questions from a whole program", f"{_SPY}\nsend(15, b'[\"g\", []]')\nos.read(62, 10)"),
)
