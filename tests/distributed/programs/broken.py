"""What a test of the launching needs: a rank that raises, or that never ends."""

from __future__ import annotations

import sys
import time

import paddle.distributed as dist


if __name__ == "__main__":
    dist.init_parallel_env()
    print(f"rank {dist.get_rank()} was here", flush=True)
    if sys.argv[1] == "raises" and dist.get_rank() == 1:
        raise ValueError("of rank 1")
    if sys.argv[1] == "hangs":
        time.sleep(600)
