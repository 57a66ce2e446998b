"""Calls that return hostile values: of classes that lie, without end, or that no program should return."""

from attacks.attack import Attack, call, read_attacks


def _returns(name: str, expression: str, before: str = "", must_fail: bool = True) -> Attack:
    return call(name, f"{before.strip()}\ndef f(x):\n    return {expression}", must_fail=must_fail)


_LIAR = """
class Liar:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __bool__(self): return True
    def __len__(self): return 1
    def __iter__(self): return iter([self])
    def __getattr__(self, name): return self
    def __call__(self, *a, **k): return self
    def __reduce__(self): return (eval, ("'x'",))
    def __str__(self): return 'x'
    __repr__ = __str__
"""

ATTACKS = (
    *read_attacks("values"),
    _returns("equal to everything", "Liar()", _LIAR),
    _returns("equal to everything inside a list", "[Liar()]", _LIAR),
    _returns("equal to everything as a key", "{Liar(): 1}", _LIAR),
    _returns(
        "int that equals everything",
        "A(3)",
        "class A(int):\n    __eq__ = lambda *a: True\n    __hash__ = int.__hash__",
        must_fail=False,
    ),
    _returns(
        "text that equals everything",
        "A('3')",
        "class A(str):\n    __eq__ = lambda *a: True\n    __hash__ = str.__hash__",
        must_fail=False,
    ),
    _returns(
        "float that equals everything",
        "A(3)",
        "class A(float):\n    __eq__ = lambda *a: True\n    __hash__ = float.__hash__",
        must_fail=False,
    ),
    _returns("list that equals everything", "A([3])", "class A(list):\n    __eq__ = lambda *a: True", must_fail=False),
    _returns("dict that equals everything", "A(a=3)", "class A(dict):\n    __eq__ = lambda *a: True", must_fail=False),
    _returns(
        "tuple that equals everything",
        "A((3,))",
        "class A(tuple):\n    __eq__ = lambda *a: True\n    __hash__ = lambda s: 0",
        must_fail=False,
    ),
    _returns("class that lies", "A()", "class A:\n    @property\n    def __class__(self): return int"),
    _returns(
        "metaclass that lies",
        "A()",
        """
class M(type):
    def __eq__(self, other): return True
    def __hash__(self): return hash(int)
    def __instancecheck__(self, one): return True
    def __subclasscheck__(self, one): return True
class A(metaclass=M): pass
""",
    ),
    _returns(
        "list that grows while read",
        "A([1])",
        """
class A(list):
    def __iter__(self):
        while True: yield 1
    def __len__(self): return 1
""",
        must_fail=False,
    ),
    _returns(
        "list with a wrong length",
        "A([1, 2, 3])",
        "class A(list):\n    def __len__(self): return 10**18",
        must_fail=False,
    ),
    _returns(
        "dict with hostile items",
        "A()",
        "class A(dict):\n    def items(self):\n        while True: yield (1, 2)",
        must_fail=False,
    ),
    _returns("generator", "(i for i in range(3))", must_fail=False),
    _returns("endless iterator", "iter(int, 1)"),
    _returns("function", "f"),
    _returns("type", "int"),
    _returns("module", "__import__('sys')"),
    _returns("frame", "__import__('sys')._getframe()"),
    _returns("exception", "ValueError('x')"),
    _returns("descriptor object", "open(0, closefd=False)", must_fail=False),  # an iterator over its lines,
    _returns("not implemented", "NotImplemented"),
    _returns("ellipsis", "..."),
    _returns("fraction", "Fraction(1, 2)", "from fractions import Fraction"),
    _returns("decimal", "Decimal(1)", "from decimal import Decimal"),
    _returns("bytearray", "bytearray(b'x')"),
    _returns("memory view", "memoryview(b'x')"),
    _returns("named tuple", "A(1)", "from collections import namedtuple\nA = namedtuple('A', 'b')", must_fail=False),
    _returns("default dict", "A(int)", "from collections import defaultdict as A", must_fail=False),
    _returns("enumeration", "A.B", "import enum\nclass A(enum.IntEnum):\n    B = 1", must_fail=False),
    _returns(
        "pickle that runs code", "A()", "import os\nclass A:\n    def __reduce__(self): return (os.system, ('true',))"
    ),
    _returns("slots that raise", "A()", "class A:\n    def __getattribute__(self, name): raise SystemExit(0)"),
    _returns("hash that exits", "{A()}", "import os\nclass A:\n    def __hash__(self): os._exit(0)"),
    _returns("comparison that exits", "A()", "import os\nclass A:\n    def __eq__(self, other): os._exit(0)"),
    _returns(
        "int that exits when read",
        "A(1)",
        "import os\nclass A(int):\n    def __index__(self): os._exit(0)\n    __int__ = __repr__ = __index__",
        must_fail=False,
    ),
    _returns(
        "text that exits when read",
        "A('a')",
        "import os\nclass A(str):\n    def encode(self, *a): os._exit(0)\n    __str__ = __repr__ = encode",
        must_fail=False,
    ),
    _returns("not a number", "float('nan')", must_fail=False),
    _returns("infinity", "[float('inf'), -float('inf'), complex('nan+infj')]", must_fail=False),
    _returns("negative zero", "-0.0", must_fail=False),
    _returns("surrogates", "'\\ud800' + chr(0) + chr(0x10ffff)", must_fail=False),
    _returns("NUL", "'\\0' * 1000", must_fail=False),
    _returns(
        "keys of many types",
        "{None: 1, True: 2, 1.5: 3, 'a': 4, b'a': 5, (1, 2): 6, frozenset([1]): 7}",
        must_fail=False,
    ),
    _returns("nested a little", "[[[[[{}]]]], (), set(), {(): [{1: ()}]}]", must_fail=False),
    _returns("keys that collide", "{i * (2**61 - 1): 0 for i in range(2000)}", must_fail=False),
    _returns("long int", "-(1 << 5000)", must_fail=False),
    _returns("text of a reply", "{'value': x, 'failure': None, 'ok': True}", must_fail=False),
    _returns("nothing", "None", must_fail=False),
    call("function that lies about itself", _LIAR + "f = Liar()", must_fail=True),
)
