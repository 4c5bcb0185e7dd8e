"""Containers in and out, and what is one object staying one object."""

from __future__ import annotations

import collections
import dataclasses

import optree
import paddle
import pytest
from support import param, same, tensor, values

from paramproxy import UnsupportedError, recompute


Pair = collections.namedtuple("Pair", "left right")


@dataclasses.dataclass
class Registered:
    x: object
    name: str


@dataclasses.dataclass
class Unregistered:
    x: object


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


optree.register_pytree_node(
    Registered,
    lambda r: ((r.x,), r.name),
    lambda n, kids: Registered(kids[0], n),
    namespace="paramproxy",
)

BOXES = {
    "list": (lambda x, w: [x, w], lambda b: b[0] * b[1]),
    "tuple": (lambda x, w: (x, w), lambda b: b[0] * b[1]),
    "tuple of mixed flags": (
        lambda x, w: (x, tensor([2.0, 3.0], grad=False), w),
        lambda b: b[0] * b[1] * b[2],
    ),
    "tuple of tensors and constants": (
        lambda x, w: (x, 2, w, None, "n"),
        lambda b: b[0] * b[1] * b[2],
    ),
    "dict": (lambda x, w: {"x": x, "w": w, "n": None}, lambda b: b["x"] * b["w"]),
    "ordered dict": (lambda x, w: collections.OrderedDict(w=w, x=x), lambda b: b["x"] * b["w"]),
    "default dict": (
        lambda x, w: collections.defaultdict(list, w=w, x=x),
        lambda b: b["x"] * b["w"],
    ),
    "deque": (lambda x, w: collections.deque([x, w]), lambda b: b[0] * b[1]),
    "named tuple": (Pair, lambda b: b.left * b.right),
    "nested": (
        lambda x, w: [{"p": Pair((x,), [w])}],
        lambda b: b[0]["p"].left[0] * b[0]["p"].right[0],
    ),
    "registered dataclass": (lambda x, w: [Registered(x, "n"), w], lambda b: b[0].x * b[1]),
    "empty beside": (lambda x, w: [[], {}, x, (), w], lambda b: b[2] * b[4]),
}


@pytest.mark.parametrize(("box", "use"), BOXES.values(), ids=BOXES.keys())
def test_tensors_in_a_container_get_their_gradients(box, use):
    def scenario(run):
        x, w = tensor([1.0, 2.0]), param([3.0, 4.0])
        tree = box(x * 1.0, w)
        y = run(lambda b: use(b) * use(b), tree)
        y.sum().backward()
        return values(y), values(x.grad), values(w.grad)

    same(scenario)


@pytest.mark.parametrize(("box", "use"), BOXES.values(), ids=BOXES.keys())
def test_a_container_comes_out_as_it_went_in(box, use):
    def scenario(run):
        x, w = tensor([1.0, 2.0]), param([3.0, 4.0])
        out = run(lambda a, b: box(a * b, b * 2.0), x * 1.0, w)
        use(out).sum().backward()
        keys = list(out) if isinstance(out, dict) else None
        return type(out).__name__, keys, values(use(out)), values(x.grad), values(w.grad)

    same(scenario)


def test_one_object_twice_is_one_object_in_both_runs():
    seen = []

    def region(p, q, box, x, y):
        seen.append((p is q, p is box["w"], x is y))
        return p * q * box["w"] * x * y

    def scenario(run):
        x, w = tensor([2.0]), param([3.0])
        h = x * 1.0
        run(region, w, w, {"w": w}, h, h).sum().backward()
        return values(x.grad), values(w.grad)

    same(scenario, ([108.0], [108.0]))
    assert seen == [(True, True, True)] * 5


def test_the_first_run_gets_the_callers_own_objects():
    x, w, box = tensor([1.0]) * 1.0, param([2.0]), {"n": 1}
    ids = (id(x), id(w), id(box))
    seen = []

    def region(a, p, b):
        seen.append((id(a) == ids[0], id(p) == ids[1], id(b) == ids[2]))
        return a * p

    recompute(region, x, w, box).sum().backward()
    assert seen == [(True, True, True), (False, False, False)]


def test_outputs_that_are_no_tensors_come_back():
    thing = object()

    def scenario(run):
        x = tensor([1.0, 2.0])
        y, rest = run(lambda a: (a * 2.0, [3, "tag", None, thing, paddle.argmax(a)]), x * 1.0)
        y.sum().backward()
        flag = rest.pop().stop_gradient
        return rest == [3, "tag", None, thing], flag, values(x.grad)

    same(scenario, (True, True, [2.0, 2.0]))


@pytest.mark.parametrize("nothing", [None, 3, "text", (), {"a": [1, None]}])
def test_a_function_without_tensors_to_return_is_a_plain_call(nothing):
    assert recompute(lambda a: nothing, tensor([1.0])) == nothing


def test_the_same_output_twice_is_one_object():
    def scenario(run):
        x = tensor([1.0, 2.0])

        def region(a):
            b = a * a
            return b, {"again": b}

        one, box = run(region, x * 1.0)
        (one * box["again"]).sum().backward()
        return one is box["again"], values(x.grad)

    same(scenario)


def test_a_tensor_hidden_in_an_argument_is_refused_by_name():
    x = tensor([1.0]) * 1.0
    with pytest.raises(UnsupportedError) as caught:
        recompute(lambda a, b: a * b.x * 2.0, x, Unregistered(x * 1.0))
    assert "argument 1 is a Unregistered that holds a tensor which needs a gradient" in str(
        caught.value
    )
    assert "register the class with optree" in str(caught.value)


def test_a_tensor_hidden_in_a_result_is_refused_by_name():
    with pytest.raises(UnsupportedError) as caught:
        recompute(lambda a: Unregistered(a * 2.0), tensor([1.0]) * 1.0)
    assert "it returns a Unregistered that holds a tensor" in str(caught.value)


@pytest.mark.parametrize(
    "hide",
    [
        lambda t: Unregistered([t]),
        lambda t: {"k": t}.values(),
        lambda t: Unregistered({"deep": [t]}),
        lambda t: collections.UserDict(k=t),
        Slotted,
    ],
    ids=["list", "dict values", "deep", "user dict", "slots"],
)
def test_it_is_found_some_levels_down(hide):
    with pytest.raises(UnsupportedError, match="that holds a tensor which needs a gradient"):
        recompute(lambda a, b: a * 2.0, tensor([1.0]), hide(tensor([1.0]) * 1.0))


@pytest.mark.parametrize(
    "make", [lambda x: iter([x]), lambda x: (t for t in [x]), lambda x: map(abs, [x])]
)
def test_an_iterator_is_refused_since_the_first_run_would_use_it_up(make):
    with pytest.raises(UnsupportedError) as caught:
        recompute(lambda a, it: a * sum(it), tensor([1.0]), make(tensor([1.0])))
    assert "argument 1 is an iterator, which the first run would use up. Pass a list." in str(
        caught.value
    )


def test_an_open_file_is_no_iterator_to_use_up(tmp_path):
    with (tmp_path / "log").open("w") as log:

        def region(a, log):
            log.write("called\n")
            return a * 2.0

        recompute(region, tensor([1.0]) * 1.0, log).sum().backward()
    assert (tmp_path / "log").read_text() == "called\n" * 2


def test_an_unregistered_object_without_gradients_passes():
    def scenario(run):
        x, mask = tensor([1.0]), tensor([2.0], grad=False)
        run(lambda a, b: a * b.x, x * 1.0, Unregistered(mask)).sum().backward()
        return values(x.grad)

    same(scenario, [2.0])
