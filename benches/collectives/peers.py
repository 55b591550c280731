"""gloo's side of the comparison, through torch.distributed: the sizes, samples and output of peers.c.

    python peers.py RANKS

Starts the ranks itself, one thread each, bound to a core while there is one for each. gloo has no in-place form of all_gather and
reduce_scatter in this interface, and its transport between processes of one host is TCP over the loopback device.
"""

import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SIZES = [(1 << 10, 100, 20), (1 << 20, 50, 2), (64 << 20, 9, 1)]


def measure(run, samples, burst):
    for _ in range(samples // 10 + 2):
        run()
    dist.barrier()
    times = []
    for _ in range(samples):
        begun = time.perf_counter()
        for _ in range(burst):
            run()
        times.append((time.perf_counter() - begun) * 1e6 / burst)
    slowest = torch.tensor([statistics.median(times)])
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def rank_main(rank, ranks):
    cores = sorted(os.sched_getaffinity(0))
    if ranks <= len(cores):
        os.sched_setaffinity(0, {cores[rank]})
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29533", GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    for size, samples, burst in SIZES:
        whole, part = torch.zeros(size // 4), torch.zeros(size // 4 // ranks)
        operations = {
            "all_reduce": lambda: dist.all_reduce(whole),
            "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        }
        for name, run in operations.items():
            try:
                us = measure(run, samples, burst)
            except (RuntimeError, ValueError) as error:
                if rank == 0:
                    print(f"gloo {name}: not run: {error}", file=sys.stderr)
                continue
            if rank == 0:
                print(f"gloo {name} {size} {us:.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    mp.spawn(rank_main, args=(ranks,), nprocs=ranks)
