"""The start of a run with compiled packed passes: processor seconds by cause, with an empty cache folder and again.

    python benchmarks/start_up.py [--repeats N] [--smollm2]

A Llama of 30 layers on one thread of a CPU; `--smollm2` has the sizes of SmolLM2-135M. Two processes run one after the
other, the second with the cache folder of the first. An operator stands in for FlexAttention's kernels, which have no
backward pass on a CPU, and g++ for the compilers of a GPU. The medians are of several such pairs. The cores may be
shared, so the seconds are of the processor, of all threads and child processes.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from harness import table

SUPPORT = Path(__file__).resolve().parents[1] / "tests" / "support"
LAYERS = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
SMALL = {"hidden_size": 72, "intermediate_size": 192, "vocab_size": 512}
SMOLLM2 = {"hidden_size": 576, "intermediate_size": 1536, "vocab_size": 49152}
IMPORTS, TRACING, AOT, INDUCTOR = "imports", "tracing (Dynamo)", "AOTAutograd", "Inductor"
LOADING, PASSES, COMPILER = "keys and look-ups of the caches", "passes of the check, other", "child processes (g++)"
BEFORE_STEPS = (TRACING, AOT, INDUCTOR, LOADING, COMPILER, PASSES)
CAUSES = (IMPORTS, *BEFORE_STEPS)
STEPS = ("first step", "second step")
EXTRA = "compiling, and the first step beyond the second"
COUNTS = ("graphs", "AOTAutograd: hits", "AOTAutograd: misses", "AOTAutograd: bypasses")
_PROMPT_TOKENS, _TOKENS, _RESPONSES, _PROMPTS = 20, 24, 6, 2


class Stopwatch:
    """Processor seconds by cause; the innermost cause counts."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._causes = [PASSES]
        self._since = time.process_time()

    def _switch(self, cause: str | None) -> None:
        now = time.process_time()
        self.seconds[self._causes[-1]] += now - self._since
        self._since = now
        if cause is None:
            self._causes.pop()
        else:
            self._causes.append(cause)

    def call(self, cause: str, function: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
        """Call a function, and attribute its seconds to a cause."""
        self._switch(cause)
        try:
            return function(*inputs, **named)
        finally:
            self._switch(None)

    def attributed(self, function: Callable[..., Any], cause: str) -> Callable[..., Any]:
        """Return the function with its seconds attributed to a cause."""

        @wraps(function)
        def call(*inputs: Any, **named: Any) -> Any:
            return self.call(cause, function, *inputs, **named)

        return call


def child_seconds() -> float:
    """Return the processor seconds of child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure(sizes: dict[str, int]) -> dict[str, float]:
    """Compile the passes of a model and take two steps of the learner, as a run does."""
    start = time.process_time()
    import torch
    from torch._dynamo import convert_frame
    from torch._dynamo.utils import counters
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
    from torch._inductor import compile_fx
    from torch._inductor.codecache import FxGraphCache
    from transformers import LlamaConfig, LlamaForCausalLM

    from brorl.algorithms.advantages import advantage_estimator
    from brorl.algorithms.settings import AdvantageSettings
    from brorl.config.settings import TrainConfig
    from brorl.model.forward import with_packed_passes
    from brorl.model.tree_path import TreeForward
    from brorl.training.learner import TreeLearner
    from brorl.training.settings import OptimizerSettings

    sys.path.append(str(SUPPORT))
    from attention_stand_in import use_stand_in

    use_stand_in()
    found = {IMPORTS: time.process_time() - start}
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**LAYERS, **sizes))
    groups = some_groups(sizes["vocab_size"])
    children, watch = child_seconds(), Stopwatch()
    places = [
        (convert_frame, "_compile", TRACING),
        (compile_fx, "compile_fx", AOT),
        (compile_fx, "fx_codegen_and_compile", INDUCTOR),
        (AOTAutogradCache, "try_load", LOADING),
        (FxGraphCache, "prepare_key", LOADING),
        (FxGraphCache, "load_with_key", LOADING),
    ]
    with ExitStack() as stack:
        for owner, name, cause in places:
            attributed = watch.attributed(getattr(owner, name), cause)
            stack.enter_context(patch.object(owner, name, attributed))
        forward = watch.call(PASSES, with_packed_passes, model, TreeForward(), print)
    assert isinstance(forward, TreeForward)
    assert forward.compiled
    found |= {cause: watch.seconds[cause] for cause in BEFORE_STEPS} | {COMPILER: child_seconds() - children}
    optimizer = OptimizerSettings(learning_rate=1e-7, mini_batches=1, old_logprobs="recompute")
    learner = TreeLearner(model, TrainConfig(optimizer=optimizer), forward=forward)
    estimate = advantage_estimator(AdvantageSettings())
    for name in STEPS:
        start = time.process_time() + child_seconds()
        learner.learn(groups, estimate, 0)
        found[name] = time.process_time() + child_seconds() - start
    compiling = sum(found[cause] for cause in BEFORE_STEPS if cause != PASSES)
    found[EXTRA] = compiling + found[STEPS[0]] - found[STEPS[1]]
    kinds = ("hit", "miss", "bypass")
    cache = (counters["aot_autograd"][f"autograd_cache_{kind}"] for kind in kinds)
    return found | dict(zip(COUNTS, (counters["stats"]["unique_graphs"], *cache), strict=True))


def some_groups(vocabulary: int) -> list[Any]:
    """Return groups of random responses, half of them correct."""
    import numpy as np

    from brorl.algorithms.groups import Group
    from brorl.prompts.prompt import Prompt
    from brorl.tree import RolloutTree

    rng = np.random.default_rng(0)
    groups = []
    for _ in range(_PROMPTS):
        rows = rng.integers(0, vocabulary, (_RESPONSES, _TOKENS))
        prompt = rng.integers(0, vocabulary, _PROMPT_TOKENS).tolist()
        tree = RolloutTree.from_responses(prompt, rows.tolist(), np.full(rows.shape, -np.log(vocabulary)).tolist())
        correct_L = np.arange(tree.num_responses) % 2 == 0
        groups.append(Group(Prompt("p", "?", tree.prompt_ids, "a", "d"), tree, correct_L, correct_L.astype(float)))
    return groups


def in_process(cache: str, smollm2: bool) -> dict[str, float]:
    """Measure in a process whose cache folder and folder of temporary files are given."""
    kept = {name: value for name, value in os.environ.items() if not name.endswith("_CACHE_DIR")}
    threads = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL")}
    command = [sys.executable, __file__, "--child", *(["--smollm2"] if smollm2 else [])]
    env = kept | threads | {"XDG_CACHE_HOME": cache, "TMPDIR": cache}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--smollm2", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(SMOLLM2 if arguments.smollm2 else SMALL)))
        return
    pairs = []
    for _ in range(arguments.repeats):
        with TemporaryDirectory() as cache:
            pairs.append([in_process(cache, arguments.smollm2) for _ in range(2)])
    columns = [[median(pair[process][name] for pair in pairs) for name in pairs[0][0]] for process in range(2)]
    rows = [
        (name, *(f"{value:.0f}" if name in COUNTS else f"{value:.2f}" for value in values))
        for name, *values in zip(pairs[0][0], *columns, strict=True)
    ]
    print(table(("processor seconds", "first process", "second process"), rows))


if __name__ == "__main__":
    main()
