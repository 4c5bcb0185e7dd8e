"""What SECURITY.md says of the package: nothing fetched, unpickled or evaluated."""

from __future__ import annotations

import ast

import pytest
from support import PACKAGE, ROOT, run_command


SOURCES = sorted(PACKAGE.glob("*.py"))
# Modules that open connections, and those that make objects or code of bytes.
FORBIDDEN = {
    *("socket", "ssl", "http", "urllib", "ftplib", "smtplib", "requests", "httpx", "aiohttp"),
    *("pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml", "code", "codeop"),
}
CALLS = {"eval", "exec", "compile", "__import__", "input", "breakpoint"}
ALLOWED = {
    "subprocess": ["_doctor.py"],
    "runpy": ["__main__.py"],
    "ctypes": ["_graph.py", "_stop.py", "_streams.py"],
    "importlib": ["_compat.py"],
}


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_no_module_fetches_unpickles_or_evaluates(source):
    for node in ast.walk(ast.parse(source.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module.partition(".")[0]]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in CALLS, f"line {node.lineno}"
        for name in names:
            assert name not in FORBIDDEN, f"line {node.lineno}"
            assert source.name in ALLOWED.get(name, [source.name]), f"line {node.lineno}"


def test_the_file_that_python_reads_at_every_start_does_nothing_unasked():
    line = (ROOT / "paramproxy.pth").read_text()
    assert len(line.strip().splitlines()) == 1
    code = (
        f"import sys; before = set(sys.modules); exec({line!r});"
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    )
    result = run_command("-I", "-c", code, PARAMPROXY_PATCH=None)
    assert (result.returncode, result.stdout.split()) == (0, []), result.stderr


def test_what_is_run_is_what_was_named(tmp_path):
    (tmp_path / "named.py").write_text("print('named')")
    (tmp_path / "other.py").write_text("raise SystemExit('not named')")
    result = run_command("-W", "ignore", "-m", "paramproxy", "run", "named.py", cwd=tmp_path)
    assert (result.returncode, result.stdout.split()[-1]) == (0, "named")
