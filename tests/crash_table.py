"""What crashes the interpreter when a view or a leaf stands where a parameter does.

Every member of a parameter, and every function of Paddle's that takes tensors, is
called with each of the three in turn: as self, as an argument, in a list. Each call
runs in a forked process, many calls to one process while none of them kills it.
Collective calls are left out: they want a process group.

    python tests/crash_table.py          # writes tests/crashes/<version of Paddle>.json
    python tests/crash_table.py --all    # prints the outcome of every member as well
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import gc
import hashlib
import inspect
import itertools
import json
import os
import re
import resource
import signal
import sys
import tempfile
import warnings
from pathlib import Path

import attrs


CRASHES = Path(__file__).parent / "crashes"
KINDS = ("parameter", "view", "leaf")
FAILURES = ("raises", "crash", "hang")
# What tells an overrun of the heap when it happens, instead of some time later
# or never: a view is smaller than the tensor that Paddle takes it for. And what
# keeps Paddle's libraries from starting threads, which no fork survives.
ENVIRONMENT = {
    "PYTHONMALLOC": "debug",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OMP_THREAD_LIMIT": "1",
    "OMP_WAIT_POLICY": "passive",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "FLAGS_call_stack_level": "0",
}
SECONDS = 10
"""A call that takes longer is ended, and counts as one that hangs."""


@attrs.frozen
class Probe:
    """One call, as source text: `P` is the probed object, `x` another parameter.

    Attributes:
        member: What is called: `Tensor.add`, `paddle.concat`.
        role: How `P` takes part: as `self`, or as an `argument`.
        call: The call itself.
        tried: 0 if it is made whatever comes of the others, else how late it is
            tried on the parameter, while that has refused all before.
    """

    member: str
    role: str
    call: str
    tried: int = 0


# --- Which calls ---------------------------------------------------------------------

SELF_FIRST = [""]
SELF_NEXT = [
    "x", "1", "[1]", "'float32'", "0, 1", "0.5", "i", "x, 1", "x, x", "0, i, x", "[x, x]",
    "call", "paddle.CPUPlace()", "i, 1", "{}",
]  # fmt: skip
ARGUMENT_FIRST = ["P", "P, P", "x, P", "[P, P]", "[P, P], i", "x, [P, P]"]
ARGUMENT_NEXT = [
    "P, 1", "P, i", "i, P", "P, P, P", "0, i, P", "'ij,jk->ik', P, P", "call, P",
    "[P], [P], False",
]  # fmt: skip
KERNEL_ARGUMENT = ["P", "x, P", "[P, P]", "x, [P, P]", "x, x, [P, P]"]
KERNEL_REST = ", *ones"
MODULES = [
    "paddle",
    "paddle.linalg",
    "paddle.nn.functional",
    "paddle.incubate.nn.functional",
    "paddle.fft",
    "paddle.signal",
    "paddle.geometric",
    "paddle.autograd",
    "paddle.nn.utils",
    "core.eager",
]

# Not called, and why.
EXCLUDED = {
    # They change what every later call in the process meets.
    "core.eager.register_saved_tensors_hooks",
    "core.eager.ops.disable_check_model_nan_inf",
    "core.eager.ops.disable_check_model_nan_inf_grad",
    "core.eager.ops.enable_check_model_nan_inf",
    "core.eager.ops.enable_check_model_nan_inf_grad",
    "paddle.disable_signal_handler",
    "paddle.enable_static",
    # Takes any tensor for a SelectedRows: a parameter too crashes it, though not each time.
    "core.eager.ops.merge_selected_rows",
}


def probes():
    """Every call, in a fixed order."""
    from paddle.base.framework import EagerParamBase

    for name in sorted(dir(EagerParamBase)):
        yield from _of_member(name, inspect.getattr_static(EagerParamBase, name))
    for module in MODULES:
        for name in _functions(module):
            yield from _tries(f"{module}.{name}", "argument", ARGUMENT_FIRST, ARGUMENT_NEXT)
    for name in _functions("core.eager.ops"):
        forms = [form + KERNEL_REST for form in KERNEL_ARGUMENT]
        yield from _tries(f"core.eager.ops.{name}", "argument", forms, [])
    for name in _initializers():
        label = f"paddle.nn.initializer.{name}"
        yield Probe(label, "argument", f"{label}()(P)")


def _of_member(name, member):
    label = f"Tensor.{name}"
    if callable(member) or isinstance(member, (staticmethod, classmethod)):
        yield from _tries(label, "self", SELF_FIRST, SELF_NEXT, f"P.{name}")
        yield from _tries(label, "argument", ARGUMENT_FIRST, ARGUMENT_NEXT, f"x.{name}")
        return
    yield Probe(label, "self", f"P.{name}")
    for value in (f"P.{name}", "x", "1", "None"):
        yield Probe(label, "self", f"setattr(P, {name!r}, {value})")
    yield Probe(label, "self", f"delattr(P, {name!r})")
    yield Probe(label, "self", f"static({name!r}).__get__(P)")
    yield Probe(label, "self", f"static({name!r}).__set__(P, x)")
    for value in ("P", "[P]"):
        yield Probe(label, "argument", f"setattr(x, {name!r}, {value})")


def _tries(label, role, first, then, function=None):
    for tried, arguments in itertools.chain(((0, one) for one in first), enumerate(then, 1)):
        yield Probe(label, role, f"{function or label}({arguments})", tried)


def unbound(probe):
    """The same call of a method, taken from the class: `Parameter.add(P, x)`."""
    method, arguments = probe.call.removeprefix("P.").split("(", 1)
    comma = "" if arguments == ")" else ", "
    return attrs.evolve(probe, call=f"Parameter.{method}(P{comma}{arguments}", tried=0)


def _functions(module):
    """The functions of a module that are its own, or Paddle's at least."""
    space = eval(module, names())
    for name in sorted(vars(space)):
        member = getattr(space, name)
        paddles = (getattr(member, "__module__", None) or "paddle").startswith("paddle")
        ours = paddles and callable(member) and not inspect.isclass(member)
        if ours and not name.startswith("__") and f"{module}.{name}" not in EXCLUDED:
            yield name


def _initializers():
    import paddle

    return sorted(
        name for name, kind in vars(paddle.nn.initializer).items() if inspect.isclass(kind)
    )


# --- One call ------------------------------------------------------------------------


@functools.cache
def names():
    """The names that the text of every call may use."""
    import paddle
    from paddle.base import core
    from paddle.base.framework import EagerParamBase

    import paramproxy

    return {
        "paramproxy": paramproxy,
        "paddle": paddle,
        "core": core,
        "Parameter": EagerParamBase,
        "static": lambda name: inspect.getattr_static(EagerParamBase, name),
        "call": lambda *args, **kwargs: args[0] if args else None,
        "ones": (1,) * 16,
    }


class Outcomes:
    """Makes the objects that a call works on, makes the call, and says what came of it."""

    def __init__(self):
        import numpy as np
        import paddle
        from paddle.base.framework import EagerParamBase

        self.view = names()["paramproxy"].ParamView
        self.param = EagerParamBase([2, 2], "float32")
        self.param.set_value(np.array([[1.0, 2.0], [3.0, 4.0]], "float32"))
        self.index = paddle.to_tensor(np.array([1, 0]))
        self.tensor = paddle.Tensor
        self.paddle = paddle

    def probed(self, kind):
        """The object in question, and the parameter behind it."""
        param = copy.deepcopy(self.param)
        if kind == "parameter":
            return param, param
        view = self.view(param)
        return (view if kind == "view" else view.leaf), param

    def of(self, probe, kind):
        """The outcome of a call: a digest of its result, or `raises`."""
        self.paddle.seed(7)
        self.paddle.set_default_dtype("float32")
        self.paddle.set_grad_enabled("_(" not in probe.call)
        P, param = self.probed(kind)
        space = {**names(), "P": P, "x": copy.deepcopy(self.param), "i": self.index.clone()}
        try:
            result = eval(probe.call, space)
            said = f"{self.described(result)} {self.described(param)}"
            return hashlib.md5(said.encode()).hexdigest()
        except BaseException:
            return "raises"
        finally:
            self.paddle.disable_static()

    def described(self, result, depth=0):
        """A result as text, in which a parameter, its view and its leaf are alike."""
        if depth < 4 and isinstance(result, (list, tuple, set)):
            return f"{type(result)} {[self.described(item, depth + 1) for item in result]}"
        if depth < 4 and isinstance(result, dict):
            return self.described(list(result.items()), depth)
        if isinstance(result, self.tensor):
            tensor = getattr(result, "leaf", result)
            return f"tensor {tensor.shape} {tensor.dtype} {tensor.stop_gradient} {tensor.numpy()}"
        if callable(result):
            return "callable"
        return re.sub(r"0x[0-9a-f]+|P\w+ of .*?: ", "", f"{type(result)} {result!r}")


def _work(todo, kind, pipe):
    """In the forked process: make the calls, and announce each before it is made."""
    import paddle

    with contextlib.suppress(AttributeError):
        paddle.disable_signal_handler()  # its stack traces take longer than the calls
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    silence = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(silence, stream)
    outcomes = Outcomes()
    for index, probe in enumerate(todo):
        os.write(pipe, f"{index}\n".encode())
        signal.alarm(SECONDS)
        os.write(pipe, f"{index} {outcomes.of(probe, kind)}\n".encode())


def _forked(todo, kind):
    """Make the calls in a process of its own: the outcomes, and what ended it before the last."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            _work(todo, kind, writer)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        lines = [line.split() for line in pipe]
    _, status = os.waitpid(child, 0)
    done = {todo[int(line[0])]: line[1] for line in lines if len(line) == 2}
    hung = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM
    return done, "hang" if hung else "crash"


def _isolated(todo, kind):
    """What came of each call: many to one process, which ends with the one that crashes."""
    outcomes = {}
    for probe in filter(is_blind, todo):
        outcomes[probe] = _alone(probe, kind)
    todo = [probe for probe in todo if not is_blind(probe)]
    while todo:
        done, end = _forked(todo, kind)
        outcomes |= done
        if len(done) < len(todo):
            outcomes[todo[len(done)]] = end
        todo = todo[len(done) + 1 :]
    return outcomes


def _alone(probe, kind):
    """The outcome of a call that may leave the heap in disorder: for a view, the worst of ten."""
    for _ in range(10 if kind == "view" else 1):
        done, end = _forked([probe], kind)
        if not done:
            return end
    return done[probe]


def is_blind(probe):
    """Whether the call ends in one that writes through its argument without a look at it.

    What then happens depends on what lies there in memory.
    """
    return "_share_" in probe.member or ".initializer." in probe.member


# --- The table -----------------------------------------------------------------------


def probe_all():
    """The outcome of every call for each kind of object: `{kind: {probe: outcome}}`."""
    every = list(probes())
    gc.collect()
    gc.freeze()  # the processes are to share it, and not to search it
    mine = _tried_in_turn(every)
    made = [p for p, outcome in mine.items() if not p.tried or outcome not in FAILURES]
    methods = [p for p in made if p.call.startswith("P.") and "(" in p.call]
    free = _isolated([unbound(probe) for probe in methods], "parameter")
    mine |= free
    # What crashes a parameter says nothing of the others.
    made = [probe for probe in [*made, *free] if mine[probe] != "crash"]
    outcomes = {kind: _isolated(made, kind) for kind in KINDS[1:]}
    for probe, outcome in outcomes["leaf"].items():
        # What an earlier call has changed in its process may have been the cause.
        if outcome == "raises" and mine[probe] not in FAILURES:
            outcomes["leaf"][probe] = _alone(probe, "leaf")
    suspects = {p for of_kind in outcomes.values() for p, o in of_kind.items() if o == "crash"}
    for probe in suspects:
        mine[probe] = _alone(probe, "parameter")
        if mine[probe] == "crash":  # now and then: not the view's or the leaf's doing
            for of_kind in outcomes.values():
                of_kind.pop(probe, None)
    return {"parameter": mine, **outcomes}


def _tried_in_turn(every):
    """The outcomes for a parameter, of as many calls as it takes to find one it accepts."""
    outcomes = {}
    for tried, todo in itertools.groupby(sorted(every, key=_turn), key=_turn):
        accepted = {
            (p.member, p.role) for p, outcome in outcomes.items() if outcome not in FAILURES
        }
        wanted = [p for p in todo if not tried or (p.member, p.role) not in accepted]
        outcomes |= _isolated(wanted, "parameter")
    return outcomes


def _turn(probe):
    return probe.tried


def crashes(outcomes):
    """The calls that crash: `{kind: {role: {member: [call]}}}`.

    Those of a parameter as well, whose crashes are left out of the others'.
    """
    table = {kind: {"self": {}, "argument": {}} for kind in KINDS}
    for kind, of_kind in outcomes.items():
        for probe, outcome in of_kind.items():
            if outcome in ("crash", "hang"):
                table[kind][probe.role].setdefault(probe.member, []).append(probe.call)
    return table


def summary(outcomes):
    """One word for each member, role and kind: `same`, `differs`, `raises` or `crash`.

    That of the first call which the parameter accepts, unless another one crashes.
    """
    mine, table = outcomes["parameter"], {}
    for kind, of_kind in outcomes.items():
        for probe, outcome in of_kind.items():
            words = table.setdefault((probe.member, probe.role), dict.fromkeys(KINDS, ""))
            if outcome in ("crash", "hang"):
                words[kind] = outcome
            elif mine[probe] not in FAILURES and not words[kind]:
                same = "same" if outcome == mine[probe] else "differs"
                words[kind] = outcome if outcome in FAILURES else same
    return {key: {k: w or "raises" for k, w in words.items()} for key, words in table.items()}


def path_of(version):
    return CRASHES / f"{version}.json"


def main(arguments):
    import paddle

    names()
    place = Path.cwd()
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)  # some of the calls write files
        outcomes = probe_all()
        os.chdir(place)
    found = crashes(outcomes)
    if "--to" in arguments:
        Path(arguments[-1]).write_text(json.dumps(found))
        return
    table = summary(outcomes)
    if "--all" in arguments:
        for (member, role), words in table.items():
            print(f"{member:50} {role:9}", *(f"{kind}: {words[kind]:8}" for kind in KINDS))
    for kind in KINDS:
        print(kind, dict(collections.Counter(words[kind] for words in table.values())))
    path = path_of(paddle.__version__)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        command = [sys.executable, *sys.argv]
        os.execve(sys.executable, command, {**os.environ, **ENVIRONMENT})
    warnings.simplefilter("ignore")
    main(sys.argv[1:])
