"""Workers that the tests of tools share."""

from collections.abc import Iterator

import pytest

from brorl.verification.sandbox.pool import Workers
from brorl.verification.settings import VerificationSettings


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    with Workers.from_settings(VerificationSettings(workers=2, memory_mib=512)) as workers:
        yield workers
