"""The optimizer's state of another run, for a run that continues from its weights.

In: an optimizer's `state_dict` and that of another run. Out: the own one with the other's moments. It refuses moments
of another model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def with_moments_of(other: dict[str, Any], own: dict[str, Any], parameters: Sequence[Tensor]) -> dict[str, Any]:
    """Return an optimizer's state with the moments of another one; learning rate and other settings stay.

    Args:
        other: `state_dict` of the optimizer whose moments are taken.
        own: `state_dict` of the optimizer that continues.
        parameters: Its parameters, in its order.

    Returns:
        A state for its `load_state_dict`.

    Raises:
        ValueError: If a moment has another shape than its parameter, or their numbers differ.
    """
    given = sum(len(group["params"]) for group in other["param_groups"])
    if given != len(parameters):
        raise ValueError(
            f"the optimizer state is of another model: it has {given} trainable tensors, this model has "
            f"{len(parameters)}; start from the checkpoint's own model and adapters, or without its optimizer state"
        )
    for index, moments in other["state"].items():
        expected, found = tuple(parameters[index].shape), tuple(moments["exp_avg"].shape)
        if expected != found:
            raise ValueError(
                f"the optimizer state is of another model: trainable tensor {index} has shape {expected}, its moments "
                f"{found}; start from the checkpoint's own model and adapters, or without its optimizer state"
            )
    return {"state": other["state"], "param_groups": own["param_groups"]}
