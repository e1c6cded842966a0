"""All scenarios of the parity tests: what the modules `*_scenarios` of this folder have put together."""

from __future__ import annotations

import importlib
import pathlib

from tests.processes.scenarios import SCENARIOS

# Those of a kind of their own.
_OTHERS = {"all_scenarios", "resume_scenarios"}

for _path in sorted(pathlib.Path(__file__).parent.glob("*_scenarios.py")):
    if _path.stem not in _OTHERS:
        importlib.import_module(f"{__package__}.{_path.stem}")

__all__ = ["SCENARIOS"]
