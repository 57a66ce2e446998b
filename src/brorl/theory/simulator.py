"""The token-level simulator: one softmax over a vocabulary. Each step draws N tokens and updates the logits.

There is no model or prompt. Each token stands for a whole response, and the tokens with index < num_correct are
correct. Invalid settings are rejected, and the simulation stops if the logits become non-finite. The paper leaves some
settings open (optimizer constants, duplicates, whether the anchor is correct). Their defaults reproduce its Figure 3;
docs/explanation/simulator.md has the numbers for the alternatives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args, get_origin, get_type_hints

import numpy as np

from brorl.arrays import FloatArray, IntArray
from brorl.errors import DivergedError
from brorl.seeds import seed_sequence
from brorl.theory.mass_balance import MassBalance, mass_balance

_CORRECT_LOGIT, _ANCHOR_LOGIT = 3.0, 5.0
_MINIMUM = {"rollouts": 1, "vocabulary_size": 2, "num_correct": 1, "steps": 1, "seed": 0, "record_every": 1}
_DEFAULT_WEIGHT_DECAY = {"adamw": 0.01, "adam": 0.0, "sgd": 0.0}


@dataclass(frozen=True, kw_only=True)
class SimulationSettings:
    """Settings of a simulation. The defaults are the paper's; where it leaves a setting open, they reproduce Figure 3.

    Attributes:
        rollouts: Draws per step, N.
        vocabulary_size: Number of tokens, V.
        num_correct: Number of correct tokens; they have the lowest indices.
        steps: Gradient steps, T.
        init: Initial logits: "seeded" (0, correct tokens 3, anchor 5) or "normal" (the same plus normal noise).
        init_spread: Standard deviation of that noise, in nats; > 0 with "normal", 0 with "seeded".
        anchor: Whether the single token with logit 5 is "wrong", "correct" or absent ("none"). The paper leaves this
            open; "wrong" matches its initial correct mass of 0.6296.
        surrogate: The factor on each drawn token's advantage in the loss: its "probability" p, or the "ratio" p /
            p_old, which at p = p_old has the gradient of log p (REINFORCE, and PPO before any clipping).
        duplicates: Whether a token drawn c times enters the loss c times ("counted", the sum over draws) or once
            ("distinct", the sum over sampled outcomes of Theorem 1). The factor 1/N and the mean over draws do not
            depend on this.
        baseline: "mean" subtracts the mean reward of the N draws from each reward; "none" subtracts nothing.
        reward_correct: Reward of a correct token.
        reward_wrong: Reward of any other token; below reward_correct.
        optimizer: "adamw", "adam" or "sgd", as in torch with its default betas and without momentum.
        learning_rate: Learning rate, constant.
        weight_decay: Decay of the logits toward 0, as torch defines it for the optimizer (decoupled for adamw, added
            to the gradient for the others); torch's default (0.01 for adamw, else 0) if None.
        epsilon: Constant in the denominator of adamw and adam. Gradients are as small as 1e-9 here, so it matters.
        seed: Seed for the draws and for the noise in the initial logits; the noise is the same for every N.
        record_every: Steps between two records; the start and the end are always recorded.

    Raises:
        ValueError: If a setting is out of range, or two settings contradict each other.

    Source: BroRL (arXiv 2510.01180), section 4.1 and Figure 3.
    """

    rollouts: int = 512
    vocabulary_size: int = 128_000
    num_correct: int = 10_000
    steps: int = 1000
    init: Literal["seeded", "normal"] = "seeded"
    init_spread: float = 0.0
    anchor: Literal["wrong", "correct", "none"] = "wrong"
    surrogate: Literal["probability", "ratio"] = "probability"
    duplicates: Literal["counted", "distinct"] = "counted"
    baseline: Literal["mean", "none"] = "mean"
    reward_correct: float = 1.0
    reward_wrong: float = -1.0
    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"
    learning_rate: float = 1e-3
    weight_decay: float | None = None
    epsilon: float = 1e-8
    seed: int = 0
    record_every: int = 10

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            value = getattr(self, name)
            if get_origin(hint) is Literal and value not in get_args(hint):
                raise ValueError(f"{name} must be one of {', '.join(get_args(hint))}, got {value}")
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name} must be a finite number, got {value}")
        for name, minimum in _MINIMUM.items():
            if getattr(self, name) < minimum:
                raise ValueError(f"{name} must be at least {minimum}, got {getattr(self, name)}")
        if self.seed >= 2**64:
            raise ValueError(f"seed must be below 2**64, got {self.seed}")
        if self.num_correct >= self.vocabulary_size:
            raise ValueError(
                f"num_correct must be below vocabulary_size {self.vocabulary_size} (one token must be wrong), "
                f"got {self.num_correct}"
            )
        for name in ("learning_rate", "epsilon"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if self.decay < 0:
            raise ValueError(f"weight_decay must be at least 0, got {self.decay}")
        if (self.init == "normal") != (self.init_spread > 0) or self.init_spread < 0:
            needed = "above 0 with init normal, 0 with init seeded"
            raise ValueError(f"init_spread must be {needed}; got {self.init_spread} with init {self.init}")
        if self.reward_correct <= self.reward_wrong:
            raise ValueError(
                f"reward_correct must be above reward_wrong, got {self.reward_correct} and {self.reward_wrong}"
            )

    @property
    def decay(self) -> float:
        """The weight decay, with None replaced by torch's default."""
        return _DEFAULT_WEIGHT_DECAY[self.optimizer] if self.weight_decay is None else self.weight_decay


@dataclass(frozen=True, eq=False)
class SimulationResult:
    """A simulation at its S recorded steps."""

    settings: SimulationSettings
    step: IntArray  # gradient steps taken before each record, shape [S]: 0, 10, 20, ...
    correct_mass: FloatArray  # total probability of the correct tokens, Q_pos, shape [S]
    # fraction of the correct tokens that are likelier than at step 0, shape [S], 0 to 1
    fraction_improved: FloatArray
    worst_drop: FloatArray  # largest drop in a correct token's probability since step 0, shape [S]; <= 0
    # the terms of Theorem 1 for the first step's draws; None unless reward_correct >= 0 >= reward_wrong
    first_step: MassBalance | None


def simulate(settings: SimulationSettings) -> SimulationResult:
    """Simulate T steps, each drawing N tokens i.i.d. from p = softmax(z) and updating the logits z with the gradient.

    The same settings give bitwise identical results on the same machine.

    Raises:
        DivergedError: If a logit becomes non-finite (the learning rate is far too high).

    Source: BroRL (arXiv 2510.01180), section 4.1.
    """
    rng = np.random.default_rng(seed_sequence(settings.seed, 1))
    logit_V = initial_logits(settings)
    p_V, gradient_V = np.empty_like(logit_V), np.empty_like(logit_V)
    optimizer = Optimizer(settings)
    _softmax(logit_V, 0, out=p_V)
    start_C = p_V[: settings.num_correct].copy()
    steps = []
    records = []
    first_step = None
    for step in range(settings.steps + 1):
        if step:
            token_K, count_K = draw_outcomes(rng, p_V, settings.rollouts)
            if step == 1 and settings.reward_correct >= 0 >= settings.reward_wrong:
                first_step = _terms(p_V, token_K, settings)
            surrogate_gradient(p_V, token_K, count_K, settings, out=gradient_V)
            with np.errstate(over="ignore", invalid="ignore"):  # _softmax checks the logits
                optimizer.update(logit_V, gradient_V)
            _softmax(logit_V, step, out=p_V)
        if step % settings.record_every == 0 or step == settings.steps:
            steps.append(step)
            records.append(_measure(p_V[: settings.num_correct], start_C))
    mass, improved, drop = np.array(records).T.copy()
    return SimulationResult(settings, np.array(steps, np.int64), mass, improved, drop, first_step)


def _terms(p_V: FloatArray, token_K: IntArray, settings: SimulationSettings) -> MassBalance:
    """Return the terms of Theorem 1 for a step's distinct tokens, even if the simulator uses a different update."""
    token_V = np.arange(p_V.size)
    return mass_balance(
        p_V / p_V.sum(), token_V < settings.num_correct, np.isin(token_V, token_K), settings.rollouts,
        reward_correct=settings.reward_correct, reward_wrong=settings.reward_wrong,
        learning_rate=settings.learning_rate,
    )  # fmt: skip


def initial_logits(settings: SimulationSettings) -> FloatArray:
    """Return the logits at step 0, shape [V]: 0, correct tokens 3, anchor 5, plus noise with init "normal"."""
    logit_V = np.zeros(settings.vocabulary_size)
    logit_V[: settings.num_correct] = _CORRECT_LOGIT
    if settings.anchor != "none":
        logit_V[0 if settings.anchor == "correct" else settings.num_correct] = _ANCHOR_LOGIT
    if settings.init == "normal":
        rng = np.random.default_rng(seed_sequence(settings.seed, 0))
        logit_V += rng.normal(0.0, settings.init_spread, logit_V.size)
    return logit_V


def draw_outcomes(rng: np.random.Generator, p_V: FloatArray, num_draws: int) -> tuple[IntArray, IntArray]:
    """Draw N tokens i.i.d.: 7, 2, 7 -> tokens [2, 7], counts [1, 2]. A token of probability 0 is never drawn."""
    if num_draws > p_V.size:  # memory and time grow with V, not with N
        count_V = rng.multinomial(num_draws, p_V)
        token_K = np.flatnonzero(count_V)
        return token_K, count_V[token_K]
    cumulative_V = np.cumsum(p_V)
    # running sums of exponentials, divided by their total, are N sorted uniform numbers
    arrival = np.cumsum(rng.standard_exponential(num_draws + 1))
    quantile_N = arrival[:-1] * (cumulative_V[-1] / arrival[-1])
    token_N = np.searchsorted(cumulative_V, quantile_N, side="right")
    last = np.searchsorted(cumulative_V, cumulative_V[-1])  # for a quantile rounded up to the total
    np.minimum(token_N, last, out=token_N)
    starts_K = np.flatnonzero(np.append(True, token_N[1:] != token_N[:-1]))
    return token_N[starts_K], np.diff(np.append(starts_K, num_draws))


def surrogate_gradient(
    p_V: FloatArray, token_K: IntArray, count_K: IntArray, settings: SimulationSettings, out: FloatArray
) -> None:
    """Write the gradient of the surrogate loss with respect to the logits into `out`, shape [V].

        L = -(1/N) sum_j (R_j - b) f_j,   f_j = p_j ("probability") or p_j / p_old,j ("ratio", at p = p_old)

    The sum runs over the N draws, or over the K distinct tokens if duplicates is "distinct". The baseline b is the mean
    reward of the N draws, or 0; it has no gradient.

    Source: BroRL (arXiv 2510.01180), section 4.1 and Appendix C.1 (distinct, no baseline).
    """
    num_draws = count_K.sum()
    reward_K = np.where(token_K < settings.num_correct, settings.reward_correct, settings.reward_wrong)
    if settings.baseline == "mean":
        # from the fraction of correct draws: exactly 0 if all draws are of one kind, for any rewards
        fraction = count_K[token_K < settings.num_correct].sum() / num_draws
        span = settings.reward_correct - settings.reward_wrong
        reward_K = span * np.where(token_K < settings.num_correct, 1 - fraction, -fraction)
    weight_K = reward_K / num_draws
    if settings.duplicates == "counted":
        weight_K *= count_K
    if settings.surrogate == "probability":
        weight_K *= p_V[token_K]
    np.multiply(p_V, weight_K.sum(), out=out)
    out[token_K] -= weight_K


class Optimizer:
    """torch.optim.AdamW, Adam (with betas 0.9 and 0.999) or SGD (without momentum), applied to one vector in place."""

    def __init__(self, settings: SimulationSettings) -> None:
        self._settings = settings
        self._first_V, self._second_V, self._scratch_V = np.zeros((3, settings.vocabulary_size))
        self._steps = 0

    def update(self, logit_V: FloatArray, gradient_V: FloatArray) -> None:
        """Take a step: update the logits in place and overwrite the gradient."""
        settings = self._settings
        scratch_V = self._scratch_V
        self._steps += 1
        if settings.optimizer == "adamw":
            logit_V *= 1 - settings.learning_rate * settings.decay
        elif settings.decay:
            gradient_V += np.multiply(logit_V, settings.decay, out=scratch_V)
        if settings.optimizer == "sgd":
            logit_V -= np.multiply(gradient_V, settings.learning_rate, out=scratch_V)
            return
        self._first_V *= 0.9
        self._first_V += np.multiply(gradient_V, 1 - 0.9, out=scratch_V)
        self._second_V *= 0.999
        np.multiply(gradient_V, gradient_V, out=scratch_V)
        scratch_V *= 1 - 0.999
        self._second_V += scratch_V
        np.sqrt(self._second_V, out=scratch_V)
        scratch_V /= math.sqrt(1 - 0.999**self._steps)
        scratch_V += settings.epsilon
        np.divide(self._first_V, scratch_V, out=scratch_V)
        scratch_V *= settings.learning_rate / (1 - 0.9**self._steps)
        logit_V -= scratch_V


def _softmax(logit_V: FloatArray, step: int, out: FloatArray) -> None:
    highest = logit_V.max()
    if not np.isfinite(highest):
        raise DivergedError(f"the logits are no longer finite after step {step}; set a lower learning_rate")
    np.subtract(logit_V, highest, out=out)
    np.exp(out, out=out)
    out /= out.sum()


def _measure(p_C: FloatArray, start_C: FloatArray) -> tuple[float, float, float]:
    """Return the mass of the correct tokens, the fraction that rose, and the largest drop (at most 0)."""
    change_C = p_C - start_C
    return float(p_C.sum()), float((change_C > 0).mean()), min(float(change_C.min()), 0.0)
