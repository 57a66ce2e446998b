"""A fingerprint of the weights of a model, by which a stored evaluation is recognized."""

from __future__ import annotations

from hashlib import blake2b

from transformers import PreTrainedModel

from brorl.model.device import in_float64

_VALUES_OF_A_TENSOR = 65_536


def weights_fingerprint(model: PreTrainedModel) -> str:
    """Return a hash of the name, the shape and up to 65,536 evenly spaced values of each tensor."""
    digest = blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().reshape(-1)
        values = in_float64(flat[:: max(1, flat.numel() // _VALUES_OF_A_TENSOR)]).cpu().numpy()
        digest.update(f"{name} {tuple(tensor.shape)}".encode() + values.astype("<f8").tobytes())
    return digest.hexdigest()
