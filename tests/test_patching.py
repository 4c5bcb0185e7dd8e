"""`patch`: in Paddle's place, for whoever holds Paddle's functions, however they got them."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import threading

import paddle
import pytest
from paddle.distributed import fleet
from support import FusedLinear, param, run_command, tensor, values

import paramproxy
from paramproxy import ParamLeaf, UnsupportedError, patch, patching, unpatch, unwrap


MODULE = (
    importlib.import_module("paddle.distributed.fleet.recompute")
    and sys.modules["paddle.distributed.fleet.recompute.recompute"]
)
HYBRID = sys.modules["paddle.distributed.fleet.recompute.recompute_hybrid"]
UTILS = sys.modules["paddle.distributed.fleet.utils"]
INCUBATE = importlib.import_module("paddle.incubate.distributed.fleet")

held = MODULE.recompute
ORIGINAL = held.__code__
partial = functools.partial(held, preserve_rng_state=False)


def closure():
    function = MODULE.recompute

    def call(*args, **kwargs):
        return function(*args, **kwargs)

    return call


def default(*args, function=held, **kwargs):
    return function(*args, **kwargs)


enclosed = closure()


class Client:
    recompute = staticmethod(held)


CLIENTS = {
    "fleet.utils": lambda: UTILS.recompute,
    "fleet.recompute": lambda: fleet.recompute.recompute,
    "fleet.recompute.recompute": lambda: MODULE.recompute,
    "imported before": lambda: held,
    "a partial": lambda: partial,
    "a closure": lambda: enclosed,
    "a default": lambda: default,
    "a static method": lambda: Client.recompute,
}


@pytest.fixture(autouse=True)
def _unpatched():
    yield
    unpatch()


def main_grad(run):
    """What a fused backward leaves in the main_grad of a weight argument: [[2.0]] is right."""
    x, w = tensor([[2.0]]), param([[3.0]])
    w.main_grad = paddle.zeros([1, 1])
    run(lambda x, w: FusedLinear.apply(x, w), x * 1.0, w).sum().backward()
    return values(w.main_grad)


@pytest.mark.parametrize("client", CLIENTS)
def test_every_client_gets_it(client):
    patch()
    assert main_grad(CLIENTS[client]()) == [[2.0]]
    unpatch()
    assert main_grad(CLIENTS[client]()) != [[2.0]]


@pytest.mark.parametrize("mode", [True, False])
def test_both_modes(mode):
    with patch():
        assert main_grad(functools.partial(held, use_reentrant=mode)) == [[2.0]]


def test_recompute_sequential_for_those_who_hold_it():
    theirs = INCUBATE.recompute_sequential
    layers = paddle.nn.Sequential(*(paddle.nn.Linear(2, 2) for _ in range(4)))
    x = tensor([[1.0, 2.0]])
    with patch():
        assert values(theirs({"segments": 3}, layers, x)) == values(layers(x))
    assert theirs is INCUBATE.recompute_sequential
    with pytest.raises(Exception):  # noqa: B017, PT011
        theirs({"segments": 3}, layers, tensor([[1.0, 2.0]] * 3))


def test_recompute_hybrid_for_those_who_hold_it():
    group = type("Group", (), {"nranks": 1, "rank": 0})()
    with patch():
        got = main_grad(functools.partial(INCUBATE.recompute_hybrid, {"mp_group": group}))
    assert got == [[2.0]]
    with pytest.raises(AssertionError):  # Paddle's refuses CPU
        INCUBATE.recompute_hybrid({"mp_group": group}, paddle.exp, tensor([1.0]))


@pytest.mark.parametrize(
    ("module", "name"),
    [(MODULE, "_varbase_help"), (MODULE, "detach_variable"), (HYBRID, "detach_variable")],
)
def test_the_makers_of_leaves(module, name):
    make = getattr(module, name)
    w = param([1.0])
    w.lock = threading.Lock()  # what no copy can be made of
    with patch():
        made = make(w) if name == "_varbase_help" else make((w,))[0]
    assert isinstance(made, ParamLeaf)
    assert unwrap(made) is w
    assert made.lock is w.lock


def test_other_keywords_are_the_functions_own():
    """`debug`, `policy`: options of ours, not of Paddle's."""

    def block(x, *, debug, policy, preserve_buffers=True):
        return x * debug * policy

    x = tensor([2.0])
    with patch():
        y = held(block, x * 1.0, debug=3.0, policy=5.0, preserve_rng_state=False)
    y.backward()
    assert values(x.grad) == [15.0]


def test_the_function_may_be_given_by_its_keyword():
    with patch():
        assert values(held(function=lambda: tensor([2.0]))) == [2.0]


@pytest.mark.parametrize("indices", [None, [], (0,), [1]])
def test_offload_indices_as_paddle_takes_them(indices):
    x = tensor([2.0])
    with patch():
        held(lambda a, b: a * b, x * 1.0, b=3.0, offload_indices=indices).backward()
    assert values(x.grad) == [3.0]


def test_signature_name_and_text_stay():
    def seen():
        return [
            (inspect.signature(function), function.__name__, function.__doc__, function.__module__)
            for function in (held, INCUBATE.recompute_sequential, INCUBATE.recompute_hybrid)
        ]

    before = [(str(signature).split(" ->")[0], *rest) for signature, *rest in seen()]
    with patch():
        after = [(str(signature).split(" ->")[0], *rest) for signature, *rest in seen()]
    assert after == before


def everything():
    """All that a patch could have touched."""
    functions = [f for m in (MODULE, HYBRID) for f in vars(m).values() if inspect.isfunction(f)]
    modules = [dict(vars(m)) for m in (MODULE, HYBRID, UTILS, INCUBATE, fleet.recompute)]
    return [(f, f.__code__, f.__defaults__, f.__kwdefaults__) for f in functions], modules


def test_unpatch_puts_everything_back_exactly():
    before = everything()
    patch()
    assert everything() != before
    unpatch()
    assert everything() == before


def test_twice_is_once():
    before = everything()
    patch()
    patched = everything()
    patch()
    assert everything() == patched
    unpatch()
    assert everything() == before
    unpatch()
    assert everything() == before


def test_leaving_a_block_takes_out_what_its_own_call_put_in():
    with patch():
        with patch():
            assert patching.is_patched()
        assert patching.is_patched()
    assert not patching.is_patched()
    patch()
    with patch():
        pass
    assert patching.is_patched()


def test_a_block_that_raises_takes_it_out():
    with pytest.raises(KeyError), patch():
        raise KeyError
    assert not patching.is_patched()


def test_a_block_is_given_what_patch_returns():
    with paramproxy.patch() as patched:
        assert patched.is_first
        with paramproxy.patch() as again:
            assert not again.is_first


def test_what_somebody_else_has_put_there_is_not_overwritten(monkeypatch):
    monkeypatch.setattr(MODULE, "detach_variable", lambda inputs: inputs)
    with pytest.raises(UnsupportedError, match="detach_variable: something else is in its place"):
        patch()
    assert not patching.is_patched()
    assert held.__code__ is ORIGINAL


def test_code_that_somebody_else_has_exchanged_since_is_left_alone():
    patch()
    theirs = held.__code__
    held.__code__ = (lambda function, *args, **kwargs: "mine").__code__
    with pytest.raises(UnsupportedError, match="Cannot unpatch recompute: something else has"):
        unpatch()
    assert held(None) == "mine"
    assert not patching.is_patched()
    original = everything()
    held.__code__ = theirs
    assert everything() != original
    # Put Paddle's own back for the tests that follow.
    held.__code__ = ORIGINAL


def test_regions_of_before_and_after_meet_in_one_graph():
    x, w = tensor([[2.0]]), param([[3.0]])
    y = held(lambda x, w: paddle.matmul(x, w), x * 1.0, w)
    with patch():
        z = held(lambda y, w: paddle.matmul(y, w), y, w)
    z.backward()
    assert (values(x.grad), values(w.grad)) == ([[9.0]], [[12.0]])


def test_a_region_replays_after_unpatch():
    with patch():
        x, w = tensor([[2.0]]), param([[3.0]])
        w.main_grad = paddle.zeros([1, 1])
        y = held(lambda x, w: FusedLinear.apply(x, w), x * 1.0, w)
    y.sum().backward()
    assert values(w.main_grad) == [[2.0]]


def test_threads_that_patch_at_once():
    before = everything()
    results = []

    def work():
        with patch():
            results.append(main_grad(held))

    threads = [threading.Thread(target=patch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert patching.is_patched()
    work()
    assert results == [[[2.0]]]
    unpatch()
    assert everything() == before


def test_ours_is_the_same_with_the_patch_in():
    """Nothing of ours calls what is patched."""
    with patch():
        assert main_grad(paramproxy.recompute) == [[2.0]]
        assert main_grad(functools.partial(paramproxy.recompute, use_reentrant=False)) == [[2.0]]


# From outside: a program that knows nothing of paramproxy.

PROGRAM = """
import sys
import paddle
from paddle.distributed.fleet.utils import recompute

w = paddle.create_parameter([2], "float32")
w.tag = "mine"
tags = []

def block(x, w):
    tags.append(getattr(w, "tag", None))
    return x * w

x = paddle.ones([2])
x.stop_gradient = False
recompute(block, x * 1.0, w).sum().backward()
print("tags", tags, sys.argv[1:], __name__)
"""
RIGHT = "tags ['mine', 'mine']"


def test_run_a_script(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(PROGRAM + "import beside\nprint(beside.value)\n")
    (tmp_path / "beside.py").write_text("value = 'beside'\n")
    command = ["-m", "paramproxy", "run", str(script), "--lr", "1", "-m", "x"]
    process = run_command(*command)
    assert process.returncode == 0, process.stderr
    assert f"{RIGHT} ['--lr', '1', '-m', 'x'] __main__" in process.stdout
    assert "beside" in process.stdout


def test_run_a_module(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    process = run_command("-m", "paramproxy", "run", "-m", "train", "--lr", "1", cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert f"{RIGHT} ['--lr', '1'] __main__" in process.stdout


def test_run_ends_with_the_code_of_the_program(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import sys\nsys.exit(7)\n")
    assert run_command("-m", "paramproxy", "run", str(script)).returncode == 7


def test_run_reaches_the_processes_that_the_program_starts(tmp_path):
    (tmp_path / "worker.py").write_text(PROGRAM)
    script = tmp_path / "train.py"
    script.write_text("import subprocess, sys\nsubprocess.run([sys.executable, 'worker.py'])\n")
    process = run_command("-m", "paramproxy", "run", str(script), cwd=tmp_path)
    assert RIGHT in process.stdout, process.stderr


@pytest.mark.parametrize("arguments", [["run"], ["run", "-m"], ["walk"]])
def test_run_says_what_it_wants(arguments):
    process = run_command("-m", "paramproxy", *arguments)
    assert process.returncode == 2
    assert "usage: python -m paramproxy" in process.stderr


def test_run_names_a_script_that_is_not_there():
    process = run_command("-m", "paramproxy", "run", "nowhere.py")
    assert process.returncode == 2
    assert "Cannot run 'nowhere.py': there is no such file" in process.stderr


@pytest.mark.parametrize(
    ("value", "expected"),
    [("1", True), ("true", True), ("0", False), ("", False), ("off", False), (None, False)],
)
def test_the_environment_variable(tmp_path, value, expected):
    """Set, it works in every Python that paramproxy is installed for."""
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    process = run_command(str(script), PARAMPROXY_PATCH=value)
    assert process.returncode == 0, process.stderr
    assert (RIGHT in process.stdout) is expected


def test_the_environment_variable_costs_a_program_without_paddle_nothing():
    process = run_command("-c", "import sys; print('paddle' in sys.modules)", PARAMPROXY_PATCH="1")
    assert process.stdout.strip() == "False"


def test_the_doctor_looks_at_paddles_own_with_the_variable_set():
    code = "from paramproxy import _doctor; _doctor.work('Paddle reentrant', 3)"
    process = run_command("-W", "ignore", "-c", code, PARAMPROXY_PATCH="1")
    assert process.stdout.count("got") == 2
    assert "True, True" not in process.stdout
