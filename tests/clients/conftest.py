from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paramproxy import patching


sys.path.insert(0, str(Path(__file__).parent))  # training.py
sys.path.insert(0, str(Path(__file__).parent.parent))  # support.py


@pytest.fixture
def patched():
    """paramproxy in Paddle's place, for clients that were imported before."""
    with patching.patch():
        yield
    assert not patching.is_patched()
