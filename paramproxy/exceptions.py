"""What paramproxy raises and warns with.

Each error also inherits the builtin that a caller would expect to catch.

Paddle turns an exception that leaves a backward pass into an `OSError` whose
text holds the class name and the message, and nothing of `__cause__`. So every
message here says everything by itself, and such an error is caught like this:

    >>> import paddle, paramproxy
    >>> x = paddle.ones([2])
    >>> x.stop_gradient = False
    >>> y = paramproxy.recompute(paddle.exp, x)
    >>> try:
    ...     paddle.grad(y, [x])
    ... except OSError as error:
    ...     print("UnsupportedError" in str(error))
    True
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
    """The base of every error that paramproxy raises.

    Cause:
        Never raised itself.

    Remedy:
        Catch it to catch all of them, where they are raised at once and not in
        backward.

    Examples:
        >>> import paramproxy
        >>> try:
        ...     paramproxy.ParamView("no parameter")
        ... except paramproxy.ParamProxyError as error:
        ...     print(type(error).__name__)
        NotAParameterError
    """


class NoStorageError(ParamProxyError, RuntimeError):
    """A parameter or a tensor has no data at the moment.

    Cause:
        A parameter that is not initialized yet (`LazyGuard`), or that sharding has
        freed; a tensor whose data was freed for all its aliases (`_clear_data`).

    Remedy:
        Initialize or gather it first. Free an activation with `_clear_dataptr`,
        which lets go of one tensor only.

    Examples:
        >>> import paddle, paramproxy
        >>> with paddle.LazyGuard():
        ...     layer = paddle.nn.Linear(2, 2)
        >>> try:
        ...     paramproxy.ParamView(layer.weight).leaf
        ... except paramproxy.NoStorageError as error:
        ...     print("Initialize it (LazyGuard), or gather it again" in str(error))
        True
    """


class NotAParameterError(ParamProxyError, TypeError):
    """A `ParamView` was asked for of something that is not a parameter.

    Cause:
        An ordinary tensor, or another object. Only a parameter has a `main_grad`,
        hooks and tags to keep.

    Remedy:
        `tensor.detach()` for a tensor, [`detach`][paramproxy.detach] for a
        container with both.

    Examples:
        >>> import paddle, paramproxy
        >>> try:
        ...     paramproxy.ParamView(paddle.ones([2]))
        ... except paramproxy.NotAParameterError as error:
        ...     print(str(error).split(":")[0])
        Cannot view Tensor object as a parameter
    """


class InPlaceOperatorError(ParamProxyError, TypeError):
    """An operator like `+=` on a view, which could only have rebound the name.

    Cause:
        On a Paddle tensor `a += b` makes a new tensor and binds the name to it. On
        a view the new tensor would have taken the parameter's place.

    Remedy:
        The method that changes the parameter, `view.add_(b)`, under
        `paddle.no_grad()`; or `new = view + b`.

    Examples:
        >>> import paddle, paramproxy
        >>> view = paramproxy.ParamView(paddle.create_parameter([2], "float32"))
        >>> try:
        ...     view += 1.0
        ... except paramproxy.InPlaceOperatorError as error:
        ...     print("use view.add_(other) under paddle.no_grad()" in str(error))
        True
    """


class MutationError(ParamProxyError, RuntimeError):
    """A tensor that a region reads was changed in place, so a replay would be wrong.

    Plain autograd refuses the same program with its inplace-version check.

    Cause:
        An optimizer step, an `add_`, an `__setitem__` on an input or a weight
        between forward and backward; or by the function itself.

    Remedy:
        Change it after backward, or hand the region a clone. A captured tensor that
        the function writes and returns: return a new one.

    Examples:
        >>> import paddle, paramproxy
        >>> w = paddle.create_parameter([2], "float32")
        >>> y = paramproxy.recompute(paddle.exp, w)
        >>> with paddle.no_grad():
        ...     _ = w.add_(paddle.ones([2]))
        >>> try:
        ...     y.sum().backward()
        ... except OSError as error:
        ...     print("argument 0" in str(error), "was changed in place" in str(error))
        True True
    """


class ReplayError(ParamProxyError, RuntimeError):
    """The function raised in its replay, though its first run had not.

    Cause:
        Whatever the text says after the name of the region: the error of the
        function itself, with its last lines. Often a resource of the first run that
        is gone (a closed file, a popped list), or no memory left.

    Remedy:
        Mend that. Let the function read only its arguments and what lasts until
        backward.

    Examples:
        >>> import paddle, paramproxy
        >>> x = paddle.ones([2])
        >>> x.stop_gradient = False
        >>> once = [paddle.exp]
        >>> y = paramproxy.recompute(lambda x: once.pop()(x), x)
        >>> try:
        ...     y.sum().backward()
        ... except OSError as error:
        ...     print("ReplayError" in str(error), "pop from empty list" in str(error))
        True True
    """


class ReplayMismatchError(ParamProxyError, RuntimeError):
    """The replay gave other outputs than the first run, or saved other tensors.

    Cause:
        The function does not do the same each time: it reads a global, an
        attribute or a clock that has changed, draws random numbers of a generator
        that is not restored, writes what it reads.

    Remedy:
        Pass what changes as an argument. In the hook engine `debug=True` names the
        lines; the how-to *Debugging a replay* has the usual causes.

    Examples:
        >>> import paddle, paramproxy
        >>> x = paddle.ones([2])
        >>> x.stop_gradient = False
        >>> sizes = [2, 1]
        >>> y = paramproxy.recompute(lambda x: paddle.exp(x[: sizes.pop(0)]), x)
        >>> try:
        ...     y.sum().backward()
        ... except OSError as error:
        ...     print("ReplayMismatchError" in str(error))
        True
    """


class UnsupportedError(ParamProxyError, NotImplementedError):
    """A use that the chosen engine cannot serve, and would get wrong in silence.

    Cause:
        The text says which. Most often `paddle.grad`, `create_graph=True` or a
        second backward through the reentrant engine; an iterator as an argument;
        an activation behind a global name.

    Remedy:
        `use_reentrant=False` for what the hook engine can, else what the text says:
        pass a list, pass the tensor as an argument.

    Examples:
        >>> import paddle, paramproxy
        >>> x = paddle.ones([2])
        >>> x.stop_gradient = False
        >>> try:
        ...     paramproxy.recompute(lambda xs: sum(xs), iter([x, x]))
        ... except paramproxy.UnsupportedError as error:
        ...     print("argument 0 is an iterator" in str(error))
        True
    """


class RetainGraphWarning(UserWarning):
    """`retain_graph=True` was asked for around a region of the reentrant engine.

    A second backward through any PyLayer crashes Paddle. The warning comes with the
    first, once for each place, before that can happen.

    Cause:
        `loss.backward(retain_graph=True)`, or `paddle.autograd.backward` with it.

    Remedy:
        `use_reentrant=False` for those regions; or leave `retain_graph` out, if
        there is no second backward.

    Examples:
        >>> import paddle, paramproxy, warnings
        >>> x = paddle.ones([2])
        >>> x.stop_gradient = False
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     paramproxy.recompute(paddle.exp, x).sum().backward(retain_graph=True)
        >>> caught[0].category.__name__
        'RetainGraphWarning'
    """
