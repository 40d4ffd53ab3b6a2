"""Point naming and hook lifecycle: the minimal core."""

from kamui.hooks.architecture import Architecture, Target
from kamui.hooks.call import Call
from kamui.hooks.context import suspended
from kamui.hooks.description import PointDescription
from kamui.hooks.heads import head_indices
from kamui.hooks.inspection import InstalledHook, inspect
from kamui.hooks.manager import HookManager
from kamui.hooks.points import HookPoint
from kamui.hooks.positions import Positions, take_positions, token_mask
from kamui.hooks.registry import HookRegistry
from kamui.hooks.report import Report
from kamui.hooks.store import Captures
from kamui.interventions.functions import EditFunction

__all__ = [
    "Architecture",
    "Call",
    "Captures",
    "EditFunction",
    "HookManager",
    "HookPoint",
    "HookRegistry",
    "InstalledHook",
    "PointDescription",
    "Positions",
    "Report",
    "Target",
    "head_indices",
    "inspect",
    "suspended",
    "take_positions",
    "token_mask",
]
