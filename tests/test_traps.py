"""The traps at Paddle's C++ boundary, as measured; the crashing ones in a subprocess."""

from __future__ import annotations

from signal import SIGSEGV

import paddle
import pytest
from support import param, run_python, values

from paramproxy import ParamView
from paramproxy._compat import LISTS_ARE_CHECKED, Tensor


@pytest.fixture
def view():
    return ParamView(param([[1.0, 2.0], [3.0, 4.0]]))


def test_kernels_refuse_a_view_and_take_its_leaf(view):
    with pytest.raises((ValueError, TypeError), match="ParamView"):
        paddle.matmul(view, view.leaf)
    assert values(paddle.matmul(view.leaf, view.leaf)) == [[7.0, 10.0], [15.0, 22.0]]


def test_a_pylayer_takes_a_view_for_a_constant_and_a_leaf_for_a_tensor(view):
    class Double(paddle.autograd.PyLayer):
        @staticmethod
        def forward(ctx, x):
            return (x.leaf if isinstance(x, ParamView) else x) * 2.0

        @staticmethod
        def backward(ctx, dy):
            return dy * 2.0

    assert Double.apply(view).stop_gradient
    Double.apply(view.leaf).sum().backward()
    assert values(view.leaf_grad) == [[2.0, 2.0], [2.0, 2.0]]


def test_no_class_can_be_both_tensor_and_proxy():
    with pytest.raises(TypeError, match=r"lay-?out conflict"):
        type("Both", (ParamView, Tensor), {})


def test_the_dict_of_a_tensor_can_not_be_assigned():
    with pytest.raises((AttributeError, TypeError)):
        paddle.ones([1]).__dict__ = {}


PROGRAM = """
import paddle
from support import param
from paramproxy import ParamView
view = ParamView(param([[1.0, 2.0], [3.0, 4.0]]))
"""


@pytest.mark.parametrize(
    "call",
    [
        "paddle.concat([view, view])",
        "paddle.stack([view, view])",
        "paddle.add_n([view, view])",
        "paddle.einsum('ij,jk->ik', view, view)",
    ],
)
def test_a_list_of_views_raises_where_paddle_checks_lists_and_crashes_where_not(call):
    done = run_python(f"{PROGRAM}\ntry:\n    {call}\nexcept Exception:\n    print('raised')")
    if LISTS_ARE_CHECKED:
        assert done.stdout.split() == ["raised"], done.stderr[-2000:]
    else:
        assert done.returncode == -SIGSEGV
    leaves = call.replace("view", "view.leaf")
    assert run_python(f"{PROGRAM}{leaves}").returncode == 0


def test_a_view_could_not_guard_itself_where_lists_are_not_checked():
    """On Paddle 2.6 any object at all crashes there, whatever class it claims to be of."""
    done = run_python(
        "import paddle\ntry:\n    paddle.stack([object()])\nexcept Exception:\n    print('raised')"
    )
    assert (done.stdout.split() == ["raised"]) is LISTS_ARE_CHECKED
    assert (done.returncode == -SIGSEGV) is not LISTS_ARE_CHECKED


@pytest.mark.parametrize(
    "method", ["_share_buffer_to", "_unsafe_share_buffer_to", "_share_underline_tensor_to"]
)
def test_sharing_a_buffer_into_a_view_is_not_checked_by_paddle_and_works_with_a_leaf(method):
    """Paddle writes through its argument without a look at it. The warning says: hand it a leaf."""
    if not hasattr(Tensor, method):
        return
    done = run_python(
        f"{PROGRAM}\nsource = param([[5.0, 6.0], [7.0, 8.0]])\nleaf = view.leaf\n"
        f"source.{method}(leaf)\nprint(leaf.numpy().tolist())"
    )
    assert done.stdout.strip() == "[[5.0, 6.0], [7.0, 8.0]]", done.stderr[-2000:]
    blind = run_python(
        f"{PROGRAM}\nsource = param([[5.0]])\nsource.{method}(view)\nprint('unseen')"
    )
    # It crashed, or it corrupted memory unseen: never an error that could be caught.
    assert blind.returncode < 0 or "unseen" in blind.stdout


def test_the_docstring_warns_of_each():
    for words in (
        "matmul(view, y)",
        "SomePyLayer.apply(view)",
        "_share_buffer_to",
        "paddle.concat",
    ):
        assert words in ParamView.__doc__
    assert "!!! warning" in ParamView.__doc__
