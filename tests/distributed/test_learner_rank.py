"""A learner rank without Ray: the errors of its start, its memory on a shared GPU, and the weights that it sends."""

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
import torch

from brorl.distributed.learner_rank import LearnerRank
from brorl.errors import FirstRankError, UserError


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (UserError("there is no model here"), f"learner rank 1 on machine {socket.gethostname()}: there is no model"),
        (FirstRankError("learner rank 0 on machine far: no model"), "learner rank 0 on machine far: no model"),
    ],
)
def test_an_error_names_the_rank_that_failed(error: UserError, expected: str, tmp_path: Path) -> None:
    def build(*_: object) -> NoReturn:
        raise error

    (tmp_path / "token").touch()
    with pytest.raises(UserError) as found:
        LearnerRank(1).build(build, 2, ("nowhere", 1), tmp_path / "token")
    assert str(found.value).startswith(expected)


@pytest.mark.parametrize("shares_gpu", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_returns_its_cache_after_its_work_if_it_shares_its_gpu(
    shares_gpu: bool, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def weights() -> list[tuple[str, torch.Tensor]]:
        events.append("weights")
        return []

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("empty"))
    one = LearnerRank(rank, shares_gpu)
    one._learner = SimpleNamespace(logprobs=lambda _: events.append("logprobs"), weights=weights)
    one.call("logprobs", [])
    one.weights()
    assert events == (["logprobs", "empty", "weights", "empty"] if shares_gpu else ["logprobs", "weights"])


def test_the_weights_are_sent_in_the_format_of_the_engine() -> None:
    weight, index = torch.randn(5, 3), torch.arange(4)
    one = LearnerRank(0, sent_dtype=torch.bfloat16)
    one._learner = SimpleNamespace(weights=lambda: [("w", weight.t()), ("index", index)])
    _, stored = one.weights()
    sent = {name: torch.from_numpy(data).view(dtype).reshape(shape) for name, shape, dtype, data in stored}
    assert torch.equal(sent["w"], weight.t().to(torch.bfloat16))
    assert torch.equal(sent["index"], index)
