"""What a user's own code gives: the kernel of a run, and the application of ``--app``.

Invalid options raise `PlannerInvalidConfigurationError`. The user's kernel is never
changed.
"""

import difflib
import importlib
import inspect
import ipaddress
import os
import sys
import traceback
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from types import ModuleType
from typing import Any, cast
from urllib.parse import urlsplit

from openai import AsyncOpenAI
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.chat_completion_client_base import (
    ChatCompletionClientBase,
)
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.connectors.ai.open_ai.settings.open_ai_settings import (
    OpenAISettings,
)
from semantic_kernel.functions import KernelArguments

from planner_ext import FunctionCallingStepwisePlanner
from planner_ext.approval.decisions import Authorize, AuthorizeHooks, hooks_of
from planner_ext.core.errors import described, shown
from planner_ext.core.values import frozen
from planner_ext.durable.options import checked_hook
from planner_ext.errors import PlannerInvalidConfigurationError
from planner_ext.sk.chat.transport import kernel_with_service, select_service

SERVICE_ID = "planner-ext"
"""The service of ``--base-url`` and ``--model`` in the copy of the kernel."""


def start_factory(path: str, *, option: str = "--kernel") -> object:
    """Import what an option names, and call it if it is a function.

    Call this before an event loop runs, so that the user's code may run its own. The
    result may be awaitable.
    """
    found = imported_object(path, option=option)
    if isinstance(found, Kernel) or not callable(found):
        return found
    with _blamed(f"{option} {path}: the factory"):
        return found()


def imported_object(path: str, *, option: str) -> object:
    """Import the object that an option names; the current directory is importable.

    Args:
        path: ``module:name``, dots allowed in both.
        option: The option's name, for errors.
    """
    module_name, _, name = path.partition(":")
    if not module_name or not name or module_name.startswith(".") or "/" in module_name:
        raise PlannerInvalidConfigurationError(
            f"{option} must be module:factory, for instance shop.kernel:make_kernel; got {shown(path)}."
        )
    given = f"{option} {path}"
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    with _blamed(f"{given}: the module"):
        module = _imported(module_name)
    if module is None:
        hint = (
            f" Leave .py out: {module_name[:-3]}:{name}."
            if module_name.endswith(".py")
            else ""
        )
        problem = f"{given}: there is no module {module_name!r}, neither installed nor in {here}.{hint}"
        raise PlannerInvalidConfigurationError(problem)
    try:
        with _blamed(f"{given}: the module", AttributeError):
            return attrgetter(name)(module)
    except AttributeError:
        near = difflib.get_close_matches(
            name, [known for known in vars(module) if not known.startswith("_")]
        )
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        problem = f"{given}: the module {module.__name__!r} has no {name!r}.{hint}"
        raise PlannerInvalidConfigurationError(problem) from None


def _imported(name: str) -> ModuleType | None:
    """Import a module; None if it, or a parent package, does not exist."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        return None


async def awaited(made: object, path: str, *, option: str = "--kernel") -> object:
    """Await the result of `start_factory`, if it is awaitable."""
    with _blamed(f"{option} {path}: the factory"):
        if inspect.isawaitable(made):
            return cast("object", await made)
        return made


async def kernel_of(made: object, path: str) -> Kernel:
    """Return the kernel in the result of `start_factory`."""
    kernel = await awaited(made, path)
    if not isinstance(kernel, Kernel):
        raise PlannerInvalidConfigurationError(
            f"--kernel {path} must be a semantic_kernel.Kernel, or a function without arguments that returns one; "
            f"got {type(kernel).__name__}."
        )
    return kernel


@contextmanager
def _blamed(what: str, *passed: type[Exception]) -> Generator[None]:
    """Name the user's code that raised, and the line; ``passed`` exceptions stay."""
    try:
        yield
    except passed:
        raise
    except (Exception, SystemExit) as error:
        text = described(error).rstrip(": .")
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename != __file__
        ]
        where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
        raise PlannerInvalidConfigurationError(
            f"{what} raised {text}{where}."
        ) from error


def openai_service(base_url: str | None, model: str | None) -> OpenAIChatCompletion:
    """Make the service that ``--base-url`` and ``--model`` describe.

    Args:
        base_url: Default: ``OPENAI_BASE_URL``, or OpenAI.
        model: Default: ``OPENAI_CHAT_MODEL_ID``.
    """
    settings = OpenAISettings()
    model = model or settings.chat_model_id
    if not model:
        raise PlannerInvalidConfigurationError(
            "No model is named: give --model, or set OPENAI_CHAT_MODEL_ID."
        )
    name = "--base-url"
    url = base_url
    if url is None:
        name = "OPENAI_BASE_URL"
        url = os.environ.get("OPENAI_BASE_URL") or "https://api.openai.com/v1"
    host = _host(name, url)
    key = ""
    if settings.api_key:
        key = settings.api_key.get_secret_value()
    if not key and not _is_loopback(host):
        raise PlannerInvalidConfigurationError(
            f"No API key for {host}: set OPENAI_API_KEY. Only an endpoint on this machine needs none."
        )
    client = AsyncOpenAI(base_url=url, api_key=key or "none")
    return OpenAIChatCompletion(
        ai_model_id=model, service_id=SERVICE_ID, async_client=client
    )


def with_service(kernel: Kernel, service: ChatCompletionClientBase) -> Kernel:
    """Copy a kernel, and put a service in front of its own."""
    copied = kernel_with_service(kernel, service)
    selected, _ = select_service(copied, SERVICE_ID, KernelArguments())
    if selected is not service:
        raise PlannerInvalidConfigurationError(
            f"The kernel's own service selector takes {selected.service_id!r}, whatever --base-url and --model say. "
            "Leave them out, or let the selector take the service that it is asked for."
        )
    return copied


def _host(name: str, url: str) -> str:
    try:
        parts = urlsplit(url)
        host = (
            parts.hostname
            if parts.scheme in ("http", "https") and parts.port != 0
            else None
        )
    except ValueError:
        host = None
    if not host:
        raise PlannerInvalidConfigurationError(
            f"{name} must look like http://localhost:8000/v1; got {shown(url)}."
        )
    return host


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


_NAMES = ("planner", "kernel", "arguments_for", "authorize")


@frozen
class Application:
    """What the factory of ``--app`` gives.

    Attributes:
        planner: None where the factory gives a kernel alone.
        arguments_for: Returns a run's arguments, by its name.
        authorize: Says who may act on a run.
    """

    planner: FunctionCallingStepwisePlanner | None
    kernel: Kernel
    arguments_for: Callable[[str], Any] | None = None
    authorize: AuthorizeHooks = None

    @property
    def hooks(self) -> tuple[Authorize, ...]:
        """The application's hook, and its planner's."""
        return hooks_of(
            (
                *hooks_of(self.authorize),
                *hooks_of(self.planner and self.planner.authorize),
            )
        )


def started_application(path: str) -> Callable[[], Awaitable[Application]]:
    """Start the factory of ``--app``, before an event loop runs."""
    made = start_factory(path, option="--app")

    async def application() -> Application:
        return _application(await awaited(made, path, option="--app"), path)

    return application


def started_hook(path: str) -> Callable[[], Awaitable[tuple[Authorize, ...]]]:
    """Start the factory, for its hooks alone."""
    application = started_application(path)

    async def hooks() -> tuple[Authorize, ...]:
        return (await application()).hooks

    return hooks


def _application(made: object, path: str) -> Application:
    """Read a kernel, a tuple, or an object or mapping that names the parts."""
    parts: Mapping[str, Any] = {}
    given: tuple[object, ...] = (made,)
    if isinstance(made, Kernel):
        return Application(planner=None, kernel=made)
    if isinstance(made, tuple):
        given = cast("tuple[object, ...]", made)
        if len(given) in (2, 3):
            parts = dict(zip(_NAMES, given, strict=False))
    elif isinstance(made, Mapping):
        parts = cast("Mapping[str, Any]", made)
    else:
        parts = {name: getattr(made, name, None) for name in _NAMES}
    planner, kernel, arguments_for = (parts.get(name) for name in _NAMES[:3])
    is_planner = isinstance(planner, FunctionCallingStepwisePlanner | None)
    if (
        not isinstance(kernel, Kernel)
        or not is_planner
        or not (arguments_for is None or callable(arguments_for))
    ):
        names = ", ".join(type(part).__name__ for part in given) or "an empty tuple"
        raise PlannerInvalidConfigurationError(
            f"--app {path} must give (planner, kernel), (planner, kernel, arguments_for) or a kernel; got {names}. An "
            "object that names planner, kernel, arguments_for and authorize will do, too."
        )
    authorize = checked_hook(parts.get("authorize"))
    return Application(
        planner=planner, kernel=kernel, arguments_for=arguments_for, authorize=authorize
    )
