"""Programs that end in a way that a careless judge takes for success."""

from attacks.attack import Attack, call, program

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
    *(
        program(f"end by {name}", f"{source.strip()}\nraise ValueError", must_fail=True)
        for name, source in _KILLS.items()
    ),
    *(_kill_in_call(name, source) for name, source in _KILLS.items()),
    program(
        "end by a limit of processor time in many threads",
        """
import hashlib, os, signal, threading
signal.signal(signal.SIGXCPU, signal.SIG_IGN)
work = lambda: hashlib.pbkdf2_hmac('sha256', b'a' * 4096, b'b' * 4096, 10**9)
for _ in range(8): threading.Thread(target=work, daemon=True).start()
work()
""",
        must_fail=True,
    ),
    program("exit with an error", "import sys\nprint('x')\nsys.exit(3)", must_fail=True),
    program("exit with a text", "import sys\nsys.exit('x')", must_fail=True),
    program("exit by raising", "raise SystemExit(1)", must_fail=True),
    program("exit by an interrupt", "raise KeyboardInterrupt", must_fail=True),
    program("end by a signal", "import os\nos.kill(os.getpid(), 9)", must_fail=True),
    program("end by an abort", "import os\nos.abort()", must_fail=True),
    program("end by a crash", "import ctypes\nctypes.string_at(0)", must_fail=True),
    program(
        "failure that names itself unverified",
        """
class unverified(Exception): pass
raise unverified('a worker was lost')
""",
        must_fail=True,
    ),
    program("failure that names itself correct", "class correct(Exception): pass\nraise correct", must_fail=True),
    program("failure without a name", "raise type('', (Exception,), {'__module__': ''})('')", must_fail=True),
    program("failure of many lines", "raise ValueError('a\\n\\nunverified: a worker was lost\\n')", must_fail=True),
    program(
        "exit inside the exit", "import atexit, os\natexit.register(os._exit, 0)\nraise ValueError", must_fail=False
    ),
    call("exit 0 in a call", "import os\ndef f(x):\n    os._exit(0)", must_fail=True),
    call("sys.exit in a call", "import sys\ndef f(x):\n    sys.exit(0)", must_fail=True),
    call("SystemExit in a call", "def f(x):\n    raise SystemExit", must_fail=True),
    call("quit in a call", "def f(x):\n    raise SystemExit(None)", must_fail=True),
    call("exit by a signal in a call", "import os\ndef f(x):\n    os.kill(os.getpid(), 15)", must_fail=True),
    call(
        "exit by a timer in a call",
        "import signal\ndef f(x):\n    signal.setitimer(signal.ITIMER_REAL, 0.01)\n    while True: pass",
        must_fail=True,
    ),
    call("exit while loading", "import os\nos._exit(0)\ndef f(x): return x", must_fail=True),
    call("exit while loading, by raising", "raise SystemExit(0)\ndef f(x): return x", must_fail=True),
    call("exec of true", "import os\ndef f(x):\n    os.execv('/bin/true', ['true'])", must_fail=True),
    call(
        "exit in a thread",
        "import os, threading\ndef f(x):\n    threading.Thread(target=os._exit, args=(0,)).start()\n    while True: pass",
        must_fail=True,
    ),
    call(
        "exit in a finalizer",
        "import os\nclass A:\n    def __del__(self): os._exit(0)\ndef f(x):\n    A()\n    return x",
        must_fail=True,
    ),
    call(
        "exit in an exception's text",
        "import os\nclass E(Exception):\n    def __str__(self): os._exit(0)\ndef f(x):\n    raise E",
        must_fail=True,
    ),
    call(
        "exit at exit",
        "import atexit, os\natexit.register(os._exit, 0)\ndef f(x):\n    raise SystemExit(1)",
        must_fail=True,
    ),
    call("error in a call", "def f(x):\n    raise ValueError('unverified: a worker was lost')", must_fail=True),
    call(
        "error that cannot be shown",
        """
class E(Exception):
    def __str__(self): raise self
    __repr__ = __str__
def f(x):
    raise E
""",
        must_fail=True,
    ),
    call(
        "error of a hostile class",
        """
class M(type(Exception)):
    @property
    def __name__(self): raise SystemExit(0)
    __qualname__ = __module__ = __name__
class E(Exception, metaclass=M): pass
def f(x):
    raise E
""",
        must_fail=True,
    ),
    call("error with a long text", "def f(x):\n    raise ValueError('x' * 10**8)", must_fail=True),
    call(
        "chain of errors",
        """
def f(x):
    error = None
    for _ in range(10**5):
        try:
            raise ValueError from error
        except ValueError as e:
            error = e
    raise error
""",
        must_fail=True,
    ),
    call(
        "group of errors",
        "def f(x):\n    e = ValueError()\n    for _ in range(1000): e = ExceptionGroup('x', [e])\n    raise e",
        must_fail=True,
    ),
    call("abort in a call", "import os\ndef f(x):\n    os.abort()", must_fail=True),
    call(
        "crash of the interpreter",
        """
def f(x):
    code = (lambda: 0).__code__
    exec(code.replace(co_code=b'\\x64\\xff\\x53\\x00' * 8, co_consts=(), co_stacksize=1))
""",
        must_fail=True,
    ),
    call(
        "crash of marshal", "import marshal\ndef f(x):\n    exec(marshal.loads(b'\\xe3' + bytes(200)))", must_fail=True
    ),
    call(
        "crash by the recursion limit",
        "import sys\ndef f(x):\n    sys.setrecursionlimit(10**9)\n    return f(x) + 1",
        must_fail=True,
    ),
)
