"""Programs by script: judges get their replies from a function, without processes and without a clock."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from brorl.verification.sandbox.pool import ProgramPool
from brorl.verification.sandbox.request import Limits, LostError, Reply, Undecided
from brorl.verification.sandbox.worker import ANSWER, Judge, OutsideError, T, Worker


@dataclass(frozen=True)
class Request:
    """What a judge asked of a worker."""

    kind: str  # `run`, `load` or `call`
    limits: Limits
    name: str = ANSWER  # of the process
    arguments: tuple[object, ...] | None = ()  # of a call


Script = Callable[[Request], Reply]


class ScriptedWorker(Worker):
    """A worker whose programs follow a script; test code calls its outside function `calls` times while it loads."""

    def __init__(self, script: Script, calls: int = 1) -> None:
        self._script, self._calls = script, calls
        self.errors: list[str | None] = []  # what the calls of the outside function raised

    def run(self, source: str, stdin: str, limits: Limits) -> Reply:  # noqa: ARG002
        return self._script(Request("run", limits, ""))

    def load(
        self,
        source: str,  # noqa: ARG002
        limits: Limits,
        name: str = ANSWER,
        outside: Mapping[str, Callable[..., object]] | None = None,
    ) -> Reply:
        for _ in range(self._calls if outside else 0):
            try:
                next(iter((outside or {}).values()))(1)
                self.errors.append(None)
            except OutsideError as error:
                self.errors.append(str(error))
        return self._script(Request("load", limits, name))

    def call(self, function: str, arguments: tuple[object, ...] | None, limits: Limits, name: str = ANSWER) -> Reply:  # noqa: ARG002
        return self._script(Request("call", limits, name, arguments))


class ScriptedPool(ProgramPool):
    """A pool whose programs follow a script; it counts the judges and keeps their requests."""

    def __init__(self, script: Script) -> None:
        super().__init__(1, "unsafe")  # no program runs
        self._script = script
        self.num_judges = 0
        self.requests: list[Request] = []

    def run(self, judges: Sequence[Judge[T]]) -> list[T | Undecided]:
        self.num_judges += len(judges)
        return [self._decision(judge) for judge in judges]

    def preloading(self, *_modules: str) -> ProgramPool:
        return self

    def _decision(self, judge: Judge[T]) -> T | Undecided:
        try:
            return judge(ScriptedWorker(self._reply))
        except LostError as error:
            return Undecided(str(error))

    def _reply(self, request: Request) -> Reply:
        self.requests.append(request)
        return self._script(request)
