from __future__ import annotations

import random

import numpy as np
import paddle
import pytest

from paramproxy import patching


@pytest.fixture(autouse=True)
def _fresh_state():
    """Every test starts from the same streams, and leaves Paddle as it was."""
    paddle.seed(0)
    np.random.seed(0)
    random.seed(0)
    yield
    assert paddle.is_grad_enabled()
    assert paddle.in_dynamic_mode()
    assert not patching.is_patched()
    assert not paddle.amp.amp_state() if hasattr(paddle.amp, "amp_state") else True
