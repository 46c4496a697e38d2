"""A planner's run as an AG-UI event stream, for CopilotKit, assistant-ui and other front ends; extra ``ag-ui``.

Two doors, each the body of an HTTP endpoint:

- `ag_ui_events`: the run lives in this process. The front end holds the conversation;
  ``waiting`` holds the checkpoint of the run that waits on a thread.
- `ag_ui_kept_events`: the run is kept in a store, and a thread is a window on it beside
  the inbox and the command line; ``samples/step19_ag_ui.py`` is a complete service, and
  ``samples/front_end`` its page:

      @service.post("/agent")
      async def agent(run_input: RunAgentInput) -> StreamingResponse:
          encoder = EventEncoder()
          events = ag_ui_kept_events(runs, planner, kernel, run_input, by=user)
          return StreamingResponse((encoder.encode(one) async for one in events), media_type=encoder.get_content_type())

A run that waits for a person ends with one interrupt for each call and question. The
next input on the thread answers them, and the run continues:

- a call (``reason`` ``tool_call``): ``{"approved": true}``, ``{"approved": true,
  "editedArgs": {...}}`` with all arguments, or ``{"approved": false, "reason":
  "..."}``;
- a question of the model (``input_required``): ``{"answer": "..."}``;
- the status ``cancelled`` refuses the call, or the answer.

An interrupt's ``responseSchema`` describes this, its ``metadata`` names function,
arguments and roles, and its ``id`` is the call's fingerprint, to which an answer binds.
Interrupts without an answer stay open.

**Clients.** One of the protocol 1.0 names its version in its input. To an older one,
such as ``@ag-ui/client`` 0.0.59 in CopilotKit and assistant-ui, a run that was ended
without an answer is a text that says why, and a success: it does not know the outcome
``cancelled``, nor ``pendingToolCallIds``.

**Trust.** The journal stays on the server: a browser decides the calls that wait on its
thread, and cannot add a call, an approval or a result. In memory, give each user a
separate ``waiting``, or unguessable thread ids; there the browser supplies the
conversation before a new run, as text; its system messages are dropped.

**Tools of the front end** (``RunAgentInput.tools``) are offered in the plugin
``ag_ui``. A call of one ends the run as a success that names it as pending; the tool
message in the next input is its result. A user message instead abandons the run in
memory, and begins a new one; a kept run continues without the result. Over a store, the
planner of every worker needs `defer_front_end_tools` as an interceptor; without it the
tools are not offered.

    events   the one translation of facts to events, for both doors
    inputs   what a front end sends: answers, tools, the conversation
"""

from importlib.util import find_spec

if find_spec("ag_ui") is None:
    raise ImportError(
        "planner_ext.ag_ui needs the extra ag-ui: pip install 'planner-ext[ag-ui]'"
    )

from planner_ext.ag_ui.inputs import defer_front_end_tools
from planner_ext.ag_ui.kept import ag_ui_kept_events
from planner_ext.ag_ui.memory import ag_ui_events

__all__ = ["ag_ui_events", "ag_ui_kept_events", "defer_front_end_tools"]
