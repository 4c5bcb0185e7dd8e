"""Activation recompute for PaddlePaddle that keeps the parameter."""

import sys

from paramproxy._compat import keep_out_of_to_static
from paramproxy._leaf import ParamLeaf
from paramproxy._recompute import recompute
from paramproxy._tree import detach, grads
from paramproxy._version import __version__
from paramproxy._view import ParamView, unwrap
from paramproxy.exceptions import (
    InPlaceOperatorError,
    MutationError,
    NoStorageError,
    NotAParameterError,
    ParamProxyError,
    ReplayError,
    ReplayMismatchError,
    RetainGraphWarning,
    UnsupportedError,
)


__all__ = [
    "InPlaceOperatorError",
    "MutationError",
    "NoStorageError",
    "NotAParameterError",
    "ParamLeaf",
    "ParamProxyError",
    "ParamView",
    "ReplayError",
    "ReplayMismatchError",
    "RetainGraphWarning",
    "UnsupportedError",
    "__version__",
    "detach",
    "grads",
    "recompute",
    "unwrap",
]

keep_out_of_to_static(sys.modules[__name__])
