"""The example in the README: what it prints, run in the three ways that it names."""

from __future__ import annotations

from support import ROOT, run_command


EXAMPLE = str(ROOT / "examples" / "tiny_llama.py")


def steps(process):
    return [line for line in process.stdout.splitlines() if line.startswith("step ")]


def test_the_example_trains_under_paramproxy_as_without_recompute():
    expected = run_command("-W", "ignore", EXAMPLE, "--plain")
    patched = run_command("-W", "ignore", "-m", "paramproxy", "run", EXAMPLE)
    assert patched.returncode == 0, patched.stderr
    assert steps(patched) == steps(expected)
    assert len(steps(patched)) == 4
    by_variable = run_command("-W", "ignore", EXAMPLE, PARAMPROXY_PATCH="1")
    assert steps(by_variable) == steps(expected)


def test_it_prints_what_the_readme_says():
    patched = run_command("-W", "ignore", "-m", "paramproxy", "run", EXAMPLE)
    readme = (ROOT / "README.md").read_text()
    for line in steps(patched):
        assert line.partition("  20 gradients")[0] in readme


def test_it_does_not_train_with_paddles_own():
    theirs = run_command("-W", "ignore", EXAMPLE)
    assert theirs.returncode == 1
    assert "AttributeError: 'Tensor' object has no attribute 'is_distributed'" in theirs.stderr
