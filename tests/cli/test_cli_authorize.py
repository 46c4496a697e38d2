"""Who may do something from the command line: the hook that the factory of ``--app`` gives, and the roles of a call."""

from pathlib import Path

import pytest

from support.command_line import Command

BANK = """
from types import SimpleNamespace

from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function

from planner_ext import (
    ApprovalSettings,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    requires_approval,
)
from planner_ext.testing import ScriptedChatCompletion, call, say

STAFF = {"ann": "manager", "intern": "intern"}


class Bank:
    @requires_approval(roles=["manager"])
    @kernel_function
    def pay(self, amount: int) -> str:
        with open("paid", "a") as file:
            file.write(f"{amount}\\n")
        return "paid"


def of_staff(request):
    assert not request.verified, "a name on a command line is typed"
    roles = ("manager",) if request.call is None else request.call.roles
    return STAFF.get(request.by) in roles or f"that takes one of: {', '.join(roles)}"


def kernel():
    made = Kernel()
    made.add_service(ScriptedChatCompletion([call("bank-pay", {"amount": 5}, id="pay"), say("Paid.")]))
    made.add_plugin(Bank(), "bank")
    return made


def planner(**options):
    return FunctionCallingStepwisePlanner(options=FunctionCallingStepwisePlannerOptions(plan=False, **options))


def app():
    return SimpleNamespace(planner=planner(), kernel=kernel(), authorize=of_staff)


async def as_mapping():
    return {"planner": planner(), "kernel": kernel(), "arguments_for": None, "authorize": of_staff}


def in_planner():
    return planner(approval=ApprovalSettings(authorize=of_staff)), kernel()


def without():
    return planner(), kernel()


def bare():
    return kernel()


def no_hook():
    return SimpleNamespace(planner=planner(), kernel=kernel(), authorize="ann")


def done():
    made = Kernel()
    made.add_service(ScriptedChatCompletion(lambda _: say("Resumed.")))
    made.add_plugin(Bank(), "bank")
    return SimpleNamespace(planner=planner(), kernel=made, authorize=of_staff)
"""

STORE = ("--store", "runs.db")
CALL = "a/0/pay"


@pytest.fixture(autouse=True)
def bank(here: Path) -> None:
    (here / "bank.py").write_text(BANK)


@pytest.fixture(params=["app", "as_mapping", "in_planner"])
def app(request: pytest.FixtureRequest) -> tuple[str, str]:
    """The option that names an application with a hook: in an object, in a mapping, or in its planner."""
    return "--app", f"bank:{request.param}"


def waiting(command: Command, *app: str) -> None:
    """Have a call wait whose run began under what an application gives."""
    assert (
        command("runs", "submit", "Pay.", "--create", "--run-id", "a", *STORE).code == 0
    )
    assert command("worker", *STORE, *app, "--once").code == 0


def test_an_intern_does_not_decide_for_a_manager(
    command: Command, here: Path, app: tuple[str, str]
) -> None:
    """Neither without the application, nor by name with it; the manager does, and the worker pays once."""
    waiting(command, *app)
    for decide in ("approve", "deny"):
        refused = command("approvals", decide, CALL, "--by", "intern", *STORE)
        assert refused.code == 2
        assert (
            "the run began under the authorize hook bank.of_staff, which this process lacks"
            in refused.words
        )
        refused = command("approvals", decide, CALL, "--by", "intern", *STORE, *app)
        assert refused.code == 2
        assert (
            f"'intern' may not decide '{CALL}': that takes one of: manager."
            in refused.words
        )
    refused = command("worker", *STORE, "--app", "bank:without", "--once")
    assert (refused.code, (here / "paid").exists()) == (0, False)
    assert command("approvals", "approve", CALL, "--by", "ann", *STORE, *app).code == 0
    refused = command("worker", *STORE, "--app", "bank:without", "--once")
    assert refused.code == 2
    assert "the authorize hook bank.of_staff" in refused.words
    assert command("worker", *STORE, *app, "--once").code == 0
    assert (here / "paid").read_text() == "5\n"


def test_roles_without_any_hook_refuse_to_be_decided(
    command: Command, here: Path
) -> None:
    """The shipped worker and the shipped command have nothing that checks roles: the way out is ``--app``."""
    waiting(command, "--app", "bank:without")
    refused = command("approvals", "approve", CALL, "--by", "intern", *STORE)
    assert refused.code == 2
    assert (
        "it is for manager to decide, and nothing here can check roles" in refused.words
    )
    assert "--app" in refused.words
    assert command("worker", *STORE, "--app", "bank:without", "--once").code == 0
    assert not (here / "paid").exists()


ACTIONS: dict[str, tuple[str, ...]] = {
    "cancel": ("runs", "cancel", "a"),
    "delete": ("runs", "delete", "a", "--force"),
    "set the budget of": ("runs", "budget", "a", "--max-iterations", "9"),
    "write to": ("runs", "say", "a", "Hurry."),
    "fork": ("runs", "fork", "a", "--at", "-1"),
    "resume": ("runs", "resume", "a", "--kernel", "bank:kernel"),
}


@pytest.mark.parametrize("action", ACTIONS)
def test_every_action_asks_the_application(command: Command, action: str) -> None:
    """Without the hook it is refused at once, with it by name; the run is as it was."""
    waiting(command, "--app", "bank:app")
    before = command("runs", "show", "a", *STORE, "--json").document
    refused = command(*ACTIONS[action], "--by", "ann", *STORE)
    assert (refused.code, refused.out) == (2, "")
    assert (
        f"'ann' may not {action} run 'a': the run began under the authorize hook bank.of_staff"
        in refused.words
    )
    refused = command(*ACTIONS[action], "--by", "intern", *STORE, "--app", "bank:app")
    assert (refused.code, refused.out) == (2, "")
    assert (
        f"'intern' may not {action} run 'a': that takes one of: manager."
        in refused.words
    )
    assert command("runs", "show", "a", *STORE, "--json").document == before
    let_in = command(*ACTIONS[action], "--by", "ann", *STORE, "--app", "bank:app")
    assert let_in.code in (0, 4), let_in.err


def test_an_import_and_pruning_ask_the_application(command: Command) -> None:
    """A run that began under a hook is bound in its copy, and is not swept away."""
    waiting(command, "--app", "bank:app")
    assert command("runs", "export", "a", "--output", "a.json", *STORE).code == 0
    for app, said in (
        ((), "began under the authorize hook"),
        (("--app", "bank:app"), "that takes one of: manager"),
    ):
        refused = command(
            "runs", "import", "a.json", "--store", "other.db", "--by", "intern", *app
        )
        assert refused.code == 2
        assert "may not import run 'a'" in refused.words and said in refused.words
    assert (
        command(
            "runs",
            "import",
            "a.json",
            "--store",
            "other.db",
            "--by",
            "ann",
            "--app",
            "bank:app",
        ).code
        == 0
    )
    assert (
        command("runs", "cancel", "a", "--by", "ann", *STORE, "--app", "bank:app").code
        == 0
    )
    prune = ("runs", "prune", "--older-than", "0s", "--status", "stopped", *STORE)
    refused = command(*prune, "--by", "ann")
    assert refused.code == 2
    assert "may not delete run 'a'" in refused.words
    assert command(*prune, "--by", "ann", "--app", "bank:app").out == "1 run deleted.\n"


def test_lists_and_documents_say_who_may_decide(command: Command) -> None:
    """In words and as JSON, wherever a waiting call is shown."""
    waiting(command, "--app", "bank:app")
    assert "for manager to decide" in command("approvals", "list", *STORE).out
    assert command("approvals", "list", *STORE, "--json").document[0]["roles"] == [
        "manager"
    ]
    assert "roles        manager" in command("approvals", "show", CALL, *STORE).out
    assert "bank-pay (manager)" in command("runs", "list", *STORE).out
    assert "manager" in command("runs", "show", "a", *STORE).err
    assert command("runs", "show", "a", *STORE, "--json").document["pending"][0][
        "roles"
    ] == ["manager"]
    assert command("runs", "result", "a", *STORE, "--json").document["pending"][0][
        "roles"
    ] == ["manager"]


def test_a_submitted_run_is_bound_before_anybody_drives_it(
    command: Command, here: Path
) -> None:
    """To a policy, to ``--ask-all`` and to the application's hook: a worker that lacks one refuses it by name."""
    (here / "policy.yaml").write_text(
        "default: ask\nrules:\n  - {function: pay, action: deny}\n"
    )
    bound = {
        "policy": (("--policy", "policy.yaml"), "the approval policy"),
        "ask": (("--ask-all",), "(unmatched)"),
        "hook": (("--app", "bank:app"), "the authorize hook bank.of_staff"),
    }
    for name, (options, said) in bound.items():
        assert (
            command(
                "runs", "submit", "Pay.", "--create", "--run-id", name, *STORE, *options
            ).code
            == 0
        )
        refused = command("worker", *STORE, "--app", "bank:without", "--once")
        assert refused.code == 2
        assert said in refused.words and "Nothing ran" in refused.words
        assert (
            command("runs", "list", *STORE, "--json").document[0]["status"] == "queued"
        )
        worked = command(
            "worker",
            *STORE,
            *(options if name == "hook" else ("--app", "bank:without", *options)),
            "--once",
        )
        assert worked.code == 0, worked.err
    statuses = {
        run["run_id"]: run["status"]
        for run in command("runs", "list", *STORE, "--json").document
    }
    assert statuses == {"policy": "answered", "ask": "paused", "hook": "paused"}
    assert not (here / "paid").exists()
    again = command("runs", "submit", "Pay.", "--create", "--run-id", "ask", *STORE)
    assert again.code == 2
    assert "under other guards" in again.words


def test_an_invalid_hook_is_named(command: Command) -> None:
    """Exit code 2 before anything is done."""
    refused = command("worker", *STORE, "--app", "bank:no_hook", "--once")
    assert refused.code == 2
    assert (
        "authorize must be a function of the request that returns True" in refused.words
    )


def test_a_worker_of_a_bare_kernel_says_which_planner_it_has(command: Command) -> None:
    """Default options, which a reader of the factory does not see."""
    said = command("worker", *STORE, "--app", "bank:bare", "--once")
    assert (said.code, "a planner with default options" in said.words) == (0, True)
