"""What this process reads of a reply: no more than its limits, however dense the text is."""

import pytest
from judges import LIMITS, call_judge

from brorl.verification.sandbox import process
from brorl.verification.sandbox.pool import ProgramPool
from brorl.verification.sandbox.request import Limits, Reply
from brorl.verification.sandbox.values import encode

pytestmark = pytest.mark.linux


def test_a_text_of_too_many_parts_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same number of bytes takes a hundred times as long to read if it is thousands of dicts."""
    decoded: list[int] = []

    def decode(text: str) -> object:
        decoded.append(len(text))
        return text

    monkeypatch.setattr(process, "decode", decode)
    source = "def dense(n): return [{}] * n\ndef long(n): return ['x' * n]"
    limits = Limits(LIMITS.seconds, output_bytes=1 << 20, output_parts=200)
    calls = [("dense", (1_000,)), ("long", (100_000,)), ("dense", (100,)), ("dense", (101,))]
    with ProgramPool(1) as pool:
        (replies,) = pool.run([call_judge(source, *calls, limits=limits)])
    assert isinstance(replies, list)
    texts = [["x" * 100_000], [{}] * 100]
    assert [reply.failure for reply in replies if isinstance(reply, Reply)] == [
        *("too much output", None, None, "too much output")
    ]
    assert decoded == [len(encode(None)), *(len(encode(one)) for one in texts)]
