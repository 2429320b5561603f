# SPDX-License-Identifier: Apache-2.0
"""How the processes of a training run start, and how they end on a mistake."""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (  # torch.distributed's, with types
    PrefixStore,
    Store,
    TCPStore,
)

_HEAD_START_S = 5  # far more than the local ranks start apart


def start_process_group(*, timeout_s: float) -> torch.device:
    """Join the ranks that ``torchrun`` started, or be the only one.

    Args:
        timeout_s: Seconds that a rank waits in a collective for another before it raises.

    Returns:
        This rank's device: its GPU, else the CPU with this rank's part of the cores.
    """
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        backend, device_id = "nccl", device
    else:
        device = torch.device("cpu")
        num_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(max(1, num_cores() // num_local_ranks))
        backend, device_id = "gloo", None
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, device_id=device_id, timeout=timeout, **_meeting(timeout))
    return device


def _meeting(timeout: timedelta) -> dict[str, Any]:
    """Return where the ranks find each other, as arguments of ``init_process_group``."""
    if "RANK" not in os.environ:
        return {"init_method": "tcp://127.0.0.1:0", "rank": 0, "world_size": 1}
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    # ``torchrun`` restarts the ranks, but keeps the store in which they left their addresses, and
    # torch 2.13 reads those of the dead: it cannot connect, or waits for ever. So each start gets
    # keys of its own. The count is the same everywhere as long as there is one machine; for more,
    # give torchrun TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, and it makes a new store at each start.
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store: Store = TCPStore(address, port, world_size, is_master=False, timeout=timeout)
    if os.environ["GROUP_WORLD_SIZE"] == "1":
        store = PrefixStore(f"start {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    return {"store": store, "rank": rank, "world_size": world_size}


def num_cores() -> int:
    """Count the cores that this process may use.

    Returns:
        At least 1.
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def exit_with(error: Exception) -> NoReturn:
    """End this process with code 2 and one line about the caller's mistake.

    All ranks find the same mistake. The first of each machine tells it; the others wait, because
    ``torchrun`` stops all of them as soon as one has ended.

    Args:
        error: Its text is the line.

    Raises:
        SystemExit: Always.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(_HEAD_START_S)
    else:
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr, flush=True)
    raise SystemExit(2)
