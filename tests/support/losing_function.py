"""A verifier of countdown puzzles that ends its own worker by SIGKILL, as the kernel does when memory runs out.

The environment of the worker decides: LOSING is "no", "some" (about 3% of the responses), "many" (20%), "once" (some,
at their first verification; LOSING_FOLDER holds their marks) or "all". Only the standard library: workers start often.
"""

import os
import re
import signal
from pathlib import Path
from zlib import crc32

MODE = os.environ.get("LOSING", "no")
EVERY = {"some": 31, "once": 31, "many": 5, "all": 1}


def is_lost(response: str, reference: str) -> bool:
    """Whether the modes "some" and "once" lose a response."""
    return _number(response, reference) % EVERY["some"] == 0


def _number(response: str, reference: str) -> int:
    return crc32(f"{response} {reference}".encode())


def verify(response: str, reference: str) -> bool:
    number = _number(response, reference)
    if MODE in EVERY and number % EVERY[MODE] == 0:
        try:
            if MODE == "once":
                (Path(os.environ["LOSING_FOLDER"]) / f"seen-{number}").touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)
        except FileExistsError:
            pass
    numbers, target = reference.split(" -> ")
    try:
        value = eval(response, {}) if re.fullmatch(r"[-+*/()0-9 ]+", response) else None
    except Exception:
        value = None
    return bool(value == int(target) and sorted(re.findall("[0-9]+", response)) == sorted(numbers.split()))
