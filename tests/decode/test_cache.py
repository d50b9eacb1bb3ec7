"""The ragged cache: what is kept gives the logits of a fresh pass, whatever was fed and forgotten in between."""

import pytest
import torch

from draftsmith.decode.forward import CachedLM

FAMILIES = ["tiny_llama", "tiny_qwen2", "tiny_qwen3", "tiny_mistral", "tiny_gemma3", "tiny_gpt2"]


def plain_logits(model, tokens):
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


def random_tokens(count, seed, vocab_size=64):
    return torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def fed_logits(lm, tokens, **settings):
    """The target's logits over `tokens`, a pass that goes on from what is kept."""
    logits = lm.feed(torch.tensor(tokens), **settings).logits
    assert logits is not None
    return logits


@pytest.fixture(params=FAMILIES)
def model(request):
    return request.getfixturevalue(request.param)()


def test_rolled_back_rows_give_the_logits_of_a_fresh_pass(model):
    """Three rows of different lengths accept different numbers of tokens, past the sliding windows too."""
    rows = [random_tokens(n, seed=n) for n in (5, 9, 2)]
    lm = CachedLM(model, batch_size=3)
    ids = torch.zeros(3, 9, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
    lm.prefill(ids, [len(row) for row in rows])
    for step in range(6):
        fed = [random_tokens(4, seed=100 * step + i) for i in range(3)]
        logits = fed_logits(lm, fed)
        for i, row in enumerate(rows):
            torch.testing.assert_close(logits[i], plain_logits(model, row + fed[i])[-4:], atol=2e-5, rtol=1e-4)
        counts = [(step + i) % 5 for i in range(3)]
        lm.keep(torch.tensor(counts), counts)
        rows = [row + new[:count] for row, new, count in zip(rows, fed, counts, strict=True)]
    assert lm.host_lengths == [len(row) for row in rows] == lm.lengths.tolist()


def test_a_tree_gives_every_node_the_logits_of_its_own_path(model):
    """Fed in two levels, then the accepted path is kept and the rest forgotten."""
    rows = [random_tokens(7, seed=1), random_tokens(3, seed=2)]
    lm = CachedLM(model, batch_size=2)
    ids = torch.zeros(2, 7, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
    lm.prefill(ids, [len(row) for row in rows])
    level_one = torch.tensor([[11, 12, 13], [21, 22, 23]])
    lm.feed(level_one, parents=torch.tensor([[-1, 0, 0], [-1, 0, 0]]))  # a root and its two children
    logits = fed_logits(lm, [[14, 15], [24, 25]], parents=torch.tensor([[1, 2], [2, 2]]))
    for row, path, node in [(0, [11, 12, 14], 0), (0, [11, 13, 15], 1), (1, [21, 23, 24], 0), (1, [21, 23, 25], 1)]:
        expected = plain_logits(model, rows[row] + path)[-1]
        torch.testing.assert_close(logits[row, node], expected, atol=2e-5, rtol=1e-4)
    lm.keep_paths(torch.tensor([[0, 2, 4], [0, -1, -1]]), torch.tensor([3, 1]), [3, 1])
    logits = fed_logits(lm, [[31], [32]])
    torch.testing.assert_close(logits[0, -1], plain_logits(model, [*rows[0], 11, 13, 15, 31])[-1], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(logits[1, -1], plain_logits(model, [*rows[1], 21, 32])[-1], atol=2e-5, rtol=1e-4)


def test_the_cache_holds_the_kept_tokens_and_nothing_else(tiny_llama):
    """Keys of the kept columns equal those of a cache that never saw the rejected tokens."""
    model, prompt = tiny_llama(), random_tokens(6, seed=3)
    used, fresh = CachedLM(model, 1), CachedLM(model, 1)
    used.prefill(torch.tensor([prompt]), [6])
    used.feed(torch.tensor([[40, 41, 42]]))
    used.keep(torch.tensor([1]), [1])
    used.feed(torch.tensor([[50, 51]]))
    used.keep(torch.tensor([2]), [2])
    fresh.prefill(torch.tensor([[*prompt, 40, 50, 51]]), [9])
    assert used.host_lengths == [9]
    for layer in range(2):
        for mine, theirs in zip(used.cache.visible(layer, 0, 9), fresh.cache.visible(layer, 0, 9), strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


def test_a_slot_is_refilled_without_touching_its_neighbours(tiny_gemma3):
    model = tiny_gemma3()
    rows = [random_tokens(10, seed=4), random_tokens(12, seed=5)]
    lm = CachedLM(model, 2)
    lm.prefill(torch.tensor([[*rows[0], 0, 0], rows[1]]), [10, 12])
    lm.clear_row(0)
    fresh = random_tokens(3, seed=6)
    lm.prefill(torch.tensor([fresh]), [3], rows=torch.tensor([0]))
    logits = fed_logits(lm, [[7], [8]])
    torch.testing.assert_close(logits[0, 0], plain_logits(model, [*fresh, 7])[-1], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(logits[1, 0], plain_logits(model, [*rows[1], 8])[-1], atol=2e-5, rtol=1e-4)


def test_rows_go_on_from_a_beginning_that_was_read_once(tiny_gemma3):
    """In all rows, then in one that is cleared down to it, while the slot beside it decodes."""
    model, beginning = tiny_gemma3(), random_tokens(11, seed=8)
    lm = CachedLM(model, 2)
    lm.prefill(torch.tensor([beginning]), [11], rows=torch.tensor([1]))
    lm.repeat_row(1)
    assert lm.host_lengths == lm.lengths.tolist() == [11, 11]
    rows = [random_tokens(2, seed=9), random_tokens(5, seed=10)]
    lm.prefill(torch.tensor([[*rows[0], 0, 0, 0], rows[1]]), [2, 5], start=11)
    assert lm.host_lengths == lm.lengths.tolist() == [13, 16]
    for row, logits in zip(rows, fed_logits(lm, [[7], [8]]), strict=True):
        fed = 7 if row is rows[0] else 8
        torch.testing.assert_close(logits[0], plain_logits(model, [*beginning, *row, fed])[-1], atol=2e-5, rtol=1e-4)
    lm.keep(torch.tensor([0, 1]), [0, 1])
    lm.clear_row(0, 11)
    fed_logits(lm, [[0], [20]])  # the free slot is fed along
    lm.keep(torch.tensor([0, 1]), [0, 1])
    fresh = random_tokens(3, seed=11)
    lm.prefill(torch.tensor([fresh]), [3], rows=torch.tensor([0]), start=11)
    logits = fed_logits(lm, [[7], [9]])
    torch.testing.assert_close(logits[0, 0], plain_logits(model, [*beginning, *fresh, 7])[-1], atol=2e-5, rtol=1e-4)
    whole = [*beginning, *rows[1], 8, 20, 9]
    torch.testing.assert_close(logits[1, 0], plain_logits(model, whole)[-1], atol=2e-5, rtol=1e-4)


def test_eager_attention_takes_the_same_masks(tiny_gemma3):
    model = tiny_gemma3()
    model.set_attn_implementation("eager")
    tokens = random_tokens(20, seed=7)
    lm = CachedLM(model, 1)
    lm.prefill(torch.tensor([tokens[:15]]), [15])
    logits = fed_logits(lm, [tokens[15:]])
    torch.testing.assert_close(logits[0], plain_logits(model, tokens)[15:], atol=2e-5, rtol=1e-4)
