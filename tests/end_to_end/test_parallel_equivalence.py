"""The equivalence table's rows of several processes: tensor parallelism, and ZeRO 1 to 3 over two replicas."""

import os

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core.models.gpt")
pytest.importorskip("deepspeed")

from helpers import equivalence
from helpers.datasets import documents_of
from helpers.megatron_helpers import initialize_megatron
from torch import distributed

from megatron_bfp.megatron_core.attention import document_boundaries

SEQ_LENGTH, VOCAB_SIZE, RANKS = 64, 512, 2


@pytest.fixture
def prefix(write_dataset):
    return write_dataset(documents_of([37, 1, 20, 64 + 11, 40, 9, 13, 30, 17, 8, 26, 5, 50])).prefix


def tensor_parallel_rank(rank, store, prefix):
    """Each rank compares its part of logits and gradients."""
    initialize_megatron(rank, RANKS, store, tensor_parallel=RANKS)
    for heads in ("MHA", "GQA"):
        case = equivalence.Case("sdpa", "fp32", heads, f"tensor parallel {RANKS}, rank {rank}")
        equivalence.check(case, prefix, "cpu", SEQ_LENGTH, VOCAB_SIZE, tensor_model_parallel_size=RANKS)


def zero_rank(rank, store, prefix, stage):
    """Each rank trains on half of the rows; the summed gradients are compared with those of all chunks alone."""
    import deepspeed

    os.environ["LOCAL_RANK"] = str(rank)  # the launcher would set it
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    initialize_megatron(rank, RANKS, store)
    for heads in ("MHA", "GQA"):
        case = equivalence.Case("sdpa", "fp32", heads, "micro-batch 2")
        batch = equivalence.make_batch(prefix, 2 * RANKS, SEQ_LENGTH)
        alone = equivalence.run_alone(equivalence.make_model(case, SEQ_LENGTH, VOCAB_SIZE, "cpu"), batch)
        errors = equivalence.differences(zero_gradients(case, batch, rank, stage, alone), alone)
        crossing = equivalence.without_boundaries(batch)
        wrong = equivalence.differences(zero_gradients(case, crossing, rank, stage, alone), alone)
        if rank == 0:
            equivalence.check_errors(case._replace(path=f"ZeRO {stage}, {RANKS} replicas"), errors, wrong)


def zero_gradients(case, batch, rank, stage, alone):
    """Gradients summed over the replicas, and the loss; the logits are left as they are alone."""
    import deepspeed

    model = equivalence.make_model(case, SEQ_LENGTH, VOCAB_SIZE, "cpu")
    config = {
        "train_batch_size": 2 * RANKS,
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
    }
    engine = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)[0]
    mine = {name: tensor[2 * rank : 2 * rank + 2] for name, tensor in batch.items()}
    losses = engine(
        mine["tokens"],
        mine["position_ids"],
        None,
        labels=mine["labels"],
        packed_seq_params=document_boundaries(mine["cu_seqlens"]),
    )
    loss = (losses * mine["loss_mask"]).sum()
    engine.backward(loss)
    gradients = {
        name: RANKS * deepspeed.utils.safe_get_full_grad(parameter) for name, parameter in model.named_parameters()
    }
    total = loss.detach().clone()
    distributed.all_reduce(total)
    return equivalence.Outputs(alone.logits, total.item(), gradients)


def test_tensor_parallel(prefix, tmp_path):
    torch.multiprocessing.spawn(tensor_parallel_rank, (str(tmp_path / "store"), prefix), nprocs=RANKS)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3])
def test_zero(prefix, tmp_path, stage):
    torch.multiprocessing.spawn(zero_rank, (str(tmp_path / "store"), prefix, stage), nprocs=RANKS)
