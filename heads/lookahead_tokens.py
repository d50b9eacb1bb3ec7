"""PaSS: look-ahead embeddings that the frozen target reads in the place of tokens to come (arXiv:2311.13581).

After any token stand k trained embeddings; what the target predicts from embedding i is a guess at the token i + 2
positions after that token. The paper reads them in a pass of its own before each verification. Here they ride along in the
verification pass, k behind the newest token and k behind every draft token: whatever is accepted, the guesses that follow
it are there, and drafting takes no pass at all. The price is (n + 1) · k tokens more in a pass that verifies n.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..decode.confidence import Confidence, Stopping
from ..decode.draft import Accepted, Companions, Draft, TargetOutputs, chain
from ..decode.draft_chain import draft_chain
from ..decode.sampling import Sampling
from ..decode.streams import row_uniforms
from ..models.head import split
from ..models.loading import load_exactly
from ..models.quiet import one_line_errors
from ..models.target import Target
from .checkpoint import load_head, save_head
from .lookahead_pass import context_pass, lookahead_pass
from .outputs import whole

KIND = "lookahead_tokens"
_SAMPLED_ROWS = 4096  # of the embedding table, to know the size of its entries


class LookaheadEmbeddings(nn.Module):
    """The k embeddings: all that is trained. They are held in units of the target's own embeddings, whose entries differ in
    size from family to family by factors of a hundred, and begin near the mean of these.
    """

    unit: Float[Tensor, ""]

    def __init__(self, target: Target, num_tokens: int):
        super().__init__()
        embed = target.model.get_input_embeddings()
        self.register_buffer("unit", torch.ones((), device=target.device))
        start = torch.zeros(num_tokens, target.hidden_size, device=target.device)
        if target.device.type != "meta":
            with torch.no_grad(), whole(embed):
                rows = torch.arange(min(_SAMPLED_ROWS, target.vocab_size), device=target.device)
                known = embed(rows).float()
                self.unit.copy_(known.square().mean().sqrt().clamp(min=1e-6))
                start = known.mean(0) / self.unit + 0.1 * torch.randn_like(start)
        self.raw = nn.Parameter(start)

    @property
    def num_tokens(self) -> int:
        """How many there are."""
        return self.raw.shape[0]

    def forward(self) -> Float[Tensor, "tokens hidden"]:
        """As the target's first layer reads them."""
        return self.raw * self.unit

    def saved_state(self) -> dict[str, Tensor]:
        """What is written: the embeddings in the target's own units."""
        return {"embeddings": self.forward().detach()}

    def load_saved(self, tensors: dict[str, Tensor], name: str) -> None:
        """Take what :meth:`saved_state` gave. Raises BadInput for other tensors or shapes; the line starts with `name`."""
        unit = self.unit.cpu()
        known = {"raw" if key == "embeddings" else key: tensor.float() / unit for key, tensor in tensors.items()}
        load_exactly(self, {**known, "unit": unit}, name)


class LookaheadTokens:
    """Look-ahead embeddings as a drafter of chains. Between steps it holds what the target predicted from those behind the
    last token that was accepted. The first step of a row drafts nothing: it only feeds embeddings.
    """

    def __init__(self, embeddings: LookaheadEmbeddings, target: Target):
        self.embeddings = embeddings
        self.wants = {"logits": True}
        self.vocabulary: Tensor | None = None
        self.confidence: Confidence | None = None
        self._target = (target,)  # in a tuple: not this drafter's

    @property
    def module(self) -> nn.Module:
        """What the packed backend packs: nothing."""
        return self.embeddings

    @property
    def num_parameters_read(self) -> int:
        """The embeddings."""
        return self.embeddings.raw.numel()

    def num_passes(self, num_tokens: int) -> int:
        """None of its own: what it costs is in the verification pass (:meth:`num_companions`)."""
        return 0

    def num_companions(self, num_tokens: int) -> int:
        """Tokens that are fed beside a draft."""
        k = self.embeddings.num_tokens
        return (min(num_tokens, k) + 1) * k

    def set_confidence(self, confidence: Confidence | None) -> None:
        """End chains by its own probabilities from now on; None: never."""
        self.confidence = confidence

    def start(self, input_ids: Int[Tensor, "batch prompt"], attention_mask: Int[Tensor, "batch prompt"]) -> None:
        """Forget the last batch."""
        self.batch, self.device = len(input_ids), input_ids.device
        self.logits: Tensor | None = None  # [batch, tokens, vocab]
        self.num_fed: int | None = None  # draft tokens of a step whose pass holds embeddings
        self.unfinished = torch.ones(self.batch, dtype=torch.bool, device=self.device)

    @torch.no_grad()
    def propose(self, num_tokens: int, sampling: Sampling, generators: Sequence[torch.Generator]) -> Draft:
        """A chain of at most `num_tokens` and k, with the embeddings behind each of its tokens."""
        draft = chain(torch.zeros(self.batch, 0, dtype=torch.long, device=self.device))
        if self.logits is not None:
            draft = self._drafted(self.logits, num_tokens, sampling, generators)
        self.num_fed = draft.tokens.shape[1]
        return draft._replace(companions=self._companions(self.num_fed))

    def observe(self, accepted: Accepted, target_outputs: TargetOutputs | None) -> None:
        """Take the predictions from the embeddings behind the last accepted token."""
        assert target_outputs is not None
        logits, nodes = target_outputs.logits, self.num_fed
        self.logits, self.num_fed = None, None
        if logits is None or nodes is None:
            return
        k = self.embeddings.num_tokens
        host = (accepted.lengths - 1).clamp(min=0, max=nodes)  # 0: the newest token
        at = 1 + nodes + host[:, None] * k + torch.arange(k, device=host.device)
        self.logits = logits.gather(1, at[..., None].expand(-1, -1, logits.shape[-1]))
        self.unfinished = accepted.lengths > 0

    @torch.no_grad()
    def teacher_forced_hidden(
        self, input_ids: Int[Tensor, "batch length"], attention_mask: Tensor, hidden_states: dict[int, Tensor]
    ) -> Float[Tensor, "batch length hidden"]:
        """The target's last hidden states at the first embedding behind the token *before* every position of right-padded
        rows: what the first draft token is predicted from. Zeros at the first position.
        """
        model, backbone = self._target[0].model, split(self._target[0].model)[0]
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        segments = attention_mask.long() - 1  # padding is -1
        context = context_pass(backbone, model, input_ids, positions, segments)
        ahead = lookahead_pass(context, positions, self.embeddings()[:1])[:, :, 0]
        return torch.nn.functional.pad(ahead[:, :-1], (0, 0, 1, 0))

    @torch.no_grad()
    def first_token_logits(self, hidden: Float[Tensor, "n hidden"]) -> Float[Tensor, "n vocab"]:
        """Logits over the target's vocabulary."""
        return split(self._target[0].model)[1](hidden).float()

    def _drafted(
        self,
        logits: Float[Tensor, "batch tokens vocab"],
        num_tokens: int,
        sampling: Sampling,
        generators: Sequence[torch.Generator],
    ) -> Draft:
        depth = min(num_tokens, logits.shape[1])
        uniforms = None
        if sampling.temperature:
            uniforms = row_uniforms(depth, generators, self.device)
        following: Iterator[Tensor] = iter(logits.unbind(1))
        stopping = None if self.confidence is None else Stopping(self.confidence, ~self.unfinished)
        return draft_chain(
            depth, next(following), sampling, uniforms, lambda _: next(following), _same, _same, stopping
        )

    def _companions(self, nodes: int) -> Companions:
        k = self.embeddings.num_tokens
        number = torch.arange((nodes + 1) * k, device=self.device)
        parents = torch.where(number % k == 0, -1, number - 1).expand(self.batch, -1)
        hosts = (number // k - 1).expand(self.batch, -1)
        embeddings = self.embeddings().repeat(nodes + 1, 1).expand(self.batch, -1, -1)
        return Companions(torch.zeros_like(parents), parents, hosts, embeddings)


def _same(values: Tensor) -> Tensor:
    return values


def save_lookahead_tokens(embeddings: LookaheadEmbeddings, target: Target, folder: str | Path) -> None:
    """Write the embeddings (``embeddings [k, hidden]``) and what target they are for."""
    tensors = {name: tensor.to(target.dtype) for name, tensor in embeddings.saved_state().items()}
    config = {"model_type": KIND, "hidden_size": target.hidden_size, "num_tokens": embeddings.num_tokens}
    save_head(folder, KIND, tensors, config, target)


def load_lookahead_tokens(folder: str | Path, target: Target) -> LookaheadTokens:
    """The drafter that :func:`save_lookahead_tokens` wrote.

    Raises:
        BadInput: it belongs to another target, or the folder's contents do not fit together.
    """
    known, tensors = load_head(folder, target)
    with one_line_errors(str(folder)), torch.random.fork_rng(devices=[]):
        embeddings = LookaheadEmbeddings(target, int(known["num_tokens"]))
    embeddings.load_saved(tensors, str(folder))
    return LookaheadTokens(embeddings.requires_grad_(False).eval(), target)
