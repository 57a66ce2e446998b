"""Ranks of one process, and processes that do not meet."""

import socket

import pytest
import torch

from brorl.errors import UserError
from brorl.training.ranks import ALONE, join


def test_one_process_joins_nothing_and_is_its_own_sum() -> None:
    assert join(0, 1, "nowhere", 1) == ALONE
    numbers = torch.tensor([1.5, -2.0])
    assert ALONE.sum(numbers) is numbers
    assert ALONE.maximum(3) == 3
    assert ALONE.gather("mine") == ["mine"]


def test_a_rank_that_meets_no_others_ends_with_an_error() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        with pytest.raises(UserError, match=rf"could not reach the other learner ranks at 127\.0\.0\.1:{port} within"):
            join(1, 2, "127.0.0.1", port, timeout_s=0.5)
    assert not torch.distributed.is_initialized()
