"""The plugin contract: what an intervention is, how it is checked, and how it is found by its name."""

from __future__ import annotations

from kamui.discovery import Offer
from kamui.interventions.catalogue import Catalogue
from kamui.interventions.contract import Callback, Contract, contract_of
from kamui.interventions.functions import FunctionIntervention
from kamui.interventions.hookspecs import Hookspecs, hookimpl, hookspec
from kamui.interventions.intervention import Intervention
from kamui.interventions.options import Option, build, describe_options, options_of

__all__ = [
    "Callback",
    "Catalogue",
    "Contract",
    "FunctionIntervention",
    "Hookspecs",
    "Intervention",
    "Offer",
    "Option",
    "build",
    "contract_of",
    "describe_options",
    "hookimpl",
    "hookspec",
    "options_of",
]
