"""The errors a user may meet. Each is one line: what is wrong, the value, the remedy."""


class InputError(ValueError):
    """Bad input or arguments. The command line prints it as one line and exits with 2."""


class UnsupportedArchitecture(InputError):
    """No patch is declared for this model type."""


class BackendUnavailable(InputError):
    """The attention backend that was asked for cannot run on this device, dtype, head size or model."""


class LeakFound(RuntimeError):
    """Documents of a packed row reach each other. Training must not begin."""


class RunStopped(RuntimeError):
    """Something ended a run that had begun. The command line prints what, how to go on, and exits with 1."""
