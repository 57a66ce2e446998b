"""Programs by script: judges get their replies from a function, without processes and without a clock."""

from collections.abc import Callable, Sequence

from brorl.verification.sandbox.pool import ProgramPool
from brorl.verification.sandbox.requests import (
    Judge,
    LostError,
    Reply,
    Request,
    T,
    Undecided,
)

Script = Callable[[Request], Reply]


def decision(judge: Judge[T], script: Script) -> T:
    """Return the decision of a judge whose programs follow a script."""
    try:
        request = next(judge)
        while True:
            request = judge.send(script(request))
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


class ScriptedPool(ProgramPool):
    """A pool whose programs follow a script; it counts the judges and keeps their requests."""

    def __init__(self, script: Script) -> None:
        super().__init__(1, "unsafe")  # no program runs
        self._script = script
        self.num_judges = 0
        self.requests: list[Request] = []

    def run(self, judges: Sequence[Callable[[], Judge[T]]]) -> list[T | Undecided]:
        self.num_judges += len(judges)
        return [self._decision(judge()) for judge in judges]

    def preloading(self, *_modules: str) -> ProgramPool:
        return self

    def _decision(self, judge: Judge[T]) -> T | Undecided:
        try:
            return decision(judge, self._reply)
        except LostError as error:
            return Undecided(str(error))

    def _reply(self, request: Request) -> Reply:
        self.requests.append(request)
        return self._script(request)
