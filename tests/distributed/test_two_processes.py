"""Two processes on CPU and gloo, started with Paddle's launcher."""

from __future__ import annotations

import subprocess

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


@pytest.mark.parametrize(
    ("how", "seconds", "words"),
    [("raises", 60, "ValueError: of rank 1"), ("hangs", 15, "had not ended after 15 s")],
)
def test_a_rank_that_fails_or_hangs_is_ended_and_its_log_shown(tmp_path, how, seconds, words):
    with pytest.raises(pytest.fail.Exception) as caught:
        launch(tmp_path, "broken.py", how, seconds=seconds)
    assert words in str(caught.value)
    assert "--- workerlog.1" in str(caught.value)
    assert "rank 1 was here" in str(caught.value)
    running = subprocess.run(["ps", "-wweo", "args"], capture_output=True, text=True, check=True)
    assert f"broken.py {how}" not in running.stdout


def test_a_program_that_does_not_come_to_its_end_is_no_success(tmp_path):
    with pytest.raises(pytest.fail.Exception, match=r"broken.py ended with 0"):
        launch(tmp_path, "broken.py", "ends")
