"""Seeds of generators: as many as there are combinations, and what small seeds always gave."""

from itertools import product

import numpy as np
import pytest

from brorl.seeds import derived_seed, seed_sequence


def test_every_seed_and_pair_of_counters_gives_other_random_numbers(rng: np.random.Generator) -> None:
    """NumPy alone makes the same numbers of the lists [seed + step * 2**32, 0] and [seed, step]."""
    some = int(rng.integers(3, 2**31))
    seeds = {s + high for s in (0, 1, some, some + 1) for high in (0, 2**32, some * 2**32)} | {2**63 - 1, 2**64 - 1}
    keys = list(product(seeds, (0, 1, 2, some, 2**32 - 1), (0, 1, 2, some, 2**32 - 1)))
    assert len({derived_seed(*key) for key in keys}) == len(keys)
    assert len({np.random.default_rng(seed_sequence(*key)).random() for key in keys}) == len(keys)


def test_small_seeds_give_what_numpy_makes_of_the_list(rng: np.random.Generator) -> None:
    seed, first, second = rng.integers(2**32, size=3).tolist()
    for given in ([seed, first], [seed, first, second]):
        alone = np.random.SeedSequence(given)
        assert seed_sequence(*given).generate_state(8).tolist() == alone.generate_state(8).tolist()
        assert derived_seed(*given) == int(alone.generate_state(1, np.uint64)[0])


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_refuses_seeds_out_of_range(seed: int) -> None:
    with pytest.raises(ValueError, match=rf"a seed must be between 0 and 2\*\*64 - 1, got {seed}"):
        derived_seed(seed, 0)


@pytest.mark.parametrize("counters", [(-1, 0), (0, -1), (2**32, 0), (0, 2**32)])
def test_refuses_counters_out_of_range(counters: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="counters of a seed must be between 0 and"):
        seed_sequence(0, *counters)
