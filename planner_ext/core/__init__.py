"""The pure core: values, facts, and the two functions that make a run out of them.

    apply(state, fact) -> state           `planner_ext.core.fold`: what happened becomes state
    next_action(state) -> action          `planner_ext.core.machine`: state becomes what to do next

Standard library only; no clock, no randomness, no IO, no logging, and nothing of Semantic Kernel.

Where is what
    The floors, from the bottom: ``core`` decides, ``approval`` says what binds a decision, ``engine`` performs and
    records, ``timeline`` draws pages, ``durable`` keeps runs in a store, ``budgets`` are limits that runs share, ``sk``
    adapts to Semantic Kernel. On these stand the doors, ``planner`` among them, and the other modules of the root, then
    ``compare``, ``cli`` and ``inbox``. ``testing`` scripts models. Paths are relative to ``planner_ext``.

    a run                 prepared by a door with `prepare` in ``sk/run/context.py``, driven by `Engine.run` in
                          ``engine/engine.py``: `next_action` says what to do, the engine does it and records a fact
    a kept run            claimed and driven by ``durable/worker.py``, which calls `KeptRun` in ``planner/kept.py``; its
                          journal is written by ``durable/writer.py`` and read by ``durable/store.py``
    a request             sent by `KernelChat.ask` in ``sk/chat/round_trip.py``, with the offer of
                          ``sk/functions/toolset.py``
    a reply               made one message and its calls by ``sk/chat/reply.py``; its tokens are read by
                          ``sk/messages.py``. The engine records it as `ModelReplied`; what one without calls is, the
                          answer or a question, `_judge` in ``core/machine.py`` decides
    a call                asked by the model: `RequestedCall` in ``core/values.py``; in the state: `Call` in
                          ``core/state.py``; outside, waiting or not: `ToolCall` in ``approval/decisions.py``
    a decision            of one chain of interceptors: ``engine/gate.py``; of all chains around a call, of approvers,
                          and about an edit: ``engine/review.py``. Of a person: checked by ``sk/run/resume.py``, which
                          makes it a fact; who may decide is asked in ``engine/authorization.py``. In a store it waits
                          in the row of the call, where ``durable/approvals.py`` puts it, until ``durable/worker.py``
                          takes it
    a deferred call       a `CallDecided` with the verdict ``defer``; ``approval/waiting.py`` finds those of a state.
                          In a store also a row of ``planner_approvals``: written by ``durable/writer.py`` when the
                          run pauses, read as `PendingApproval` in ``durable/records.py``
    a grant               a row, given by ``durable/approvals.py``. Where ``durable/writer.py`` writes the row of a
                          call, `using_steps` in ``durable/grants.py`` also decides it; a worker takes that decision
    a nested run          a `State` in the `Call` that makes it (``core/state.py``). If it pauses, `_leave_function` in
                          ``sk/run/context.py`` leaves its function, ``engine/batch.py`` records `CallLeft`, and
                          `_continue_inside` in ``core/machine.py`` pauses the run around, or calls the function again
    a limit               declared by `Budget` in ``core/limits.py``, and checked
                          - before a request and before a batch, and on a reply's calls, in ``core/machine.py``;
                          - before a filter starts a call again, by `limit_of_restart` there, in ``engine/batch.py``;
                          - of time, while anything is awaited, by `Recorder.in_time` in ``engine/journal.py``;
                          - of a result, when it is recorded there; ``core/results.py`` finds where it is cut;
                          - of budgets that runs share, in ``engine/shared.py``;
                          - of a function's own requests, calls and runs, by `Tab` in ``core/accounts.py``.
                          Under ``on_limit="raise"`` ``sk/run/outcome.py`` raises it
    the final answer      ``core/machine.py`` asks for its check, ``engine/engine.py`` records what
                          ``sk/run/answers.py`` finds: its form, then the application's ``check_answer``
    what a journal tells  `TimelineReader` in ``engine/timeline.py``
    an option             ``sk/run/options.py``, which lists what to edit
    what an import loads  ``BESIDE_THE_LOOP`` in ``tests/test_structure.py``: what the planner's import leaves out

Glossary
    door         A public entry point that prepares and drives runs; `planner_ext` lists them.
    run          One goal or one chat request, from its first fact to its end. It may pause and be resumed.
    nested run   A run that a function makes while its call runs. The call's run is the run around it, of whose limits
                 it takes.
    fact         Something that happened, as a frozen value. Facts are never changed or removed.
    journal      The facts of a run, in order, and the only truth: the state is computed from it.
    decision     What a person or an interceptor says of a call: approve, deny, supply a result, or defer.
    tab          What one running call takes of its run's limits.
    iteration    One request to the model, its reply, and the batch of calls in it, from 0. ``iterations`` counts
                 charged round trips: a connector may report more than one for a request.
    round        An iteration with a batch that was completed; ``use_attempts`` counts rounds.
    step         The rounds of the planner between two step messages.
    batch        The calls of one reply, until each has its result. At most one batch is open.
    activation   The work on a run in one process, from its start or resumption to its next pause, end or crash. As its
                 facts show it, it is called a life.
    claim        A worker's hold on a run in a store, until its lease ends.
    death        The end of a worker's process while it drove a run.
    in doubt     A call that an earlier activation started and did not finish: it may have taken effect.
    question     What a person is asked: whether a call may run, or, of the kind ``question``, what the model wants to
                 know. In a store the row that waits for the decision is an approval.
    fingerprint  What a decision binds to: digest of run, iteration, call, function, signature and arguments.

The state
    What the machine does in a phase depends on these fields. Reopened means: an ended run is resumed.

    field         set by                       consequence                                        cleared by
    ------------  ---------------------------  -------------------------------------------------  --------------------
    batch         ModelReplied with calls      its calls are reviewed, run and answered           its last result
    reply         ModelReplied without calls   it is judged: answer, question, close of a step    MessageAdded,
                                                                                                  Clarified, reopened
    final_answer  CallDecided                  the other calls are withheld, the run ends         MessageAdded, reopened
    stopping      StopRequested, end of a      open calls are withheld, no further request, the   Resumed
                  batch with ``ending``,       run ends ``stopped``
                  IterationCompleted
    ending        CallFinished (a filter       no further call of the batch starts; becomes       end of the batch,
                  terminates)                  ``stopping`` when the batch is complete            reopened
    limit         CallsWithheld for a limit    the next request offers no functions (``answer``)  Resumed with limits,
                                               or the run ends ``limit_reached``                  BudgetChanged; that of
                                                                                                  a shared budget also
                                                                                                  Resumed,
                                                                                                  SharedBudgetsChecked
    refused       SharedBudgetsChecked         counts as a limit that is used up; without         SharedBudgetsChecked,
                                               ``answer`` no request follows                      Resumed, BudgetChanged
    intent        ModelAsked, RequestFailed    after a request that failed the next one is        any fact but those
                                               recorded before it is sent                         that may wait
    reask         a batch with a denied call   the next request offers no functions; no limit     ModelReplied
    step_rounds   IterationCompleted           at ``rounds_per_step`` the next request offers no  MessageAdded (step,
                                               functions and its reply closes the step            revise, said)
    rounds        IterationCompleted           at ``use_attempts`` no functions are offered;      reopened
                                               ``attempts_limit`` says whether that is a limit
    checked       AnswerChecked                an answer without problem ends the run, another    ModelReplied
                                               one is asked for again
    structuring   MessageAdded (structure)     every request asks for the answer in its form:     another MessageAdded
                                               no functions, no questions, no steps
    asked         Clarified without an answer  the plain reply is not shown to the clarifier      ModelReplied
                                               again
    called        end of a batch               the iteration-completed callback is due            end of the next batch
    planned       Planned                      a resumed run does not ask for a plan again        never
    sticky        CallDecided with ``sticky``  the same question about later calls of the         never
                                               function, or with the same arguments, is answered
    cut           a result that was cut        the function that reads on in it is offered        never
    ended         Ended                        nothing, until the run is resumed                  Resumed

    These count towards limits; what counts in a row begins at 0 when the run is reopened:

    ``usage``              what all facts charge: the amounts of the `Budget`, and ``max_calls_per_function``
    ``calls_by_digest``    CallStarted, by function and arguments: ``max_repeated_calls``
    ``errors_in_row``      batches in a row with a failed, unknown or invalid call: ``max_consecutive_errors``
    ``denials_in_row``     batches in a row whose calls were all denied: ``max_repeated_denials``
    ``clarifications``     Clarified with an answer: ``max_clarifications``
    ``refusals``           MessageAdded (structure, revise): ten without a limit on round trips

What excludes what
    - ``batch`` and an unanswered ``reply`` are never set at once; a paused run has exactly one of them.
    - ``stopping`` wins over ``limit``. While it is set no request is made and no person is asked.
    - ``ending`` outlives the activation only if the run pauses or ends within its batch.
    - ``structuring`` excludes steps and questions.
    - ``limit`` is the first limit that was reached; a later one does not replace it.
    - ``reask`` and a closing step withhold functions without a limit: a run that ends then is ``answered``.
"""
