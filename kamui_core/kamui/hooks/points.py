"""Hook points: how a place in a model is written.

A point is a string `"<module_path>.<io>"`. The last segment is always the io, so that a module which is
itself called `output` leaves no doubt: `"encoder.layer.0.attention.output.output"` is the output of the module
`encoder.layer.0.attention.output`. The root module's points have no path: `"output"`. A selector in brackets
picks one tensor of a nested value: `"lstm.output[1][0]"`, `"decoder.output[attentions]"`.
"""

from __future__ import annotations

import re
from typing import Final, NoReturn, Self

from kamui.errors import PointError, did_you_mean

MODULE_IOS: Final = ("input", "output")
ATTENTION_IOS: Final = ("q", "k", "v", "pre_softmax", "weights", "z")
FEED_FORWARD_IOS: Final = ("mid",)
FORWARD_IOS: Final = (*MODULE_IOS, *ATTENTION_IOS, *FEED_FORWARD_IOS)
GRADIENT_PREFIX: Final = "grad_"
IOS: Final = (*FORWARD_IOS, *(GRADIENT_PREFIX + io for io in FORWARD_IOS))

_KEY = re.compile(r"\[([^\[\]]+)\]")
_NUMBER = re.compile(r"-?[0-9]{1,9}")
_POINT = re.compile(r"(?:(?P<module>.+)\.)?(?P<io>[^.\[\]]+)(?P<selector>(?:\[[^\[\]]+\])*)", re.DOTALL)


class HookPoint(str):
    """A place in a model, as a string that knows its parts.

    It compares, hashes, prints and serialises as the plain string.

    Attributes:
        module: The module path; empty for the root module.
        io: The io, without selector: `input`, `output`, `weights`, ...
        selector: The keys that lead to one tensor of a nested value, outermost first.

    Raises:
        PointError: The text is no hook point.
    """

    module: str
    io: str
    selector: tuple[int | str, ...]

    def __new__(cls, text: str) -> Self:
        """Check the text and take it apart."""
        if type(text) is cls:
            return text
        if not isinstance(text, str):
            raise PointError(f"a hook point is a string such as 'blocks.3.attn.output', not {text!r}")
        match = _POINT.fullmatch(text)
        if match is None or match["io"] not in IOS or "" in (match["module"] or "root").split("."):
            _refuse(text)
        point = super().__new__(cls, text)
        point.module, point.io = match["module"] or "", match["io"]
        keys = _KEY.findall(match["selector"])
        point.selector = tuple(int(key) if _NUMBER.fullmatch(key) else key for key in keys)
        return point

    @property
    def forward_io(self) -> str:
        """The io without the prefix of gradients: `output` at a `grad_output`."""
        return self.io.removeprefix(GRADIENT_PREFIX)

    @property
    def is_gradient(self) -> bool:
        """Whether this is a gradient point."""
        return self.io != self.forward_io

    @property
    def forward(self) -> HookPoint:
        """The point whose gradient this one is; a forward point is its own."""
        bare = HookPoint.at(self.module, self.io)
        return HookPoint.at(self.module, self.forward_io + self[len(bare) :]) if self.is_gradient else self

    @classmethod
    def at(cls, module: str, io: str) -> Self:
        """Make the point of `io` (with its selector, if any) at `module`."""
        return cls(f"{module}.{io}" if module else io)

    def __reduce__(self) -> tuple[type[Self], tuple[str]]:
        return type(self), (str(self),)


def _refuse(text: str) -> NoReturn:
    if "" in text.split(".")[:-1]:
        raise PointError(f"{text!r} is no hook point: it has an empty segment; write '<module_path>.<io>'")
    last = text.rpartition(".")[2].partition("[")[0]
    ios = ", ".join(FORWARD_IOS)
    raise PointError(
        f"{text!r} is no hook point: its last segment {last!r} is no io{did_you_mean(last, FORWARD_IOS)}; "
        f"write '<module_path>.<io>' with one of {ios} (each also with the prefix {GRADIENT_PREFIX!r})"
    )
