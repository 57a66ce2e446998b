"""Programs that end in a way that a careless judge takes for success."""

from attacks.attack import Attack, call, program, read_attacks

# Ways to die of SIGKILL without a kill from outside. A careless parent takes that for an infrastructure failure.
_KILLS = {
    "a limit of processor time": "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (1, 1))\nwhile True: pass",
    "a kill of itself": "import os\nos.kill(os.getpid(), 9)",
    "a thread's kill of itself": "syscall(200, 130, _o.getpid(), 9)",
    "a kill of its group": "import os\nos.killpg(0, 9)",
    "a queued kill": """
import ctypes, os
information = (ctypes.c_uint32 * 32)(9, 0, 2**32 - 1)
syscall(129, 138, os.getpid(), 9, information)
""",
    "a timer": """
import ctypes
event = (ctypes.c_uint32 * 16)(0, 0, 9, 0)
timer = ctypes.c_int()
syscall(222, 107, 1, event, ctypes.byref(timer))
syscall(223, 110, timer.value, 0, (ctypes.c_uint64 * 4)(0, 0, 0, 1000), 0)
import time
time.sleep(0.2)
""",
    "the owner of a descriptor": """
import fcntl, os
r, w = os.pipe()
fcntl.fcntl(r, 10, 9)
fcntl.fcntl(r, fcntl.F_SETOWN, os.getpid())
fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC)
os.write(w, b'x')
""",
    "the death of a parent": """
import os
syscall(157, 167, 1, 9, 0, 0, 0)
if os.fork(): os._exit(0)
import time
time.sleep(1)
""",
    "a process descriptor": "import os\nsyscall(424, 424, syscall(434, 434, os.getpid(), 0), 9, 0, 0)",
    "a strict filter": "syscall(157, 167, 22, 1, 0, 0, 0)\nopen('/dev/null')",
    "a filter of its own": """
import ctypes
instructions = (ctypes.c_uint64 * 1)(0x8000000000000006)
class Program(ctypes.Structure):
    _fields_ = [('length', ctypes.c_ushort), ('filter', ctypes.c_void_p)]
one = Program(1, ctypes.addressof(instructions))
syscall(317, 277, 1, 0, ctypes.byref(one))
""",
    "a descriptor of the stack": "import ctypes\nctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(bytearray(1))) & ~0xfff, 0, 1 << 40)",
}


def _kill_in_call(name: str, source: str) -> Attack:
    body = "".join(f"    {line}\n" for line in source.strip().splitlines())
    return call(f"end by {name} in a call", f"def f(x):\n{body}    raise ValueError", must_fail=True)


ATTACKS = (
    *read_attacks("exits"),
    *(
        program(f"end by {name}", f"{source.strip()}\nraise ValueError", must_fail=True)
        for name, source in _KILLS.items()
    ),
    *(_kill_in_call(name, source) for name, source in _KILLS.items()),
)
