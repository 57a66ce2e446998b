"""What a call has started ends with its worker, whatever group or session it is in."""

import subprocess
from pathlib import Path
from typing import TextIO

import pytest
from judges import call, ended, gone, is_running, wait_until

from brorl.verification.sandbox.inside import fork_server
from brorl.verification.sandbox.pool import ProgramPool, WorkerPool

pytestmark = pytest.mark.linux

WAYS = ["session", "group", "grandchild", "daemon"]


@pytest.mark.parametrize("how", [WAYS[0], *(pytest.param(how, marks=pytest.mark.slow) for how in WAYS[1:])])
def test_a_timeout_ends_it(how: str, tmp_path: Path) -> None:
    path = tmp_path / "pid"
    with WorkerPool(1, timeout_s=1.0) as pool:
        (reply,) = pool.run([call("leave", how, str(path))])
        assert reply.failure == "timeout"
        assert gone(int(path.read_text("ascii")), 1.0)


@pytest.mark.parametrize("how", WAYS)
def test_it_stays_for_later_calls_and_ends_with_the_pool(how: str) -> None:
    with WorkerPool(1) as pool:
        (reply,) = pool.run([call("leave", how)])
        assert reply.failure is None
        (other,) = pool.run([call("leave", how)])
        assert pool.run([call("echo", 1)])[0].value == 1
        assert is_running(reply.value)
        assert is_running(other.value)
    assert gone(reply.value, 1.0)
    assert gone(other.value, 1.0)


def test_the_end_of_an_unconfined_program_ends_it() -> None:
    source = "import subprocess\nprint(subprocess.Popen(['sleep', '300'], start_new_session=True).pid)"
    with ProgramPool(1, "unsafe") as pool:
        assert gone(int(ended(pool, source).value), 1.0)


def test_children_are_listed_where_the_kernel_has_no_list_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, **options: str) -> TextIO:
        if name.endswith("/children"):
            raise FileNotFoundError
        return Path(name).open(**options)  # type: ignore[call-overload,no-any-return]

    with subprocess.Popen(["sleep", "300"]) as child:
        wait_until(lambda: child.pid in fork_server._children())
        monkeypatch.setattr(fork_server, "open", fail, raising=False)
        assert child.pid in fork_server._children()
        child.kill()
    assert child.pid not in fork_server._children()
