"""The pages: every block of code is run or states why not, and calls what is there; every link leads somewhere."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import pkgutil
import re
import shlex
import textwrap

import pytest

import raytf
from raytf.cli import main
from raytf.events import Kind
from tests import blocks

PAGES = blocks.pages()
BLOCKS = [block for page in PAGES for block in blocks.blocks_of(page)]
ALL_PAGES = [*PAGES, "CHANGELOG.md"]
API = blocks.ROOT / "docs/reference/api.md"
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def test_the_readme_fits_a_minute():
    lines = (blocks.ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 180 and max(map(len, lines)) <= 150


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_block_runs_or_states_why_not(block):
    assert block.language in (*blocks.RUN, *blocks.SHOWN), f"{block} is of no known language"
    if block.not_run:
        assert block.language != blocks.OUTPUT and len(block.not_run) > 10 and not block.title
    assert block.runs or block.title or block.not_run or block.language == blocks.OUTPUT, f"{block} needs a reason"
    assert not block.hides_code, f"{block} is code: mark it python or bash"
    if block.language == "python":
        compile(textwrap.dedent(block.text), str(block), "exec")


@pytest.mark.parametrize("page", ALL_PAGES)
def test_every_fence_is_a_block(page):
    assert not blocks.unread(page)


@pytest.mark.parametrize("page", PAGES)
def test_a_file_of_a_page_is_used_by_a_later_block(page):
    found = blocks.blocks_of(page)
    for number, block in enumerate(found):
        if block.title:
            name, after = block.title.removesuffix(".py"), found[number + 1 :]
            uses = [later for later in after if (later.runs or later.title) and re.search(rf"\b{name}\b", later.text)]
            assert uses, block


@pytest.mark.parametrize("page", PAGES)
def test_names_of_blocks_are_their_own(page):
    names = [block.name for block in blocks.blocks_of(page) if block.name]
    assert len(names) == len(set(names))


def _used(tree: ast.AST, module: str):
    """Attributes that a program takes of a module, as `raytf.fit`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == module:
            yield node.attr


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "python" and not b.not_run], ids=str)
def test_what_a_block_calls_of_raytf_is_public(block):
    assert set(_used(ast.parse(block.text), "raytf")) <= {*raytf.__all__, "testing"}


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "bash"], ids=str)
def test_commands_of_raytf_have_the_options_that_are_given(block):
    for command in blocks.commands(block):
        found = re.search(r"(?:^|-- *|\d )raytf +(?!-)(.*)", command)
        if not found:
            continue
        name, *words = shlex.split(found[1])
        assert name in main.commands, f"{block}: raytf {name}"
        main.commands[name].make_context(name, words, resilient_parsing=True)  # NoSuchOption, or too many arguments


def _anchors(page: str) -> set[str]:
    """Of headings, as GitHub and mkdocs make them."""
    heads = re.findall(r"^#+ +(.*)$", blocks.prose(page), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", head.lower())).strip("-") for head in heads}


def _text(page: str) -> str:
    return (blocks.ROOT / page).read_text()


@pytest.mark.parametrize("page", ALL_PAGES)
def test_links_lead_somewhere(page):
    for link in _LINK.findall(blocks.prose(page)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (blocks.ROOT / page).parent.joinpath(path).resolve() if path else blocks.ROOT / page
        assert target.exists(), f"{page}: {link}"
        if anchor and target.suffix == ".md":
            assert anchor in _anchors(target.relative_to(blocks.ROOT).as_posix()), f"{page}: {link}"


def test_each_page_is_in_the_navigation_and_in_the_index():
    nav = re.findall(r"^ +- (?:\w+: )?([\w/.-]+\.md)$", _text("mkdocs.yml"), re.MULTILINE)
    pages = {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")}
    assert sorted(nav) == sorted(pages)
    index = _text("docs/index.md")
    alone = {"index.md", "contributing.md"}
    assert not [page for page in pages - alone if f"]({page}" not in index]


def _shown() -> list[str]:
    """What the page of the API shows: names, and members that it names."""
    shown = re.findall(r"^<!-- python docs/api\.py writes ([\w.]+)(?: with (.*))? -->$", API.read_text(), re.MULTILINE)
    return [f"{name}{dot}{member}" for name, members in shown for dot, member in _members(members)]


def _members(text: str) -> list[tuple[str, str]]:
    return [("", ""), *((".", member) for member in text.split(", ") if member)]


def test_the_api_page_has_every_public_name():
    shown = {name.split(".")[1] for name in _shown() if name.count(".") == 1}
    rays = {"prepare_dataset_shard", "TensorflowCheckpoint", "ReportCheckpointCallback"}
    assert shown == set(raytf.__all__) - rays
    assert all(name in API.read_text() for name in rays)


@pytest.mark.parametrize("name", _shown())
def test_what_the_api_page_shows_has_a_docstring(name):
    assert (pkgutil.resolve_name(name).__doc__ or "").strip()


def test_the_api_page_has_every_kind_of_event():
    kinds = re.findall(r"^\| `(\w+)` \|", API.read_text(), re.MULTILINE)
    assert sorted(kinds) == sorted(["kind", *Kind])


def test_the_command_page_has_every_command():
    page = _text("docs/reference/cli.md")
    assert set(re.findall(r"`raytf (\w+)`", page)) == set(main.commands)


def _generated(monkeypatch, script: str) -> str:
    """The page of a script in `docs/`, if it is what the script writes."""
    monkeypatch.syspath_prepend(blocks.ROOT / "docs")
    spec = importlib.util.spec_from_file_location(script, blocks.ROOT / f"docs/{script}.py")
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    page = generator.PAGE.read_text()
    assert page == generator.written(page), f"python docs/{script}.py writes {generator.PAGE.name}"
    return page


def test_the_command_page_is_current(monkeypatch):
    page = _generated(monkeypatch, "commands")
    assert all(f"## raytf {name}\n" in page for name in main.commands) and "--cpus-per-worker FLOAT RANGE" in page


def test_the_page_of_the_api_is_current(monkeypatch):
    page = _generated(monkeypatch, "api")
    assert "\n### raytf.KerasTrainer\n" in page and "\n    build_model: Callable,\n" in page
    assert "\n* `nan`: What to do if the loss is NaN" in page and "\nmodel = keras.Sequential(" in page


def test_the_page_of_errors_is_current(monkeypatch):
    page = _generated(monkeypatch, "refusals")
    rule = "With jit_compile=True and several workers on CPUs a model's call can be compiled"
    assert rule in page and page.count("\n* `` ") > 300


def test_the_guide_has_every_argument_of_the_trainer_with_its_default():
    table = _text("docs/guides/keras-trainer.md").partition("## All arguments")[2]
    rows = [row.split(" | ") for row in re.findall(r"^\| (`.*) \|$", table, re.MULTILINE)]
    named = {}
    for names, defaults, _ in rows:
        arguments = re.findall(r"`(\w+)`", names)
        given = defaults.split(", ") if len(arguments) > 1 else [defaults]
        named |= dict(zip(arguments, given * len(arguments), strict=False))
    fields = {field.name: field.default for field in dataclasses.fields(raytf.KerasTrainer)}
    assert named.keys() == fields.keys()
    shown = {
        name: default for name, default in named.items() if re.fullmatch(r"`(None|True|False|\d+|\".*\")`", default)
    }
    assert {name: ast.literal_eval(default.strip("`")) for name, default in shown.items()} == {
        name: fields[name] for name in shown
    }


def test_every_field_of_the_configuration_is_on_its_page():
    page = _text("docs/reference/config.md")
    assert not [name for name in raytf.TensorflowConfig.__dataclass_fields__ if f"`{name}" not in page]


def test_the_version_is_one():
    version = re.search(r'^version = "(.*)"$', _text("pyproject.toml"), re.MULTILINE)[1]
    assert raytf.__version__ == version
    assert re.search(rf"^## \[{re.escape(version)}\]", _text("CHANGELOG.md"), re.MULTILINE)


def test_blocks_are_read_as_they_are_marked(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "ROOT", tmp_path)
    text = "<!-- name: a -->\n<!-- not run: it is long -->\n```bash\nx \\\n  y  # z\n# all\n```\n\n"
    text += 'Text.\n```python title="m.py"\nx = 1\n```\n\n* item\n  ```text\n  shown\n  ```\n'
    (tmp_path / "p.md").write_text(text)
    first, second, third = blocks.blocks_of("p.md")
    assert (first.name, first.not_run, first.line, first.runs) == ("a", "it is long", 3, False)
    assert blocks.commands(first) == ["x    y"] or blocks.commands(first) == ["x   y"]
    assert (second.title, second.text, second.runs, second.name) == ("m.py", "x = 1\n", False, "")
    assert (third.language, third.text) == ("text", "shown\n")
    assert blocks.named("p.md", "a") == first
    with pytest.raises(LookupError):
        blocks.named("p.md", "b")
    assert not any(block.hides_code for block in (first, second, third)) and not blocks.unread("p.md")
    assert "Text." in blocks.prose("p.md") and "x = 1" not in blocks.prose("p.md")


def test_examples_of_docstrings_are_no_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "ROOT", tmp_path)
    generated = "<!-- python docs/api.py writes raytf.fit -->\n\n```python\nx = 1\n```\n\n<!-- to here -->\n"
    (tmp_path / "p.md").write_text(f"{generated}\n```python\ny = 1\n```\n")
    (block,) = blocks.blocks_of("p.md")
    assert block.text == "y = 1\n" and block.line == 9


@pytest.mark.parametrize("text", ["~~~python\nx = 1\n~~~\n", "````python\nx = 1\n````\n", "Text.\n\n```bash\nls\n"])
def test_fences_that_are_no_blocks_are_refused(text, tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "ROOT", tmp_path)
    (tmp_path / "p.md").write_text(text)
    assert blocks.unread("p.md")


@pytest.mark.parametrize("text", ["import keras\n", "x\nfrom raytf import fit\n", "$ raytf train\n", "make docs\n"])
def test_code_that_is_only_shown_is_refused(text, tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "ROOT", tmp_path)
    (tmp_path / "p.md").write_text(f"```text\n{text}```\n")
    assert blocks.blocks_of("p.md")[0].hides_code


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is an extra: `make docs`")
def test_the_site_builds(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")  # the theme sets it, for good
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    build(load_config(str(blocks.ROOT / "mkdocs.yml"), site_dir=str(tmp_path / "site")))
    assert (tmp_path / "site" / "reference" / "api.html").stat().st_size > 10_000
