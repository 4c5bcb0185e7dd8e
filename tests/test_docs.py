"""Every block of Python in the README and the docs runs, and prints what stands below it.

The blocks of a page run in order, in one namespace, as a reader would type them. A block of
text after a block of Python is what that prints.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re

import pytest
from support import ROOT
from sybil import Sybil
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser

import paramproxy


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
IDS = [str(page.relative_to(ROOT)) for page in PAGES]


def shown(example):
    """Takes a block of text for what was printed; anything else is a mistake of the page."""
    printed = example.namespace.pop("printed", "")
    assert example.parsed == printed, f"{example.path}:{example.line} is not what is printed"


class Blocks(PythonCodeBlockParser):
    """Blocks of Python whose prints are kept for the block of text that has to follow."""

    def __call__(self, document):
        for region in super().__call__(document):
            run = region.evaluator
            region.evaluator = lambda example, run=run: self.run(example, run)
            yield region

    @staticmethod
    def run(example, run):
        assert not example.namespace.get("printed"), f"what {example.path}:{example.line} follows"
        with contextlib.redirect_stdout(io.StringIO()) as out:
            run(example)
        example.namespace["printed"] = out.getvalue()


SYBIL = Sybil(parsers=[Blocks(), CodeBlockParser("text", shown)])


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_the_blocks_of_a_page_print_what_they_say(page):
    document = SYBIL.parse(page)
    document.namespace["__name__"] = "__main__"
    try:
        for example in document.examples():
            example.evaluate()
        assert not document.namespace.get("printed"), f"not shown: the last prints of {page}"
    finally:
        logging.getLogger("paramproxy").setLevel(logging.NOTSET)
        paramproxy.unpatch()
        registry = paramproxy.custom_state_manager
        registry.custom_get_state_func = registry.custom_set_state_func = None


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_a_page_has_no_program_in_another_dress(page):
    fences = re.findall(r"^ *(?:```|~~~)[ {.]*(\w+)", page.read_text(), re.MULTILINE)
    assert set(fences) <= {"python", "text"}
    assert ">>>" not in page.read_text()
