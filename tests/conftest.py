from __future__ import annotations

import logging
import os
import random

import numpy as np
import paddle
import pytest
from hypothesis import HealthCheck, settings

from paramproxy import patching


# A few examples, always the same, in the suite, and many on every version of Paddle;
# `make fuzz` draws others each time.
settings.register_profile(
    "suite",
    max_examples=60,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
MANY = int(os.environ.get("PROGRAMS", "3000"))
settings.register_profile("many", settings.get_profile("suite"), max_examples=MANY)
settings.register_profile(
    "fuzz", settings.get_profile("suite"), max_examples=MANY, derandomize=False
)
settings.load_profile("suite")


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
    assert logging.getLogger("paramproxy").level == logging.NOTSET
    assert not paddle.amp.amp_state() if hasattr(paddle.amp, "amp_state") else True
