"""Sources that the reader, the compiler, or the importer may choke on, and imports that run code."""

from attacks.attack import program, read_attacks

ATTACKS = (
    *read_attacks("sources"),
    program("NUL in the source", "print(1)\0\nprint(2)", must_fail=True),
    program("surrogate in a literal of the source", "print('\ud800')"),
    program("unpaired surrogate as a name", "\udfff = 1", must_fail=True),
    program("byte order mark", "\ufeffprint(1)"),
    program("form feeds and returns", "print(1)\r\x0cprint(2)\r\nprint(3)"),
    program("empty source", ""),
    program("deep brackets", "(" * 100_000, must_fail=True),
    program("deep blocks", "".join(" " * i + "if 1:\n" for i in range(200)) + " " * 200 + "pass", must_fail=True),
    program("long line", "x = [" + "1," * 200_000 + "]"),
    program("long names", "a" * 1_000_000 + " = 1"),
    program("long literal", "x = " + "9" * 100_000, must_fail=True),
    program("many operators", "x = 1" + "+1" * 50_000),
)
