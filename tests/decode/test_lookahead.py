"""Lookahead decoding: the window is Jacobi iteration beside the draft, its n-grams fill the pool, none of it counts."""

import pytest
import torch

from draftsmith import speculative_generate
from draftsmith.decode.lookahead import Lookahead
from draftsmith.decode.sampling import Sampling
from draftsmith.errors import BadInput


class Recording(Lookahead):
    """Keeps what was drafted, and the text and the window that it was drafted after."""

    def start(self, input_ids, attention_mask):
        super().start(input_ids, attention_mask)
        self.text = input_ids[0].tolist()
        self.texts, self.windows, self.drafts = [], [], []

    def propose(self, *args):
        draft = super().propose(*args)
        self.texts.append(list(self.text))
        self.windows.append(self.grid[0].tolist())
        self.drafts.append(draft)
        return draft

    def observe(self, accepted, target_outputs):
        super().observe(accepted, target_outputs)
        self.text += accepted.host_tokens[0]


def greedy_after(model, tokens):
    with torch.no_grad():
        return int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax())


def test_every_level_is_what_the_target_says_after_the_levels_before_it(tiny_llama, reference):
    target, prompt = tiny_llama(seed=1), reference.prompt_of(9, 1)
    drafter = Recording(window=3, ngram=4, candidates=20)
    speculative_generate(target, drafter, torch.tensor([prompt]), max_new_tokens=12, eos_token_id=[])
    shapes = [(len(window), len(window[0])) for window in drafter.windows]
    assert shapes[:3] == [(1, 5), (2, 4), (3, 3)]  # a level more, a position fewer, until the window is complete
    assert set(shapes[3:]) == {(3, 3)}
    assert len(shapes) > 5
    for text, window, following in zip(drafter.texts, drafter.windows, drafter.windows[1:], strict=False):
        first = [text[-1], *window[0][1:]]
        columns = range(len(window[0]))
        said = [greedy_after(target, text[:-1] + first[: i + 1] + [level[i] for level in window[1:]]) for i in columns]
        if len(window) < 3:
            assert following == [first[1:], *(level[1:] for level in window[1:]), said[1:]]
        else:
            assert following == [*window[1:], said]
            for i in columns:
                assert (*(level[i] for level in window[1:]), said[i]) in drafter.pools[0].after(first[i])


def test_the_window_is_fed_and_not_counted(tiny_llama, reference):
    target, prompt = tiny_llama(seed=1), reference.prompt_of(9, 1)
    fed = []
    forward = target.forward
    target.forward = lambda *args, **kwargs: fed.append(kwargs["input_ids"].shape[1]) or forward(*args, **kwargs)
    drafter = Recording(window=4, ngram=3, candidates=2, pool_from_prompt=False)
    out = speculative_generate(target, drafter, torch.tensor([prompt]), max_new_tokens=16, eos_token_id=[])
    nodes = [draft.tokens.shape[1] for draft in drafter.drafts]
    beside = [draft.companions.tokens.shape[1] for draft in drafter.drafts]
    assert beside[0] == 4
    assert set(beside[1:]) == {drafter.num_companions} == {7}
    assert fed[1 : 1 + len(nodes)] == [1 + n + m for n, m in zip(nodes, beside, strict=True)]
    assert nodes[0] == 0  # an empty pool drafts nothing, and the window is fed all the same
    assert out.stats.rows[0].drafted_nodes <= sum(nodes)
    assert out.stats.drafted <= sum(min(n, 2) for n in nodes)


def test_candidates_share_beginnings_and_the_latest_come_first(reference):
    drafter = Lookahead(window=2, ngram=3, candidates=2)
    reference.started(drafter, [[1, 2, 3, 1, 2, 4, 1, 5, 6, 1], [7, 8]])
    draft = drafter.propose(2, Sampling(), [])
    assert draft.lengths is not None
    assert draft.lengths.tolist() == [4, 0]
    assert draft.tokens[0].tolist() == [5, 2, 6, 4]  # 1 2 3 is the oldest of three: forgotten
    assert draft.parents[0].tolist() == [-1, -1, 0, 1]
    reference.started(drafter, [[1, 2, 3, 1, 2, 4, 1]])
    draft = drafter.propose(2, Sampling(), [])
    assert (draft.tokens[0].tolist(), draft.parents[0].tolist()) == ([2, 4, 3], [-1, 0, 0])
    assert drafter.propose(1, Sampling(), []).tokens[0].tolist() == [2]


def test_it_accepts_what_prompt_lookup_cannot_know(tiny_llama, reference):
    """A text without repetitions in it: n-grams can only come from the window."""
    target = tiny_llama(vocab_size=16, layers=1, seed=4)
    prompts = [reference.prompt_of(6, seed, 16) for seed in range(4)]
    out = speculative_generate(
        target,
        Lookahead(window=6, ngram=3, candidates=4, pool_from_prompt=False),
        *reference.batch_of(prompts),
        max_new_tokens=40,
        eos_token_id=[],
    )
    assert out.stats.accepted > 0


def test_options_out_of_range_are_one_line():
    with pytest.raises(BadInput, match="ngram is 1"):
        Lookahead(ngram=1)
    with pytest.raises(BadInput, match="at most 512"):
        Lookahead(window=1000)
