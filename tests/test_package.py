"""The package as it is installed and imported."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from support import PACKAGE, ROOT, run_python

import paramproxy


def test_public_names_are_sorted_and_there():
    assert paramproxy.__all__ == sorted(paramproxy.__all__)
    for name in paramproxy.__all__:
        assert getattr(paramproxy, name) is not None


def test_every_public_name_is_documented():
    for name in set(paramproxy.__all__) - {"__version__"}:
        assert getattr(paramproxy, name).__doc__, name


EXPLAINED_ON_THE_PAGE = {"__version__", "custom_state_manager", "save_everything", "save_nothing"}


@pytest.mark.parametrize("name", sorted(set(paramproxy.__all__) - EXPLAINED_ON_THE_PAGE))
def test_every_public_name_has_an_example(name):
    assert ">>>" in getattr(paramproxy, name).__doc__


def test_values_have_their_example_on_the_page():
    page = (ROOT / "docs" / "reference" / "api.md").read_text()
    for name in EXPLAINED_ON_THE_PAGE - {"__version__"}:
        _, _, text = page.partition(f"paramproxy.{name}")
        assert "```python" in text.partition(":::")[0], name


@pytest.mark.parametrize("name", paramproxy.exceptions.__all__)
def test_every_error_says_cause_and_remedy(name):
    documented = getattr(paramproxy, name).__doc__
    assert "\n    Cause:\n" in documented
    assert "\n    Remedy:\n" in documented
    page = (ROOT / "docs" / "reference" / "errors.md").read_text()
    assert f"::: paramproxy.{name}\n" in page


def test_every_public_name_is_on_the_pages():
    pages = [(ROOT / "docs" / "reference" / name).read_text() for name in ("api.md", "errors.md")]
    for name in paramproxy.__all__:
        shown = f"::: paramproxy.{name}\n", f"#paramproxy.{name} "
        assert any(line in page for page in pages for line in shown), name


def run_beside(folder, code):
    """Run a program that finds what is in `folder` before anything that is installed."""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": f"{folder}:{ROOT}", "PATH": ""},
    )


def test_without_paddle_it_says_what_to_install(tmp_path):
    blocker = tmp_path / "sitecustomize.py"
    blocker.write_text(
        "import sys\n"
        "class No:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'paddle':\n"
        "            raise ModuleNotFoundError(\"No module named 'paddle'\", name='paddle')\n"
        "sys.meta_path.insert(0, No())\n"
    )
    done = run_beside(tmp_path, "import sitecustomize, paramproxy")
    assert done.returncode == 1
    assert (
        "ImportError: Cannot import paramproxy: PaddlePaddle is not installed. Install it with "
        "`pip install 'paramproxy[cpu]'`, or with `pip install 'paramproxy[gpu]'` for a GPU build."
    ) in done.stderr


def test_a_paddle_that_is_broken_is_not_called_missing(tmp_path):
    (tmp_path / "paddle.py").write_text("import a_module_that_is_not_there\n")
    done = run_beside(tmp_path, "import paramproxy")
    assert "No module named 'a_module_that_is_not_there'" in done.stderr
    assert "not installed" not in done.stderr


def test_it_is_typed():
    assert (PACKAGE / "py.typed").exists()


def test_versions_are_looked_at_in_one_room_only():
    for path in PACKAGE.glob("*.py"):
        if path.name not in ("_compat.py", "_doctor.py"):
            assert not re.search(r"paddle\.__version__|paddle_version", path.read_text()), path.name


def test_importing_it_changes_nothing_about_paddle():
    done = run_python(
        "import paddle\n"
        "from paddle.distributed.fleet.utils import recompute as before\n"
        "import paramproxy\n"
        "from paddle.distributed.fleet.utils import recompute as after\n"
        "print(before is after)"
    )
    assert done.stdout.strip() == "True", done.stderr
