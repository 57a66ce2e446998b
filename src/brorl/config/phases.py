"""Settings of the phases of a run: objectives that follow one another, such as broaden and sharpen."""

from __future__ import annotations

from pydantic import Field

from brorl.config.loss import AdvantageConfig
from brorl.config.section import Section


class PhaseConfig(Section):
    """A part of a run with its own advantages and learning rate."""

    name: str = Field(min_length=1, description="name of the phase in the console and the report")
    until: float = Field(
        1.0, gt=0, le=1, description="fraction of the budget at which the phase ends; 1 for the last one"
    )
    until_coverage_stalls: int | None = Field(
        None, ge=1, description="end the phase after this many evaluations without a new best pass@k of the largest k"
    )
    advantage: AdvantageConfig = Field(AdvantageConfig(), description="settings of the advantages, as in `advantage`")
    learning_rate: float | None = Field(
        None, gt=0, description="replaces optimizer.learning_rate in the phase, before the rule of reference_batch"
    )
