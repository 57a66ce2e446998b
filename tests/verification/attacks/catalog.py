"""All attacks, by category."""

from __future__ import annotations

from attacks import descriptors, exits, kernel, network, proc, protocol, sources, values
from attacks.attack import Attack, program, read_attacks

CATEGORIES: dict[str, tuple[Attack, ...]] = {
    "loops": (
        *read_attacks("loops"),
        program("input that is not read", "import time\ntime.sleep(10**6)", must_fail=True, stdin="1 2 3\n" * 100_000),
    ),
    "memory": read_attacks("memory"),
    "processes": read_attacks("processes"),
    "files": read_attacks("files"),
    "/proc, /dev and the environment": proc.ATTACKS,
    "network": network.ATTACKS,
    "signals and tracing": read_attacks("signals"),
    "descriptors and forged replies": descriptors.ATTACKS,
    "messages of the runner": protocol.ATTACKS,
    "returned values": values.ATTACKS,
    "exits": exits.ATTACKS,
    "patches of the runner": read_attacks("patches"),
    "output": read_attacks("floods"),
    "rights and the kernel": kernel.ATTACKS,
    "sources and imports": sources.ATTACKS,
}
ALL: tuple[Attack, ...] = tuple(attack for attacks in CATEGORIES.values() for attack in attacks)
