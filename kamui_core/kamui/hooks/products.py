"""Products of two activations, `matmul`, `bmm`, `baddbmm` or `einsum`, read as one notation: a letter a dimension."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final, Self

from torch import Tensor, nn

from kamui.hooks.tape import tensors_in

PRODUCTS: Final = frozenset({"matmul", "__matmul__", "bmm", "baddbmm", "einsum"})

_BATCH_LETTERS: Final = "abcdefgh"
_ELLIPSIS_LETTERS: Final = "ABCDEFGH"
_ROW, _INNER, _COLUMN = "xyz"


@dataclasses.dataclass(frozen=True)
class Product:
    """Two factors and what their product's dimensions are called.

    Attributes:
        left: The first factor.
        right: The second factor.
        left_letters: A letter for each dimension of the first factor.
        right_letters: The same for the second.
        letters: The same for the product; its last two are rows and columns.
    """

    left: Tensor
    right: Tensor
    left_letters: str
    right_letters: str
    letters: str

    @classmethod
    def read(cls, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Self | None:
        """Read a call; None where it is no product of two activations with at least three dimensions."""
        if name not in PRODUCTS:
            return None
        factors = list(tensors_in(args, kwargs))[1 if name == "baddbmm" else 0 :]
        if len(factors) != 2 or any(isinstance(factor, nn.Parameter) or factor.dim() < 3 for factor in factors):
            return None
        if name == "einsum":
            return cls._of_einsum(args[0], factors[0], factors[1]) if isinstance(args[0], str) else None
        dims = max(factor.dim() for factor in factors) - 2
        batch = _BATCH_LETTERS[:dims]
        left, right = (batch[dims - (factor.dim() - 2) :] for factor in factors)
        return cls(factors[0], factors[1], left + _ROW + _INNER, right + _INNER + _COLUMN, batch + _ROW + _COLUMN)

    @classmethod
    def _of_einsum(cls, equation: str, left: Tensor, right: Tensor) -> Self | None:
        factors, arrow, letters = equation.replace(" ", "").partition("->")
        left_letters, comma, right_letters = factors.partition(",")
        if not arrow or not comma:
            return None
        others = left.dim() - len(left_letters.replace("...", ""))
        left_letters, right_letters, letters = (
            text.replace("...", _ELLIPSIS_LETTERS[:others]) for text in (left_letters, right_letters, letters)
        )
        if left.dim() != len(left_letters) or right.dim() != len(right_letters):
            return None
        return cls(left, right, left_letters, right_letters, letters)

    @property
    def may_be_scores(self) -> bool:
        """Whether rows come from one factor alone and columns from the other, as in queries times keys."""
        if len(self.letters) < 3:
            return False
        row, column = ((letter in self.left_letters, letter in self.right_letters) for letter in self.letters[-2:])
        return {row, column} == {(True, False), (False, True)}

    def as_scores(self) -> tuple[Tensor, tuple[int, ...], Tensor, tuple[int, ...]]:
        """Return queries and keys, each with the order of its dimensions that gives (..., S, Dh)."""
        *batch, row, column = list(self.letters)
        sides = [(self.left, self.left_letters), (self.right, self.right_letters)]
        if column not in self.right_letters:
            sides.reverse()
        (query, query_letters), (key, key_letters) = sides
        inner = [letter for letter in query_letters if letter in key_letters and letter not in self.letters]
        return (
            query,
            _order(query_letters, [*batch, row, *inner]),
            key,
            _order(key_letters, [*batch, column, *inner]),
        )

    def as_mixture(self, *, weights_first: bool) -> tuple[Tensor, tuple[int, ...], tuple[int, ...]]:
        """Return the values, and the orders of their and the product's dimensions that give (..., S, Dh)."""
        values, letters, weights_letters = self.right, self.right_letters, self.left_letters
        if not weights_first:
            values, letters, weights_letters = self.left, self.left_letters, self.right_letters
        *batch, row, column = list(weights_letters)
        width = [letter for letter in letters if letter not in weights_letters]
        return values, _order(letters, [*batch, column, *width]), _order(self.letters, [*batch, row, *width])


def _order(letters: str, wanted: list[str]) -> tuple[int, ...]:
    return tuple(letters.index(letter) for letter in wanted if letter in letters)
