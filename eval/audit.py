"""`draftsmith audit`: is the output really the target's?

At temperature 0 an answer must be plain decoding's, token for token; under sampling it must have the target's
distribution, which is tested on the first few tokens after fixed prompts. A rule that is not lossless fails by design,
and its drift is reported instead.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..decode.dynamic_tree import as_tree
from ..decode.length_names import longest
from ..decode.loop import speculative_generate
from ..decode.packed import use_backend
from ..decode.prompts import pad_rows
from ..decode.rules import LOSSLESS
from ..decode.sampling import Sampling
from ..decode.streams import mix
from ..decode.tree import TreeLayout
from ..errors import BadInput
from ..heads import load_served
from ..models.target import Target, as_target, load_target
from .alpha import Answer
from .audit_drift import audit_drift
from .audit_engine import Engine
from .audit_greedy import audit_greedy
from .audit_sampled import audit_sampled
from .audit_statistics import Test
from .audit_transformers import check_transformers_can, transformers_generate
from .auto_tree import choose_tree
from .options import AuditOptions
from .run import encode_openings, evaluation_prompts

_SAMPLED_PROMPTS = 4  # where no limit is given: thousands of answers are drawn after each
_CONTEXT_TOKENS = 32  # of a prompt that is sampled after: its end. Every sample pays for the whole of it
_SAMPLED_ROWS = 64  # decoded side by side under sampling, at least
_TREE_PROMPTS, _TREE_TOKENS = 12, 32  # that `--tree auto` is chosen by


class AuditResult(NamedTuple):
    """Whether an audit was passed, what it says, and its tests (none where nothing was sampled)."""

    passed: bool
    lines: list[str]
    tests: list[Test] = []  # noqa: RUF012 - a NamedTuple's default, which nothing changes


def audit(options: AuditOptions) -> AuditResult:
    """Load what `options` name and audit it.

    Raises:
        BadInput: unreadable prompts, models that do not fit each other, something the engine under audit cannot do.
    """
    foreign = options.engine == "transformers"
    if foreign:
        check_transformers_can(options)
    sampled = options.temperature > 0 and options.rule in LOSSLESS
    examples = evaluation_prompts(options.prompts, options.limit or (_SAMPLED_PROMPTS if sampled else None))
    target, drafter, backend = _loaded(options)
    prompts = encode_openings(target, examples, where=options.prompts)
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.min_p, options.repetition_penalty)
    tree, tree_words = options.tree, ""
    if tree == "auto":
        tree, tree_words = _chosen_tree(options, target, drafter, prompts, sampling)
    result = audit_drafter(
        target,
        drafter,
        [prompt[-_CONTEXT_TOKENS:] for prompt in prompts] if sampled else prompts,
        sampling=sampling,
        rule=options.rule,
        rule_options=options.rule_options,
        tree=tree,
        num_speculative_tokens=options.num_speculative_tokens,
        batch_size=1 if foreign else max(options.batch_size, _SAMPLED_ROWS) if sampled else options.batch_size,
        max_new_tokens=options.max_new_tokens,
        samples=options.samples,
        joint_tokens=options.joint_tokens,
        significance=options.significance,
        seed=options.seed,
        decode=transformers_generate(drafter) if foreign else speculative_generate,
        names=[f"prompt {example.id}" for example in examples],
        show_progress=True,
    )
    what = f"{'transformers generate' if foreign else 'draftsmith'}, {options.drafter} for {options.target}"
    how = f"rule {options.rule}, {target.dtype}, backend {backend}{tree_words}".replace("torch.", "")
    return result._replace(lines=[f"audit of {what}: {how}", *result.lines])


def _loaded(options: AuditOptions) -> tuple[Target, Any, str]:
    """Target, drafter and the backend in use."""
    target = load_target(options.target, options.dtype, options.device, options.trust_remote_code)
    if target.tokenizer is None:
        raise BadInput(f"{options.target}: has no tokenizer, so prompts cannot be encoded")
    backend = use_backend(target.model, options.backend)  # type: ignore[arg-type]
    return target, load_served(options.drafter, target, options.drafter_dtype), backend


def _chosen_tree(
    options: AuditOptions, target: Target, drafter: Any, prompts: Sequence[list[int]], sampling: Sampling
) -> tuple[Any, str]:
    """The tree that ``eval --tree auto`` would choose after some of the prompts, and how to say so."""
    some = list(prompts[:_TREE_PROMPTS])
    plain = Engine(target, None, sampling, batch_size=len(some), show_progress=True)
    seeds = [mix(options.seed, i) for i in range(len(some))]
    said = plain.plain(some, _TREE_TOKENS, seeds, "plain answers to choose a tree by").tokens
    answers = [Answer(prompt, tokens) for prompt, tokens in zip(some, said, strict=True)]
    layout, words = choose_tree(target, drafter, answers, sampling, longest(options.num_speculative_tokens))
    return layout.paths, f", tree of {words}"


def audit_drafter(
    target: Any,
    drafter: Any,
    prompts: Sequence[Sequence[int]],
    *,
    sampling: Sampling = Sampling(),  # noqa: B008 - immutable
    rule: str = "lossless",
    rule_options: Mapping[str, Any] | None = None,
    tree: Any = None,
    num_speculative_tokens: int | str = 4,
    batch_size: int = 1,
    max_new_tokens: int = 64,
    samples: int = 2000,
    joint_tokens: int = 2,
    significance: float = 0.01,
    seed: int = 0,
    decode: Callable[..., Any] = speculative_generate,
    eos_token_id: int | Sequence[int] | None = None,
    names: Sequence[str] | None = None,
    show_progress: bool = False,
) -> AuditResult:
    """Audit a target and a drafter that are in memory, or any other way of generating.

    Args:
        prompts: token ids; under sampling, what the samples are drawn after.
        batch_size: rows that `decode` is given at a time. Prompts take turns in them.
        max_new_tokens: length of the answers compared at temperature 0.
        samples: answers drawn after every prompt (and as many plain ones, where these are needed).
        joint_tokens: how many first tokens the joint distribution is over. Answers are drawn longer than that, so that
            every step that begins among them drafts to its full depth.
        significance: the largest chance of a false alarm, over all tests.
        decode: what is audited: takes what ``speculative_generate`` takes, returns ``tokens`` and ``lengths`` like it,
            and ``stats`` if it counts.
        names: of the prompts, in what is printed.

    Raises:
        BadInput: no prompts, one that leaves no room in the target's context, settings that `decode` refuses.
    """
    target = as_target(target)
    if not prompts:
        raise BadInput("an audit needs at least one prompt")
    rows = pad_rows([list(prompt) for prompt in prompts], target).rows()
    names = [f"prompt {i}" for i in range(len(rows))] if names is None else list(names)
    settings = {
        "num_speculative_tokens": num_speculative_tokens,
        "rule": rule,
        "rule_options": dict(rule_options or {}),
        "tree": tree,
        "eos_token_id": eos_token_id,
    }
    engine = Engine(target, drafter, sampling, decode, settings, batch_size, show_progress)
    if rule not in LOSSLESS:
        found = audit_drift(engine, rows, max_new_tokens=max_new_tokens, seed=seed)
        verdict = f"FAILED: the rule {rule} is not lossless by design, so the output is not the target's"
        return AuditResult(False, [*found, verdict])
    if sampling.temperature == 0:
        found = audit_greedy(engine, rows, names, max_new_tokens=max_new_tokens)
        head = f"greedy decoding: {len(rows)} prompts, {batch_size} side by side"
        good = "PASSED: the output is the target's"
    else:
        shape = as_tree(tree)
        depth = shape.depth if isinstance(shape, TreeLayout) else longest(num_speculative_tokens)
        _check_room(target, rows, names, joint_tokens)
        found = audit_sampled(
            engine,
            rows,
            names,
            samples=samples,
            joint_tokens=joint_tokens,
            length=joint_tokens + depth,
            significance=significance,
            seed=seed,
        )
        head = (
            f"sampling ({_described(sampling)}): {samples} samples after each of {len(rows)} prompts "
            f"of {min(map(len, rows))} to {max(map(len, rows))} tokens, {batch_size} side by side"
        )
        good = "PASSED: nothing says that the output is not the target's"
    return AuditResult(
        found.passed,
        [head, *found.lines, good if found.passed else "FAILED: the output is not the target's"],
        found.tests,
    )


def _check_room(target: Target, prompts: Sequence[list[int]], names: Sequence[str], joint_tokens: int) -> None:
    limit = target.context_limit
    for prompt, name in zip(prompts, names, strict=True):
        if limit is not None and len(prompt) + joint_tokens > limit:
            raise BadInput(f"{name} has {len(prompt)} tokens: no room for {joint_tokens} more in a context of {limit}")


def _described(sampling: Sampling) -> str:
    given = [("temperature", sampling.temperature), ("top-k", sampling.top_k), ("top-p", sampling.top_p)]
    given += [("min-p", sampling.min_p)]
    if sampling.repetition_penalty != 1.0:
        given.append(("repetition penalty", sampling.repetition_penalty))
    return ", ".join(f"{name} {value:g}" for name, value in given if value is not None)
