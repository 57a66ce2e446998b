"""The workload of all peers: a model folder, prompts, lengths, and the cost of the model.

In: `workload.json` of `build_workload.py`. It imports nothing heavy; the scheduler reads it too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True)
class Work:
    """The tokens that go through the model to sample some responses.

    Attributes:
        fed_tokens: Tokens that go through the layers: prompts, and response tokens except the last ones.
        attended: Sum over these tokens of the positions that they attend to, including themselves.
        predictions: Tokens that go through the head: one per prompt, and every fed response token.
    """

    fed_tokens: int
    attended: int
    predictions: int

    @classmethod
    def total(cls, works: Iterable[Work]) -> Work:
        """Add up the work of several prompts."""
        listed = list(works)
        return cls(
            sum(w.fed_tokens for w in listed), sum(w.attended for w in listed), sum(w.predictions for w in listed)
        )


@dataclass(frozen=True)
class Workload:
    """The workload of all peers, and the numbers that describe it.

    Attributes:
        setting: `full`, `low`, `big-full`, `big-low`, `shipped` or `trained`.
        folder: Holds `model/` (Hugging Face format with tokenizer) and this, as `workload.json`.
        domain: The reward: `parity` (of the sum of the response's token ids) or `countdown`.
        prompts: `id`, `text`, `token_ids`, `reference` of every prompt, in the order of use.
        max_new_tokens: Length limit of a response.
        eos_token_id: The end-of-sequence token.
        fixed_length: Whether every response has exactly `max_new_tokens`: the end token lies outside of the vocabulary.
        entropy_nats: Measured mean entropy of sampled tokens.
        head_scale: Factor on the language model head that gave this entropy.
        num_layers: Decoder layers.
        query_width: Heads times head size.
        layer_parameters: Weights of the layers in matrix products.
        head_parameters: Weights of the head.
    """

    setting: str
    folder: str
    domain: str
    prompts: list[dict[str, Any]]
    max_new_tokens: int
    eos_token_id: int
    fixed_length: bool
    entropy_nats: float
    head_scale: float
    num_layers: int
    query_width: int
    layer_parameters: int
    head_parameters: int

    @property
    def model_dir(self) -> Path:
        """The Hugging Face folder."""
        return Path(self.folder) / "model"

    @property
    def name(self) -> str:
        """The setting and the length limit: the workload of one row."""
        return f"{self.setting}-{self.max_new_tokens}"

    def prompts_of(self, turn: int, prompts_per_step: int) -> list[dict[str, Any]]:
        """Return the prompts of a turn."""
        return self.prompts[turn * prompts_per_step : (turn + 1) * prompts_per_step]

    def write(self) -> None:
        """Write `workload.json` into the folder."""
        text = json.dumps(asdict(self), indent=1)
        (Path(self.folder) / "workload.json").write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, folder: str | Path) -> Self:
        """Read `workload.json` of a folder."""
        return cls(**json.loads((Path(folder) / "workload.json").read_text(encoding="utf-8")))

    def flops(self, work: Work) -> float:
        """Count the floating-point operations of the matrix products of one forward pass.

        Args:
            work: The work.

        Returns:
            2 per weight and token (none for embeddings; the head only for predictions), and 4 per layer, query channel
            and position attended to.
        """
        products = self.layer_parameters * work.fed_tokens + self.head_parameters * work.predictions
        return 2.0 * products + 4.0 * self.num_layers * self.query_width * work.attended
