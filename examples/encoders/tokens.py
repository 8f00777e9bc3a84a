"""Text as columns of token numbers, and an encoder for them.

Before training, each party makes columns t0, t1, … of its text: ``frame.join(token_columns(frame,
"notes"))``. The rule is the same everywhere and learns nothing: the n-th word of the text, in lower
case, is 1 + CRC-32(word in UTF-8) mod (vocabulary - 1), and 0 stands for "no more words". Two words
may share a number (the hashing trick, Weinberger et al. 2009, arXiv 0902.2206): with 20,000 numbers
and 5,000 different words, about one word in five shares its number with another.

[data]
columns = ["t0", "t1", "t2", "t3"]
numeric = ["t0", "t1", "t2", "t3"]
scale = "none"

encoder = { kind = "custom", factory = "tokens:TextEncoder" }
"""

from __future__ import annotations

import re
import zlib
from typing import TYPE_CHECKING

from torch import Tensor, nn

from vfl_party.models import InputSpec

if TYPE_CHECKING:
    import pandas as pd

VOCABULARY = 20_000


def tokens(text: str, length: int, vocabulary: int = VOCABULARY) -> list[int]:
    """Returns the numbers of the first ``length`` words, then zeros."""
    words = re.findall(r"\w+", text.lower())[:length]
    found = [1 + zlib.crc32(word.encode()) % (vocabulary - 1) for word in words]
    return found + [0] * (length - len(found))


def token_columns(
    frame: pd.DataFrame, column: str, length: int = 16, vocabulary: int = VOCABULARY
) -> pd.DataFrame:
    """Returns whole numbers in columns t0, t1, … for a column of text; missing text has no
    words.
    """
    import pandas as pd

    rows = [tokens(text, length, vocabulary) for text in frame[column].fillna("").astype(str)]
    names = [f"t{place}" for place in range(length)]
    return pd.DataFrame(rows, columns=names, index=frame.index)


class TextEncoder(nn.Module):
    """The mean of the words' embeddings, then a linear layer.

    Args:
        spec: ``spec.shape`` is (L,): token columns alone, unscaled.
        embedding_size: D of the recipe.
        width: of a word's embedding.
        vocabulary: as for ``tokens``.
    """

    # What FedHSSL averages.
    top_layers = ("last",)

    def __init__(
        self,
        spec: InputSpec,
        embedding_size: int,
        *,
        width: int = 32,
        vocabulary: int = VOCABULARY,
    ) -> None:
        super().__init__()
        if len(spec.shape) != 1:
            raise ValueError(f"it takes columns, not rows of shape {list(spec.shape)}")
        # Row 0, the padding, stays zero and does not count in the mean.
        self.words = nn.EmbeddingBag(vocabulary, width, mode="mean", padding_idx=0)
        self.last = nn.Linear(width, embedding_size)

    def forward(self, x_BL: Tensor) -> Tensor:
        """Embeds a batch of token numbers, float32 [B, L] -> [B, D]."""
        # float32 holds whole numbers up to 2^24 exactly.
        z_BD: Tensor = self.last(self.words(x_BL.long()))
        return z_BD
