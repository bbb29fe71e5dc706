"""The documentation: links lead somewhere, texts that it quotes are the library's, examples that it shows are there."""

from __future__ import annotations

import ast
import importlib
import inspect
import posixpath
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

import ep_ops
from ep_ops.nn import MoELayer
from ep_ops.operators import OPERATORS

ROOT = Path(ep_ops.__file__).parent.parent
PAGES = sorted(
    str(path.relative_to(ROOT)) for folder in (".", "docs", "docs/api", "benchmarks/results")
    for path in (ROOT / folder).glob("*.md")
)  # fmt: skip
ROOT_PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "SECURITY.md")
OWN = ("ep_ops", "meta_kernels", "cute_kernels")


def anchors(path: Path) -> set[str]:
    """Return the anchors of the headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", path.read_text(), flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links(page: str) -> None:
    """Links lead to files that exist and are on the site (docs/hooks.py): `make docs` accepts no others."""
    wrong = []
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", (ROOT / page).read_text()):
        name, _, anchor = link.partition("#")
        target = ROOT / posixpath.normpath(posixpath.join(posixpath.dirname(page), name)) if name else ROOT / page
        place = target.relative_to(ROOT)
        shown = place.suffix != ".py" and place.parts[0] in ("docs", "benchmarks", *ROOT_PAGES)
        if not shown or not target.is_file() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    assert not wrong


FOLDERS = "ep_ops|cute_kernels|meta_kernels|benchmarks|docs|examples|tests"


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page: str) -> None:
    named = re.findall(rf"`((?:{FOLDERS})/[\w./*-]+)`", (ROOT / page).read_text())
    assert not [name for name in named if not any(ROOT.glob(name.rstrip("/")))]


def test_files_that_modules_name_exist() -> None:
    """Comments, docstrings and messages name files that exist."""
    modules = [path for folder in (*OWN, "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")]
    named = {
        (m[0], path)
        for path in modules
        for m in re.finditer(rf"\b(?:{FOLDERS})/[\w/-]+\.(?:py|md)\b", path.read_text())
    }
    assert not [(name, str(path)) for name, path in named if not (ROOT / name).is_file()]


def test_every_page_is_in_the_navigation() -> None:
    """The navigation lists every page in docs/, and those of the root that docs/hooks.py adds to the site."""
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    named = set(re.findall(r"[\w./-]+\.md$", nav, re.M))
    lying = {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")}
    lying |= {page for page in ROOT_PAGES if page.endswith(".md") and page != "README.md"}
    assert lying - named == set()


def test_what_is_shown_of_files_is_there() -> None:
    shown = []
    for page in PAGES:
        for path, _, section in re.findall(r'^--8<-- "([^":]+)(:(\w+))?"$', (ROOT / page).read_text(), re.M):
            text = (ROOT / path).read_text()
            assert not section or (f"[start:{section}]" in text and f"[end:{section}]" in text)
            shown.append(path)
    assert set(shown) == {f"examples/{path.name}" for path in (ROOT / "examples").glob("*.py")}


def test_every_argument_and_result_of_operators_is_explained() -> None:
    page = (ROOT / "docs/operators.md").read_text()
    explained = {
        part: set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (.*?) \|", text, re.M))))
        for part, _, text in (section.partition("\n") for section in page.split("\n## "))
    }
    for op in OPERATORS:
        schema = torch._C.parse_schema(f"ep::{op.name}{op.schema}")
        assert {argument.name for argument in schema.arguments} <= explained["Arguments"]
        assert {result.name for result in schema.returns} <= explained["Results"]


TESTS_OF_FAILURES = """
argument: cpu/test_edges::test_what_one_rank_gets_wrong_all_are_told
    gpu/test_failures::test_rejections_reach_everybody
before: cpu/test_meeting::test_an_exception_on_one_rank kernels/test_interrupted::test_before_the_first_launch
    gpu/test_rejections::test_a_kernel_that_cannot_be_loaded
later: cpu/test_waits::test_ranks_that_do_not_come kernels/test_interrupted::test_half_an_operation
    gpu/test_rejections::test_half_an_operation
flights: cpu/test_operators_split::test_an_exception_between_start_and_wait
    kernels/test_split_launch::test_flights_that_are_ended
ids: kernels/test_interrupted::test_a_value_that_kernels_rejected gpu/test_failures::test_bad_expert
ids: cpu/test_reference::test_every_rank_raises
different: gpu/test_failures::test_order_mismatch gpu/test_failures::test_token_bounds_differ
    cpu/test_waits::test_ranks_that_do_not_come
methods: cpu/test_call_order::test_methods_out_of_order
threads: cpu/test_call_order::test_threads
communicators: cpu/test_meeting::test_communicators_in_different_orders
    gpu/test_rejections::test_communicators_in_different_orders
late: cpu/test_waits::test_ranks_that_do_not_come kernels/test_marks::test_waiting kernels/test_marks::test_watch
absent: cpu/test_waits::test_ranks_that_do_not_come gpu/test_failures::test_absent_rank
skips: cpu/test_waits::test_ranks_that_do_not_come gpu/test_failures::test_absent_rank
leaves: cpu/test_call_order::test_leaving_by_an_exception kernels/test_interrupted::test_a_rank_that_has_left
child: cpu/test_call_order::test_a_child_process
argument: cpu/test_call_order::test_an_argument_that_is_wrong_on_one_rank
destroy: cpu/test_communicator::test_destroy_does_not_wait_for_ever
dead: gpu/test_deaths::test_ranks_die_one_after_the_other
dead: cpu/test_survivors::test_one_is_killed
creation: cpu/test_creation::test_no_backend_on_one_rank
    gpu/test_rejections::test_no_memory_when_a_communicator_is_made
"""
"""The tests of each row of the table in docs/failures.md, in the order of the rows."""


def test_every_row_of_the_table_of_failures_is_tested() -> None:
    page = (ROOT / "docs/failures.md").read_text()
    _, _, *rows = re.search(r"^\| fault \|(?:.*\n\|)+.*$", page, re.M)[0].splitlines()  # type: ignore[index]
    named = re.split(r"\n(?! )", TESTS_OF_FAILURES.strip())
    assert len(rows) == len(named)
    for line in named:
        tests = line.partition(": ")[2].split()
        assert tests, line
        for path, name in (test.split("::") for test in tests):
            assert f"\ndef {name}(" in (ROOT / f"tests/{path}.py").read_text(), f"{path}::{name}"


def test_the_api_lists_every_method_of_a_communicator() -> None:
    page = (ROOT / "docs/api/communicator.md").read_text()
    methods = {name for name, member in inspect.getmembers(ep_ops.Communicator, callable) if name[0] != "_"}
    assert set(re.findall(r"^        - (\w+)$", page, re.M)) == methods


def test_the_api_documents_what_layers_export() -> None:
    """docs/api/nn.md documents exactly the names of ``ep_ops.nn.__all__``, because documented names are public."""
    documented = set()
    blocks = (ROOT / "docs/api/nn.md").read_text().split("\n::: ")[1:]
    for block in blocks:
        module = importlib.import_module(block.split()[0])
        members = re.search(r"members: \[(.*)\]", block)
        made = [one for one in vars(module).values() if inspect.isfunction(one) or inspect.isclass(one)]
        defined = {one.__name__ for one in made if one.__module__ == module.__name__}
        constants = set(re.findall(r'^([A-Z_]+) = .*\n"""', Path(str(module.__file__)).read_text(), re.M))
        shown = set(members[1].split(", ")) if members else {n for n in defined | constants if n[0] != "_"}
        documented |= shown
    assert documented == set(ep_ops.nn.__all__)


def texts() -> list[str]:
    """String literals of the library; what a literal puts in between is "…"."""
    found = []
    for package in OWN:
        for path in sorted((ROOT / package).rglob("*.py")):
            tree = ast.parse(path.read_text())
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
                if isinstance(node, ast.JoinedStr):
                    parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                    found.append("".join(map(str, parts)))
    return found


def test_texts_that_troubleshooting_quotes_are_the_librarys() -> None:
    """Troubleshooting quotes the library's texts word by word: each piece between "…" stands in one literal, in the
    order of the page."""
    page = (ROOT / "docs/troubleshooting.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    quoted = [text for row in rows for text in re.findall(r"`([^`]+)`", row.split(" | ")[0])]
    assert len(quoted) > 40
    known = texts()
    wrong = []
    for text in quoted:
        if not any(contains(literal, text.split("…")) for literal in known):
            wrong.append(text)
    assert not wrong


def contains(literal: str, pieces: list[str]) -> bool:
    """Whether the pieces follow each other in the literal, with anything in between."""
    at = 0
    for piece in pieces:
        at = literal.find(piece, at)
        if at < 0:
            return False
        at += len(piece)
    return True


@pytest.mark.parametrize("page", PAGES)
def test_prose_has_at_most_132_columns(page: str) -> None:
    """Tables, code, comments and lines with a link may be longer."""
    blocks = re.compile(r"^```.*?^```|<!--.*?-->", re.S | re.M)
    text = blocks.sub(lambda block: "\n" * block[0].count("\n"), (ROOT / page).read_text())
    lines = enumerate(text.splitlines(), 1)
    free = re.compile(r"\||    |.*\]\(")
    assert not [number for number, line in lines if len(line) > 132 and not free.match(line)]


# ---------------------------------------------------------------------- code blocks

RUN_ELSEWHERE = {
    "README.md": "test_cli.py",
    "docs/quickstart.md": "test_cli.py",
    "docs/convert.md": "test_programs.py",
    "docs/own-experts.md": "test_programs.py",
    "docs/training.md": "test_programs.py",
}
"""Pages whose blocks another test runs."""

MARK = re.compile(r"^<!-- Not run by the tests: (needs|replaces) .+\. -->$")
"""The line before a block that says why it is not run."""

SIZES = "num_experts=8, hidden_size=128, top_k=2, max_tokens_per_rank=8, dtype=torch.float32"
SMALLER = {
    "docs/decode.md": [
        ("num_experts=128, hidden_size=2048, top_k=8, max_tokens_per_rank=4096", SIZES.replace("rank=8", "rank=64")),
        ("intermediate_size=768", "intermediate_size=16"),
    ],
    "docs/moe-communicator.md": [("num_experts=64, hidden_size=2048, top_k=8, max_tokens_per_rank=4096", SIZES)],
}
"""Sizes with which blocks are run."""

WITH_BLOCKS = [page for page in PAGES if page not in RUN_ELSEWHERE and "```python" in (ROOT / page).read_text()]


def blocks_of(page: str) -> list[str]:
    """The Python blocks of a page that are to be run."""
    text = (ROOT / page).read_text()
    for old, new in SMALLER.get(page, ()):
        assert old in text
        text = text.replace(old, new)
    found = re.finditer(r"^```python\n(.*?)^```", text, re.S | re.M)
    return [block[1] for block in found if not MARK.match(text[: block.start() - 1].rpartition("\n")[2])]


def given(comm: ep_ops.Communicator) -> dict[str, Any]:
    """Names that blocks use without defining them, as the text around them explains."""
    tokens, hidden = 8, comm.hidden_size
    experts = torch.rand(tokens, comm.num_experts, generator=torch.Generator().manual_seed(0)).topk(comm.top_k).indices
    x = torch.randn(tokens, hidden, requires_grad=True)
    return {
        "torch": torch, "ep_ops": ep_ops, "comm": comm, "x": x, "experts": experts, "topk_ids": experts, "half": 4,
        "weights": torch.rand(tokens, comm.top_k), "shared": torch.nn.Linear(hidden, hidden),
        "run_experts": lambda rows: rows.x * 2, "layer": MoELayer(comm, 16),
        "w": torch.randn(comm.num_local_experts, hidden, hidden),
    }  # fmt: skip


def run_blocks(page: str) -> None:
    with eval(f"ep_ops.Communicator({SIZES}, device='cpu')") as comm:
        names = given(comm)
        for block in blocks_of(page):
            exec(compile(block, str(ROOT / page), "exec"), names)
        for made in (names.get("moe"), names["comm"]):
            if made is not None:
                made.destroy()


@pytest.mark.parametrize("page", WITH_BLOCKS)
def test_blocks_run(page: str) -> None:
    """The code blocks of a page run in order, on one rank of the reference backend."""
    run_ranks(1, run_blocks, page)


def test_blocks_that_are_not_run_say_why() -> None:
    """Pages of other tests run all blocks."""
    for page in RUN_ELSEWHERE:
        assert "<!-- Not run" not in (ROOT / page).read_text()
    assert sum(len(blocks_of(page)) for page in WITH_BLOCKS) >= 6
