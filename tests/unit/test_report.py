"""A report reads what Tune wrote as JSON, and unpickles nothing of it; its page shows what users wrote as text."""

import base64
import html.parser
import json
import os
import pickle
import re
import subprocess
import sys

import numpy as np
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
    a, b, c = report.entries(os.fspath(tmp_path), "eval/loss")
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
OWN_TAGS = {"html", "head", "meta", "title", "style", "script", "body", "h1", "h2", "p", "b", "div"}
OWN_TAGS |= {"table", "thead", "tbody", "tr", "th", "td"}


def entry(name="a", value=0.5, curve=(1.0, 0.5), error="", **config):
    return report.Entry(name=name, config=config, value=value, curve=list(curve), error=error)


class Page(html.parser.HTMLParser):
    """What a browser finds: tags, attributes, text outside of scripts, rows of the table, and plotly's figures."""

    def __init__(self, trials, mode="min", folder="/runs/sweep", metric="loss"):
        super().__init__()
        self.tags, self.attributes, self.words, self.rows, self.figures = [], [], [], [], {}
        self._inside = ""
        self.feed(report.page(folder, metric, mode, trials))
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self._inside = tag
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside in ("td", "th"):
            self.rows[-1][-1] += data
        elif self._inside == "script":
            if (found := re.search(r'Plotly\.newPlot\(\s*"([^"]*)",\s*(?=\[)', data)) and len(data) < 10**6:
                self.figures[found[1]] = json.JSONDecoder().raw_decode(data, found.end())[0]
        elif self._inside != "style":
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def numbers(packed):
    """An array as plotly writes it."""
    return np.frombuffer(base64.b64decode(packed["bdata"]), packed["dtype"]).tolist()


def sweep_of_all_kinds():
    return [
        entry("fine", 0.5, learning_rate=1e-3, batch_size=64, act="relu", wide=True, layers=[8, 8]),
        entry("best", 0.25, learning_rate=1e-1, batch_size=32, act="tanh", wide=False, layers=None),
        entry("single", 0.7, (0.7,), learning_rate=1e-2, batch_size=256, act="relu", wide=True, layers=[4]),
        entry("diverged", float("nan"), (1.0, float("nan")), learning_rate=5.0, batch_size=64, act="relu"),
        entry("infinite", float("inf"), (float("inf"),), learning_rate=float("nan"), batch_size="64", act=3),
        entry("failed", None, (), "ValueError: units must be odd", learning_rate=1e-3, batch_size=64),
    ]


def test_a_page_shows_trials_of_all_kinds():
    page = Page(sweep_of_all_kinds())
    assert page.text.startswith(
        "Sweep Sweep /runs/sweep: 6 trials Best loss: 0.25 with learning_rate = 0.1, batch_size"
    )
    head, *rows = page.rows
    assert head == ["trial", "learning_rate", "batch_size", "act", "wide", "layers", "loss", "reports", ""]
    assert [row[0] for row in rows] == ["best", "fine", "single", "diverged", "infinite", "failed"]
    assert rows[1] == ["fine", "0.001", "64", "relu", "True", "[8, 8]", "0.5", "2", ""]
    assert rows[5] == ["failed", "0.001", "64", "", "", "", "", "0", "ValueError: units must be odd"]
    assert ("class", "dataframe trials best-first") in page.attributes

    assert list(page.figures) == ["batch-size-and-learning-rate", "learning-curves", "parallel-coordinates"]
    (points,) = page.figures["batch-size-and-learning-rate"]
    assert numbers(points["x"]) == [32, 64, 256] and numbers(points["y"]) == [1e-1, 1e-3, 1e-2]
    assert numbers(points["marker"]["color"]) == [0.25, 0.5, 0.7]
    curves = {curve["name"]: curve for curve in page.figures["learning-curves"]}
    assert list(curves) == ["diverged", "single", "fine", "best"], "the best is drawn last, over the others"
    assert curves["diverged"]["y"] == [1.0, None] and curves["diverged"]["line"]["dash"] == "dot"
    assert curves["best"]["line"]["width"] > curves["fine"]["line"]["width"]
    (parallel,) = page.figures["parallel-coordinates"]
    axes = {axis["label"]: axis for axis in parallel["dimensions"]}
    assert list(axes) == ["learning_rate", "batch_size", "act", "wide", "layers", "loss"]
    assert axes["learning_rate"]["values"] == pytest.approx([-1, -3, -2])
    assert axes["learning_rate"]["ticktext"] == ["0.001", "0.01", "0.1"]
    assert axes["loss"]["values"] == [0.25, 0.5, 0.7]
    assert axes["act"]["ticktext"] == ["relu", "tanh"] and axes["act"]["values"] == [1, 0, 0]
    assert axes["layers"]["ticktext"] == ["", "[4]", "[8, 8]"]


def test_a_page_loads_nothing():
    page = Page(sweep_of_all_kinds())
    assert page.tags.count("script") == 1 + 3
    assert not [value for name, value in page.attributes if name in ("src", "href", "data", "srcset")]


def test_what_users_named_is_shown_and_not_run():
    config = {"act": EVIL, EVIL: EVIL, "learning_rate": 0.1, "batch_size": 8}
    trials = [entry(EVIL, value, error=EVIL, **config | {"act": act}) for value, act in ((0.5, EVIL), (0.7, "<b>relu"))]
    page = Page(trials, folder=EVIL, metric=EVIL)
    assert set(page.tags) <= OWN_TAGS and not [name for name, _ in page.attributes if name.startswith("on")]
    assert page.tags.count("script") == 1 + 3 and page.tags.count("b") == 1
    assert page.text.count(EVIL) >= 3
    assert page.rows[1].count(EVIL) == 4 and page.rows[0].count(EVIL) == 2
    # plotly takes <a>, <b>, <i> and others for what they say in all texts but ticks
    texts = re.sub(r'"ticktext": \[.*?\]', "", json.dumps(page.figures))
    assert "&lt;/script&gt;" in texts and "&lt;b&gt;relu" in texts
    assert not re.search("<(script|/script|img|b>relu)", texts)


@pytest.mark.parametrize(
    ("trials", "pictures", "rows"),
    [
        ([], [], 0),
        ([entry(value=None, curve=(), error="no"), entry(value=float("nan"), curve=(float("nan"),))], [], 2),
        ([entry(units=3)], ["learning-curves"], 1),
        ([entry(batch_size=32, learning_rate=0.1)], ["batch-size-and-learning-rate", "learning-curves"], 1),
    ],
)
def test_a_page_of_few_trials_or_none(trials, pictures, rows):
    page = Page(trials)
    assert list(page.figures) == pictures and len(page.rows) == 1 + rows
    assert f"{rows} trials" in page.text and ("Best" in page.text) == bool(pictures)
    assert page.tags.count("script") == (1 + len(pictures) if pictures else 0), "plotly.js is there if it is needed"


def test_a_page_of_many_trials_shows_them_all():
    trials = [entry(f"t{i}", i / 7, rate=0.1 + i, text="x" * 200) for i in range(300)]
    page = Page(trials, mode="max")
    assert len(page.rows) == 1 + 300 and page.rows[1][0] == "t299" and page.rows[1][2] == "x" * 200
    (parallel,) = page.figures["parallel-coordinates"]
    assert parallel["line"]["colorscale"] != Page(trials[:3]).figures["parallel-coordinates"][0]["line"]["colorscale"]
    assert len(parallel["dimensions"][0]["ticktext"]) == 5


def test_the_command_needs_neither_ray_nor_matplotlib(tmp_path):
    (tmp_path / "sweep.json").write_text('{"metric": "loss", "mode": "min"}')
    (tmp_path / "experiment_state-1.json").write_text('{"trial_data": []}')
    code = f"""
import sys
from raytf.tune import report
assert not {{"pandas", "plotly", "ray", "tensorflow"}} & set(sys.modules)
report.write({str(tmp_path)!r}, {str(tmp_path / "page.html")!r})
assert not {{"matplotlib", "ray", "tensorflow"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert "0 trials" in (tmp_path / "page.html").read_text()
