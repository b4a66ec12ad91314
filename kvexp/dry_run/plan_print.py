"""A plan in words: the runs, what each model and task takes, and the whole."""

from __future__ import annotations

from kvexp.config.settings import Settings
from kvexp.dry_run import cost
from kvexp.dry_run.planned_runs import PlannedGroup, total_seconds
from kvexp.dry_run.workload import model_config, model_shape
from kvexp.sweep.job_progress import duration
from kvexp.terminal import say

LISTED = 40  # runs shown one by one; more are told in groups


def print_plan(planned: list[PlannedGroup], jobs: int) -> None:
    """The plan of so many jobs, on stdout."""
    runs = [run for group in planned for run in group.runs]
    if not runs:
        return
    full = sum(run.settings.is_baseline for run in runs)
    say(f"plan: {jobs} job(s), {len(runs)} runs with {full} full-attention baseline(s) among them; nothing is run")
    if len(runs) <= LISTED:
        for run in runs:
            rows = f"{run.total - run.left:>6}/{run.total} rows" if not run.settings.divergence.only else ""
            texts = f", {run.texts} texts to force" if run.texts else ""
            say(f"  {run.state:6} {rows}  {name_of(run.settings)}{texts}")
    by_part: dict[str, list[PlannedGroup]] = {}
    for group in planned:
        by_part.setdefault(_title(group.runs[0].settings), []).append(group)
    for part in by_part.values():
        _show_part(part)
    for spec in dict.fromkeys(group.runs[0].settings.model for group in planned):
        _show_model(next(group for group in planned if group.runs[0].settings.model == spec))
    for basis in dict.fromkeys(group.basis for group in planned):
        say(f"time: {basis}")
    states = [run.state for run in runs]
    prompt, new = sum(group.prompt_tokens for group in planned), sum(group.new_tokens for group in planned)
    say(
        f"total: {states.count('done')} done, {states.count('partly')} partly, {states.count('to do')} to do; "
        f"{cost.tokens(prompt)} prompt tokens, at most {cost.tokens(new)} new tokens, "
        f"about {_time(planned, total_seconds(planned))}"
    )


def _show_part(groups: list[PlannedGroup]) -> None:
    """The groups of one model and task."""
    lead = groups[0].runs[0]
    runs = [run for group in groups for run in group.runs]
    sharing = f", prefills shared by {max(len(group.runs) for group in groups)}" if len(groups) < len(runs) else ""
    memory = "memory not known"
    if (shape := groups[0].shape) is not None:
        weights = shape.weight_bytes(lead.settings.model.dtype)
        each = ([run.settings for run in group.runs] for group in groups)
        kv = max(cost.kv_bytes(shape, settings, lead.work.prompt_tokens) for settings in each)
        memory = f"weights {cost.gigabytes(weights)} + KV {cost.gigabytes(kv)}"
        if peaks := [group.peak.total for group in groups if group.peak is not None]:
            memory += f", peak about {cost.gigabytes(max(peaks))}"
    prompts, new = sum(group.prefills for group in groups), sum(group.new_tokens for group in groups)
    texts = sum(group.texts for group in groups)
    say(
        f"{_title(lead.settings)}: {len(runs)} runs{sharing}; {prompts} prefills of {lead.work.prompt_tokens:.0f} "
        f"tokens ({lead.work.source}), {cost.tokens(new)} new tokens{f', {texts} texts forced' if texts else ''}; "
        f"{memory}; about {_time(groups)}"
    )


def _time(groups: list[PlannedGroup], seconds: float | None = None) -> str:
    """Of these groups in words; seconds: None for their sum."""
    known = [group.seconds for group in groups if group.seconds is not None]
    more = "" if len(known) == len(groups) else " and what is not known"
    return duration(sum(known) if seconds is None else seconds) + more


def _title(settings: Settings) -> str:
    return f"{settings.labels['model']} {settings.labels['task']}"


def _show_model(group: PlannedGroup) -> None:
    settings = group.runs[0].settings
    shape, (_, source) = model_shape(settings.model), model_config(settings.model)
    size = f"{shape.parameters:,} parameters, " if shape else ""
    say(f"model {settings.labels['model']}: {size}{source}")


def name_of(settings: Settings) -> str:
    """A run in the words of its labels."""
    labels = settings.labels
    ratio = f"kv_ratio={labels['kv_ratio']:g}" if labels.get("kv_ratio") is not None else ""
    words = (labels["model"], labels["task"], labels["method"], ratio, labels["setting"])
    return " ".join(str(word) for word in words if word)
