"""A report reads what Tune wrote as JSON, and unpickles nothing of it; its page shows what users wrote as text."""

import html.parser
import json
import os
import pickle
import subprocess
import sys

import pytest
from ray.tune import Checkpoint

from raytf.errors import ConfigError
from raytf.tune import report
from raytf.tune.trial import Trial
from tests.unit.test_checkpoint import Bomb


def test_trials_are_read_and_what_is_pickled_in_them_is_not(tmp_path):
    exploded = tmp_path / "exploded"
    bomb = pickle.dumps(Bomb(str(exploded)))
    packed = {"_type": "CLOUDPICKLE_FALLBACK", "value": bomb.hex()}
    trials = [
        {"trial_id": "a", "config": {"rate": 0.1, "point": packed}, "relative_logdir": "Trial_a", "storage": packed},
        {"trial_id": "b", "config": {"rate": 0.2}, "relative_logdir": "../Trial_b", "placement": bomb.hex()},
        {"trial_id": "c", "config": {}, "relative_logdir": None},
    ]
    for name, rows in {"Trial_a": [0.5, None, 0.25], "Trial_b": []}.items():
        (tmp_path / name).mkdir()
        lines = [json.dumps({"eval": {"loss": row}, "loss": 1}) for row in rows]
        (tmp_path / name / "result.json").write_text("".join(line + "\n" for line in lines))
        for file in ("params.pkl", "error.pkl"):
            (tmp_path / name / file).write_bytes(bomb)
    failure = "Failure # {} (occurred at 2026-11-22_17-23-55)\n{}\nmore\n"
    (tmp_path / "Trial_b" / "error.txt").write_text(failure.format(1, "first") + failure.format(2, "units must be odd"))
    state = {"trial_data": [[json.dumps(trial), json.dumps({"x": packed})] for trial in trials], "runner_data": packed}
    (tmp_path / "experiment_state-2026-11-22_17-23-54.json").write_text(json.dumps(state))
    (tmp_path / "experiment_state-2026-11-21_17-23-54.json").write_text("{}")
    (tmp_path / "tuner.pkl").write_bytes(bomb)
    a, b, c = report.read_entries(os.fspath(tmp_path), "eval/loss")
    assert (a.name, a.config, a.value, a.curve, a.error) == ("a", {"rate": 0.1, "point": "..."}, 0.25, [0.5, 0.25], "")
    assert (b.value, b.curve, b.error) == (None, [], "units must be odd")
    assert (c.value, c.error) == (None, "")
    assert not exploded.exists()


def test_a_pickle_in_a_trials_checkpoint_is_refused(tmp_path):
    """Tune unpickles this file where it finds it."""
    (tmp_path / "_dict_checkpoint.pkl").write_bytes(pickle.dumps(Bomb(str(tmp_path / "exploded"))))
    with pytest.raises(ConfigError, match="holds no pickle"):
        Trial.restore(Trial.__new__(Trial), Checkpoint.from_directory(str(tmp_path)))
    assert not (tmp_path / "exploded").exists()


EVIL = "</script><script>document.title = 'owned'</script><img src=x onerror=alert(1)>"
OWN_TAGS = {
    "html",
    "head",
    "meta",
    "title",
    "style",
    "body",
    "h1",
    "h2",
    "p",
    "b",
    "div",
    "dl",
    "dt",
    "dd",
    "i",
    "span",
}
OWN_TAGS |= {"table", "thead", "tbody", "tr", "th", "td", "svg", "g", "path", "circle", "line", "text"}


def entry(name="a", value=0.5, curve=(1.0, 0.5), error="", **config):
    return report.Entry(
        name=name, config=config, value=value, curve=list(curve), error=error, end="failed" * bool(error)
    )


class Page(html.parser.HTMLParser):
    """What a browser finds: tags, attributes, text, rows of the table, and what each chart is about."""

    def __init__(self, trials, mode="min", folder="/runs/sweep", metric="loss"):
        super().__init__()
        self.tags, self.attributes, self.words, self.rows, self.charts = [], [], [], [], []
        self._inside = ""
        self.html = report.page(folder, metric, mode, trials)
        self.feed(self.html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self._inside = tag
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "svg":
            self.charts.append(dict(attrs)["aria-label"])

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside in ("td", "th"):
            self.rows[-1][-1] += data
        elif self._inside != "style":
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def sweep_of_all_kinds():
    return [
        entry("fine", 0.5, learning_rate=1e-3, batch_size=64, act="relu", wide=True, layers=[8, 8]),
        entry("best", 0.25, learning_rate=1e-1, batch_size=32, act="tanh", wide=False, layers=None),
        entry("single", 0.7, (0.7,), learning_rate=1e-2, batch_size=256, act="relu", wide=True, layers=[4]),
        entry("diverged", float("nan"), (1.0, float("nan")), learning_rate=5.0, batch_size=64, act="relu"),
        entry("infinite", float("inf"), (float("inf"),), learning_rate=float("nan"), batch_size="64", act=3),
        entry("failed", None, (), "ValueError: units must be odd", learning_rate=1e-3, batch_size=64),
    ]


PICTURES = ["loss by report", "learning rate by batch size (global)", "parallel coordinates"]


def test_a_page_shows_trials_of_all_kinds():
    page = Page(sweep_of_all_kinds())
    assert "best loss (min) 0.25 trials 6 failed 1" in page.text
    assert "Best: best with learning_rate = 0.1, batch_size = 32" in page.text
    head, *rows = page.rows
    assert head[:7] == ["trial", "learning_rate", "batch_size", "act", "wide", "layers", "loss"]
    assert head[7:] == ["reports", "time", "throughput", "end"]
    assert [row[0] for row in rows] == ["best", "fine", "single", "diverged", "infinite", "failed"]
    assert rows[1][:8] == ["fine", "0.001", "64", "relu", "True", "[8, 8]", "0.5", "2"]
    assert rows[5][6:8] == ["", "0"] and rows[5][-1] == "failed: ValueError: units must be odd"
    assert page.html.count('class="best"') == 1 and page.charts == PICTURES
    legend = page.html.partition('class="legend"')[2].partition("</p>")[0]
    assert [legend.index(f">{name}: ") for name in ("best", "fine", "single")] == sorted(
        legend.index(f">{name}: ") for name in ("best", "fine", "single")
    ), "the best comes first"
    for text in ("relu", "tanh", "[8, 8]", "0.001", "0.01", "0.1", "32", "64", "256"):
        assert f">{text}" in page.html, "ticks of the axes"


def test_a_page_is_small_and_loads_nothing():
    """A page held a copy of plotly.js, 4.8 MB, whatever it showed."""
    page = Page(sweep_of_all_kinds())
    assert len(page.html) < 30_000 and "script" not in page.tags
    assert not [value for name, value in page.attributes if name in ("src", "href", "data", "srcset")]


def test_what_users_named_is_shown_and_not_run():
    config = {"act": EVIL, EVIL: EVIL, "learning_rate": 0.1, "batch_size": 8}
    trials = [entry(EVIL, value, error=EVIL, **config | {"act": act}) for value, act in ((0.5, EVIL), (0.7, "<b>relu"))]
    page = Page(trials, folder=EVIL, metric=EVIL)
    assert set(page.tags) <= OWN_TAGS and not [name for name, _ in page.attributes if name.startswith("on")]
    assert page.tags.count("script") == page.tags.count("img") == 0 and page.tags.count("b") == 1
    assert page.text.count(EVIL) >= 3
    assert page.rows[1][0] == EVIL and page.rows[1][-1] == f"failed: {EVIL}" and page.rows[0].count(EVIL) == 2


@pytest.mark.parametrize(
    ("trials", "pictures", "rows"),
    [
        ([], [], 0),
        ([entry(value=None, curve=(), error="no"), entry(value=float("nan"), curve=(float("nan"),))], [], 2),
        ([entry(units=3)], PICTURES[:1], 1),
        ([entry(batch_size=32, learning_rate=0.1)], PICTURES[:2], 1),
    ],
)
def test_a_page_of_few_trials_or_none(trials, pictures, rows):
    page = Page(trials)
    assert page.charts == pictures and len(page.rows) == 1 + rows
    assert f"trials {rows}" in page.text and ("Best" in page.text) == bool(pictures)


def test_a_page_of_many_trials_shows_them_all():
    trials = [entry(f"t{i}", i / 7, rate=0.1 + i, text="x" * 200) for i in range(300)]
    page = Page(trials, mode="max")
    assert len(page.rows) == 1 + 300 and page.rows[1][0] == "t299" and page.rows[1][2] == "x" * 200
    assert page.html.count("<path") == 2 * 300 and page.html.count("<title>") >= 2 * 300, "each tells its name"


def test_time_throughput_and_why_a_trial_ended(tmp_path):
    rows = [
        {"loss": 1.0, "epoch": e, "steps_per_epoch": 50, "time_total_s": 10.0 * e + 5, "done": False} for e in (1, 2)
    ]
    trials = {
        "ends": ("TERMINATED", rows),
        "stopped": ("TERMINATED", [rows[0] | {"done": True}]),
        "fails": ("ERROR", []),
    }
    packed = []
    for name, (status, reports) in trials.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text("".join(json.dumps(row) + "\n" for row in reports))
        config = {"batch_size": 100} if name == "ends" else {}
        packed.append({"trial_id": name, "config": config, "relative_logdir": name, "status": status})
    state = {"trial_data": [[json.dumps(trial), "{}"] for trial in packed]}
    (tmp_path / "experiment_state-1.json").write_text(json.dumps(state))
    ends, stopped, fails = report.read_entries(os.fspath(tmp_path), "loss")
    assert (ends.end, ends.seconds, ends.throughput) == ("came to its end", 25.0, "500 examples/s")
    assert (stopped.end, stopped.seconds, stopped.throughput) == ("stopped by the scheduler", 15.0, "3.33 steps/s")
    assert (fails.end, fails.seconds, fails.throughput) == ("failed", None, "")


def test_the_command_needs_neither_ray_nor_matplotlib(tmp_path):
    (tmp_path / "sweep.json").write_text('{"metric": "loss", "mode": "min"}')
    (tmp_path / "experiment_state-1.json").write_text('{"trial_data": []}')
    code = f"""
import sys
from raytf.tune import report
assert not {{"pandas", "plotly", "ray", "tensorflow"}} & set(sys.modules)
report.write_report({str(tmp_path)!r}, {str(tmp_path / "page.html")!r})
assert not {{"matplotlib", "ray", "tensorflow"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert "<dt>trials</dt><dd>0</dd>" in (tmp_path / "page.html").read_text()
