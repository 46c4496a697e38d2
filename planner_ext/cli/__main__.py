"""The entry point of ``planner-ext`` and of ``python -m planner_ext.cli``."""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line; without its extra, say how to install it and exit with 2."""
    try:
        from planner_ext.cli.app import app  # noqa: PLC0415  (so that a missing extra is told in words)
    except ModuleNotFoundError as error:
        if error.name not in ("rich", "typer"):
            raise
        print(
            f'planner-ext needs {error.name}, which is not installed: pip install "planner-ext[cli]"', file=sys.stderr
        )
        raise SystemExit(2) from None
    app(prog_name="planner-ext")


if __name__ == "__main__":
    main()
