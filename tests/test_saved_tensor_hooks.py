"""A caller's own saved-tensor hooks around a reentrant region."""

from __future__ import annotations

import paddle
import pytest
from support import Counted, param, run_python, same, tensor, values

from paramproxy import UnsupportedError, recompute
from paramproxy._options import Options
from paramproxy._region import Region


def hooks(seen):
    """Move every saved tensor to numpy and back: the flag is lost on the way."""

    def pack(t):
        seen.append(list(t.shape))
        return t.numpy()

    def unpack(array):
        return paddle.to_tensor(array)

    return paddle.autograd.saved_tensors_hooks(pack, unpack)


@pytest.mark.parametrize("inner", [False, True])
def test_gradients_are_right_and_the_hooks_see_the_inputs(inner):
    def scenario(run):
        seen = []
        x, w, mask = tensor([1.0, 2.0]), param([3.0, 4.0]), tensor([1.0, 0.5], grad=False)
        h = x * 1.0

        def region(a, w, m):
            b = run(lambda a, w: paddle.tanh(a * w), a, w) if inner else paddle.tanh(a * w)
            return b * m * w

        with hooks(seen):
            y = run(region, h, w, mask)
            z = y * y
        z.sum().backward()
        assert seen
        return values(x.grad), values(w.grad)

    same(scenario)


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_pack_hook_that_returns_a_list_is_refused_clearly(kind):
    """Paddle hands what a PyLayer saved back without calling the unpack hook."""
    x = tensor([1.0]) * 1.0
    region, tensors = Region.open(lambda a: a * a, (x,), {}, Options(preserve_rng_state=False))
    region.first_run(tensors, record=False)
    with pytest.raises(UnsupportedError, match=f"gave a {kind.__name__} for argument 0") as caught:
        region.replay([kind([x])])
    assert "return another object there" in str(caught.value)


def test_a_pack_hook_that_returns_a_list_crashes_paddle_with_any_pylayer():
    """So all that can be done is to say it before."""
    done = run_python(
        "import paddle\nfrom support import Reverse, tensor\n"
        "with paddle.autograd.saved_tensors_hooks(lambda t: [t], lambda box: box[0]):\n"
        "    class Saves(Reverse):\n"
        "        @staticmethod\n"
        "        def forward(ctx, x):\n"
        "            ctx.save_for_backward(x)\n"
        "            return x * 2.0\n"
        "        @staticmethod\n"
        "        def backward(ctx, dy):\n"
        "            ctx.saved_tensor()\n"
        "            return dy\n"
        "    y = Saves.apply(tensor([1.0]) * 1.0)\n"
        "y.sum().backward()\n"
    )
    assert done.returncode < 0


def test_only_what_waits_for_backward_is_packed():
    seen = []
    x, w = tensor([1.0, 2.0, 3.0]), param([3.0, 4.0, 5.0])
    region = Counted(lambda a, w: paddle.tanh(paddle.tanh(a * w)))
    h = x * 1.0
    with hooks(seen):
        y = recompute(region, h, w)
    assert seen == [[3]]
    y.sum().backward()
    assert region.calls == 2
