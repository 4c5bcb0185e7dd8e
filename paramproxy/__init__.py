"""Activation recompute for PaddlePaddle that keeps the parameter."""

import sys

from paramproxy._compat import custom_state_manager, keep_out_of_to_static
from paramproxy._drop_in import (
    check_recompute_necessary,
    detach_variable,
    switch_rng_state_tracker,
)
from paramproxy._hybrid import recompute_hybrid
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
from paramproxy._sequential import recompute_sequential
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
from paramproxy.patching import patch, patch_where_asked, unpatch


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
    "check_recompute_necessary",
    "checkpoint",
    "custom_state_manager",
    "detach",
    "detach_variable",
    "grads",
    "is_recomputing",
    "keep",
    "offload_over",
    "patch",
    "recompute",
    "recompute_hybrid",
    "recompute_sequential",
    "report",
    "save_everything",
    "save_nothing",
    "save_ops",
    "save_under",
    "set_checkpoint_debug_enabled",
    "set_checkpoint_early_stop",
    "switch_rng_state_tracker",
    "unpatch",
    "unwrap",
]

keep_out_of_to_static(sys.modules[__name__])
patch_where_asked()
