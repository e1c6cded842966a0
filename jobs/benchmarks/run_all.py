"""Runs every benchmark and writes one page for docs/benchmarks.md, in Markdown, and all figures as JSON.

python jobs/benchmarks/run_all.py --output figures          # figures.md, figures.json

"traffic" needs root and is left out without it.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import tempfile

import common

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))  # for `cluster`, which is not installed
from cluster import namespaces

ALL = (
    "mistakes",
    "start",
    "fit",
    "feed",
    "images",
    "stream",
    "stream_scale",
    "step",
    "embedding",
    "scaling",
    "sweep",
    "seek",
    "checkpoint",
    "checkpoint_memory",
    "many_workers",
    "recovery",
    "resume",
    "traffic",
)


def main(arguments=None):
    parser = common.parser(__doc__)
    parser.add_argument("--output", default="figures", help="the files' name without its ending")
    parser.add_argument("--only", nargs="*", choices=ALL, default=ALL)
    options = parser.parse_args(arguments)
    benchmarks = pathlib.Path(__file__).parent
    found = []
    why_not = namespaces.available()
    if why_not is not None and "traffic" in options.only:
        print(f"traffic is left out: {why_not}", file=sys.stderr)
        options.only = [name for name in options.only if name != "traffic"]
    for name in options.only:
        with tempfile.TemporaryDirectory(prefix="raytf_benchmark_") as folder:
            answer = pathlib.Path(folder, "answer.json")
            command = [sys.executable, benchmarks / f"{name}.py", "--json", answer, "--repeats", str(options.repeats)]
            subprocess.run([*command, *(["--smoke"] if options.smoke else [])], check=True)
            found.append(json.loads(answer.read_text()))
    pathlib.Path(options.output + ".md").write_text("\n".join(entry["table"] for entry in found))
    pathlib.Path(options.output + ".json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
