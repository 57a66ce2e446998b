"""A learner rank without Ray: the errors of its start."""

import socket
from typing import NoReturn

import pytest

from brorl.distributed.learner_rank import LearnerRank
from brorl.errors import FirstRankError, UserError


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (UserError("there is no model here"), f"learner rank 1 on machine {socket.gethostname()}: there is no model"),
        (FirstRankError("learner rank 0 on machine far: no model"), "learner rank 0 on machine far: no model"),
    ],
)
def test_an_error_names_the_rank_that_failed(error: UserError, expected: str) -> None:
    def build(*_: object) -> NoReturn:
        raise error

    with pytest.raises(UserError) as found:
        LearnerRank(1).build(build, 2, ("nowhere", 1), None)
    assert str(found.value).startswith(expected)
