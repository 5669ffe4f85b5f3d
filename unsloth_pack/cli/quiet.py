"""What other libraries write to the terminal, kept to what a user can act on."""

import logging
import sys
import warnings


def quieten_imports() -> None:
    """Hide what libraries say while they are imported, such as warnings of missing kernels."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # with int8, it warns in every layer and step


def quieten(show_bars: bool = True) -> None:
    """Hide what libraries say to each other, and progress bars where nobody watches."""
    import datasets
    import transformers

    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it reports every retry before the error
    if not (show_bars and sys.stderr.isatty()):
        datasets.disable_progress_bars()
        transformers.utils.logging.disable_progress_bar()
