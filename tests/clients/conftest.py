from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paramproxy import _drop_in, patching


sys.path.insert(0, str(Path(__file__).parent))  # training.py
sys.path.insert(0, str(Path(__file__).parent.parent))  # support.py


@pytest.fixture(params=["reentrant", "hooks"])
def engine(request, monkeypatch):
    """The engine that serves clients which do not ask for one."""
    paddles = _drop_in.recompute_as_paddle

    def recompute(function, *args, **kwargs):
        kwargs.setdefault("use_reentrant", request.param == "reentrant")
        return paddles(function, *args, **kwargs)

    monkeypatch.setattr(_drop_in, "recompute_as_paddle", recompute)


@pytest.fixture
def patched():
    """paramproxy in Paddle's place, for clients that were imported before."""
    with patching.patch():
        yield
    assert not patching.is_patched()
