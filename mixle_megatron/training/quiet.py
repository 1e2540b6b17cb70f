"""Keeping what libraries print out of a run's own output, where it says nothing to its user."""

from __future__ import annotations

import logging
import warnings

LOGGERS = {
    "megatron.core": "names deprecated classes and each configuration at every start",
    "torch.utils.cpp_extension": "says that there is no CUDA runtime, which the run itself says better",
}

WARNINGS = {
    r"megatron\.": "optional packages that are absent; doctor is where that is said",
    r"torch\.distributed": "deprecated names of collectives that Megatron calls",
}


def quieten() -> None:
    """Silence the messages of :data:`LOGGERS` and :data:`WARNINGS`; errors still come through."""
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    for module in WARNINGS:
        warnings.filterwarnings("ignore", module=module)
    warnings.filterwarnings("ignore", message=r".*\.grad attribute of a Tensor that is not a leaf.*")
