"""Steps: a fixed order, budgets, resume, and the same examples over any number of ranks."""

import random
from itertools import islice

import pytest

from draftsmith.data.batches import TokenBatches, epoch_order, split_by_rank
from draftsmith.data.chats import Encoded
from draftsmith.data.encoded_set import EncodedSet
from draftsmith.errors import BadInput


def examples(count: int = 40, seed: int = 0, longest: int = 30) -> EncodedSet:
    rng = random.Random(seed)
    items = []
    for number in range(count):
        length, prompt = rng.randint(4, longest), rng.randint(1, 3)
        items.append((number, Encoded([number + 1] * length, [i >= prompt for i in range(length)])))
    return EncodedSet.collect(items)


def test_order_is_fixed_by_seed_and_epoch():
    assert sorted(epoch_order(50, 1, 0)) == list(range(50))
    assert epoch_order(50, 1, 0).tolist() == epoch_order(50, 1, 0).tolist()
    assert epoch_order(50, 1, 0).tolist() != epoch_order(50, 1, 1).tolist()
    assert epoch_order(50, 1, 0).tolist() != epoch_order(50, 2, 0).tolist()


def test_an_epoch_reads_every_example_once_and_keeps_the_budgets():
    data = examples()
    batches = TokenBatches(data, tokens_per_step=120, tokens_per_forward=60, seed=3)
    read = [example for step in islice(batches, batches.num_steps(2)) for example in step.examples]
    assert sorted(read[:40]) == list(range(40))
    assert sorted(read[40:80]) == list(range(40))
    assert read[:40] == epoch_order(40, 3, 0).tolist()
    for step in islice(TokenBatches(data, 120, 60, seed=3), 10):
        assert step.tokens == sum(data.lengths[step.examples]) <= 120
        assert all(batch.input_ids.numel() <= 60 for batch in step.micro_batches)
        assert sum(batch.num_supervised for batch in step.micro_batches) == step.supervised_tokens
        placed = [place.example for batch in step.micro_batches for place in batch.placed]
        assert sorted(placed) == sorted(step.examples) == sorted(step.own_examples)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_ranks_together_do_what_one_process_does(world_size, packing):
    data = examples()
    alone = TokenBatches(data, 100, 50, packing=packing)
    ranks = [TokenBatches(data, 100, 50, packing=packing, rank=r, world_size=world_size) for r in range(world_size)]
    for step in islice(alone, 12):
        parts = [next(rank) for rank in ranks]
        assert all(part.examples == step.examples for part in parts)
        assert {part.supervised_tokens for part in parts} == {step.supervised_tokens}
        assert sorted(e for part in parts for e in part.own_examples) == sorted(step.examples)
        assert len({len(part.micro_batches) for part in parts}) == 1  # collectives meet
        weight = sum(batch.weights.sum().item() for part in parts for batch in part.micro_batches)
        assert weight == step.supervised_tokens
        assert ranks[0].state_dict() == alone.state_dict()


def test_ranks_get_like_shares():
    shares = split_by_rank([9, 1, 8, 2, 7, 3, 6, 4], 2)
    loads = [sum([9, 1, 8, 2, 7, 3, 6, 4][i] for i in share) for share in shares]
    assert abs(loads[0] - loads[1]) <= 2
    assert sorted(shares[0] + shares[1]) == list(range(8))


def test_resumed_order_is_the_uninterrupted_one():
    data = examples()
    whole = [step.examples for step in islice(TokenBatches(data, 90, seed=5), 30)]
    first = TokenBatches(data, 90, seed=5)
    for stop in (1, 7, 20):  # within the first epoch, at its end, beyond it
        head = [step.examples for step in islice(first, stop - first_steps(first, whole))]
        state = first.state_dict()
        assert set(state) == {"epoch", "index"}
        resumed = TokenBatches(data, 90, seed=5)
        resumed.load_state_dict(state)
        assert [step.examples for step in islice(resumed, 5)] == whole[stop : stop + 5]
        assert head == whole[stop - len(head) : stop]


def first_steps(batches: TokenBatches, whole: list[list[int]]) -> int:
    """Steps that `batches` has taken."""
    read = batches.epoch * 40 + batches.index
    taken = 0
    while read > 0:
        read -= len(whole[taken])
        taken += 1
    return taken


def test_long_example_and_small_set_are_steps_of_their_own():
    data = EncodedSet.collect([(0, Encoded([1] * 50, [False] + [True] * 49)), (1, Encoded([2, 3], [False, True]))])
    steps = list(islice(TokenBatches(data, 10), 4))
    assert all(len(step.examples) == 1 for step in steps)
    assert len(next(TokenBatches(data, 10_000)).examples) == 2
    assert TokenBatches(data, 10_000).num_steps(3) == 3


def test_fillers_teach_nothing():
    data = examples(3)
    idle = [TokenBatches(data, 30, rank=rank, world_size=8) for rank in range(8)]
    steps = [next(batches) for batches in idle]
    fillers = [step.micro_batches[0] for step in steps if not step.own_examples]
    assert fillers
    assert all(batch.num_supervised == 0 and batch.weights.sum() == 0 for batch in fillers)


def test_bad_states_and_sets_are_refused():
    with pytest.raises(BadInput, match="no example"):
        TokenBatches([], 10)
    with pytest.raises(BadInput, match="does not fit into rows of 10"):
        TokenBatches(examples(), 100, length=10)
    with pytest.raises(BadInput, match="outside of 40 examples"):
        TokenBatches(examples(), 100).load_state_dict({"epoch": 0, "index": 40})
