"""The learning rate of a step, a function of the run's settings and the step alone."""

import math

from moeplan.run_config import RunConfig


def learning_rate(run: RunConfig, step: int) -> float:
    """Linear warm-up to the peak, then as ``lr_schedule`` says; ``step`` counts from 0.

    ``cosine`` and ``linear`` fall to ``min_lr_frac`` of the peak by the end of ``lr_decay_steps`` (0: of the run) and
    stay there; ``wsd`` stays at the peak and falls linearly over the last ``lr_cooldown_steps`` of those;
    ``constant`` stays.
    """
    if step < run.lr_warmup_steps:
        return run.lr * (step + 1) / run.lr_warmup_steps
    if run.lr_schedule == "constant":
        return run.lr
    end = run.lr_decay_steps or run.steps
    begin = max(run.lr_warmup_steps, end - run.lr_cooldown_steps) if run.lr_schedule == "wsd" else run.lr_warmup_steps
    progress_frac = min(1.0, max(0, step - begin) / max(1, end - begin))
    height_frac = 0.5 * (1 + math.cos(math.pi * progress_frac)) if run.lr_schedule == "cosine" else 1 - progress_frac
    return run.lr * (run.min_lr_frac + (1 - run.min_lr_frac) * height_frac)
