"""Vectors on disk: safetensors files, which hold numbers and cannot run code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from kamui.errors import OptionError, PointError
from kamui.hooks import HookPoint

KEY: Final = "vector"


def read_vectors(path: Path, label: str, *, by_point: bool) -> Tensor | Mapping[str, Tensor]:
    """Return the tensor called `"vector"` or the only one of a file, else all of them by their points.

    Args:
        path: The file.
        label: The intervention's name, for messages.
        by_point: Whether the name of the only tensor, if it is a point, says where it belongs.

    Raises:
        OptionError: There is no such file, or it does not hold vectors.
    """
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        reason = "it is no safetensors file that can be read" if path.is_file() else "there is no such file"
        raise OptionError(
            f"intervention {label!r} cannot read its vector from {str(path)!r}: {reason}; write one with its method "
            f"'save', or with safetensors.torch.save_file({{{KEY!r}: vector}}, path)"
        ) from error
    if KEY in tensors:
        return tensors[KEY]
    are_points = bool(tensors) and all(map(_is_point, tensors))
    if len(tensors) == 1 and not (are_points and by_point):
        return next(iter(tensors.values()))
    if not are_points:
        raise OptionError(
            f"intervention {label!r} cannot tell its vector in {str(path)!r}, which holds "
            f"{', '.join(map(repr, tensors)) or 'nothing'}; expected one tensor, one called {KEY!r}, or tensors "
            f"named by their points"
        )
    return tensors


def write_vectors(path: Path, vectors: Tensor | Mapping[str, Tensor]) -> None:
    """Write one vector, or several by their points."""
    named = {KEY: vectors} if isinstance(vectors, Tensor) else vectors
    # Copies, because safetensors refuses tensors that share memory.
    save_file({str(name): vector.detach().cpu().clone() for name, vector in named.items()}, path)


def _is_point(name: str) -> bool:
    try:
        HookPoint(name)
    except PointError:
        return False
    return True
