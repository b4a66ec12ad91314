"""The twin of methods that keep everything and select: what a step did not attend to, by Hugging Face's attention."""

from __future__ import annotations

import pytest
import torch
from test_diagnose_log import case_of, command, job, run_job  # noqa: F401
from test_diagnose_twin import losses
from tiny import stock

from kvexp.evictions.eviction_files import TWIN, read_example_log, read_table
from kvexp.generate.prefilled_context import decode_step
from kvexp.record import runs
from kvexp.retrieval import Oracle, Quest, SparQ


@pytest.mark.parametrize("method", [Oracle(), Quest(page=4), SparQ(r=6)], ids=lambda method: method.name)
def test_what_is_lost_is_what_a_step_did_not_attend_to(method):
    case = case_of("llama", method)
    frame, answer, _ = losses(case)
    ids = [*case.prompt, *answer]
    with torch.no_grad():
        whole = stock("llama")(torch.tensor([ids]), output_attentions=True)
    context = case.prefill_prompt()
    for step, token in enumerate(answer[:-1]):
        at = torch.tensor([[len(case.prompt) + step]])
        with torch.no_grad():
            decode_step(case.model, torch.full_like(at, token), at, context.cache)
        for layer in range(2):
            weights = whole.attentions[layer][0, :, int(at), : int(at) + 1]  # [H * G, S]
            chosen = context.cache.layer_states[layer].kept_positions()[0]
            per_head = torch.tensor(
                [1 - float(weights[q, chosen[q * len(chosen) // len(weights)]].sum()) for q in range(15)]
            )
            mine = frame[(frame.step == step + 1) & (frame.layer == layer)].sort_values("head")
            torch.testing.assert_close(
                torch.tensor(mine.lost.to_numpy()), per_head.view(3, 5).mean(1), atol=3e-5, rtol=1e-4
            )
            assert (mine.kept <= 12).all() and (mine.lost > 0).any()


def test_an_oracle_overlaps_with_the_ideal_set_and_a_run_gets_its_twin(tmp_path, command):  # noqa: F811
    run_job(job(tmp_path, "method=oracle", "diagnose=twin", limit=2))
    assert not command.failures
    run = next(run for run in runs(tmp_path) if run.labels["method"] == "oracle")
    for row in run.rows():
        frame, told = read_table(run, row["example"], TWIN), read_example_log(run, row["example"])
        assert told.same and len(frame) and frame.lost.ge(frame.lost_ideal - 1e-6).all()
        assert frame.overlap.mean() > 0.5 and set(frame["head"]) == set(range(told.heads[0]))
