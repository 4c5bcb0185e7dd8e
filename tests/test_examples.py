"""The examples make the points that they are for. `tiny_llama.py` is a client's: see clients/."""

from __future__ import annotations

import importlib
import re
import sys

import pytest
from support import ROOT, run_command


EXAMPLES = ROOT / "examples"
OPTIONS = {
    "fused_main_grad": ["--steps", "2"],
    "own_checkpointing": ["--steps", "1"],
    "selective": ["--layers", "2"],
    "memory": ["--blocks", "3"],
}


@pytest.fixture
def example(monkeypatch):
    """Imports one of them."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield importlib.import_module
    for name in OPTIONS:
        sys.modules.pop(name, None)


def test_every_example_is_run():
    clients = (ROOT / "tests" / "clients" / "paddleformers" / "test_example.py").read_text()
    for path in EXAMPLES.glob("*.py"):
        assert path.stem in OPTIONS or path.name in clients, path


@pytest.mark.parametrize("name", OPTIONS)
def test_it_runs_as_a_program_and_prints_one_table(name, tmp_path):
    options = ["--svg", str(tmp_path / "memory.svg")] if name == "memory" else []
    program = str(EXAMPLES / f"{name}.py")
    done = run_command("-W", "ignore", program, *OPTIONS[name], *options)
    assert done.returncode == 0, done.stderr
    assert len(re.findall("^┏", done.stdout, re.MULTILINE)) == 1


def test_fused_main_grads_are_trained_but_under_paddles_own(example):
    runs = example("fused_main_grad").main(steps=12)
    without, ours, hooks, paddles = runs.values()
    assert ours.losses == hooks.losses == without.losses
    assert without.losses[-1] < 0.5 * without.losses[0]
    assert without.moved == ours.moved == hooks.moved == 16
    assert paddles.moved == 0
    assert paddles.losses[-1] > 0.9 * paddles.losses[0]
    assert ours.kept == hooks.kept == paddles.kept < without.kept / 10


def test_checkpointing_of_ones_own_gives_the_gradients_of_plain_autograd(example):
    results = example("own_checkpointing").main(steps=2)
    head, without_output, manual = results.values()
    assert head.error < 1e-5
    assert without_output.error == manual.error == 0.0
    assert head.kept < head.kept_plain / 3
    assert without_output.kept < without_output.kept_plain / 2


def test_what_is_kept_changes_bytes_and_no_gradient(example):
    module = example("selective")
    results = module.main(count=2)
    first, *others = results.values()
    for choice in others:
        assert all(bool((a == b).all()) for a, b in zip(first.gradients, choice.gradients))
    saved = {name: choice.saved for name, choice in results.items()}
    assert saved["nothing kept"] < saved["save_ops gelu"] < saved["keep it, and gelu"]
    assert results["save everything"].replays == 0
    assert results["save everything"].saved == results["save everything"].plain
    assert results["keep attention"].replays == 2


def test_the_timeline_of_memory_is_lower_with_recompute(example, tmp_path):
    module = example("memory")
    picture = tmp_path / "memory.svg"
    without, paddles, reentrant, hooks = module.main(picture, blocks=8).values()
    assert reentrant.peak <= paddles.peak < without.peak / 2
    assert hooks.peak <= reentrant.peak
    assert len(reentrant.nbytes) > len(without.nbytes)
    assert "<svg" in picture.read_text()
