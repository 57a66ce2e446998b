"""A campaign: all attacks through one pool, honest programs among them, and the harm that was done.

In: `python -m attacks.campaign LEVEL [--name NAME ...] [--bites] [--part K --seed S]`, in the environment of the tests. Out: a JSON object
on standard output: `harm` by attack, `strangers` (harm to the honest programs, to this process, or to the machine).
It runs in a process of its own: this process plays the trainer, whose memory and environment hold secrets.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from attacks.attack import Attack
from attacks.catalog import ALL
from attacks.leftovers import inherit_orphans, remaining
from attacks.scene import Scene, scenes
from brorl.verification.sandbox.pool import ProgramPool
from brorl.verification.sandbox.request import Limits, Reply, Undecided
from brorl.verification.sandbox.values import Elements
from brorl.verification.sandbox.worker import Worker

SHORT = Limits(seconds=0.4, memory_bytes=256 << 20)  # of attacks that cannot end well
LONG = replace(SHORT, seconds=3.0)
HONEST = replace(SHORT, seconds=120.0)
_PLAIN = (type(None), bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict, Elements)
_HONEST_EVERY = 8
_HONEST_PROGRAM = "a, b = map(int, input().split())\nprint(a * b)\n"
_HONEST_FUNCTION = "def f(x):\n    return [x * x, {'a': (x, -x)}]\n"
_STATE = """
import builtins, gc, os, random, resource, signal, sys, threading, time
print(sorted(vars(builtins)), [type(one).__name__ for one in (time.time, os.write, len, isinstance)])
print([str(signal.getsignal(n)) for n in range(1, 65)], sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
print([resource.getrlimit(n) for n in range(16) if n != 0], os.umask(0o77), dict(os.environ), os.getgroups())
print(sys.getrecursionlimit(), sys.getswitchinterval(), gc.get_threshold(), gc.isenabled(), threading.active_count())
print([signal.getitimer(n) for n in range(3)], sys.gettrace(), sys.getprofile(), sys.meta_path, sys.argv, sys.path)
found = []
for file in range(64):
    try:
        found.append((file, oct(os.fstat(file).st_mode)))
    except OSError:
        pass
print(found, sorted(sys.modules))
for action in (os.getcwd, lambda: os.listdir('.'), lambda: os.getpriority(0, 0), lambda: bool(os.nice(0))):
    try:
        print(action())
    except OSError as error:
        print(error)
"""


def attack_judge(scene: Scene, worker: Worker) -> list[Reply]:
    """Run one attack; return all replies."""
    attack = scene.attack
    limits = SHORT if attack.must_fail else LONG
    if attack.function is None:
        return [worker.run(scene.source, attack.stdin, limits)]
    replies = [worker.load(scene.source, limits)]
    for argument in (3, [1, "a", {2: (3.5, None)}]):
        if replies[-1].failure is not None:
            break
        replies.append(worker.call(attack.function, (argument,), limits))
    return replies


def honest_judge(problems: list[str], states: set[str], worker: Worker) -> None:
    """Run honest programs; record answers that are not right, and the state in which a program starts."""
    a, b = random.randrange(10**6), random.randrange(10**6)
    reply = worker.run(_HONEST_PROGRAM, f"{a} {b}\n", HONEST)
    if reply != Reply(f"{a * b}\n", None, reply.seconds):
        problems.append(f"an honest program got {str(reply)[:300]}")
    worker.load(_HONEST_FUNCTION, HONEST)
    for x in (a, b):
        reply = worker.call("f", (x,), HONEST)
        if reply.value != [x * x, {"a": (x, -x)}]:
            problems.append(f"an honest function got {str(reply)[:300]}")
    reply = worker.run(_STATE, "", HONEST)
    states.add(f"{reply.value}{reply.failure or ''}")


def harm_of(scene: Scene, replies: list[Reply] | Undecided) -> list[str]:
    """Return the harm of one attack."""
    if isinstance(replies, Undecided):
        return [*scene.harm(()), f"its verdict was lost: {replies.reason}"]
    problems = scene.harm(tuple(_shown(reply) for reply in replies))
    if scene.attack.must_fail and replies[-1].failure is None:
        problems.append(f"did not fail: {_shown(replies[-1])[:200]}")
    for reply in replies:
        if not _is_plain(reply.value):
            problems.append("returned a value that is not plain")
        if len(reply.failure or "") > 10_000:
            problems.append("gave a reason of many characters")
    return problems


def run(level: str, attacks: tuple[Attack, ...]) -> dict[str, object]:
    """Run attacks at a level, honest programs among them.

    Args:
        level: `landlock`, `seccomp` or `unsafe`.
        attacks: The attacks.

    Returns:
        The harm of each attack by its name, and the harm to strangers.
    """
    strangers: list[str] = []
    states: set[str] = set()
    with _watched(strangers), scenes(attacks) as made, ProgramPool(num_workers=2, sandbox=level) as pool:
        honest = partial(honest_judge, strangers, states)
        jobs = [(scene, partial(attack_judge, scene)) for scene in made]
        for place in range(0, len(made) + len(made) // _HONEST_EVERY, _HONEST_EVERY + 1):
            jobs.insert(place, (None, honest))
        outcomes = pool.run([judge for _, judge in jobs])
        strangers += [
            f"an honest program was lost: {outcome.reason}"
            for outcome, (scene, _) in zip(outcomes, jobs, strict=True)
            if scene is None and isinstance(outcome, Undecided)
        ]
        victims = {scene.victim for scene in made}
        strangers += [f"left {line}" for line in remaining(victims, 2)]
        harm = {
            scene.attack.name: harm_of(scene, outcome)
            for outcome, (scene, _) in zip(outcomes, jobs, strict=True)
            if scene is not None
        }
        pool.close()
        strangers += [f"left after closing: {line}" for line in remaining(victims, 1)]
    if len(states) > 1:
        strangers.append("programs start in different states")
        sys.stderr.write("\n".join(sorted(states)))
    return {"harm": harm, "strangers": strangers}


def main() -> None:
    """Run the attacks that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("level")
    parser.add_argument("--name", nargs="*", default=None)
    parser.add_argument("--bites", action="store_true", help="only attacks that do harm without a sandbox")
    parser.add_argument("--part", type=int, default=1, help="only one attack of so many")
    parser.add_argument("--seed", type=int, default=0, help="which part")
    arguments = parser.parse_args()
    chosen = tuple(
        attack
        for number, attack in enumerate(ALL)
        if (arguments.name is None or attack.name in arguments.name)
        and (attack.bites or not arguments.bites)
        and (number + arguments.seed) % arguments.part == 0
    )
    json.dump(run(arguments.level, chosen), sys.stdout)


def _shown(reply: Reply) -> str:
    try:
        return repr(reply)
    except ValueError:  # an integer of too many digits
        return f"a long value, {reply.failure}"


def _is_plain(value: object) -> bool:
    if type(value) not in _PLAIN:
        return False
    if isinstance(value, dict):
        return all(_is_plain(item) for pair in value.items() for item in pair)
    return not isinstance(value, list | tuple | set | frozenset) or all(map(_is_plain, value))


@contextmanager
def _watched(strangers: list[str]) -> Iterator[None]:
    """Record what happens to this process: signals, priority, limits. Inherit the orphans of all descendants."""
    inherit_orphans()
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGIO, signal.SIGALRM):
        signal.signal(number, lambda number, _frame: strangers.append(f"the trainer got the signal {number}"))
    before = (os.getpriority(os.PRIO_PROCESS, 0), os.getpgid(0), os.umask(0o22))
    yield
    if (os.getpriority(os.PRIO_PROCESS, 0), os.getpgid(0), os.umask(0o22)) != (*before[:2], 0o22):
        strangers.append("the trainer's priority, group or mask was changed")


if __name__ == "__main__":
    main()
