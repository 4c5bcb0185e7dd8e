"""Two processes on CPU and gloo, started with Paddle's launcher."""

from __future__ import annotations

import pytest
from launching import launch


@pytest.mark.parametrize(
    "program", ["data_parallel.py", "tensor_parallel.py", "hybrid.py", "sharding.py"]
)
def test_it_trains_as_one_process_on_the_whole_batch(tmp_path, program):
    launch(tmp_path, program)


def test_a_pipeline_of_a_client_that_is_patched_by_the_environment(tmp_path):
    launch(tmp_path, "pipeline.py", PARAMPROXY_PATCH="1")


def test_the_launcher_itself_run_with_the_patch(tmp_path):
    launch(tmp_path, "pipeline.py", starter=("-m", "paramproxy", "run"))
