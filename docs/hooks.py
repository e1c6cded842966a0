"""What the site needs in addition to the pages: the files of the repository that they link to, and the API.

A link that leaves `docs/` leads to a copy of that file; a dead one fails the build. What `api.py` writes for GitHub
becomes a directive of mkdocstrings.
"""

from __future__ import annotations

import os
import pathlib
import re

from generated import API, directive
from mkdocs.structure.files import File

_ROOT = pathlib.Path(__file__).parents[1]
_LINK = re.compile(r"\]\((?P<target>(?:\.\./)+[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")


def _outside(page: str, target: str) -> str | None:
    """Path from the repository's root of what a link leads to, or None where that is a page of the site."""
    path = os.path.normpath(os.path.join("docs", os.path.dirname(page), target))
    return None if path.split(os.sep)[0] in ("docs", "..") else path


def _copy(path: str) -> str:
    """Place of a file's copy: pictures as they are, all else as text, which browsers show instead of saving it."""
    return f"repository/{path}" if path.endswith((".svg", ".png")) else f"repository/{path}.txt"


def on_files(files, config):
    wanted = set()
    for file in files.documentation_pages():
        for link in _LINK.finditer(file.content_string):
            if path := _outside(file.src_uri, link["target"]):
                wanted.add(path)
    for path in sorted(wanted):
        if (_ROOT / path).is_file():
            files.append(File.generated(config, _copy(path), abs_src_path=str(_ROOT / path)))
    return files


def on_page_markdown(markdown, page, config, files):
    def moved(link):
        path = _outside(page.file.src_uri, link["target"])
        if path is None:
            return link[0]
        up = "../" * page.file.src_uri.count("/")
        return f"]({up}{_copy(path)})"

    return _LINK.sub(moved, API.sub(directive, markdown))
