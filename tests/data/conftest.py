"""Tokenizers and chat templates of several styles, made on the spot. The templates are our own, in the style named."""

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

WORDS = [
    "The market opens an hour after the ferry leaves.",
    "What is seven times eight? It is fifty-six.",
    "user assistant system model Answer Question thinking",
    "A longer answer:\n\n1. first\n2. second\n",
    "Line one.\n\n\n\nLine two.\n\n",
]
LOOP = "{% for m in messages %}"
CHATML = (
    LOOP + "{% if loop.first and m.role != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "<|begin_of_text|>" + LOOP + "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + "
    "'<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "<bos>{% if messages[0].role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}"
    + LOOP
    + "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + "
    "'<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MISTRAL = (
    "<s>" + LOOP + "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + '</s>' }}{% endif %}{% endfor %}"
)
# Writes the newest answer's thinking (an empty one where there is none), strips it from the answers before.
THINKING = (
    LOOP + "{% if m.role == 'assistant' %}{% set answer = m.content.split('</think>')[-1].strip('\n') %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') "
    "if '</think>' in m.content else '' %}"
    "{{ '<|im_start|>assistant\n' }}{% if loop.last %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}"
    "{{ answer + '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    LOOP + "{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}\n"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED_CONTENT_ONLY = MARKED.replace(
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}", "{{ m.content }}{% endgeneration %}<|im_end|>"
)
PLAIN_ROLES = (
    LOOP
    + "{{ ('Question: ' if m.role == 'user' else 'Answer: ') + m.content + '\n' }}{% endfor %}"
    + ("{% if add_generation_prompt %}{{ 'Answer:' }}{% endif %}")
)
SPECIAL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<s>", "</s>", "[INST]", "[/INST]"),
]
HIDING = LOOP + "{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
STYLES = {
    "chatml": (CHATML, "<|im_end|>"),
    "llama3": (LLAMA3, "<|eot_id|>"),
    "gemma": (GEMMA, "<end_of_turn>"),
    "mistral": (MISTRAL, "</s>"),
    "thinking": (THINKING, "<|im_end|>"),
    "marked": (MARKED, "<|im_end|>"),
    "marked_content_only": (MARKED_CONTENT_ONLY, "<|im_end|>"),
    "plain_roles": (PLAIN_ROLES, "<|endoftext|>"),
    "hiding": (HIDING, "<|im_end|>"),
    "none": (None, "</s>"),
}
TokenizerFactory = Callable[..., PreTrainedTokenizerFast]


def _byte_level(special: list[AddedToken], split: bool) -> Tokenizer:
    backend = Tokenizer(BPE())
    # Without the regex whole lines are one word, so that BPE merges line ends with whatever stands beside them.
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(WORDS, trainer)
    return backend


def _metaspace(special: list[AddedToken]) -> Tokenizer:
    backend = Tokenizer(BPE(unk_token="<|endoftext|>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False)
    backend.train_from_iterator(WORDS, trainer)
    backend.add_tokens(["\n"])
    return backend


@pytest.fixture(scope="session")
def make_tokenizer() -> TokenizerFactory:
    """`make(style, kind="bytes" | "lines" | "metaspace", template=…, eos=…, **token_options)`; styles: `STYLES`.

    ``bytes`` splits words as GPT-2 does, ``lines`` merges across white space, ``metaspace`` works as SentencePiece.
    """

    def make(style: str = "chatml", kind: str = "bytes", **options: Any) -> PreTrainedTokenizerFast:
        template, eos = options.pop("template", STYLES[style][0]), options.pop("eos", STYLES[style][1])
        special = [AddedToken(token, special=True, normalized=False, **options) for token in SPECIAL]
        backend = _metaspace(special) if kind == "metaspace" else _byte_level(special, split=kind == "bytes")
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos)
        tokenizer.chat_template = template
        return tokenizer

    return make
