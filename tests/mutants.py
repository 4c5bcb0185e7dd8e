"""Whether the suite would notice: it is run on mutants of the package, and has to fail.

    python tests/mutants.py            all of them
    python tests/mutants.py streams    those with this in their names

Each mutant leaves out, or does wrongly, one thing that the package is there for.
The file is a pytest plugin as well, which makes the mutant named in `MUTANT`.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import attrs


ROOT = Path(__file__).parent.parent
MUTANTS = {}


def mutant(name, first):
    """Register a mutant; `first` is the part of the suite that ought to notice."""

    def register(make):
        MUTANTS[name] = make, f"tests/test_{first}.py"
        return make

    return register


def replace(old, new):
    """Put `new` wherever the package has `old` under a name of a module."""
    found = False
    for module in [m for n, m in list(sys.modules.items()) if n.partition(".")[0] == "paramproxy"]:
        for name, value in list(vars(module).items()):
            if value is old:
                setattr(module, name, new)
                found = True
    assert found, old


def nothing(*args, **kwargs):
    return None


@mutant("recompute is a plain call", "calls")
def _():
    from paramproxy import _recompute
    from paramproxy._call import Call

    def plain(function, args, kwargs, options, placement=None):
        call = Call.of(args, kwargs)
        return function(*call.args, **call.kwargs)

    replace(_recompute.recompute_call, plain)


@mutant("everything is kept, nothing recomputed", "memory")
def _():
    import paramproxy
    from paramproxy import _recompute

    own = _recompute.recompute_call

    def keeping(function, args, kwargs, options, placement=None):
        options = attrs.evolve(options, policy=paramproxy.save_everything)
        return own(function, args, kwargs, options, placement)

    replace(own, keeping)


@mutant("keep recomputes", "keep")
def _():
    from paramproxy import _keep

    replace(_keep.keep, lambda function, /, *args, **kwargs: function(*args, **kwargs))


@mutant("policies are ignored", "policy")
def _():
    from paramproxy._hooked import Recording

    Recording._ask_policy = nothing


@mutant("random streams are not restored", "ambient")
def _():
    from paramproxy._ambient import RandomState

    RandomState.restore = nothing


@mutant("numpy's and Python's streams are not restored", "ambient")
def _():
    from paramproxy._ambient import RandomState

    RandomState._restore_others = nothing


@mutant("a random stream moves on in the replay", "ambient")
def _():
    from paramproxy import _ambient

    def put_back(self, stack):
        own(attrs.evolve(self, random=None), stack)
        if self.random is not None:
            self.random.restore()

    own = _ambient.Ambient.put_back
    _ambient.Ambient.put_back = put_back


@mutant("the AMP state is not restored", "ambient")
def _():
    from paramproxy._ambient import AmpState

    AmpState.restore = nothing


@mutant("AMP's final hooks are not armed again", "ambient")
def _():
    from paramproxy import _ambient

    replace(_ambient.arm_final_hooks, nothing)


@mutant("leaves are copies", "leaf")
def _():
    from paramproxy import _leaf

    own = _leaf.make_leaf

    def copying(param, handover):
        leaf = own(param, handover)
        _leaf.Tensor._set_impl(leaf, param.clone().detach())
        return leaf

    replace(own, copying)


@mutant("leaves are cut off from their parameters", "parameters")
def _():
    from paramproxy import _leaf

    def detached(param, handover):
        leaf = param.detach()
        leaf.stop_gradient = param.stop_gradient
        return leaf

    replace(_leaf.make_leaf, detached)


@mutant("gradients of leaves are lost", "parameters")
def _():
    from paramproxy import _leaf

    replace(_leaf.leaf_gradient, nothing)


@mutant("captured parameters are not set aside", "aside")
def _():
    from paramproxy._region import Region

    Region.find_own_parameters = lambda self: []


@mutant("all captured parameters are set aside, used or not", "aside")
def _():
    from paramproxy._region import Region

    def all_of_them(self):
        self.own_parameters = [weight.parameter for weight in self.weights]
        return self.own_parameters

    Region.find_own_parameters = all_of_them


@mutant("no early stop", "early_stop")
def _():
    from paramproxy import _settings

    replace(_settings.early_stop, lambda: False)


@mutant("what is changed in place is not noticed", "mutation")
def _():
    from paramproxy._operand import Operand

    Operand.was_changed = lambda self, tensor: False


@mutant("other outputs are not noticed", "errors")
def _():
    from paramproxy._region import Region

    Region._refuse_other_outputs = nothing


@mutant("other saved tensors are not noticed", "mismatch")
def _():
    from paramproxy._mismatch import Comparison

    Comparison.compare = lambda self, index, tensor: True
    Comparison.finish = nothing


@mutant("buffers are not put back", "buffers")
def _():
    from paramproxy._buffers import Buffers

    Buffers.put_back = nothing


@mutant("objects are not put back", "objects")
def _():
    from paramproxy._objects import Objects

    Objects.put_back = nothing


@mutant("flags are not put back", "captured")
def _():
    from paramproxy import _captured

    replace(_captured.put_flag_back, nothing)


@mutant("closure cells are not put back", "captured")
def _():
    from paramproxy._rebind import Rebinder

    Rebinder.rebind = lambda self, value: value


@mutant("hooks are registered again", "parameters")
def _():
    from paramproxy import _hooks

    replace(_hooks.hooks_registered_once, lambda tensors: contextlib.nullcontext())


@mutant("is_recomputing says no", "checkpoint")
def _():
    from paramproxy import _settings

    replace(_settings.is_recomputing, lambda: False)


@mutant("offloading does nothing", "offload")
def _():
    from paramproxy._placement import Placement

    Placement.put = lambda self, index, tensor: (tensor, None)


@mutant("a caller's own hooks see nothing of a region", "saved_tensor_hooks")
def _():
    from paramproxy import _hooked

    replace(_hooked._hooks_around, nothing)


@mutant("a region never lets go of what it kept", "letting_go")
def _():
    from paramproxy._hooked import Recording

    Recording._release_if_done = nothing


@mutant("a view has attributes of its own", "view")
def _():
    from paramproxy import ParamView

    ParamView.__setattr__ = object.__setattr__


def pytest_configure(config):
    import paramproxy  # noqa: F401

    make, _ = MUTANTS[os.environ["MUTANT"]]
    make()


# They look for crashes, leaks and what is left behind, and take the longest.
SLOW = ("test_crash_table.py", "test_faults.py", "test_leaks.py", "test_threads.py")


def run(*args, **environment):
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", *args]
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **environment, "PYTHONPATH": path}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def survives(name):
    """Whether the suite passes on a mutant; and the first test that does not."""
    _, first = MUTANTS[name]
    result = run("-p", "mutants", first, MUTANT=name)
    if result.returncode == 0:
        others = (f"--ignore=tests/{slow}" for slow in SLOW)
        result = run("-p", "mutants", *others, MUTANT=name)
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", result.stdout, re.MULTILINE)
    if result.returncode == 1 and failed:
        # Only a test that passes without it says anything.
        return run(failed[0]).returncode != 0, failed[0]
    if result.returncode < 0:
        return False, f"signal {-result.returncode}"
    return True, (result.stdout or result.stderr)[-300:]


def main(words):
    survivors = []
    for name in MUTANTS:
        if words and not any(word in name for word in words):
            continue
        start = time.time()
        survived, where = survives(name)
        if survived:
            survivors.append(name)
        verdict = "SURVIVED" if survived else "killed"
        print(f"{verdict:8}  {time.time() - start:4.0f} s  {name}: {where}", flush=True)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
