"""transformers' own assisted generation, dressed as `speculative_generate` so that the audit can be turned on it."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from ..decode.draft_model import DraftModel
from ..decode.loop import SpeculativeOutput
from ..decode.prompt_lookup import PromptLookup
from ..decode.prompts import pad_rows, right_padded
from ..decode.sampling import Sampling
from ..decode.stats import RowStats, Stats
from ..errors import BadInput
from ..models.target import Target
from .options import AuditOptions


def check_transformers_can(options: AuditOptions) -> None:
    """Raises BadInput for what ``generate(assistant_model=...)`` has no counterpart of."""
    if options.rule != "lossless":
        raise BadInput(f"--rule {options.rule}: transformers has its own rule only, use lossless")
    if options.tree is not None:
        raise BadInput("--tree: transformers drafts chains only")
    lengths = options.num_speculative_tokens
    if not isinstance(lengths, int):
        raise BadInput(f"--num-speculative-tokens: got {lengths!r}, transformers is audited with a number")


def transformers_generate(drafter: Any) -> Callable[..., SpeculativeOutput]:
    """A function like `speculative_generate` that runs ``target.generate`` with `drafter`, one row at a time.

    A draft model becomes ``assistant_model``, prompt lookup ``prompt_lookup_num_tokens``. The number of draft tokens is
    the one asked for, constant; all else that transformers decides (stopping at a lack of confidence among it) is left
    at its defaults.

    Raises:
        BadInput: a drafter that transformers has no counterpart of.
    """
    lookup = isinstance(drafter, PromptLookup) or drafter == "prompt_lookup"
    assistant = None if lookup else _assistant(drafter)

    def generate(
        target: Target,
        _: Any,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int,
        seed: Sequence[int],
        num_speculative_tokens: int = 4,
        eos_token_id: int | Sequence[int] | None = None,
        **settings: Any,
    ) -> SpeculativeOutput:
        sampling = Sampling(**{name: settings[name] for name in Sampling._fields if name in settings})
        config = _generation_config(sampling, max_new_tokens)
        ends = list(target.eos_token_ids) if eos_token_id is None else eos_token_id
        config.eos_token_id = ends if isinstance(ends, int) else list(ends) or None
        config.pad_token_id = 0
        extra: dict[str, Any] = {"assistant_model": assistant}
        if assistant is None:
            config.prompt_lookup_num_tokens, extra = num_speculative_tokens, {}
        rows, counts = [], []
        prompts = right_padded(input_ids, attention_mask, target)
        with _drafting(assistant, num_speculative_tokens), torch.random.fork_rng():
            for prompt, row_seed in zip(prompts.rows(), seed, strict=True):
                torch.manual_seed(row_seed)
                tokens, count = _one(target, prompt, config, extra)
                rows.append(tokens)
                counts.append(count)
        padded = pad_rows(rows, target)
        return SpeculativeOutput(padded.ids, torch.tensor(padded.lengths), Stats(counts))

    return generate


def _assistant(drafter: Any) -> Any:
    if not isinstance(drafter, DraftModel):
        raise BadInput(f"--engine transformers: {type(drafter).__name__} has no counterpart there, use a draft model")
    if drafter.vocabulary is not None:
        raise BadInput(
            "--engine transformers: it cannot draft with a cut vocabulary, use a draft model with a full one"
        )
    return drafter.lm.model


def _generation_config(sampling: Sampling, max_new_tokens: int) -> GenerationConfig:
    """The same transforms, nothing left to a default of the model's."""
    settings: dict[str, Any] = {"do_sample": False}
    if sampling.temperature > 0:
        settings = {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k or 0,
            "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
            "min_p": sampling.min_p,
        }
    return GenerationConfig(max_new_tokens=max_new_tokens, repetition_penalty=sampling.repetition_penalty, **settings)


@contextmanager
def _drafting(assistant: Any, num_speculative_tokens: int) -> Iterator[None]:
    """The number of draft tokens is read from the assistant's own configuration."""
    if assistant is None:
        yield
        return
    before = assistant.generation_config
    assistant.generation_config = copy.deepcopy(before)
    assistant.generation_config.num_assistant_tokens = num_speculative_tokens
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    try:
        yield
    finally:
        assistant.generation_config = before


def _one(
    target: Target, prompt: list[int], config: GenerationConfig, extra: dict[str, Any]
) -> tuple[list[int], RowStats]:
    """One answer, prompt included, and what was counted by looking at the target's passes."""
    fed: list[int] = []

    def watch(module: Any, args: tuple, kwargs: dict) -> None:
        fed.append((args[0] if args else kwargs["input_ids"]).shape[1])

    hook = target.model.register_forward_pre_hook(watch, with_kwargs=True)
    try:
        ids = torch.tensor([prompt], device=target.device)
        model: Any = target.model
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=copy.deepcopy(config), **extra)
    finally:
        hook.remove()
    tokens = out[0].tolist()
    emitted = len(tokens) - len(prompt)
    # The first pass is fed the prompt and a draft, every other one the newest token and a draft.
    drafted = sum(fed) - len(prompt) - (len(fed) - 1)
    accepted = min(drafted, max(emitted - len(fed), 0))
    return tokens, RowStats(target_calls=len(fed), drafted=drafted, accepted=accepted, emitted=emitted)
