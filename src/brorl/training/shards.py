"""Shards of tensors on disk: every rank writes its own, and any number of ranks can read them.

In: tensors by name. Out: a folder in the format of `torch.distributed.checkpoint`. Reading needs tensors of the same
shapes, whole or sharded in any way, and no process group.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from brorl.errors import first_line


def write_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the shards of this rank; collective, and complete on return.

    Args:
        folder: A new folder, which all ranks can reach.
        tensors: Sharded tensors, with the same names on all ranks.

    Raises:
        OSError: If a rank could not write.
    """
    try:
        save(dict(tensors), storage_writer=FileSystemWriter(folder))
    except CheckpointException as error:
        raise OSError(f"the shards in {folder} could not be written: {_reason(error)}") from error


def read_shards(folder: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read tensors, in the layout of others.

    Args:
        folder: A folder of `write_shards`, by any number of ranks.
        like: For each name a tensor with its shape, type, device and layout.

    Returns:
        New tensors by name.

    Raises:
        ValueError: If the folder holds no such tensors, or is damaged.
    """
    reader = FileSystemReader(folder)
    try:
        stored = reader.read_metadata().state_dict_metadata
    except OSError as error:
        raise ValueError(f"the shards in {folder} cannot be read ({error}); choose another checkpoint") from error
    for name, tensor in like.items():
        found = stored.get(name)
        shape = tuple(found.size) if isinstance(found, TensorStorageMetadata) else None
        if shape != tuple(tensor.shape):
            raise ValueError(
                f"{folder} is of another model: {name} should have shape {tuple(tensor.shape)}, and has {shape}; "
                "resume with the model, and the adapters, that the run started with"
            )
    tensors = {name: torch.empty_like(tensor, requires_grad=False) for name, tensor in like.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process needs no process group
        try:
            load(dict(tensors), storage_reader=reader, no_dist=not torch.distributed.is_initialized())
        except CheckpointException as error:
            reason = _reason(error)
            raise ValueError(f"the shards in {folder} cannot be read ({reason}); choose another checkpoint") from error
    return tensors


def _reason(error: CheckpointException) -> str:
    """Return the first failure of a rank."""
    rank, (failure, _) = min(error.failures.items(), key=lambda item: item[0])
    return f"rank {rank}: {type(failure).__name__}: {first_line(failure)}"
