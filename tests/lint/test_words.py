"""Docstrings, comments, names and pages of raytf, its tests and jobs use standard terms; see CONTRIBUTING.md."""

from __future__ import annotations

import ast
import functools
import io
import pathlib
import re
import tokenize

import pytest

import raytf
from tests import blocks

FOLDER = pathlib.Path(raytf.__file__).parent
BANNED = {
    "told": "sent, reported, known",
    "tells?": "sends, reports",
    "anew": "again, from scratch",
    "goes on": "continues, resumes",
    "go on": "continue, resume",
    "went on": "continued, resumed",
    "stands?": "is, is stored",
    "lies?": "is, is stored",
    "behind": "after",
    "beside": "in addition to, next to",
    "whoever": "the process that",
    "in the place of": "instead of",
    "takes? the place": "replaces",
    "hears?": "receives",
    "said": "logged, given",
    "says": "logs, returns, contains",
}
# Code in a text, and the names of arguments.
NAMES = re.compile(r"`[^`]*`|^ *\w+(?=:)", re.MULTILINE)
PATTERN = re.compile(rf"\b({'|'.join(BANNED)})\b", re.IGNORECASE)
# Names of locals, parameters, attributes, functions and classes: pronouns, adverbs and prepositions.
NO_NAMES = {
    "its",
    "anew",
    "here",
    "there",
    "mine",
    "theirs",
    "ours",
    "told",
    "around",
    "beside",
    "behind",
    "within",
    "apart",
    "found",
    "held",
    "kept",
    "place",
    "said",
    "standing",
    "one",
    "ones",
    "of",
    "at",
    "by",
    "up",
    "into",
    "along",
    "across",
    "after",
    "also",
    "another",
    "still",
    "meeting",
    "go_on",
    "goes_on",
    "own",
    "left",
    "what",
    "which",
    "who",
    "it",
    "some",
    "all",
    "each",
    "every",
    "rest",
    "none",
    "only",
    "again",
    "once",
    "then",
    "when",
    "since",
    "until",
    "where",
    "to",
    "from",
    "on",
    "off",
    "over",
    "back",
    "without",
    "places",
    "moment",
    "asked",
    "asking",
    "asks",
    "late",
    "early",
    "later",
    "alone",
    "together",
    "ahead",
    "among",
    "about",
    "near",
    "like",
    "gone",
    "between",
}
# So does a name that ends with one of these.
NO_ENDINGS = ("_here", "_there", "_asked", "_alone", "_together")
# These stay, and are not in the list: `now` of a clock, `out` as NumPy calls it, `other` as the operand of `__eq__` and
# the like, `before`, and names that an interface of Keras, TensorFlow, Ray or click gives. So does `which="best"` of
# `load_model`, `export` and `Predictor`, by the file that has it.
PUBLIC_NAMES = {
    ("fitting/predictor.py", "which"),
    ("worker/checkpoint_selector.py", "which"),
    ("worker/export.py", "which"),
    ("worker/model_loading.py", "which"),
}
FILES = sorted(FOLDER.rglob("*.py"))
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
# What has comments, and is not Python.
_SETTINGS = (path for path in (FOLDER.parent / "cluster").rglob("*") if path.suffix in (".sh", ".yaml"))
SETTINGS = [*sorted(_SETTINGS), FOLDER.parent / "cluster/kubernetes/Dockerfile", FOLDER.parent / "Makefile"]
# Of fewer words a literal is a key or a part of a name.
LEAST_WORDS = 3
PAGES = [*blocks.pages(), "CHANGELOG.md"]
# Words of a sentence of a page or a docstring at most, where `code` of any length is one.
MOST_WORDS = 20
SPAN = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
LINK = re.compile(r"!?\[([^\]]*)\]\([^)\s]*\)")
ITEM = re.compile(r"^ *([*+-]|\d+\.) ")
NO_SENTENCE = re.compile(r" *(#|\||:::|options:)")
# An argument in a docstring, a heading such as "Args:", and lines that are no prose there.
ENTRY = re.compile(r" {4}\*?\*?[\w.]+( \([^)]*\))?: |\w+:$")
EXAMPLE = re.compile(r" *(>>>|\|)")


@functools.cache
def texts(path: pathlib.Path) -> list[tuple[int, str]]:
    """(line, text) of each docstring and comment."""
    source = path.read_text()
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            found.append((getattr(node, "lineno", 1), text))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            found.append((token.start[0], token.string))
    return found


def messages(source: str) -> list[tuple[int, str]]:
    """(line, text) of each literal of several words that is no docstring; values in it are `code`."""
    tree, found = ast.parse(source), []
    no_texts = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)}
    for node in ast.walk(tree):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        if isinstance(node, ast.JoinedStr):
            no_texts |= set(map(id, parts))
        elif not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            continue
        text = "".join(part.value if isinstance(part, ast.Constant) else "`code`" for part in parts)
        if id(node) not in no_texts and words(text) >= LEAST_WORDS:
            found.append((node.lineno, text))
    return found


def better(word: str) -> str:
    return next(words for banned, words in BANNED.items() if re.fullmatch(banned, word, re.IGNORECASE))


def wrong(path: pathlib.Path, found: list[tuple[int, str]]) -> list[str]:
    name = path.relative_to(FOLDER.parent).as_posix()
    return [
        f"{name}:{line}: {hit.group()!r}; one searches for: {better(hit.group())}"
        for line, text in found
        for hit in PATTERN.finditer(NAMES.sub("", text))
    ]


def names_of(node: ast.AST) -> list[str | None]:
    """Names that a node of a syntax tree binds."""
    if isinstance(node, ast.Name | ast.Attribute) and not isinstance(node.ctx, ast.Store):
        return []
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.ExceptHandler(name=name):
            return [name]
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.MatchAs(name=name) | ast.MatchStar(name=name) | ast.MatchMapping(rest=name):
            return [name]
        case ast.alias(name=name, asname=alias):
            return [alias or name]
    return []


def vague(source: str) -> set[str]:
    """Names in a source, without underscores around them, that name nothing."""
    bound = [name for node in ast.walk(ast.parse(source)) for name in names_of(node)]
    names = {name.strip("_").lower() for name in bound if name and not name.startswith("__")}
    return {name for name in names if name in NO_NAMES or name.endswith(NO_ENDINGS)}


@pytest.mark.parametrize("path", FILES, ids=lambda f: f.relative_to(FOLDER).as_posix())
def test_words(path):
    found = wrong(path, [*texts(path), *messages(path.read_text())])
    assert not found, "\n".join(found)


@pytest.mark.parametrize("folder", ["tests", "jobs", "cluster", "docs"])
def test_words_of_other_sources(folder):
    found = []
    for path in sorted((FOLDER.parent / folder).rglob("*.py")):
        found += wrong(path, texts(path))
        if folder != "tests":
            found += wrong(path, messages(path.read_text()))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", SETTINGS, ids=lambda f: f.name)
def test_words_of_scripts_and_settings(path):
    """Comments, and all of the Makefile."""
    lines = enumerate(path.read_text().splitlines(), 1)
    comments = [(line, text if path.name == "Makefile" else text.partition("#")[2]) for line, text in lines]
    assert not wrong(path, comments), "\n".join(wrong(path, comments))


@pytest.mark.parametrize("text", ['f"{x} goes on there"', 'f("it stands " "there")', 'x = "whoever is there" + y'])
def test_words_of_messages_are_noticed(text):
    ((_, found),) = messages(text)
    assert PATTERN.search(found)


def test_docstrings_values_and_single_words_are_no_messages():
    assert messages('"""It says so."""\nf("told")') == []
    assert messages('f"of {said} to them"') == [(1, "of `code` to them")]


def test_names_of_tests():
    found = []
    for path in sorted((FOLDER.parent / "tests").rglob("test_*.py")):
        names = [node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
        found += [n for n in names if n.startswith("test_") and PATTERN.search(n.replace("_", " "))]
    assert not found, "\n".join(found)


def test_names_name_something():
    found = {(path.relative_to(FOLDER).as_posix(), name) for path in FILES for name in vague(path.read_text())}
    assert not found - PUBLIC_NAMES, f"pronouns, adverbs and prepositions: {sorted(found - PUBLIC_NAMES)}"
    assert not PUBLIC_NAMES - found, f"no longer there, remove them from this test: {sorted(PUBLIC_NAMES - found)}"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("own = 1", "own"),
        ("for _left in (): pass", "left"),
        ("x = [every for every in ()]", "every"),
        ("def f(until=None): pass", "until"),
        ("f = lambda *, to_: 0", "to"),
        ("def _where(): pass", "where"),
        ("self._since = 1", "since"),
        ("class A:\n    what: str", "what"),
        ("import x as once", "once"),
        ("from raytf.console import once", "once"),
        ("match x:\n    case A(again): pass", "again"),
        ("match x:\n    case {**rest}: pass", "rest"),
        ("_PLACES = 1", "places"),
        ("def f(given_here): pass", "given_here"),
    ],
)
def test_names_that_name_nothing_are_noticed(source, name):
    assert vague(source) == {name}


def test_reads_keywords_and_texts_are_no_names():
    assert not vague('__all__ = ["own"]\nx.only(to=1)\nshutil.which("until")\ncounts = by["every"]')


def plain(text: str) -> str:
    """Returns the words of a text, line for line: without `code` and targets of links."""
    text = SPAN.sub(lambda span: "`code`" + "\n" * span.group().count("\n"), text)
    return LINK.sub(r"\1", text)


def sentences(text: str, docstring: bool = False) -> list[tuple[int, str]]:
    """(line of its paragraph, sentence) of each paragraph and item, without headings, tables, examples, directives."""
    found, paragraph, begins = [], [], 0
    for number, line in enumerate([*text.splitlines(), ""], 1):
        ends = not line.strip() or (EXAMPLE if docstring else NO_SENTENCE).match(line)
        if paragraph and (ends or ITEM.match(line) or (docstring and ENTRY.match(line))):
            split = re.split(r"(?<=[.!?])[\"')*_]*\s+", " ".join(paragraph))
            found += [(begins, sentence) for sentence in split]
            paragraph = []
        if not ends:
            begins = begins if paragraph else number
            paragraph.append(ITEM.sub("", line, count=1).strip())
    return found


def cells(text: str) -> list[tuple[int, str]]:
    """(line, sentence) of each cell of the tables of a text."""
    rows = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip().startswith("|")]
    parts = [(number, cell.strip()) for number, row in rows for cell in row.strip("|").split("|")]
    return [(number, sentence) for number, cell in parts for _, sentence in sentences(cell)]


def long_sentences(text: str, docstring: bool = False) -> list[str]:
    """Returns "LINE: COUNT words: SENTENCE" of each sentence of a text with more than `MOST_WORDS`."""
    counted = [(line, words(part), part) for line, part in [*sentences(text, docstring), *cells(text)]]
    return [f"{line}: {count} words: {part}" for line, count, part in counted if count > MOST_WORDS]


def words(sentence: str) -> int:
    return sum(re.search(r"\w", part) is not None for part in sentence.split())


@pytest.mark.parametrize("page", PAGES)
def test_words_of_pages(page):
    text = plain(blocks.prose(page))
    found = [
        f"{page}:{text.count(chr(10), 0, hit.start()) + 1}: {hit.group()!r}; one searches for: {better(hit.group())}"
        for hit in PATTERN.finditer(text.replace("\n", " "))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("page", PAGES)
def test_sentences_of_pages_are_short(page):
    long = long_sentences(plain(blocks.prose(page)))
    assert not long, f"{page}: more than {MOST_WORDS} words:\n" + "\n".join(long)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(FOLDER).as_posix())
def test_sentences_of_docstrings_are_short(path):
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, DOCUMENTED)]
    long = [line for node in nodes for line in long_sentences(plain(ast.get_docstring(node) or ""), docstring=True)]
    assert not long, f"more than {MOST_WORDS} words:\n" + "\n".join(long)


def test_sentences_are_split():
    text = "# A head\n\nOne, two.  Three (four.)\nFive:\n\n* six 7.5\n* seven!\n  Eight\n\n| nine | ten |\n"
    assert sentences(text) == [
        (3, "One, two."),
        (3, "Three (four."),
        (3, "Five:"),
        (6, "six 7.5"),
        (7, "seven!"),
        (7, "Eight"),
    ]
    assert [words(sentence) for _, sentence in sentences(text)] == [2, 2, 1, 2, 1, 1]


def test_long_sentences_are_noticed():
    most = "word " * MOST_WORDS
    assert len(long_sentences(f"{most}more.")) == 1 and not long_sentences(f"{most.strip()}. more words")
    assert not long_sentences(f"Args:\n    x: {most[5:]}\n    y: more\n\n    {most}\n    >>> {most} {most}", True)
    assert len(long_sentences(f"# {most} more\n\n| {most} more | x |\n")) == 1, "a head is none"
    assert not long_sentences(plain(f"`{most} {most}` and [{'word ' * 9}]({most[:4]})"))


def arguments_of(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Names of the arguments of a function, or of what a class is made of, its bases' fields apart."""
    if isinstance(node, ast.ClassDef):
        fields = {part.target.id for part in node.body if isinstance(part, ast.AnnAssign)}
        made = [part for part in node.body if getattr(part, "name", "") in ("__init__", "__new__", "__call__")]
        return fields.union(*map(arguments_of, made))
    given = node.args
    named = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    return {argument.arg for argument in named if argument is not None}


def documented(text: str) -> list[str]:
    """Names in the section Args of a docstring."""
    _, _, section = text.partition("\nArgs:\n")
    section = re.split(r"^\w+:$", section, maxsplit=1, flags=re.MULTILINE)[0]
    found = re.findall(r"^    ((?:\*{0,2}\w+(?:, )?)+):", section, re.MULTILINE)
    return [name.lstrip("*") for names in found for name in names.split(", ")]


# Methods that are private, or documented where Keras and TensorFlow declare them.
_OVERRIDES = ("_", "on_", "serialize", "deserialize")


def public_definitions() -> dict[str, ast.ClassDef | ast.FunctionDef]:
    """Returns raytf's own public functions and classes, and the methods of these, by name."""
    found = {}
    for name, module in raytf._MODULES.items():
        if not module.startswith("raytf."):
            continue
        source = FOLDER.joinpath(*module.split(".")[1:]).with_suffix(".py").read_text()
        (node,) = [node for node in ast.parse(source).body if getattr(node, "name", None) == name]
        found[name] = node
        if isinstance(node, ast.ClassDef):
            methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
            found |= {f"{name}.{part.name}": part for part in methods if not part.name.startswith(_OVERRIDES)}
    return found


def constructor_arguments(node: ast.ClassDef | ast.FunctionDef) -> set[str]:
    """Returns the names of the arguments of a function, or of the constructor of a class."""
    if isinstance(node, ast.FunctionDef):
        return arguments_of(node) - {"self", "cls"}
    made = [part for part in node.body if getattr(part, "name", "") == "__init__"]
    if made:
        return arguments_of(made[0]) - {"self"}
    fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
    return {part.target.id for part in fields if "init=False" not in ast.unparse(part)}


def raises(node: ast.ClassDef | ast.FunctionDef) -> bool:
    """Returns whether a function, or the constructor of a class, raises an error itself."""
    if isinstance(node, ast.ClassDef):
        return any(raises(part) for part in node.body if getattr(part, "name", "") in ("__init__", "__post_init__"))
    return any(isinstance(part, ast.Raise) and part.exc is not None for part in ast.walk(node))


PUBLIC = public_definitions()


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_public_names_are_documented(name):
    node = PUBLIC[name]
    text = ast.get_docstring(node) or ""
    is_verb = isinstance(node, ast.FunctionDef) and "property" not in map(ast.unparse, node.decorator_list)
    assert re.match(r"[A-Z]\w*s\b" if is_verb else r"[A-Z]\w+", text), "begins with a verb in the third person"
    missing = {parameter for parameter in constructor_arguments(node) if parameter[:1] != "_"} - set(documented(text))
    assert not missing, f"Args lacks {sorted(missing)}"
    assert not raises(node) or "\nRaises:\n" in text, "raises an error, and has no section Raises"


@pytest.mark.parametrize("path", FILES, ids=lambda f: f.relative_to(FOLDER).as_posix())
def test_documented_arguments_exist(path):
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        inherits = isinstance(node, ast.ClassDef) and any("Fault" in ast.unparse(base) for base in node.bases)
        missing = set(documented(ast.get_docstring(node) or "")) - arguments_of(node)
        assert inherits or not missing, f"{path}:{node.lineno} {node.name} has no {sorted(missing)}"
