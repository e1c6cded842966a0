"""What changes what a model computes is seen and named; what does not is not, nor in another process."""

from __future__ import annotations

import re

import numpy as np
import pytest

from raytf.identity import canonical
from tests.unit import changes_of_models as changes
from tests.unit.test_identity import run_of, texts

ALL = {**changes.SEEN, **changes.EQUAL}
# What a layer lists in its config, and how layers are connected.
REFUSED = ("wiring of a model within", "offset, the seventh digit", "an argument called as a method")


def moved(case):
    """What the first model of a case is, three lines further down in another module."""
    source, one = ALL[case][:2]
    return run_of(changes.told("\n\n\n" + source, one, "another_module", "moved.py"))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", changes.SEEN)
def test_what_changes_the_training_is_named(case):
    source, _, other, named = changes.SEEN[case]
    found = texts(moved(case), run_of(changes.told(source, other)))
    assert named in [text for text, _ in found], found
    assert not any(re.search(r"[0-9a-f]{16}|=\n|\.py", text) for text, _ in found), found
    assert any(refused for _, refused in found) == (case in REFUSED)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", changes.EQUAL)
def test_what_changes_nothing_is_not(case):
    source, _, other = changes.EQUAL[case]
    assert texts(moved(case), run_of(changes.told(source, other))) == []


def config(**values):
    return run_of(changes.told("def build(): return done(seq(D(1)))", ""), config=values)


def test_values_of_the_config_are_named_unless_what_they_changed_is():
    assert texts(config(alpha=1.0), config(alpha=50.0)) == [("config['alpha'] 50, was 1", False)]
    assert texts(config(alpha=1.0), config(alpha=1.0, beta=2)) == [("config['beta'] 2, was nothing", False)]
    one, other = ({**config(rate=r), "loss": {"k": r}} for r in (1.0, 2.0))
    assert texts(one, other) == [("loss k 2, was 1", False)]


def test_settings_of_the_workers():
    one, other = (run_of(config(), settings={"sync_every": n, "gradient_dtype": None}) for n in (1, 4))
    assert texts(one, other) == [("sync_every 4, was 1", False)]


def test_two_clocks_of_one_minute_are_two_numbers():
    """Float32 makes one of them, up to where another process starts in the next 128 seconds."""
    assert canonical.fixed_number(1795407999.9) != canonical.fixed_number(1795408000.1)
    assert canonical.fixed_number(0.1) == canonical.fixed_number(float(np.float32(0.1)))
    assert canonical.fixed_number(3e7) == 3e7 and canonical.fixed_number(-(2.0**60)) == canonical.fixed_number(
        float(np.float32(-(2.0**60)))
    )
