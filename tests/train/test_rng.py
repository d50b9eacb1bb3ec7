import random

import numpy
import torch

from draftsmith.train.rng import preserved_rng, restore_rng, rng_state, seed_all


def draw() -> tuple:
    return random.random(), float(numpy.random.rand()), float(numpy.random.randn()), torch.rand(3).tolist()


def test_a_state_survives_a_file_that_is_read_without_unpickling_objects(tmp_path) -> None:
    seed_all(7)
    draw()  # leaves numpy with a cached second normal draw
    torch.save(rng_state(), tmp_path / "rng.pt")
    expected = [draw(), draw()]
    seed_all(8)
    restore_rng(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert [draw(), draw()] == expected


def test_draws_inside_do_not_change_draws_after() -> None:
    seed_all(7)
    expected = draw()
    seed_all(7)
    with preserved_rng():
        draw()
    assert draw() == expected
