# /// script
# requires-python = ">=3.11"
# dependencies = ["openai==3.57.0", "httpx>=0.27"]
# [tool.planner-ext]
# name = "bare loop"
# short = "bare"
# package = "openai"
# offers = ["veto"]
# ///
"""The loop that people write by hand around the openai package, in the environment of its own that it needs."""

import json

from common import DESCRIPTIONS, PARAMETERS, Report, Trial, main
from openai import AsyncOpenAI


async def run(trial: Trial, report: Report) -> None:
    """Ask, run what is called, and offer no functions in the last request."""
    if trial.delegates:
        report.status = "not offered"
        return
    functions = trial.functions()
    tools = [_described(name) for name in trial.names]
    messages = [{"role": "user", "content": trial.goal}]
    report.user(trial.goal)
    report.follow_up = lambda text: _continue(trial, [*messages, {"role": "user", "content": text}])
    async with AsyncOpenAI(base_url=trial.model_url, api_key="none", max_retries=0) as client:
        while report.charged < trial.max_iterations:
            report.charged += 1
            last = report.charged == trial.max_iterations
            offered = {} if last else {"tools": tools}
            completion = await client.chat.completions.create(model="scripted", messages=messages, **offered)
            reply = completion.choices[0].message
            messages.append(reply.model_dump(exclude_none=True))
            calls = reply.tool_calls or []
            made = [(call.id, call.function.name, call.function.arguments) for call in calls]
            report.reply(reply.content or "", made)
            report.tokens = completion.usage.total_tokens if completion.usage else None
            if not calls:
                report.status = "limit_reached" if last else "answered"
                report.answer = reply.content or reply.refusal or ""
                return
            for call in calls:
                try:
                    if call.function.name == trial.vetoed:
                        raise PermissionError("this function may not run")
                    result = await functions[call.function.name](**json.loads(call.function.arguments))
                except Exception as error:
                    result = f"Error: {error}"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
                report.result(call.id, call.function.name, result)


async def _continue(trial: Trial, messages: list[dict[str, object]]) -> None:
    async with AsyncOpenAI(base_url=trial.model_url, api_key="none", max_retries=0) as client:
        await client.chat.completions.create(model="scripted", messages=messages)


def _described(name: str) -> dict[str, object]:
    parameter = PARAMETERS[name]
    parameters = {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]}
    function = {"name": f"desk-{name}", "description": DESCRIPTIONS[name], "parameters": parameters}
    return {"type": "function", "function": function}


main(run)
