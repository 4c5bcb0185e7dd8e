"""Activation recompute for PaddlePaddle that keeps the parameter."""

import sys

from paramproxy._compat import keep_out_of_to_static
from paramproxy._keep import keep
from paramproxy._leaf import ParamLeaf
from paramproxy._policy import (
    Decision,
    Policy,
    SavedTensor,
    offload_over,
    save_everything,
    save_nothing,
    save_ops,
    save_under,
)
from paramproxy._recompute import checkpoint, recompute
from paramproxy._report import Report, ReportRow, report
from paramproxy._settings import (
    is_recomputing,
    set_checkpoint_debug_enabled,
    set_checkpoint_early_stop,
)
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
    "Decision",
    "InPlaceOperatorError",
    "MutationError",
    "NoStorageError",
    "NotAParameterError",
    "ParamLeaf",
    "ParamProxyError",
    "ParamView",
    "Policy",
    "ReplayError",
    "ReplayMismatchError",
    "Report",
    "ReportRow",
    "RetainGraphWarning",
    "SavedTensor",
    "UnsupportedError",
    "__version__",
    "checkpoint",
    "detach",
    "grads",
    "is_recomputing",
    "keep",
    "offload_over",
    "recompute",
    "report",
    "save_everything",
    "save_nothing",
    "save_ops",
    "save_under",
    "set_checkpoint_debug_enabled",
    "set_checkpoint_early_stop",
    "unwrap",
]

keep_out_of_to_static(sys.modules[__name__])
