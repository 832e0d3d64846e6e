"""The vocabulary of Gemma2ForCausalLM over 2 ranks by vocab-1: embeddings, head and loss.

model.embed_tokens.weight (96 x 16): 48 rows each.

Embedding, by every rank for each micro-batch:

    EMBED embed_tokens           the rows of model.embed_tokens.weight that are here, zeros for the
                                 others
    REDUCE embed_tokens          the sum over all ranks, to stage 0
    BROADCAST embed_tokens.grad  from stage 0, once it has gone back
    EMBED_BACKWARD embed_tokens  into the gradient of the rows that are here

Head and loss, by every rank for each micro-batch, with x = norm, W = its rows of
model.embed_tokens.weight, G = 1 in the column of a row's label, else 0, g = the gradient of each
row's loss, D = the derivative of `logits`:

    BROADCAST norm       from stage 1
    S                    logits = x Wᵀ, through `logits`, m' = the largest of a row, sum' = Σ
                         exp(logits - m'), P' = exp(logits - m') / sum'
    EXCHANGE statistics  m', sum' and the label's logit of all ranks give m, sum and the loss, and
                         its s = sum' exp(m' - m) / sum
    T                    Z = g (s P' - G) D, W.grad += Zᵀ x
    REDUCE norm.grad     Σ Z W over all ranks, to stage 1, which then goes back
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parcompiler import runtime


class Vocabulary(runtime.Vocabulary):
    """Rows of the tables, and what the model does before and behind them."""

    method = "vocab-1"
    names = {
        "model_embed_tokens_weight": "model.embed_tokens.weight",
    }
    size = {
        "model_embed_tokens_weight": 96,
    }
    lookups = {
        "embed_tokens": runtime.Lookup(
            weight="model_embed_tokens_weight", inputs=("input_ids",), padding_idx=0
        ),
    }
    head = runtime.Head(
        x="norm",
        weight="model_embed_tokens_weight",
        inputs=("labels",),
        targets="targets",
        logits=True,
    )

    def __init__(self, ranks: int, index: int) -> None:
        super().__init__(ranks, index)
        self.model_embed_tokens_weight = nn.Parameter(
            runtime.rows(96, 16, ranks=ranks, dtype=torch.float32)
        )

    def targets(self, labels: Tensor) -> Tensor:
        """The class of each row of norm."""
        padded = F.pad(labels, (0, 1), value=-100.0)
        part = padded[:, 1:]
        part = part.contiguous()
        part = part.view(-1)
        return part

    def logits(self, logits: Tensor) -> Tensor:
        """From x Wᵀ to what the loss takes, element by element."""
        logits = logits / 30.0
        logits = torch.tanh(logits)
        logits = logits * 30.0
        return logits
