"""The entry point of ``planner-ext`` and of ``python -m planner_ext``."""

import logging
import sys

_LONGEST_NAME = 80
"""Characters of a file's name in a message."""


def main() -> None:
    """Run the command line; without its extra, say how to install it."""
    try:
        from planner_ext.cli.app import app  # noqa: PLC0415  (so that a missing extra is a message)
        from planner_ext.cli.streams import standard_streams  # noqa: PLC0415  (as above)
        from planner_ext.cli.text import Terminal  # noqa: PLC0415  (as above)
        from planner_ext.core.errors import PlannerExtError  # noqa: PLC0415  (as above)
    except ModuleNotFoundError as error:
        if error.name not in ("rich", "typer"):
            raise
        print(
            f'planner-ext needs {error.name}. Install it with: pip install "planner-ext[cli]"',
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    # Semantic Kernel logs, with tracebacks, the faults that the progress shows. Only the last-resort handler is
    # silenced: a kernel's own module may still configure logging.
    logging.lastResort = logging.NullHandler()
    try:
        with standard_streams():
            app(prog_name="planner-ext")
    except PlannerExtError as error:
        Terminal(sys.stderr).complain(str(error))
        raise SystemExit(2) from None
    except OSError as error:  # of a file that an option names: too long a name, a folder, no permission
        if not error.filename:
            raise
        name = str(error.filename)
        shown = name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}..."
        Terminal(sys.stderr).complain(
            f"{shown} cannot be used: {error.strerror}. Name another file."
        )
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
