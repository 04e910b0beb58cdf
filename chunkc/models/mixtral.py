"""Mixtral (Jiang et al., 2024): a Llama with a mixture of experts as its feed-forward network, two for each token.

Each token is copied once per chosen expert, the copies are sorted by expert, and one grouped matrix product multiplies
each run of rows by its expert's matrix. Shapes do not depend on the routing (tokens times choices), so the model is one
graph. The arithmetic is that of top-2 routing: no token is dropped and no expert is padded. The usual loop over experts
needs data-dependent sizes, and gathering weights would copy hundreds of megabytes per token. PyTorch's grouped product
takes bf16 only, on fake tensors and on CUDA.

The auxiliary loss that balances experts is left out: it is a few numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chunkc.models.common import INITIAL_DEVIATION, linear
from chunkc.models.llama import LlamaConfig


@dataclass(frozen=True, kw_only=True)
class MixtralConfig(LlamaConfig):
    """Sizes of a Mixtral.

    Attributes:
        num_experts: experts of each layer.
        num_chosen: experts for each token.
    """

    has_heads_apart: ClassVar[bool] = False
    only_dtype: ClassVar[torch.dtype | None] = torch.bfloat16

    vocabulary: int = 32_000
    rotary_base: float = 1e6
    num_experts: int = 8
    num_chosen: int = 2

    def network(self) -> nn.Module:
        return Experts(self)


class Experts(nn.Module):
    """SwiGLU experts behind a router: [batch, length, width] in and out.

    The experts' matrices are stacked, [experts, inputs, outputs], as the grouped product reads them.
    """

    def __init__(self, config: MixtralConfig) -> None:
        super().__init__()
        self.num_experts, self.num_chosen = config.num_experts, config.num_chosen
        self.router = linear(config.width, config.num_experts, config, bias=False)
        inwards = (config.num_experts, config.width, config.inner_width)
        self.gate = nn.Parameter(torch.empty(inwards, dtype=config.dtype))
        self.up = nn.Parameter(torch.empty(inwards, dtype=config.dtype))
        self.down = nn.Parameter(torch.empty(config.num_experts, config.inner_width, config.width, dtype=config.dtype))
        for weight in (self.gate, self.up, self.down):
            nn.init.normal_(weight, std=INITIAL_DEVIATION)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        share, chosen = self.router(tokens).float().softmax(dim=-1).topk(self.num_chosen, dim=-1)
        share = share / share.sum(dim=-1, keepdim=True)

        experts = chosen.flatten()  # expert of copy i, a copy of token i // num_chosen
        order = experts.argsort(stable=True)
        source = order // self.num_chosen
        num_rows = (experts[:, None] == torch.arange(self.num_experts, device=x.device)).sum(dim=0)
        ends = num_rows.cumsum(dim=0, dtype=torch.int32)

        rows = tokens.index_select(0, source)
        inner = F.silu(F.grouped_mm(rows, self.gate, offs=ends)) * F.grouped_mm(rows, self.up, offs=ends)
        outputs = F.grouped_mm(inner, self.down, offs=ends)
        weighted = outputs * share.flatten().index_select(0, order)[:, None].to(outputs.dtype)
        return torch.zeros_like(tokens).index_add(0, source, weighted).view(x.shape)
