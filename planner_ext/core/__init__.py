"""The pure core: values, facts, and the two functions that make a run out of them.

    apply(state, fact) -> state           `planner_ext.core.fold`: what happened becomes state
    next_action(state) -> action          `planner_ext.core.machine`: state becomes what to do next

Standard library only; no clock, no randomness, no IO, no logging, and nothing of
Semantic Kernel.

Where is what
    The floors, from the bottom: ``core`` decides, ``approval`` says what binds a decision, ``engine`` performs and
    records, ``timeline`` draws pages, ``durable`` keeps runs in a store, ``budgets`` are limits that runs share, ``sk``
    adapts to Semantic Kernel. On these stand the doors, ``planner`` among them, and the other modules of the root, then
    ``compare``, ``cli`` and ``inbox``. ``testing`` scripts models. Paths below are relative to ``planner_ext``.

    a call                asked by the model: `RequestedCall` in ``core/values.py``; in the state: `Call` in
                          ``core/state.py``; as everybody outside sees it, waiting or not: `ToolCall` in
                          ``approval/decisions.py``, in a store its `PendingApproval`
    a deferred call       `Call.decided` with the verdict ``defer``: a `CallDecided` of the journal. `waiting_calls` in
                          ``approval/waiting.py`` finds those of a state, `pending_calls` shows them.
      ... without a store in the journal that a checkpoint holds: ``sk/checkpoint.py``
      ... of an agent     the last message of its thread says so; ``agent.py`` resumes or cancels the turn
      ... in a store      also a row of ``planner_approvals``: ``durable/writer.py`` opens it when the run pauses,
                          ``durable/records.py`` reads it
      a person's decision ``sk/run/resume.py``, `ResumeRequest.facts`, makes it a fact. In a store it waits in the row,
                          where ``durable/approvals.py`` puts it, until ``durable/worker.py`` takes it.
    a limit is declared   ``core/limits.py``, `Budget`
      ... checked         `next_action` in ``core/machine.py``, given what is left: `Left` in ``core/limits.py``.
                          `_review` checks ``max_calls_per_reply``; `limit_of_restart` checks a call that a filter
                          starts again. What functions and nested runs take: ``core/accounts.py``
      ... shared          ``budgets/budget.py``, `SharedBudget`; reserved by ``engine/shared.py`` before each request
                          and batch
      ... cuts a result   ``core/results.py``; `Recorder.record` in ``engine/journal.py`` notes where
      ... in flight       a limit of time interrupts: ``engine/journal.py``, `Recorder.in_time`
      ... raised          ``sk/run/outcome.py``, `raise_at_limit`
    what a journal tells  ``engine/timeline.py``, `TimelineReader`: iterations, calls with their outcomes, events;
                          drawn by ``timeline/page.py``
    an option             ``sk/run/options.py``, whose docstring lists what to edit; ``planner/options.py`` repeats it
    a kept run is driven  ``durable/worker.py``, `WorkerPool`, then `Runner.drive`; then `KeptRun` in
                          ``planner/run.py``
    the journal's table   ``planner_journal``: created by ``durable/database.py``, written by ``durable/writer.py``,
                          for an import or a fork by ``durable/archive.py``, read by ``durable/store.py``;
                          ``durable/sqlite.py`` and ``durable/postgres.py`` hold it
    what an import loads  ``BESIDE_THE_LOOP`` in ``tests/test_structure.py``: what the planner's import leaves out

Glossary
    door         A public entry point that prepares and drives runs; `planner_ext` lists them.
    run          One goal or one chat request, from its first fact to its end. It may pause and be resumed.
    nested run   A run that a function makes while its call runs. The call's run is the run around it, of whose limits
                 it takes.
    tab          What one running call takes of its run's limits: `Tab` in ``core/accounts.py``.
    iteration    One request to the model, its reply, and the batch of calls in it; numbered from 0. The plan request
                 comes before iteration 0. ``iterations`` (plural) counts charged round trips: a connector may report
                 more than one for a request.
    round        An iteration with a batch that was completed. ``use_attempts`` counts rounds.
    step         The rounds of the planner between two step messages; `Rules.rounds_per_step` limits them.
    batch        The calls of one reply, until each has its result. At most one batch is open.
    usage        The one amount: round trips, calls, tokens, cost and seconds. `cost_of` in ``core/facts.py`` is what a
                 fact charges. `State.usage` is the sum, with what calls recorded before it happened where their end is
                 not known.
    fact         Something that happened, as a frozen value. Facts are never changed or removed.
    journal      The facts of a run, in order. The state is the fold of the journal, so the journal is the only truth.
    activation   The work on a run in one process, from its start or resumption to its next pause or end. A process that
                 dies in between leaves the run to another activation.
    life         An activation as the facts show it: a start, a resumption or a crash begins one.
    claim        A worker's hold on a run in a store: `Claim` in ``durable/writer.py``. It ends with the worker's lease.
    fault        An exception of a kept run. A retry follows.
    death        The end of a worker's process while it drove a run, or what counts as one: see ``durable/worker.py``.
    in doubt     A call that an earlier activation started and did not finish: it may have taken effect.
    pause        A run that waits for a person. It executes nothing; it is a value that can be stored.
    decision     What a person or an interceptor says about a call: approve, deny, supply a result, or defer.
    fingerprint  Digest of run, iteration, call, function, its signature and the arguments; of a further question about
                 the call also its source and roles. A decision is valid only for the call with its fingerprint.

The state
    `State.phase` says which facts may follow (`planner_ext.core.state.TRANSITIONS`). What the machine does in a phase
    depends on these fields. Reopened means: an ended run is resumed.

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
    step_rounds   IterationCompleted           at ``rounds_per_step`` the next request offers no  MessageAdded (step)
                                               functions and its reply closes the step
    rounds        IterationCompleted           at ``use_attempts`` no functions are offered;      reopened
                                               ``attempts_limit`` says whether that is a limit
    checked       AnswerChecked                an answer without problem ends the run, another    ModelReplied
                                               one is asked for again
    structuring   MessageAdded (structure)     every request asks for the answer in its form:     never; a reopened run
                                               no functions, no questions, no steps               counts as having asked
    asked         Clarified without an answer  the plain reply is not shown to the clarifier      ModelReplied
                                               again
    called        end of a batch               the iteration-completed callback is due            end of the next batch
    planned       Planned                      a resumed run does not ask for a plan again        never
    sticky        CallDecided with ``sticky``  the same question about later calls of the         never
                                               function, or with the same arguments, is answered
    cut           a result that was cut        the function that reads on in it is offered        never
    ended         Ended                        nothing, until the run is resumed                  Resumed

    These count towards limits:

    ``usage``              what all facts charge: the amounts of the `Budget`, and ``max_calls_per_function``
    ``calls_by_digest``    CallStarted, by function and arguments: ``max_repeated_calls``
    ``errors_in_row``      batches in a row with a failed, unknown or invalid call: ``max_consecutive_errors``
    ``denials_in_row``     batches in a row whose calls were all denied: ``max_repeated_denials``
    ``clarifications``     Clarified with an answer: ``max_clarifications``

    What counts in a row begins at 0 when the run is reopened; the others are never reset.

Order
    Where several consequences are due, the first of this list is carried out:
    in a review:  stopping, too many calls in the reply, the calls without a decision;
    in a batch:   returned calls (denied, external) unless the run is stopping, final answer, stopping, ending, no round
                  trip left, calls that are ready, questions for the clarifier, pause;
    in a reply:   cut short, limit, a step's close or a question, no text, answer;
    in a request: final answer, answer in its form, stopping, limit, then `_request` decides what is offered.

What excludes what
    - ``batch`` and an unanswered ``reply`` are never set at once: phases REVIEWING and CALLING have a batch, ANSWERING
      has a reply, and a paused run has exactly one of them.
    - ``stopping`` wins over ``limit``: a run that is stopped ends ``stopped``. While it is set no request is made and
      no person is asked.
    - ``ending`` is cleared when its batch ends; it outlives the activation only if the run pauses or ends before.
    - ``structuring`` excludes steps and questions: only the answer, in its form, is still due.
    - ``checked`` and ``structuring`` are used only under `Rules.structured`, ``step_rounds`` only under
      `Rules.rounds_per_step`.
    - ``limit`` is the first limit that was reached; a later one does not replace it.
    - ``reask`` and a closing step withhold functions without a limit: a run that ends then is ``answered``.
"""
