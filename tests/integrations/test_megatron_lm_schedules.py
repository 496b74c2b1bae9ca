"""Megatron-LM's schedules of joined rows, with stand-ins for them and for a script's forward step."""

import argparse

import pytest

from megatron_bfp.integrations.megatron_lm.pipelines import of_joined_rows

ARGUMENTS = {"model": "model", "seq_length": 128, "micro_batch_size": 4, "forward_only": False}


def schedule(*, forward_step_func, seq_length, micro_batch_size, **keywords):
    return forward_step_func, seq_length, micro_batch_size, keywords


def get_forward_backward_func(pp_size=None, vp_size=None, schedule_pg_collection=None):
    assert schedule_pg_collection == "collection"
    return schedule


def forward_step(data_iterator, model, return_schedule_plan=False):
    """As that of pretrain_gpt.py: a plan is asked for without boundaries."""
    batch = next(data_iterator)
    if return_schedule_plan:
        return model.build_schedule_plan(batch, labels=model.vp_stage), "loss"
    return model(batch, labels=model.vp_stage, packed_seq_params="boundaries"), "loss"


class Model:
    vp_stage = 3

    def __call__(self, *arguments, **keywords):
        return "output", arguments, keywords

    def build_schedule_plan(self, *arguments, **keywords):
        return "plan", arguments, keywords


def of_run(options):
    get = of_joined_rows(get_forward_backward_func, lambda: options)
    return get(schedule_pg_collection="collection")(forward_step_func=forward_step, **ARGUMENTS)


def test_a_run_of_others_is_left_alone():
    assert of_run(None) == (forward_step, 128, 4, {"model": "model", "forward_only": False})


@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_fault_B01_schedules_are_told_one_row_of_all_positions(monkeypatch, micro_batch_size):
    monkeypatch.setitem(ARGUMENTS, "micro_batch_size", micro_batch_size)
    _, *shape, keywords = of_run(argparse.Namespace())
    assert shape == [128 * micro_batch_size, 1] and keywords == {"model": "model", "forward_only": False}


def test_fault_A01_a_plan_is_of_the_ordinary_forward_call():
    step, *_ = of_run(argparse.Namespace())
    given = (("batch",), {"labels": 3, "packed_seq_params": "boundaries"})
    assert step(iter(["batch"]), Model()) == (("output", *given), "loss")
    assert step(iter(["batch"]), Model(), return_schedule_plan=True) == (("plan", *given), "loss")
    without = ("plan", ("batch",), {"labels": 3})  # the control: what Megatron-LM's own forward step plans
    assert forward_step(iter(["batch"]), Model(), return_schedule_plan=True) == (without, "loss")
