"""Step 6: a policy decides some calls, a person the rest.

The policy is in step06_policy.yaml: logs may be deleted, any other file only if you approve. While you are asked, no
call of the model's reply has run, not even the allowed ones, and no connection is held open.

Run it:

    python samples/step06_approval.py

Output, if you answer y:

    3 files while you decide.
    folder-delete {"name": "thesis.docx"} - Only logs are deleted without asking. Run it? [y/n]
    debug.log is deleted.
    thesis.docx is deleted.

Output, if you answer n:

    3 files while you decide.
    folder-delete {"name": "thesis.docx"} - Only logs are deleted without asking. Run it? [y/n]
    debug.log is deleted.
    The call was refused and did not run: The user wants to keep it.
"""

import asyncio
import json
from pathlib import Path
from tempfile import TemporaryDirectory

from model import chat_service, results
from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function

from planner_ext import (
    ApprovalPolicy,
    Approve,
    Deny,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
)
from planner_ext.hitl_manager import PendingCall
from planner_ext.testing import ScriptedReply, ScriptedRequest, call, calls, say


class Folder:
    """The files of one folder."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @kernel_function(name="list", description="The names of the files.")
    def names(self) -> list[str]:
        """List them in alphabetical order."""
        return sorted(file.name for file in self._path.iterdir())

    @kernel_function(description="Delete a file for good.")
    def delete(self, name: str) -> str:
        """Delete a file of this folder, and of no other: a name with a path in it is not one of its names."""
        if name not in self.names():
            raise FileNotFoundError(f"There is no file {name}.")
        (self._path / name).unlink()
        return f"{name} is deleted."


async def clean_up(path: Path) -> None:
    kernel = Kernel()
    kernel.add_service(chat_service(script))
    folder = Folder(path)
    kernel.add_plugin(folder, "folder")

    policy = ApprovalPolicy.from_yaml(Path(__file__).with_name("step06_policy.yaml"))
    options = FunctionCallingStepwisePlannerOptions(interceptors=[policy], plan=False)
    planner = FunctionCallingStepwisePlanner("chat", options)

    result = await planner.invoke(kernel, "Make room: delete every file that is not a photo.")
    while result.status == "paused":
        print(f"{len(folder.names())} files while you decide.")
        decisions = {waiting.id: ask(waiting) for waiting in result.pending}
        result = await planner.resume(kernel, result.checkpoint, decisions)
    print(result.final_answer)


def ask(waiting: PendingCall) -> Approve | Deny:
    """Show exactly what would run; any answer but yes is a no."""
    arguments = json.dumps(dict(waiting.arguments))  # which escapes what a terminal would not show
    print(f"{waiting.fully_qualified_name} {arguments} - {waiting.prompt} Run it? [y/n]")
    return Approve(by="you") if input().strip().lower() == "y" else Deny("The user wants to keep it.", by="you")


def main() -> None:
    with TemporaryDirectory() as path:
        for name in ("beach.jpg", "debug.log", "thesis.docx"):
            Path(path, name).write_text("...", encoding="utf-8")
        asyncio.run(clean_up(Path(path)))


# The replies of the scripted model. It is rash, and reports the result of each call.


def delete_the_rest(request: ScriptedRequest) -> ScriptedReply:
    names = json.loads(results(request)[0])
    return calls(*(call("folder-delete", {"name": name}) for name in names if not name.endswith(".jpg")))


def report(request: ScriptedRequest) -> ScriptedReply:
    return say("\n".join(results(request)[1:]))


script = [call("folder-list"), delete_the_rest, report]

if __name__ == "__main__":
    main()
