"""Every block of Python in the README and the docs runs as it stands."""

from __future__ import annotations

import re

import paddle
import pytest
from support import ROOT, param, tensor

import paramproxy


PAGES = [
    "README.md",
    "docs/index.md",
    "docs/own-checkpointing.md",
    "docs/selective.md",
    "docs/in-paddles-place.md",
]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(page):
    return BLOCK.findall((ROOT / page).read_text())


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run_in_order(page):
    found = blocks(page)
    assert found
    # What a reader has: a block, an input and a weight with a main_grad.
    weight = param([[1.0], [3.0]])
    weight.main_grad = paddle.zeros([2, 1])
    scope = {
        "paddle": paddle,
        "x": tensor([[1.0, 2.0]]),
        "weight": weight,
        "block": lambda x, w: paddle.tanh(paddle.matmul(x, w)),
    }
    try:
        for block in found:
            exec(compile(block, page, "exec"), scope)
    finally:
        paramproxy.unpatch()


def test_the_first_program_of_the_docs_prints_what_it_says(capsys):
    exec(compile(blocks("docs/index.md")[0], "docs/index.md", "exec"), {})
    assert capsys.readouterr().out == "[[1.0], [2.0]]\n"


def test_the_checkpoint_and_the_head_of_the_docs_give_right_gradients():
    scope = {}
    for block in blocks("docs/own-checkpointing.md"):
        exec(compile(block, "docs", "exec"), scope)
    x, w = tensor([[1.0, 2.0]]), param([[1.0], [3.0]])
    scope["Checkpoint"].apply(lambda a, b: paddle.matmul(a, b), x * 1.0, w).sum().backward()
    assert x.grad.tolist() == [[1.0, 3.0]]
    assert w.grad.tolist() == [[1.0], [2.0]]
    w.clear_gradient(False)
    _, hidden_grad, weight_grad = scope["head_loss"](x, w)
    assert hidden_grad.tolist() == [[14.0, 42.0]]
    assert weight_grad.tolist() == [[14.0], [28.0]]
    assert w.grad is None


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    for path in (ROOT / "docs").glob("*.md"):
        assert path.name in navigation, path.name
