"""FT-Transformer as a party's encoder: a transformer over the columns of a table (Gorishniy et al.
2021, arXiv 2106.11959), on ``torch.nn.TransformerEncoder``.

encoder = { kind = "custom", factory = "ft_transformer:FTTransformer", options = { blocks = 2 } }
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor, nn

from vfl_party.models import InputSpec


class FeatureTokenizer(nn.Module):
    """Makes a token of each column (section 3.3, "Feature Tokenizer").

    A number x of column j becomes b_j + x · W_j, a category b_j + a row of the column's embedding
    table.
    """

    # [C], the first row of each column in the table.
    offsets: Tensor

    def __init__(self, numbers: int, cardinalities: tuple[int, ...], width: int) -> None:
        super().__init__()
        bound = width**-0.5
        self.weight = nn.Parameter(torch.empty(numbers, width).uniform_(-bound, bound))
        columns = numbers + len(cardinalities)
        self.bias = nn.Parameter(torch.empty(columns, width).uniform_(-bound, bound))
        self.table: nn.Embedding | None = None
        if cardinalities:
            self.table = nn.Embedding(sum(cardinalities), width)
            nn.init.uniform_(self.table.weight, -bound, bound)
        offsets = [0, *accumulate(cardinalities)][:-1]
        self.register_buffer("offsets", torch.tensor(offsets, dtype=torch.int64), persistent=False)

    def forward(self, x_BF: Tensor, codes_BC: Tensor | None = None) -> Tensor:
        """Returns a token for each column, [B, F + C, T]."""
        tokens = x_BF.unsqueeze(2) * self.weight
        if self.table is not None and codes_BC is not None:
            tokens = torch.cat([tokens, self.table(codes_BC + self.offsets)], dim=1)
        return tokens + self.bias


class FTTransformer(nn.Module):
    """Tokens of all columns and a [CLS] token through transformer blocks; [CLS] gives the
    embedding.

    Args:
        spec: the rows: ``spec.shape`` (F,), and the number of codes of each categorical column.
        embedding_size: D of the recipe.
        width: T of a token, a multiple of ``heads``.
        blocks, heads: of the transformer.
        dropout: in attention and feed-forward layers.
    """

    # Categories come as codes, int64 [B, C], and not as columns of 0 and 1.
    takes_codes = True
    # What FedHSSL averages.
    top_layers = ("last",)

    def __init__(
        self,
        spec: InputSpec,
        embedding_size: int,
        *,
        width: int = 32,
        blocks: int = 2,
        heads: int = 4,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if len(spec.shape) != 1:
            raise ValueError(f"it takes columns, not rows of shape {list(spec.shape)}")
        self.tokens = FeatureTokenizer(spec.shape[0], spec.cardinalities, width)
        self.cls = nn.Parameter(torch.empty(width).uniform_(-(width**-0.5), width**-0.5))
        block = nn.TransformerEncoderLayer(
            width,
            heads,
            dim_feedforward=2 * width,
            dropout=dropout,
            batch_first=True,
            norm_first=True,
        )
        # A nested tensor is for padding, which columns do not have.
        self.blocks = nn.TransformerEncoder(block, blocks, enable_nested_tensor=False)
        self.last = nn.Sequential(nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, embedding_size))

    def forward(self, x_BF: Tensor, codes_BC: Tensor | None = None) -> Tensor:
        """Embeds a batch: float32 [B, F] and, if there are categories, int64 [B, C] -> [B, D]."""
        tokens = self.tokens(x_BF, codes_BC)
        cls = self.cls.expand(len(tokens), 1, -1)
        h_BCT = self.blocks(torch.cat([cls, tokens], dim=1))
        z_BD: Tensor = self.last(h_BCT[:, 0])
        return z_BD
