"""Which trainings of `resume_scenarios.py` are stopped and resumed, and with how many processes."""

from __future__ import annotations

from tests.processes.groups import processes
from tests.processes.resume_scenarios import CASES, CHAIN, STOPPED

ALIKE = [name for name, case in CASES.items() if case.alike]
# Which cases resume where they were stopped. Three workers take their time on two cores.
PLACES = {
    "1": [name for name in CASES if name != "local steps"],
    "2": [name for name in CASES if name != "local steps"],
    "3": ["plain", "accumulation", "gan"],
    "mirrored": ["dropout", "last step", "by time"],
    "local": ["local steps"],
}
# With raytf's ring unless it is "ring", which is TensorFlow's.
OPTIONS = {"3": {"communication": "ring"}, "local": {"place": "2", "world": 2, "config": {"sync_every": 4}}}
OTHERS = ["plain:reordered", "plain:scaled", "plain:remeasured"]


def alone_of(name: str) -> list[str]:
    """The stages of a case for which no other number of workers is needed."""
    return ["quiet", *(["stopped"] if name in STOPPED else []), "resumed"]


def folder_of(folder, stage: str, place: str):
    """Where the processes of a place leave the results of a stage; those of `alone_of` run together."""
    return folder / f"{stage if stage.startswith('chain') else 'alone'}_{place}"


def stages(folder, ids) -> list[list[dict]]:
    """Returns what runs at once: all alone, and then each link of the chain after the one before; all for any test."""

    def group(place, stage, scenarios):
        path = folder_of(folder, stage, place)
        path.mkdir()
        settings = {"folder": str(path), "dtype": "float64", "place": place, "world": processes(place)}
        settings |= {"communication": "auto", "module": "tests.processes.resume_scenarios", "scenarios": scenarios}
        return settings | OPTIONS.get(place, {})

    alone = {
        place: [f"{name}:{stage}" for name in names for stage in alone_of(name)] for place, names in PLACES.items()
    }
    alone["2"] += OTHERS
    links = [(CHAIN[i][0], f"chain{i}") for i in range(1, len(CHAIN))]
    return [
        [group(place, "alone", scenarios) for place, scenarios in alone.items()],
        *([group(place, stage, [f"{name}:{stage}" for name in ALIKE])] for place, stage in links),
    ]
