"""One step of decoding a batch: draft, one target pass, judge, emit, roll back."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import BadInput
from ..models.target import Target
from .draft import Accepted, Draft, Drafter, TargetOutputs, Verdict, share_cache, wants
from .forward import CachedLM, Outputs
from .lengths import LengthPolicy
from .prompts import Prompts
from .rules import LOSSLESS, rule_options
from .sampling import Sampling, check_sampling, draw, probabilities
from .seen import SeenTokens
from .stats import RowStats, Stats
from .stop import StopStrings
from .streams import RowStreams
from .tree import ancestors, depths
from .verify_batched import verify, verify_greedy


class Ends(NamedTuple):
    """What ends a row before its limit."""

    eos: frozenset[int]
    stop: StopStrings | None

    def cut(self, before: list[int], new: list[int]) -> tuple[int, bool]:
        """How many of `new` are emitted, and whether the row ends with them."""
        for i, token in enumerate(new):
            if token in self.eos:
                new = new[: i + 1]
                ended = True
                break
        else:
            ended = False
        at = self.stop.cut(before, new) if self.stop is not None else None
        return (len(new), ended) if at is None else (at, True)


class Step(NamedTuple):
    """What one step emitted, per row: ids, how many of them (from the left) were drafted, and the counts so far."""

    tokens: list[list[int]]
    num_from_draft: list[int]
    stats: Stats


class Decoding:
    """A batch while it is decoded. The target's cache holds what was emitted except each row's newest token."""

    @torch.no_grad()
    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        prompts: Prompts,
        *,
        sampling: Sampling,
        rule: str,
        options: dict[str, Any],
        streams: RowStreams,
        ends: Ends,
        policy: LengthPolicy,
        max_new_tokens: int,
    ):
        if max_new_tokens < 0:
            raise BadInput(f"max_new_tokens: {max_new_tokens} is out of range, expected 0 or more")
        self.drafter, self.sampling, self.streams, self.ends = drafter, check_sampling(sampling), streams, ends
        self.rule, self.rule_options = rule, rule_options(rule, options)
        self.policy = policy
        self.most: list[int] = []  # draft tokens that each row may hold in the newest step
        self.depth = 0  # of the newest draft, at most
        self.wants = {} if drafter is None else wants(drafter)
        batch = len(prompts.lengths)
        self.policy.start(batch)
        limit = target.context_limit
        # What each row may still emit; 0 once it has finished.
        self.room = [
            min(max_new_tokens, limit - length) if limit is not None else max_new_tokens for length in prompts.lengths
        ]
        self.emitted: list[list[int]] = [[] for _ in range(batch)]
        self.stats = Stats([RowStats() for _ in range(batch)])
        self.lm = CachedLM(target.model, batch, self.wants.get("hidden_states", ()))
        self.seen = SeenTokens.of(prompts, target.vocab_size, sampling)
        lengths = torch.tensor(prompts.lengths, device=prompts.ids.device)
        self.newest = prompts.ids.gather(1, lengths[:, None] - 1)  # [batch, 1]
        # Prompts that the first verification pass reads too: nobody needs them read before, and they end together.
        self.unread: Tensor | None = None
        read_before = bool(self.wants) or hasattr(drafter, "share_cache")
        if not read_before and 1 < min(prompts.lengths) == max(prompts.lengths):
            self.unread = prompts.ids[:, :-1]
        else:
            prefill = self.lm.prefill(prompts.ids[:, :-1], [length - 1 for length in prompts.lengths])
        if drafter is not None:
            share_cache(drafter, self.lm)
            drafter.start(prompts.ids, prompts.attention_mask)
            if self.wants:
                nothing = Accepted(self.newest[:, :0], torch.zeros_like(lengths), self.newest[:, :0], [[]] * batch)
                valid = prompts.attention_mask[:, 1:].bool()
                drafter.observe(nothing, TargetOutputs(prompts.ids[:, :-1], valid, prefill.hidden_states, None))

    def unfinished(self) -> bool:
        """Whether a row may still emit."""
        return any(self.room)

    @torch.no_grad()
    def draft(self) -> Draft | None:
        """The drafter's proposal, cut to what each row may hold; None when there is nothing to verify."""
        self.streams.next_step()
        wanted = self.policy.lengths()
        # The pass itself emits one more.
        self.most = [max(min(length, room - 1), 0) for length, room in zip(wanted, self.room, strict=True)]
        self.depth = max(self.most)
        if self.drafter is None or self.depth < 1:
            return None
        draft = self.drafter.propose(self.depth, self.sampling, self.streams.drafting)
        if draft.tokens.shape[1] == 0 and draft.companions is None:
            return None
        return self._shortened(draft)

    @torch.no_grad()
    def verification_pass(self, draft: Draft | None) -> Outputs:
        """One target pass over each row's newest token, its draft and the draft's companions."""
        unread, self.unread = self.unread, None
        if draft is None:
            return self.lm.feed(self.newest, prompts=unread)
        fed = torch.cat([self.newest, draft.tokens.clamp(min=0)], dim=1)
        if draft.is_chain and draft.companions is None:
            return self.lm.feed(fed, prompts=unread)
        parents = torch.nn.functional.pad(draft.parents + 1, (1, 0), value=-1)
        if draft.companions is not None:
            nodes, beside, hosts = draft.tokens.shape[1], draft.companions.parents, draft.companions.hosts
            host = torch.zeros_like(beside) if hosts is None else hosts + 1
            parents = torch.cat([parents, torch.where(beside < 0, host, beside + 1 + nodes)], 1)
            fed = torch.cat([fed, draft.companions.tokens], 1)
            if draft.companions.embeddings is not None:
                embeddings = draft.companions.embeddings
                return self.lm.feed(fed, parents, last_embeddings=embeddings, prompts=unread)
        return self.lm.feed(fed, parents, prompts=unread)

    @torch.no_grad()
    def judge(self, draft: Draft | None, logits: Float[Tensor, "batch fed vocab"] | None) -> Verdict:
        """Which draft tokens stay and what follows them."""
        assert logits is not None
        if draft is not None:
            logits = logits[:, : 1 + draft.tokens.shape[1]]  # companions come last
        greedy = self.sampling.temperature == 0
        if self.seen is not None:
            logits = self.seen.penalised(logits, draft)
        if draft is None:
            uniforms = None if greedy else self.streams.uniforms(1, logits.device)[:, 0]
            following = logits[:, 0].argmax(-1) if uniforms is None else draw(self._probs(logits[:, 0]), uniforms)
            return Verdict(torch.zeros_like(following), following[:, None][:, :0], following)
        if greedy and self.rule in LOSSLESS:
            return verify_greedy(draft, logits.argmax(-1), depth=self.depth)
        uniforms = self.streams.uniforms(logits.shape[1], logits.device)
        judge_probs = None
        if greedy:  # a lossy rule: it weighs probabilities, which the one-hot limit would erase
            judge_probs = probabilities(logits, Sampling(temperature=1.0))
        return verify(
            self.rule,
            draft,
            self._probs(logits),
            uniforms,
            self.rule_options,
            judge_probs=judge_probs,
            depth=None if draft.is_chain else self.depth,
        )

    @torch.no_grad()
    def emit(self, draft: Draft | None, outputs: Outputs, verdict: Verdict) -> Step:
        """Emit what was decided, up to EOS, stop string or limit; roll back target and drafter to it."""
        emitted, counts, drafted, nodes, straight = self._read(draft, verdict)
        self.policy.observe(drafted, counts)
        new, from_draft = [], []
        for row, tokens in enumerate(emitted):
            new.append(self._emit_row(row, tokens[: counts[row] + 1], drafted[row], nodes[row]))
            from_draft.append(min(counts[row], len(new[-1])))
        host_lengths = [len(tokens) for tokens in new]
        lengths = torch.tensor(host_lengths, device=verdict.next_tokens.device)
        width = max(host_lengths)
        tokens = self._emitted_tokens(draft, verdict)[:, :width]
        fed = self.newest
        if min(host_lengths) == width:
            self.newest = tokens[:, -1:]
        else:
            kept = torch.arange(width, device=tokens.device)[None] < lengths[:, None]
            tokens = torch.where(kept, tokens, -1)
            last = tokens.gather(1, (lengths - 1).clamp(min=0)[:, None])
            self.newest = torch.where(lengths[:, None] > 0, last, self.newest)
        accepted = Accepted(tokens, lengths, verdict.path, new)
        if self.seen is not None:
            self.seen.add(tokens)
        if straight:
            self.lm.keep(lengths, host_lengths)
        else:
            self.lm.keep_paths(torch.nn.functional.pad(verdict.path + 1, (1, 0)), lengths, host_lengths)
        if self.drafter is not None:
            self.drafter.observe(accepted, self._for_drafter(fed, draft, outputs))
        return Step(new, from_draft, self.stats)

    def _probs(self, logits: Tensor) -> Tensor:
        # The repetition penalty is in the logits already.
        return probabilities(logits, self.sampling._replace(repetition_penalty=1.0))

    def _shortened(self, draft: Draft) -> Draft:
        """What a row may hold was decided before anything was drawn, so that this cut does not bias what is emitted."""
        nodes = draft.tokens.shape[1]
        # Trees of a layout, or grown by confidence, are no deeper than they were asked to be; others may be.
        trusted = hasattr(self.drafter, "set_tree") or hasattr(self.drafter, "set_dynamic_tree")
        if (draft.is_chain or trusted) and min(self.most) >= (nodes if draft.is_chain else self.depth):
            return draft
        most = torch.tensor(self.most, device=draft.tokens.device)
        if draft.is_chain:
            most = most.clamp(max=nodes)
        else:  # up to the first node that is too deep: nodes come in topological order
            most = (ancestors(draft.parents).sum(-1) <= most[:, None]).long().cumprod(1).sum(1)
        return draft._replace(lengths=most if draft.lengths is None else torch.minimum(draft.lengths, most))

    def _emitted_tokens(self, draft: Draft | None, verdict: Verdict) -> Tensor:
        """``[batch, depth + 1]``: accepted draft tokens, then the target's; what lies beyond has no meaning."""
        following = verdict.next_tokens[:, None]
        if draft is None:
            return following
        chosen = draft.tokens.gather(1, verdict.path.clamp(min=0))
        chosen = torch.nn.functional.pad(chosen, (0, 1))
        return chosen.scatter(1, verdict.num_accepted[:, None], following)

    def _read(
        self, draft: Draft | None, verdict: Verdict
    ) -> tuple[list[list[int]], list[int], list[int], list[int], bool]:
        """Everything the host needs, in the step's one transfer.

        The last is whether accepted tokens follow one another in what was fed, so that no key has to be moved.
        """
        tokens = self._emitted_tokens(draft, verdict)
        if draft is None:
            none = [0] * len(tokens)
            return tokens.tolist(), none, none, none, True
        full = torch.full_like(verdict.num_accepted, draft.tokens.shape[1])
        nodes = full if draft.lengths is None else draft.lengths
        depth = nodes if draft.is_chain else depths(draft.parents, nodes)
        moved = torch.zeros_like(nodes)
        if not draft.is_chain:
            steps = torch.arange(verdict.path.shape[1], device=nodes.device)
            moved = ((verdict.path != steps) & (steps < verdict.num_accepted[:, None])).sum(1)
        columns = torch.stack([verdict.num_accepted, depth, nodes, moved], 1)
        rows = torch.cat([columns, tokens], 1).tolist()
        counts, drafted, of_nodes, moves = ([row[i] for row in rows] for i in range(4))
        return [row[4:] for row in rows], counts, drafted, of_nodes, not any(moves)

    def _emit_row(self, row: int, tokens: list[int], drafted: int, nodes: int) -> list[int]:
        if not self.room[row]:
            return []
        count, ended = self.ends.cut(self.emitted[row], tokens[: self.room[row]])
        accepted = len(tokens) - 1
        if count <= accepted:  # draft tokens past the end count neither as drafted nor as accepted
            nodes -= drafted - count
            accepted = drafted = count
        self.stats.rows[row].count_step(drafted, nodes, accepted, count)
        self.emitted[row].extend(tokens[:count])
        self.room[row] = 0 if ended else self.room[row] - count
        return tokens[:count]

    def _for_drafter(self, newest: Tensor, draft: Draft | None, outputs: Outputs) -> TargetOutputs | None:
        if not self.wants:
            return None
        valid = torch.ones_like(newest, dtype=torch.bool)
        tokens = newest
        if draft is not None:
            tokens = torch.cat([newest, draft.tokens], 1)
            nodes = draft.tokens.shape[1]
            inside = torch.ones_like(draft.tokens, dtype=torch.bool)
            if draft.lengths is not None:
                inside = torch.arange(nodes, device=tokens.device)[None] < draft.lengths[:, None]
            valid = torch.cat([valid, inside], 1)
            if draft.companions is not None:
                beside = draft.companions.tokens
                tokens = torch.cat([tokens, beside], 1)
                valid = torch.cat([valid, torch.ones_like(beside, dtype=torch.bool)], 1)
        return TargetOutputs(tokens, valid, outputs.hidden_states, outputs.logits)
