"""The reference model: a plain decoder-only transformer, shaped like GPT-2.

Letters in the shapes: B batch, S sequence (Sk keys, with those of the cache), D model width, H heads, Dh head
width, F feed-forward width, V vocabulary.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kamui.model.kv_cache import KVCache

if TYPE_CHECKING:
    from kamui.model.config import ModelConfig


class SinusoidalPositions(nn.Module):
    """A fixed vector for every position.

    Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.5.
    """

    table: Tensor

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        rates = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))  # (D / 2,)
        angles = torch.arange(length)[:, None] * rates  # (S, D / 2)
        table = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)  # (S, D)
        self.register_buffer("table", table, persistent=False)

    def forward(self, positions: Tensor) -> Tensor:
        """Look up positions (S,); returns (S, D)."""
        return self.table[positions]  # (S, D)


class Embedding(nn.Module):
    """Token embeddings plus positional encoding."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.positions: nn.Module
        if config.positional_encoding == "learned":
            self.positions = nn.Embedding(config.context_length, config.d_model)
        else:
            self.positions = SinusoidalPositions(config.context_length, config.d_model)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, token_ids: Tensor, start: int = 0) -> Tensor:
        """Embed token ids (B, S), of which the first stands at position `start`; returns (B, S, D)."""
        positions = torch.arange(start, start + token_ids.size(1), device=token_ids.device)  # (S,)
        x: Tensor = self.dropout(self.tokens(token_ids) + self.positions(positions))  # (B, S, D)
        return x


class Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.n_heads = config.n_heads
        self.d_head = config.d_model // config.n_heads
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model)
        self.out = nn.Linear(config.d_model, config.d_model)
        self.attn_dropout = config.dropout
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        """Let every position of (B, S, D) attend to itself and to those before it; returns (B, S, D)."""
        q, k, v = (self._split(part) for part in self.qkv(x).chunk(3, dim=-1))  # (B, H, S, Dh)
        if cache is not None:
            k, v = cache.update(self.layer, k, v)  # (B, H, Sk, Dh)
        dropout = self.attn_dropout if self.training else 0.0
        new, total = q.size(-2), k.size(-2)
        if new == total:
            z = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)  # (B, H, S, Dh)
        else:
            mask = torch.ones(new, total, dtype=torch.bool, device=x.device).tril(total - new)  # (S, Sk)
            z = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)  # (B, H, S, Dh)
        y: Tensor = self.dropout(self.out(z.transpose(1, 2).flatten(2)))  # (B, S, D)
        return y

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.n_heads, self.d_head).transpose(1, 2)  # (B, H, S, Dh)


class FeedForward(nn.Module):
    """Two linear maps with a GELU between them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.d_model, config.d_ff)
        self.act = nn.GELU(approximate="tanh")
        self.down = nn.Linear(config.d_ff, config.d_model)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Transform every position of (B, S, D) by itself; returns (B, S, D)."""
        hidden = self.act(self.up(x))  # (B, S, F)
        y: Tensor = self.dropout(self.down(hidden))  # (B, S, D)
        return y


class Block(nn.Module):
    """One layer: attention, then the feed-forward, each added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(config.d_model)
        self.attn = Attention(config, layer)
        self.ln2 = nn.LayerNorm(config.d_model)
        self.ffn = FeedForward(config)

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        """Take the residual stream (B, S, D) one layer further; returns (B, S, D)."""
        x = x + self.attn(self.ln1(x), cache)  # (B, S, D)
        y: Tensor = x + self.ffn(self.ln2(x))  # (B, S, D)
        return y


class Transformer(nn.Module):
    """A decoder-only transformer with layer norms before each part and tied embeddings."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
        self.final_ln = nn.LayerNorm(config.d_model)
        self.unembed = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.unembed.weight = self.embed.tokens.weight
        self._initialise()

    def forward(self, token_ids: Tensor, cache: KVCache | None = None) -> Tensor:
        """Compute the logits of every next token.

        Args:
            token_ids: Token ids (B, S), int64 or int32.
            cache: What earlier calls computed; `token_ids` are then only the tokens after those.

        Returns:
            Logits (B, S, V).

        Raises:
            ValueError: The token ids are of another type or shape, too many, or outside the vocabulary. (On a
                GPU the last is left to the device's own assertion: to look would stall every call.)
        """
        start = 0 if cache is None else cache.get_seq_length()
        self._check(token_ids, start)
        try:
            x = self.embed(token_ids, start)  # (B, S, D)
        except IndexError:
            self._check_vocabulary(token_ids)
            raise
        for block in self.blocks:
            x = block(x, cache)  # (B, S, D)
        logits: Tensor = self.unembed(self.final_ln(x))  # (B, S, V)
        return logits

    @torch.no_grad()
    def generate(
        self,
        token_ids: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
        use_cache: bool = True,
    ) -> Tensor:
        """Continue token ids, one token at a time; the model's mode is left as it is.

        Args:
            token_ids: Prompts (B, S) of one length.
            max_new_tokens: How many tokens to add.
            temperature: 0 takes the likeliest token; above 0, tokens are drawn from
                `softmax(logits / temperature)`.
            top_k: Draw only from this many likeliest tokens.
            generator: Where randomness comes from, to draw the same again.
            use_cache: Compute each position once. Off, every step computes the whole sequence again.

        Returns:
            The prompts and what follows, (B, S + max_new_tokens).

        Raises:
            ValueError: An argument is out of its range, or the result would exceed the context length.
        """
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens is {max_new_tokens!r}; expected at least 0")
        if temperature < 0:
            raise ValueError(f"temperature is {temperature!r}; expected at least 0")
        if top_k is not None and not 1 <= top_k <= self.config.vocab_size:
            raise ValueError(f"top_k is {top_k!r}; expected 1 to {self.config.vocab_size} or None")
        self._check(token_ids, max_new_tokens)
        cache = KVCache() if use_cache else None
        new = token_ids  # (B, S)
        for _ in range(max_new_tokens):
            logits = self(new, cache=cache)[:, -1]  # (B, V)
            chosen = _choose(logits, temperature, top_k, generator)  # (B, 1)
            token_ids = torch.cat([token_ids, chosen], dim=1)  # (B, S)
            new = chosen if use_cache else token_ids  # (B, 1) or (B, S)
        return token_ids

    def _check(self, token_ids: Tensor, others: int) -> None:
        if token_ids.dtype not in (torch.int64, torch.int32) or token_ids.ndim != 2 or token_ids.size(1) == 0:
            raise ValueError(
                f"token_ids are {token_ids.dtype} of shape {tuple(token_ids.shape)}; "
                "expected int64 or int32 of shape (batch, sequence) with at least one position"
            )
        length, limit = token_ids.size(1) + others, self.config.context_length
        if length > limit:
            raise ValueError(
                f"the sequence would have {length} positions "
                f"({token_ids.size(1)} in token_ids and {others} more); context_length is {limit}"
            )

    def _check_vocabulary(self, token_ids: Tensor) -> None:
        lowest, highest = (int(bound) for bound in token_ids.aminmax())
        if lowest < 0 or highest >= self.config.vocab_size:
            raise ValueError(
                f"token_ids go from {lowest} to {highest}; vocab_size is {self.config.vocab_size}, "
                f"so 0 to {self.config.vocab_size - 1} are known"
            ) from None

    def _initialise(self) -> None:
        # As in GPT-2: what is added to the residual stream starts smaller the more layers add to it.
        for name, parameter in self.named_parameters():
            if name.endswith(("attn.out.weight", "ffn.down.weight")):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * self.config.n_layers))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)


def _choose(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)  # (B, 1)
    if top_k is not None:
        smallest = logits.topk(top_k).values[:, -1:]  # (B, 1)
        logits = logits.masked_fill(logits < smallest, -torch.inf)  # (B, V)
    chances = (logits / temperature).softmax(-1)  # (B, V)
    return torch.multinomial(chances, 1, generator=generator)  # (B, 1)
