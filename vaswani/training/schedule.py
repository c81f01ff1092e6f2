"""The paper's learning-rate schedule."""


def inverse_sqrt_factor(step: int, warmup_steps: int) -> float:
    """Return the learning rate of an update as a fraction of the peak.

    Parameters
    ----------
    step : int
        Number of the update; the first is 1.
    warmup_steps : int
        Number of updates over which the learning rate rises.

    Returns
    -------
    float
        min(step / warmup_steps, sqrt(warmup_steps / step)).

    Notes
    -----
    Section 5.3: `d_model^-0.5 min(step^-0.5, step warmup^-1.5)` is this times its peak, `(d_model warmup)^-0.5`.
    """
    return min(step / warmup_steps, (warmup_steps / step) ** 0.5)


def peak_learning_rate(d_model: int, warmup_steps: float) -> float:
    """Return the highest learning rate of the paper's schedule.

    Parameters
    ----------
    d_model : int
        Width of the model.
    warmup_steps : float
        Number of updates over which the learning rate rises.

    Returns
    -------
    float
        (d_model warmup_steps)^-0.5.

    Notes
    -----
    Section 5.3.
    """
    return (d_model * warmup_steps) ** -0.5


__all__ = ["inverse_sqrt_factor", "peak_learning_rate"]
