"""The charts of the page: what is shown, under which title, and what to see in it.

In: runs. Out: charts of plotly traces. A chart without numbers says why it has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any

from brorl.report.page.traces import (
    LAST_STEPS,
    Trace,
    against_n,
    held_out_points,
    informative_lines,
    interval_lines,
    line,
    lines,
    pass_at_by_source,
    pass_at_curves,
    pass_at_lines,
    plotly_text,
    ratio_of,
    smoothed,
    value_of,
)
from brorl.report.reasons import (
    reason,
    why_no_certificate,
    why_no_change,
    why_no_coverage,
    why_no_estimate,
    why_no_evaluation,
    why_no_smaller_n,
    why_no_step,
    why_no_update,
)
from brorl.runs.run_record import RunRecord, number

PHASES = ("generation", "verification", "training", "diagnostics", "storing")


@dataclass(frozen=True)
class Chart:
    """A chart of the page.

    Attributes:
        name: Its id on the page.
        title: What it shows.
        explanation: What it is and how to read it, one line.
        traces: Plotly traces; empty if there is nothing to show.
        layout: Plotly layout, without colours.
        empty: Why there is nothing to show.
        by_progress: Whether x is the course of the run, for which the reader chooses a unit.
        resets: Whether resets of the reference are marked.
    """

    name: str
    title: str
    explanation: str
    traces: tuple[Trace, ...]
    layout: dict[str, Any] = field(default_factory=dict)
    empty: str = ""
    by_progress: bool = True
    resets: bool = False


def learning_charts(runs: Sequence[RunRecord]) -> list[Chart]:
    """Return what the runs learned: reward, pass@1, pass@k, success by prompt."""
    no_evaluation = reason(runs, why_no_evaluation)
    charts = [
        Chart(
            "reward",
            "Reward in training",
            "Mean reward of all rollouts of a step. Every step asks other prompts, so follow the bold line.",
            smoothed(runs, lines(runs, [("mean reward", value_of("sampling", "reward"))])),
            _axis("mean reward"),
            reason(runs, why_no_step),
        ),
        Chart(
            "pass1",
            "Held-out pass@1",
            "Chance that one response to a prompt not used in training is correct.",
            pass_at_lines(runs, 1),
            _axis("pass@1", percent=True),
            no_evaluation,
        ),
        Chart(
            "passk",
            "Held-out pass@k",
            "Chance that at least one of k responses is correct. Bars are 95% intervals.",
            pass_at_curves(runs),
            _axis("pass@k", percent=True) | {"xaxis": {"title": {"text": "k"}, "type": "log", "dtick": 0.30103}},
            no_evaluation,
            by_progress=False,
        ),
        _held_out_chart(runs),
    ]
    by_source = pass_at_by_source(runs)
    if by_source:
        charts.append(
            Chart(
                "sources",
                "Held-out pass@1 by source of prompts",
                "The same chance for the prompts of each data set. Bars are 95% intervals.",
                by_source,
                _axis("pass@1", percent=True),
            )
        )
    return charts


def _held_out_chart(runs: Sequence[RunRecord]) -> Chart:
    percent = {"tickformat": ".0%", "range": [-0.03, 1.03]}
    return Chart(
        "held-out",
        "Each held-out prompt, before and after",
        "Share of correct responses at the first and at the last evaluation. Prompts above the line gained.",
        held_out_points(runs),
        {
            "xaxis": {**percent, "title": {"text": "correct before"}},
            "yaxis": {**percent, "title": {"text": "correct after"}},
            "shapes": [_no_change_line(x0=0, x1=1, y0=0, y1=1)],
        },
        reason(runs, why_no_change),
        by_progress=False,
    )


def coverage_charts(runs: Sequence[RunRecord]) -> list[Chart]:
    """Return what N rollouts per prompt saw and missed."""
    not_measured, not_estimated = (reason(runs, why) for why in (why_no_coverage, why_no_estimate))
    return [
        Chart(
            "informative",
            "Groups with correct and incorrect rollouts",
            "Share of a step's groups that teach something, and what fewer of the same rollouts would have found.",
            informative_lines(runs),
            _axis("share of groups", percent=True),
            reason(runs, why_no_step),
        ),
        Chart(
            "informative-n",
            f"The same share against N (last {LAST_STEPS} steps)",
            "Share of groups that teach something if each prompt had N rollouts. Where it is flat, more bring nothing.",
            against_n(runs, "informative_share_at", "groups with both outcomes"),
            _axis("share of groups", percent=True) | _n_axis(),
            reason(runs, why_no_smaller_n),
            by_progress=False,
        ),
        Chart(
            "unsampled",
            "Probability that no rollout sampled",
            "Chance that one more rollout would be a new response, and a new correct one.",
            lines(
                runs,
                [
                    ("new response", value_of("coverage", "pooled", "unsampled")),
                    ("new correct response", value_of("coverage", "pooled", "unsampled_correct")),
                ],
            ),
            _axis("probability", percent=True),
            not_measured,
        ),
        Chart(
            "unsampled-n",
            f"Unsampled correct probability against N (last {LAST_STEPS} steps)",
            "Chance that one more rollout would be a new correct response, after N (beyond the run's N a forecast).",
            against_n(runs, "unsampled_correct_at", "new correct response"),
            _axis("probability", percent=True) | _n_axis(),
            not_estimated,
            by_progress=False,
        ),
        Chart(
            "certificate",
            "What one update did to correct responses",
            "Change of the chance of a correct response, measured on fresh rollouts. Above 0 the update helped.",
            interval_lines(runs, "certificate", "change", "change with 95% interval"),
            _axis("change of probability") | {"shapes": [_no_change_line(xref="paper", x0=0, x1=1, y0=0, y1=0)]},
            reason(runs, why_no_certificate),
        ),
        Chart(
            "improved",
            "Share of correct probability that one update raised",
            "At 100% no correct response became less likely.",
            interval_lines(runs, "certificate", "share_improved", "share with 95% interval"),
            _axis("share", percent=True),
            reason(runs, partial(why_no_certificate, name="share_improved")),
        ),
    ]


def cost_charts(runs: Sequence[RunRecord]) -> list[Chart]:
    """Return what the runs cost: sharing, time, what was dropped, lengths, lost verifications."""
    no_step = reason(runs, why_no_step)
    return [
        Chart(
            "sharing",
            "What sharing saves",
            "Work done as a share of the work for separate rollouts. At 10% the tree does a tenth of it.",
            lines(
                runs,
                [
                    ("tokens computed / sampled", ratio_of("unique_tokens", "sampled_tokens")),
                    ("responses verified / rollouts", ratio_of("distinct_responses", "samples")),
                ],
            ),
            _axis("share", percent=True),
            no_step,
        ),
        _seconds_chart(runs),
        *_dropped_chart(runs),
        Chart(
            "length",
            "Length of responses",
            "Mean number of tokens of a rollout, the end token included.",
            lines(runs, [("mean length", value_of("sampling", "mean_length"))]),
            _axis("tokens"),
            no_step,
        ),
        Chart(
            "truncated",
            "Rollouts cut at the token limit",
            "Share of rollouts longer than sampling.max_new_tokens. They count as incorrect unless "
            "rewards.stop_properly is set.",
            lines(runs, [("cut rollouts", value_of("sampling", "share_truncated"))]),
            _axis("share of rollouts", percent=True),
            no_step,
        ),
        _lost_chart(runs),
    ]


def optimisation_charts(runs: Sequence[RunRecord]) -> list[Chart]:
    """Return how the policy moved: entropy, KL, clipping, gradients; resets of the reference are marked."""
    no_update = reason(runs, why_no_update)
    return [
        Chart(
            "entropy",
            "Entropy of the policy",
            "How random the sampled tokens are. Near 0 all rollouts of a prompt are the same.",
            lines(runs, [("entropy", value_of("update", "entropy"))]),
            _axis("nats per token"),
            no_update,
            resets=True,
        ),
        Chart(
            "kl",
            "How far the policy moved",
            "KL divergence over the sampled tokens: from the reference policy, and within each step.",
            lines(
                runs,
                [
                    ("from the reference", value_of("update", "reference_kl")),
                    ("within the step", value_of("update", "old_policy_kl")),
                ],
            ),
            _axis("nats per token"),
            no_update,
            resets=True,
        ),
        Chart(
            "clip",
            "Signal that clipping removed",
            "Share of the advantages whose gradient the loss clipped. If it is large, the steps are too large.",
            lines(
                runs,
                [
                    ("upper bound", value_of("update", "clip_high_share")),
                    ("lower bound", value_of("update", "clip_low_share")),
                ],
            ),
            _axis("share", percent=True),
            no_update,
        ),
        Chart(
            "gradient",
            "Gradient norm",
            "Size of the gradient before optimizer.max_grad_norm limits it. Spikes often come before trouble.",
            lines(runs, [("norm", value_of("update", "grad_norm"))]),
            _axis("norm"),
            no_update,
            resets=True,
        ),
    ]


def _dropped_chart(runs: Sequence[RunRecord]) -> list[Chart]:
    """Return what dynamic sampling dropped; no chart where the metrics do not count it."""
    traces = lines(
        runs,
        [
            ("rollouts", ratio_of("samples_dropped", "samples")),
            ("tokens computed", ratio_of("unique_tokens_dropped", "unique_tokens")),
        ],
    )
    explanation = (
        "Share of what a step sampled that belonged to groups with one outcome, from which nothing is learned."
    )
    chart = Chart(
        "dropped", "What dynamic sampling dropped", explanation, traces, _axis("share of the step", percent=True)
    )
    return [chart] if traces else []


def _seconds_chart(runs: Sequence[RunRecord]) -> Chart:
    """Return the seconds of each phase: stacked over the steps of one run, or as means of several runs."""
    explanation = "Seconds of a step by phase, without evaluations and checkpoints."
    layout, empty = _axis("seconds a step"), reason(runs, why_no_step)
    if len(runs) == 1:
        run = runs[0]
        traces = []
        for phase in PHASES:
            points = [(at, number(r, "seconds", phase) or 0.0) for at, r in enumerate(run.records) if "sampling" in r]
            if any(value for _, value in points):
                trace = line(runs, 0, phase, 0, points)
                trace |= {"stackgroup": "seconds", "line": {"width": 0.5}}
                trace["meta"]["colour"] = f"phase:{PHASES.index(phase)}"
                traces.append(trace)
        return Chart("seconds", "Where the time went", explanation, tuple(traces), layout, empty)
    timed = [run for run in runs if run.steps]
    bars = tuple(
        {
            "type": "bar", "name": phase, "x": [plotly_text(run.name) for run in timed],
            "y": [fmean([number(r, "seconds", phase) or 0.0 for r in run.steps]) for run in timed],
            "meta": {"colour": f"phase:{j}"},
        }
        for j, phase in enumerate(PHASES)
    )  # fmt: skip
    explanation = "Mean seconds of a step by phase, without evaluations and checkpoints."
    layout = layout | {"barmode": "stack", "xaxis": {"type": "category"}}
    return Chart("seconds", "Where the time went", explanation, bars if timed else (), layout, empty, by_progress=False)


def _lost_chart(runs: Sequence[RunRecord]) -> Chart:
    names = (("timed out", "verifier_timeouts"), ("failed", "verifier_failures"))
    lost = [r["sampling"].get(name, 0) for run in runs for r in run.steps for _, name in names]
    steps = sum(len(run.steps) for run in runs)
    none = f"No verification timed out or failed in {steps:,} {'step' if steps == 1 else 'steps'}."
    return Chart(
        "lost",
        "Verifications that timed out or failed",
        "They count as incorrect. Their reasons are shown with the rollouts.",
        lines(runs, [(label, value_of("sampling", name)) for label, name in names]) if any(lost) else (),
        _axis("distinct responses"),
        none if steps else reason(runs, why_no_step),
    )


def _axis(title: str, percent: bool = False) -> dict[str, Any]:
    axis: dict[str, Any] = {"title": {"text": title}, "rangemode": "tozero"}
    if percent:
        axis["tickformat"] = ".3~%"
    return {"yaxis": axis}


def _n_axis() -> dict[str, Any]:
    return {"xaxis": {"title": {"text": "rollouts per prompt, N"}, "type": "log", "dtick": 0.30103}}


def _no_change_line(**place: float | str) -> dict[str, Any]:
    return {"type": "line", "line": {"width": 1}, "name": "no change", "showlegend": True, **place}
