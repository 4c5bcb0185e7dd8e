"""What paramproxy raises and warns with.

Each error also inherits the builtin that a caller would expect to catch.

Paddle turns an exception that leaves a backward pass into an `OSError` whose
text holds the class name and the message, and nothing of `__cause__`. So every
message here says everything by itself.
"""

from __future__ import annotations


__all__ = [
    "InPlaceOperatorError",
    "MutationError",
    "NoStorageError",
    "NotAParameterError",
    "ParamProxyError",
    "ReplayError",
    "ReplayMismatchError",
    "RetainGraphWarning",
    "UnsupportedError",
]


class ParamProxyError(Exception):
    """The base of every error that paramproxy raises."""


class NoStorageError(ParamProxyError, RuntimeError):
    """A parameter has no data at the moment: not initialized yet, or freed."""


class NotAParameterError(ParamProxyError, TypeError):
    """A `ParamView` was asked for of something that is not a parameter."""


class InPlaceOperatorError(ParamProxyError, TypeError):
    """An operator like `+=` on a view, which could only have rebound the name."""


class MutationError(ParamProxyError, RuntimeError):
    """A tensor that a region reads was changed in place, so a replay would be wrong.

    Plain autograd refuses the same program with its inplace-version check.
    """


class ReplayError(ParamProxyError, RuntimeError):
    """The function raised in its replay, though its first run had not."""


class ReplayMismatchError(ParamProxyError, RuntimeError):
    """The replay gave other outputs than the first run."""


class UnsupportedError(ParamProxyError, NotImplementedError):
    """A use that the chosen engine cannot serve, and would get wrong in silence."""


class RetainGraphWarning(UserWarning):
    """`retain_graph=True` was asked for around a reentrant region.

    A second backward through any PyLayer crashes Paddle.
    """
