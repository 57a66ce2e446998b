"""Signals while a step is in progress."""

import ctypes
import os
import signal
import socket
import threading
from collections.abc import Iterator

import pytest

from brorl.training.stop_request import StopNow, StopRequest


@pytest.mark.parametrize("stop_signal", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_asks_second_raises(stop_signal: signal.Signals) -> None:
    with StopRequest() as stop:
        assert not stop.requested
        os.kill(os.getpid(), stop_signal)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), stop_signal)


@pytest.fixture
def _closing_a_terminal_ends_this_program() -> Iterator[None]:
    """Under `nohup` the tests ignore SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("_closing_a_terminal_ends_this_program")
def test_a_closed_terminal_asks_once() -> None:
    """The kernel and the shell both send the signal; the second one must not discard the step."""
    with StopRequest() as stop:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGHUP)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


@pytest.mark.usefixtures("_closing_a_terminal_ends_this_program")
def test_a_program_under_nohup_goes_on() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert not stop.requested


def test_signals_are_what_they_were_afterwards() -> None:
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    with StopRequest():
        assert signal.getsignal(signal.SIGINT) not in before
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before
    with pytest.raises(ZeroDivisionError), StopRequest():
        raise ZeroDivisionError
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before


def test_other_threads_leave_signals_alone() -> None:
    seen = []

    def enter() -> None:
        with StopRequest() as stop:
            seen.append((signal.getsignal(signal.SIGINT), stop.requested))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [(before, False)]


@pytest.mark.parametrize("stop_signal", [signal.SIGINT, signal.SIGTERM])
def test_the_answer_does_not_wait_for_the_call_that_is_under_way(stop_signal: signal.Signals) -> None:
    """The main thread is in a C call, which only the answer ends: Python's own handler runs too late to give it."""
    reader, writer = os.pipe()
    answers: list[bool] = []

    def answer(discards: bool) -> None:
        answers.append(discards)
        os.write(writer, b"a")

    with StopRequest(answer) as stop:
        signal.siginterrupt(stop_signal, False)  # the call goes on after the signal, as a backward pass does
        send = threading.Timer(0.05, os.kill, (os.getpid(), stop_signal))
        give_up = threading.Timer(30.0, os.write, (writer, b"t"))
        send.start()
        give_up.start()
        received = ctypes.create_string_buffer(1)
        ctypes.CDLL(None).read(reader, received, 1)
        give_up.cancel()
        send.join()
        assert received.raw == b"a"
        assert answers == [False]
        assert stop.requested
    os.close(reader)
    os.close(writer)
    give_up.join()


def test_the_answer_is_given_once_and_says_whether_work_is_discarded() -> None:
    answers: list[bool] = []
    answered = threading.Event()

    def answer(discards: bool) -> None:
        answers.append(discards)
        answered.set()

    def work(stop: StopRequest) -> None:
        stop.check()  # nothing was requested
        os.kill(os.getpid(), signal.SIGINT)
        assert answered.wait(30)
        stop.check()
        raise AssertionError("the check ends the work")

    with StopRequest(answer) as stop:
        with pytest.raises(StopNow), stop.discarding():
            work(stop)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert answers == [True]


def test_an_answer_that_comes_late_is_about_the_work_at_the_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that answers gets to run only when the work is over."""
    over = threading.Event()
    pair = socket.socketpair

    class LateReader:
        def __init__(self, reader: socket.socket) -> None:
            self._reader = reader

        def recv(self, size: int) -> bytes:
            received = self._reader.recv(size)
            over.wait(30)
            return received

        def close(self) -> None:
            self._reader.close()

    def late_pair() -> tuple[LateReader, socket.socket]:
        reader, writer = pair()
        return LateReader(reader), writer

    monkeypatch.setattr("socket.socketpair", late_pair)
    answers: list[bool] = []
    with StopRequest(answers.append) as stop:
        with pytest.raises(StopNow), stop.discarding():
            os.kill(os.getpid(), signal.SIGINT)
        over.set()
    assert answers == [True]


def test_a_request_ends_only_work_that_can_be_discarded() -> None:
    with StopRequest() as stop:
        with pytest.raises(StopNow), stop.discarding():
            os.kill(os.getpid(), signal.SIGINT)  # no check follows: the block ends with one
        stop.check()
        done = False
        with pytest.raises(StopNow), stop.discarding():
            done = True
        assert not done  # the request came before the block
        stop.check()  # the block is over


def test_an_error_within_the_block_is_not_hidden_by_a_request() -> None:
    def fail() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        raise ZeroDivisionError

    with StopRequest() as stop, pytest.raises(ZeroDivisionError), stop.discarding():
        fail()


def test_nothing_is_left_open() -> None:
    before = signal.set_wakeup_fd(-1)
    threads = threading.active_count()
    with StopRequest():
        pass
    assert signal.set_wakeup_fd(before) == -1
    assert threading.active_count() == threads
