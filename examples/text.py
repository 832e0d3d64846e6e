"""English text that is on every machine with Python, as batches of tokens.

The text is the language reference that Python's own `help()` shows. The tokens are a byte-pair
encoding trained on it.
"""

from collections.abc import Iterator
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer


def corpus() -> str:
    """About 700,000 characters of English prose and code."""
    return "\n\n".join(topics[name] for name in sorted(topics))


def tokenizer(text: str, vocabulary: int) -> Tokenizer:
    """A byte-pair encoding of `vocabulary` tokens trained on `text`; the same every time."""
    made = Tokenizer(BPE())
    made.pre_tokenizer = ByteLevel(add_prefix_space=False)
    made.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator([text], trainer)
    return made


def batches(
    tokens: torch.Tensor, rows: int, sequence: int, seed: int = 0
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Random windows for ever: tokens and the tokens that follow them, both [rows, sequence]."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(tokens) - sequence - 1, (rows,), generator=generator)
        windows = torch.stack([tokens[s : s + sequence + 1] for s in starts.tolist()])
        yield windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
