"""The suite on what is released: the wheel, installed, and the tests of the sdist.

    python tests/released.py dist

Makes an empty environment, installs the wheel of `dist` into it with Paddle and what the
tests need, unpacks the sdist, takes the package out of it, and runs the suite there. So a
file that the wheel lacks is missed by the package, and one that the sdist lacks by a test.
The file is a pytest plugin as well, which looks at where the package came from.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path


def pytest_collection_finish():
    imported = Path(sys.modules["paramproxy"].__file__)
    assert imported.is_relative_to(sys.prefix), imported
    assert "site-packages" in imported.parts, imported


def main(dist):
    [wheel], [sdist] = dist.glob("*.whl"), dist.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as folder:
        python = installed(wheel, Path(folder, "venv"))
        tests = unpacked(sdist, Path(folder))
        return run_suite(python, tests)


def installed(wheel, where):
    """The Python of a new environment with the wheel in it."""
    venv.create(where, with_pip=True)
    python = where / "bin" / "python"
    requirement = f"paramproxy[cpu,test] @ {wheel.absolute().as_uri()}"
    subprocess.run([python, "-m", "pip", "install", "--quiet", requirement], check=True)
    return python


def unpacked(sdist, where):
    """The tree of the sdist without the package."""
    shutil.unpack_archive(sdist, where)
    tree = where / sdist.name.removesuffix(".tar.gz")
    shutil.rmtree(tree / "paramproxy")
    return tree


def run_suite(python, tree):
    """The files that `testpaths` names, and the doctests of the package. The exit code."""
    files = sorted(str(file.relative_to(tree)) for file in tree.glob("tests/test_*.py"))
    # From outside of the environment nothing is imported but this plugin and what the tests share.
    environment = {**os.environ, "PYTHONPATH": str(tree / "tests")}
    command = [python, "-m", "pytest", "-p", "released", "--rootdir", ".", *files]
    return subprocess.run(
        [*command, "--pyargs", "paramproxy"], cwd=tree, env=environment, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
