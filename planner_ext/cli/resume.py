"""``planner-ext resume``: resumes a run that is kept in a file, in any process."""

from collections.abc import Sequence

from planner_ext import FunctionCallingStepwisePlanner
from planner_ext.cli.ask import terminal_prompt
from planner_ext.cli.checkpoint_file import CheckpointFile
from planner_ext.cli.options import ResumeArgs, RunOptions
from planner_ext.cli.run import CliRun, Job, Result, execute
from planner_ext.cli.text import say
from planner_ext.core.state import TRANSITIONS, State
from planner_ext.core.termination import cancellation_reason
from planner_ext.errors import DecisionRefusedError, PlannerInvalidConfigurationError
from planner_ext.hitl_manager import Approve, Decision, Deny, Supply
from planner_ext.planner.result import result_of
from planner_ext.sk.approval import pending_calls
from planner_ext.sk.arguments import InvalidArguments, parse_object

__all__ = ["resume_run"]


def resume_run(args: ResumeArgs, options: RunOptions) -> int:
    """Resume or cancel a run; return the exit code."""
    with CheckpointFile(args.file).locked() as file:
        checkpoint = file.read()
        state = checkpoint.state()
        decisions = _decisions(args, state, options.by)
        cut_short = (state.phase, "Resumed") not in TRANSITIONS  # its process was killed while calls of a batch ran
        run = CliRun(options, stream=options.stream, facts=checkpoint.facts, file=file)

        def first() -> Result:
            if args.cancel is not None:
                if cut_short:
                    return run.stopped(cancellation_reason(options.by or "", args.cancel))
                return FunctionCallingStepwisePlanner().cancel(checkpoint, by=options.by or "", reason=args.cancel)
            run.reopen(state)
            if cut_short:
                return _recovered(run, decisions)
            if pending_calls(state) and not decisions and args.max_iterations is None:
                return result_of(state, checkpoint.facts)
            return run.resume(decisions, max_iterations=args.max_iterations)

        if args.cancel is not None and decisions:
            raise PlannerInvalidConfigurationError(
                "--cancel ends the run; leave --approve, --deny, --edit and --answer out."
            )
        asks = not decisions and args.cancel is None
        prompt = terminal_prompt(run.console, by=options.by) if asks else None
        return execute(Job(run=run, first=first, prompt=prompt))


def _recovered(run: CliRun, decisions: dict[str, Decision]) -> Result:
    """Recover a run whose process died during its calls: a started call that may not run again waits, in doubt.

    The command's decisions were made without that knowledge, and are not taken.
    """
    result = run.resume({})
    if decisions and result.pending:
        text = "This run was cut short while its calls ran; nothing that was decided now was taken. Decide again."
        say(run.console, text, "yellow")
    return result


def _decisions(args: ResumeArgs, state: State, by: str | None) -> dict[str, Decision]:
    """Read the decisions from the command line.

    Raises:
        DecisionRefusedError: If a call is decided twice, or edited arguments are not a JSON object.
    """
    waiting = [call.id for call in pending_calls(state)]
    denied = (_split(text, waiting) for text in args.deny or ())
    answered = (_split(text, waiting) for text in args.answer or ())
    edited = (_split(text, waiting) for text in args.edit or ())
    given: list[tuple[str, Decision]] = [
        *((name, Approve(by=by)) for name in args.approve or ()),
        *((name, Deny(reason, by=by)) for name, reason in denied),
        *((name, Supply(answer, by=by)) for name, answer in answered),
        *((name, Approve(arguments=_arguments(name, written), by=by)) for name, written in edited),
    ]
    decisions: dict[str, Decision] = {}
    for name, decision in given:
        if name in decisions:
            raise DecisionRefusedError(f"The call {name!r} is decided twice. Decide it once.")
        decisions[name] = decision
    return decisions


def _arguments(name: str, written: str) -> dict[str, object]:
    arguments = parse_object(written)
    if isinstance(arguments, InvalidArguments) or not written:
        problem = arguments.message if isinstance(arguments, InvalidArguments) else "are missing."
        raise DecisionRefusedError(f"--edit {name}=JSON: the arguments {problem}")
    return arguments


def _split(text: str, waiting: Sequence[str]) -> tuple[str, str]:
    """Split ``ID=REST``; the id of a pending call may contain an equals sign."""
    name = max((known for known in waiting if text.startswith(f"{known}=")), key=len, default=text.partition("=")[0])
    return name, text[len(name) + 1 :]
