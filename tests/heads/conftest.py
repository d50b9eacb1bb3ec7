"""Targets and checks that the tests of several kinds of drafters share."""

import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from transformers import PreTrainedModel

from draftsmith import speculative_generate
from draftsmith.data.chats import Encoded
from draftsmith.data.packing import pack
from draftsmith.decode.loop import decode_steps, plain_generate
from draftsmith.decode.prompts import pad_rows
from draftsmith.decode.sampling import Sampling, probabilities
from draftsmith.distill.batch import DistillBatch, distill_batch
from draftsmith.heads.make import HeadsInTraining, heads_in_training
from draftsmith.models.target import Target, as_target
from draftsmith.recipe import BlockwiseDrafter, HydraDrafter, MedusaDrafter, ObjectiveSection
from draftsmith.train.optimizer import parameter_groups

PERIOD, COPIED = 4, 24  # of the copying target: its period and its number of ids


def copied_rows(count: int, length: int, seed: int) -> torch.Tensor:
    """Rows that repeat themselves after `PERIOD` random tokens."""
    block = torch.randint(3, COPIED, (count, PERIOD), generator=torch.Generator().manual_seed(seed))
    return block.repeat(1, length // PERIOD + 1)[:, :length]


@pytest.fixture(scope="session")
def copying(tiny_llama: Callable[..., Any]) -> SimpleNamespace:
    """``target``: two layers, the second of which has learned to copy what stands `period` tokens back (the first one's
    attention adds nothing); ``rows(count, length, seed)``: such texts; ``batch(count, length, seed)``: the same packed, all
    but the first period supervised.
    """
    model: PreTrainedModel = tiny_llama(vocab_size=COPIED, layers=2, max_position_embeddings=128)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.1)
        nothing = model.model.layers[0].self_attn.o_proj.weight.zero_().requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p is not nothing], lr=1e-2)
    steps = 150
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 1e-2 * min(1.0, step / 20) * (1 - step / steps)
        ids = copied_rows(32, 16, seed=step)
        logits = model(input_ids=ids).logits[:, PERIOD - 1 : -1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, PERIOD:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    def batch(count: int, length: int, seed: int) -> DistillBatch:
        rows = copied_rows(count, length, seed).tolist()
        supervised = [False] * PERIOD + [True] * (length - PERIOD)
        return distill_batch(pack([Encoded(row, supervised) for row in rows], length), torch.device("cpu"))

    return SimpleNamespace(target=as_target(model), period=PERIOD, rows=copied_rows, batch=batch)


def train_steps(objective: Any, batches: Iterator[DistillBatch], steps: int, learning_rate: float) -> dict[str, float]:
    """AdamW with a linear decay; the metrics of the last batch, measured after the last step."""
    parameters = [parameter for parameter in objective.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.0)
    objective.train()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = learning_rate * min(1.0, (step + 1) / 10) * (1 - step / steps)
        batch = next(batches)
        sums = objective(batch)
        assert float(sums.count) == batch.supervised
        (sums.loss_sum / batch.supervised).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    objective.eval()
    with torch.no_grad():
        metrics = objective(next(batches)).metrics
    return {name: float(value) / float(count) for name, (value, count) in metrics.items()}


def ragged(lengths: list[int], vocab_size: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Random prompts of these lengths, left-padded, and their mask."""
    width = max(lengths)
    ids, mask = torch.zeros(len(lengths), width, dtype=torch.long), torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(100 + length)
        ids[row, width - length :] = torch.randint(vocab_size, (length,), generator=generator)
        mask[row, width - length :] = 1
    return ids, mask


def check_greedy(target: Target, drafter: Any, lengths: list[int], new: int = 24, **settings: Any) -> Any:
    """Greedy output is plain greedy output, alone and in a ragged batch; the statistics of the batch."""
    stats = None
    for group in (lengths[:1], lengths):
        ids, mask = ragged(group, target.vocab_size)
        plain = plain_generate(target, ids, mask, max_new_tokens=new, eos_token_id=[])
        out = speculative_generate(target, drafter, ids, mask, max_new_tokens=new, eos_token_id=[], **settings)
        assert out.tokens.tolist() == plain.tokens.tolist()
        stats = out.stats
    assert stats is not None
    return stats


def check_sampled(target: Target, drafter: Any, settings: dict[str, Any], tokens: int = 3, rows: int = 3000) -> None:
    """The first new tokens of many rows against their exact joint distribution."""
    vocab, prompt = target.vocab_size, [1, 4, 2]
    transforms = {key: settings[key] for key in ("temperature", "top_k", "top_p", "min_p") if key in settings}
    exact = torch.zeros([vocab] * tokens, dtype=torch.float64)
    prefixes = torch.tensor(list(itertools.product(range(vocab), repeat=tokens - 1)))
    ids = torch.cat([torch.tensor([prompt]).expand(len(prefixes), -1), prefixes], 1)
    with torch.no_grad():
        logits = target.model(input_ids=ids, use_cache=False).logits[:, len(prompt) - 1 :]
    probs = probabilities(logits, Sampling(**transforms)).double()
    for prefix, row in zip(prefixes.tolist(), probs, strict=True):
        weight = torch.tensor(1.0, dtype=torch.float64)
        for i, token in enumerate(prefix):
            weight = weight * row[i, token]
        exact[tuple(prefix)] = weight * row[-1]
    out = speculative_generate(
        target, drafter, torch.tensor([prompt] * rows), max_new_tokens=tokens, eos_token_id=[], seed=11, **settings
    )
    counts = torch.zeros_like(exact)
    for sample in out.tokens[:, len(prompt) :].tolist():
        counts[tuple(sample)] += 1
    assert counts[exact == 0].sum() == 0, "a token that the target cannot emit"
    expected = exact.flatten() * rows
    common = expected >= 5
    observed = torch.cat([counts.flatten()[common], counts.flatten()[~common].sum()[None]])
    wanted = torch.cat([expected[common], expected[~common].sum()[None]])
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    assert chisquare(observed.numpy(), (wanted * observed.sum() / wanted.sum()).numpy()).pvalue > 1e-4


def accepted_from(
    target: Target, drafter: Any, prefixes: list[list[int]], num_tokens: int, steps: int = 1
) -> list[int]:
    """Draft tokens accepted, greedily, in the first `steps` steps after each prefix."""
    decoded = decode_steps(
        target,
        drafter,
        pad_rows(prefixes, target),
        sampling=Sampling(),
        max_new_tokens=(num_tokens + 1) * steps,
        num_speculative_tokens=num_tokens,
        eos_token_id=[],
    )
    *_, last = itertools.islice(decoded, steps)
    return [row.accepted for row in last.stats.rows]


def fingerprint(model: Any) -> list[bytes]:
    """Every bit of a model's parameters and buffers."""
    return [tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in model.state_dict().values()]


class Lengths:
    """A length policy: draft tokens by step and row (``pattern[step][row]``), over and over."""

    def __init__(self, pattern: list[list[int]]):
        self.pattern, self.step, self.batch = pattern, 0, 0

    def start(self, batch: int) -> None:
        """Take a batch."""
        self.step, self.batch = 0, batch

    def lengths(self) -> list[int]:
        """The next step's."""
        self.step += 1
        return self.pattern[(self.step - 1) % len(self.pattern)][: self.batch]

    def observe(self, drafted: Any, accepted: Any) -> None:
        """Nothing to learn."""


@pytest.fixture(scope="session")
def checks() -> SimpleNamespace:
    """The functions of this file."""
    return SimpleNamespace(
        Lengths=Lengths,
        train_steps=train_steps,
        ragged=ragged,
        check_greedy=check_greedy,
        check_sampled=check_sampled,
        accepted_from=accepted_from,
        fingerprint=fingerprint,
    )


CPU = torch.device("cpu")
CYCLE = 7  # tokens of a cycle of the `copier`
HEADS = {
    "medusa": MedusaDrafter(num_heads=3),
    "medusa own cut": MedusaDrafter(num_heads=3, output="own", vocabulary=40),
    "blockwise": BlockwiseDrafter(num_heads=3, inner_size=16),
    "hydra": HydraDrafter(num_heads=3),
    "hydra low rank": HydraDrafter(num_heads=3, output="low_rank", output_rank=4),
    "hydra prefix": HydraDrafter(num_heads=3, prefix_attention=True),
}


@pytest.fixture(params=HEADS.values(), ids=list(HEADS))
def section(request: pytest.FixtureRequest) -> Any:
    """A drafter section of every kind of heads on the last hidden state."""
    return request.param


@pytest.fixture(scope="session")
def copier(tiny_llama: Callable[..., Any]) -> Target:
    """A target that goes on as its input did `CYCLE` tokens before.

    Its 42 tokens are six cycles of seven; layers add nothing, and the output layer turns a token into the next of its cycle.
    So token t + k + 2 is a function of token t, another one for every head k.
    """
    model = tiny_llama(vocab_size=6 * CYCLE, hidden=64, tie_word_embeddings=False)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.norm.weight.fill_(1.0)
        rows = torch.arange(6 * CYCLE).view(6, CYCLE)
        table = torch.nn.functional.normalize(model.model.embed_tokens.weight, dim=-1)
        model.lm_head.weight[rows.roll(-1, 1).flatten()] = 2.0 * table[rows.flatten()]
    return as_target(model)


def batch_of(rows: list[list[int]], prompt: int = 1, length: int | None = None) -> DistillBatch:
    """Rows of tokens as a packed batch; all but the first `prompt` tokens of each are supervised."""
    examples = [Encoded(row, [False] * prompt + [True] * (len(row) - prompt)) for row in rows]
    return distill_batch(pack(examples, length or max(map(len, rows))), CPU)


def greedy_rows(target: Target, count: int, new: int, seed: int = 0, prompt: int = 3) -> list[list[int]]:
    """What the target writes after random prompts, prompts included."""
    ids = torch.randint(target.vocab_size, (count, prompt), generator=torch.Generator().manual_seed(seed))
    return plain_generate(target, ids, max_new_tokens=new, eos_token_id=[]).tokens.tolist()


def prepared(section: Any, target: Target, loss: str = "cross_entropy") -> HeadsInTraining:
    """New heads; a cut vocabulary keeps the lowest ids."""
    torch.manual_seed(0)
    kept = None if section.vocabulary is None else torch.arange(section.vocabulary)
    return heads_in_training(section, ObjectiveSection(loss=loss), target, kept, Sampling(0.0))


def fit(made: HeadsInTraining, batch: DistillBatch, steps: int, rate: float = 1e-2) -> None:
    """Train on one batch; what of the target is trained at its own share of the rate."""
    groups = parameter_groups(made.objective, 0.0)
    optimizer = torch.optim.AdamW(groups, lr=rate, weight_decay=0.0)
    made.objective.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = group["rate"] * rate * (1 - 0.9 * step / steps)
        made.objective.begin_step(step, steps)
        sums = made.objective(batch)
        (sums.loss_sum / sums.count).backward()
        optimizer.step()
        optimizer.zero_grad()
    made.objective.eval()


def figures(made: HeadsInTraining, batch: DistillBatch) -> dict[str, float]:
    """All metrics of a batch."""
    made.objective.eval()
    with torch.no_grad():
        metrics = made.objective(batch).metrics
    return {name: float(value) / float(count) for name, (value, count) in metrics.items()}


def check_metric(made: HeadsInTraining, target: Target) -> None:
    """What training counts as right is what the decoder accepts, on the decoded text itself, position by position and
    exactly: greedy decoding leaves nothing to chance.
    """
    heads = made.objective.heads.num_heads
    ids = torch.tensor(greedy_rows(target, 24, 24))[:, :6]
    out = speculative_generate(
        target, made.drafter, ids, max_new_tokens=30, num_speculative_tokens=heads, eos_token_id=[]
    )
    assert out.stats.acceptance_rate is not None
    assert 0.05 < out.stats.acceptance_rate < 0.95, "the comparison must have something to compare"
    accepted, drafted = [0] * heads, [0] * heads
    for row, stats in zip(out.tokens.tolist(), out.stats.rows, strict=True):
        right, _ = made.objective.eval().hits(batch_of([row]))
        for start in stats.step_starts:
            newest = 6 + start - 1  # the hidden state is that of the token before it: label number newest - 1
            room = min(heads, 30 - start - 1)
            run = right[newest - 1, :room].long().cumprod(0)
            for i in range(room):
                drafted[i] += 1
                accepted[i] += int(run[i])
    assert drafted == out.stats.pooled.drafted_at
    assert accepted == out.stats.pooled.accepted_at


@pytest.fixture(scope="session")
def lab() -> SimpleNamespace:
    """Making, training and measuring heads on the last hidden state: the functions above, which tests cannot import."""
    return SimpleNamespace(
        batch_of=batch_of,
        greedy_rows=greedy_rows,
        prepared=prepared,
        fit=fit,
        figures=figures,
        check_metric=check_metric,
    )
