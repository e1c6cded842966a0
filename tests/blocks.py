"""Code blocks of the pages: what each one is, and whether and how it runs.

In the Markdown, above a block:

    <!-- name: fit -->             lets a test find the block
    <!-- not run: needs GPUs -->   the block cannot run here, and why

A block of Python runs as a script, one of `bash` line by line. `title="train.py"` after the language makes it a file
of that name instead, which later blocks of the page use. Output (`text`) is shown. A block of another language is such
a file, or has a reason. A fence is three backticks.

What `docs/api.py` writes has no blocks here: `tests/jobs/test_docstrings.py` runs the examples of docstrings.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
RUN = ("python", "bash")
# Never run by themselves: output, and languages of configuration.
OUTPUT, SHOWN = "text", ("text", "json", "yaml", "toml", "html")
_FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
# Python, or a command, in a block that is only shown.
_CODE = re.compile(r"^(import \w|from \w+ import |def \w|(\$ )?(raytf|ray|python|pip|make) [\w-])", re.MULTILINE)
_GENERATED = re.compile(r"<!-- python docs/api\.py writes .*?<!-- to here -->", re.DOTALL)
_MARK = re.compile(r"<!-- (?P<key>name|not run): (?P<value>.+?) -->", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Block:
    """One code block of a page.

    Args:
        page: path of the page from the root of the repository.
        line: of the page in which the block begins, from 1.
        language: first word after the fence.
        title: name of the file that the block is, or "".
        text: without the fence.
        name: of the block, or "".
        not_run: why it does not run, or "".
    """

    page: str
    line: int
    language: str
    title: str
    text: str
    name: str = ""
    not_run: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def runs(self) -> bool:
        """Whether it is executed (a file is not, but is used by others)."""
        return self.language in RUN and not self.title and not self.not_run

    @property
    def hides_code(self) -> bool:
        """Whether it is only shown, and contains Python or a command."""
        return self.language == OUTPUT and _CODE.search(self.text) is not None


def pages() -> list[str]:
    """The pages, by their paths from the root."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "cluster/README.md", *(ROOT / "docs").rglob("*.md")]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def blocks_of(page: str) -> list[Block]:
    """The code blocks of a page, in order."""
    text = _GENERATED.sub(lambda part: "\n" * part.group().count("\n"), (ROOT / page).read_text())
    found, end = [], 0
    for fence in _FENCE.finditer(text):
        above = text[end : fence.start()].rstrip().splitlines()
        marks: dict[str, str] = {}
        while above and (mark := _MARK.fullmatch(above[-1].strip())):
            marks[mark["key"]] = mark["value"]
            above.pop()
        language, _, rest = fence["info"].strip().partition(" ")
        title = re.search(r'title="([^"]+)"', rest)
        body = re.sub(rf"^{fence['indent']}", "", fence["text"], flags=re.MULTILINE)
        line = text.count("\n", 0, fence.start()) + 1
        found.append(
            Block(
                page,
                line,
                language,
                title[1] if title else "",
                body,
                marks.get("name", ""),
                marks.get("not run", ""),
            )
        )
        end = fence.end()
    return found


def prose(page: str) -> str:
    """A page without blocks and comments, line for line."""
    text = (ROOT / page).read_text()
    for pattern in (_FENCE, _COMMENT):
        text = pattern.sub(lambda hit: "\n" * hit.group().count("\n"), text)
    return text


def unread(page: str) -> list[str]:
    """Fences of a page that begin or end no block, as "line: text": `~~~`, four backticks, one that is open."""
    lines = enumerate(prose(page).splitlines(), 1)
    return [f"{page}:{number}: {line}" for number, line in lines if re.match(r"\s*(`{3}|~{3})", line)]


def named(page: str, name: str) -> Block:
    """The block of a page that has a name.

    Raises:
        LookupError: none has, or several have.
    """
    found = [block for block in blocks_of(page) if block.name == name]
    if len(found) != 1:
        raise LookupError(f"{len(found)} blocks of {page} have the name {name!r}")
    return found[0]


def commands(block: Block) -> list[str]:
    """The commands of a block of `bash`: lines that end with a backslash are joined, comments left out."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [line for line in (re.sub(r"(^|\s)#.*", "", line).strip() for line in lines) if line]
