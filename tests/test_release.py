"""What is released, and what has to be green before."""

from __future__ import annotations

import importlib.metadata
import re

from support import ROOT

import paramproxy


CI = (ROOT / ".ci" / "run").read_text()
WORKFLOW = (ROOT / ".github" / "workflows" / "ci.yml").read_text()


def test_the_workflow_makes_what_ci_makes_a_line_a_job():
    lines = re.findall(r"^make (.+)$", CI, re.MULTILINE)
    assert "test-wheel" in lines
    assert re.findall(r"^ {10}- (.+)$", WORKFLOW, re.MULTILINE) == lines


def test_the_workflow_has_no_secrets_and_may_only_read():
    assert "secrets" not in WORKFLOW
    assert WORKFLOW.count("permissions:") == 1
    assert "\npermissions:\n  contents: read\n\n" in WORKFLOW


def test_the_version_that_is_installed_is_the_one_of_the_file():
    assert importlib.metadata.version("paramproxy") == paramproxy.__version__
