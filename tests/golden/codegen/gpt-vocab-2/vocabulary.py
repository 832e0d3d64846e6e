"""The vocabulary of GPT over 2 ranks by vocab-2: embeddings, head and loss.

embedding.weight (96 x 16): 48 rows each.

Embedding, by every rank for each micro-batch:

    EMBED embedding           the rows of embedding.weight that are here, zeros for the others
    REDUCE embedding          the sum over all ranks, to stage 0
    BROADCAST embedding.grad  from stage 0, once it has gone back
    EMBED_BACKWARD embedding  into the gradient of the rows that are here

Head and loss, by every rank for each micro-batch, with x = norm, W = its rows of
embedding.weight, G = 1 in the column of a row's label, else 0, g = the gradient of each row's
loss:

    BROADCAST norm       from stage 1
    S                    logits = x Wᵀ, m' = the largest of a row, sum' = Σ exp(logits - m'),
                         P' = exp(logits - m') / sum'; A = P' W, B = G W
    EXCHANGE statistics  m', sum' and the label's logit of all ranks give m, sum and the loss, and
                         its s = sum' exp(m' - m) / sum
    REDUCE norm.grad     Σ g (s A - B) over all ranks, to stage 1, which goes back without waiting
                         for T
    T                    Z = g (s P' - G), W.grad += Zᵀ x
"""

import torch
from torch import Tensor, nn

from parcompiler import runtime


class Vocabulary(runtime.Vocabulary):
    """Rows of the tables, and what the model does before and behind them."""

    method = "vocab-2"
    names = {
        "embedding_weight": "embedding.weight",
    }
    size = {
        "embedding_weight": 96,
    }
    lookups = {
        "embedding": runtime.Lookup(weight="embedding_weight", inputs=("tokens",)),
    }
    head = runtime.Head(x="norm", weight="embedding_weight", inputs=("labels",), targets="targets")

    def __init__(self, ranks: int, index: int) -> None:
        super().__init__(ranks, index)
        self.embedding_weight = nn.Parameter(runtime.rows(96, 16, ranks=ranks, dtype=torch.float32))

    def targets(self, labels: Tensor) -> Tensor:
        """The class of each row of norm."""
        labels = labels.flatten()
        return labels
