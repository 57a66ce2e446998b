"""Where the runs of a comparison are made: each on its own cores or GPU, or one after the other on a cluster."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from brorl.comparison.arm_plans import ArmPlan
from brorl.errors import UserError
from brorl.format import counted
from brorl.model.load import choose_device
from brorl.runs.run_directory import processor_name
from brorl.wording import option


@dataclass(frozen=True)
class Slot:
    """The resources of one run: the cores that it may use (empty: no limit), and the only accelerator (None: all)."""

    cores: frozenset[int] = frozenset()
    device: str | None = None


def slots_for(jobs: int | None, arms: Sequence[ArmPlan]) -> list[Slot]:
    """Return a slot for each run that is in progress at the same time."""
    if jobs is not None and jobs < 1:
        raise UserError(f"{option('jobs')}: at least 1 is needed, got {jobs}")
    device = arms[0].config.device
    if _num_machines(arms):
        if jobs not in (None, 1):
            raise UserError(
                f"{option('jobs', jobs)}: the arms train on a cluster, and each run needs the whole cluster; use "
                f"{option('jobs', 1)}, or "
                f"{option('cluster.nodes', 0)}"
            )
        return cpu_slots(1, 0) if choose_device(device).type == "cpu" else [Slot()]
    if choose_device(device).type == "cpu":
        return cpu_slots(jobs, max(arm.config.engine.threads for arm in arms))
    if device != "mps" and ":" not in device:
        return gpu_slots(jobs)
    if jobs not in (None, 1):
        raise UserError(
            f"{option('jobs', jobs)}: device = {device} is one GPU, and runs cannot share one; use {option('jobs', 1)}"
        )
    return [Slot()]


def _num_machines(arms: Sequence[ArmPlan]) -> int:
    """Return the machines of the largest cluster of an arm that is still to be run; 0 without a cluster."""
    return max((arm.config.cluster.nodes for arm in arms if arm.run is None), default=0)


def machine_of(slots: Sequence[Slot], arms: Sequence[ArmPlan]) -> str:
    """Return the processor or accelerator and the slots of runs, in the wording of existing folders."""
    if not slots[0].cores and torch.cuda.is_available():
        place, name = "a GPU of its own", torch.cuda.get_device_name()
    else:
        place, name = f"{counted(len(slots[0].cores) or 1, 'core')} of its own", processor_name()
    if machines := _num_machines(arms):
        place = f"a cluster of {counted(machines, 'machine')}"
    seconds = ", in CPU seconds" if arms[0].config.engine.clock == "cpu" else ""
    return f"{name}, {counted(len(slots), 'run')} at a time, each on {place}{seconds}"


def gpu_slots(num: int | None) -> list[Slot]:
    """Return one slot per GPU that this process may see, at most `num`."""
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    devices = visible or [str(i) for i in range(torch.cuda.device_count())]
    if num is not None and num > len(devices):
        raise UserError(
            f"{option('jobs', num)}: there are {len(devices)} GPUs, and runs cannot share one; use "
            f"{option('jobs', len(devices))}"
        )
    return [Slot(device=device) for device in devices[:num]]


def cpu_slots(num: int | None, threads: int) -> list[Slot]:
    """Divide the cores of this process among `num` runs; None for as many as have `threads` cores each (0: all)."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    num = num or max(1, len(cores) // (threads or len(cores)))
    if num > len(cores):
        raise UserError(
            f"{option('jobs', num)}: there are {len(cores)} cores, and runs cannot share one; use "
            f"{option('jobs', len(cores))}"
        )
    each = len(cores) // num
    if num > 1 and threads > each:
        raise UserError(
            f"{option('jobs', num)}: each run would get {each} of {len(cores)} cores, and engine.threads = {threads}; "
            "use "
            f"{option('jobs', max(len(cores) // threads, 1))}, or {option('engine.threads', each)}"
        )
    return [Slot(frozenset(cores[i * each : (i + 1) * each])) for i in range(num)]
