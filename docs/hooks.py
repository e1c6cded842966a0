"""Links of pages to files of the repository outside `docs/`: the site gets a copy of each, and a dead one fails."""

from __future__ import annotations

import os
import pathlib
import re

from mkdocs.structure.files import File

_ROOT = pathlib.Path(__file__).parents[1]
_LINK = re.compile(r"\]\((?P<target>(?:\.\./)+[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")


def _outside(page: str, target: str) -> str | None:
    """Path from the repository's root of what a link leads to, or None where that is a page of the site."""
    path = os.path.normpath(os.path.join("docs", os.path.dirname(page), target))
    return None if path.split(os.sep)[0] in ("docs", "..") else path


def on_files(files, config):
    wanted = set()
    for file in files.documentation_pages():
        for link in _LINK.finditer(file.content_string):
            if path := _outside(file.src_uri, link["target"]):
                wanted.add(path)
    for path in sorted(wanted):
        if (_ROOT / path).is_file():
            # as text, which browsers show instead of running or saving it
            files.append(File.generated(config, f"repository/{path}.txt", abs_src_path=str(_ROOT / path)))
    return files


def on_page_markdown(markdown, page, config, files):
    def moved(link):
        path = _outside(page.file.src_uri, link["target"])
        if path is None:
            return link[0]
        up = "../" * page.file.src_uri.count("/")
        return f"]({up}repository/{path}.txt)"

    return _LINK.sub(moved, markdown)
