"""Hook points: how a place in a model is written.

A point is a string `"<module_path>.<io>"`. The last segment is always the io, so that a module which is
itself called `output` leaves no doubt: `"encoder.layer.0.attention.output.output"` is the output of the module
`encoder.layer.0.attention.output`. The root module's points have no path: `"output"`. A selector in brackets
picks one tensor of a nested value: `"lstm.output[1][0]"`, `"decoder.output[attentions]"`.
"""

from __future__ import annotations

import re
from typing import Final, NoReturn, Self

from kamui.errors import PointError

MODULE_IOS: Final = ("input", "output")
ATTENTION_IOS: Final = ("q", "k", "v", "pre_softmax", "weights", "z")
FEED_FORWARD_IOS: Final = ("mid",)
FORWARD_IOS: Final = (*MODULE_IOS, *ATTENTION_IOS, *FEED_FORWARD_IOS)
GRADIENT_PREFIX: Final = "grad_"
IOS: Final = (*FORWARD_IOS, *(GRADIENT_PREFIX + io for io in FORWARD_IOS))

_SELECTOR = re.compile(r"\[([^\[\]]+)\]")
_POINT = re.compile(r"(?:(?P<module>.+)\.)?(?P<io>[^.\[\]]+)(?P<selector>(?:\[[^\[\]]+\])*)", re.DOTALL)


class HookPoint(str):
    """A place in a model, as a string that knows its parts.

    It compares, hashes, prints and serialises as the plain string.

    Raises:
        PointError: The text is no hook point.
    """

    __slots__ = ()

    def __new__(cls, text: str) -> Self:
        """Check the text and make the point."""
        if isinstance(text, HookPoint):
            return super().__new__(cls, text)
        if not isinstance(text, str):
            raise PointError(f"a hook point is a string such as 'blocks.3.attn.output', not {text!r}")
        match = _POINT.fullmatch(text)
        if match is None or match["io"] not in IOS or any(not part for part in (match["module"] or "x").split(".")):
            _refuse(text)
        return super().__new__(cls, text)

    @property
    def module(self) -> str:
        """The module path; empty for the root module."""
        return self._split()[0]

    @property
    def io(self) -> str:
        """The io, without selector: `input`, `output`, `weights`, ..."""
        return self._split()[1].partition("[")[0]

    @property
    def selector(self) -> tuple[int | str, ...]:
        """The keys that lead to one tensor of a nested value, outermost first."""
        keys = _SELECTOR.findall(self._split()[1])
        return tuple(int(key) if key.lstrip("-").isdecimal() else key for key in keys)

    @classmethod
    def join(cls, module: str, io: str) -> Self:
        """Make the point of `io` (with its selector, if any) at `module`."""
        return cls(f"{module}.{io}" if module else io)

    def __reduce__(self) -> tuple[type[Self], tuple[str]]:
        return type(self), (str(self),)

    def __repr__(self) -> str:
        return str.__repr__(self)

    def __str__(self) -> str:
        return str.__str__(self)

    def _split(self) -> tuple[str, str]:
        head, bracket, tail = self.partition("[")
        module, _, io = head.rpartition(".")
        return module, io + bracket + tail


def _refuse(text: str) -> NoReturn:
    last = text.rpartition(".")[2].partition("[")[0]
    ios = ", ".join(FORWARD_IOS)
    raise PointError(
        f"{text!r} is no hook point: its last segment {last!r} is no io; "
        f"write '<module_path>.<io>' with one of {ios} (each also with the prefix {GRADIENT_PREFIX!r})"
    )
