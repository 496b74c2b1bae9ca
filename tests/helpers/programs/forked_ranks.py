"""Run a function as several ranks, forks of one process that has imported what they need."""

import multiprocessing
import sys


def run_forked(run_rank, num_ranks, folder):
    """Call ``run_rank(rank, num_ranks, folder)`` as each rank, and end with the status of one that failed."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run_rank, args=(rank, num_ranks, folder)) for rank in range(num_ranks)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    sys.exit(max(abs(rank.exitcode) for rank in ranks))
