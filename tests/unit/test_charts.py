"""Charts show what they are given, on axes that fit it."""

from __future__ import annotations

import html.parser
import math
import re

from hypothesis import given
from hypothesis import strategies as st

from raytf.tune import charts

values = st.floats(allow_nan=True, allow_infinity=True, width=64)
curves = st.lists(st.tuples(st.integers(0, 10**6), values), max_size=8)


class Checked(html.parser.HTMLParser):
    """Fails unless all elements are closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def places(svg: str) -> list[float]:
    return [
        float(number)
        for path in re.findall(r' (?:d|cx|cy|x|y|x1|y1)="([^"]*)"', svg)
        for number in re.findall(r"[-\d.e]+", path)
    ]


@given(st.lists(curves, max_size=4), st.booleans())
def test_any_values_are_drawn_within_the_picture(all_curves, zero):
    series = [charts.Series(name=f"<{i}>", x=[x for x, _ in c], y=[y for _, y in c]) for i, c in enumerate(all_curves)]
    small = [y for c in all_curves for _, y in c if charts.is_finite(y)]
    if small and max(map(abs, small)) > 1e300:
        return  # the difference of two is no number
    made = charts.line_chart(series, "x", "<y>", zero=zero)
    assert (made is None) == (not small)
    if made is not None:
        Checked(made)
        assert "<y>" not in made and all(math.isfinite(place) and -1 <= place <= 461 for place in places(made))


def test_values_over_decades_have_a_logarithmic_axis():
    made = charts.line_chart([charts.Series(name="a", x=[1, 2, 3], y=[100.0, 1.0, 0.01])], "epoch", "loss")
    (path,) = re.findall(r'<path d="([^"]*)"', made)
    first, second, third = (float(point.split()[1]) for point in path[1:].split("L"))
    assert abs((second - first) - (third - second)) < 0.2, "a factor of 100 is as long everywhere"
    made = charts.line_chart([charts.Series(name="a", x=[1, 2, 3], y=[3.0, 2.0, 1.0])], "epoch", "loss")
    (path,) = re.findall(r'<path d="([^"]*)"', made)
    first, second, third = (float(point.split()[1]) for point in path[1:].split("L"))
    assert abs((second - first) - (third - second)) < 0.2


def test_a_zero_leaves_a_logarithmic_axis_as_it_is():
    """A loss that reaches 0 has a tick below all others, in the picture."""
    made = charts.line_chart([charts.Series(name="a", x=[1, 2, 3, 4], y=[100.0, 1.0, 0.01, 0.0])], "epoch", "loss")
    (path,) = re.findall(r'<path d="([^"]*)"', made)
    heights = [float(point.split()[1]) for point in path[1:].split("L")]
    first, second, third, zero = heights
    assert abs((second - first) - (third - second)) < 0.2 and zero > third + 5
    assert made.count('class="t">0</text>') == 1
    made = charts.line_chart([charts.Series(name="a", x=[1, 2], y=[3.0, 0.0])], "epoch", "loss")
    assert 'class="t">1</text>' in made, "linear, as nothing spans decades"


def test_curve_shows_its_name_and_so_does_its_legend():
    made = charts.line_chart([charts.Series(name=f"trial {i}", x=[1, 2], y=[i, i]) for i in range(3)], "report", "loss")
    for i in range(3):
        assert f"<title>trial {i}\nlast: {i}</title>" in made and f"</i>trial {i}</span>" in made


def test_a_gap_is_no_line():
    made = charts.line_chart([charts.Series(name="a", x=[1, 2, 3, 4], y=[1.0, math.nan, 2.0, 3.0])], "x", "y")
    assert made.count("<circle") == 1 and made.count("<path") == 1


@given(st.floats(-1e12, 1e12).filter(lambda v: v == 0 or abs(v) > 1e-12))
def test_a_number_in_few_letters_is_the_number(value):
    text = charts.format_number(value)
    size = {"k": 1e3, "M": 1e6, "G": 1e9}.get(text[-1], 1.0)
    found = float(text.rstrip("kMG")) * size
    assert abs(found - value) <= 6e-3 * abs(value) and len(text) <= 10
