"""``draftsmith generate``: an answer on the terminal as it is decoded, accepted draft tokens coloured."""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

from rich.console import Console
from rich.text import Text

from .errors import BadInput
from .eval.options import GenerateOptions

_DRAFTED = "green"
_EXACTLY = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}


def stream(options: GenerateOptions) -> None:
    """Load the pair, answer the prompt on stdout, and say on stderr what drafting brought.

    Raises:
        BadInput: a model cannot be loaded, the pair does not match, or the prompt is longer than the context.
    """
    from .data.chats import encode_prompt
    from .decode.packed import Backend, use_backend
    from .decode.sampling import Sampling
    from .decode.stream import stream_generate
    from .heads import load_served
    from .models.target import load_target

    target = load_target(options.target, options.dtype, options.device, options.trust_remote_code)
    if target.tokenizer is None:
        raise BadInput(f"{options.target}: has no tokenizer, so it cannot take a text")
    use_backend(target.model, cast(Backend, options.backend))
    drafter = None if options.drafter is None else load_served(options.drafter, target, options.drafter_dtype)
    steps = stream_generate(
        target,
        drafter,
        encode_prompt(target.tokenizer, [options.prompt]),
        max_new_tokens=options.max_new_tokens,
        sampling=Sampling(options.temperature, options.top_k, options.top_p, options.min_p, options.repetition_penalty),
        num_speculative_tokens=options.num_speculative_tokens,
        rule=options.rule,
        rule_options=options.rule_options,
        tree=options.tree,
        seed=options.seed,
    )
    show(target.tokenizer, steps, Console())


def show(tokenizer: Any, steps: Iterable[Any], console: Console) -> None:
    """Print `steps` (see ``decode.stream``) as they come, then one line of counts on stderr."""
    stats, start = None, time.perf_counter()

    def tokens() -> Iterator[tuple[int, bool]]:
        nonlocal stats
        for step in steps:
            stats = step.stats
            yield from zip(step.tokens, step.drafted, strict=True)

    for text, drafted in pieces(tokenizer, tokens()):
        if console.is_terminal:
            console.print(Text(text, style=_DRAFTED if drafted else ""), end="", soft_wrap=True)
        else:  # character for character: rich expands tabs and drops control characters
            console.file.write(text)
        console.file.flush()
    console.print()
    if stats is not None:
        seconds, counts = time.perf_counter() - start, stats.pooled
        line = f"{counts.emitted} tokens in {seconds:.1f} s ({counts.emitted / seconds:.1f} tokens/s)"
        if counts.drafted:
            line += f"; {counts.accepted} of {counts.drafted} draft tokens accepted"
            line += f", {counts.emitted / counts.target_calls:.2f} tokens a target pass"
        print(line, file=sys.stderr)


def pieces(tokenizer: Any, tokens: Iterable[tuple[int, bool]]) -> Iterator[tuple[str, bool]]:
    """The text that each token adds, with its flag; tokens that end inside a character wait for the rest of it.

    A tokenizer may write a token differently at the start of a text, so each piece is decoded behind the one before.
    """
    before: list[int] = []
    waiting: list[int] = []
    drafted = False
    for token, drafted in tokens:
        waiting.append(token)
        text = _added(tokenizer, before, waiting)
        if not text.endswith("\ufffd"):
            yield text, drafted
            before, waiting = waiting, []
    if waiting:
        yield _added(tokenizer, before, waiting), drafted


def _added(tokenizer: Any, before: Sequence[int], new: Sequence[int]) -> str:
    head = tokenizer.decode(before, **_EXACTLY)
    return tokenizer.decode([*before, *new], **_EXACTLY)[len(head) :]
