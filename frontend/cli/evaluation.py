"""Evaluation as far as it is installed: a wheel may be built without what measures and simulates."""

from __future__ import annotations


def check_evaluation(feature: str) -> None:
    """Raise ValueError, which says that `feature` is not installed, if evaluation is not."""
    try:
        import quire.frontend.evaluation  # noqa: F401
    except ModuleNotFoundError:
        raise ValueError(
            f"{feature} is not installed: this installation was made without quire.frontend.evaluation; install a "
            "wheel that has it"
        ) from None
