"""Programs that use sockets."""

from attacks.attack import program, read_attacks


def _made(family: int, kind: int, protocol: int = 0) -> str:
    return f"import socket\nsocket.socket({family}, {kind}, {protocol})\nprint(BREACH)"


ATTACKS = (
    *read_attacks("network"),
    program("raw socket", _made(2, 3, 1)),
    program("packet socket", _made(17, 3)),
    program("netlink", _made(16, 3)),
    program("socket of virtual machines", _made(40, 1)),
    program("socket of the kernel's ciphers", _made(38, 5)),
    program("Bluetooth", _made(31, 3, 1)),
    program("SMC", _made(43, 1)),
    program("XDP", _made(44, 3)),
    program("TIPC", _made(30, 5)),
    program("TCP socket", _made(2, 1)),
    program("UDP socket", _made(10, 2)),
)
