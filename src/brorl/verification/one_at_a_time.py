"""A verifier for several threads: their calls take turns.

Verifiers keep caches and worker processes, which calls at the same time would damage.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from brorl.prompts.prompt import Prompt
from brorl.verification.verifier import TrialResponses, Verdict, Verifier


class OneAtATime:
    """Lets one thread at a time call a verifier.

    Args:
        verifier: The verifier; nothing else may call it.
        lock: Verifiers that use the same workers share it.
    """

    def __init__(self, verifier: Verifier, lock: threading.Lock) -> None:
        self._verifier = verifier
        self._lock = lock

    def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        """Verify many responses in one call; see `Verifier`."""
        with self._lock:
            return self._verifier.verify_all(items)

    def check_references(self, references: Sequence[str]) -> dict[str, str]:
        """Find reference answers that no response can match; see `Verifier`."""
        with self._lock:
            return self._verifier.check_references(references)

    def trial_responses(self, reference: str, others: Sequence[str]) -> TrialResponses:
        """Make responses for a trial; see `Verifier`."""
        with self._lock:
            return self._verifier.trial_responses(reference, others)
